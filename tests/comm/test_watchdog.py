"""A collective that never ends: what is said, by whom, and that the job ends."""

import io
import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from hpcdp.collectives import allreduce, iallreduce
from hpcdp.collectives.progress import Progress
from hpcdp.comm import threads
from hpcdp.comm.watchdog import DEFAULT_LIMIT_S, Watchdog, limit_s
from hpcdp.errors import ConfigError, WorldAborted


def watched(world, limit, reports):
    reports[world.rank] = io.StringIO()
    world.kept.pop(Progress, None)
    world.kept[Watchdog] = Watchdog(world, limit, reports[world.rank])
    return world.kept[Watchdog]


@pytest.mark.parametrize("algorithm", ["shared", "ring", "hierarchical"])
def test_the_ranks_that_wait_say_for_whom(algorithm):
    reports = {}

    def rank(world):
        allreduce(np.ones(2), world=world, algorithm=algorithm)  # all are there, and kernels are loaded
        watched(world, 0.3, reports)
        if world.rank != 1:
            allreduce(np.ones(5, "f4"), world=world, algorithm=algorithm)

    begin = time.monotonic()
    with pytest.raises(WorldAborted):
        threads.run(3, rank)
    assert time.monotonic() - begin < 20
    for number in (0, 2):
        assert f"rank {number} of 3: allreduce of 5 float32 has not ended in 0.3 s; local rank 1 has not called it" in (
            reports[number].getvalue()
        )
    assert reports[1].getvalue() == ""


def test_started_operations_are_watched_while_they_are_waited_for():
    reports = {}

    def rank(world):
        watched(world, 0.3, reports)
        if world.rank == 0:
            request = iallreduce(np.ones(3), world=world, algorithm="ring")
            time.sleep(0.8)  # not waiting: nothing to say
            assert reports[0].getvalue() == ""
            request.wait()

    with pytest.raises(WorldAborted):
        threads.run(2, rank)
    assert "wait for an iallreduce of 3 float64 has not ended in 0.3 s; local rank 1" in reports[0].getvalue()


def test_calls_that_end_are_no_hang_however_many():
    reports = {}

    def rank(world):
        allreduce(np.ones(1), "min", world)
        dog = watched(world, 1.5, reports)
        begin = time.monotonic()
        last = False
        while not last:
            last = allreduce(np.array([time.monotonic() - begin > 2.5], "i4"), "min", world)[0] == 1
        dog.end()

    threads.run(2, rank)
    assert [report.getvalue() for report in reports.values()] == ["", ""]


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv("HPCDP_TIMEOUT_S", text)
    with pytest.raises(ConfigError, match=f"expected seconds, or 0 for no limit, got '{text}'"):
        limit_s()


def test_the_limit_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("HPCDP_TIMEOUT_S", raising=False)
    assert limit_s() == DEFAULT_LIMIT_S
    monkeypatch.setenv("HPCDP_TIMEOUT_S", "2.5")
    assert limit_s() == 2.5


def test_a_rank_that_misses_a_first_call_is_told():
    reports = {}

    def rank(world):
        allreduce(np.ones(2), world=world, algorithm="ring")
        watched(world, 0.3, reports)
        if world.rank != 1:
            allreduce(np.ones(9, "f4"), world=world)  # of a size for which nothing was chosen yet

    with pytest.raises(WorldAborted):
        threads.run(3, rank)
    assert "local rank 1 has not called it" in reports[0].getvalue()


@pytest.mark.parametrize("call", ["if world.rank: time.sleep(60)", "world.rank and hpcdp.allreduce(numpy.ones(3))"])
def test_real_ranks_end_within_the_limit(call, tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(
        textwrap.dedent(f"""
        import time, numpy, hpcdp
        world = hpcdp.init()
        hpcdp.allreduce(numpy.ones(4))
        {call}
        hpcdp.allreduce(numpy.ones(7), "max", algorithm="ring")
        """)
    )
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable, str(script)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
    begin = time.monotonic()
    done = subprocess.run(
        command, env=environment | {"HPCDP_TIMEOUT_S": "1"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "rank 0 of 2: allreduce of 7 float64 has not ended in 1 s" in done.stderr + done.stdout
    assert "hang.py" in done.stderr + done.stdout  # the stack
    assert time.monotonic() - begin < 30
