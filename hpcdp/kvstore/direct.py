"""A push and its pull in one, in the thread that calls: no lane, no whole row, and as few copies as can be.

What must move is what an allreduce of as many bytes moves, and the stored value, which its owners write, and which lies
in memory of its own. A rank copies what others own of its array to the node's memory (n - 1 of n parts), reads what
others have pushed of its own part (n - 1 parts), writes the sum there, to the value and to its output, and reads the
sums of the others' parts (n - 1 of n). It waits once for each piece of a part, and once more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import kernels
from ..arrays import Array
from ..comm.shared import NodeMemory
from .arguments import merged
from .rows import Rows

CHUNK_NBYTES = 256 * 1024
"""So much of a rank's array is exchanged at once: it stays in a core's second-level cache."""


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
    """The exchange of one store. Every rank of the node must make it together.

    All keys share one buffer: an exchange in which all ranks take part is under way in one thread of each.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self._memory, self._merge = memory, kernels.load("merge")
        self._replace, self._gather = self._merge.replace, self._merge.gather
        self._not_yet, self._round = self._merge.NOT_YET, self._merge.ROUND
        buffer = memory.alloc((2, memory.size, CHUNK_NBYTES), np.uint8)
        self._staging = {dtype: buffer.view(dtype) for dtype in self._merge.DTYPES}
        self._states: dict[Rows, np.ndarray] = {}

    def width(self, dtype: np.dtype) -> int:
        """Elements of a part that are exchanged at once."""
        return CHUNK_NBYTES // dtype.itemsize // self._memory.size

    def takes(self, dtype: np.dtype) -> bool:
        """Whether there are kernels for it."""
        return dtype in self._staging

    def _state(self, rows: Rows) -> np.ndarray:
        state = self._states.get(rows)
        if state is None:
            patience = self._memory.patience
            state = self._merge.state_of(self._memory.rank, patience, rows.pieces, rows.phases)
            self._states[rows] = state
        state[self._round] = rows.rounds
        return state

    def replace(self, rows: Rows, x: np.ndarray, out: np.ndarray) -> bool:
        """The sum of all ranks' ``x`` becomes the value and ``out``; false if some rank has pushed in another way."""
        state, staging, in_place = self._state(rows), self._staging[x.dtype], x is out
        x, out = x.reshape(-1), out.reshape(-1)
        while (
            met := self._replace(x, out, in_place, rows.flat, staging, rows.ends, rows.counters, state)
        ) == self._not_yet:
            self._memory.check()
        return bool(met == self._merge.DONE)

    def gather(self, rows: Rows, x: np.ndarray) -> bool:
        """Sum this rank's part of all ranks' ``x`` into its own row; false if some rank has pushed in another way."""
        state, staging, total = self._state(rows), self._staging[x.dtype], rows.bucket.mine
        x = x.reshape(-1)
        while (met := self._gather(x, total, staging, rows.ends, rows.counters, state)) == self._not_yet:
            self._memory.check()
        return bool(met == self._merge.SUMMED)
