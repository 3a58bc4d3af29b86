"""Allreduce inside a node: the ranks read each other's memory, no message is sent.

A private array goes through a staging buffer in the node's memory, a cache-sized chunk at a time (`kernels.exchange`).
Reductions run in the order of the local ranks, so all ranks get the same bits, run after run.
"""

from __future__ import annotations

import numpy as np

from .. import kernels
from ..comm import World
from ..comm.shared import NodeMemory
from ..errors import UnsupportedError

CHUNK_NBYTES = 128 * 1024
"""One rank's part of a half of the staging buffer: both halves of two ranks stay in a core's second-level cache."""

_READ_ALL_NBYTES = 8 * 1024
"""Up to this size a second wait costs more than reading ``n - 1`` arrays instead of ``2 (n - 1) / n``."""


DTYPE_CHARS = frozenset("efdbilqBILQ")
"""Character codes of the dtypes that the kernels reduce: all floats up to float64, integers of 8, 32 and 64 bits."""


class _Staging:
    """The staging buffer of a node and this rank's place in the exchange. Made by all ranks of the node together."""

    def __init__(self, memory: NodeMemory) -> None:
        sync, self.kernels, reduce = (kernels.load(name) for name in ("sync", "exchange", "reduce"))
        self.words = reduce.words
        self.ops = {"sum": reduce.SUM, "mean": reduce.MEAN, "min": reduce.MIN, "max": reduce.MAX, "prod": reduce.PROD}
        self.memory = memory
        self.counters = memory.alloc((memory.size * sync.STRIDE,), np.int32)
        self.state = np.zeros(4, np.int64)
        self._buffer = memory.alloc((2 * memory.size * CHUNK_NBYTES,), np.uint8)
        self._views: dict[np.dtype, np.ndarray] = {}

    def view(self, dtype: np.dtype) -> np.ndarray:
        """The buffer as ``(2 halves, ranks, elements)`` of ``dtype``."""
        if dtype not in self._views:
            self._views[dtype] = self._buffer.view(dtype).reshape(2, self.memory.size, -1)
        return self._views[dtype]


def allreduce(x: np.ndarray, op: str, world: World) -> None:
    """Reduce the contiguous host array ``x`` in place over the ranks of a single node.

    Raises:
        UnsupportedError: several nodes, memory that cannot be shared, or a dtype that is not reduced here.
    """
    memory = world.node_memory
    if memory.size != world.size:
        raise UnsupportedError(
            "allreduce", where="algorithm='shared'", expected="one node whose ranks share memory",
            got=f"{world.num_nodes} nodes, {memory.size} of {world.size} ranks sharing", remedy="use algorithm='auto'",
        )  # fmt: skip
    if x.dtype.char not in DTYPE_CHARS:
        raise UnsupportedError(
            "allreduce", where="algorithm='shared'", expected="a float or an integer of 8, 32 or 64 bits", got=x.dtype
        )
    staging = world.keep("collectives.shared", lambda: _Staging(memory))
    few = memory.size <= 2 or x.nbytes <= _READ_ALL_NBYTES
    exchange = staging.kernels.read_all if few else staging.kernels.read_shards
    flat = staging.words(x.reshape(-1))
    buffer, state = staging.view(flat.dtype), staging.state
    state[2:] = 0  # from the first chunk
    while not exchange(flat, buffer, staging.counters, memory.rank, state, memory.patience, staging.ops[op]):
        memory.check()
