"""Reusable memory for activations and gradients.

A large array that NumPy allocates anew in every step costs a page fault for every 4 KiB, more than most operations on
it. Here a block is reused when its reference count shows that no array uses it. Arrays on a tape, or kept by the
caller, are therefore never overwritten. Each thread has its own blocks.
"""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import numpy as np

from ..core.arrays import Array

_KEPT_FROM = 64 * 1024
"""Smaller arrays are allocated by malloc, from its free lists."""
_ALIGNMENT = 64
_IDLE_REQUESTS = 512
"""Blocks unused for this number of requests are freed when a new block is needed."""


class _Block:
    __slots__ = ("memory", "offset", "used_at")

    def __init__(self, nbytes: int, now: int) -> None:
        self.memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        self.offset = -self.memory.ctypes.data % _ALIGNMENT
        self.used_at = now

    def references(self) -> int:
        return sys.getrefcount(self.memory)


_UNUSED = _Block(1, 0).references()


class _Blocks(threading.local):
    """This thread's blocks by size."""

    def __init__(self) -> None:
        self.of_size: dict[int, list[_Block]] = {}
        self.requests = 0

    def take(self, nbytes: int) -> _Block:
        self.requests = now = self.requests + 1
        for block in self.of_size.get(nbytes, ()):
            if block.references() == _UNUSED:
                block.used_at = now
                return block
        self._give_back_idle(now - _IDLE_REQUESTS)
        block = _Block(nbytes, now)
        self.of_size.setdefault(nbytes, []).append(block)
        return block

    def _give_back_idle(self, before: int) -> None:
        for nbytes, blocks in list(self.of_size.items()):
            kept = [block for block in blocks if block.used_at > before or block.references() > _UNUSED]
            if kept:
                self.of_size[nbytes] = kept
            else:
                del self.of_size[nbytes]


_blocks = _Blocks()


def empty(shape: tuple[int, ...], dtype: Any, xp: Any = np) -> Array:
    """Return an uninitialized C-contiguous array of namespace ``xp``, on the host in reused memory.

    In other namespaces this is ``xp.empty``, because devices have memory pools of their own.
    """
    if xp is not np:
        return xp.empty(shape, dtype=dtype)
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < _KEPT_FROM:
        return np.empty(shape, dtype)
    block = _blocks.take(nbytes)
    return np.ndarray(shape, dtype, block.memory, block.offset)
