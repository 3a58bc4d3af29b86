"""A value on its way from a store, and who waits for it."""

from __future__ import annotations

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


def hook_of(pulled: Pulled) -> Callable[[Any], None]:
    """What a parameter calls before it is read while its value is on its way."""

    def wait(parameter: Any) -> None:
        try:
            pulled.wait()
        except Exception:
            parameter.data_hook = Failed(pulled)
            raise
        parameter.data_hook = None  # not before: whoever reads meanwhile waits, too

    return wait


def array_of(parameter: Any) -> Array:
    """What a parameter holds, when all is there that is on its way: to be overwritten, so what has failed is over."""
    try:
        return parameter.data
    except Exception:
        if not isinstance(parameter.data_hook, Failed):
            raise
        parameter.data_hook = None
        return parameter.data
