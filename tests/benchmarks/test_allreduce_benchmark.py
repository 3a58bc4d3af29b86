"""The comparison with the floor and other libraries: its figures, and rounds of jobs with MPICH."""

import json
import sys
from pathlib import Path

import pytest

import bench_allreduce as allreduce
from bench_floor import Floor
from bench_suite import Suite
from hpcdp.comm import World, thread_comm


def test_compare_reports_floor_and_ratios() -> None:
    def each(world: World) -> dict:
        return allreduce.compare(world, Floor(world, 1 << 16), None, 1 << 16, iterations=4, warmup=1)

    row = thread_comm.run(2, each)[0]
    assert not any(row["wrong"].values())
    assert row["peer"] is None
    assert row["peer_ratio"] == {}
    assert set(row["floor_share"]) == set(allreduce.OURS) < set(row["median_us"])
    assert len(row["median_us"]) == 7
    assert all(share > 0 for share in row["floor_share"].values())


def test_rounds_with_mpich_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = []

    def job(suite: Suite, kind: str, benchmark: str, arguments: list[str], *, ranks: int, python: str = "own") -> None:
        jobs.append((benchmark, python, ranks, arguments[arguments.index("-m") + 1]))
        number = len(jobs)
        medians = {**dict.fromkeys(allreduce.OURS, 10.0 * number), "MPI": 40.0 * number, "owner only": 1.0}
        row = {"nbytes": 4, "median_us": medians} if kind == "allreduce" else {"nbytes": 4, "median": 15.0 * number}
        suite.results.setdefault(kind, []).append({"rows": [row]})

    monkeypatch.setattr(Suite, "job", job)
    report = tmp_path / "all.json"
    given = ["--mpich", sys.executable, "--rounds", "2", "--ranks", "3", "-m", "4:4", "--json", str(report)]
    assert allreduce.main(given) == 0
    assert jobs == 2 * [("allreduce", "own", 3, "4:4"), ("bench", sys.executable, 3, "4:4")]
    heading, *lines = capsys.readouterr().out.splitlines()[-5:]
    assert heading.split() == ["#", "Size", "candidate", "median", "us", "peer", "x"]
    # medians over the rounds: 10 and 30, 40 and 120, 30 and 60; the ratios 3 and 2
    assert [" ".join(line.split()) for line in lines] == [
        "4 hpcdp buckets 20.00 2.50",
        "hpcdp any array 20.00 2.50",
        "MPI 80.00",
        "MPICH 45.00 best peer",
    ]
    assert set(json.loads(report.read_text())) == {"allreduce", "allreduce MPICH"}
