"""Ranks that mpirun says it has started: those that nobody saw are named, and none at all is no success."""

import subprocess
import sys
from pathlib import Path

import pytest

from hpcdp.launch import mpi_library
from hpcdp.launch.runner import listed

RUN = """
import os, sys
from hpcdp.launch.runner import supervise
from hpcdp.launch.launchers import Job
mpirun, ranks, elsewhere, asked = sys.argv[1:]
hosts = [None] * (int(ranks) - int(elsewhere)) + ["away"] * int(elsewhere)
try:
    status = supervise([mpirun, "-n", ranks], os.environ, "openmpi", Job((mpirun,), int(ranks), mpi_args=asked),
                       elsewhere=int(elsewhere), hosts=hosts)
except Exception as error:
    status = print(error, file=sys.stderr) or 2
sys.exit(status)
"""
LINE = "(rank, host, exe, pid) = ({}, {}, /bin/a, b\n c\u2028d) = (1, x, {})"
NO_PROCESS = 2**22 + 1  # more than pid_max may be
KILLED = f"""
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID {NO_PROCESS + 1} on node away exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
REFUSED = """
--------------------------------------------------------------------------
An unrecognized option was included on the mpirun command line:

  Option: --bogus

Please use the "mpirun --help" command to obtain a list of all
supported options.
--------------------------------------------------------------------------
"""


@pytest.fixture
def mpirun(tmp_path: Path):
    """An mpirun of Open MPI 5 that starts nothing, but lists so many ranks, and says and ends as it is told."""

    def make(option: str | None, ranks: int = 0, says: str = "", status: int = 0) -> Path:
        (tmp_path / "bin").mkdir()
        (tmp_path / "lib").mkdir()
        if option is not None:
            (tmp_path / "lib" / "libprrte.so.3").write_bytes(f"\0{option}\0output-proctable\0".encode())
        (tmp_path / "bin" / "prterun").touch()
        (tmp_path / "says").write_text(says.lstrip("\n"))
        lines = [LINE.format(rank, "any", NO_PROCESS + rank) for rank in range(ranks)]
        (tmp_path / "list").write_text("".join(f"{line}\n" for line in lines))
        program = tmp_path / "bin" / "mpirun"
        program.write_text(
            "#!/bin/sh\n"
            f'case $1 in --{option}) cat "{tmp_path}/list" >"${{2#output-proctable=}}" ;; esac\n'
            f'cat "{tmp_path}/says" >&2\nexit {status}\n'
        )
        program.chmod(0o755)
        return program

    return make


def run(program: Path, ranks: int, elsewhere: int = 0, asked: str = "") -> tuple[int, str]:
    words = [str(program), str(ranks), str(elsewhere), asked]
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("option", ["runtime-options", "rtos"])
@pytest.mark.parametrize("ranks", [0, 2])
def test_an_mpirun_that_starts_less_than_it_was_asked_for_is_no_success(mpirun, option: str, ranks: int) -> None:
    said = "hpcdp launch: mpirun has ended with status 0, but not started 3 ranks\n"
    assert run(mpirun(option, ranks), 3) == (1, said)


@pytest.mark.parametrize("option", ["runtime-options", None])
def test_ranks_that_ended_before_a_look_are_a_success(mpirun, option: str | None) -> None:
    assert run(mpirun(option, 3), 3) == (0, "")


def test_a_rank_that_nobody_saw_is_named_where_mpirun_is_silent(mpirun) -> None:
    code, said = run(mpirun("rtos", 2, status=137), 2)
    ours = f"rank 0 (pid {NO_PROCESS}) ended before the others; the status of mpirun is 137 (SIGKILL)\n"
    assert (code, said) == (137, f"hpcdp launch: {ours}")


ABORTED = f"""
--------------------------------------------------------------------------
prterun has exited due to process rank 0 with PID {NO_PROCESS} on node here calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
--------------------------------------------------------------------------
"""


@pytest.mark.parametrize(("says", "status"), [("", 137), (ABORTED, 3), (ABORTED, 14)])
def test_no_rank_is_named_where_those_of_other_hosts_may_have_failed_first(mpirun, says: str, status: int) -> None:
    code, said = run(mpirun("rtos", 2, says, status), 2, elsewhere=1)
    ours = f"hpcdp launch: mpirun has ended with status {status}; which rank failed first is not known: those of other "
    assert (code, said) == (status, says.lstrip("\n") + ours + "hosts are not watched inside a batch job\n")


INVOKED = """
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD
  Proc: [[32017,1],2]
  Errorcode: 7

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
--------------------------------------------------------------------------
"""


@pytest.mark.parametrize(("status", "known"), [(7, True), (14, True), (137, False)])
def test_a_rank_of_another_host_that_has_called_mpi_abort_is_named(mpirun, status: int, known: bool) -> None:
    code, said = run(mpirun("rtos", 3, INVOKED + ABORTED, status), 3, elsewhere=1)
    ours = "rank 2 has aborted the job with status 7" if known else "mpirun has ended with status 137; which rank fail"
    assert code == (7 if known else status) and f"hpcdp launch: {ours}" in said


def test_it_is_the_one_that_mpirun_speaks_of(mpirun) -> None:
    code, said = run(mpirun("rtos", 2, KILLED, 137), 2, elsewhere=1)
    ours = f"hpcdp launch: rank 1 (pid {NO_PROCESS + 1} on away) was killed by SIGKILL\n"
    assert (code, said) == (137, ours)


def test_what_mpirun_says_is_shown_where_nobody_can_be_named(mpirun) -> None:
    assert run(mpirun(None, 0, KILLED, 137), 2) == (137, KILLED.lstrip("\n"))


def test_why_a_rank_has_left_is_shown_where_nobody_knows_for_whom(mpirun) -> None:
    lines = ["An error occurred in Socket closed", "reported by process [755302401,1]", "on a NULL communicator"]
    lines += ["Unknown error", "MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,"]
    lines += ["   and MPI will try to terminate your MPI job as well)"]
    words = "".join(f"[node1:00000] *** {line}\n" for line in lines)
    code, said = run(mpirun("rtos", 2, words, 14), 2)
    assert code == 14 and said.startswith(words + "hpcdp launch: rank 0 (pid "), said


def test_an_mpirun_that_fails_in_silence_is_told_of(mpirun) -> None:
    assert run(mpirun(None, 0, "", 213), 2) == (
        213,
        "hpcdp launch: mpirun has ended with status 213, without a message\n",
    )


def test_arguments_that_mpirun_refuses_are_one_line(mpirun) -> None:
    program = mpirun("rtos", 0, REFUSED, 213)
    says = "'--bogus': An unrecognized option was included on the mpirun command line: Option: --bogus\n"
    assert run(program, 2, asked="--bogus") == (2, f"launch --mpi-args: expected arguments of {program}, got {says}")


def test_what_mpirun_says_is_shown_where_it_has_refused_nothing(mpirun) -> None:
    said = "[away:1] Rank 0 bound to package[0][core:0]\n"
    code, shown = run(mpirun("rtos", 2, said + KILLED.lstrip("\n"), 137), 2, asked="--report-bindings")
    assert code == 137 and shown.startswith(said + "hpcdp launch: rank 1 (pid "), shown


def test_a_list_of_the_users_own_is_left_alone(mpirun) -> None:
    program = str(mpirun("rtos"))
    for word in ("--rtos", "--runtime-options", "--output-proctable=-"):
        with listed([program, word], 2, []) as (command, started):
            assert (command, started) == ([program, word], None)


@pytest.mark.skipif(mpi_library.find_library().family != "openmpi", reason="MPICH's mpirun writes no list")
def test_this_mpirun_lists_ranks() -> None:
    program = mpi_library.find_mpirun(mpi_library.find_library())
    if mpi_library.is_open_mpi_4(program):
        pytest.skip("Open MPI 4 writes no list")
    with listed([str(program)], 2, []) as (_, started):
        assert started is not None
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
