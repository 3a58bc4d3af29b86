import os
import signal
import time

import pytest

from hpcdp.comm import threads
from hpcdp.train.preemption import Agreement, Reason, StopRequests, started_by_srun

SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


def test_a_signal_is_noted_and_does_nothing_else():
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequests(environ={}) as stop:
        assert stop.reason is Reason.NONE
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.reason is Reason.SIGUSR1
        assert str(stop.reason) == "SIGUSR1"
    os.kill(os.getpid(), signal.SIGUSR1)  # one that comes late ends nobody
    signal.signal(signal.SIGUSR1, before)


def test_without_a_signal_everything_is_as_before():
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequests(environ={}):
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before


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


def test_time_limits():
    stop = StopRequests(0.05, {})
    assert not stop.reason
    time.sleep(0.06)
    assert stop.reason is Reason.TIME_LIMIT
    assert StopRequests(environ={"SLURM_JOB_END_TIME": str(int(time.time()) - 5)}).reason is Reason.JOB_END
    later = int(time.time()) + 3600
    assert not StopRequests(environ={"SLURM_JOB_END_TIME": str(later)}).reason
    soon = StopRequests(3600, {"SLURM_JOB_END_TIME": "Unknown"})
    assert not soon.reason
    soon.request()
    assert soon.reason is Reason.PROGRAM


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
    assert threads.run(ranks, job, per_node) == [expected] * ranks
