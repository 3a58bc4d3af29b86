"""How many threads BLAS has in ranks that share cores."""

import os
import subprocess
import sys

import pytest

from hpcdp.core.environment import THREAD_VARIABLES
from hpcdp.launch import mpi_library
from hpcdp.launch.mpi_library import environment

CORES = len(os.sched_getaffinity(0))
TELLS = """
import numpy, hpcdp
from threadpoolctl import threadpool_info, threadpool_limits
if {limit}: threadpool_limits({limit})
world = hpcdp.init()
print(*(each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"), flush=True)
"""


def threads(ranks, limit=0, per_node="", variable=None):
    """What each rank of a plain mpirun says, which binds to nothing."""
    library = mpi_library.find_library()
    mpirun = mpi_library.find_mpirun(library)
    environ = environment(library, mpirun, ranks, os.environ)
    environ = {name: value for name, value in environ.items() if name not in THREAD_VARIABLES}
    environ |= {"HPCDP_RANKS_PER_NODE": per_node, **({} if variable is None else {"OMP_NUM_THREADS": variable})}
    command = [mpirun, "-n", str(ranks), sys.executable, "-c", TELLS.format(limit=limit)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split("\n") if line]


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_ranks_that_share_cores_share_them_out_unless_the_user_says():
    assert threads(1) == [CORES]
    assert threads(2) == [CORES // 2] * 2
    if os.environ.get("HPCDP_TEST_THOROUGH"):
        assert threads(2, per_node="1") == [CORES // 2] * 2
    assert threads(2, variable=str(CORES)) == [CORES] * 2
    assert threads(1, limit=1) == [1]
