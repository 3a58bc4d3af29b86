"""The command ``hpcdp``.

It parses arguments, calls the module of a command, and turns errors into one line and an exit status: 2 for a wrong
argument or setting, 127 for a missing program, 130 after Ctrl-C, 143 after SIGTERM, 1 for others.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import dataclasses
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import hpcdp

from ..core.checks import check_name
from ..core.environment import end_early, fail, lead_nowhere
from ..errors import ConfigError, DataError, HpcdpError, LaunchError, SaveError, reason, to_stderr

if TYPE_CHECKING:
    from ..launch.parser import Parser

_FORWARDING = {
    "launch": "start a program as MPI ranks, here or on other machines",
    "bench": "measure messages and collectives",
    "tune": "measure collectives and save the fastest algorithms",
    "checkpoint": "list, verify, compare, export and remove checkpoints",
    "slurm": "render batch scripts, submit them, manage their jobs",
}
"""Commands whose modules parse the rest of the line, with their descriptions."""
_EPILOG = """\
hpcdp COMMAND -h lists the options of a command.

examples:
  hpcdp train lenet --data digits --ranks 2    a network of the package
  hpcdp launch -n 2 -- python train.py         your own program
  hpcdp doctor                                 when something does not work
"""
_INFO_EXAMPLES = """\
examples:
  hpcdp info
  hpcdp info --json
  hpcdp launch -n 4 -- hpcdp info    also node and cores of each rank
"""
_COMPLETION_EXAMPLES = """\
examples:
  eval "$(hpcdp completion bash)"          in ~/.bashrc
  eval "$(hpcdp completion zsh)"           in ~/.zshrc, after compinit
  hpcdp completion zsh >~/.zfunc/_hpcdp    or in a folder of $fpath
"""
_SHELLS = ("bash", "zsh")
_FILES = ("FILE", "PATH", "OUT", "A", "B", "PROGRAM ...")
_FOLDERS = ("DIR", "FOLDER", "RUN")
"""The values of arguments that a shell completes by names of files or folders, as the help shows them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of ``hpcdp`` and return its exit status; under mpirun or srun every rank must call."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("hpcdp", _encode)
        sys.stdout.reconfigure(errors="hpcdp")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no warning about a cache that cannot be written
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _main(sys.argv[1:] if argv is None else argv)


