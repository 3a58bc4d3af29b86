"""Collectives inside a node, in shared memory and without messages.

Every rank stages the shards of the others, reduces its own, and writes the result back in place: the reduce-scatter and
allgather of Rabenseifner ("Optimization of Collective Reduction Operations", 2004), with ``2 (n - 1) / n`` sizes moving
between cores. Very short arrays are staged completely and reduced by every rank, which saves a wait.

Movements of data stage up to `STAGED_NBYTES`, two ranks more. Longer data are copied from the private memory of one
rank's process to that of another (process_vm_readv(2), process_vm_writev(2)): one copy instead of two. Where the kernel
refuses that, long data are staged in pieces. See `kernels.shm_blocks`.

Each rank also posts the signature of its call, so the same wait detects mismatched calls. Reductions run in the order
of the local ranks, so all ranks get the same bits in every run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from .. import kernels
from ..comm import Reduction, World
from ..comm.communicator import OPS, Steps, StepsTo, bounds, real_numbers, split
from ..comm.consistency import Call, Calls, InMemory
from ..comm.progress import run_until_complete
from ..comm.repeated import BoundExchange
from ..core.arrays import words
from ..errors import UnsupportedError
from .blocks import BlockLayout, Blocks, allgather_layout, broadcast_layout

T = TypeVar("T")

CHUNK_NBYTES = 256 * 1024
"""Longer arrays are processed in chunks: one rank's share of half of the staging buffer stays in its L2 cache."""

_BYTE = np.dtype(np.uint8)
BY_ALL_NBYTES = 4 * 1024
"""Up to this many bytes of all other ranks, reading all of them costs less than a second wait."""

DTYPE_CHARS = "eEfdbilqBILQ"
"""Character codes of the dtypes with kernels: all floats up to float64, integers of 8, 32 and 64 bits."""
COMPLEX_CHARS = "FD"
"""Character codes of the dtypes that are summed as pairs of floats."""


Like = tuple[np.dtype, int, tuple[int, ...] | None]
"""The dtype, the size, and the shape of an array; None for any shape."""
Exchange = Callable[..., int]
"""A resumable kernel that reduces or moves arrays; returns `shm_exchange.DONE` or another of its values."""

STAGED_NBYTES = 8 << 10
"""The longest data of a movement that a rank copies to the staging buffer. Others read longer ones in its own memory,
by a system call that costs less than a second copy.
"""
STAGED_BY_TWO_NBYTES, STAGED_WITH_LINES_NBYTES = 16 << 10, 256 << 10
"""The same for two ranks, and on processors where the reader writes to the staged cache lines
(`shm_exchange.CORES_KEEP_LINES`).
"""
TURNS_BY_TWO_NBYTES = 16 << 20
"""The size of the blocks from which two ranks stage them for each other again, in turns: then they can write what they
receive past the caches, which the system call does not. They do not on processors with `CORES_KEEP_LINES`: there
pieces take longer between the cores (Zen 1: 20 ms for 64 MB each way) than the system call (14 ms).
"""
_MARK_NBYTES, _MEET = 64, Call("preparation of the node's memory")
_LEAST_COUNTS = 80
"""Counts that a rank announces at once, beside two for each rank."""


