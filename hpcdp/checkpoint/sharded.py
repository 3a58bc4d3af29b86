"""What a `Sharded` may be: whole numbers in its shape, and parts that are runs of its elements."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import ConfigError, UnsupportedError, shortened
from ..state import Part, Sharded


def plain(operation: str, name: str, given: Sharded) -> Sharded:
    """A `Sharded` whose numbers are Python's, which manifests can have; those of NumPy are as good.

    Raises:
        ConfigError: its shape, its copies or its parts are none.
    """
    where = name or "the state"
    try:
        shape = tuple(operator.index(each) for each in given.shape)
        copies, copy = operator.index(given.copies), operator.index(given.copy)
    except TypeError as error:
        raise ConfigError(operation, where=where, expected="a Sharded of whole numbers", got=error) from error
    if any(size < 0 for size in shape):
        raise ConfigError(operation, where=where, expected="a Sharded with a shape", got=shape)
    if not 0 <= copy < copies:
        got = f"copy {copy} of {copies}"
        raise ConfigError(operation, where=where, expected="a Sharded whose copy is one of its copies", got=got)
    return dataclasses.replace(given, shape=shape, parts=_parts(operation, where, given), copies=copies, copy=copy)


def _parts(operation: str, where: str, given: Sharded) -> list[Part]:
    parts: Any = given.parts
    for part in parts if isinstance(parts, list | tuple) else [parts]:
        if not isinstance(part, Part) or isinstance(part.first, bool) or not isinstance(part.first, int | np.integer):
            raise ConfigError(operation, where=where, expected="a Sharded with a list of Part(first, values)",
                              got=shortened(repr(part), 40))  # fmt: skip
        if not hasattr(part.values, "dtype") or not hasattr(part.values, "shape"):
            raise ConfigError(operation, where=where, expected="a Part with an array of values",
                              got=shortened(repr(part.values), 40))  # fmt: skip
    return [Part(int(part.first), part.values) for part in parts]


def check_parts(operation: str, name: str, whole: Sharded, parts: Iterable[Part]) -> None:
    """Raises `UnsupportedError` unless each of ``parts``, in host memory, is a run of the whole tensor's elements."""
    for part in parts:
        values, dtype = part.values, np.dtype(whole.dtype)
        if (values.ndim, values.dtype) != (1, dtype) or not values.flags.c_contiguous:
            expected, got = f"parts of shape (count,), contiguous, {dtype}", f"{values.shape} {values.dtype}"
            raise UnsupportedError(operation, where=name or "the state", expected=expected, got=got)
        if not 0 <= part.first <= whole.count - values.size:
            got = f"a part from {part.first} to {part.first + values.size}"
            raise UnsupportedError(operation, where=name or "the state", expected=f"{whole.count} elements", got=got)
