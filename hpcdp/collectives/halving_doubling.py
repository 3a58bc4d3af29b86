"""Reduce-scatter by recursive halving and allgather by recursive doubling: as few bytes as a ring, in few steps.

Two ranks at distance 1 each give the other one half of the array and add up the half that they keep; then ranks at
distance 2 halve that half; after log2 n steps every rank holds the complete sum of one n-th. The same way back, the
pieces double until everybody has all. The longest messages go to the nearest rank, mostly one of the same node::

    rank             0          1          2          3        holds after the step
    distance 1       0 <------> 1          2 <------> 3        0, 2: lower half, 1, 3: upper half, of two ranks
    distance 2       0 <-----------------> 2                   a quarter each, of all ranks
                                1 <-----------------> 3
    and back         distance 2, then distance 1

Where n is no power of two, let p be the largest one below. The first 2 (n - p) ranks form pairs, even and odd, that
count as one: they exchange halves, each adds up one of them, the odd rank hands its sum over and waits; at last the
even one sends it the result.

Sent per rank, for S bytes a segment: 2 log2 p messages, 2 (p - 1) / p S. An even rank of a pair sends 2 messages and
3 / 2 S more; an odd one just 2 messages, S.

The operation `reduce_scatter` starts with the farthest rank, so that every rank ends with its own part: log2 p messages
and (p - 1) / p S; an even rank of a pair sends 2 messages, S / 2 + S / n more, an odd one just 2 messages, S.

Source: Rabenseifner, "Optimization of collective reduction operations", 2004, section 4; Rabenseifner and Traeff, "More
efficient reduction algorithms for non-power-of-two number of processors", 2004, section 2; reduce-scatter as in Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section 4.3.

Allreduce by recursive doubling: pairs of ranks at distances 1, 2, 4 and so on exchange all of it, for short arrays.

After log2 n steps every rank has the whole sum, so no result has to come back::

    rank             0          1          2          3        holds after the step
    distance 1       0 <------> 1          2 <------> 3        the sum of two ranks
    distance 2       0 <-----------------> 2                   the sum of all
                                1 <-----------------> 3

At the head of a message goes the signature of the call, so ranks that have called different things notice it by the
same messages: between nodes no other algorithm does without a comparison before (`hpcdp.comm.consistency`, which also
says what becomes of ranks beyond a power of two). Long arrays go one piece after another.

Sent per rank, for S bytes a piece: log2 p messages of S + 16 bytes, p the largest power of two up to n; a rank that has
a partner beyond p 1 more, and its partner 1 in all.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section
4.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..comm import Reduction, World
from ..comm.communicator import Messages, Steps, bounds, split
from ..comm.consistency import Call, Calls
from ..comm.tasks import MESSAGE_NBYTES, in_lanes, segments, together
from ..core.arrays import Array, array_namespace

SEGMENT_NBYTES = 2 * MESSAGE_NBYTES
"""Longer arrays go in segments of about so many bytes."""


@dataclass(frozen=True)
class _Exchange:
    """One step: this rank and ``partner`` hold the same range, of which each keeps one half."""

    partner: int
    kept: slice
    given: slice


class _Folded:
    """The ranks of ``comm`` as a power of two, ``p``: pairs (2 i, 2 i + 1) count once for i < n - p."""

    def __init__(self, comm: Messages) -> None:
        n = comm.size
        self.p = 1 << n.bit_length() - 1
        self.pairs = n - self.p
        paired = comm.rank < 2 * self.pairs
        self.other = comm.rank ^ 1 if paired else None
        """The other rank of this one's pair."""
        self.active = not paired or comm.rank % 2 == 0
        """Whether this rank takes part in halving and doubling."""
        self.number = comm.rank // 2 if paired else comm.rank - self.pairs

    def first_rank(self, number: int) -> int:
        """The lowest rank that counts as ``number``; n for ``p``."""
        return 2 * number if number < self.pairs else number + self.pairs

    def exchanges(self, ends: Sequence[int], distances: Sequence[int]) -> list[_Exchange]:
        """The steps of halving an array whose ``p`` parts have these ``ends``, with partners at these ``distances``."""
        steps, first, last = [], 0, self.p
        for distance in distances:
            middle = (first + last) // 2
            lower, upper = slice(ends[first], ends[middle]), slice(ends[middle], ends[last])
            partner = self.first_rank(self.number ^ distance)
            if self.number & distance:
                first = middle
                steps.append(_Exchange(partner, kept=upper, given=lower))
            else:
                last = middle
                steps.append(_Exchange(partner, kept=lower, given=upper))
        return steps


