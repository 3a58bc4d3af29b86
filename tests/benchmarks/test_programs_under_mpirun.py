"""The benchmarks that are programs, on two real ranks: one job runs them all, since most of its time is its start."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

QUICK = ("-i", "3", "-x", "1")
SIZES = ("-m", "4:4K", "--factor", "32", *QUICK)
LENET = ("--batch", "4", "--turns", "2", "--seconds", "0.02")
FRAMEWORKS = ["hpcdp", *(["torch"] if importlib.util.find_spec("torch") else [])]
PROGRAMS: dict[str, tuple[str, ...]] = {
    "allreduce": ("command", "allreduce", "-m", "4:4K", *QUICK, "--plot", "curve.png"),
    "bandwidth": ("command", "bandwidth", "-m", "4:4K", *QUICK),
    "compare": ("compare", *SIZES),
    "floor": ("floor", "-m", "4:4K", *QUICK),
    "kvstore": ("kvstore", *SIZES),
    **{f"lenet {name}": ("train_lenet", "--framework", name, *LENET) for name in FRAMEWORKS},
}
JOB = """
import contextlib, importlib, json, os, sys
import hpcdp
from hpcdp.benchmarks import command, floor

command.LIMIT_NBYTES, floor.copy_rates.__defaults__ = 1 << 16, (1 << 16, 1)  # the machine's limits need not be exact
world = hpcdp.init()
for name, (module, *given) in json.loads(sys.argv[1]).items():
    with open(f"{name}-{world.rank}.out", "w") as out, contextlib.redirect_stdout(out):
        assert importlib.import_module(f"hpcdp.benchmarks.{module}").main([*given, "--json", f"{name}.json"]) == 0
"""
Found = tuple[dict[str, Any], str]

pytestmark = pytest.mark.alone  # bare exchanges leave nobody the core: beside other tests the job took minutes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable, "-c", JOB]
    done = subprocess.run([*command, json.dumps(PROGRAMS)], cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return folder


def found_by(name: str, folder: Path) -> Found:
    """The report of one program, and what its rank 0 has printed; the other one prints nothing."""
    assert (folder / f"{name}-1.out").read_text() == ""
    return json.loads((folder / f"{name}.json").read_text()), (folder / f"{name}-0.out").read_text()


@pytest.mark.parametrize("name", ["allreduce", "bandwidth"])
def test_bench_measures_beside_the_library(name: str, folder: Path) -> None:
    found, printed = found_by(name, folder)
    assert found["machine"]["ranks_per_node"] == 2
    assert found["machine"]["processor"]["cores"] >= 1
    assert [row["nbytes"] for row in found["rows"]] == [4 << i for i in range(11)]
    assert all("library" in row for row in found["rows"]) == (name == "allreduce")
    assert printed.count("# Size") == 1 and printed.count("Pass") == 11
    if name == "allreduce":
        assert found["limit"][1] > 0
        assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["compare", "floor"])
def test_exchanges_beside_the_floor(name: str, folder: Path) -> None:
    found, printed = found_by(name, folder)
    assert found["benchmark"] == name
    assert found["machine"]["ranks_per_node"] == 2
    assert {"commit", "date", "versions"} <= set(found["machine"])
    assert (found["rows"][0]["nbytes"], found["rows"][-1]["nbytes"]) == (4, 4096)
    assert "Size" in printed
    if name == "compare":
        assert max(map(len, printed.splitlines())) <= 80
        assert printed.count(" floor\n") == printed.count(" best peer\n") == len(found["rows"])
        assert found["rows"][0]["peer"] in ("MPI", "MPI in place", "gloo")


def test_stores_beside_allreduce(folder: Path) -> None:
    found, printed = found_by("kvstore", folder)
    assert found["benchmark"] == "kvstore"
    assert [row["nbytes"] for row in found["rows"]] == [4, 128, 4096]
    assert [row["nbytes"] for row in found["asynchronous"]] == [4, 128, 4096]
    assert found["limits"]["all_cores_gb_s"] > 0
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("framework", ["hpcdp", "torch"])
def test_lenet_on_all_ranks(framework: str, folder: Path) -> None:
    if framework not in FRAMEWORKS:
        pytest.skip("PyTorch is not installed")
    found, _ = found_by(f"lenet {framework}", folder)
    assert (found["framework"], found["ranks"], found["batch"]) == (framework, 2, 4)
    assert found["samples_s"] > 0
    assert found["unequal"] is None if framework == "torch" else 0 < found["unequal"] <= 1
