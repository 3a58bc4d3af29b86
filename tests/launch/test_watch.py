"""The rank that failed first is named, however mpirun words it, and the status of the job is its status."""

import contextlib
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcdp.launch import mpi_library, mpirun_stderr, process_monitor, runner
from hpcdp.launch.process_monitor import End, Watch

MPICH = mpi_library.find_library().family == "mpich"
FAULT = """
import os, signal, sys, time
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
MPI.COMM_WORLD.barrier()
if rank == 1:
    time.sleep(0.3)
    {}
MPI.COMM_WORLD.barrier()
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
MPIRUN = """
import os, subprocess, sys, time
ends = ["sleep 0.9; exit 0", "sleep 0.6; sleep 0.01; exit 3", "sleep 0.3; kill -TERM $$"]
ranks = [
    subprocess.Popen(["sh", "-c", end], env=dict(os.environ, PMI_RANK=str(rank))) for rank, end in enumerate(ends)
]
print(*(rank.pid for rank in ranks), flush=True)
for rank in ranks:
    rank.wait()
"""
MISNAMES = """#!{python}
import os, subprocess, sys
ends = [{aborts!r}, "sleep 0.3; kill -KILL $$", "sleep 1; kill -TERM $$"]
ranks = [
    subprocess.Popen(["sh", "-c", end], env=dict(os.environ, OMPI_COMM_WORLD_RANK=str(rank)))
    for rank, end in enumerate(ends)
]
for rank in ranks:
    rank.wait()
print("[vm:00000] *** An error occurred in Socket closed", file=sys.stderr)
says = "prterun has exited due to process rank {named} with PID 0 on node a.site calling\\n\\"abort\\". This may"
print(says, file=sys.stderr)
sys.exit({status})
"""

GOES_ON = """#!{python}
import os, subprocess, sys
ends = ["sleep 0.6; exit 0", "sleep 0.2; kill -KILL $$"]
ranks = [
    subprocess.Popen(["sh", "-c", end], env=dict(os.environ, OMPI_COMM_WORLD_RANK=str(rank)))
    for rank, end in enumerate(ends)
]
for rank in ranks:
    rank.wait()
if {misses}:
    print("rank 0 of 2: barrier cannot end: rank 1 (host a, pid 7) is gone; the job ends now", file=sys.stderr)
"""


def launch(ranks: int, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(ranks), "--", sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | variables)


@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        (KILLED, 137, "was killed by SIGKILL"),
        pytest.param("os._exit(3)", 3, "ended with status 3 before the others", marks=pytest.mark.thorough),
        ("os._exit(0)", 1, "ended without MPI_Finalize (exit status 0)"),
        (
            "MPI.COMM_WORLD.Abort(7)",
            7,
            "has aborted the job with status 7" if MPICH else "ended with status 7 before the others",
        ),
    ],
)
def test_the_rank_that_fails_first_is_named_in_one_line(fault: str, status: int, says: str) -> None:
    for _ in range(3):
        done = launch(2, FAULT.format(fault))
        assert done.returncode == status, done.stderr
        ours = re.findall(r"hpcdp launch: rank (\d) \(pid \d+\) (.*)", done.stderr)
        if not (MPICH and fault == KILLED and ours and ours[0][0] != "1"):  # see watch._AFTER_S
            break
    assert ours == [("1", says)], done.stderr
    assert done.stderr.count("\n") <= 1 + (MPICH and "Abort" in fault), done.stderr


@pytest.mark.parametrize(
    ("aborts", "named", "status"),
    [
        (f"sleep 0.32; exit {mpirun_stderr.LOST_CONNECTION_STATUS}", 0, 1),
        (f"sleep 0.32; exit {mpirun_stderr.LOST_CONNECTION_STATUS}", 1, 1),
        (
            "sleep 0.32; kill -TERM $$",
            0,
            mpirun_stderr.LOST_CONNECTION_STATUS,
        ),  # mpirun heard of its abort, and was faster
        ("sleep 0.4; kill -KILL $$", 0, mpirun_stderr.LOST_CONNECTION_STATUS),
    ],
)
@pytest.mark.thorough
def test_a_rank_is_named_where_open_mpi_names_one_that_aborts_for_it(
    tmp_path: Path, aborts: str, named: int, status: int
) -> None:
    """It has lost its connection to the first; seen where one uses TCP, and mpirun hears of the abort first."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(MISNAMES.format(python=sys.executable, aborts=aborts, named=named, status=status))
    mpirun.chmod(0o755)
    supervise = (
        "import os, sys; from hpcdp.launch.runner import supervise as s; from hpcdp.launch.launchers import Job; "
    )
    code = supervise + "sys.exit(s([sys.argv[1]], os.environ, 'openmpi', Job(('a',), 3)))"
    done = subprocess.run([sys.executable, "-c", code, mpirun], capture_output=True, text=True, timeout=60)
    ours = re.findall("hpcdp launch: (.*\n)", done.stderr)
    assert done.returncode == 137
    assert re.fullmatch(r"rank 1 \(pid \d+\) was killed by SIGKILL\n", "".join(ours)), done.stderr


