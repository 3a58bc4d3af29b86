"""Reduce-scatter, allgather and allreduce on one ring, and allreduce on several rings at once.

A ring sends as few bytes as possible, over one link per rank. The array is cut into n chunks. Chunk i starts at
position i and goes around once, while every rank adds its own, so it is complete at position i - 1. Another round
distributes it. Every rank sends to one neighbor only and receives from the other, and all links are always in use::

        0 --> 1          step 1: position p sends chunk p and adds its own chunk p - 1 to the one it receives
        ^     |          step 2: it sends that sum, chunk p - 1, on
        |     v          ...
        3 <-- 2          step n - 1: the received sum is complete with its own chunk

Sent per rank, for S bytes: n - 1 messages and (n - 1) / n S for each of reduce-scatter and allgather.

Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

Several rings each carry a share of the array. Two directions of one ring use both directions of every link between
neighbors. A machine whose links form several disjoint rings, such as eight GPUs with

    0-1-2-3-4-5-6-7   and   0-3-5-2-4-7-1-6

uses all its links when every ring carries a share in proportion to the speed of its links.

Sent per rank, for S bytes over r rings: 2 r (n - 1) messages, 2 (n - 1) / n S in all.

Source: Wang et al., "Blink: Fast and generic collectives for distributed ML", 2020, section 2; the two rings are those
of Zhang et al., "Dive into Deep Learning", section 12.7, "Ring synchronization", there numbered from 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..comm import Communicator, Reduction, Request, World
from ..comm.communicator import Messages, Steps, make_tag, split
from ..comm.progress import LANES, MESSAGE_NBYTES, TAGS, in_lanes, messages, run_until_complete, together
from ..core.arrays import Array, array_namespace
from ..errors import UnsupportedError


@dataclass(frozen=True)
class Ring:
    """One rank's position in a ring through all ranks of ``comm``."""

    comm: Messages
    size: int
    position: int
    left: int
    right: int

    @classmethod
    def through(cls, comm: Messages, order: Sequence[int] | None = None) -> Ring:
        """Return the ring that visits the ranks in ``order``, default 0 to n - 1."""
        n = comm.size
        if order is None:
            return cls(comm, n, comm.rank, (comm.rank - 1) % n, (comm.rank + 1) % n)
        position = list(order).index(comm.rank)
        return cls(comm, n, position, order[position - 1], order[(position + 1) % n])


def reduce_shards(shards: Sequence[Array], op: Reduction, ring: Ring, tag: int) -> Steps:
    """Reduce ``shards[p]`` into the accumulator of position p, for every p; the others hold partial results."""
    n, me, comm = ring.size, ring.position, ring.comm
    received = array_namespace(shards[0]).empty(max(shard.size for shard in shards), shards[0].dtype)
    for step in range(1, n):
        mine, sent = shards[(me - step - 1) % n], shards[(me - step) % n]
        incoming = received[: mine.size]
        yield [comm.isend(sent, ring.right, tag), comm.irecv(incoming, ring.left, tag)]
        op.into(mine, incoming)


def gather_shards(shards: Sequence[Array], ring: Ring, tag: int) -> Steps:
    """Gather ``shards[p]`` of position p on all ranks, for every p."""
    n, me, comm = ring.size, ring.position, ring.comm
    for step in range(n - 1):
        sent, incoming = shards[(me - step) % n], shards[(me - step - 1) % n]
        yield [comm.isend(sent, ring.right, tag), comm.irecv(incoming, ring.left, tag)]


