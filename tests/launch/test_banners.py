"""What mpirun says at length of a rank that has failed is kept back to the letter; all else passes."""

import pytest

from hpcdp.launch.mpirun_stderr import Banners

RULE = "-" * 74 + "\n"
TEXTS = [
    """\
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-21858@1,1]
   Exit code:    3
""",
    """\
prterun noticed that process rank 1 with PID 21875 on node vm exited on
signal 11 (Segmentation fault).
""",
    """\
MPI_ABORT was invoked on rank 1 in communicator MPI COMMUNICATOR 3 DUP FROM 0
  Proc: [[32285,1],1]
  Errorcode: -1

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
""",
    """\
prterun has exited due to process rank 1 with PID 0 on node node2.site calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
""",
    """\
prterun has exited due to process rank 1 with PID 2263 on node vm exiting
improperly. There are three reasons this could occur:

1. this process did not call "init" before exiting, but others in the
job did. This can cause a job to hang indefinitely while it waits for
all processes to call "init". By rule, if one process calls "init",
then ALL processes must call "init" prior to termination.

2. this process called "init", but exited without calling "finalize".
By rule, all processes that call "init" MUST call "finalize" prior to
exiting or it will be considered an "abnormal termination"

3. this process called "MPI_Abort" or "prte_abort" and the mca
parameter prte_create_session_dirs is set to false. In this case, the
run-time cannot detect that the abort call was an abnormal
termination. Hence, the only error message you will receive is this
one.

This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).

You can avoid this message by specifying -quiet on the prterun command
line.
""",
    """\
An MPI communication peer process has unexpectedly disconnected.  This
usually indicates a failure in the peer process (e.g., a crash or
otherwise exiting without calling MPI_FINALIZE first).

Although this local MPI process will likely now behave unpredictably
(it may even hang or crash), the root cause of this problem is the
failure of the peer -- that is what you need to investigate.  For
example, there may be a core file that you can examine.  More
generally: such peer hangups are frequently caused by application bugs
or other external events.

  Local host: node2
  Local PID:  1335
  Peer host:  node1
""",
    """\
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-node1-28@0,0] on node node1
  Remote daemon: [prterun-node1-28@0,1] on node node2

This is usually due to either a failure of the TCP network
connection to the node, or possibly an internal failure of
the daemon itself. We cannot recover from this failure, and
therefore will terminate the job.
""",
]
KNOWN = [f"{RULE}{text}{RULE}" for text in TEXTS]
KNOWN += [
    """\
[node1:00000] *** An error occurred in Socket closed
[node1:00000] *** reported by process [755302401,1]
[node1:00000] *** on a NULL communicator
[node1:00000] *** Unknown error
[node1:00000] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,
[node1:00000] ***    and MPI will try to terminate your MPI job as well)
""",
    "3 more processes have sent help message help-mpi-errors.txt / mpi_errors_are_fatal unknown handle\n",
    "[proxy:0@node1] HYD_pmcd_pmip_control_cmd_cb (/src/pm/hydra/proxy/pmip_cb.c:490): assert (!closed) failed\n",
    "[mpiexec@node1] main (/src/pm/hydra/mpiexec/mpiexec.c:270): process manager error waiting for completion\n",
]
OTHER = [
    "a rank's own words\n",
    RULE,
    f"{RULE}epoch  loss\n{RULE}",
    f"{RULE}prterun noticed that process rank 1 with PID 2 on node vm exited on\nsignal 9 (Killed). And more.\n{RULE}",
    f"{RULE}prterun noticed that process rank 1 with PID 2 on node vm exited on\nbetween\nsignal 9 (Killed).\n{RULE}",
    f"{RULE}prterun has exited due to something new.\n{RULE}",
    f"{RULE}All nodes which are allocated for this job are already filled.\n{RULE}",
    "[mpiexec@vm] match_arg (lib/utils/args.c:166): unrecognized argument bogus\n",
    "progress " + KNOWN[-1],
    "[node1:00000] *** An error occurred in MPI_Send\n[node1:00000] *** reported by process [755302401,1]\n",
    "[node1:00000] *** An error occurred in Socket closed\n[node1:00000] *** on communicator MPI_COMM_WORLD\n",
    "no end of a line",
]


def shown(text: str, size: int) -> tuple[str, str]:
    banners, content = Banners(), text.encode()
    found = b"".join(banners.pass_on(content[at : at + size]) for at in range(0, len(content), size)) + banners.end()
    return found.decode(), banners.kept.decode()


@pytest.mark.parametrize("text", KNOWN)
def test_what_is_known_is_kept(text: str) -> None:
    assert shown(text, 100_000) == ("", text)


def test_a_line_that_comes_behind_its_beginning_is_known() -> None:
    banners, at = Banners(), len("[proxy:0@node1] ")
    assert banners.pass_on(KNOWN[-2][:at].encode()) == b""
    assert banners.pass_on(f"{KNOWN[-2][at:]}more\n".encode()) == b"more\n"
    assert banners.kept.decode() == KNOWN[-2]


@pytest.mark.parametrize("text", OTHER)
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_what_is_not_known_is_shown(text: str, size: int) -> None:
    assert shown(text, size) == (text, "")


def test_all_of_it_together() -> None:
    mixed = [text for pair in zip(OTHER, KNOWN, strict=False) for text in pair]
    assert shown("".join(mixed[2:]), 100_000) == ("".join(mixed[2::2]), "".join(mixed[3::2]))


@pytest.mark.parametrize("whole", KNOWN)
def test_nothing_is_lost_where_it_comes_in_pieces_or_stops(whole: str) -> None:
    for size in (1, 7, 60):
        assert sum(map(len, shown(whole, size))) == len(whole)
    for end in range(0, len(whole), 13):
        assert shown(whole[:end], 100_000) == (whole[:end], "")
