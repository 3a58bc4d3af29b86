"""The memory pool of `gpu_on_host`: CuPy's, which looks at streams, and not at what they have still to do."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

UNWRITTEN = 0xA5

Queue = deque[tuple[Callable[[], bool], Callable[[], None]]]
"""What a stream has still to do: whether it may be done, and how."""


class Pool:
    """Memory goes back when Python has no array there any more, and at once to the next who asks for as much on its
    stream. So who writes it on another one, or later, spoils what others have there."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int], list[np.ndarray]] = {}
        """By stream and size."""

    def unwritten(self, like: np.ndarray, stream: int, queue: Queue) -> np.ndarray:
        """Memory of the shape, dtype and order of ``like``. Its stream spoils it when it is given back, behind what it
        was given until then."""
        nbytes = max(1, like.nbytes)
        free = self._free.setdefault((stream, nbytes), [])
        try:
            block = free.pop()
        except IndexError:
            block = np.full(nbytes, UNWRITTEN, np.uint8)

        def give_back() -> None:  # without a lock: the garbage collector may call it anywhere
            queue.append((lambda: True, lambda: block.fill(UNWRITTEN)))
            free.append(block)

        owned: Any = (ctypes.c_char * nbytes).from_buffer(block)
        owned.block = block
        weakref.finalize(owned, give_back).atexit = False
        order = "F" if like.flags.f_contiguous and not like.flags.c_contiguous else "C"
        return np.ndarray(like.shape, like.dtype, owned, order=order)


def without_owner(held: np.ndarray) -> np.ndarray:
    """The same array, for what a stream is given: that keeps no memory from the pool."""
    whole = held
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    block = getattr(whole.base, "block", None)
    if block is None:
        return held
    return np.ndarray(held.shape, held.dtype, block, held.ctypes.data - block.ctypes.data, held.strides)
