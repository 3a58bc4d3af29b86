"""Command lines, of `hpcdp` and of programs that run as ranks: what is wrong with one is a line."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from ..errors import ConfigError, DataError
from .ending import fail

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
