"""Ranks that come out of MPI_Init wait for the others without a message; run under mpirun by tests/run.py."""

import subprocess
import sys
import time

import pytest

import hpcdp
from hpcdp.comm import startup


@pytest.mark.mpi(min_size=2)
def test_no_rank_goes_on_before_the_last_one_has_come():
    world = hpcdp.init()
    if not world.library.startswith("Open MPI v5"):
        pytest.skip("MPI_Init of Open MPI 5 alone lets ranks out too early")
    for late in range(world.size):
        world.barrier()
        if world.rank == late:
            time.sleep(0.3)
        came_s = time.monotonic()  # one clock for all of a machine
        startup.meet()
        came, went = zip(*world.comm.allgather_json((came_s, time.monotonic())), strict=True)
        assert min(went) >= max(came)


def test_without_pmix_nothing_is_waited_for(monkeypatch):
    code = "from hpcdp.comm.startup import meet; meet(); meet()"
    assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == 0
    monkeypatch.setattr(startup, "_LIBRARY", "libc.so.6")  # loaded, and without such a function
    startup.meet()
