"""The benchmark of a GPU, on this processor (`graphs_on_host`): what it would print and write, and how it skips."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import graphs_on_host
import numpy as np
import pytest

from hpcdp.benchmarks import gpu, gpu_jobs, gpu_kernels
from hpcdp.benchmarks.gpu_kernels import cases
from hpcdp.kernels import cuda_update


@pytest.fixture
def cupy() -> Iterator[ModuleType]:
    with graphs_on_host.installed() as machine:
        yield machine.cupy


def test_without_a_gpu_it_says_why_and_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == (
        "skipped: CuPy is not installed (pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]')\n"
    )


@pytest.mark.slow
def test_every_kernel_is_right_and_rated(
    tmp_path: Path, cupy: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "gpu_or_reason", lambda: (cupy, ""))
    monkeypatch.setattr(gpu, "facts", lambda cupy: {"gpu": "none", "driver": 1, "cuda": 2, "cupy": "3"})
    monkeypatch.setattr(gpu, "_MODELS", {"lenet": (1, 28, 28)})
    monkeypatch.setattr(gpu, "_TURN_S", 0)
    monkeypatch.setattr(gpu, "_TURNS", 1)
    monkeypatch.setattr(gpu_kernels, "_CHANNELS", 2)
    monkeypatch.setattr(gpu_kernels, "_CLASSES", 100)
    job = {"name": "shared, 2 ranks", "case": "shared", "ranks": 2, "share": 0.6, "told": "60 GB/s", "wrong": 0}
    monkeypatch.setattr(gpu_jobs, "run_all", lambda jobs, size, ends: iter([job]))
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
    assert said[-3:] == [
        "| sum by ranks that share a GPU: share of a copy | at least 50% | 60% at worst (shared, 2 ranks) | met |",
        "| staging: share of pinned copies | at least 90% | 0% at worst (not measured) | **missed** |",
        "| training with and without overlap | same bits | not measured | **missed** |",
    ]


def test_wrong_results_are_told(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_update, "sgd", lambda param, grad, coefficients: None)
    case = next(cases(300))
    assert case.name == "SGD"
    assert case.wrong(cupy.asarray) == np.count_nonzero(case.arrays[1])


def test_nothing_begins_after_its_time(cupy: ModuleType) -> None:
    assert list(gpu.all_kernels(100, cupy.asarray, ends=0)) == []
