"""Checks of a launch before it starts.

What is checked before anything is started, alike by all launchers that run an mpirun here.

Command lines, of `hpcdp` and of programs that run as ranks: what is wrong with one is a line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..core.environment import launched_ranks
from ..errors import ConfigError, DataError, LaunchError
from . import ProgramMissingError, hosts, mpi_library
from .mpirun_output import fail
from .runner import FORWARDED, say
from .spec import Job

Number = TypeVar("Number", int, float)


class Parser(argparse.ArgumentParser):
    """Takes options in full alone, and reports wrong usage as `ConfigError`, one line where argparse prints them all.

    Args:
        options: argparse's own; an ``epilog`` is shown as it is written.
    """

    def __init__(self, **options: Any) -> None:
        if "epilog" in options:
            options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**{"allow_abbrev": False, **options})

    @property
    def commands(self) -> dict[str, Parser]:
        """The parsers of its commands by name."""
        added = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return dict(added[0].choices) if added else {}

    def error(self, message: str) -> NoReturn:
        about = self.prog.removeprefix("hpcdp").strip()
        remedy = f"{self.prog} -h lists the options"
        if lacks := re.search("(--[a-z-]+): expected one argument$", message):
            remedy = f"one that begins with - is given as {lacks[1]}=-...; {remedy}"
        raise ConfigError(f"{about}: {message}" if about else message, remedy=remedy)

    def _print_message(self, message: str, file: Any = None) -> None:  # argparse would pass over a full disk
        print(message, end="", file=file or sys.stderr, flush=True)


class _Defaults(argparse.HelpFormatter):
    """Shows the default of each option that has one, unless its help does."""

    def _get_help_string(self, action: argparse.Action) -> str:
        about = action.help or ""
        shown = "(default: " in about or action.default is None or action.default == argparse.SUPPRESS
        return about if shown else f"{about} (default: %(default)s)"


class Program(Parser):
    """The options of a program that runs as ranks; ``--help`` shows their defaults."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Defaults, **options)

    @contextlib.contextmanager
    def settings(self) -> Iterator[argparse.Namespace]:
        """What the command line says. Where it is wrong, or the block finds it so (`ConfigError`, `DataError`), every
        rank ends with status 2, after one line of rank 0."""
        try:
            yield self.parse_args()
        except (ConfigError, DataError) as error:
            sys.exit(fail(error, 2, by_all=isinstance(error, ConfigError)))


