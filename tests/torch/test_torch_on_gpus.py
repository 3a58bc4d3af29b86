"""A wrapped module on GPUs: tensors in host memory stand for those, and share it with the stand-in's arrays, on whose
late streams gradients are summed."""

import contextlib
import sys
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gpu_cases
from pairs import pairs
from torch import nn
from toy import SEEDING, add_average, loss_of

import hpcdp.torch
from hpcdp.comm import thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.gpu_buckets.transport import GpuTransport
from hpcdp.comm.world import Gpu
from hpcdp.core.arrays import Streams, gpu
from hpcdp.errors import ConfigError, MismatchError, StaleGradientError, UnsupportedError
from hpcdp.torch import DistributedDataParallel, tensors

SEEN = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(8))
NODES = [(1, None), (2, None), (3, None), (4, 2)]


@pytest.fixture
def on_gpus(gpus_on_host, monkeypatch):
    """Tensors are on the GPU that is this thread's current one."""
    import cupy

    gpus_on_host.default_is_host = True  # torch's current one, on which it computes at once
    monkeypatch.setattr(comm_world, "visible", lambda: SEEN)
    monkeypatch.setattr(tensors, "gpu_of", lambda tensor: gpu(getattr(gpus_on_host.of_thread, "device", 0)))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(cupy, "from_dlpack", lambda tensor: cupy.Array(tensor.numpy()), raising=False)
    monkeypatch.setattr(cupy.Array, "__dlpack__", lambda x, **how: x._held.__dlpack__(**how), raising=False)
    monkeypatch.setattr(cupy.Array, "__dlpack_device__", lambda x: x._held.__dlpack_device__(), raising=False)
    return gpus_on_host


def network():
    with SEEDING:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 4))


def wrapped(world, **options):
    world.device.use()
    net = network()
    for each in net.parameters():
        each.data += world.rank  # rank 0's values are to be everybody's
    return DistributedDataParallel(net, world, bucket_cap_mb=0.0001, **options)


class _Nothing(deque):
    """What is given to a stream that is none of torch's, and so comes before or after what torch does."""

    def append(self, work):
        raise AssertionError("given to CuPy's own stream")


@contextlib.contextmanager
def with_another_stream_of_cupys(world, on_gpus):
    """CuPy's current stream is none of torch's, and nothing is to be given to it."""
    with Streams(world.device).stream() as stream:
        on_gpus.queues[stream.ptr] = _Nothing()
        yield


def test_what_torch_keeps_unused_is_given_back_before_rows_are_made(on_gpus, monkeypatch):
    import cupy

    monkeypatch.setattr(comm_world, "visible", lambda: SEEN[:1])
    monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: SimpleNamespace(free_all_blocks=lambda: None))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(on_gpus, "room", float("inf")))
    on_gpus.room = 0

    def rank(world):
        model = wrapped(world)
        of_buffers = model._buffers_of_all.on_gpu
        world.barrier()
        on_gpus.room = 0
        world.barrier()
        of_buffers.broadcast([torch.ones(3)], 0)
        return model.backward_pass.reducer.reduction.way

    assert thread_comm.run(2, rank) == [GpuTransport.CUDA_IPC] * 2


@pytest.mark.parametrize("overlap", [None, False])
@pytest.mark.parametrize(("n", "nodes"), NODES)
def test_gradients_are_the_average_over_all_ranks(on_gpus, n, nodes, overlap):
    def rank(world):
        model = wrapped(world, overlap=overlap)
        found = []
        with with_another_stream_of_cupys(world, on_gpus):
            for step in range(3):
                model.zero_grad()
                with model.no_sync():
                    loss_of(model, 10 + step, world.rank).backward()
                loss_of(model, step, world.rank).backward()
                found.append([each.grad.numpy().copy() for each in model.parameters()])
        return found

    found = thread_comm.run(n, rank, nodes)
    for step in range(3):
        reference = network()
        add_average(reference, step, n)
        add_average(reference, 10 + step, n)
        for of_rank in found:
            for mine, param in zip(of_rank[step], reference.parameters(), strict=True):
                np.testing.assert_allclose(mine, param.grad.numpy(), rtol=1e-4, atol=1e-6)
    assert n == 1 or any("nccl" in name for name in on_gpus.log)


def test_half_precision_and_unused_parameters(on_gpus):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            with SEEDING:
                torch.manual_seed(2)
                self.left, self.right = (nn.Linear(6, 4, dtype=torch.bfloat16) for _ in range(2))

        def forward(self, x, left):
            return (self.left if left else self.right)(x)

    def rank(world):
        world.device.use()
        model = DistributedDataParallel(Branches(), world, find_unused_parameters=True)
        x = torch.full((1, 6), 1.0 + world.rank, dtype=torch.bfloat16)
        with with_another_stream_of_cupys(world, on_gpus):
            model(x, world.rank == 0).sum().backward()
        return [each.grad.float().numpy() for each in model.parameters()]

    for left, left_bias, right, right_bias in thread_comm.run(3, rank):
        np.testing.assert_allclose(left, np.full((4, 6), 1 / 3), rtol=0.01)
        np.testing.assert_allclose(left_bias, np.full(4, 1 / 3), rtol=0.01)
        np.testing.assert_allclose(right, np.full((4, 6), 5 / 3), rtol=0.01)
        np.testing.assert_allclose(right_bias, np.full(4, 2 / 3), rtol=0.01)


