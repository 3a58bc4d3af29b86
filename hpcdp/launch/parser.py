"""Argument parsers of commands and rank programs."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from ..core.environment import fail
from ..errors import ConfigError, DataError

Number = TypeVar("Number", int, float)


class _WholeWords(argparse.HelpFormatter):
    """A help formatter that breaks no line at the hyphens of an option or a file name."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Unchanged(_WholeWords, argparse.RawDescriptionHelpFormatter):
    """A help formatter that prints the description and the epilog unchanged."""


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations that raises `ConfigError` for wrong usage.

    Args:
        options: arguments of `argparse.ArgumentParser`; an ``epilog`` is printed unchanged.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _Unchanged if "epilog" in options else _WholeWords)
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
        if message.endswith("required: COMMAND"):
            message = "expected a command, got none"
        remedy = f"{self.prog} -h lists the {'commands' if self.commands else 'options'}"
        if option := re.search("(--[a-z-]+): expected one argument$", message):
            remedy = f"write a value that begins with - as {option[1]}=-...; {remedy}"
        raise ConfigError(f"{about}: {message}" if about else message, remedy=remedy)

    def _print_message(self, message: str, file: Any = None) -> None:  # argparse ignores a full disk
        print(message, end="", file=file or sys.stderr, flush=True)


class _Defaults(_WholeWords):
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
