"""CuPy on the fake GPU: what the fake refuses, how often a step waits for its GPU, the benchmark to its end."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
HERE = Path(__file__).parent
PER_STEP = {"skip": 1}
"""How often the host waits in a step, for numbers that it needs; in others it does not (docs/gpu.md)."""


@pytest.mark.parametrize(
    "wrong",
    [
        "with cupy.cuda.Device(1): stream.record()",
        "cupy.cuda.Device(1).use(); cupy.cuda.driver.launchKernel(of_device_0, *(1,) * 6, 0, stream.ptr, 0, 0)",
        "with stream: stream.begin_capture(); stream.synchronize()",
        "stream.begin_capture(); cupy.cuda.Device().synchronize()",
        "event = cupy.cuda.Event(); event.record(); stream.begin_capture(); stream.wait_event(event)",
        "stream.begin_capture(); event = stream.record(); event.synchronize()",
        "stream.begin_capture(); event = stream.record(); stream.end_capture(); cupy.cuda.Stream().wait_event(event)",
        "with stream: stream.begin_capture(); stream.done; kernel((1,), (1,), (x,))",
        "stream.begin_capture(); stream.done; stream.end_capture()",
        "blocking = cupy.cuda.Stream(); blocking.begin_capture(); kernel((1,), (1,), (x,))",
        "cupy.cuda.runtime.memcpyAsync(x.data.ptr + 4096, x.data.ptr, 1 << 20, 3, 0)",
        "cupy.cuda.runtime.ipcOpenMemHandle(cupy.cuda.runtime.ipcGetMemHandle(x.data.ptr))",
        "module.get_function('another')",
        "kernel((1,), (2048,), (x,))",
        "cupy.cuda.runtime.profilerStart()",
    ],
)
def test_what_a_gpu_refuses_is_an_error(on_fake_gpu: Run, wrong: str) -> None:
    program = """
        import cupy
        stream, x = cupy.cuda.Stream(non_blocking=True), cupy.zeros(8)
        module = cupy.RawModule(code='extern "C" __global__ void nothing(double* x) {}')
        kernel = module.get_function("nothing")
        kernel((1,), (1,), (x,))
        of_device_0 = kernel.kernel.ptr
        stream.record()
        print("so far")
    """
    done = on_fake_gpu("-c", f"{textwrap.dedent(program)}{wrong}")
    assert done.returncode == 1 and done.stdout == "so far\n"
    assert "Error: " in done.stderr.splitlines()[-1] and "CUDA" in done.stderr.upper()


def test_sums_over_gpus_are_cupys_own_which_let_those_see_each_other(on_fake_gpu: Run) -> None:
    program = """
        import cupy, warnings
        from hpcdp.kernels import kernels_for
        with cupy.cuda.Device(1): x = cupy.ones((4, 4), "f4")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            out = cupy.ones((4, 4), "f4")
            kernels_for("networks", out).add(out, x, out)
        print(*{each.category.__name__ for each in found})
    """
    done = on_fake_gpu("-c", textwrap.dedent(program))
    assert done.stdout == "PerformanceWarning\n", done.stderr


def test_copies_between_gpus_do_not_go_through_the_host(on_fake_gpu: Run) -> None:
    program = """
        import cupy, fake_gpu
        from hpcdp.core.arrays import gpu
        x = cupy.ones((4, 4), "f4")
        gpu(2).put(gpu(1).put(x)[1:])
        print(fake_gpu.detours())
        with cupy.cuda.Device(3): y = cupy.empty_like(x)
        cupy.cuda.runtime.memcpyAsync(y.data.ptr, x.data.ptr, x.nbytes, 4, 0)
        print(fake_gpu.detours())
    """
    done = on_fake_gpu("-c", textwrap.dedent(program))
    assert done.stdout == "0\n1\n", done.stderr


def test_what_cupy_scans_compiles(on_fake_gpu: Run) -> None:
    """It counts what a mask chooses by a scan, which it writes for the device's warps; zeros are what it reads."""
    program = "import cupy; print(cupy.arange(5)[cupy.ones(5, bool)].shape, cupy.cumsum(cupy.arange(5)).shape)"
    done = on_fake_gpu("-c", program)
    assert done.stdout == "(0,) (5,)\n", done.stderr


def test_another_version_of_cupy_is_refused_in_one_line(on_fake_gpu: Run) -> None:
    done = on_fake_gpu("-c", "import fake_gpu; fake_gpu.WRITTEN_FOR = '9.0.'; import cupy")
    assert done.stderr.splitlines()[-1].startswith(
        "fake_gpu.Unsuitable: the fake GPU was written for CuPy 9.0.*, this is"
    )


