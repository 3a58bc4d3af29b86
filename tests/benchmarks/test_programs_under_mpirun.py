"""The benchmarks that are programs, on two real ranks: the tests' own, which have started and imported PyTorch."""

import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hpcdp
from hpcdp.bench import command, tune
from hpcdp.core.environment import launched_ranks

pytestmark = pytest.mark.mpi
if launched_ranks() not in (None, 2):
    pytest.skip("two ranks are enough: thread ranks of any number run each program", allow_module_level=True)

QUICK = ("-i", "3", "-x", "1")
SIZES = ("-m", "4:4K", "--factor", "32", *QUICK)
LENET = ("--batch", "4", "--turns", "2", "--seconds", "0.02")
FRAMEWORKS = ["hpcdp", *(["torch"] if importlib.util.find_spec("torch") else [])]
PROGRAMS: dict[str, tuple[str, ...]] = {
    "allreduce": ("hpcdp.bench.command", "allreduce", "-m", "4:4K", *QUICK, "--plot", "curve.png"),
    "bandwidth": ("hpcdp.bench.command", "bandwidth", "-m", "4:4K", *QUICK),
    "allreduce beside its floor": ("bench_allreduce", *SIZES),
    "floor": ("bench_floor", "-m", "4:4K", *QUICK),
    "kvstore": ("bench_kvstore", *SIZES),
    "overlap": ("bench_overlap", "--models", "lenet", "--turns", "1", "--steps", "1"),
    **{f"lenet {name}": ("bench_train_lenet", "--framework", name, *LENET) for name in FRAMEWORKS},
}
Found = tuple[dict[str, Any], str]
Run = Callable[[str], Found]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's limits need not be exact, and the tests that follow have all cores."""
    monkeypatch.setattr(command, "LIMIT_NBYTES", 1 << 16)
    monkeypatch.setattr(tune.copy_rates, "__defaults__", (1 << 16, 1))
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of rank 0, in which all ranks are."""
    found = Path(hpcdp.init().comm.allgather_json(str(tmp_path))[0])
    monkeypatch.chdir(found)
    return found


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a program on all ranks; its report, and what rank 0 has printed, while the other one prints nothing."""
    world = hpcdp.init()

    def run(name: str) -> Found:
        module, *given = PROGRAMS[name]
        assert importlib.import_module(module).main([*given, "--json", "report.json"]) == 0
        printed = world.comm.allgather_json(capsys.readouterr().out)
        assert printed[1] == ""
        return json.loads((folder / "report.json").read_text()), printed[0]

    return run


@pytest.mark.parametrize("name", ["allreduce", "bandwidth"])
def test_bench_measures_beside_the_library(name: str, run: Run, folder: Path) -> None:
    found, printed = run(name)
    assert found["machine"]["ranks_per_node"] == 2
    assert found["machine"]["processor"]["cores"] >= 1
    assert [row["nbytes"] for row in found["rows"]] == [4 << i for i in range(11)]
    assert all("library" in row for row in found["rows"]) == (name == "allreduce")
    assert printed.count("# Size") == 1 and len([line for line in printed.splitlines() if line[:1].isdigit()]) == 11
    if name == "allreduce":
        assert found["limit"][1] > 0
        assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "benchmark"), [("allreduce beside its floor", "allreduce"), ("floor", "floor")])
def test_exchanges_beside_the_floor(name: str, benchmark: str, run: Run) -> None:
    found, printed = run(name)
    assert found["benchmark"] == benchmark
    assert found["machine"]["ranks_per_node"] == 2
    assert {"commit", "date", "versions"} <= set(found["machine"])
    assert (found["rows"][0]["nbytes"], found["rows"][-1]["nbytes"]) == (4, 4096)
    assert "Size" in printed
    if benchmark == "allreduce":
        assert max(map(len, printed.splitlines())) <= 80
        assert printed.count(" floor\n") == printed.count(" best peer\n") == len(found["rows"])
        assert found["rows"][0]["peer"] in ("MPI", "MPI in place", "gloo")


def test_stores_beside_allreduce(run: Run) -> None:
    found, printed = run("kvstore")
    assert found["benchmark"] == "kvstore"
    assert [row["nbytes"] for row in found["rows"]] == [4, 128, 4096]
    assert [row["nbytes"] for row in found["asynchronous"]] == [4, 128, 4096]
    assert found["limits"]["all_cores_gb_s"] > 0
    assert max(map(len, printed.splitlines())) <= 80


def test_steps_with_communication_beside_them(run: Run) -> None:
    found, printed = run("overlap")
    assert (found["machine"]["ranks"], found["machine"]["nodes"]) == (2, 1)
    assert found["rows"][0]["same_bits"]
    assert "critical path" in printed


@pytest.mark.parametrize("framework", ["hpcdp", pytest.param("torch", marks=pytest.mark.thorough)])
def test_lenet_on_all_ranks(framework: str, run: Run) -> None:
    if framework not in FRAMEWORKS:
        pytest.skip("PyTorch is not installed")
    found, _ = run(f"lenet {framework}")
    assert (found["framework"], found["ranks"], found["batch"]) == (framework, 2, 4)
    assert found["samples_s"] > 0
    assert found["unequal"] is None if framework == "torch" else 0 < found["unequal"] <= 1
