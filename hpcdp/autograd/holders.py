"""Arrays that several ranks hold together, once: what one of them changes in place, the others see."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from ..arrays import Array
from ..errors import HpcdpError

_holders: dict[int, int] = {}
"""How many ranks hold an array, by the id of the one whose memory it is."""


class _Here(threading.local):
    is_allowed = False


_here = _Here()


def _whole(array: Array) -> Array:
    """The array of whose memory this one is a view."""
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    return array


def hold_together(array: np.ndarray, ranks: int) -> None:
    """From now on, as long as somebody has it, ``array`` and its views are what so many ranks hold."""
    whole = _whole(array)
    _holders[id(whole)] = ranks
    weakref.finalize(whole, _holders.pop, id(whole), None).atexit = False


@contextlib.contextmanager
def changing() -> Iterator[None]:
    """Within it this thread may change them: it has seen to it that no other does, or reads them."""
    before, _here.is_allowed = _here.is_allowed, True
    try:
        yield
    finally:
        _here.is_allowed = before


def refuse_change(array: Array, name: str) -> None:
    """Raises `HpcdpError` where several ranks hold ``array``, unless this thread may change it."""
    ranks = _holders.get(id(_whole(array)), 1) if _holders and not _here.is_allowed else 1
    if ranks > 1:
        raise HpcdpError(
            "in-place change", where=name or None, expected="one within `with trainer.changing_parameters():`",
            got=f"one of what {ranks} ranks hold together, which each of them would change",
        )  # fmt: skip
