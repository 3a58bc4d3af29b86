"""Validators of arguments, one function for each kind.

Each returns the argument in the form that its caller uses. Otherwise it raises an error that names the ``operation``,
the argument (``where``), what was expected and what was got. ``expected`` replaces the general words. A check stands at
the public boundary, and the code behind it trusts its arguments.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..errors import ConfigError, UnsupportedError, is_number, type_named, whole_number

__all__ = [
    "boolean", "check_name", "described", "file_name", "function", "instance", "instances", "is_number", "lengths",
    "matching", "not_copied", "number", "one_of", "part_of", "same_names", "whole_number", "whole_numbers",
]  # fmt: skip

Kind = TypeVar("Kind")
_LONGEST_REPR = 80


def described(value: object) -> str:
    """Return a value as an error shows it: its repr if that is short and has no address, else its type."""
    text = repr(value)
    return text if len(text) <= _LONGEST_REPR and text.isprintable() and " at 0x" not in text else type_named(value)


def number(
    operation: str,
    where: str,
    value: object,
    *,
    least: float = -sys.float_info.max,
    above: float | None = None,
    most: float = sys.float_info.max,
    below: float | None = None,
    expected: str | None = None,
) -> float:
    """Return a real number as a float, from ``least`` or ``above`` to ``most`` or ``below``.

    NaN is refused, and infinity unless ``most=math.inf``.
    """
    low = least if above is None else math.nextafter(above, math.inf)
    high = most if below is None else math.nextafter(below, -math.inf)
    if is_number(value) and low <= float(value) <= high:
        return float(value)
    if expected is None:
        begin = f"> {above:g}" if above is not None else f">= {least:g}"
        end = f"{below:g})" if below is not None else f"{most:g}]"
        if high >= sys.float_info.max:
            expected = f"a number {begin}" if low > -sys.float_info.max else "a finite number"
        else:
            expected = f"a number in {'[' if above is None else '('}{least if above is None else above:g}, {end}"
    raise ConfigError(operation, where=where, expected=expected, got=repr(value))


def whole_numbers(operation: str, least: int, **values: object) -> None:
    """Raise `ConfigError` unless each keyword argument is an integer of at least ``least``."""
    for where, value in values.items():
        whole_number(operation, where, value, least)


def part_of(operation: str, num_parts: object, part_index: object) -> tuple[int, int]:
    """Return a number of parts and the index of one of them."""
    parts = whole_number(operation, "num_parts", num_parts, 1)
    return parts, whole_number(operation, "part_index", part_index, 0, parts - 1)


def lengths(operation: str, where: str, value: object, axes: Collection[str], least: int = 1) -> tuple[int, ...]:
    """Return the lengths of a shape: an integer of at least ``least`` for each of ``axes``."""
    expected = f"({', '.join(axes)}{',' * (len(axes) == 1)}), integers >= {least}"
    shape = tuple(value) if isinstance(value, Iterable) else ()
    if len(shape) != len(axes):
        raise ConfigError(operation, where=where, expected=expected, got=repr(value))
    return tuple(whole_number(operation, where, length, least, expected=expected, shown=value) for length in shape)


def one_of(
    operation: str, where: str | None, value: object, names: Collection[str], *, expected: str | None = None
) -> str:
    """Return one of a few ``names``; `check_name` also suggests the nearest."""
    if isinstance(value, str) and value in names:
        return value
    raise ConfigError(operation, where=where, expected=expected or f"one of {', '.join(names)}", got=repr(value))


def check_name(kind: str, name: object, valid: Iterable[str], where: object = None) -> None:
    """Raise `ConfigError` with the closest and all valid names unless ``name`` is valid."""
    valid = list(valid)
    if name in valid:
        return
    import difflib  # late: every other module imports this one

    close = difflib.get_close_matches(str(name).lower(), valid, n=1)
    raise ConfigError(
        f"unknown {kind} {name!r}",
        where=where,
        remedy=(f"did you mean {close[0]!r}? " if close else "") + f"valid: {', '.join(valid)}",
    )


def matching(operation: str, text: str, pattern: str | re.Pattern[str], expected: str) -> str:
    """Return a ``text`` that matches a ``pattern`` in full; character classes are those of ASCII."""
    if re.fullmatch(pattern, text) if isinstance(pattern, re.Pattern) else re.fullmatch(pattern, text, re.ASCII):
        return text
    raise ConfigError(operation, expected=expected, got=repr(text))


def boolean(operation: str, where: str, value: object) -> bool:
    """Return ``value``, which is True or False."""
    return instance(operation, where, value, bool, "True or False")


def instance(
    operation: str, where: str | None, value: object, kind: type[Kind] | tuple[type[Kind], ...], expected: str
) -> Kind:
    """Return ``value``, an instance of ``kind``, or of one of several kinds."""
    if isinstance(value, kind):
        return value
    raise ConfigError(operation, where=where, expected=expected, got=described(value))


def instances(
    operation: str, where: str | None, values: Iterable[object], kind: type[Kind], expected: str
) -> tuple[Kind, ...]:
    """Return ``values`` as a tuple of instances of ``kind``."""
    return tuple(instance(operation, where, value, kind, expected) for value in values)


def function(operation: str, where: str | None, value: object, expected: str) -> Callable[..., Any]:
    """Return ``value``, a callable."""
    if callable(value):
        return value
    raise ConfigError(operation, where=where, expected=expected, got=described(value))


def file_name(operation: str, where: str, path: str | Path, suffixes: Collection[str] = ()) -> Path:
    """Return the path of an output file: its folder exists, and its name ends in one of ``suffixes``."""
    path = Path(path)
    if suffixes and path.suffix not in suffixes:
        expected = f"a name that ends in {', '.join(suffixes)}"
        raise ConfigError(operation, where=where, expected=expected, got=repr(str(path)))
    if not os.path.isdir(path.parent):  # pathlib's version raises for names that are too long
        raise ConfigError(operation, where=path, expected=f"an existing folder {path.parent}", got="none")
    return path


def same_names(operation: str, holder: str, own: Collection[Any], given: Collection[Any], called: str = "") -> None:
    """Raise `ConfigError` with the first name that only ``own``, the names of ``holder``, or only a state has."""
    for name in (*own, *given):
        if name not in own or name not in given:
            held, lacks = (holder, "the state") if name in own else ("the state", holder)
            where = f"{called} {name!r}" if called else name
            raise ConfigError(operation, where=where, expected=f"it in {lacks}", got=f"it in {held} only")


def not_copied(name: str, got: str, remedy: str | None = None, what: str = "its state") -> Callable[[object], NoReturn]:
    """Return the ``__reduce__`` of a class whose instances can be neither copied nor pickled."""

    def __reduce__(self: object) -> NoReturn:
        raise UnsupportedError(name, expected=f"{what} to be copied or saved", got=got, remedy=remedy)

    return __reduce__
