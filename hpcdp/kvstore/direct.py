"""A push and its pull in one, in the thread that calls: no lane, no whole row, and as few copies as can be.

What must move from core to core is what an allreduce of as many bytes moves, and it moves in the same way, by a staging
buffer. A rank copies what others own of its array there (n - 1 of n parts), reads what others have pushed of its own
part (n - 1 parts), writes the sum back there, to its output and to its part of the value, and fetches the sums of the
others' parts (n - 1 of n). It waits once for each piece of a part, and twice more: until all have come, who then read
the last value no more, and until all sums are there. Where the sum updates the value, owners update their parts first,
and stage the new values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import kernels
from ..arrays import Array
from ..comm.shared import NodeMemory
from .arguments import merged
from .rows import Rows

CHUNK_NBYTES = 256 * 1024
"""So much of a rank's array is exchanged at once: as in an allreduce (see `hpcdp.collectives.shared`)."""


def in_one_piece(arrays: list[Array], target: Any) -> tuple[np.ndarray, np.ndarray]:
    """What is pushed, and where to, as the kernels take them: contiguous, and apart or the same; else new arrays."""
    x = arrays[0] if len(arrays) == 1 else merged(arrays)
    if not (type(x) is np.ndarray and x.flags.carray):
        x = np.array(x, order="C")
    if target is x:
        return x, x
    if type(target) is np.ndarray and target.flags.carray and not np.may_share_memory(target, x):
        return x, target
    return x, np.empty_like(x)


class Direct:
    """The exchanges of one store. Every rank of the node must make it together.

    All keys share one buffer. So one of a rank's threads exchanges at a time; another one meanwhile pushes in the other
    way, which the other ranks see as they meet.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self._memory, self._merge, self._busy = memory, kernels.load("merge"), threading.Lock()
        buffer = memory.alloc((self._merge.SLOTS, memory.size, CHUNK_NBYTES), np.uint8)
        self._staging = {dtype: buffer.view(dtype) for dtype in self._merge.DTYPES}

    def width(self, dtype: np.dtype) -> int:
        """Elements of a part that are exchanged at once."""
        return CHUNK_NBYTES // dtype.itemsize // self._memory.size

    def exchange_of(self, rows: Rows) -> Exchange | None:
        """That of one key; None where ranks share nothing, or there are no kernels for its dtype."""
        staging = self._staging.get(rows.flat.dtype)
        return None if staging is None or self._memory.size == 1 else Exchange(rows, staging, self._memory, self._busy)


class Exchange:
    """How ranks push and pull one key in one, piece by piece."""

    def __init__(self, rows: Rows, staging: np.ndarray, memory: NodeMemory, busy: threading.Lock) -> None:
        merge = kernels.load("merge")
        self._rows, self._memory = rows, memory
        self._acquire, self._release = busy.acquire, busy.release
        self._shape, self._dtype = rows.stored.shape, rows.stored.dtype
        self._replace, self._gather, self._spread = merge.replace, merge.gather, merge.spread
        self._not_yet, self._mixed, self._round = merge.NOT_YET, merge.MIXED, merge.ROUND
        self._state = merge.state_of(memory.rank, memory.patience, rows.pieces, rows.phases)
        self._fixed = staging, rows.ends, rows.counters, self._state

    def takes(self, x: Any, out: Any) -> bool:
        """Whether they are arrays like the value, contiguous, and apart or the same."""
        if type(x) is not np.ndarray or x.shape != self._shape or x.dtype != self._dtype or not x.flags.carray:
            return False
        if out is x:
            return True
        if type(out) is not np.ndarray or out.shape != self._shape or out.dtype != self._dtype:
            return False
        return out.flags.carray and not np.may_share_memory(out, x)

    def replace(self, x: np.ndarray, out: np.ndarray) -> bool:
        """The sum of all ranks' ``x`` becomes the value and ``out``; false if some rank pushes in another way."""
        if not self._acquire(False):
            return False
        try:
            rows, in_place = self._rows, out is x
            self._state[self._round] = rows.rounds
            if x.ndim != 1:
                x, out = x.reshape(-1), out.reshape(-1)
            while (met := self._replace(x, out, in_place, rows.flat, *self._fixed)) == self._not_yet:
                self._memory.check()
        finally:
            self._release()
        return bool(met != self._mixed)

    def update(self, x: np.ndarray, out: np.ndarray, update: Callable[[np.ndarray], None]) -> bool:
        """``update`` makes this rank's part of the value new, and ``out`` becomes the value; false as `replace`.

        Args:
            update: is called with the sum of all ranks' ``x``, as long as a row, right in this rank's part, and shared;
                it must not raise.
        """
        if not self._acquire(False):
            return False
        try:
            rows = self._rows
            total = rows.bucket.rows[0]  # not the value, which is to be updated; in this round no rank fills a row
            self._state[self._round] = rows.rounds
            x, out = x.reshape(-1), out.reshape(-1)
            while (met := self._gather(x, total, *self._fixed)) == self._not_yet:
                self._memory.check()
            if met == self._mixed:
                return False
            update(total)
            while self._spread(out, rows.flat, *self._fixed) == self._not_yet:
                self._memory.check()
        finally:
            self._release()
        return True
