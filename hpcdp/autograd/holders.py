"""Arrays that several ranks hold together, once: what one of them changes in place, the others see."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator

import numpy as np

from ..arrays import Array
from ..errors import HpcdpError

_holders: dict[int, int] = {}
"""How many ranks hold an array, by the id of the one whose memory it is."""


class _Here(threading.local):
    lent: frozenset[int] = frozenset()
    """What this thread may change, by id as well."""


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


def ranks_of(array: Array) -> int:
    """How many ranks hold it together."""
    return _holders.get(id(_whole(array)), 1) if _holders else 1


@contextlib.contextmanager
def changing(arrays: Iterable[Array]) -> Iterator[None]:
    """Within it this thread may change these: it has seen to it that no other does, or reads them."""
    before, _here.lent = _here.lent, _here.lent | {id(_whole(each)) for each in arrays}
    try:
        yield
    finally:
        _here.lent = before


def refuse_change(array: Array, name: str) -> None:
    """Raises `HpcdpError` where several ranks hold ``array``, unless this thread may change it."""
    ranks = ranks_of(array)
    if ranks > 1 and id(_whole(array)) not in _here.lent:
        raise HpcdpError(
            "in-place change", where=name or None, expected="one within its trainer's changing_parameters()",
            got=f"one of what {ranks} ranks hold together, which each of them would change",
            remedy="without that Trainer give it an array of its own: param.data = param.data.copy()",
        )  # fmt: skip
