"""The command `hpcdp completion`: print the completion script of a shell, made by shtab."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence

from ..core.checks import check_name
from ..launch.parser import Parser

_SHELLS = ("bash", "zsh")
_FILES = ("FILE", "PATH", "OUT", "A", "B", "PROGRAM ...")
_FOLDERS = ("DIR", "FOLDER", "RUN")
_EPILOG = """\
examples:
  eval "$(hpcdp completion bash)"          in ~/.bashrc
  eval "$(hpcdp completion zsh)"           in ~/.zshrc, after compinit
  hpcdp completion zsh >~/.zfunc/_hpcdp    or in a folder of $fpath
"""


def parser() -> Parser:
    """Return the parser of ``hpcdp completion``."""
    made = Parser(prog="hpcdp completion", description="Print the completion script of a shell.", epilog=_EPILOG)
    made.add_argument("shell", metavar="SHELL", help=" or ".join(_SHELLS))
    return made


def main(argv: Sequence[str]) -> int:
    """Run ``hpcdp completion`` with ``argv`` and return its exit status.

    Raises:
        ConfigError: the shell is unknown.
    """
    given = parser().parse_args(argv)
    check_name("shell", given.shell, _SHELLS)
    import shtab

    from . import complete_parser

    made = complete_parser()
    values = _values()
    for command, action in _actions(made):
        if (command, action.dest) in values:
            action.choices = values[command, action.dest]
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(made, given.shell))
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
