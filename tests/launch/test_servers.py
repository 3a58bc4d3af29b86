"""Servers beside ranks, started by the launcher: what they see, how the job ends, and who is named when one fails."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from hpcdp.launch import mpi_library
from hpcdp.launch.mpi_library import environment

SERVER = """
import os, signal, sys, types
from pathlib import Path
import numpy as np
from hpcdp.comm.communicator import ENDED
from hpcdp.kvstore import serve as program

def serve(whole):
    Path(f"ready-{whole.rank}").write_text(str(os.getpid()))
    whole.comm.barrier()
    if "SERVER_DOES" in os.environ and whole.rank == whole.size - 1:
        exec(os.environ["SERVER_DOES"])
    for worker in range(whole.size - whole.num_servers):
        whole.comm.irecv(np.empty(0, np.uint8), worker, ENDED).wait()

program.serve = serve
program.main()
"""
LAUNCHER = """
import sys
from hpcdp.launch import runner as supervise
from hpcdp.launch.launchers import mpirun
from hpcdp.launch.launchers import Job
workers, servers, server, grace, *program = sys.argv[1:]
mpirun.server, supervise._GRACE_S = lambda: ("-c", server), float(grace)
sys.exit(mpirun.run_local(Job(tuple(program), int(workers), int(servers))))
"""
WORKER = """
import os, signal, sys, time
from pathlib import Path
import hpcdp
world = hpcdp.init()
signal.signal(signal.SIGUSR1, lambda *_: Path(f"usr1-{world.rank}").touch())
Path(f"ready-{world.rank}").write_text(str(os.getpid()))
world.whole.comm.barrier()
"""


def command(workers, servers, code, grace_s=10.0):
    program = [sys.executable, "-c", code]
    return [sys.executable, "-c", LAUNCHER, str(workers), str(servers), SERVER, str(grace_s), *program]


def launch(workers, servers, code, cwd, **environ):
    return subprocess.run(
        command(workers, servers, code), capture_output=True, text=True, timeout=60, cwd=cwd, env=os.environ | environ
    )


@pytest.mark.thorough
def test_workers_are_a_job_of_their_own_and_have_all_threads(tmp_path):
    bare = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    code = WORKER + "print(world.size, world.whole.size, os.environ['OMP_NUM_THREADS'], flush=True)"
    done = subprocess.run(command(2, 1, code), capture_output=True, text=True, timeout=60, cwd=tmp_path, env=bare)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"2 3 {threads}\n" * 2, "")
    assert not Path("/proc", (tmp_path / "ready-2").read_text()).exists()


def test_servers_count_where_cores_are_given_up():
    library = mpi_library.MpiLibrary("openmpi", Path("/x/lib/libmpi.so.40"))
    cores = len(os.sched_getaffinity(0))
    for servers, wanted in ((0, False), (1, True)):
        environ = environment(library, Path("/x/bin/mpirun"), cores, {}, servers)
        assert ("OMPI_MCA_mpi_yield_when_idle" in environ) == wanted
        assert environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("workers", "servers", "does", "status", "says"),
    [
        pytest.param(
            1,
            1,
            "os._exit(7)",
            7,
            r"server 0 \(rank 1, pid \d+\) ended with status 7 before the others",
            marks=pytest.mark.thorough,
        ),
        (1, 2, "os.kill(os.getpid(), signal.SIGKILL)", 137, r"server 1 \(rank 2, pid \d+\) was killed by SIGKILL"),
        pytest.param(
            1,
            1,
            "os._exit(0)",
            1,
            r"server 0 \(rank 1, pid \d+\) ended without MPI_Finalize \(exit status 0\)",
            marks=pytest.mark.thorough,
        ),
        (1, 1, "raise KeyError('mine')", 1, r"server 0 \(rank 1\) failed:\nTraceback (?s:.)*KeyError: 'mine'"),
    ],
)
def test_a_server_that_fails_ends_the_job_and_is_named(workers, servers, does, status, says, tmp_path):
    started = time.monotonic()
    does = f"import time; time.sleep(0.5); {does}"
    done = launch(workers, servers, WORKER + "time.sleep(60)", tmp_path, SERVER_DOES=does)
    assert done.returncode == status, done.stderr
    assert re.search(says, done.stderr), done.stderr
    assert "hpcdp launch: rank" not in done.stderr
    assert time.monotonic() - started < 30
    assert not any(Path("/proc", path.read_text()).exists() for path in tmp_path.glob("ready-*"))


@pytest.mark.parametrize(
    ("does", "status"),
    [
        ("os._exit(5)", 5),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in (("pass", 0), ("raise KeyError('mine')", 1), ("sys.exit(3)", 3))
        ),
    ],
)
def test_the_status_is_that_of_a_worker_and_servers_end_with_it(does, status, tmp_path):
    done = launch(2, 1, WORKER + (does if status == 3 else f"if world.rank == 1: {does}"), tmp_path)
    assert done.returncode == status, done.stderr
    assert "server" not in done.stderr
    assert not Path("/proc", (tmp_path / "ready-2").read_text()).exists()


def test_a_program_that_is_not_of_the_job_does_not_keep_servers(tmp_path):
    started = time.monotonic()
    done = subprocess.run(command(2, 1, "pass", 1.0), capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode != 0 and time.monotonic() - started < 30
    assert re.search(r"all workers have ended .*; they have not ended in 1 s|without MPI_Finalize", done.stderr)


SLEEPER = WORKER + "time.sleep(60)"


class Job:
    """A sleeping worker and two servers; all its processes carry a mark in their environment."""

    def __init__(self, folder):
        self.mark = f"HPCDP_TEST_JOB={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        told = [each.replace("int(servers))", "int(servers), verbose=True)") for each in command(1, 2, SLEEPER)]
        self.said = folder / "said"
        with self.said.open("w") as said:
            self.launcher = subprocess.Popen(told, cwd=folder, env=os.environ | {name: value}, stderr=said)
        self.paths = [folder / f"ready-{rank}" for rank in range(3)]
        wait_for(lambda: all(path.exists() and path.read_text() for path in self.paths))

    def left(self):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                found += [path] if self.mark.encode() in path.read_bytes() else []
            except OSError:
                continue
        return found


def wait_for(condition, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "sign",
    [*(pytest.param(getattr(signal, each), marks=pytest.mark.thorough) for each in ("SIGINT", "SIGTERM", "SIGHUP")),
     signal.SIGKILL],
)  # fmt: skip
def test_signals_leave_nothing_behind(sign, tmp_path):
    job = Job(tmp_path)
    job.launcher.send_signal(sign)
    assert job.launcher.wait(20) == (-9 if sign == signal.SIGKILL else 128 + sign)
    wait_for(lambda: not job.left(), limit_s=10)


def test_signals_of_the_users_reach_workers_and_do_not_end_servers_which_are_called_so(tmp_path):
    job = Job(tmp_path)
    job.launcher.send_signal(signal.SIGUSR1)
    wait_for((tmp_path / "usr1-0").exists, limit_s=10)
    time.sleep(0.3)
    assert all(Path("/proc", path.read_text()).exists() for path in job.paths)
    job.launcher.send_signal(signal.SIGINT)
    assert job.launcher.wait(20) == 128 + signal.SIGINT
    wait_for(lambda: not job.left(), limit_s=10)
    names = re.findall("^hpcdp launch: (.*) is pid", job.said.read_text(), re.MULTILINE)
    assert sorted(names) == ["rank 0", "server 0 (rank 1)", "server 1 (rank 2)"], job.said.read_text()
