"""Allreduce inside a node: the ranks read each other's memory, no message is sent.

Every rank stages what others own, reduces its own shard, and writes the result back where it has read: the
reduce-scatter and allgather of Rabenseifner ("Optimization of Collective Reduction Operations", 2004) with
``2 (n - 1) / n`` sizes crossing between cores. Very short arrays are staged whole and reduced by every rank, which
saves a wait.
Reductions run in the order of the local ranks, so all ranks get the same bits, run after run.
"""

from __future__ import annotations

import itertools

import numpy as np

from .. import kernels
from ..arrays import words
from ..comm import Reduction, Request, World
from ..comm.communicator import split
from ..comm.reductions import OPS
from ..comm.shared import NodeMemory
from ..comm.steps import Until
from ..errors import MismatchError, UnsupportedError
from .progress import Steps, drive

CHUNK_NBYTES = 256 * 1024
"""Longer arrays go piece by piece: one rank's part of a half of the staging buffer stays in its second-level cache."""

BY_ALL_NBYTES = 4 * 1024
"""Up to so many bytes of all other ranks together, a second wait costs more than reading all of them."""

DTYPE_CHARS = "eEfdbilqBILQ"
"""Character codes of the dtypes that the kernels reduce: all floats up to float64, integers of 8, 32 and 64 bits."""

_KINDS = 256
"""More than there are pairs of dtype and reduction."""


def _kind(dtype: np.dtype, op: str) -> int:
    return DTYPE_CHARS.index(dtype.char) * len(OPS) + OPS.index(op)


def _with_size(kind: int, size: int) -> int:
    """One number for both, of which the low 32 bits are compared; of long arrays one in four million looks alike."""
    if size < 1 << 22:
        return kind + size * _KINDS
    return kind + (size * 0x9E3779B97F4A7C15 >> 32 & 0x7FFFFF | 1 << 22) * _KINDS