def test_ranks_that_run_out_of_data_and_gradients_that_overflow(on_gpus):
    def rank(world):
        model = wrapped(world)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with with_another_stream_of_cupys(world, on_gpus), model.join():
            for step in range(1 + world.rank):
                optimizer.zero_grad()
                loss = loss_of(model, step, world.rank)
                if step == 1 and world.rank == 1:
                    loss = loss * float("inf")  # which all ranks with data must see
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return [each.detach().numpy().copy() for each in model.parameters()], scaler.get_scale()

    found = thread_comm.run(3, rank)
    assert [scale for _, scale in found] == [8.0, 4.0, 4.0]
    for params, _ in found:
        for mine, first in zip(params, found[0][0], strict=True):
            assert np.isfinite(mine).all()
            np.testing.assert_array_equal(mine, first)


def test_after_a_step_that_failed_the_next_one_is_right(on_gpus):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.fault = network(), None

        def forward(self, x):
            x = self.net[0](x)
            if self.fault == "backward":
                x.register_hook(lambda _: 1 / 0)
            return x @ torch.ones(7, 4) if self.fault == "unused" else self.net[1:](x)

    def rank(world):
        world.device.use()
        module = Fails()
        model = DistributedDataParallel(module, world, bucket_cap_mb=0.0001)
        with with_another_stream_of_cupys(world, on_gpus):
            for fault, error in (("backward", ZeroDivisionError), ("unused", StaleGradientError)):
                module.fault = fault
                with pytest.raises(error):
                    loss_of(model, 1, world.rank).backward()
                model.zero_grad()
            module.fault = None
            loss_of(model, 0, world.rank).backward()
        return [each.grad.numpy().copy() for each in model.parameters()]

    reference = network()
    add_average(reference, 0, 3)
    for of_rank in thread_comm.run(3, rank):
        for mine, param in zip(of_rank, reference.parameters(), strict=True):
            np.testing.assert_allclose(mine, param.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_compression_goes_through_the_host(on_gpus):
    def rank(world):
        model = wrapped(world, compression="fp16")
        with with_another_stream_of_cupys(world, on_gpus):
            loss_of(model, 0, world.rank).backward()
        return [each.grad.numpy().copy() for each in model.parameters()]

    reference = network()
    add_average(reference, 0, 2)
    for of_rank in thread_comm.run(2, rank, 1):
        for mine, param in zip(of_rank, reference.parameters(), strict=True):
            np.testing.assert_allclose(mine, param.grad.numpy(), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("n", "nodes", "seen"), [(2, None, 8), (3, None, 8), (3, None, 1), (4, 2, 8), (4, 2, 1), (2, None, 0)]
)
@pytest.mark.filterwarnings("ignore:gradients on GPUs")
def test_buffers_are_those_of_rank_0_and_on_one_node_no_host_waits_for_them(on_gpus, monkeypatch, n, nodes, seen):
    monkeypatch.setattr(comm_world, "visible", lambda: SEEN[:seen])
    waits, synchronize = [], Streams.synchronize

    def noted(self, awaited):
        waits.append(getattr(on_gpus.of_thread, "trains", False))
        synchronize(self, awaited)

    monkeypatch.setattr(Streams, "synchronize", noted)

    def rank(world):
        model = wrapped(world)
        model.module.register_buffer("strided", torch.arange(6.0).reshape(2, 3).T + world.rank)
        model.module.register_buffer("empty", torch.empty(0))
        kept = dict(model.module.named_buffers())
        monkeypatch.setattr(torch.Tensor, "cpu", None)  # which would wait for the GPU
        with with_another_stream_of_cupys(world, on_gpus):
            for step in range(3):
                on_gpus.of_thread.trains = step > 0  # at first memory is taken
                for each in kept.values():
                    each += 100 * world.rank
                loss_of(model, step, 0).backward()
            on_gpus.of_thread.trains = False
            model.module.register_buffer("late", torch.full((1000,), 1.0 + world.rank, dtype=torch.float64))
            loss_of(model, 3, 0).backward()
        found = dict(model.module.named_buffers())
        assert all(found[name] is each for name, each in kept.items())
        return {name: each.numpy().copy() for name, each in found.items()}

    first, *others = thread_comm.run(n, rank, nodes)
    reference = network()
    for step in range(4):
        loss_of(reference, step, 0)
    for name, wanted in reference.named_buffers():
        np.testing.assert_allclose(first[name], wanted.numpy(), rtol=1e-5)
    np.testing.assert_array_equal(first["strided"], [[0, 3], [1, 4], [2, 5]])
    assert (first["late"] == 1).all()
    for each in others:
        for name, wanted in first.items():
            np.testing.assert_array_equal(each[name], wanted)
    assert any(waits) == (nodes is not None or not seen)


def test_the_body_of_the_test_on_a_real_gpu(on_gpus):
    def rank(world):
        world.device.use()
        gpu_cases.check_torch(world, "cpu")

    thread_comm.run(3, rank)


def groups(model):
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.03}]


