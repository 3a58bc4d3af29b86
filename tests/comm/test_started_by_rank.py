"""What processes are that a rank starts: they must not start MPI in its place."""

import json
import os
import subprocess
import sys

import pytest

from hpcdp.comm import startup
from hpcdp.comm.startup import STARTED_BY, forget_launcher

SCRIPT = """
import json, multiprocessing, os, subprocess, sys
import numpy as np
import hpcdp

world = hpcdp.init()  # in each process that multiprocessing starts, too

def tried(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition(",")[0]

def work(number):
    world = hpcdp.init()
    sums = tried(lambda: hpcdp.allreduce(np.ones(2), world=world).sum())
    where = [world.rank, world.size, world.local_rank, str(world.device)]
    return [*where, sums, tried(world.barrier), tried(lambda: world.split(0).size)]

def forked(leaves):
    if not (child := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        exec(leaves)
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

if __name__ == "__main__":
    if world.rank == world.size - 1:
        found = [forked(leaves) for leaves in ("sys.exit(3)", "raise ValueError(1)", "os._exit(5)", "work(0)")]
        alone = "import hpcdp; world = hpcdp.init(); world.barrier(); print(world.rank, world.size)"
        done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, timeout=60)
        found.append([done.returncode, done.stdout, done.stderr])
        for method in sys.argv[1:]:
            with multiprocessing.get_context(method).Pool(1) as pool:
                found += pool.map(work, [0])
        print(json.dumps(found))
    assert hpcdp.allreduce(np.ones(2))[0] == world.size  # MPI is as it was
"""


@pytest.mark.parametrize(
    ("n", "methods"),
    [
        (2, ["forkserver"]),
        *(pytest.param(n, ["fork", "forkserver", "spawn"], marks=pytest.mark.thorough) for n in (1, 3)),
    ],
)
def test_what_a_rank_starts_is_no_rank(n, methods, tmp_path):
    """Children refuse to communicate by name, and end without MPI; a program is a job of its own."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(n), "--"] if n > 1 else []
    env = {name: value for name, value in os.environ.items() if name != STARTED_BY}
    done = subprocess.run(
        [*launch, sys.executable, script, *methods], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    refused = [f"UnsupportedError: {name}: expected a rank of the job" for name in ("allreduce", "barrier", "split")]
    found = json.loads(done.stdout)
    assert found[:4] == [3, 1, 5, 0]
    assert found[4] == [0, "0 1\n", ""]
    assert found[5:] == [[n - 1, n, n - 1, "cpu(0)", *([2.0, None, 1] if n == 1 else refused)]] * len(methods)


class World:
    rank, size, local_rank, local_size, node, num_nodes, num_rails, cores, place = 1, 4, 1, 2, 0, 2, 2, 8, 1


OPEN_MPI = {"PMIX_NAMESPACE": "prterun-a-1@1", "PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PRTE_LAUNCHED": "1"}
SRUN = {
    "PMIX_NAMESPACE": "slurm.pmix.7.0",
    "PMIX_RANK": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9999", "MPI_LOCALNRANKS": "2"}
USERS = {"OMPI_MCA_btl": "self,tcp", "HOME": "/home/a", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize("launcher", [OPEN_MPI, SRUN, MPICH], ids=["Open MPI", "srun", "MPICH"])
def test_only_what_a_rank_has_started_forgets_the_launcher(launcher, monkeypatch):
    monkeypatch.setattr(os, "environ", {**launcher, **USERS})
    startup.note(World)
    rank = dict(os.environ)
    forget_launcher(rank)  # the rank itself
    assert rank == os.environ
    monkeypatch.setattr(os, "getpid", lambda: -1)
    program = dict(os.environ)
    forget_launcher(program)
    assert program.keys() == USERS.keys() | {STARTED_BY}
    other = {**os.environ, "PMIX_NAMESPACE": "prterun-a-2@1"}  # an mpirun in the rank has started it
    forget_launcher(other)
    assert launcher.keys() <= other.keys()


def test_ranks_of_mpich_are_told_apart_by_their_sockets(monkeypatch):
    links = {"/proc/self/fd/9999": "socket:[1]"}
    monkeypatch.setattr(os, "environ", {**MPICH})
    monkeypatch.setattr(os, "readlink", links.__getitem__)
    startup.note(World)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for link, is_rank in (("socket:[1]", False), ("socket:[2]", True), ("/dev/null", False)):
        links["/proc/self/fd/9999"] = link
        environ = dict(os.environ)
        forget_launcher(environ)
        assert ("PMI_RANK" in environ) == is_rank


@pytest.mark.parametrize("text", ["", "1", "[]", "{}", '{"pid": 1, "names": {}, "numbers": {}}'])
def test_what_is_no_record_is_passed_over(text):
    environ = {**OPEN_MPI, STARTED_BY: text}
    forget_launcher(environ)
    assert OPEN_MPI.keys() <= environ.keys()