@pytest.mark.parametrize("misses", [True, False])
def test_a_job_that_the_watchdog_has_ended_has_failed_whatever_status_mpirun_has(tmp_path: Path, misses: bool) -> None:
    """With ULFM that is now and then 0, as where others continue without a rank that was killed."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(GOES_ON.format(python=sys.executable, misses=misses))
    mpirun.chmod(0o755)
    supervise = (
        "import os, sys; from hpcdp.launch.runner import supervise as s; from hpcdp.launch.launchers import Job; "
    )
    code = supervise + "sys.exit(s([sys.argv[1], '--with-ft', 'ulfm'], os.environ, 'openmpi', Job(('a',), 2)))"
    done = subprocess.run([sys.executable, "-c", code, mpirun], capture_output=True, text=True, timeout=60)
    ours = "hpcdp launch: the watchdog has ended the job: rank 1 (host a, pid 7) is gone\n"
    assert (done.returncode, ours in done.stderr) == (int(misses), misses), done.stderr


def test_an_end_needs_no_words() -> None:
    done = launch(3, FAULT.format("pass"))
    assert (done.returncode, done.stderr) == (0, "")


SILENT = """
import sys
from hpcdp.launch.launchers import Job, mpirun
sys.exit(mpirun.run_local(Job(("sh", "-c", "sleep 1; echo up"), 2)))
"""


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_silent_start_is_explained(on_terminal: bool) -> None:
    ours, theirs = pty.openpty() if on_terminal else os.pipe()
    environ = os.environ | {"HPCDP_SILENCE_S": "0.3"}
    command = [sys.executable, "-c", SILENT]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, env=environ)
    os.close(theirs)
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert (done.returncode, done.stdout) == (0, "up\n" * 2)
    assert re.fullmatch("hpcdp launch: (no output from 2 ranks|mpirun has started . of 2 ranks) in 0.3 s.*\r?\n", said)


@pytest.mark.parametrize(
    ("is_silent", "starts", "running", "says"),
    [
        (True, 2, {0}, "no output from 2 ranks in 3 s"),
        (True, 1, {0}, "mpirun has started 1 of 2 ranks in 3 s"),
        (True, 2, set(), ""),
        (False, 2, {0, 1}, ""),
    ],
)
def test_a_silence_is_explained_only_while_ranks_start(
    is_silent: bool, starts: int, running: set[int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(runner, "_output", SimpleNamespace(is_silent=is_silent))
    monkeypatch.setattr(runner, "say", said.append)
    runner._explain_silence(SimpleNamespace(starts=[None] * starts, running=running), 2, 3.0)  # type: ignore[arg-type]
    assert len(said) == bool(says) and all(text.startswith(says) for text in said)


@pytest.mark.thorough
def test_ranks_that_all_fail_alike_speak_for_themselves_if_they_do() -> None:
    done = launch(1, FAULT.format("pass") + "MPI.Finalize(); os._exit(5)")
    assert done.returncode == 5
    assert re.fullmatch(r"hpcdp launch: rank 0 \(pid \d+\) ended with status 5\n", done.stderr), done.stderr
    done = launch(1, FAULT.format("pass") + "MPI.Finalize(); print('why', file=sys.stderr); sys.exit(5)")
    assert (done.returncode, done.stderr) == (5, "why\n")


def test_a_job_that_stops_early_needs_no_words() -> None:
    done = launch(2, FAULT.format("pass") + "MPI.Finalize(); os._exit(75)")
    assert (done.returncode, done.stderr) == (75, "")


@pytest.mark.parametrize(
    ("name", "value"), [("HPCDP_STALL_S", "x"), ("HPCDP_TIMEOUT_S", "-1"), ("HPCDP_SILENCE_S", "s")]
)
def test_limits_that_every_rank_would_refuse_start_none(name: str, value: str) -> None:
    done = launch(2, "print('started')", **{name: value})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert name in done.stderr and repr(value) in done.stderr


def watched(command: list[str], ranks: int) -> tuple[list[int], list[End]]:
    """The pids that ``command`` prints and the ends that are seen below it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as mpirun,
            contextlib.closing(Watch(mpirun.pid, ranks, {signal.SIGCHLD})) as watch,
        ):
            assert mpirun.stdout is not None
            deadline = time.monotonic() + 20
            while mpirun.poll() is None:
                watch.wait(1.0)
                assert time.monotonic() < deadline
            return [int(pid) for pid in mpirun.stdout.read().split()], watch.ends()
    finally:
        signal.sigtimedwait({signal.SIGCHLD}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_ends_are_seen_in_their_order_and_what_a_rank_starts_is_no_rank() -> None:
    pids, ends = watched([sys.executable, "-c", MPIRUN], 3)
    assert [(end.rank, end.pid) for end in ends] == [(2, pids[2]), (1, pids[1]), (0, pids[0])]
    for end, status in zip(ends, (128 + signal.SIGTERM, 3, 0), strict=True):
        assert end.exit_status == status
    assert all(0 <= later.at_s - sooner.at_s < 20 for sooner, later in itertools.pairwise(ends))
    assert ends[-1].at_s - ends[0].at_s > 0.1  # of 0.6


def test_what_a_rank_starts_while_its_own_program_begins_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_of, asked = process_monitor._rank, set[int]()

    def before_and_after_exec(pid: int) -> int | None:
        is_first = pid not in asked and b"sh" in Path(f"/proc/{pid}/cmdline").read_bytes()
        asked.add(pid)
        return None if is_first else rank_of(pid)

    monkeypatch.setattr(process_monitor, "_rank", before_and_after_exec)
    pids, ends = watched([sys.executable, "-c", MPIRUN], 3)
    assert {(end.rank, end.pid) for end in ends} == set(enumerate(pids))
    assert {end.rank: end.exit_status for end in ends} == {0: 0, 1: 3, 2: 128 + signal.SIGTERM}


def test_without_proc_nothing_is_known_and_the_wait_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_monitor, "Path", lambda path: Path(f"/nowhere{path}"))
    assert watched([sys.executable, "-c", MPIRUN], 3)[1] == []


def test_a_signal_wakes_the_wait() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        with contextlib.closing(Watch(os.getpid(), 0, {signal.SIGUSR2})) as watch:
            assert watch.wait(0.0) is None
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)  # other threads of this process block nothing
            received = watch.wait(5.0)
            assert received is not None and (received.number, received.code) == (signal.SIGUSR2, -6)  # SI_TKILL
            assert watch.wait(0.0) is None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_words_for_an_end() -> None:
    assert str(End(1, 7, None, 0.0)) == "rank 1 (pid 7) ended before the others"
    assert str(End(1, 7, signal.SIGRTMIN + 3, 0.0)) == f"rank 1 (pid 7) was killed by signal {signal.SIGRTMIN + 3}"


def test_a_rank_that_fails_after_another_has_ended_well_is_named() -> None:
    code = "import os, time; rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']); "
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable, "-c"]
    done = subprocess.run(
        [*command, code + "time.sleep(rank * 0.7); os._exit(rank * 9)"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 9
    assert re.findall(r"hpcdp launch: (.*)", done.stderr)[0].startswith("rank 1 (pid "), done.stderr
    assert "before the others" not in done.stderr
