"""Movement of blocks: every rank has a block of bytes for every rank, of any size.

Alltoall, gather, scatter, and the allgather of parts of different sizes are forms of it. All algorithms here get the
sizes of their blocks from `Calls.gather`, so that every receiver knows how many bytes come; empty blocks are not sent.
Inside a node, `intra_node.exchange` moves the same blocks in shared memory.

Sent per rank, for n ranks: ``direct`` and ``pairwise`` at most n - 1 messages, each block once. ``ring`` n - 1 messages
and all blocks but one. ``bruck`` log2 n messages, rounded up, of about half of the blocks each. ``by_node`` one message
to each rank of the node and one to each other node, each block at most twice.

Sources: Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997,
section 3; Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005,
sections 3.1 and 3.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..comm import Communicator
from ..comm.communicator import Steps
from ..core.arrays import Array
from . import ring, tree


@dataclass(frozen=True)
class Blocks:
    """The blocks of one rank in an exchange of all ranks; arrays are contiguous bytes, dtype uint8."""

    sent: np.ndarray
    """Shape ``(nbytes,)``: this rank's data."""
    limits: Sequence[tuple[int, int]]
    """The limits in `sent` of the block for each rank; blocks for several ranks may be the same."""
    received: np.ndarray
    """Shape ``(ends[n],)``: gets the blocks for this rank in the order of the senders."""
    ends: Sequence[int]
    """The ``n + 1`` limits of the blocks in `received`."""
    firsts: Sequence[int]
    """The position in each rank's data at which its block for this rank begins."""
    longest: int
    """The size of the longest `sent` of any rank, equal on all ranks."""

    def to(self, rank: int) -> np.ndarray:
        """Return the block for ``rank``."""
        first, last = self.limits[rank]
        return self.sent[first:last]

    def of(self, rank: int) -> np.ndarray:
        """Return the place of the block from ``rank``."""
        return self.received[self.ends[rank] : self.ends[rank + 1]]

    def keep_own(self, rank: int) -> None:
        """Copy this rank's block for itself, unless it is in its place already."""
        own, place = self.to(rank), self.of(rank)
        if own.size and own.ctypes.data != place.ctypes.data:
            place[...] = own


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return the limits of consecutive blocks of ``sizes``, beginning with 0."""
    return [0, *itertools.accumulate(sizes)]


def alltoall_blocks(sent: np.ndarray, received: np.ndarray, sizes: np.ndarray, rank: int) -> Blocks:
    """Return the blocks of an alltoall.

    Args:
        sent: shape ``(nbytes,)``, uint8: the blocks for all ranks, in their order.
        received: shape ``(nbytes,)``, uint8: gets the blocks of all ranks.
        sizes: shape ``(n, n)``: the bytes that each rank sends to each.
        rank: this rank.
    """
    own, befores = offsets(sizes[rank].tolist()), np.cumsum(sizes, axis=1) - sizes
    ends = offsets(sizes[:, rank].tolist())
    longest = int(sizes.sum(axis=1).max())
    return Blocks(sent, list(itertools.pairwise(own)), received, ends, befores[:, rank].tolist(), longest)


def allgather_blocks(parts: np.ndarray, ends: Sequence[int], rank: int) -> Blocks:
    """Return the blocks of an allgather.

    Args:
        parts: shape ``(ends[n],)``, uint8: the parts of all ranks, of which this rank has written its own.
        ends: the ``n + 1`` limits of the parts.
        rank: this rank.
    """
    n = len(ends) - 1
    own = parts[ends[rank] : ends[rank + 1]]
    longest = max(last - first for first, last in itertools.pairwise(ends))
    return Blocks(own, [(0, own.size)] * n, parts, ends, [0] * n, longest)


def gather_blocks(part: np.ndarray, received: np.ndarray, sizes: Sequence[int], rank: int, root: int) -> Blocks:
    """Return the blocks of a gather: ``root`` receives all in ``received``; ``sizes`` are those of the ranks' parts."""
    n = len(sizes)
    limits = [(0, part.size if other == root else 0) for other in range(n)]
    ends = offsets(sizes) if rank == root else [0] * (n + 1)
    return Blocks(part, limits, received, ends, [0] * n, max(sizes))


def scatter_blocks(sent: np.ndarray, received: np.ndarray, sizes: Sequence[int], rank: int, root: int) -> Blocks:
    """Return the blocks of a scatter: ``root`` sends ``sizes[r]`` bytes of ``sent`` to rank r, in ``received``."""
    n, limits = len(sizes), offsets(sizes)
    own = sent if rank == root else np.empty(0, np.uint8)
    mine = list(itertools.pairwise(limits)) if rank == root else [(0, 0)] * n
    ends = [0] * (root + 1) + [sizes[rank]] * (n - root)
    firsts = [limits[rank] if other == root else 0 for other in range(n)]
    return Blocks(own, mine, received, ends, firsts, limits[-1])


def direct(blocks: Blocks, comm: Communicator, tag: int) -> Steps:
    """Move all blocks at once, each as a message; the specification of the other algorithms."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    yield [comm.irecv(blocks.of(rank), rank, tag) for rank in others if blocks.of(rank).size] + [
        comm.isend(blocks.to(rank), rank, tag) for rank in others if blocks.to(rank).size
    ]


def pairwise(blocks: Blocks, comm: Communicator, tag: int) -> Steps:
    """Move the blocks in n - 1 stages, in each of which a rank sends to one rank and receives from one."""
    n, me = comm.size, comm.rank
    for distance in range(1, n):
        target, source = (me + distance) % n, (me - distance) % n
        yield [comm.irecv(blocks.of(source), source, tag) for _ in range(bool(blocks.of(source).size))] + [
            comm.isend(blocks.to(target), target, tag) for _ in range(bool(blocks.to(target).size))
        ]


def ring_allgather(blocks: Blocks, comm: Communicator, tag: int) -> Steps:
    """Move the parts of an allgather once around a ring."""
    parts: list[Array] = [blocks.of(rank) for rank in range(comm.size)]
    yield from ring.gather_shards(parts, ring.Ring.through(comm), tag)


def tree_broadcast(blocks: Blocks, comm: Communicator, tag: int) -> Steps:
    """Move the parts of an allgather to which only one rank contributes, along a binomial tree."""
    root = next(rank for rank in range(comm.size) if blocks.of(rank).size)
    yield from tree.broadcast(blocks.received, root, comm, tag)


def bruck(blocks: Blocks, comm: Communicator, tag: int) -> Steps:
    """Move blocks of one size in about log2 n stages: fewer and longer messages, for short blocks."""
    n, me = comm.size, comm.rank
    size = blocks.ends[1]
    # Row i is on its way to the rank at distance i; each stage moves the rows with one bit of i set.
    rows = np.roll(blocks.sent.reshape(n, size), -me, axis=0)
    distance = 1
    while distance < n:
        moved = [i for i in range(n) if i & distance]
        sent, received = rows[moved], np.empty((len(moved), size), np.uint8)
        yield [
            comm.irecv(received.reshape(-1), (me - distance) % n, tag),
            comm.isend(sent.reshape(-1), (me + distance) % n, tag),
        ]
        rows[moved] = received
        distance *= 2
    # Row i has come from the rank at distance i before this one.
    blocks.received.reshape(n, size)[...] = np.roll(rows[::-1], me + 1, axis=0)


ALGORITHMS = {"direct": direct, "pairwise": pairwise, "ring": ring_allgather, "tree": tree_broadcast, "bruck": bruck}
