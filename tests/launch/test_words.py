"""What Open MPI's mpirun says of a host that it has lost, or a rank that has failed, is heard, and copied on."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from hpcdp.launch import runner
from hpcdp.launch.mpirun_stderr import FailedRank, Invoked, MpirunStderr
from hpcdp.launch.process_monitor import End, Watch

SAID = """\
--------------------------------------------------------------------------
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-node1-28@0,0] on node node1
  Remote daemon: [prterun-node1-28@0,{}] on node {}

This is usually due to either a failure of the TCP network
connection to the node, or possibly an internal failure of
"""


@pytest.mark.parametrize("hosts", [(), ("node2",), ("node2", "node7.site")])
def test_a_lost_host_is_heard(hosts: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    text = "a rank's own words\n" + "".join(SAID.format(rank, host) for rank, host in enumerate(hosts, 1))
    words = MpirunStderr()
    shell = 'for word in "$@"; do printf %s "$word" >&2; done'
    with contextlib.closing(Watch(os.getpid(), 0, {signal.SIGUSR2})) as watch:
        with subprocess.Popen(["sh", "-c", shell, "sh", *text], stderr=words.end):
            words.attach(watch)
            watch.wait(0.2)
            watch.wait(0.2)
        assert words.lost() == {host: f"mpirun has lost {host}" for host in hosts}
    assert capfd.readouterr().err == text


@pytest.mark.parametrize(
    ("text", "torn", "lost", "named"),
    [
        (SAID.format(1, "node2"), "node2", ["node2"], None),
        ("process rank 1 with PID 70 on node a exited on signal 11 (Segmentation fault).\n", "11", [],
         FailedRank(1, 70, 11)),
        ("  Process name: [prterun-a-5@1,2]\n  Exit code:    70\n", "70", [], FailedRank(2, None, 70 << 8)),
    ],
)  # fmt: skip
def test_what_comes_in_two_pieces_is_heard_whole(
    text: str, torn: str, lost: list[str], named: FailedRank | None
) -> None:
    words = MpirunStderr()
    writing = os.dup(words.end)
    at = text.rindex(torn) + 1
    with contextlib.closing(Watch(os.getpid(), 0, {signal.SIGUSR2})) as watch:
        words.attach(watch)
        for piece in (text[:at], text[at:]):
            os.write(writing, piece.encode())
            watch.wait(10.0)
        os.close(writing)
        assert list(words.lost()) == lost
    assert words.named == named


def heard(text: str) -> MpirunStderr:
    words = MpirunStderr()
    os.write(words.end, text.encode())
    with contextlib.closing(Watch(os.getpid(), 0, {signal.SIGUSR2})) as watch:
        words.attach(watch)
        words.lost()
    return words


@pytest.mark.parametrize(
    ("text", "invoked"),
    [
        ("MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\n  Proc: [[32017,1],3]\n  Errorcode: 7\n",
         Invoked(3, 7)),
        ("MPI_ABORT was invoked on rank 12 in communicator MPI_COMM_WORLD\nwith errorcode 259.\n", Invoked(12, 3)),
        ("Abort(7) on node 1 (rank 5 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 7) - process 5\n",
         Invoked(5, 7)),
        ("MPI_ABORT was invoked on rank 3 in communicator MPI COMMUNICATOR 4 SPLIT FROM 0\n  Errorcode: 7\n", None),
        ("*** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,\n", None),
    ],
)  # fmt: skip
def test_who_has_called_mpi_abort_is_heard(text: str, invoked: Invoked | None) -> None:
    assert heard(text).invoked == invoked


FAILED = """\
rank 2 of 3 failed:
Traceback (most recent call last):
  File "a.py", line 3, in <module>
ValueError: first

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 5, in <module>
    save()
    ^^^^^^
hpcdp.errors.SaveError: save: got No space left on device
more of it

