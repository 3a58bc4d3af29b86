"""Argument parsers of commands and rank programs, and the checks of a job before its launch."""

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..core.environment import launched_ranks
from ..core.exit import fail
from ..errors import ConfigError, DataError, LaunchError
from . import ProgramMissingError, hosts, mpi_library
from .runner import FORWARDED, say
from .spec import Job

Number = TypeVar("Number", int, float)


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations that raises `ConfigError` for wrong usage.

    Args:
        options: arguments of `argparse.ArgumentParser`; an ``epilog`` is printed unchanged.
    """

    def __init__(self, **options: Any) -> None:
        if "epilog" in options:
            options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**{"allow_abbrev": False, **options})

    @property
    def commands(self) -> dict[str, Parser]:
        """The parsers of the commands by name."""
        added = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return dict(added[0].choices) if added else {}

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse a command line; raise `ConfigError` for unknown arguments."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown, parsed)
        return parsed

    def refuse(self, unknown: Sequence[str], parsed: argparse.Namespace) -> NoReturn:
        """Raise `ConfigError` for unknown arguments of this parser or its command, with the nearest option."""
        command = self.commands.get(getattr(parsed, "command_name", ""), self)
        option = unknown[0].partition("=")[0]
        if not option.startswith("-"):
            command.error(f"unrecognized arguments: {' '.join(unknown)}")
        import difflib  # only an error needs it

        close = difflib.get_close_matches(option, command._option_string_actions, n=1)
        command.error(f"unknown option {option!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` for wrong usage."""
        about = self.prog.removeprefix("hpcdp").strip()
        remedy = f"{self.prog} -h lists the options"
        if option := re.search("(--[a-z-]+): expected one argument$", message):
            remedy = f"write a value that begins with - as {option[1]}=-...; {remedy}"
        raise ConfigError(f"{about}: {message}" if about else message, remedy=remedy)

    def _print_message(self, message: str, file: Any = None) -> None:  # argparse ignores a full disk
        print(message, end="", file=file or sys.stderr, flush=True)


class _Defaults(argparse.HelpFormatter):
    """A help formatter that appends the default of each option whose help does not contain it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        about = action.help or ""
        shown = "(default: " in about or action.default is None or action.default == argparse.SUPPRESS
        return about if shown else f"{about} (default: %(default)s)"


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, **options: Any
) -> Parser:
    """Add a command to the subparsers ``commands`` and return its parser; ``run`` becomes the attribute ``run``."""
    made: Parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", **options)
    made.set_defaults(run=run)
    return made


class Program(Parser):
    """The parser of a program that runs as ranks; ``--help`` shows the defaults."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Defaults, **options)

    @contextlib.contextmanager
    def settings(self) -> Iterator[argparse.Namespace]:
        """Yield the parsed command line.

        Where it is wrong, or the block raises `ConfigError` or `DataError`, rank 0 writes one line and every rank exits
        with status 2.
        """
        try:
            yield self.parse_args()
        except (ConfigError, DataError) as error:
            sys.exit(fail(error, 2, by_all=isinstance(error, ConfigError)))


def at_least(smallest: Number) -> Callable[[str], Number]:
    """Return an argparse type for numbers of at least ``smallest``, which are integers where ``smallest`` is one."""
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


# execve(2): the interpreter's path ends at a blank or at the end of the line
_FIRST_LINE = re.compile(rb"#![ \t]*([^ \t\n]*)")
_PYTHON = re.compile(r"python[0-9.]*")
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


def missing_module(job: Job, module: str) -> LaunchError | None:
    """Return the error of a rank that cannot import ``module`` because it runs another Python; else None.

    The launcher does not change PATH, so ``python`` without an activated environment is another Python.
    """
    theirs = _python_of(job)
    if theirs is not None and _is_this_python(theirs):
        return None
    if (theirs is None and module != "hpcdp") or importlib.util.find_spec(module) is None:
        return None
    activate = Path(sys.prefix, "bin", "activate")
    remedies = [f"activate its environment with . {activate}"] if activate.exists() else []
    remedies += [f"give its path: hpcdp launch ... -- {sys.executable} ..."]
    return LaunchError(
        f"launch {job.program[0]!r}",
        expected=f"{sys.executable}, which has the module {module}",
        got=f"{theirs or 'another Python'}, which lacks it",
        remedy=", or ".join(remedies),
    )


def _python_of(job: Job) -> Path | None:
    """Return the Python that runs the program of ``job``; None for other programs, and where only a shell knows."""
    path = job.env.get("PATH")
    program = shutil.which(job.program[0], path=path)
    if program is not None and not _PYTHON.fullmatch(Path(program).name):
        try:
            with open(program, "rb") as file:
                first = os.fsdecode(file.readline(512))
        except OSError:  # executable, but not readable
            return None
        words = first.removeprefix("#!").split() if first.startswith("#!") else []
        if words and Path(words[0]).name == "env":
            words = [word for word in words[1:] if not word.startswith("-")]
        program = shutil.which(words[0], path=path) if words and _PYTHON.fullmatch(Path(words[0]).name) else None
    return None if program is None else Path(program).absolute()


def _is_this_python(other: Path) -> bool:
    """Return whether ``other`` has this Python's modules; compares folders, as an environment's Python is a link."""
    own = Path(sys.executable)
    return other.parent.resolve() == own.parent.resolve() and other.resolve() == own.resolve()


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
        from ..comm.watchdog import limits_s

        limits_s()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
