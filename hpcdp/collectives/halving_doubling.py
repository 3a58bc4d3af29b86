"""Allreduce and reduce-scatter by recursive halving and doubling; all collectives by recursive doubling, if short.

Halving and doubling needs as few bytes as a ring, and few steps. Two ranks at distance 1 exchange halves of the array,
and each reduces the half that it keeps. Then ranks at distance 2 halve that half. After log2 n steps every rank holds
the complete sum of one n-th. In reverse order the pieces double until all ranks have all of it. The longest messages
go to the nearest rank, mostly one of the same node::

    rank             0          1          2          3        holds after the step
    distance 1       0 <------> 1          2 <------> 3        0, 2: lower half, 1, 3: upper half, of two ranks
    distance 2       0 <-----------------> 2                   a quarter each, of all ranks
                                1 <-----------------> 3
    and back         distance 2, then distance 1

If n is no power of two, let p be the largest one below. The first 2 (n - p) ranks form pairs, even and odd, that count
as one. They exchange halves, each reduces one of them, and the odd rank sends its sum to the even one, which returns
the result at the end.

Sent per rank, for S bytes a segment: 2 log2 p messages, 2 (p - 1) / p S. An even rank of a pair sends 2 messages and
3 / 2 S more; an odd one just 2 messages, S.

`reduce_scatter` starts with the farthest rank, so that every rank ends with its own shard: log2 p messages and
(p - 1) / p S; an even rank of a pair sends 2 messages, S / 2 + S / n more, an odd one just 2 messages, S.

Source: Rabenseifner, "Optimization of collective reduction operations", 2004, section 4; Rabenseifner and Traeff, "More
efficient reduction algorithms for non-power-of-two number of processors", 2004, section 2; reduce-scatter as in Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section 4.3.

Recursive doubling is for short arrays: pairs of ranks at distances 1, 2, 4 and so on exchange the whole array. After
log2 n steps every rank has the whole sum, so no result is sent back::

    rank             0          1          2          3        holds after the step
    distance 1       0 <------> 1          2 <------> 3        the sum of two ranks
    distance 2       0 <-----------------> 2                   the sum of all
                                1 <-----------------> 3

Of a reduce or reduce-scatter, messages have only what is on the way to the ranks that receive it. In a broadcast only
ranks that have the array send it, and in an allgather each sends the shards that it has; if these do not fit in a
message, or the ranks are many, each sends zeros for what it lacks.

Each message starts with the signature of the call, so the same messages detect mismatched calls; between nodes all
other algorithms need a comparison first (`hpcdp.comm.message_rounds`, which also describes the ranks beyond a power of
two). Long arrays are reduced piece by piece.

Sent per rank, for S bytes a piece: log2 p messages of S + 16 bytes, p the largest power of two up to n. A rank with a
partner beyond p sends 1 more, and its partner 1 in all. Of an allgather, for S bytes in all, they have
(p - 1) / p S and 16 for each if n = p. Above 60 KB a message is sent as two.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section
4.5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..comm import Reduction, World
from ..comm.communicator import MERGED, Messages, Steps, bounds, split
from ..comm.consistency import Call, Calls
from ..comm.message_rounds import MOST_NBYTES, Carried, Copy, Routed, RoutedBlock, Routes, SummedPart, routes_of
from ..comm.progress import in_lanes, messages, together
from ..comm.repeated import RepeatedRounds, repeated_moves, repeated_sum
from ..core.arrays import Array, array_namespace


@dataclass(frozen=True)
class _Exchange:
    """One step: this rank and ``partner`` hold the same range, and each keeps one half."""

    partner: int
    own_half: slice
    sent: slice


class _Folded:
    """The ranks of ``comm`` as a power of two, ``p``: pairs (2 i, 2 i + 1) count as one for i < n - p."""

    def __init__(self, comm: Messages) -> None:
        n = comm.size
        self.p = 1 << n.bit_length() - 1
        self.pairs = n - self.p
        paired = comm.rank < 2 * self.pairs
        self.other = comm.rank ^ 1 if paired else None
        """The other rank of this rank's pair."""
        self.active = not paired or comm.rank % 2 == 0
        """True if this rank takes part in halving and doubling."""
        self.number = comm.rank // 2 if paired else comm.rank - self.pairs

    def first_rank(self, number: int) -> int:
        """Return the lowest rank that counts as ``number``; n for ``p``."""
        return 2 * number if number < self.pairs else number + self.pairs

    def exchanges(self, ends: Sequence[int], distances: Sequence[int]) -> list[_Exchange]:
        """Return the halving steps of an array whose ``p`` shards have these ``ends``, one per distance."""
        steps, first, last = [], 0, self.p
        for distance in distances:
            middle = (first + last) // 2
            lower, upper = slice(ends[first], ends[middle]), slice(ends[middle], ends[last])
            partner = self.first_rank(self.number ^ distance)
            if self.number & distance:
                first = middle
                steps.append(_Exchange(partner, own_half=upper, sent=lower))
            else:
                last = middle
                steps.append(_Exchange(partner, own_half=lower, sent=upper))
        return steps