class _Staging:
    """The staging buffer of a node and this rank's place in it. Made by all ranks of the node together.

    The buffer has two halves with a row for every rank. Whoever writes a half again has waited for everybody at the
    piece between, so nobody reads it any more; sums and the other reductions each have a buffer of their own.
    """

    def __init__(self, memory: NodeMemory) -> None:
        sync, self._exchange, self._reduce = (kernels.load(name) for name in ("sync", "exchange", "reduce"))
        self._ops = {name: getattr(self._reduce, name.upper()) for name in OPS}
        self._memory = memory
        self._done = self._exchange.DONE
        self._sum_by_all, self._sum_by_owners = self._exchange.sum_by_all, self._exchange.sum_by_owners
        self._counters = memory.alloc((memory.size * sync.STRIDE,), np.int32)
        self._state = self._exchange.state_of(memory.rank, memory.patience)
        self._patient = True
        self._tickets = self._served = 0
        self._arrival = _Arrival(memory, self._counters, self._state)
        self._half = 0
        self._compiled: set[np.dtype] = set()
        shape = (2, memory.size, CHUNK_NBYTES)
        sums = memory.alloc(shape, np.uint8)
        kinds = itertools.product(self._exchange.DTYPES, ("sum", "mean"))
        self._sums = {(dtype, op): (sums.view(dtype), _kind(dtype, op)) for dtype, op in kinds}
        self._others = memory.alloc(shape, np.uint8)
        self._by_all_nbytes = min(BY_ALL_NBYTES // max(memory.size - 1, 1), CHUNK_NBYTES)

    def allreduce(self, flat: np.ndarray, op: str, patient: bool) -> Steps:
        """Reduce ``flat``, shape ``(count,)``, in place; a ``patient`` machine waits in the kernels."""
        ticket, self._tickets = self._tickets, self._tickets + 1
        if self._served != ticket:  # the halves serve one exchange after another
            yield [Until(lambda: self._served == ticket)]
        if patient != self._patient:
            self._patient = patient
            self._state[[self._exchange.SPINS, self._exchange.SLEEP_NS]] = self._memory.patience if patient else 0
        try:
            found = self._sums.get((flat.dtype, op))
            if found is None:
                yield from self._reduce_by_owners(flat, op)
                return
            staging, kind = found
            kind = _with_size(kind, flat.size)
            exchange = self._sum_by_all if flat.nbytes <= self._by_all_nbytes else self._sum_by_owners
            while (met := exchange(flat, staging, self._counters, self._state, kind)) != self._done:
                yield self._not_yet(met, flat, op)
            if op == "mean":
                flat /= flat.dtype.type(self._memory.size)
        finally:
            self._served += 1

    def _not_yet(self, met: int, flat: np.ndarray, op: str) -> list[Request]:
        """What to wait for after an exchange that could not be completed yet.

        Raises:
            MismatchError: ranks have come for something else.
        """
        if met == self._exchange.DIFFERENT:
            raise MismatchError(
                "allreduce",
                expected="the same dtype, number of elements and op on every rank",
                got=f"others than {flat.dtype}, {flat.size} and {op!r} on some rank of this node",
                remedy="call it alike, and in the same order, on all ranks",
            )
        return [self._arrival]

    def _meet(self, flat: np.ndarray, op: str) -> Steps:
        n, kind = self._memory.size, _with_size(_kind(flat.dtype, op), flat.size)
        while (met := self._exchange.meet(self._counters, n, self._state, kind)) != self._done:
            yield self._not_yet(met, flat, op)

    def _reduce_by_owners(self, flat: np.ndarray, op: str) -> Steps:
        """What `kernels.exchange.sum_by_owners` does, for any dtype and reduction, with a call for every part of it."""
        if flat.dtype.char not in DTYPE_CHARS:
            raise UnsupportedError(
                "allreduce",
                where="algorithm='shared'",
                expected="a float or an integer of 8, 32 or 64 bits",
                got=flat.dtype,
            )
        n, me = self._memory.size, self._memory.rank
        taken = words(flat)
        staging = self._others.view(taken.dtype)
        if taken.dtype not in self._compiled:
            nothing = np.zeros((n, 1), taken.dtype)
            self._reduce.combine_staged(nothing[0], nothing, me, 0, 0, self._ops[op])
            self._compiled.add(taken.dtype)
        for first in range(0, max(taken.size, 1), staging.shape[2]):
            piece = taken[first : first + staging.shape[2]]
            lo, hi = piece.size * me // n, piece.size * (me + 1) // n
            half = staging[self._half]
            row = half[me, : piece.size]
            row[:lo], row[hi:] = piece[:lo], piece[hi:]
            yield from self._meet(flat, op)
            self._reduce.combine_staged(piece, half, me, lo, hi, self._ops[op])
            yield from self._meet(flat, op)
            piece[:lo], piece[hi:] = row[:lo], row[hi:]
            self._half = 1 - self._half  # not where ranks differ, some of which may not have come here at all


class _Arrival:
    """That every rank of the node has come as far as this one."""

    def __init__(self, memory: NodeMemory, counters: np.ndarray, state: np.ndarray) -> None:
        self._memory, self._counters, self._state = memory, counters, state
        self._wait_all = kernels.load("sync").wait_all
        self._sequence = kernels.load("exchange").SEQUENCE

    def _arrived(self, spins: int, sleep_ns: int) -> bool:
        number = np.int64(self._state[self._sequence]).astype(np.int32)
        return bool(self._wait_all(self._counters, self._memory.size, number, spins, sleep_ns))

    def test(self) -> bool:
        self._memory.check()
        return self._arrived(0, 0)

    def wait(self) -> None:
        while not self._arrived(*self._memory.patience):
            self._memory.check()


def allreduce(x: np.ndarray, op: Reduction, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, in place over the ranks of a single node.

    Raises:
        UnsupportedError: several nodes, memory that cannot be shared, or a dtype that is not reduced here.
        MismatchError: ranks called with other sizes, dtypes or ops.
    """
    drive(_staging_of(world).allreduce(x, op.name, patient=True))


def allreduce_steps(x: np.ndarray, op: Reduction, world: World, tag: int) -> Steps:
    """`allreduce` as a machine."""
    return _staging_of(world).allreduce(x, op.name, patient=False)


def reduce_scatter(x: np.ndarray, out: np.ndarray, op: Reduction, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, over all ranks, this rank's part into ``out``; ``x`` is overwritten.

    The parts of others are written back too: inside a node that takes less time than not to write where was read.
    """
    allreduce(x, op, world)
    out[...] = split(x, world.size)[world.rank]


def reduce_scatter_steps(x: np.ndarray, out: np.ndarray, op: Reduction, world: World, tag: int) -> Steps:
    """`reduce_scatter` as a machine."""
    yield from allreduce_steps(x, op, world, tag)
    out[...] = split(x, world.size)[world.rank]


def can_reduce(dtype: np.dtype, op: Reduction, world: World) -> bool:
    """Whether all ranks share memory and there are kernels for it."""
    return op.named and dtype.char in DTYPE_CHARS and world.node_memory.size == world.size


def _staging_of(world: World) -> _Staging:
    return world.kept.get(__name__) or world.keep(__name__, lambda: _make_staging(world))


def _make_staging(world: World) -> _Staging:
    memory = world.node_memory
    if memory.size != world.size:
        raise UnsupportedError(
            "allreduce", where="algorithm='shared'", expected="one node whose ranks share memory",
            got=f"{world.num_nodes} nodes, {memory.size} of {world.size} ranks sharing", remedy="use algorithm='auto'",
        )  # fmt: skip
    return _Staging(memory)
