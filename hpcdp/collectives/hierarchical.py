r"""Hierarchical allreduce: shared memory inside nodes, and a ring over the nodes for every rail, in segments.

The ranks of a node share its network link, and memory is faster than that link. So data is reduced before it crosses
the link::

    node 0:  rank 0   rank 1        every rank stages its array in the node's memory;
               |  \  /  |           rank r sums its shard r over the node (memory);
               |  /  \  |
    rail:      0        1           rank r of every node exchange shard r (network, a ring over nodes);
               |        |
    node 1:  rank 2   rank 3        the sums go back through the node's memory.

There are as many rails as the smallest node has ranks; further ranks of larger nodes add their data and own no shard.
The array is processed in segments, several at a time. While one is on the network others are staged and summed, so the
slowest of the three stages determines the time. A flat ring would send 2 (n - 1) / n S through every node's link, for n
ranks; this algorithm sends 2 (m - 1) / m S, for m nodes.

Sent per rank, for S bytes over r rails: 2 (m - 1) messages a segment, 2 (m - 1) / m S / r bytes.

Source: Cho et al., "BlueConnect", 2019; Jia et al., "Highly scalable deep learning training system", 2018, section 4.2.
"""

from __future__ import annotations

import itertools

import numpy as np

from ..comm import Reduction, Request, World
from ..comm.communicator import PolledRequest, Steps, bounds, split
from ..comm.progress import LANES, MESSAGE_NBYTES, messages, together
from ..comm.shared_memory import NodeMemory, ProgressCounters
from . import ring

SEGMENT_NBYTES = 4 << 20
"""The longest segment. One of few messages is shorter, so that more of them fit into the memory of a node."""

STAGING_NBYTES = 16 << 20
"""Node memory used per rank, unless two segments need more."""


class _Lane:
    """A staging buffer in the node's memory for successive segments, with a row and a counter for every rank.

    A segment adds three to each counter: staged, reduced, taken. A rank stages the next segment after all ranks have
    taken the one before.
    """

    def __init__(self, memory: NodeMemory, rails: int, nbytes: int) -> None:
        self._memory, self._rails = memory, rails
        self._milestones = ProgressCounters(memory)
        self._rows = memory.alloc((memory.size, nbytes), np.uint8)
        self._passed = 0
        self._staged = self._total = self._rows
        self._shards: list[slice] = []
        self.tickets = self.served = 0

    def _arrived(self, number: int) -> Request:
        """Return a request that completes when every rank of the node has posted ``number``."""
        return PolledRequest(lambda: self._milestones.reached(number))

    def _post(self) -> int:
        self._passed += 1
        self._milestones.post(self._passed)
        return self._passed

    def stage(self, x: np.ndarray, op: Reduction) -> Steps:
        """Stage ``x``, shape ``(count,)``, no longer than the rows, and reduce this rank's shard over the node."""
        me = self._memory.rank
        self._staged = self._rows.view(x.dtype)[:, : x.size]
        ends = bounds(x.size, self._rails)
        self._shards = [slice(first, last) for first, last in itertools.pairwise(ends)]
        own = self._shards[me] if me < self._rails else slice(0, 0)
        yield [self._arrived(self._passed)]  # all ranks have taken the last segment
        self._staged[me, : own.start], self._staged[me, own.stop :] = x[: own.start], x[own.stop :]
        yield [self._arrived(self._post())]
        if me < self._rails:
            parts = [x[own] if rank == me else self._staged[rank, own] for rank in range(self._memory.size)]
            total = op.widened(parts[0])
            if total is parts[0]:
                total = self._staged[me, own]  # unused by the staging
                total[...] = parts[0]
            for part in parts[1:]:
                op.into(total, op.widened(part))
            self._total = total

    def finish(self, x: np.ndarray, op: Reduction, rail: ring.Ring | None, tag: int, ranks: int) -> Steps:
        """Reduce the staged sums over the nodes, and copy the result over ``ranks`` ranks to ``x``."""
        me = self._memory.rank
        if rail is not None:
            yield from ring.allreduce_segment(self._total, op.of_partial_results(), rail, tag)
            op.finish(self._total, ranks, self._staged[me, self._shards[me]])
        yield [self._arrived(self._post())]
        for owner, shard in enumerate(self._shards):
            x[shard] = self._staged[owner, shard]
        self._post()


def allreduce(x: np.ndarray, op: Reduction, world: World, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``world``."""
    if world.rail_comm is not None and world.rail_comm.size == world.size:  # every node has one rank
        yield from ring.allreduce(x, op, world.rail_comm, tag, ring.message_nbytes(world))
        return
    lanes: list[_Lane] = world.kept[__name__]
    rail = None if world.rail_comm is None else ring.Ring.through(world.rail_comm)
    pieces = split(x, num_segments(x.nbytes, world.num_rails * world.num_nodes, ring.message_nbytes(world)))
    begun = 0

    def segments_of(number: int, lane: _Lane) -> Steps:
        nonlocal begun
        ticket, lane.tickets = lane.tickets, lane.tickets + 1
        # Wait for the lane before: staging all segments before the first message would leave the network idle.
        yield [PolledRequest(lambda: begun >= number and lane.served == ticket)]
        try:
            for piece in pieces[number :: len(lanes)]:
                yield from lane.stage(piece, op)
                begun = max(begun, number + 1)
                yield from lane.finish(piece, op, rail, tag + number, world.size)
        finally:
            lane.served += 1

    yield from together([segments_of(number, lane) for number, lane in enumerate(lanes[: len(pieces)])])


def prepare(world: World) -> None:
    """Allocate the staging buffers in the memory of the nodes of ``world``; all ranks must call."""
    if max(world.comm.allgather_json(world.node_memory.size)) == 1:  # no node has several ranks
        return
    nbytes = _longest_nbytes(world.num_rails * world.num_nodes)
    lanes = max(2, min(LANES, STAGING_NBYTES // nbytes))
    world.kept[__name__] = [_Lane(world.node_memory, world.num_rails, nbytes) for _ in range(lanes)]


def num_segments(nbytes: int, parts: int, message_nbytes: int | None = None) -> int:
    """Return in how many segments, each in ``parts`` messages of at most ``message_nbytes``, to reduce ``nbytes``."""
    return max(messages(nbytes / parts, message_nbytes), -(-nbytes // _longest_nbytes(parts)))


def _longest_nbytes(parts: int) -> int:
    """Return the longest segment for messages of one of its ``parts``."""
    return min(SEGMENT_NBYTES, max(ring.LONG_NBYTES, MESSAGE_NBYTES * parts))
