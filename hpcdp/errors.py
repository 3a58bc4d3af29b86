"""Floor 0: exceptions, and lines on stderr. Imports: nothing.

Every error says, on one line, which operation failed, where, what was expected, what was got and what to do.
"""

from __future__ import annotations

import numbers
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import TypeGuard


class HpcdpError(Exception):
    """An error of hpcdp, whose text is one line built from its parts.

    Args:
        operation: what was attempted, e.g. ``"allreduce"`` or ``"read idx"``.
        where: the file, parameter, key or rank list that it concerns.
        expected: what would have been valid.
        got: what was found instead.
        remedy: what the user can do about it.
        rank: the rank that raised, where that matters.
    """

    def __init__(
        self,
        operation: str,
        *,
        where: object = None,
        expected: object = None,
        got: object = None,
        remedy: str | None = None,
        rank: int | None = None,
    ) -> None:
        self.operation = operation
        self.where = where
        self.expected = expected
        self.got = got
        self.remedy = remedy
        self.rank = rank
        self.is_on_every_rank = False
        """Whether every rank of a world raises this error (`hpcdp.comm.agreement`), so that one can report it."""
        super().__init__(operation)

    def __str__(self) -> str:
        text = self.operation if self.rank is None else f"rank {self.rank}: {self.operation}"
        if self.where is not None:
            text += f" [{self.where}]"
        facts = [f"expected {self.expected}"] if self.expected is not None else []
        if self.got is not None:
            facts.append(f"got {self.got}")
        if facts:
            text += ": " + ", ".join(facts)
        if self.remedy is not None:
            text += f"; {self.remedy}"
        return printable(" ".join(text.split()))


class ConfigError(HpcdpError):
    """A setting, flag or configuration file is wrong. The command line exits with 2."""


class LaunchError(HpcdpError):
    """The job was started in a way that cannot work, or a launcher is missing."""


class MismatchError(HpcdpError):
    """Ranks disagree; raised on every rank, naming the ranks and the first difference."""


class DataError(HpcdpError):
    """A data file is missing, damaged or of another format."""


class SaveError(DataError):
    """A checkpoint could not be written while training, e.g. on a full disk. The command line exits with 1: what was
    asked was right."""


class ArrayMixError(HpcdpError):
    """Arrays of different namespaces or devices met in one operation."""


class DeviceError(HpcdpError, RuntimeError):
    """A device that the machine, or a network, does not have; or parameters that have no values yet."""


class UnsupportedError(HpcdpError):
    """An operation is not defined for this dtype, layout or world."""


class NonFiniteGradientError(HpcdpError):
    """The summed gradients hold a NaN or an infinity, and the policy is to raise."""


class StaleGradientError(HpcdpError):
    """A step was asked for although some parameters got no gradient since the last one."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it unwinds a program as Ctrl-C does. The command line exits with 143."""


class WorldAborted(HpcdpError):
    """Another rank failed; this one was waiting for it."""


def whole_number(operation: str, where: str, value: object, least: int) -> int:
    """``value``, an integer of Python's or NumPy's, as an int; `ConfigError` unless it is one from ``least`` on."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # arrays have __index__, too, whatever is in them
        number = least - 1
    if number < least:
        raise ConfigError(operation, where=where, expected=f"an integer >= {least}", got=repr(value))
    return number


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a real number, of Python's or NumPy's, that a float can be, and no bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        float(value)
    except OverflowError:  # an int of 309 digits or more
        return False
    return True


def check_name(kind: str, name: object, valid: Iterable[str], where: object = None) -> None:
    """Raises `ConfigError` with the closest and all valid names unless ``name`` is one of them."""
    valid = list(valid)
    if name in valid:
        return
    import difflib  # not before: this file is imported by all others

    close = difflib.get_close_matches(str(name).lower(), valid, n=1)
    raise ConfigError(
        f"unknown {kind} {name!r}",
        where=where,
        remedy=(f"did you mean {close[0]!r}? " if close else "") + f"valid: {', '.join(valid)}",
    )


def printable(text: str) -> str:
    """A text on one line, which does nothing to a terminal: what is no character that one sees is written out."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def to_stderr(text: str) -> None:
    """Writes a line in one piece, at once: where PYTHONUNBUFFERED is set `print` writes the line's end apart, and what
    mpirun copies of other ranks comes between."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def listed(names: Sequence[object], most: int = 3) -> str:
    """The first of ``names``, at ``most`` so many, and how many more there are."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def shortened(text: str, longest: int) -> str:
    """``text`` in at most so many characters, the last three of which stand for what is cut off."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def type_named(value: object) -> str:
    """The type of a value, with its article: "an int", "a list"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