@pytest.mark.parametrize(
    ("layout", "seen", "rule", "clip", "gpus_on_host"),
    pairs([*NODES, (5, (2, 3)), (2, 1)], [8, 1, 0], [torch.optim.SGD, torch.optim.AdamW], [None, 0.3], [0, 1]),
    indirect=["gpus_on_host"],
)
@pytest.mark.filterwarnings("ignore:gradients on GPUs")
def test_each_rank_updates_its_shard(on_gpus, monkeypatch, layout, seen, rule, clip):
    """Of parameters that all have, with the numbers of torch, by NCCL, CUDA IPC, or each for itself."""
    (n, nodes), overlap = layout, clip is not None
    settings = {"lr": 0.1, "momentum": 0.9} if rule is torch.optim.SGD else {"lr": 0.01, "eps": 0.01}
    monkeypatch.setattr(comm_world, "visible", lambda: SEEN[:seen])

    def rank(world):
        model = wrapped(world, owner="shard", overlap=overlap)
        reference = network()
        ours = hpcdp.torch.ShardedOptimizer(model, rule, groups(model), **settings)
        theirs = rule(groups(reference), **settings)
        with with_another_stream_of_cupys(world, on_gpus):
            for step in range(4):
                theirs.zero_grad()
                ours.zero_grad()
                loss_of(model, step, world.rank).backward()
                add_average(reference, step, n)
                if clip is not None:
                    before = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
                    assert float(ours.clip_grad_norm_(clip)) == pytest.approx(float(before), rel=1e-4)
                ours.step()
                theirs.step()
                for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                    np.testing.assert_allclose(mine.detach().numpy(), wanted.detach().numpy(), rtol=1e-4, atol=1e-5)
                if step == 1:
                    mine, torchs = ours.state_dict(), theirs.state_dict()
                    for number, state in torchs["state"].items():
                        for name, wanted in state.items():
                            np.testing.assert_allclose(mine["state"][number][name], wanted, rtol=1e-3, atol=1e-6)
                    ours.load_state_dict(torchs)
        owned = sum(bucket.shard[1] - bucket.shard[0] for bucket in model.backward_pass.reducer.buckets)
        held = ours._shards.nbytes_state // len(ours._rules[0].state_names()) // 4
        return held, owned, sum(flat.size for flat in ours._shards.flats)

    found = thread_comm.run(n, rank, nodes)
    assert all(held == owned for held, owned, _ in found)
    if seen and nodes is None:  # one node: each element has one owner
        assert sum(held for held, _, _ in found) == found[0][2]


def test_what_gpus_cannot_do_is_named(on_gpus, monkeypatch):
    net = network()
    elsewhere = {id(each): number for number, each in enumerate(net.parameters())}
    monkeypatch.setattr(tensors, "gpu_of", lambda tensor: gpu(elsewhere[id(tensor)] // 4))
    with raises(UnsupportedError, operation="DistributedDataParallel", where="3.weight"):
        thread_comm.run(1, lambda world: DistributedDataParallel(net, world))


def test_ranks_without_a_gpu_beside_ones_with_are_told(on_gpus, monkeypatch):
    there = tensors.gpu_of
    monkeypatch.setattr(tensors, "gpu_of", lambda tensor: None if threads_rank() == 1 else there(tensor))

    def threads_rank():
        return getattr(on_gpus.of_thread, "rank", 0)

    def rank(world):
        on_gpus.of_thread.rank = world.rank
        world.device.use()
        with raises(MismatchError, operation="DistributedDataParallel", where="item 1 of 9 on rank 0", expected="GPU"):
            DistributedDataParallel(network(), world)

    thread_comm.run(2, rank)


def test_without_cupy_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(tensors, "gpu_of", lambda tensor: gpu(1))
    with pytest.raises(ConfigError) as caught:
        thread_comm.run(1, lambda world: DistributedDataParallel(network(), world))
    assert str(caught.value).startswith(
        "DistributedDataParallel [0.weight]: expected CuPy, for tensors on gpu(1), got no module named cupy; "
        "pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]'"
    )


def test_other_devices_are_refused():
    with raises(
        UnsupportedError,
        operation="DistributedDataParallel",
        where="weight",
        expected=["CPU", "CUDA", "GPU"],
        got=["torch.strided", "torch.float32"],
    ):
        thread_comm.run(1, lambda world: DistributedDataParallel(nn.Linear(2, 2, device="meta"), world))


def test_a_tensor_and_its_array_share_memory(on_gpus):
    tensor = torch.arange(6.0).reshape(2, 3)
    array = tensors.as_array(tensor)
    array[0] = 7
    assert type(array).__module__ == "cupy"
    assert (tensor[0] == 7).all()
    tensors.as_tensor(array)[1] = 9
    assert (array.to_host()[1] == 9).all()
    assert tensors.as_tensor(np.ones(2)).dtype is torch.float64


assert hpcdp.torch