def at_least(smallest: Number) -> Callable[[str], Number]:
    """The type of an argument that is a number from ``smallest`` on, a whole one where that is an int."""
    kind = type(smallest)
    expected = f"a {'whole ' if kind is int else ''}number from {smallest:g}"

    def number(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not smallest <= value < math.inf:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return number


# execve(2): the interpreter ends at a blank, or with the line
_FIRST_LINE = re.compile(rb"#![ \t]*([^ \t\n]*)")
_PYTHON = re.compile(r"python[0-9.]*")
_LIMIT_VARIABLES = ("HPCDP_STALL_S", "HPCDP_TIMEOUT_S")


def check(job: Job, *, several_hosts: bool = False) -> list[str]:
    """The words of `Job.mpi_args`, where a job can be started from here.

    Args:
        several_hosts: whether it will run on more than one.

    Raises:
        LaunchError: for a shell that is a rank itself, a program that is missing here, open quotes.
        ConfigError: for an interface that is not here or leads to no other host, or a limit of the watchdog that every
            rank would refuse.
    """
    if launched_ranks() is not None:
        raise LaunchError(
            "launch ranks",
            expected="a plain shell",
            got=f"a rank of a job of {launched_ranks()} that mpirun or srun started",
            remedy="call the program itself there, or leave mpirun out",
        )
    if any(name in os.environ for name in _LIMIT_VARIABLES):
        _check_limits()
    try:
        further = shlex.split(job.mpi_args)
    except ValueError as error:
        raise LaunchError("launch --mpi-args", expected="closed quotes", got=f"{job.mpi_args!r}: {error}") from error
    if job.interface is not None:
        hosts.check(job.interface, several_hosts=several_hosts)
    check_program(job.program[0], job.env.get("PATH"))
    return further


def warn_of_other_library(job: Job, family: str) -> None:
    """A line on stderr where the program's environment has an MPI library of another family than that whose mpirun or
    srun starts it: each rank would be a world of one."""
    other = mpi_library.of_other_environment(job.program[0])
    if other is None or other.family == family or "MPI4PY_LIBMPI" in {**os.environ, **job.env}:
        return
    say(
        f"{job.program[0]} is of an environment with {other.name}, and is started for {mpi_library.FAMILIES[family]}: "
        f"its ranks will be worlds of one; use {other.path.parent.parent}/bin/hpcdp launch"
    )


def missing_module(job: Job, module: str) -> LaunchError | None:
    """Return what to say of a rank that has not found ``module``, where this Python has it and the rank's is another
    one: ``python`` without an activated environment is that of PATH, which the launcher leaves as it is."""
    theirs = _python_of(job)
    if theirs is not None and _is_this_python(theirs):
        return None
    if (theirs is None and module != "hpcdp") or importlib.util.find_spec(module) is None:
        return None
    activate = Path(sys.prefix, "bin", "activate")
    remedies = [f"activate its environment with . {activate}"] if activate.exists() else []
    remedies += [f"name it: hpcdp launch ... -- {sys.executable} ..."]
    return LaunchError(
        f"launch {job.program[0]!r}",
        expected=f"{sys.executable}, which has the module {module}",
        got=f"{theirs or 'another Python'}, which has not",
        remedy=", or ".join(remedies),
    )


def _python_of(job: Job) -> Path | None:
    """Return the Python that runs the program of ``job``; None where it is none, or only a shell knows."""
    path = job.env.get("PATH")
    found = shutil.which(job.program[0], path=path)
    if found is not None and not _PYTHON.fullmatch(Path(found).name):
        try:
            with open(found, "rb") as file:
                first = os.fsdecode(file.readline(512))
        except OSError:  # it may be run and not be read
            return None
        words = first.removeprefix("#!").split() if first.startswith("#!") else []
        if words and Path(words[0]).name == "env":
            words = [word for word in words[1:] if not word.startswith("-")]
        found = shutil.which(words[0], path=path) if words and _PYTHON.fullmatch(Path(words[0]).name) else None
    return None if found is None else Path(found).absolute()


def _is_this_python(other: Path) -> bool:
    """Whether it has the modules of this one: by the folder that it is in, as that of an environment is a link."""
    own = Path(sys.executable)
    return other.parent.resolve() == own.parent.resolve() and other.resolve() == own.resolve()


def check_binding(job: Job, family: str, processes: int, cores: int, host: str) -> None:
    """Raises `LaunchError` where Open MPI could not give each process on ``host`` a core: it then starts none."""
    if family == "openmpi" and job.bind not in (None, "none") and processes > cores:
        raise LaunchError(
            f"launch --bind {job.bind}", expected=f"at most {cores} processes, the cores of {host}", got=processes
        )


def check_program(name: str, path: str | None = None) -> None:
    """Raises `ProgramMissingError`, or `LaunchError`, unless this machine has the program, on ``path`` where that is
    not this process's PATH."""
    found = shutil.which(name, path=path)
    if found is not None:
        _check_first_line(name, Path(found))
    if found is None:
        if os.path.isfile(name) and not os.access(name, os.X_OK):
            raise LaunchError(
                f"launch {name!r}",
                got="a file that is not executable",
                remedy="name what runs it, e.g. python, or make it executable with chmod +x",
            )
        raise ProgramMissingError(f"launch {name!r}", got="no such program", remedy="check its name and PATH")


def _check_first_line(name: str, program: Path) -> None:
    """Raises `LaunchError` for a script that only a shell would run, which execve(2) refuses as a text without #!, and
    for one whose interpreter is not there."""
    try:
        with program.open("rb") as file:
            beginning = file.read(512)
    except OSError:  # it may be run and not be read
        return
    script = _FIRST_LINE.match(beginning)
    if script is None and b"\0" not in beginning:
        raise LaunchError(
            f"launch {name!r}",
            got="a script without a first line that begins with #!",
            remedy="begin it with e.g. #!/bin/sh, or name what runs it, e.g. bash",
        )
    if script is not None and not os.path.exists(script[1]):
        interpreter = os.fsdecode(script[1])
        raise LaunchError(
            f"launch {name!r}",
            got=f"a script of {interpreter!r}, which is not there",
            remedy="its lines end as those of Windows: sed -i 's/\\r$//' mends it" if "\r" in interpreter else None,
        )


def _check_limits() -> None:
    # With NumPy, which the launcher does not need otherwise, and whose threads must not take signals from this one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGTSTP})
    try:
        from ..comm.watchdog import limits_s

        limits_s()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
