"""The launcher from outside: what the ranks see, and that none of them outlives it."""

import contextlib
import ctypes
import json
import os
import pty
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdp.cli import doctor
from hpcdp.core.environment import SAVE_AT
from hpcdp.launch import hosts, mpi_library, process_monitor, runner
from hpcdp.launch.mpi_library import environment

CORES = len(os.sched_getaffinity(0))
SLEEPER = """
import os, signal, sys, time
from mpi4py import MPI
from pathlib import Path
signal.signal(signal.SIGUSR1, lambda *_: Path(sys.argv[1], f"usr1-{MPI.COMM_WORLD.rank}").touch())
MPI.COMM_WORLD.barrier()
folder = os.environ.get("OMPI_MCA_btl_sm_backing_directory", "none")
Path(sys.argv[1], "segments").write_text(f"{folder} {len(os.listdir(folder)) if folder != 'none' else 0}")
Path(sys.argv[1], f"ready-{MPI.COMM_WORLD.rank}").write_text(str(os.getpid()))
for _ in range(600):  # in one sleep a signal that comes just before it would not be seen
    time.sleep(0.1)
"""


def launch(ranks: int, *program: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(ranks), "--", *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def python(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", code


def wait_for(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Job:
    """Two sleeping ranks under a launcher; all its processes carry a mark in their environment."""

    def __init__(self, folder: Path, before: str = "", hangup: signal.Handlers = signal.SIG_DFL) -> None:
        self.folder = folder
        self.mark = f"HPCDP_TEST_JOB={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", *python(before + SLEEPER), str(folder)]

        def handle() -> None:
            signal.signal(signal.SIGHUP, hangup)
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # which what a script runs in the background ignores

        self.launcher = subprocess.Popen(
            command,
            env=os.environ | {name: value},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=handle,
        )
        wait_for(lambda: all((folder / f"ready-{rank}").exists() for rank in (0, 1)))

    def rank_pid(self, rank: int) -> int:
        path = self.folder / f"ready-{rank}"
        wait_for(path.read_text)
        return int(path.read_text())

    def processes(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def end(self) -> int:
        """The launcher's exit status, once it is seen that nothing of the job is left; segments, if that is killed."""
        folder, count = (self.folder / "segments").read_text().split()
        status = self.launcher.wait(20)
        assert self.launcher.stderr is not None
        self.launcher.stderr.close()
        wait_for(lambda: not self.processes(), limit_s=10)
        if folder != "none" and status != -signal.SIGKILL:  # only Open MPI 5 is told where its segments go
            assert folder.startswith("/dev/shm/hpcdp-") and int(count) > 0
            assert not Path(folder).exists()
        return status


def test_ranks_form_one_world() -> None:
    done = launch(
        3, *python("from mpi4py import MPI; c = MPI.COMM_WORLD; print(f'{c.allgather(c.rank)} {c.rank}\\n', end='')")
    )
    assert sorted(done.stdout.split("\n")) == ["", *(f"[0, 1, 2] {rank}" for rank in range(3))], done.stderr


LISTENERS = """
import os, socket, sys
sys.path.insert(0, {folder!r})
from test_local import listeners, shown
import hpcdp
world = hpcdp.init()
world.whole and world.comm.barrier()
if world.rank == 0:
    import time
    pids, until_s = [os.getpid(), os.getppid()], time.monotonic() + 5
    while listeners(pids) and time.monotonic() < until_s:  # the launcher looks 50 times a second, if it gets a core
        time.sleep(0.1)
    print(listeners(pids), shown(os.environb[b"TOKEN"]), flush=True)
world.comm.barrier()
"""


def listeners(pids: list[int]) -> list[str]:
    """The sockets of processes that accept TCP connections from other machines."""
    libc, found = ctypes.CDLL(None), []
    for pid in pids:
        process = os.pidfd_open(pid)
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if path.is_socket():
                with socket.socket(fileno=libc.syscall(438, process, int(path.name), 0)) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(1, socket.SO_ACCEPTCONN):
                        address, port, *_ = one.getsockname()
                        device = one.getsockopt(1, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")
                        if address not in ("127.0.0.1", "::1") and device != b"lo":
                            found.append(f"{address}:{port} of {pid}")
    return found


def shown(secret: bytes) -> list[bytes]:
    """The command lines of this machine that have a secret in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [words for words in [path.read_bytes()] if secret in words]
    return found


@pytest.mark.parametrize(
    "where", [pytest.param([], marks=pytest.mark.thorough), ["-H", "localhost:4"]], ids=["local", "ssh"]
)
def test_no_port_is_open_to_others_and_no_value_is_shown(where: list[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "FI_", "UCX_"))}
    code = LISTENERS.format(folder=str(Path(__file__).parent))
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "3", "-s", "1", *where, "--env", "TOKEN", "--"]
    environ |= {"TOKEN": str(uuid.uuid4()), "HPCDP_RANKS_PER_NODE": "2"}
    done = subprocess.run([*command, *python(code)], capture_output=True, text=True, timeout=60, env=environ)
    assert (done.stdout, done.returncode) == ("[] []\n", 0), done.stderr


def test_another_python_without_the_module_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is so long that the line would be cut
        other = Path(folder, "python")
        other.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'hpcdp.train'\" >&2\nexit 1\n")
        other.chmod(0o755)
        done = launch(2, "python", "x.py", env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert f"expected {sys.executable}, which has the module hpcdp, got {other}, which lacks it; " in line
    assert line.endswith(f"give its path: hpcdp launch ... -- {sys.executable} ...")
    done = launch(1, *python("import no_such_module"))
    assert done.returncode == 1 and "hpcdp launch" not in done.stderr


def test_exit_status_of_a_rank() -> None:
    code = "import os, time; from mpi4py import MPI; os._exit(7) if MPI.COMM_WORLD.rank == 1 else time.sleep(60)"
    assert launch(2, *python(code)).returncode == 7


def test_cores_are_shared_out_unless_the_user_says() -> None:
    code = "import os; print(*(os.environ.get(n) for n in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS')), flush=True)"
    bare = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    share = max(1, CORES // 2)
    assert launch(2, *python(code), env=bare).stdout.split("\n")[0] == f"{share} {share}"
    assert launch(2, *python(code), env=bare | {"OMP_NUM_THREADS": "5"}).stdout.split("\n")[0] == "5 None"


@pytest.mark.parametrize(
    "where", [[], pytest.param(["-H", "localhost"], marks=pytest.mark.thorough)], ids=["local", "ssh"]
)
def test_one_machine_may_keep_to_its_loopback(where: list[str]) -> None:
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", *where, "--interface", "lo", "--"]
    size = python("from mpi4py import MPI; print(MPI.COMM_WORLD.size)")
    done = subprocess.run([*command, *size], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["2", "2"]), done.stderr


def test_a_user_setting_wins() -> None:
    library = mpi_library.MpiLibrary("openmpi", Path("/x/lib/libmpi.so.40"))
    environ = environment(library, Path("/x/bin/mpirun"), CORES + 1, {"OMPI_MCA_btl": "self,tcp"})
    assert environ["OMPI_MCA_btl"] == "self,tcp"
    assert environ["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_mpi_yield_when_idle" not in environment(library, Path("/x/bin/mpirun"), CORES, {})


def test_in_a_job_of_slurm_pmix_needs_no_munge() -> None:
    library = mpi_library.MpiLibrary("openmpi", Path("/x/lib/libmpi.so.40"))
    assert environment(library, Path("/x/bin/mpirun"), 1, {"SLURM_JOB_NODELIST": "n"})["PMIX_MCA_psec"] == "native"
    assert "PMIX_MCA_psec" not in environment(library, Path("/x/bin/mpirun"), 1, {})


@pytest.mark.thorough
def test_a_missing_home_is_no_obstacle() -> None:
    bare = {name: value for name, value in os.environ.items() if name != "HOME"}
    code = "import os; from mpi4py import MPI; os.write(1, os.environ['HOME'].encode() + b'\\n')"  # in one piece
    done = launch(2, *python(code), env=bare)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{pwd.getpwuid(os.getuid()).pw_dir}\n" * 2


@pytest.mark.thorough
def test_a_missing_path_is_no_obstacle() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PATH"}
    done = launch(2, "sh", "-c", "echo here", env=environ)
    assert (done.returncode, done.stdout.split()) == (0, ["here", "here"]), done.stderr


def test_standard_input_reaches_rank_0() -> None:
    code = "import sys; print('read', sys.stdin.readline())"  # Open MPI 5.0 passes a pipe's lines on, not its end
    assert "read a line" in launch(1, *python(code), input="a line\n").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["in:out", ":", "a b", ""],
        ["--bind-to", "core", "'", "é"],
        *(
            pytest.param(each, marks=pytest.mark.thorough)
            for each in (["--runtime-options", "x"], ["--mca"], ["--prtemca", "é"])
        ),
    ],
    ids=lambda arguments: arguments[0] if arguments[0] != "in:out" else "colon",
)
def test_a_program_gets_its_arguments_as_they_are(arguments: list[str]) -> None:
    done = launch(2, *python("import os, sys; os.write(1, f'{sys.argv[1:]}\\n'.encode())"), *arguments)
    assert done.stdout.splitlines() == [str(arguments)] * 2, done.stderr


def test_a_missing_program() -> None:
    for name in ("no-such-program", "x" * 300):
        done = launch(2, name)
        assert done.returncode == 127
        shown = name if len(name) < 300 else ".* ... .*"  # lines of errors are cut
        assert re.fullmatch(f"hpcdp: launch '{shown}': got no such program; check its name and PATH\n", done.stderr)


@pytest.mark.parametrize("where", [[], ["-H", "localhost"]], ids=["local", "ssh"])
@pytest.mark.thorough
def test_a_program_is_found_on_the_path_that_ranks_get(where: list[str], tmp_path: Path) -> None:
    for name in ("here", "given"):
        (tmp_path / name).mkdir()
        for program in ("both", f"{name}-alone"):
            (tmp_path / name / program).write_text(f"#!/bin/sh\necho {name}\n")
            (tmp_path / name / program).chmod(0o755)
    given = f"PATH={tmp_path / 'given'}:{os.environ['PATH']}"
    environ = os.environ | {"PATH": f"{tmp_path / 'here'}:{os.environ['PATH']}"}
    for program in ("both", "given-alone"):
        command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "1", *where, "--env", given, "--", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
        assert (done.returncode, done.stdout.split()) == (0, ["given"]), done.stderr


def test_a_script_that_only_a_shell_would_run(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("echo started\n")
    script.chmod(0o755)
    done = launch(2, str(script))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert f"launch '{script}': got a script without a first line that begins with #!; begin it with" in done.stderr
    script.write_text("#!/bin/sh\necho started\n")
    assert launch(2, str(script)).stdout == "started\n" * 2


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ("#! /no/such/python -u", "got a script of '/no/such/python', which does not exist\n"),
        ("#!/bin/sh\r", "got a script of '/bin/sh\\r', which does not exist; convert its Windows line ends: sed -i "),
    ],
)
def test_a_script_whose_interpreter_is_not_there(first: str, says: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{first}\necho started\n", newline="")
    script.chmod(0o755)
    done = launch(2, str(script))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert f"hpcdp: launch '{script}': {says}" in done.stderr


def test_a_missing_library(tmp_path: Path) -> None:
    done = launch(2, *python("pass"), env=os.environ | {"MPI4PY_LIBMPI": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "hpcdp[openmpi]" in done.stderr


def test_inside_a_job_it_is_refused() -> None:
    done = launch(2, *python("pass"), env=os.environ | {"OMPI_COMM_WORLD_SIZE": "4"})
    assert done.returncode == 2
    assert "a rank of a job of 4" in done.stderr


def test_the_shell_of_an_interactive_job_is_no_rank() -> None:
    of_srun = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    of_srun |= {"PMI_FD": "11", "PMI_JOBID": "7.0", "PMI_RANK": "0", "PMI_SIZE": "1"}  # of srun --mpi=pmi2 --pty bash
    code = "import os, sys, time; from hpcdp.core.environment import RANKS; time.sleep(0.5); "
    code += "sys.exit(3 * int(next(os.environ[name] for name in RANKS if name in os.environ)))"
    done = launch(2, *python(code), env=os.environ | of_srun)
    assert done.returncode == 3
    assert done.stderr.startswith("hpcdp launch: rank 1 (pid ")


@pytest.mark.parametrize(
    "sign",
    [
        signal.SIGTERM,
        signal.SIGQUIT,
        *(pytest.param(each, marks=pytest.mark.thorough) for each in (signal.SIGINT, signal.SIGHUP)),  # of the terminal
    ],
)
def test_an_ending_signal_ends_the_ranks(sign: signal.Signals, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.launcher.send_signal(sign)
    assert job.end() == 128 + sign  # it has ended by itself, and removed what it had made


@pytest.mark.thorough
def test_a_job_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    job = Job(tmp_path, hangup=signal.SIG_IGN)
    children = Path(f"/proc/{job.launcher.pid}/task/{job.launcher.pid}/children").read_text().split()
    for pid in (job.launcher.pid, *map(int, children)):  # a shell tells the whole process group
        os.kill(pid, signal.SIGHUP)
    time.sleep(1.0)
    assert job.launcher.poll() is None
    os.kill(job.rank_pid(1), 0)
    job.launcher.send_signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize("whose", ["launcher", "mpirun", "rank"])
def test_a_kill_leaves_nothing_behind(whose: str, tmp_path: Path) -> None:
    with process_monitor.files_of_mpich_removed():  # by the launcher, unless it is killed itself
        job = Job(tmp_path)
        children = Path(f"/proc/{job.launcher.pid}/task/{job.launcher.pid}/children").read_text().split()
        pids = {"launcher": job.launcher.pid, "mpirun": int(children[0]), "rank": job.rank_pid(1)}
        os.kill(pids[whose], signal.SIGKILL)
        assert job.end() == (-9 if whose == "launcher" else 137)
    if whose == "launcher":
        folder = (tmp_path / "segments").read_text().split()[0]
        assert launch(1, "true").returncode == 0
        assert not Path(folder).exists(), "the next launch removes it"


@pytest.mark.skipif(mpi_library.find_library().family == "mpich", reason="MPICH's mpirun waits for what ranks leave")
def test_a_process_of_any_name_is_found(tmp_path: Path) -> None:
    program = tmp_path / os.fsdecode(b"caf\xe9")  # as Latin-1 has it, or where 15 bytes are the half of a letter
    shutil.copy("/bin/sleep", program)
    done = launch(1, "sh", "-c", '"$1" 60 >/dev/null 2>&1 & echo $!', "sh", str(program))
    assert (done.returncode, done.stderr) == (0, "")
    assert not Path("/proc", done.stdout.strip()).exists()
    with subprocess.Popen([program, "60"]) as process:
        wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_bytes() == b"caf\xe9\n")
        assert str(program) in hosts.files_in_use(str(tmp_path))
        assert hosts.started_at_s("python-of-nobody") == []
        process.kill()


@pytest.mark.thorough
def test_ranks_end_where_launcher_and_mpirun_are_killed_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, "import hpcdp; hpcdp.init()")
    children = Path(f"/proc/{job.launcher.pid}/task/{job.launcher.pid}/children").read_text().split()
    job.launcher.send_signal(signal.SIGSTOP)  # so that it does not see the other's end
    os.kill(int(children[0]), signal.SIGKILL)
    job.launcher.kill()
    assert job.end() == -9
    assert launch(1, "true").returncode == 0  # and removes what they have left


def test_usr1_reaches_every_rank(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.launcher.send_signal(signal.SIGUSR1)
    wait_for(lambda: all((tmp_path / f"usr1-{rank}").exists() for rank in (0, 1)), limit_s=10)
    job.launcher.terminate()
    job.end()


@pytest.mark.parametrize("how", ["ctrl-c", "closed"])
def test_the_terminal_ends_a_job(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", *python(SLEEPER), str(tmp_path)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, command)
    wait_for(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists())
    wait_for(lambda: all((tmp_path / f"ready-{rank}").read_text() for rank in (0, 1)))
    pids = [int((tmp_path / f"ready-{rank}").read_text()) for rank in (0, 1)]
    started = time.monotonic()
    if how == "ctrl-c":
        os.write(terminal, b"\x03")
    else:
        os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 128 + (signal.SIGINT if how == "ctrl-c" else signal.SIGHUP)
    assert time.monotonic() - started < 0.8 * runner._GRACE_S, "it was killed after the time of grace"
    if how == "ctrl-c":
        os.close(terminal)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), limit_s=10)


@pytest.mark.skipif(mpi_library.find_library().family != "openmpi", reason="MPICH's mpirun ends in its own way")
def test_a_reader_that_has_gone_ends_the_job_as_it_would_end_any_program() -> None:
    lines = "import time\nfor _ in range(600): print('line', flush=True); time.sleep(0.05)"
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", *python(lines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stderr is not None
        assert job.stdout.readline() == "line\n"
        job.stdout.close()
        said = job.stderr.read()
    assert (job.returncode, said) == (128 + signal.SIGPIPE, "")


STUCK = """
import os, subprocess, sys
from hpcdp.launch import runner as supervise
from hpcdp.launch.launchers import Job
supervise._FAILED_GRACE_S = 1.0
ranks = "for n in 0 1; do PMI_RANK=$n sh -c 'sleep 0.5; [ $PMI_RANK = 0 ] && sleep 60; exit 3' & done; wait"
sys.exit(supervise.supervise(["sh", "-c", ranks], os.environ, "mpich", Job(("sh",), 2)))
"""

UNNOTICED = """
import os, sys
from hpcdp.launch import runner as supervise
from hpcdp.launch.launchers import Job
supervise._GRACE_S = 1.0
ranks = f"for n in 0 1 2; do PMI_RANK=$n sh -c 'sleep 0.5; {sys.argv[1]} exit 0' & done; wait; exec sleep {sys.argv[2]}"
sys.exit(supervise.supervise(["sh", "-c", ranks], os.environ, "mpich", Job(("sh",), 3)))
"""


@pytest.mark.thorough
def test_an_mpirun_that_does_not_end_after_a_rank_has_failed_is_killed() -> None:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    said = r"rank 1 \(pid \d+\) ended with status 3 before the others; mpirun has not ended the others in 1 s: killed\n"
    assert re.fullmatch(f"hpcdp launch: {said}", done.stderr), done.stderr
    assert time.monotonic() - started < 20


def unnoticed(left_behind: str, mpirun_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", UNNOTICED, left_behind, str(mpirun_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.thorough
def test_an_mpirun_that_does_not_notice_that_all_ranks_have_ended_well_is_killed() -> None:
    """Open MPI's, of 32 or 64 processes that end at once."""
    started = time.monotonic()
    done = unnoticed("", 60)
    assert done.returncode == 0
    said = r"(rank \d \(pid \d+\)) and all others have ended, and mpirun has not in 1 s: killed\n"
    assert re.fullmatch(f"hpcdp launch: {said}", done.stderr), done.stderr
    assert time.monotonic() - started < 30


@pytest.mark.thorough
def test_an_mpirun_that_waits_for_what_ranks_have_left_behind_is_not_killed() -> None:
    done = unnoticed("sleep 20 &", 4)
    assert (done.returncode, done.stderr) == (0, "")


SAVES = """
import os, sys
from hpcdp.launch import runner as supervise
from hpcdp.launch.launchers import Job
rank = f'trap "{sys.argv[1]}" {sys.argv[2]}; echo up; while :; do sleep 0.05; done'
ranks = f"for n in 0 1; do PMI_RANK=$n sh -c '{rank}' & done; trap : USR1; wait; wait"
sys.exit(supervise.supervise(["sh", "-c", ranks], os.environ, "mpich", Job(("sh",), 2), usr1_has_come=lambda: False))
"""


@pytest.mark.parametrize(
    ("at_signal", "signals", "status", "saved"),
    [("echo saved; exit 75", ["SIGINT"], 130, 2), ("echo saved; exit 75", ["SIGTERM", "SIGTERM"], 143, 2),
     pytest.param("echo never", ["SIGTERM", "late SIGINT"], 143, 0, marks=pytest.mark.thorough)],
)  # fmt: skip
def test_ranks_that_save_at_a_signal_do_so_before_a_signal_ends_them(
    at_signal: str, signals: list[str], status: int, saved: int
) -> None:
    saves_at = SAVE_AT[signal.Signals[signals[0]]]
    command = [sys.executable, "-c", SAVES, at_signal, str(saves_at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stderr is not None
        assert [job.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        for sign in signals:
            time.sleep(0.7 if sign.startswith("late ") else 0)
            job.send_signal(signal.Signals[sign.removeprefix("late ")])
        shown, said = job.communicate(timeout=20)
    assert (job.returncode, shown.count("saved")) == (status, saved)
    assert said == f"hpcdp launch: {signals[0]}: the run saves and ends; a second one ends it at once\n"


def test_a_job_that_goes_on_without_a_rank_is_not_ended():
    """Open MPI with ULFM, whose mpirun is told so."""
    program = STUCK.replace('["sh", "-c", ranks]', '["sh", "-c", ranks, "--with-ft"]').replace(
        "sleep 60", "sleep 3; echo on"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "on" in done.stdout
    assert "killed" not in done.stderr


def test_an_mpirun_that_fails_has_no_version(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho broken >&2; exit 3")
    mpirun.chmod(0o755)
    library = mpi_library.find_library()
    assert doctor._version_of(library, mpirun) == "which does not run: status 3, broken"


def test_info_under_the_launcher() -> None:
    done = launch(2, sys.executable, "-m", "hpcdp.cli", "info", "--json")
    facts = json.loads(done.stdout)
    assert facts["ranks"] == 2
    assert [row["rank"] for row in facts["world"]] == [0, 1]
