"""The benchmark of collectives beside MPI libraries: its turns, its table, and peers that are missing."""

import json
import subprocess
import sys

import pytest

import bench_collectives as benchmark


class Candidate:
    """A job whose calls take known times."""

    def __init__(self, name, times):
        self.name, self._times = name, iter(times)

    def turn(self, operation, nbytes, times):
        return next(self._times)


def test_ratios_are_those_within_turns_and_the_first_turn_warms_up():
    jobs = [
        Candidate("hpcdp", [99, 2, 4, 8]), Candidate("own MPI", [99, 3, 6, 12]), Candidate("MPICH", [99, 20, 20, 20]),
    ]  # fmt: skip
    row = benchmark.measure(jobs, "allreduce", 4, 3)
    assert row["us"] == {"hpcdp": 4.0, "own MPI": 6.0, "MPICH": 20.0}
    assert (row["best_peer"], row["ratio"]) == ("own MPI", 1.5)
    copied = benchmark.measure([Candidate("hpcdp", [9, 1, 1]), Candidate("own MPI", [])], "copy", 4, 2)
    assert copied["us"] == {"hpcdp": 1.0} and copied["ratio"] is None
    lines = benchmark.table([row, copied], ["hpcdp", "own MPI", "MPICH"]).splitlines()
    assert lines[2] == "| allreduce | 4 | 4.0 | 6.0 | 20.0 | 1.50 (own MPI) |"
    assert lines[3] == "| copy | 4 | 1.0 |  |  |  |"


@pytest.mark.thorough
def test_its_command_skips_a_peer_that_is_missing(tmp_path):
    path = tmp_path / "figures.json"
    asked = ["--operations", "copy,allreduce,latency,alltoall", "--sizes", "4", "--turns", "1", "--json", str(path)]
    command = [sys.executable, benchmark.__file__, *asked, "--peer", "MPICH=/no/python"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "MPICH is skipped: '/no/python' is no Python that can be run" in done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["operation"] for row in rows] == ["copy", "allreduce", "latency", "alltoall"]
    assert all(set(row["us"]) == {"hpcdp", "own MPI"} for row in rows[1:])