@pytest.mark.parametrize(("gpus", "limit", "share"), [("1", "", 0.45), ("1", "25%", 0.25), ("2", "", 0)])
def test_ranks_that_share_a_gpu_share_its_memory(on_fake_gpu: Run, gpus: str, limit: str, share: float) -> None:
    program = """
        import cupy, hpcdp
        from hpcdp.train.config import TrainConfig
        from hpcdp.train.run import choose_device
        world = hpcdp.init()
        choose_device(TrainConfig(device="gpu"), world)
        found = world.comm.allgather_json(cupy.get_default_memory_pool().get_limit() / 2**30)
        if world.rank == 0:
            print(found)
    """
    launch = ("-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable, "-c", textwrap.dedent(program))
    done = on_fake_gpu(*launch, FAKE_GPUS=gpus, **({"CUPY_GPU_MEMORY_LIMIT": limit} if limit else {}))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [pytest.approx(80 * share)] * 2


def test_a_step_waits_for_its_gpu_only_for_a_number(on_fake_gpu: Run) -> None:
    done = on_fake_gpu(HERE / "steps.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"] == "gpu(0)" and len(found["waits"]) == 30
    expected = {name: 5 * sum(PER_STEP.get(word, 0) for word in name.split()) for name in found["waits"]}
    assert found["waits"] == expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_on_another_gpu_than_the_current_one_is_computed_there(on_fake_gpu: Run, asynchronous: bool) -> None:
    """By the caller's stream; CuPy warns where it computes with arrays of another GPU, and the fake refuses streams."""
    program = f"""
        import contextlib, cupy, warnings
        import numpy as np
        from hpcdp import autograd, data, nn
        from hpcdp.core.arrays import gpu
        from hpcdp.kernels import cuda
        warnings.simplefilter("error")
        gpus, launched, launch = [gpu(1), gpu(2), gpu(3)], set(), cuda.launch
        def noted(file, name, grid, *args):
            devices = {{int(x.device.id) for x in args if isinstance(x, cupy.ndarray)}}
            launched.add((cupy.cuda.runtime.getDevice(), *devices, cupy.cuda.get_current_stream().ptr))
            launch(file, name, grid, *args)
        cuda.launch = noted
        x, y = np.zeros((6, 1, 28, 28), "f4"), np.zeros(6, "i8")
        net = nn.models.lenet().to(gpus[0])
        replicas, loss = nn.Replicas(net, gpus), nn.functional.softmax_cross_entropy
        with gpus[0].current():
            stream = cupy.cuda.Stream(non_blocking=True)
        for current in (0, 1):
            gpu(current).use()
            with stream if current == 1 else contextlib.nullcontext():
                with autograd.asynchronous() if {asynchronous} else contextlib.nullcontext(), autograd.record():
                    losses = [loss(replicas(gpus[0].put(x)), gpus[0].put(y))]
                    pieces = zip(gpus, *(data.split_and_load(each, gpus) for each in (x, y)), strict=True)
                    losses += [loss(replicas.on(device)(x), y) for device, x, y in pieces]
                autograd.backward(losses)
            assert {{int(each.grad.device.id) for each in net.parameters()}} == {{1}}
            assert launched == {{(n, n, stream.ptr if n == current else 0) for n in (1, 2, 3)}}, launched
            launched.clear()
        print("computed")
    """
    done = on_fake_gpu("-c", textwrap.dedent(program))
    assert done.returncode == 0 and done.stdout == "computed\n", done.stderr


def test_operands_of_other_devices_are_brought_or_refused_by_name(on_fake_gpu: Run) -> None:
    """CuPy refuses those of the host, and warns of those of another GPU."""
    program = """
        import cupy, warnings
        import numpy as np
        from hpcdp import autograd, kvstore, optim
        from hpcdp.core.arrays import gpu
        from hpcdp.errors import ArrayMixError
        warnings.simplefilter("error")
        values = [np.ones(3, "f4"), [1.0, 2.0, 3.0], np.float32(1), 1, gpu(0).put(np.ones(3, "f4"))]
        for place in (gpu(1).put(np.zeros(3, "f4")), np.zeros(3, "f4")):
            for each in values:
                autograd.Tensor(place)[...] = each
        stores = [kvstore.create(kind) for kind in ("device", "local", "device")]
        for store in stores:
            store.set_optimizer(optim.SGD(lr=0.5, momentum=0.5))
            store.init("key", gpu(1).put(np.ones(5, "f4")))
            store.push("key", gpu(1).put(np.ones(5, "f4")))
        for store, saved in zip(stores[1:], stores):
            store.load_state_dict(saved.state_dict())
        x = autograd.Tensor(gpu(1).put(np.ones((2, 3), "f4")))
        half = x.astype("bfloat16")
        half.attach_grad()
        with autograd.record():
            y = autograd.where(half > 0, half, -half) + autograd.maximum(half, 0.0)
            picked = autograd.where(half > 0, half, 0.0)
        y.backward(np.ones((2, 3), "f4").astype(half.dtype))
        picked.backward([1.0, 2.0, 3.0])
        assert {str(each.dtype) for each in (picked, half.grad)} == {"bfloat16"}, (picked.dtype, half.grad.dtype)
        for wrong in (np.ones((2, 3), "f4"), [1.0, 2.0, 3.0], gpu(0).put(np.ones((2, 3), "f4"))):
            for operation in (lambda: x + wrong, lambda: x == wrong, lambda: autograd.where(x > 0, x, wrong)):
                try:
                    operation()
                except ArrayMixError as error:
                    assert "expected operands on one device, got some on" in str(error), error
                else:
                    raise AssertionError(wrong)
        print("written")
    """
    done = on_fake_gpu("-c", textwrap.dedent(program))
    assert done.stdout == "written\n" and done.returncode == 0, done.stderr


def test_runs_and_collectives_of_another_gpu_than_the_current_one(on_fake_gpu: Run) -> None:
    """CuPy warns where it computes with arrays of another GPU, and refuses the host's."""
    program = """
        import warnings
        import numpy as np
        import hpcdp
        from hpcdp import data, nn, optim, train
        from hpcdp.core.arrays import Device, cpu, gpu
        from hpcdp.train.metrics import evaluate
        from hpcdp.train.fit import fit
        warnings.simplefilter("error")
        there = gpu(1)
        hpcdp.allreduce(there.put(np.ones((4, 3), "f4"))[:, 1])
        for source, target in ((there, there), (there, gpu(2)), (there, cpu(0)), (cpu(0), there)):
            x, out = source.put(np.ones(12, "f4")), target.put(np.ones(12, "f4"))
            for collective in (hpcdp.allreduce, hpcdp.reduce, hpcdp.reduce_scatter):
                collective(x, out=out)
            hpcdp.iallreduce(x, out=out).wait()
        samples = data.ArrayDataset(np.zeros((12, 3), "f4"), np.zeros(12, int))
        sampler = data.ShardedSampler(12, 4, num_parts=1, part_index=0, seed=0)
        for dtype in ("float32", "bfloat16"):
            for norm, device, whole in ((nn.ReLU(), None, True), (train.SyncBatchNorm(5), None, False),
                                        (train.SyncBatchNorm(5), there, False)):
                net = nn.Sequential(nn.Dense(3, 5), norm, nn.Dense(5, 2)).to(dtype).to(there)
                with there.current():
                    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1))
                loader = data.DataLoader(samples, sampler, device=device)
                fit(net, trainer, loader, epochs=2, evaluate=lambda: evaluate(net, samples), hybridize=whole)
                assert {Device.of(each.data) for each in net.parameters()} == {there}
        print("computed")
    """
    done = on_fake_gpu("-c", textwrap.dedent(program))
    assert done.stdout == "computed\n" and done.returncode == 0, done.stderr


def test_what_is_hybridized_on_another_gpu_than_the_current_one_is_captured_there(on_fake_gpu: Run) -> None:
    program = """
        import cupy, warnings
        import numpy as np
        from hpcdp import autograd, nn
        from hpcdp.core.arrays import gpu
        from hpcdp.kernels import cuda
        warnings.simplefilter("error")
        devices, launch = set(), cuda.launch
        def noted(file, name, grid, *args):
            devices.add(cupy.cuda.runtime.getDevice())
            devices.update(int(x.device.id) for x in args if type(x) is cupy.ndarray)
            launch(file, name, grid, *args)
        cuda.launch = noted
        net = nn.models.lenet().to(gpu(1))
        net.hybridize()
        x, y = gpu(1).put(np.zeros((6, 1, 28, 28), "f4")), gpu(1).put(np.zeros(6, "i8"))
        for _ in range(4):
            with autograd.record():
                losses = nn.functional.softmax_cross_entropy(net(x), y)
            losses.backward()
        print(devices)
    """
    done = on_fake_gpu("-c", textwrap.dedent(program))
    assert done.stdout == "{1}\n" and done.returncode == 0, done.stderr


def test_a_network_that_is_hybridized_before_any_product(on_fake_gpu: Run) -> None:
    """cuBLAS of a wheel is found once CuPy has loaded it."""
    program = """
        import cupy, warnings
        from hpcdp import autograd, nn
        warnings.simplefilter("error")
        net = nn.models.gpt((8,), 11, width=8, heads=2, layers=1).to(like=cupy.zeros(1))
        net.hybridize()
        for _ in range(3):
            with autograd.record():
                loss = net(cupy.zeros((2, 8), int)).sum()
            loss.backward()
        print("trained")
    """
    done = on_fake_gpu("-c", textwrap.dedent(program))
    assert done.stdout == "trained\n" and done.returncode == 0, done.stderr


def test_the_benchmark_ends(on_fake_gpu: Run, tmp_path: Path) -> None:
    """With 1, which is for wrong values: all are."""
    path = tmp_path / "gpu.json"
    arguments = (
        Path(__file__).parents[2] / "benchmarks" / "bench_gpu.py",
        "-m",
        "256K",
        "--batch",
        "2",
        "--json",
        path,
    )
    done = on_fake_gpu(*arguments, limit_s=280, FAKE_GPUS="1")
    assert done.returncode == 1 and "| what | target | measured |" in done.stdout, done.stderr
    assert "FAILED" not in done.stdout and "skipped" not in done.stdout
    assert json.loads(path.read_text())["device"]["gpu"] == "fake GPU"
