"""The checks of a job before its launch, which every launcher makes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
from pathlib import Path

from ...core.environment import launched_ranks
from ...errors import LaunchError
from .. import ProgramMissingError, hosts, mpi_library
from ..runner import FORWARDED, say
from ..spec import Job

# execve(2): the interpreter's path ends at a blank or at the end of the line
_FIRST_LINE = re.compile(rb"#![ \t]*([^ \t\n]*)")
_LIMIT_VARIABLES = ("HPCDP_STALL_S", "HPCDP_TIMEOUT_S")


def check(job: Job, *, several_hosts: bool = False) -> list[str]:
    """Check that ``job`` can be launched from this process, and return the words of `Job.mpi_args`.

    Args:
        job: the program and its options.
        several_hosts: whether the job will run on more than one host.

    Raises:
        LaunchError: this process is itself a rank; the program is missing here; ``mpi_args`` has an open quote.
        ConfigError: the network interface is missing or reaches no other host; a watchdog limit is invalid.
    """
    refuse_rank("launch ranks")
    if any(name in os.environ for name in _LIMIT_VARIABLES):
        _check_limits()
    try:
        mpi_args = shlex.split(job.mpi_args)
    except ValueError as error:
        raise LaunchError("launch --mpi-args", expected="closed quotes", got=f"{job.mpi_args!r}: {error}") from error
    if job.interface is not None:
        hosts.check(job.interface, several_hosts=several_hosts)
    check_program(job.program[0], job.env.get("PATH"))
    return mpi_args


def refuse_rank(operation: str) -> None:
    """Raise `LaunchError` in a rank of a job, which cannot launch another one."""
    if (ranks := launched_ranks()) is not None:
        got = f"a rank of a job of {ranks} that mpirun or srun started"
        remedy = "call the program itself, or remove the outer mpirun or srun"
        raise LaunchError(operation, expected="a plain shell", got=got, remedy=remedy)


def warn_of_other_library(job: Job, family: str) -> None:
    """Warn on stderr if the program's virtual environment has an MPI library of another family than ``family``.

    Each rank would then be a world of one.
    """
    other = mpi_library.of_other_environment(job.program[0])
    if other is None or other.family == family or "MPI4PY_LIBMPI" in {**os.environ, **job.env}:
        return
    say(
        f"the environment of {job.program[0]} has {other.name}, but {mpi_library.FAMILIES[family]} starts it: "
        f"its ranks will be worlds of one; use {other.path.parent.parent}/bin/hpcdp launch"
    )


def check_binding(job: Job, family: str, processes: int, cores: int, host: str) -> None:
    """Raise `LaunchError` where Open MPI could not bind each process on ``host`` to a core; it then starts none."""
    if family == "openmpi" and job.bind not in (None, "none") and processes > cores:
        raise LaunchError(
            f"launch --bind {job.bind}", expected=f"at most {cores} processes, the cores of {host}", got=processes
        )


def check_program(name: str, path: str | None = None) -> None:
    """Raise `LaunchError` unless this machine can run the program; ``path`` replaces this process's PATH.

    Raises:
        ProgramMissingError: there is no such program.
        LaunchError: the file is not executable, or a script whose interpreter execve(2) would not find.
    """
    program = shutil.which(name, path=path)
    if program is not None:
        _check_first_line(name, Path(program))
    elif os.path.isfile(name) and not os.access(name, os.X_OK):
        remedy = "put its interpreter before it, e.g. python, or make it executable with chmod +x"
        raise LaunchError(f"launch {name!r}", got="a file that is not executable", remedy=remedy)
    else:
        raise ProgramMissingError(f"launch {name!r}", got="no such program", remedy="check its name and PATH")


def _check_first_line(name: str, program: Path) -> None:
    """Raise `LaunchError` for a script without ``#!``, which execve(2) refuses, or with a missing interpreter."""
    try:
        with program.open("rb") as file:
            beginning = file.read(512)
    except OSError:  # executable, but not readable
        return
    script = _FIRST_LINE.match(beginning)
    if script is None and b"\0" not in beginning:
        raise LaunchError(
            f"launch {name!r}",
            got="a script without a first line that begins with #!",
            remedy="begin it with e.g. #!/bin/sh, or put its interpreter before it, e.g. bash",
        )
    if script is not None and not os.path.exists(script[1]):
        interpreter = os.fsdecode(script[1])
        raise LaunchError(
            f"launch {name!r}",
            got=f"a script of {interpreter!r}, which does not exist",
            remedy="convert its Windows line ends: sed -i 's/\\r$//'" if "\r" in interpreter else None,
        )


def _check_limits() -> None:
    # The import loads NumPy, whose threads must not receive this thread's signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGTSTP})
    try:
        from ...comm.watchdog import limits_s

        limits_s()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
