"""Validators of arguments, one function for each kind.

Each returns the argument in the form that its caller uses. Otherwise it raises an error that names the ``operation``,
the argument (``where``), what was expected and what was got. ``expected`` replaces the general words. A check stands at
the public boundary, and the code behind it trusts its arguments.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeGuard, TypeVar

from ..errors import ConfigError, UnsupportedError, type_named

Kind = TypeVar("Kind")
_LONGEST_REPR = 80


def described(value: object) -> str:
    """Return a value as an error shows it: its repr if that is short and has no address, else its type."""
    text = repr(value)
    return text if len(text) <= _LONGEST_REPR and text.isprintable() and " at 0x" not in text else type_named(value)


def whole_number(
    operation: str,
    where: str | None,
    value: object,
    least: int | None = None,
    most: int | None = None,
    *,
    expected: str | None = None,
    shown: object = None,
    remedy: str | None = None,
) -> int:
    """Return an integer of Python's or NumPy's as an int, from ``least`` to ``most``.

    The error shows ``shown``, the whole argument, if ``value`` is one of several numbers in it.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # arrays have __index__ too, whatever their contents
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        if expected is None:
            bounds = "" if least is None else f" >= {least}" if most is None else f" from {least} to {most}"
            expected = f"an integer{bounds}" if least != most or least is None else f"{least}"
        raise ConfigError(
            operation, where=where, expected=expected, got=repr(value if shown is None else shown), remedy=remedy
        )
    return number


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a real number of Python's or NumPy's within the range of float, and no bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        float(value)
    except OverflowError:  # an int of 309 digits or more
        return False
    return True


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


def lengths(operation: str, where: str, value: object, axes: Collection[str]) -> tuple[int, ...]:
    """Return the lengths of a shape: an integer of at least 1 for each of ``axes``."""
    expected = f"({', '.join(axes)}{',' * (len(axes) == 1)}), integers >= 1"
    shape = tuple(value) if isinstance(value, Iterable) else ()
    if len(shape) != len(axes):
        raise ConfigError(operation, where=where, expected=expected, got=repr(value))
    return tuple(whole_number(operation, where, length, 1, expected=expected, shown=value) for length in shape)


def one_of(
    operation: str, where: str | None, value: object, names: Collection[str], *, expected: str | None = None
) -> str:
    """Return one of a few ``names``; the error suggests the nearest."""
    if isinstance(value, str) and value in names:
        return value
    close = nearest(value, names)
    raise ConfigError(
        operation, where=where, expected=expected or choices(names), got=repr(value),
        remedy=close and f"did you mean {close!r}?",
    )  # fmt: skip


def choices(names: Iterable[object]) -> str:
    """Return the ``expected`` of an error where one of these names is valid."""
    return f"one of {', '.join(map(str, names))}"


def nearest(value: object, names: Iterable[str]) -> str | None:
    """Return the valid name that a user may have misspelt as ``value``."""
    import difflib  # late: every other module imports this one

    return next(iter(difflib.get_close_matches(str(value).lower(), names, n=1)), None)


def check_name(kind: str, name: object, valid: Iterable[str], where: object = None) -> None:
    """Raise `ConfigError` with the closest and all valid names unless ``name`` is valid."""
    valid = list(valid)
    if name in valid:
        return
    close = nearest(name, valid)
    raise ConfigError(
        f"unknown {kind} {name!r}", where=where,
        remedy=(f"did you mean {close!r}? " if close else "") + f"valid: {', '.join(valid)}",
    )  # fmt: skip


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


def same_names(
    operation: str, holder: str, own: Collection[Any], names_in_state: Collection[Any], called: str = ""
) -> None:  # fmt: skip
    """Raise `ConfigError` with the first name that only ``own``, the names of ``holder``, or only a state has."""
    for name in (*own, *names_in_state):
        if name not in own or name not in names_in_state:
            held, lacks = (holder, "the state") if name in own else ("the state", holder)
            where = f"{called} {name!r}" if called else name
            raise ConfigError(operation, where=where, expected=f"an entry in {lacks}, as in {held}", got="none")


def not_copied(name: str, got: str, remedy: str | None = None, what: str = "its state") -> Callable[[object], NoReturn]:
    """Return the ``__reduce__`` of a class whose instances can be neither copied nor pickled."""

    def __reduce__(self: object) -> NoReturn:
        raise UnsupportedError(name, expected=f"{what} to be copied or saved", got=got, remedy=remedy)

    return __reduce__