def _encode(error: UnicodeError) -> tuple[str | bytes, int]:
    """Print undecodable bytes of a path unchanged, so that a printed command works, and escape unknown characters."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    error.end = error.start + 1
    is_byte = "\udc80" <= error.object[error.start] <= "\udcff"
    return codecs.lookup_error("surrogateescape" if is_byte else "backslashreplace")(error)


def _open_closed_streams() -> None:
    """Redirect outputs that a shell has closed (``>&-``) to /dev/null, so that no later file gets their numbers."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            lead_nowhere(number)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print hpcdp's warnings, which concern the user, without their source line; print others as usual."""
    with contextlib.suppress(OSError):
        if category is UserWarning:
            to_stderr(f"hpcdp: {message}")
        else:
            (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


def _main(argv: Sequence[str]) -> int:
    if argv[:1] == ["train"]:  # before imports that take seconds
        from ..core import environment

        environment.note_usr1()
    try:
        if argv[:1] in (["train"], ["launch"]):
            _require_working_folder(argv[0])
        arguments = _parse(argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except HpcdpError as error:
        from ..launch import ProgramMissingError

        asked_wrongly = isinstance(error, ConfigError | DataError | LaunchError) and not isinstance(error, SaveError)
        return fail(error, 127 if isinstance(error, ProgramMissingError) else 2 if asked_wrongly else 1)
    except (KeyboardInterrupt, OSError) as error:
        return end_early(error, "".join(argv[:1]))
    except MemoryError as error:  # also a GPU's
        remedy = "use smaller batches, or fewer ranks a node" if argv[:1] == ["train"] else None
        return fail(HpcdpError("".join(argv[:1]), expected="more memory", got=str(error) or "none", remedy=remedy), 1)


def _require_working_folder(command: str) -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(command, expected="a working folder", got=reason(error), remedy="cd to another") from error


def parser() -> Parser:
    """Return the parser of ``hpcdp`` and its commands; those of `_FORWARDING` have parsers in their modules."""
    from ..launch.parser import Parser, add_command
    from . import train

    made = Parser(prog="hpcdp", description="Data-parallel training of neural networks on MPI.", epilog=_EPILOG)
    made.add_argument("--version", action="version", version=f"hpcdp {hpcdp.__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", dest="command_name", required=True)
    train.add_train(commands)
    about = "show versions, MPI library, cores, memory and devices"
    info = add_command(commands, "info", _info, about, epilog=_INFO_EXAMPLES)
    info.add_argument("--json", action="store_true", help="print JSON")
    doctor = add_command(commands, "doctor", _doctor, "check an installation and print remedies")
    doctor.add_argument("--slurm", action="store_true", help="check MPI under Slurm; in a job it starts job steps")
    for name, about in _FORWARDING.items():
        add_command(commands, name, _forward, about)
    train.add_report(commands)
    about = "print the completion script of bash or zsh"
    completion = add_command(commands, "completion", _complete, about, epilog=_COMPLETION_EXAMPLES)
    completion.add_argument("shell", metavar="SHELL", help=" or ".join(_SHELLS))
    return made


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    if argv and argv[0] in _FORWARDING:
        return argparse.Namespace(run=_forward, name=argv[0], rest=argv[1:])
    made = parser()
    if argv and not argv[0].startswith("-"):
        check_name("command", argv[0], made.commands)
    arguments: argparse.Namespace = made.parse_args(argv)
    return arguments


def complete_parser() -> Parser:
    """Return the parser of ``hpcdp`` with the options of every command."""
    made = parser()
    action = next(action for action in made._actions if isinstance(action, argparse._SubParsersAction))
    for name in _FORWARDING:
        action.choices[name] = _module_of(name).parser()
    return made


def _forward(arguments: argparse.Namespace) -> int:
    """Run a command of `_FORWARDING`; every rank of a job calls, and a wrong argument is wrong for all."""
    try:
        status: int = _module_of(arguments.name).main(arguments.rest)
        return status
    except ConfigError as error:
        return fail(error, 2, by_all=True)


def _module_of(name: str) -> Any:
    """Return the module of a command of `_FORWARDING`, with its functions ``parser`` and ``main``."""
    names = {"bench": "hpcdp.bench.command", "slurm": "hpcdp.cli.slurm_jobs", "tune": "hpcdp.bench.tune"}
    return importlib.import_module(names.get(name, f"hpcdp.cli.{name}"))


def _info(arguments: argparse.Namespace) -> int:
    from . import doctor

    return doctor.show_info(as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from . import doctor

    return doctor.show(doctor.slurm_checks() if arguments.slurm else doctor.CHECKS)


def _complete(arguments: argparse.Namespace) -> int:
    """Print the completion script of a shell, made by shtab."""
    check_name("shell", arguments.shell, _SHELLS)
    import shtab

    made = complete_parser()
    values = _values()
    for command, action in _actions(made):
        if (command, action.dest) in values:
            action.choices = values[command, action.dest]
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(made, arguments.shell))
    return 0


def _values() -> dict[tuple[str, str], Sequence[str]]:
    """Return the valid values of arguments, by command and attribute; it loads NumPy."""
    from ..bench.command import BENCHMARKS, STYLES
    from ..collectives import ALGORITHMS
    from ..launch.launchers import LAUNCHERS
    from ..launch.slurm_scripts import TEMPLATES
    from ..train.config import TrainConfig

    fields = dataclasses.fields(TrainConfig)
    values = {("train", field.name): field.metadata["choices"] for field in fields if field.metadata["choices"]}
    return values | {
        ("launch", "launcher"): list(LAUNCHERS),
        ("bench", "benchmark"): BENCHMARKS,
        ("bench", "style"): STYLES,
        ("tune", "collectives"): list(ALGORITHMS),
        ("slurm render", "template"): list(TEMPLATES),
        ("slurm submit", "template"): list(TEMPLATES),
        ("completion", "shell"): _SHELLS,
    }


def _actions(made: Parser) -> Iterator[tuple[str, argparse.Action]]:
    """Yield every argument with the name of its command."""
    for action in made._actions:
        yield made.prog.removeprefix("hpcdp").strip(), action
    for command in made.commands.values():
        yield from _actions(command)
