"""The allreduce benchmarks on a few sizes: right results pass, a wrong algorithm fails, JSON parses."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcdp import collectives
from hpcdp.benchmarks import allreduce, compare
from hpcdp.benchmarks.floor import Floor
from hpcdp.benchmarks.measure import Exchange, FreshData
from hpcdp.comm import World, threads


def _sweep(world: World, algorithm: str, dtype: str, op: str) -> list[dict]:
    data = FreshData(world.rank, world.size, dtype, op)

    def make(nbytes: int) -> Exchange:
        x = np.empty(nbytes // np.dtype(dtype).itemsize, dtype)
        return allreduce.ours("ours", data, x, world, {"algorithm": algorithm, "op": op})

    return allreduce.sweep(world, [8, 4096, 200_000], make, iterations=4, warmup=1)


@pytest.mark.parametrize(("dtype", "op"), [("float32", "sum"), ("float16", "mean"), ("int64", "max")])
def test_a_right_algorithm_passes(dtype: str, op: str) -> None:
    for rows in threads.run(2, lambda world: _sweep(world, "auto", dtype, op)):
        assert [row["nbytes"] for row in rows] == [8, 4096, 200_000]
        assert [row["wrong"] for row in rows] == [0, 0, 0]
        for row in rows:
            assert 0 < row["minimum"] <= row["avg"] <= row["maximum"]
            assert row["algbw_gb_s"] == pytest.approx(row["nbytes"] / row["avg"] / 1e3)
            assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"])


def test_a_wrong_algorithm_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def forgets_the_last_element(x: np.ndarray, op: str, world: World) -> None:
        world.comm.native_allreduce(x[:-1], op)

    monkeypatch.setitem(collectives.ALGORITHMS, "wrong", forgets_the_last_element)
    rows = threads.run(2, lambda world: _sweep(world, "wrong", "float32", "sum"))[0]
    assert all(row["wrong"] >= 2 for row in rows)
    allreduce.print_table(rows, "test", True)
    printed = capsys.readouterr().out
    assert printed.count("Fail") == 3
    assert "Pass" not in printed


def test_compare_reports_floor_and_ratios() -> None:
    def each(world: World) -> dict:
        return compare.compare(world, Floor(world, 1 << 16), None, 1 << 16, iterations=4, warmup=1)

    row = threads.run(2, each)[0]
    assert not any(row["wrong"].values())
    assert row["peer"] is None
    assert row["peer_ratio"] == {}
    assert set(row["floor_share"]) == set(compare.OURS) < set(row["median_us"])
    assert len(row["median_us"]) == 7
    assert all(share > 0 for share in row["floor_share"].values())


@pytest.mark.parametrize("benchmark", ["allreduce", "compare", "floor"])
def test_under_mpirun(benchmark: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ["-m", "4:4K", "-i", "3", "-x", "1", "--json", str(report)]
    command = [sys.executable, "-m", f"hpcdp.benchmarks.{benchmark}", *sizes]
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--"]
    done = subprocess.run([*launch, *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["benchmark"] == benchmark
    assert found["machine"]["ranks_per_node"] == 2
    assert found["machine"]["processor"]["cores"] >= 1
    assert {"commit", "date", "versions"} <= set(found["machine"])
    assert found["rows"][0]["nbytes"] == 4
    assert found["rows"][-1]["nbytes"] == 4096
    assert "Size" in done.stdout
    if benchmark == "compare":
        assert found["rows"][0]["peer"] in ("MPI", "MPI in place", "gloo")
