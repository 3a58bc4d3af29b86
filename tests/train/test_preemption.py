import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from raises import raises

from hpcdp.comm import thread_comm
from hpcdp.core import environment
from hpcdp.core.environment import SAVE_AT, started_by_srun
from hpcdp.errors import ConfigError
from hpcdp.train import checkpoints
from hpcdp.train.checkpoints import Agreement, Reason, StopRequests

SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


def test_a_signal_is_noted_and_does_nothing_else():
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequests(environ={}) as stop:
        assert stop.reason is Reason.NONE
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.reason is Reason.SIGUSR1
        assert str(stop.reason) == "SIGUSR1"
        for sign, says in ((signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP"), (signal.SIGINT, "SIGINT, Ctrl-C")):
            stop = StopRequests(environ={})
            with stop:
                os.kill(os.getpid(), SAVE_AT[sign])  # the launcher was sent it
            assert str(stop.reason) == says
    os.kill(os.getpid(), signal.SIGUSR1)  # one that comes late ends nobody
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("run", "numbers"),  # of a rank, of a launcher
    [("with StopRequests(environ={}): pass", [signal.SIGUSR1, *SAVE_AT.values()]),
     ("environment.ignore_usr1()", [signal.SIGUSR1])],
)  # fmt: skip
def test_a_command_that_is_at_its_end_dies_of_none(run, numbers):
    """Python gives its handlers up before it has ended."""
    command = (
        "import atexit, os, signal\n"
        "from hpcdp.core import environment\n"
        "from hpcdp.train.checkpoints import StopRequests\n"
        "environment.note_usr1()\n"
        f"{run}\n"
        "class Late:\n"
        f"    def __del__(self): [os.kill(os.getpid(), number) for number in {[*map(int, numbers)]}]\n"
        "environment.late = Late()\n"
    )
    assert subprocess.run([sys.executable, "-c", command]).returncode == 0


def test_without_a_signal_everything_is_as_before():
    of_others = signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # such as that of a command called in this process
    try:
        with StopRequests(environ={}):
            assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, of_others)


@pytest.mark.parametrize(
    ("environ", "srun"),
    [
        ({}, False),
        (SRUN, True),
        (SRUN | {"PMI_SIZE": "4", "PMI_RANK": "0"}, True),  # srun --mpi=pmi2
        (SRUN | {"OMPI_COMM_WORLD_SIZE": "4"}, False),
        (SRUN | {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": ""}, False),
    ],
)
def test_sigterm_asks_for_a_stop_under_srun_alone(environ, srun):
    assert started_by_srun(environ) == srun
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests(environ=environ) as stop:
        if not srun:
            assert signal.getsignal(signal.SIGTERM) == before
            return
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason is Reason.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def later(monkeypatch):
    """Sets the clock forward by some seconds."""
    passed = []
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + sum(passed))
    monkeypatch.setattr(checkpoints, "time", clock)
    return passed.append


def test_time_limits(later):
    stop = StopRequests(60, {})
    later(30)
    assert not stop.reason
    later(30)
    assert stop.reason is Reason.TIME_LIMIT
    later = int(time.time()) + 3600
    assert not StopRequests(environ={"SLURM_JOB_END_TIME": str(later)}).reason
    soon = StopRequests(3600, {"SLURM_JOB_END_TIME": "Unknown"})
    assert not soon.reason
    soon.request()
    assert soon.reason is Reason.PROGRAM


@pytest.mark.parametrize("said", ["5", -1, math.nan, True, pytest.param(10**400, id="huge")])
def test_what_is_no_time_limit(said):
    with raises(ConfigError, operation="StopRequests", where="time_limit_s", expected=[0, None]):
        StopRequests(said, {})


def test_an_end_of_the_job_that_has_passed_is_none(later):
    for end in (0, int(time.time()) - 5):
        assert not StopRequests(environ={"SLURM_JOB_END_TIME": str(end)}).reason
    stop = StopRequests(environ={"SLURM_JOB_END_TIME": str(int(time.time()) + 3600)})
    later(3000)
    assert not stop.reason
    later(590)  # before the end, so that a checkpoint can be written
    assert stop.reason is Reason.JOB_END


@pytest.mark.parametrize(
    ("rank", "says", "asked"),
    [
        ({}, "date -d '+1 hour' +%Y-%m-%dT%H:%M:%S", True),
        ({"SLURM_PROCID": "0"}, "date -d '+1 hour' +%Y-%m-%dT%H:%M:%S", True),
        ({"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "1"}, "date -d '+1 hour' +%Y-%m-%dT%H:%M:%S", False),
        ({}, "echo N/A", False),
        ({}, "exit 1", False),
    ],
)
def test_where_slurm_does_not_say_the_end_rank_0_asks_squeue(rank, says, asked, tmp_path, monkeypatch, later):
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\n[ "$*" = "-h -j 7 -o %e" ] || exit 1\n{says}\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    stop = StopRequests(environ={"SLURM_JOB_ID": "7"} | rank)
    later(3000)
    assert not stop.reason
    later(600)
    assert stop.reason is (Reason.JOB_END if asked else Reason.NONE)


@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (2, None), (3, None), (3, 2), (4, 1)])
def test_all_ranks_agree_a_step_later(ranks, per_node):
    def job(world):
        agreement = Agreement(world, 2)
        heard = []
        for step in range(5):
            world.barrier()
            heard.append(agreement.exchange(world.rank * (step == 2), step))
        return heard, agreement.finish(), agreement.exchange(1, 1), agreement.finish()

    expected = [[0, 0], [0, 0], [0, 1], [ranks - 1, 2], [0, 3]], [0, 4], [0, 0], [1, 1]
    assert thread_comm.run(ranks, job, per_node) == [expected] * ranks


def test_a_signal_that_came_early_is_taken_once():
    before = signal.getsignal(signal.SIGUSR1)
    try:
        environment.note_usr1()
        os.kill(os.getpid(), signal.SIGUSR1)
        with StopRequests(environ={}) as stop:
            assert stop.reason is Reason.SIGUSR1
        with StopRequests(environ={}) as stop:
            assert not stop.reason
    finally:
        signal.signal(signal.SIGUSR1, before)