def _fold(total: Array, op: Reduction, folded: _Folded, comm: Messages, tag: int) -> Steps:
    """Reduce ``total`` over this rank's pair, into that of the even rank."""
    if folded.other is None:
        return
    lower, upper = split(total, 2)
    mine, sent = (lower, upper) if folded.active else (upper, lower)
    received = array_namespace(mine).empty_like(mine)
    yield [comm.isend(sent, folded.other, tag), comm.irecv(received, folded.other, tag)]
    op.into(mine, received)
    yield [comm.irecv(upper, folded.other, tag) if folded.active else comm.isend(upper, folded.other, tag)]


def _halve(total: Array, steps: Sequence[_Exchange], op: Reduction, comm: Messages, tag: int) -> Steps:
    """Reduce the range that the last step keeps of ``total`` over all active ranks; the rest holds partial results."""
    count = max((step.own_half.stop - step.own_half.start for step in steps), default=0)
    received = array_namespace(total).empty(count, total.dtype)
    for step in steps:
        mine = total[step.own_half]
        incoming = received[: mine.size]
        yield [comm.isend(total[step.sent], step.partner, tag), comm.irecv(incoming, step.partner, tag)]
        op.into(mine, incoming)


def _double(x: Array, steps: Sequence[_Exchange], comm: Messages, tag: int) -> Steps:
    """Complete ``x`` from the range that the last of ``steps`` kept, in reverse order."""
    for step in reversed(steps):
        yield [comm.isend(x[step.own_half], step.partner, tag), comm.irecv(x[step.sent], step.partner, tag)]


def _allreduce_segment(x: Array, op: Reduction, comm: Messages, tag: int) -> Steps:
    folded, total = _Folded(comm), op.widened(x)
    yield from _fold(total, op, folded, comm, tag)
    if folded.active:
        distances = [1 << bit for bit in range(folded.p.bit_length() - 1)]
        steps = folded.exchanges(bounds(x.size, folded.p), distances)
        yield from _halve(total, steps, op, comm, tag)
        own = steps[-1].own_half if steps else slice(0, x.size)
        op.finish(total[own], comm.size, x[own])
        yield from _double(x, steps, comm, tag)
    if folded.other is not None:
        yield [comm.isend(x, folded.other, tag) if folded.active else comm.irecv(x, folded.other, tag)]


def allreduce(x: np.ndarray, op: Reduction, comm: Messages, tag: int, nbytes: int | None = None) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm``, in messages of at most ``nbytes``."""
    yield from together(lanes(x, op, comm, tag, nbytes))


def lanes(x: Array, op: Reduction, comm: Messages, tag: int, nbytes: int | None = None) -> list[Steps]:
    """Return the machines that reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm`` in segments."""
    pieces = split(x, messages(x.nbytes / 2, nbytes))
    return in_lanes(pieces, lambda piece, lane_tag: _allreduce_segment(piece, op, comm, lane_tag), tag)


def _reduce_scatter_segment(
    parts: Sequence[np.ndarray], out: np.ndarray, op: Reduction, comm: Messages, tag: int
) -> Steps:
    """Reduce ``parts[r]`` into ``out`` of rank r, for every r; ``parts`` do not change."""
    folded, total = _Folded(comm), op.widened(np.concatenate(parts))
    ends = [0, *np.cumsum([part.size for part in parts]).tolist()]
    yield from _fold(total, op, folded, comm, tag)
    own = slice(ends[comm.rank], ends[comm.rank + 1])
    if folded.active:
        distances = [1 << bit for bit in reversed(range(folded.p.bit_length() - 1))]
        numbered = [ends[folded.first_rank(number)] for number in range(folded.p + 1)]
        yield from _halve(total, folded.exchanges(numbered, distances), op, comm, tag)
        if folded.other is not None:
            yield [comm.isend(total[ends[folded.other] : ends[folded.other + 1]], folded.other, tag)]
    elif folded.other is not None:
        yield [comm.irecv(total[own], folded.other, tag)]
    op.finish(total[own], comm.size, out)


def reduce_scatter(
    x: np.ndarray, out: np.ndarray, op: Reduction, comm: Messages, tag: int, nbytes: int | None = None
) -> Steps:
    """Reduce ``x``, shape ``(count,)``, over all ranks, with this rank's shard (see `split`) in ``out``.

    It goes in messages of at most ``nbytes``.
    """
    count = messages(x.nbytes / 2, nbytes)
    pieces = zip(*(split(part, count) for part in split(x, comm.size)), strict=True)
    items = list(zip(pieces, split(out, count), strict=True))
    yield from together(in_lanes(items, lambda item, lane_tag: _reduce_scatter_segment(*item, op, comm, lane_tag), tag))


class Combined(NamedTuple):
    """The data of a collective that recursive doubling carries."""

    carried: Sequence[Carried]
    finish: Callable[[], None]
    """Writes the result."""


def _reduced(
    total: np.ndarray,
    op: Reduction,
    world: World,
    finish: Callable[[], None],
    parts: Sequence[SummedPart] | None = None,
) -> Combined:
    return Combined(Calls.of(world).messages.sums(total, op, parts), finish)


def of_allreduce(x: np.ndarray, op: Reduction, world: World) -> Combined:
    """Return an allreduce of ``x``, shape ``(count,)``, in place."""
    total = op.widened(x)
    return _reduced(total, op, world, lambda: op.finish(total, world.size, x))


def of_reduce(x: np.ndarray, op: Reduction, root: int, world: World) -> Combined:
    """Return a reduce of ``x``, shape ``(count,)``, in place on ``root``; elsewhere it is unchanged."""
    is_root = world.rank == root
    total = op.widened(x if is_root else x.copy())
    finish = (lambda: op.finish(total, world.size, x)) if is_root else lambda: None
    return _reduced(total, op, world, finish, [SummedPart(0, x.size, root)])


def of_reduce_scatter(x: np.ndarray, out: np.ndarray, op: Reduction, world: World) -> Combined:
    """Return a reduce-scatter of ``x``, shape ``(count,)``, with this rank's shard in ``out``; x is overwritten."""
    total, n = op.widened(x), world.size
    return _reduced(total, op, world, lambda: op.finish(split(total, n)[world.rank], n, out), _shards(x.size, n))


