"""A value on its way from a store, and who waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import Array, to_host


class Pulled:
    """A value that was asked for. It waits where it is read: `wait`, ``numpy.asarray``, indexing."""

    def __init__(self, until_filled: Callable[[], None], place: Array, version: Callable[[], int]) -> None:
        self._until_filled, self._place, self._version = until_filled, place, version

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the key."""
        return tuple(self._place.shape)

    @property
    def dtype(self) -> np.dtype:
        """That of the key."""
        return np.dtype(self._place.dtype)

    def wait(self) -> Array:
        """The array, when it is there; what a push before it raised is raised here."""
        self._until_filled()
        return self._place

    @property
    def version(self) -> int:
        """How many pushes of the key had taken effect in it; those of all workers together count as one where they are
        merged."""
        self._until_filled()
        return self._version()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(to_host(self.wait()), dtype=dtype, copy=copy)

    def __getitem__(self, index: Any) -> Any:
        return self.wait()[index]

    def __repr__(self) -> str:
        return f"Pulled({self.wait()!r})"


def can_wait(target: Any) -> bool:
    """Whether what reads ``target.data`` can be made to wait, as it can for a network's parameter."""
    return hasattr(target, "data_hook")


class Failed:
    """What a parameter calls before it is read where its value has not come: raises why, again and again."""

    def __init__(self, pulled: Pulled) -> None:
        self._pulled = pulled

    def __call__(self, parameter: Any) -> None:
        self._pulled.wait()


class OnItsWay:
    """What a parameter calls before it is read while its value is on its way.

    Several threads may: one that comes late from its wait leaves the hook of the next pull alone.
    """

    _ending = threading.Lock()

    def __init__(self, pulled: Pulled) -> None:
        self._pulled, self._thread = pulled, threading.get_ident()
        self.waited: Callable[[int, int], None] = lambda begin_ns, end_ns: None
        """Told of each wait of the thread that has pulled."""

    def __call__(self, parameter: Any) -> None:
        begin_ns = time.perf_counter_ns()
        try:
            self._pulled.wait()
        except Exception:
            self._end(parameter, Failed(self._pulled))
            raise
        self._end(parameter, None)  # not before: whoever reads meanwhile waits, too
        if threading.get_ident() == self._thread:
            self.waited(begin_ns, time.perf_counter_ns())

    def _end(self, parameter: Any, hook: Failed | None) -> None:
        with self._ending:
            if parameter.data_hook is self:
                parameter.data_hook = hook


def array_of(parameter: Any) -> Array:
    """What a parameter holds, when all is there that is on its way: to be overwritten, so what has failed is over."""
    try:
        return parameter.data
    except Exception:
        if not isinstance(parameter.data_hook, Failed):
            raise
        parameter.data_hook = None
        return parameter.data
