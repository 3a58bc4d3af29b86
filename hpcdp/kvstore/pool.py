"""Memory of a node for many short arrays: out of blocks, since each that the system gives costs more than its bytes.

All ranks of the node exchange messages for it, and a process may have some 65,000 (vm.max_map_count): with four or five
for each key 13,000 keys were too many.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..comm.shared import NodeMemory

BLOCK_NBYTES, LONGEST_NBYTES = 1 << 20, 64 << 10
"""Of a block, and of an array that comes out of one. What nobody writes to takes no memory."""

_ALIGNED_NBYTES = 128
"""Two cache lines, which some CPUs fetch together: ranks spin on some of these arrays."""


class Pool:
    """`NodeMemory` that gives short arrays out of longer ones of ``memory``; no bytes are given out twice."""

    def __init__(self, memory: NodeMemory) -> None:
        self.rank, self.size, self.patience = memory.rank, memory.size, memory.patience
        self._memory = memory
        self._block, self._used = np.empty(0, np.uint8), 0

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """See `NodeMemory.alloc`."""
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes > LONGEST_NBYTES:
            return self._memory.alloc(shape, kind)
        if self._used + nbytes > self._block.size:
            self._block, self._used = self._memory.alloc((BLOCK_NBYTES,), np.uint8), 0
        first = self._used
        self._used += -(-nbytes // _ALIGNED_NBYTES) * _ALIGNED_NBYTES
        return self._block[first : first + nbytes].view(kind).reshape(shape)

    def check(self) -> None:
        """See `NodeMemory.check`."""
        self._memory.check()
