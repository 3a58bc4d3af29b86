"""The benchmark of a GPU, on this processor (`graphs`): what it would print and write, and how it skips."""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from gpu_on_host import graphs
from raises import raises

import bench_gpu as gpu
import bench_gpu as gpu_jobs
import bench_gpu_alone as gpu_alone
import bench_gpu_alone as gpu_kernels
import bench_suite as suite
from bench_gpu_alone import Case, cases
from bench_harness import report as gpu_report
from hpcdp.comm import thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.world import Gpu
from hpcdp.errors import ConfigError, DeviceError
from hpcdp.kernels.cuda import kernels


@pytest.fixture
def cupy() -> Iterator[ModuleType]:
    with graphs.installed() as machine:
        yield machine.cupy


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ((), "no NVIDIA GPU, or no driver"),
        (
            (Gpu(0, "NVIDIA A", "0000:00:00.0", "a"),),
            "CuPy is not installed (pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]')",
        ),
    ],
)
def test_without_a_gpu_it_says_why_and_ends(
    found: tuple[Gpu, ...], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(comm_world, "visible", lambda: found)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == f"skipped: {says}\n"


def test_a_gpu_whose_driver_is_too_old_for_cupy_is_no_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    runtime = SimpleNamespace(getDeviceCount=refused, driverGetVersion=lambda: 12080, runtimeGetVersion=lambda: 13000)
    cuda = SimpleNamespace(runtime=runtime, is_available=lambda: False)  # which takes each error for no GPU
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(comm_world, "visible", lambda: (Gpu(0, "NVIDIA A", "0000:00:00.0", "a"),))
    with raises(DeviceError, operation="device", where="gpu(0)", got=["CUDA", 12.8], remedy="CUDA=cuda12"):
        gpu.main([])
    monkeypatch.setattr(comm_world, "visible", lambda: ())
    assert gpu.main([]) == 0


@pytest.mark.slow
@pytest.mark.thorough
def test_every_kernel_is_right_and_rated(
    tmp_path: Path, cupy: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "gpu_or_reason", lambda: (cupy, ""))
    monkeypatch.setattr(
        gpu_alone, "facts", lambda cupy: {"gpu": "none", "driver": "1", "cuda": 13020, "cudnn": "9.15.0", "cupy": "3"}
    )
    monkeypatch.setattr(gpu_alone, "_MODELS", {"lenet": (1, 28, 28)})
    monkeypatch.setattr(gpu_alone, "_TURN_S", 0)
    monkeypatch.setattr(gpu_alone, "_TURNS", 1)
    monkeypatch.setattr(gpu_kernels, "_CHANNELS", 2)
    monkeypatch.setattr(gpu_kernels, "_CLASSES", 100)
    job = {"name": "shared, 2 ranks", "case": "shared", "ranks": 2, "share": 0.6, "summary": "60 GB/s", "wrong": 0}
    monkeypatch.setattr(gpu_jobs, "run_all", lambda jobs, size, ends: iter([job]))
    monkeypatch.setattr(gpu_alone.comm, "init", lambda: thread_comm.run(1, lambda world: world)[0])

    def run_here(command: Sequence[str], more: object, report: Path, limit_s: float) -> object:
        assert gpu_alone.main(list(command)[command.index(gpu_alone.__file__) + 1 :]) == 0
        return json.loads(report.read_text())

    monkeypatch.setattr(gpu_jobs, "_run", run_here)
    path = tmp_path / "gpu.json"
    assert gpu.main(["-m", "17K", "--batch", "1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["kernels"]] == [case.name for case in cases(4352)]
    assert all(row["share"] > 0 and row["wrong"] == 0 for row in found["kernels"])
    assert 0 < found["models"][0]["loss"] < 3
    assert found["models"][0]["samples_s"] > 0 and found["models"][0]["graphs_samples_s"] > 0
    assert found["sums"] == [job]
    said = capsys.readouterr().out.splitlines()
    assert "shared, 2 ranks                 0.60  60 GB/s" in said
    assert any(line.startswith("softmax, loss") for line in said)
    held = "60% at worst (shared, 2 ranks); holds at 1 of 1"
    assert said[-4:] == [
        f"| S13 | sum by ranks that share a GPU: share of a copy | at least 50% | {held} | met |",
        "| S13 | staging: share of pinned copies | at least 90% | not measured | - |",
        "| S13 | training with and without overlap | same bits | not measured | - |",
        "| S13 | training with overlap: a step against one without | at most 1.05x | not measured | - |",
    ]


def test_a_model_or_kernel_that_fails_is_named_and_ends_no_other(
    tmp_path: Path, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(name: str, *_: object) -> dict[str, object]:
        if name == "lenet":
            raise MemoryError("no room")
        return {"name": name}

    def kernel(case: Case, asarray: object, wrong: int) -> dict[str, object]:
        if case.name in ("scale", "ReLU"):
            raise MemoryError("no room")
        if case.name == "SGD":
            raise ValueError("a NaN")
        return {"name": case.name}

    monkeypatch.setattr(gpu_alone, "facts", lambda cupy: {})
    monkeypatch.setattr(gpu_alone, "measure_model", model)
    monkeypatch.setattr(gpu_alone, "measure_kernel", kernel)
    monkeypatch.setattr(Case, "wrong", lambda self, asarray: 0)
    monkeypatch.setattr(gpu_alone.comm, "init", lambda: thread_comm.run(1, lambda world: world)[0])
    path = tmp_path / "gpu.json"
    assert gpu_alone.main(["-m", "4K", "--json", str(path)]) == 1
    found = json.loads(path.read_text())
    no_room = "lenet of float32, lenet of bfloat16, scale, ReLU: MemoryError: no room"
    assert found["failed"] == f"{no_room}; SGD: ValueError: a NaN"
    assert [each["name"] for each in found["models"]] == ["resnet18_cifar"] * 2 + ["gpt"]
    assert len(found["kernels"]) == len(list(cases(1024))) - 3


def test_models_and_kernels_that_hang_are_ended_and_those_before_are_told(
    tmp_path: Path, cupy: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "gpu_or_reason", lambda: (cupy, ""))
    monkeypatch.setattr(gpu_jobs, "run_all", lambda jobs, size, ends: iter([]))
    monkeypatch.setattr(gpu_jobs, "_LAST_S", 1)
    program = """
import json, signal, sys
model = {"name": "lenet", "dtype": "float32", "batch": 2, "samples_s": 5.0, "graphs_samples_s": 6.0, "loss": 2.3}
with open(sys.argv[-1], "w") as report:
    json.dump({"models": [model], "failed": "it ended after lenet"}, report)
signal.pause()
"""
    monkeypatch.setattr(gpu_jobs, "_LAUNCH", [sys.executable, "-c", program])
    for name in ("adopt", "end_orphans"):  # all that this process has started
        monkeypatch.setattr(gpu_jobs, name, lambda: None)
    path = tmp_path / "gpu.json"
    assert gpu.main(["--limit-s", "2", "--json", str(path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "models and kernels            FAILED: no end after 3 s" in said
    assert f"{'lenet, float32, batch 2':<36}        5        6" in said
    assert json.loads(path.read_text())["models"][0]["name"] == "lenet"


def test_a_step_that_is_timed_waits_for_nothing(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    for name in ("__float__", "item", "to_host"):
        read = getattr(cupy.Array, name)
        monkeypatch.setattr(cupy.Array, name, lambda x, read=read: (waited.append(x.shape), read(x))[1])
    monkeypatch.setattr(gpu_alone, "seconds", lambda call, marker: (waited.clear(), call(), len(waited))[2] + 1.0)
    found = thread_comm.run(1, lambda world: gpu_alone.measure_model("lenet", "float32", 2, cupy.asarray, world))[0]
    assert found["samples_s"] == found["graphs_samples_s"] == 2, "a second for none"
    assert isinstance(found["loss"], float)


def test_a_gpt_trains_on_texts_and_keeps_its_figures_where_pytorch_fails(
    cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torch_fails(name: str, dtype: str, x: np.ndarray, labels: np.ndarray) -> dict[str, object]:
        assert x.shape == labels.shape == (2, 8) and (x[:, 1:] == labels[:, :-1]).all()
        raise RuntimeError("no compiler\nfurther lines")

    monkeypatch.setattr(gpu_alone, "_MODELS", {"gpt": (8,)})
    monkeypatch.setattr(gpu_alone, "_GPT", {"width": 8, "heads": 2, "layers": 2})
    monkeypatch.setattr(gpu_alone, "seconds", lambda call, marker: (call(), 1.0)[1])
    monkeypatch.setattr(gpu_alone, "sees_a_gpu", lambda: True)
    monkeypatch.setattr(gpu_alone, "torch_steps", torch_fails)
    found = thread_comm.run(1, lambda world: gpu_alone.measure_model("gpt", "bfloat16", 64, cupy.asarray, world))[0]
    assert found["batch"] == found["samples_s"] == found["graphs_samples_s"] == 2
    assert 5 < found["loss"] < 6  # of 256 tokens that are equally likely
    said = gpu_report.line_of_model(found)
    assert said == f"{'gpt, bfloat16, batch 2':<36}        2        2  PyTorch: RuntimeError: no compiler"


def test_a_line_of_a_model_has_pytorch_beside_it_where_that_is_measured() -> None:
    model = {"name": "lenet", "dtype": "bfloat16", "batch": 256, "samples_s": 5.0, "graphs_samples_s": 6.0}
    ours = f"{'lenet, bfloat16, batch 256':<36}        5        6"
    assert gpu_report.line_of_model(model) == ours
    theirs = {"torch_samples_s": 7.0, "torch_graphs_samples_s": 8.0}
    assert gpu_report.line_of_model({**model, **theirs}) == f"{ours}                   7        8"


def a_report() -> dict[str, object]:
    seconds = {"after": 0.010, "during": 0.012}
    training = {
        "name": "training, 2 ranks",
        "case": "training",
        "ranks": 2,
        "share": None,
        "summary": "10 ms",
        "wrong": 0,
    }
    processor = {"model": "A processor", "cores": 16, "caches": {}, "system": "Linux"}
    model = {"name": "lenet", "dtype": "float32", "batch": 256, "samples_s": 5000.0, "graphs_samples_s": 6000.0}
    kernel = {"name": "SGD", "us": 10.0, "gb_s": 4000.0, "copy_gb_s": 4200.0, "wrong": 0}
    return {
        "benchmark": "gpu", "size": "256M",
        "device": {"gpu": "NVIDIA A", "driver": "1", "cuda": 13020, "cudnn": "9.15.0", "cupy": "3"},
        "sums": [{**training, "seconds": seconds}, {**training, "case": "staging", "name": "staging", "failed": "-"}],
        "models": [model], "kernels": [{**kernel, "share": 0.95}, {**kernel, "name": "top 1%", "share": 0.3}],
        "machine": {
            "processor": processor, "commit": "abc", "date": "today", "python": "3", "versions": {"torch": "2"}
        },
    }  # fmt: skip


def test_a_rank_that_shares_its_gpu_with_nobody_sums_nothing_and_counts_for_no_target() -> None:
    shared = [{"name": f"shared, {ranks}", "case": "shared", "ranks": ranks, "share": share}
              for ranks, share in ((1, 0.24), (2, 0.58), (4, 0.61))]  # fmt: skip
    verdict = next(each for each in gpu_report.gpu_verdicts({"sums": shared}) if "share a GPU" in each.what)
    assert verdict.measured == "58% at worst (shared, 2); holds at 2 of 2" and verdict.met


def test_figures_of_another_machine_are_taken_into_the_results(tmp_path: Path) -> None:
    file, folder = tmp_path / "gpu.json", tmp_path / "results"
    folder.mkdir()
    shutil.copy(Path(suite.__file__).parent / "results.json", folder)
    before = json.loads((folder / "results.json").read_text())
    file.write_text(json.dumps(a_report()))
    assert suite.main(["--gpu", str(file), "--into", str(folder)]) == 0
    after = json.loads((folder / "results.json").read_text())
    assert after == {**before, "gpu": [a_report()]}
    text = (folder / "RESULTS.md").read_text()
    assert "CUDA 13.2, CuPy 3, cuDNN 9.15.0, Python 3, torch 2; commit abc, today." in text
    assert "| at least 85% | 30% at worst (top 1%); holds at 1 of 2 | **missed** |" in text
    assert "| 1.20x at worst (training, 2 ranks) | **missed** |" in text and "| failed: staging | **missed** |" in text
    for each in folder.iterdir():
        each.unlink()
    assert suite.main(["--gpu", str(file), "--into", str(folder)]) == 0  # where nothing else has been measured yet
    assert set(json.loads((folder / "results.json").read_text())) == {"gpu", "machine"}
    assert "| staging |  | 10 ms |" in text and "| lenet, float32, batch 256 | 5,000 | 6,000 | - | - | - |" in text


@pytest.mark.parametrize("wrong", ["", "[]", "{}", '{"benchmark": "gpu"}', '{"benchmark": "kernels"}'])
def test_a_file_that_has_no_figures_of_a_gpu_is_refused(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(wrong)
    with raises(ConfigError, operation="suite --gpu", where=file, expected="bench_gpu.py"):
        suite.main(["--gpu", str(file), "--into", str(tmp_path)])
    assert not (tmp_path / "results.json").exists()


def test_wrong_results_are_told(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "sgd", lambda param, grad, coefficients: None)
    case = next(cases(300))
    assert case.name == "SGD"
    assert case.wrong(cupy.asarray) == np.count_nonzero(case.arrays[1])


def test_nothing_begins_after_its_time(cupy: ModuleType) -> None:
    assert list(gpu_alone.all_kernels(100, cupy.asarray, ends=0)) == []