"""
ENDED = [End(1, 7, 1 << 8, 0.0), End(2, 8, 15, 0.1)]


@pytest.mark.parametrize(
    ("text", "code", "last"),
    [
        (FAILED, 1, "rank 2 of 3 failed: hpcdp.errors.SaveError: save: got No space left on device"),
        (FAILED.replace("rank 2", "rank 1"), 1,
         "rank 1 (pid 7) ended with status 1: hpcdp.errors.SaveError: save: got No space left on device"),
        ("".join(f"[1,2]<stderr>: {line}" for line in FAILED.splitlines(keepends=True)), 1,
         "rank 2 of 3 failed: hpcdp.errors.SaveError: save: got No space left on device"),
        (FAILED, 3, "rank 1 (pid 7) ended with status 3 before the others"),
        ("hpcdp: rank 0: save: got No space left on device\n\n", 1, ""),
        ("hpcdp: rank 1: no such data\n", 2, ""),
        ("hpcdp: taking step 7 instead\nmore\n", 1, "rank 1 (pid 7) ended with status 1 before the others"),
        ("hpcdp: taking step 7 instead\n", 3, "rank 1 (pid 7) ended with status 3 before the others"),
        (f"{FAILED}Abort(1) on node 2 (rank 2 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1)\n", 1,
         "rank 2 of 3 failed: hpcdp.errors.SaveError: save: got No space left on device"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["openmpi", "mpich"])
def test_the_cause_stands_last(text: str, code: int, last: str, family: str) -> None:
    ends = [ENDED[0]._replace(status=code << 8), ENDED[1]]
    status, line = runner._explained(ends, code, family, words := heard(text))
    assert (status, runner._with_reason(line, status, words)) == (code, last)


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("import hpcdp.core.environment as ending; ending.fail('why', 1)", "hpcdp: rank 0: why"),
        ("import hpcdp; world = hpcdp.init(); world.comm.barrier(); 1 // world.rank; world.comm.barrier()",
         "ended with status 1: ZeroDivisionError: integer division or modulo by zero"),
    ],
)  # fmt: skip
def test_the_cause_stands_last_in_a_job(code: str, last: str) -> None:
    """Open MPI's lines pass through the assembler of live output."""
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith(last), done.stderr


@pytest.mark.parametrize(
    ("family", "code", "statuses", "text", "expected"),
    [
        ("openmpi", 1, [15, 15, 9], "", (1, "mpirun has ended all ranks at a signal, which it does")),
        ("openmpi", 1, [143 << 8, 15, 143 << 8], "", (1, "mpirun has ended all ranks at a signal,")),
        ("openmpi", 143, [143 << 8, 15, 15], "", (143, "rank 0 (pid 100) ended with status 143 (SIGTERM) before the")),
        ("openmpi", 131, [3, 15, 15], "", (131, "rank 0 (pid 100) was killed by SIGQUIT")),
        ("mpich", 15, [15, 15, 15], "", (143, "all ranks were ended by SIGTERM")),
        ("mpich", 15, [143 << 8] * 3, "", (143, "all ranks were ended by SIGTERM")),
        ("mpich", 15, [15, 9, 9], "", (143, "rank 0 (pid 100) was killed by SIGTERM")),
        ("mpich", 130, [9, 9, 9], "Abort(130) on node 2 (rank 2 in comm 0): application called "
         "MPI_Abort(MPI_COMM_WORLD, 130) - process 2\n", (130, "rank 2 has aborted the job with status 130")),
    ],
)  # fmt: skip
def test_a_signal_is_named_with_whom_it_has_ended(
    family: str, code: int, statuses: list[int], text: str, expected: tuple[int, str]
) -> None:
    ends = [End(rank, 100 + rank, status, 1 + rank / 100) for rank, status in enumerate(statuses)]
    status, said = runner._explained(ends, code, family, heard(text))
    assert status == expected[0] and (said or "").startswith(expected[1])


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("rank 0 of 3: barrier cannot end: rank 1 (host a, pid 7) is gone; the job ends now\n",
         "rank 1 (host a, pid 7) is gone"),
        ("[1,2]<stderr>: rank 2 of 3: push has not ended in 0.5 s: rank 1 (host a) has not come, rank 0 is gone\n"
         "[1,2]<stderr>:   the job ends now (HPCDP_TIMEOUT_S)", "rank 1 (host a) has not come, rank 0 is gone"),
        ("rank 2 of 3: push has not ended in 60 s: rank 1 (host a, pid 7) has not come\n  the job goes on", None),
    ],
)  # fmt: skip
def test_whom_the_watchdog_has_missed_is_heard(text: str, missing: str | None) -> None:
    assert heard(text).missing == missing