def _shards(count: int, n: int) -> list[SummedPart] | None:
    """Return the parts of a reduce-scatter; None if there are too many to look at."""
    ends = bounds(count, n)
    return [SummedPart(ends[r], ends[r + 1], r) for r in range(n)] if n <= _MOST_ROUTED_RANKS else None


def of_allgather(out: np.ndarray, world: World) -> Combined:
    """Return an allgather that completes ``out``, shape ``(count,)``, in which every rank has written its shard."""
    data, ends = out.view(np.uint8), bounds(out.size, world.size)
    routes = _routes_of_allgather(tuple(end * out.itemsize for end in ends), world.rank)
    if routes is not None:
        return _routed(routes, data, data, range(world.size), ends, out.itemsize, world.rank)
    total, own = np.zeros(out.size, out.dtype), slice(ends[world.rank], ends[world.rank + 1])
    total[own] = out[own]
    return _reduced(total.view(np.uint8), MERGED, world, lambda: np.copyto(out, total))


def of_broadcast(x: np.ndarray, root: int, world: World) -> Combined:
    """Return a broadcast that overwrites ``x``, shape ``(count,)``, with the values of ``root``."""
    routes = _routes_of_broadcast(x.nbytes, root, world.rank, world.size)
    if routes is not None:
        data = x.view(np.uint8)
        return _routed(routes, data, data, [root], [0], 1, world.rank)
    if world.rank == root:
        return _reduced(x.copy().view(np.uint8), MERGED, world, lambda: None)  # x may be read-only
    total = np.zeros(x.size, x.dtype)
    return _reduced(total.view(np.uint8), MERGED, world, lambda: np.copyto(x, total))


_MOST_ROUTED_RANKS = 64
"""The most ranks for which the ways of all blocks are looked for."""


@functools.lru_cache(1 << 8)
def _routes_of_allgather(ends: tuple[int, ...], rank: int, begins: bool = False) -> Routes | None:
    """Return the routes of parts with these ends in bytes; None if they are too long.

    The data of ``rank`` are those of all ranks, in which its part is in its place; or the part alone if that
    ``begins`` them.
    """
    n = len(ends) - 1
    if n > _MOST_ROUTED_RANKS:
        return None
    blocks = [RoutedBlock(r, ends[r + 1] - ends[r], (1 << n) - 1 - (1 << r)) for r in range(n)]
    routes = routes_of(blocks, [0] * n if begins else ends[:n], rank, n)
    return routes if routes.longest <= MOST_NBYTES else None


@functools.lru_cache(1 << 8)
def _routes_of_broadcast(nbytes: int, root: int, rank: int, n: int) -> Routes | None:
    """Return the routes of an array of ``root``; None if it is too long."""
    if n > _MOST_ROUTED_RANKS or nbytes > MOST_NBYTES:
        return None
    return routes_of([RoutedBlock(root, nbytes, (1 << n) - 1 - (1 << root))], [0], rank, n)