def allreduce_segment(x: Array, op: Reduction, ring: Ring, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over the ring, as one segment."""
    if ring.size == 1:
        op.finish(op.widened(x), 1, x)
        return
    yield from _reduce_and_gather(*_chunks(x, op, ring), op, ring, tag)


def _chunks(x: Array, op: Reduction, ring: Ring) -> tuple[list[Array], list[Array]]:
    """Return the accumulators and the sent chunks of ``x``, by the position at which they are complete."""
    wide = op.widened(x)
    partial = _rotated(split(wide, ring.size))
    return partial, partial if wide is x else _rotated(split(x, ring.size))


def _reduce_and_gather(partial: Sequence[Array], final: Sequence[Array], op: Reduction, ring: Ring, tag: int) -> Steps:
    me = ring.position
    yield from reduce_shards(partial, op, ring, tag)
    op.finish(partial[me], ring.size, final[me])
    yield from gather_shards(final, ring, tag)


def _rotated(chunks: list[Array]) -> list[Array]:
    return chunks[1:] + chunks[:1]  # chunk i is complete at position i - 1


def allreduce(x: np.ndarray, op: Reduction, comm: Messages, tag: int, nbytes: int | None = None) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm``, in messages of at most ``nbytes``."""
    yield from together(lanes(x, op, Ring.through(comm), tag, messages(x.nbytes / comm.size, nbytes)))


def lanes(
    x: Array,
    op: Reduction,
    ring: Ring,
    tag: int,
    number: int,
    most: int = LANES,
    turn: Request | None = None,
) -> list[Steps]:
    """Return the machines that reduce ``x``, shape ``(count,)``, over ``ring`` in segments.

    Chunks are those of the whole ``x``, and a segment is a piece of each, so that every element is summed in the same
    order for any number of them.

    Args:
        x: the array, changed in place.
        op: the reduction.
        ring: the ring.
        tag: the first of ``most`` tags.
        number: how many segments.
        most: how many machines, which each take a segment at a time.
        turn: a request for which segments wait before they begin.
    """
    partial, final = _chunks(x, op, ring)
    pieces = [list(zip(*(split(chunk, number) for chunk in chunks), strict=True)) for chunks in (partial, final)]

    def steps(piece: tuple[Sequence[Array], Sequence[Array]], lane_tag: int) -> Steps:
        return _reduce_and_gather(*piece, op, ring, lane_tag)

    return in_lanes(list(zip(*pieces, strict=True)), steps, tag, most, turn)


def reduce_scatter(x: np.ndarray, out: np.ndarray, op: Reduction, comm: Messages, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, over all ranks, with this rank's shard in ``out``; ``x`` is overwritten."""
    shards = split(op.widened(x), comm.size)
    if comm.size > 1:
        ring = Ring.through(comm)
        yield from together([reduce_shards(part, op, ring, tag + lane) for lane, part in enumerate(_in_lanes(shards))])
    op.finish(shards[comm.rank], comm.size, out)


def allgather(out: np.ndarray, comm: Messages, tag: int) -> Steps:
    """Complete ``out``, shape ``(count,)``, in which every rank has written its shard."""
    if comm.size > 1:
        ring, shards = Ring.through(comm), split(out, comm.size)
        yield from together([gather_shards(part, ring, tag + lane) for lane, part in enumerate(_in_lanes(shards))])


def _in_lanes(shards: Sequence[np.ndarray]) -> list[tuple[np.ndarray, ...]]:
    """Return the same piece of every shard for each lane."""
    lanes = min(LANES, messages(shards[-1].nbytes))
    return list(zip(*(split(shard, lanes) for shard in shards), strict=True))


def multi_ring_allreduce(
    x: np.ndarray,
    op: Reduction,
    comm: Communicator,
    tag: int,
    orders: Sequence[Sequence[int]],
    weights: Sequence[float] | None = None,
) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm``.

    Args:
        x: array on the host; changed in place.
        op: the reduction.
        comm: the communicator.
        tag: first of `TAGS` tags of its messages.
        orders: for every ring its ranks in order; the same on all ranks.
        weights: relative share of the array for each ring; equal by default.

    Raises:
        UnsupportedError: an order that does not visit every rank once, or weights that do not match the orders.
    """
    shares = np.ones(len(orders)) if weights is None else np.asarray(weights, float)
    _check(orders, shares, comm.size)
    ends = np.rint(np.cumsum([0.0, *shares]) / shares.sum() * x.size).astype(np.int64)
    most = max(1, min(LANES, TAGS // len(orders)))
    machines: list[Steps] = []
    for i, order in enumerate(orders):
        part = x[ends[i] : ends[i + 1]]
        machines += lanes(part, op, Ring.through(comm, order), tag + i * most, messages(part.nbytes / comm.size), most)
    yield from together(machines)


def bidirectional_allreduce(x: np.ndarray, op: Reduction, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x`` in place over the ring of all ranks, half of it in each direction."""
    clockwise = list(range(comm.size))
    yield from multi_ring_allreduce(x, op, comm, tag, [clockwise, clockwise[::-1]])


def _check(orders: Sequence[Sequence[int]], weights: np.ndarray, n: int) -> None:
    for order in orders:
        if sorted(order) != list(range(n)):
            expected = f"every rank from 0 to {n - 1} once"
            raise UnsupportedError("allreduce", where="orders", expected=expected, got=list(order))
    fit = 1 <= len(orders) <= TAGS and weights.shape == (len(orders),) and np.isfinite(weights).all()
    if not fit or (weights < 0).any() or not weights.any():
        raise UnsupportedError(
            "allreduce", where="weights",
            expected=f"a positive number for each of 1 to {TAGS} rings", got=f"{weights.tolist()} for {len(orders)}",
        )  # fmt: skip


LONG_NBYTES = 1 << 20
"""Length of an array from which on links are measured, and of long messages. 4 MB took as long as 1 MB on links of 10
and 25 Gbit/s, and in memory.
"""
_LINK_S = 200e-6
"""Seconds in which a slow link carries `MESSAGE_NBYTES`, with 2.4 Gbit/s: four times what Python takes for a message.
"""
_MESSAGES, _TURNS = 4, 3
_LENGTH = "length of messages"
"""Key of `World.kept`."""


def message_nbytes(world: World) -> int:
    """Return the length of pipelined messages between nodes of ``world``, equal on all ranks; see `fit_messages`."""
    length: int = world.kept.get(_LENGTH, MESSAGE_NBYTES)
    return length


def fit_messages(world: World) -> None:
    """Choose the length of messages between the nodes of ``world`` by the speed of its links; every rank must call.

    A message of `MESSAGE_NBYTES` is sent eagerly over TCP, and a longer one waits for its receiver, which is late if it
    computes. But Python takes some 50 us a message, in which a link of 10 Gbit/s carries as much: fast links need long
    messages. The first call takes some 10 ms, or 110 over 1 Gbit/s.
    """
    if world.num_nodes > 1 and _LENGTH not in world.kept:
        world.settle()
        own_s = 0.0 if world.rail_comm is None else _link_s(world.rail_comm)
        length = LONG_NBYTES if max(world.comm.allgather_json(own_s)) < _LINK_S else MESSAGE_NBYTES
        world.keep(_LENGTH, lambda: length)


def _link_s(comm: Communicator) -> float:
    """Return the seconds in which links between neighbors carry `MESSAGE_NBYTES` both ways, in long messages."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    own, received = np.zeros((2, _MESSAGES, LONG_NBYTES), np.uint8)

    def exchanged(lane: int) -> Steps:
        tag = make_tag(0, 0) + lane
        yield [comm.isend(own[lane], right, tag), comm.irecv(received[lane], left, tag)]

    def seconds() -> float:
        comm.barrier()
        begin = time.perf_counter()
        run_until_complete(together([exchanged(lane) for lane in range(_MESSAGES)]))
        return time.perf_counter() - begin

    return min(seconds() for _ in range(_TURNS)) * MESSAGE_NBYTES / own.nbytes
