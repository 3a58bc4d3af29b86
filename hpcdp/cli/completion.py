"""The command `hpcdp completion`: print the completion script of a shell, made by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from ..core.checks import check_name
from ..launch.parser import Parser

_SHELLS = ("bash", "zsh")
_FILES = ("FILE", "PATH", "OUT", "A", "B")
_FOLDERS = ("DIR", "FOLDER", "RUN")
_EPILOG = """\
examples:
  eval "$(hpcdp completion bash)"                          in ~/.bashrc
  hpcdp completion zsh >~/.zfunc/_hpcdp     a folder of $fpath, for zsh
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
    for action in _actions(made):
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(made, given.shell))
    return 0


def _actions(made: Parser) -> Iterator[argparse.Action]:
    yield from made._actions
    for command in made.commands.values():
        yield from _actions(command)