def _routed(
    routes: Routes,
    data: np.ndarray,
    out: np.ndarray,
    sources: Sequence[int],
    ends: Sequence[int],
    itemsize: int,
    me: int,
) -> Combined:
    """Return what moves one block of each source in ``data`` to its place in the ``out`` of all ranks."""
    routed = Routed(routes, data, out, _kept(routes, sources, ends, itemsize, me))
    return Combined([routed], routed.finish)


def _kept(
    routes: Routes, sources: Sequence[int], ends: Sequence[int], itemsize: int, me: int | None = None
) -> list[Copy]:
    """Return the copies of the sources' blocks to their places, which begin at ``ends``, except those of ``me``."""
    return [
        place._replace(to=end * itemsize)
        for source, end, place in zip(sources, ends, routes.places, strict=False)
        if place is not None and source != me
    ]


def recursive_doubling(of: Callable[..., Combined], *arguments: Any) -> None:
    """Run a collective by recursive doubling.

    Args:
        of: returns what is carried, given the collective's arguments and the world.
        *arguments: the same, and the `Call`.

    Raises:
        MismatchError: ranks have made another call.
    """
    *given, world, call = arguments
    calls, combined = Calls.of(world), of(*given, world)
    if calls.memory is not None:
        calls.memory.agree(call)
    calls.messages.agree(call, combined.carried)
    combined.finish()


def recursive_doubling_steps(of: Callable[..., Combined], *arguments: Any) -> Steps:
    """Return `recursive_doubling` as a machine."""
    *given, world, call = arguments
    calls, combined = Calls.of(world), of(*given, world)
    if calls.memory is None:
        return _then_finished(calls.messages.steps(call, combined.carried), combined)
    return _compared_in_memory(calls.memory.steps(call), calls, call, combined)


def _compared_in_memory(comparison: Steps, calls: Calls, call: Call, combined: Combined) -> Steps:
    yield from comparison
    yield from _then_finished(calls.messages.steps(call, combined.carried), combined)


def _then_finished(machine: Steps, combined: Combined) -> Steps:
    yield from machine
    combined.finish()


def bound_allreduce(x: np.ndarray, op: Reduction, world: World, call: Call) -> RepeatedRounds | None:
    """Return ``run(x, x)`` that is an `allreduce` by recursive doubling; None if there is none."""
    return repeated_sum(world, call, x, op, [SummedPart(0, x.size, None)], 0, (x.dtype, x.size, None), 0)


def bound_reduce(x: np.ndarray, op: Reduction, root: int, world: World, call: Call) -> RepeatedRounds | None:
    """Return ``run(x, out)`` that is a `reduce` of arrays like ``x`` into the ``out`` of ``root``."""
    out = (x.dtype, x.size, None) if world.rank == root else None
    return repeated_sum(world, call, x, op, [SummedPart(0, x.size, root)], 0, out, 0)


def bound_reduce_scatter(x: np.ndarray, op: Reduction, world: World, call: Call) -> RepeatedRounds | None:
    """Return ``run(x, out)`` that is a `reduce_scatter` of arrays like ``x``, which stay unchanged."""
    first, last = bounds(x.size, world.size)[world.rank : world.rank + 2]
    out = x.dtype, last - first, (last - first,)
    parts = _shards(x.size, world.size)
    return None if parts is None else repeated_sum(world, call, x, op, parts, first, out, -1)


def bound_broadcast(x: np.ndarray, root: int, world: World, call: Call) -> RepeatedRounds | None:
    """Return ``run(x, x)`` that is a `broadcast` of arrays like ``x``."""
    routes, like = _routes_of_broadcast(x.nbytes, root, world.rank, world.size), (x.dtype, x.size, None)
    if routes is None:
        return None
    sent, received = (like, None) if world.rank == root else (None, like)
    return repeated_moves(world, call, routes, _kept(routes, [root], [0], 1, world.rank), sent, received, -1)


def bound_allgather(out: np.ndarray, world: World, call: Call) -> RepeatedRounds | None:
    """Return ``run(x, out)`` that is an `allgather` of a shard that need not be in its place."""
    ends, me = bounds(out.size, world.size), world.rank
    routes = _routes_of_allgather(tuple(end * out.itemsize for end in ends), me, begins=True)
    if routes is None:
        return None
    kept = _kept(routes, range(world.size), ends, out.itemsize)
    x = out.dtype, ends[me + 1] - ends[me], None
    like = out.dtype, out.size, None
    return repeated_moves(world, call, routes, kept, x, like, ends[me] * out.itemsize)
