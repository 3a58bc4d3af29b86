"""Allreduce inside a node: the ranks read each other's memory, no message is sent.

Reductions run in the order of the local ranks, so all ranks get the same bits, run after run.
"""

from __future__ import annotations

import numpy as np

from .. import kernels
from ..comm import World
from ..comm.communicator import OPS
from ..comm.shared import Gate, NodeMemory
from ..errors import UnsupportedError

CHUNK_NBYTES = 256 * 1024
"""Longer arrays go piece by piece: one rank's part of a half of the staging buffer stays in its second-level cache."""

READ_ALL_NBYTES = 64 * 1024
"""Up to so many bytes of all other ranks together, a second wait costs more than reading all of them."""

DTYPE_CHARS = frozenset("efdbilqBILQ")
"""Character codes of the dtypes that the kernels reduce: all floats up to float64, integers of 8, 32 and 64 bits."""


class _Staging:
    """The staging buffers of a node and this rank's place in them. Made by all ranks of the node together."""

    def __init__(self, memory: NodeMemory) -> None:
        sync, exchange, self._reduce = (kernels.load(name) for name in ("sync", "exchange", "reduce"))
        self._ops = {name: getattr(self._reduce, name.upper()) for name in OPS}
        self._memory = memory
        self._read_all = exchange.read_all
        self._counters = memory.alloc((memory.size * sync.STRIDE,), np.int32)
        self._state = np.zeros(exchange.STATE_LENGTH, np.int64)
        self._state[exchange.ME] = memory.rank
        self._state[[exchange.SPINS, exchange.SLEEP_NS]] = memory.patience
        self._gate = Gate(memory)
        self._half = 0
        self.short_nbytes = READ_ALL_NBYTES // max(memory.size - 1, 1) // 8 * 8
        """The longest array that `read_all` takes."""
        self._short = _Views(memory, self.short_nbytes)
        self._long = _Views(memory, CHUNK_NBYTES)

    def read_all(self, flat: np.ndarray, op: str) -> None:
        """Every rank stages its array and reduces what all have staged: one wait, ``n - 1`` sizes read."""
        staging = self._short[flat.dtype]
        while not self._read_all(flat, staging, self._counters, self._state, self._ops[op]):
            self._memory.check()

    def write_back(self, flat: np.ndarray, op: str) -> None:
        """Every rank stages what others own, reduces its own shard, and writes the result back where it has read.

        The reduce-scatter and allgather of Rabenseifner ("Optimization of Collective Reduction Operations", 2004),
        without messages: ``2 (n - 1) / n`` sizes cross between cores.
        """
        n, me, staging = self._memory.size, self._memory.rank, self._long[flat.dtype]
        for first in range(0, flat.size, staging.shape[2]):
            piece = flat[first : first + staging.shape[2]]
            lo, hi = piece.size * me // n, piece.size * (me + 1) // n
            half, self._half = staging[self._half], 1 - self._half
            row = half[me, : piece.size]
            row[:lo], row[hi:] = piece[:lo], piece[hi:]
            self._gate.barrier()
            self._reduce.combine_staged(piece, half, me, lo, hi, self._ops[op])
            self._gate.barrier()
            piece[:lo], piece[hi:] = row[:lo], row[hi:]


class _Views:
    """A shared buffer of two halves with a row of ``nbytes`` for every rank, seen as arrays ``(2, n, elements)``.

    Whoever writes a half again has waited for everybody at the piece between, so nobody reads it any more.
    """

    def __init__(self, memory: NodeMemory, nbytes: int) -> None:
        self._buffer = memory.alloc((2, memory.size, nbytes), np.uint8)
        self._views: dict[np.dtype, np.ndarray] = {}

    def __getitem__(self, dtype: np.dtype) -> np.ndarray:
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self._buffer.view(dtype)
        return view


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
    flat = x.reshape(-1)
    if x.dtype == np.float16:  # the kernels take it as its bits
        flat = flat.view(np.uint16)
    exchange = staging.read_all if x.nbytes <= staging.short_nbytes else staging.write_back
    exchange(flat, op)
