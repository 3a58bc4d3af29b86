"""Memory of a plan's results, given out again as soon as the last reader of a result is done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ALIGNMENT = 64
_WASTE = 4
"""A free block that is more times larger than what is asked for is left to larger results."""


class _Block:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        self._offset = -self._memory.ctypes.data % _ALIGNMENT

    def as_array(self, like: np.ndarray) -> np.ndarray:
        if like.flags.f_contiguous and not like.flags.c_contiguous:
            return np.ndarray(like.shape, like.dtype, self._memory, self._offset, order="F")
        return np.ndarray(like.shape, like.dtype, self._memory, self._offset)


class Arena:
    """Blocks of one plan."""

    def __init__(self) -> None:
        self._free: list[_Block] = []
        self._of: dict[int, _Block] = {}
        self.nbytes = 0
        """Bytes of all blocks."""

    def take(self, number: int, like: np.ndarray) -> np.ndarray:
        """Uninitialised memory for the result of a node, of the shape, dtype and order of ``like``."""
        fitting = [each for each in self._free if like.nbytes <= each.nbytes <= _WASTE * max(like.nbytes, _ALIGNMENT)]
        if fitting:
            block = min(reversed(fitting), key=lambda each: each.nbytes)  # the last to be free may be in the cache
            self._free.remove(block)
        else:
            block = _Block(like.nbytes)
            self.nbytes += block.nbytes
        self._of[number] = block
        return block.as_array(like)

    def release(self, last: Sequence[int], number: int) -> None:
        """Take back the memory of results whose ``last`` reader, by the number of the node, is up to ``number``."""
        for node in [node for node in self._of if last[node] <= number]:
            self._free.append(self._of.pop(node))