def _fold(total: Array, op: Reduction, folded: _Folded, comm: Messages, tag: int) -> Steps:
    """Reduce ``total`` over this rank's pair, into that of the even rank."""
    if folded.other is None:
        return
    lower, upper = split(total, 2)
    mine, given = (lower, upper) if folded.active else (upper, lower)
    received = array_namespace(mine).empty_like(mine)
    yield [comm.isend(given, folded.other, tag), comm.irecv(received, folded.other, tag)]
    op.into(mine, received)
    yield [comm.irecv(upper, folded.other, tag) if folded.active else comm.isend(upper, folded.other, tag)]


def _halve(total: Array, steps: Sequence[_Exchange], op: Reduction, comm: Messages, tag: int) -> Steps:
    """Reduce what the last step keeps of ``total`` over all active ranks; the rest is left as partial results."""
    count = max((step.kept.stop - step.kept.start for step in steps), default=0)
    received = array_namespace(total).empty(count, total.dtype)
    for step in steps:
        mine = total[step.kept]
        incoming = received[: mine.size]
        yield [comm.isend(total[step.given], step.partner, tag), comm.irecv(incoming, step.partner, tag)]
        op.into(mine, incoming)


def _double(x: Array, steps: Sequence[_Exchange], comm: Messages, tag: int) -> Steps:
    """Complete ``x`` from what the last of ``steps`` kept: the same way back."""
    for step in reversed(steps):
        yield [comm.isend(x[step.kept], step.partner, tag), comm.irecv(x[step.given], step.partner, tag)]


def _allreduce_segment(x: Array, op: Reduction, comm: Messages, tag: int) -> Steps:
    folded, total = _Folded(comm), op.widened(x)
    yield from _fold(total, op, folded, comm, tag)
    if folded.active:
        distances = [1 << bit for bit in range(folded.p.bit_length() - 1)]
        steps = folded.exchanges(bounds(x.size, folded.p), distances)
        yield from _halve(total, steps, op, comm, tag)
        own = steps[-1].kept if steps else slice(0, x.size)
        op.finish(total[own], comm.size, x[own])
        yield from _double(x, steps, comm, tag)
    if folded.other is not None:
        yield [comm.isend(x, folded.other, tag) if folded.active else comm.irecv(x, folded.other, tag)]


def allreduce(x: np.ndarray, op: Reduction, comm: Messages, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm``."""
    yield from together(lanes(x, op, comm, tag))


def lanes(x: Array, op: Reduction, comm: Messages, tag: int) -> list[Steps]:
    """The machines that reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm`` in segments."""

    def segment(piece: Array, own_tag: int) -> Steps:
        return _allreduce_segment(piece, op, comm, own_tag)

    return in_lanes(segments(x, SEGMENT_NBYTES), segment, tag)


def _reduce_scatter_segment(
    parts: Sequence[np.ndarray], out: np.ndarray, op: Reduction, comm: Messages, tag: int
) -> Steps:
    """Reduce ``parts[r]`` into ``out`` of rank r, for every r; ``parts`` stay as they are."""
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


def reduce_scatter(x: np.ndarray, out: np.ndarray, op: Reduction, comm: Messages, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, over all ranks, this rank's part (see `split`) into ``out``."""
    count = max(1, -(-x.nbytes // SEGMENT_NBYTES))
    pieces = zip(*(split(part, count) for part in split(x, comm.size)), strict=True)
    items = list(zip(pieces, split(out, count), strict=True))

    def segment(item: tuple[Sequence[np.ndarray], np.ndarray], own_tag: int) -> Steps:
        return _reduce_scatter_segment(*item, op, comm, own_tag)

    yield from together(in_lanes(items, segment, tag))


def recursive_doubling(x: np.ndarray, op: Reduction, world: World, call: Call) -> None:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks.

    Raises:
        MismatchError: ranks have made another ``call``.
    """
    calls, total = Calls.of(world), op.widened(x)
    if calls.memory is not None:
        calls.memory.agree(call)
    calls.messages.agree(call, total, op)
    op.finish(total, world.size, x)


def recursive_doubling_steps(x: np.ndarray, op: Reduction, world: World, call: Call) -> Steps:
    """`allreduce` as a machine."""
    calls, total = Calls.of(world), op.widened(x)
    if calls.memory is None:
        return _then_finished(calls.messages.steps(call, total, op), total, x, op, world.size)
    return _compared_in_memory(calls.memory.steps(call), calls, call, total, x, op, world.size)


def _compared_in_memory(
    comparison: Steps, calls: Calls, call: Call, total: np.ndarray, x: np.ndarray, op: Reduction, n: int
) -> Steps:
    yield from comparison
    yield from _then_finished(calls.messages.steps(call, total, op), total, x, op, n)


def _then_finished(machine: Steps, total: np.ndarray, x: np.ndarray, op: Reduction, n: int) -> Steps:
    yield from machine
    op.finish(total, n, x)
