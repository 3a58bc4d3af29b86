"""Floor 1: arrays that are not to be changed in place, as those that several ranks hold together. Imports: errors.

What one rank changes in them the others see, and a program that all ranks run would change them once for each.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from .errors import HpcdpError

_held: dict[int, tuple[int, str]] = {}
"""By the address of the first byte of each: that behind the last one, and what a change would be."""

_themselves: set[int] = set()
"""The ids of those that `refusing` was given."""


def hold_together(array: np.ndarray, ranks: int) -> None:
    """From now on, as long as somebody has it, ``array`` and what lies in its memory is what so many ranks hold."""
    first, last = byte_bounds(array)
    _held[first] = last, f"one of what {ranks} ranks hold together, which each of them would change"
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    weakref.finalize(whole, _held.pop, first, None).atexit = False


@contextlib.contextmanager
def refusing(arrays: Iterable[Any], change: str) -> Iterator[None]:
    """Within it a change of those in host memory is refused as ``change`` says."""
    on_host = [each for each in arrays if isinstance(each, np.ndarray) and each.size]
    added = {first: (last, change) for first, last in map(byte_bounds, on_host) if first not in _held}
    _held.update(added)
    _themselves.update(map(id, on_host))
    try:
        yield
    finally:
        _themselves.difference_update(map(id, on_host))
        for first in added:
            _held.pop(first, None)


def change_of(array: Any) -> str | None:
    """What a change of ``array`` in place would be, where it is not to be changed."""
    if not _held or not isinstance(array, np.ndarray) or not array.size:
        return None
    if array.base is None and id(array) not in _themselves:  # memory of its own; to ask where it lies takes 2 us
        return None
    first, last = byte_bounds(array)
    held = list(_held.items())  # ranks may be threads
    return next((change for begin, (end, change) in held if begin < last and first < end), None)


def refuse_change(array: Any, name: str = "", operation: str = "in-place change") -> None:
    """Raises `HpcdpError` where ``array`` is not to be changed in place."""
    change = change_of(array)
    if change is not None:
        raise HpcdpError(
            operation, where=name or None, expected="an array of its own, or its trainer's changing_parameters()",
            got=change, remedy="without that Trainer give it an array of its own: param.data = param.data.copy()",
        )  # fmt: skip