class _Staging:
    """The staging buffer of a node and this rank's rows; constructed by all ranks of the node together.

    The buffer has two halves with a row for every rank. A rank that writes to a half again has waited for all ranks in
    the piece between, so no rank still reads it. Sums and the other reductions have separate buffers.
    """

    def __init__(self, calls: InMemory) -> None:
        memory = calls.memory
        self._exchange, self._reduce, self._moving = (
            calls.exchange,
            kernels.load("gradients"),
            kernels.load("shm_blocks"),
        )
        self._ops = {name: getattr(self._reduce, name.upper()) for name in OPS}
        self._memory, self._calls = memory, calls
        self._done, self._different = self._exchange.DONE, self._exchange.DIFFERENT
        self._changed = self._exchange.CHANGED
        self._sum_by_all, self._sum_by_owners = self._exchange.sum_by_all, self._exchange.sum_by_owners
        self._counters, self._state = calls.counters, calls.state
        self._half = 0
        self._compiled: set[np.dtype] = set()
        shape = (2, memory.size, CHUNK_NBYTES)
        sums = memory.alloc(shape, np.uint8)
        self._sums = {dtype: sums.view(dtype) for dtype in self._exchange.DTYPES}
        self._other_reductions = memory.alloc(shape, np.uint8)
        self._rows = sums
        self._board = memory.alloc((2, memory.size, 2 * memory.size + _LEAST_COUNTS), np.int64)
        self._direct = _direct_of(calls, self._moving)
        self._by_all_nbytes = min(BY_ALL_NBYTES // max(memory.size - 1, 1), CHUNK_NBYTES)

    @property
    def direct_nbytes(self) -> int:
        """See the function of this name."""
        return int(self._direct[0, self._moving.STAGED]) + 1 if self._direct[0, self._moving.READ] else sys.maxsize

    def allreduce_now(self, flat: np.ndarray, op: Reduction, call: Call) -> None:
        """Reduce ``flat``, shape ``(count,)``, in place, blocking; nothing else may be in progress."""
        numbers = real_numbers(flat)
        exchange = self._sums_of(numbers, op, call)
        if exchange is None:
            run_until_complete(self.allreduce(flat, op, call, patient=True))
            return
        self._run(exchange, (numbers,), call)

    def _sums_of(self, x: np.ndarray, op: Reduction, call: Call) -> Exchange | None:
        """Return the resumable kernel that sums arrays like ``x`` in place, or None if there is none."""
        staging = self._sums.get(x.dtype) if op.name in ("sum", "mean") else None
        if staging is None:
            return None
        kernel = self._sum_by_all if x.nbytes <= self._by_all_nbytes else self._sum_by_owners
        return partial(kernel, staging, self._counters, self._state, call.signature, *op.factors(self._memory.size))

    @cached_property
    def _repeated(self) -> ModuleType:
        return kernels.load("shm_repeated")

    def bound_sum(
        self, x: np.ndarray, op: Reduction, call: Call, name: str = "", out: Like | None = None, root: int = 0
    ) -> BoundExchange | None:
        """Return the exchange that reduces arrays like ``x`` by one kernel call; None if there is none.

        Args:
            x: shape ``(count,)``.
            op: the reduction.
            call: the call.
            name: the kernel in `kernels.shm_exchange`; default that of an allreduce in place.
            out: what the array that receives is like; None if there is none.
            root: the root of ``"sum_to_root"``, which may be given ``x`` itself to receive.
        """
        staging = self._sums.get(x.dtype) if op.name in ("sum", "mean") else None
        repeated = self._repeated
        if staging is None:
            return None
        rule = 0 if name == "sum_to_root" else repeated.APART
        name = name or ("sum_by_all" if x.nbytes <= self._by_all_nbytes else "sum_by_owners")
        factors = op.factors(self._memory.size)
        further = repeated.words_of_sum(staging, self._counters, self._state, call.signature, root, factors)
        table = repeated.table_of((x.dtype, x.size, None), out, rule, further)
        return self._bound(repeated.bound(getattr(repeated, f"{name}_at"), table, dtype=x.dtype))

    def bound_moves(
        self,
        layout: BlockLayout,
        call: Call,
        x: Like | None,
        out: Like | None,
        counts: Sequence[int] = (),
        known: np.ndarray | None = None,
        place: int | None = None,
    ) -> BoundExchange | None:
        """Return the exchange of arrays like ``x`` and ``out`` by one kernel call; None if there is none.

        Args:
            layout: the blocks.
            call: the call.
            x: what the array that is sent is like; None if this rank sends none.
            out: what the array that receives is like; None if there is none.
            counts: this rank's counts, see `gather`.
            known: those of all ranks, shape ``(n, k)``, which the exchange needs to be announced again.
            place: where ``x`` may lie in ``out``, in bytes; default nowhere.
        """
        repeated = self._repeated
        if len(counts) > self._board.shape[2] - 2:
            return None
        rule = repeated.APART if place is None else place
        table = repeated.table_of(x, out, rule, self._repetition(layout, call, counts, known))
        return self._bound(repeated.bound(repeated.exchange_at, table))

    def _bound(self, kernel: Callable[[int, int], int]) -> BoundExchange:
        return BoundExchange(kernel, self._done, self._repeated.OTHER, self._calls)

    def shards_of(self, x: np.ndarray, op: Reduction, call: Call) -> Exchange | None:
        """Return the kernel ``sum(x, out)`` of this rank's shard of arrays like ``x``; None if there is none."""
        staging = self._sums.get(x.dtype) if op.name in ("sum", "mean") else None
        if staging is None:
            return None
        where = staging, self._counters, self._state, call.signature
        return partial(self._exchange.sum_to_owners, *where, *op.factors(self._memory.size))

    def for_root(self, x: np.ndarray, op: Reduction, root: int, call: Call) -> Exchange | None:
        """Return the kernel ``sum(x, out)`` of arrays like ``x`` for ``root``; None if there is none."""
        staging = self._sums.get(x.dtype) if op.name in ("sum", "mean") else None
        if staging is None:
            return None
        where = staging, self._counters, self._state, call.signature
        return partial(self._exchange.sum_to_root, *where, *op.factors(self._memory.size), root)

    def _run(self, exchange: Exchange, arrays: tuple[np.ndarray, ...], call: Call) -> None:
        """Run an exchange to its end, blocking."""
        self._calls.be_patient()
        while (met := exchange(*arrays)) != self._done:
            run_until_complete(self._calls.not_yet(met, call))

    def moves(self, layout: BlockLayout, call: Call) -> Exchange:
        """Return the kernel ``move(sent, received)`` of a layout that all ranks know."""
        return partial(self._moving.exchange_again, self._repetition(layout, call))

    def _repetition(
        self, layout: BlockLayout, call: Call, counts: Sequence[int] = (), known: np.ndarray | None = None
    ) -> np.ndarray:
        if known is None:
            known = np.empty((self._memory.size, 0), np.int64)
        arguments = self._move_arguments(layout, call)
        return self._moving.repetition(np.array(counts, np.int64), known, *arguments)  # type: ignore[no-any-return]

    def run_now(self, exchange: Exchange, call: Call, *arrays: np.ndarray) -> None:
        """Run an exchange of arrays to its end, blocking; nothing else may be in progress."""
        self._run(exchange, arrays, call)

    def run(self, exchange: Exchange, call: Call, *arrays: np.ndarray) -> Steps:
        """Run `run_now` as a machine."""
        yield from self._calls.turn(self._calls.begin(), patient=False)
        try:
            while (met := exchange(*arrays)) != self._done:
                yield from self._calls.not_yet(met, call)
        finally:
            self._calls.end()

    def gather(
        self,
        call: Call,
        counts: np.ndarray,
        sent: np.ndarray,
        then: Callable[[np.ndarray], StepsTo[T]],
        ticket: int | None = None,
    ) -> StepsTo[T]:
        """Return resumable steps that compare ``call``, gather every rank's ``counts``, and continue.

        Args:
            call: the call.
            counts: shape ``(k,)``, int64; k is equal on all ranks that make the same call.
            sent: shape ``(nbytes,)``, uint8: the data of this rank that `exchange` moves next, or not at all.
            then: returns the steps that follow, given shape ``(n, k)``, the counts by rank.
            ticket: that of the exchange if it has begun.
        """
        return self._gathered(call, counts, sent, then, self._calls.begin() if ticket is None else ticket)

    def _gathered(
        self, call: Call, counts: np.ndarray, sent: np.ndarray, then: Callable[[np.ndarray], StepsTo[T]], ticket: int
    ) -> StepsTo[T]:
        yield from self._calls.turn(ticket, patient=False)
        state, most = self._state, self._board.shape[2] - 2
        try:
            last = (max(counts.size, 1) - 1) // most * most
            pieces = []
            for first in range(0, last + 1, most):
                piece, data = counts[first : first + most], sent if first == last else sent[:0]
                board, kind = self._board, call.signature
                where = self._direct, self._rows, self._counters, state, kind
                announce = partial(self._moving.announce, piece, board, *where)
                while (met := announce(data)) != self._done:
                    yield from self._calls.not_yet(met, call)
                pieces.append(board[state[self._exchange.HALF], :, : piece.size].copy())
                if first < last:
                    self._moving.leave(state)
            return (yield from then(np.concatenate(pieces, axis=1)))
        finally:
            self._moving.leave(state)  # if nothing was moved
            self._calls.end()

    def exchange(self, blocks: Blocks, call: Call) -> Steps:
        """Move the blocks of all ranks, after `gather` with the same call."""
        move = partial(self._moving.exchange, *self._move_arguments(blocks.layout, call))
        while (met := move(blocks.sent, blocks.received)) != self._done:
            yield from self._calls.not_yet(met, call)

    def _move_arguments(self, layout: BlockLayout, call: Call) -> tuple[Any, ...]:
        moving, n = self._moving, self._memory.size
        plan = np.zeros((moving.ROWS, n + 1), np.int64)
        plan[moving.FIRSTS] = *layout.firsts, layout.keeps_own
        plan[moving.ENDS] = layout.ends
        plan[moving.BEGINS : moving.STOPS + 1, :n] = np.transpose(layout.limits)
        plan[[moving.BEGINS, moving.STOPS], n] = layout.longest, layout.largest
        if layout.writes:
            plan[[moving.WRITES, moving.PLACES], :n] = np.transpose(layout.writes)
            plan[moving.WRITTEN] = *layout.written, 1
        return plan, self._board, self._direct, self._rows, self._counters, self._state, call.signature

    def allreduce(self, flat: np.ndarray, op: Reduction, call: Call, patient: bool) -> Steps:
        """Reduce ``flat``, shape ``(count,)``, in place; a ``patient`` machine waits inside the kernels."""
        yield from self._calls.turn(self._calls.begin(), patient)
        try:
            numbers = real_numbers(flat)
            exchange = self._sums_of(numbers, op, call)
            if exchange is None:
                yield from self._reduce_by_owners(flat, op, call)
                return
            while (met := exchange(numbers)) != self._done:
                yield from self._calls.not_yet(met, call)
        finally:
            self._calls.end()

    def _meet(self, call: Call) -> Steps:
        n = self._memory.size
        while (met := self._exchange.meet(self._counters, n, self._state, call.signature)) != self._done:
            yield from self._calls.not_yet(met, call)

    def _reduce_by_owners(self, flat: np.ndarray, op: Reduction, call: Call) -> Steps:
        """Run `shm_exchange.sum_by_owners` for any dtype and reduction, with one kernel call per step."""
        if flat.dtype.char not in DTYPE_CHARS:
            expected = "a float or an integer of 8, 32 or 64 bits"
            raise UnsupportedError("allreduce", where="algorithm='shared'", expected=expected, got=flat.dtype)
        n, me = self._memory.size, self._memory.rank
        numbers = words(flat)
        staging, code = self._other_reductions.view(numbers.dtype), self._ops[op.of_partial_results().name]
        factors = op.factors(n)
        if numbers.dtype not in self._compiled:
            nothing = np.zeros((n, 1), numbers.dtype)
            self._reduce.combine_staged(nothing[0], nothing, me, 0, 0, code, *factors)
            self._compiled.add(numbers.dtype)
        for first in range(0, max(numbers.size, 1), staging.shape[2]):
            piece = numbers[first : first + staging.shape[2]]
            lo, hi = piece.size * me // n, piece.size * (me + 1) // n
            half = staging[self._half]
            row = half[me, : piece.size]
            row[:lo], row[hi:] = piece[:lo], piece[hi:]
            yield from self._meet(call)
            self._reduce.combine_staged(piece, half, me, lo, hi, code, *factors)
            yield from self._meet(call)
            piece[:lo], piece[hi:] = row[:lo], row[hi:]
            self._half = 1 - self._half  # not reached after mismatched calls


def _direct_of(calls: InMemory, moving: ModuleType) -> np.ndarray:
    """Return how each rank's data are read, see `shm_blocks.PROCESS`; all ranks of the node call it together.

    The kernel may refuse to read or write the memory of other processes (Yama, containers). Then all data are staged.
    """
    memory, exchange = calls.memory, calls.exchange
    n, me = memory.size, memory.rank
    direct = memory.alloc((n, 3), np.int64)
    marks = (np.arange(n)[:, None] * 7 + np.arange(_MARK_NBYTES)).astype(np.uint8)
    mark, answers = marks[me].copy(), np.zeros(n, np.uint8)
    direct[me] = os.getpid(), mark.ctypes.data, answers.ctypes.data
    calls.agree(_MEET)
    read, answer = np.empty_like(mark), np.ones(1, np.uint8)
    is_usable = all(
        exchange.read_memory(pid, marked, read)
        and bool((read == marks[rank]).all())
        and exchange.write_memory(pid, answered + me, answer)
        for rank, (pid, marked, answered) in enumerate(direct.tolist())
    )
    calls.agree(_MEET)
    direct[me, 1] = is_usable and bool(answers.all())
    calls.agree(_MEET)
    made = np.zeros((n, 3), np.int64)
    made[:, moving.PROCESS] = direct[:, 0]
    if not direct[:, 1].all():
        made[:, moving.STAGED] = np.iinfo(np.int64).max
    elif n == 2:
        if exchange.CORES_KEEP_LINES:
            made[:, moving.STAGED :] = min(STAGED_WITH_LINES_NBYTES, CHUNK_NBYTES), np.iinfo(np.int64).max
        else:
            made[:, moving.STAGED :] = min(STAGED_BY_TWO_NBYTES, CHUNK_NBYTES), TURNS_BY_TWO_NBYTES
    else:
        made[:, moving.STAGED :] = STAGED_NBYTES, np.iinfo(np.int64).max
    return made


def allreduce(x: np.ndarray, op: Reduction, world: World, call: Call) -> None:
    """Reduce ``x``, shape ``(count,)``, in place over the ranks of a single node.

    Raises:
        UnsupportedError: a dtype without a kernel.
        MismatchError: the ranks made different calls.
    """
    _staging_of(world).allreduce_now(x, op, call)


def bound_allreduce(x: np.ndarray, op: Reduction, world: World, call: Call) -> BoundExchange | None:
    """Return the exchange ``kernel(x, x)`` that is an `allreduce`; None if it takes several kernel calls."""
    return _staging_of(world).bound_sum(x, op, call)


def bound_reduce(x: np.ndarray, op: Reduction, root: int, world: World, call: Call) -> BoundExchange | None:
    """Return the exchange ``kernel(x, out)`` that is a `reduce` of arrays like ``x`` into the ``out`` of ``root``."""
    out = (x.dtype, x.size, None) if world.rank == root else None
    return _staging_of(world).bound_sum(x, op, call, "sum_to_root", out, root)


def bound_reduce_scatter(x: np.ndarray, op: Reduction, world: World, call: Call) -> BoundExchange | None:
    """Return the exchange ``kernel(x, out)`` that is a `reduce_scatter` of arrays like ``x``, which stay unchanged."""
    ends = bounds(x.size, world.size)
    count = ends[world.rank + 1] - ends[world.rank]
    return _staging_of(world).bound_sum(x, op, call, "sum_to_owners", (x.dtype, count, (count,)))


def bound_broadcast(x: np.ndarray, root: int, world: World, call: Call) -> BoundExchange | None:
    """Return the exchange ``kernel(x, x)`` that is a `broadcast` of arrays like ``x``."""
    layout, like = broadcast_layout(x.nbytes, world.size, world.rank, root), (x.dtype, x.size, None)
    sent, received = (like, None) if world.rank == root else (None, like)
    return _staging_of(world).bound_moves(layout, call, sent, received)


def bound_allgather(out: np.ndarray, world: World, call: Call) -> BoundExchange | None:
    """Return the exchange ``kernel(x, out)`` that is an `allgather` of a shard that need not be in its place."""
    ends, me = bounds(out.size, world.size), world.rank
    layout = allgather_layout(_limits(out, world), me)
    x = out.dtype, ends[me + 1] - ends[me], None
    place = ends[me] * out.itemsize
    return _staging_of(world).bound_moves(layout, call, x, (out.dtype, out.size, None), place=place)


def allreduce_steps(x: np.ndarray, op: Reduction, world: World, call: Call) -> Steps:
    """Return `allreduce` as a machine."""
    return _staging_of(world).allreduce(x, op, call, patient=False)


def reduce_scatter(x: np.ndarray, out: np.ndarray, op: Reduction, world: World, call: Call) -> None:
    """Reduce ``x``, shape ``(count,)``, over all ranks, with this rank's shard in ``out``.

    ``x`` is overwritten if there is no kernel for its dtype and reduction.
    """
    exchange = _staging_of(world).shards_of(x, op, call)
    if exchange is not None:
        _staging_of(world).run_now(exchange, call, x, out)
        return
    allreduce(x, op, world, call)
    out[...] = split(x, world.size)[world.rank]


def reduce_scatter_steps(x: np.ndarray, out: np.ndarray, op: Reduction, world: World, call: Call) -> Steps:
    """Run `reduce_scatter` as a machine."""
    exchange = _staging_of(world).shards_of(x, op, call)
    if exchange is not None:
        yield from _staging_of(world).run(exchange, call, x, out)
        return
    yield from allreduce_steps(x, op, world, call)
    out[...] = split(x, world.size)[world.rank]


def reduce(x: np.ndarray, op: Reduction, root: int, world: World, call: Call) -> None:
    """Reduce ``x``, shape ``(count,)``, over all ranks, in place on ``root``.

    Elsewhere it is overwritten if there is no kernel for its dtype and reduction.
    """
    exchange = _staging_of(world).for_root(x, op, root, call)
    if exchange is None:
        allreduce(x, op, world, call)
    else:
        _staging_of(world).run_now(exchange, call, x, x)


def broadcast(x: np.ndarray, root: int, world: World, call: Call) -> None:
    """Overwrite ``x``, shape ``(count,)``, on all ranks with the values of ``root``."""
    _staging_of(world).run_now(_broadcasting(x, root, world, call), call, _bytes_of(x))


def allgather(out: np.ndarray, world: World, call: Call) -> None:
    """Complete ``out``, shape ``(count,)``, in which every rank has written its shard."""
    _staging_of(world).run_now(_allgathering(out, world, call), call, _bytes_of(out))


def broadcast_steps(x: np.ndarray, root: int, world: World, call: Call) -> Steps:
    """Return `broadcast` as a machine."""
    return _staging_of(world).run(_broadcasting(x, root, world, call), call, _bytes_of(x))


def allgather_steps(out: np.ndarray, world: World, call: Call) -> Steps:
    """Return `allgather` as a machine."""
    return _staging_of(world).run(_allgathering(out, world, call), call, _bytes_of(out))


def _broadcasting(x: np.ndarray, root: int, world: World, call: Call) -> Exchange:
    """Return the kernel that broadcasts arrays like ``x``, given as bytes."""
    move = _staging_of(world).moves(broadcast_layout(x.nbytes, world.size, world.rank, root), call)
    nothing = np.empty(0, np.uint8)
    return (lambda x: move(x, nothing)) if world.rank == root else (lambda x: move(nothing, x))


def _allgathering(out: np.ndarray, world: World, call: Call) -> Exchange:
    """Return the kernel that completes arrays like ``out``, given as bytes."""
    ends = _limits(out, world)
    move = _staging_of(world).moves(allgather_layout(ends, world.rank), call)
    first, last = ends[world.rank], ends[world.rank + 1]
    return lambda x: move(x[first:last], x)


def reduce_steps(x: np.ndarray, op: Reduction, root: int, world: World, call: Call) -> Steps:
    """Run `reduce` as a machine."""
    exchange = _staging_of(world).for_root(x, op, root, call)
    if exchange is None:
        return allreduce_steps(x, op, world, call)
    return _staging_of(world).run(exchange, call, x, x)


def gather(
    call: Call,
    counts: np.ndarray,
    sent: np.ndarray,
    then: Callable[[np.ndarray], StepsTo[T]],
    world: World,
    ticket: int | None = None,
) -> StepsTo[T]:
    """Return resumable steps that gather every rank's counts and continue; see `_Staging.gather`."""
    return _staging_of(world).gather(call, counts, sent, then, ticket)


def exchange(blocks: Blocks, world: World, call: Call) -> Steps:
    """Move the blocks of all ranks, after `gather` with the same call."""
    return _staging_of(world).exchange(blocks, call)


def bound_exchange(
    counts: Sequence[int],
    known: np.ndarray,
    layout: BlockLayout,
    like: tuple[Like | None, Like | None],
    world: World,
    call: Call,
) -> BoundExchange | None:
    """Return `gather` and `exchange` as one kernel call, for counts of all ranks that are ``known``.

    ``like`` says what the arrays that are sent and that receive are like, see `_Staging.bound_moves`.
    """
    return _staging_of(world).bound_moves(layout, call, *like, counts, known)


def _limits(out: np.ndarray, world: World) -> list[int]:
    return [end * out.itemsize for end in bounds(out.size, world.size)]


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return x.view(_BYTE)


def can_share(world: World) -> bool:
    """Return whether all ranks share memory."""
    return world.node_memory.size == world.size


def direct_nbytes(world: World) -> int:
    """Return the least bytes of data of a movement that other ranks read, or write, in the memory of their process.

    It is equal on all ranks; `sys.maxsize` if there are none, or before the first movement of ``world``.
    """
    staging: _Staging | None = world.kept.get(__name__)
    return sys.maxsize if staging is None or world.size == 1 else staging.direct_nbytes


def can_reduce(dtype: np.dtype, op: Reduction, world: World) -> bool:
    """Return whether all ranks share memory and kernels exist for the dtype and reduction."""
    return op.named and dtype.char in DTYPE_CHARS + COMPLEX_CHARS and can_share(world)


def prepare(world: World) -> None:
    """Allocate the staging buffer of ``world``; all ranks must call.

    Raises:
        UnsupportedError: several nodes, or memory that cannot be shared.
    """
    memory = world.node_memory
    if memory.size != world.size:
        raise UnsupportedError(
            "collective", where="algorithm='shared'", expected="one node whose ranks share memory",
            remedy="use algorithm='auto'",
            got=f"{world.num_nodes} nodes, {memory.size} of {world.size} ranks share memory",
        )  # fmt: skip
    world.kept[__name__] = _Staging(Calls.of(world).share_memory(memory))


def _staging_of(world: World) -> _Staging:
    return world.kept[__name__]  # type: ignore[no-any-return]
