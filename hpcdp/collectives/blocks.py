"""Movement of blocks: every rank has a block of bytes for every rank, of any size.

Alltoall, gather, scatter, and the allgather of parts of different sizes are forms of it. The sizes of
all blocks are known from an exchange of counts, so that every receiver knows how many bytes come; empty blocks are not
sent.
Inside a node, `intra_node.exchange` moves the same blocks in shared memory.

Sent per rank, for n ranks: ``direct`` and ``pairwise`` at most n - 1 messages, each block once. ``ring`` n - 1 messages
and ``bruck_allgather`` log2 n, rounded up, both all parts but one. ``bruck`` log2 n messages, rounded up, of about half
of the blocks each. ``by_node`` at most two messages to each rank of the node and one to each other node with as many
ranks, each block at most twice. ``by_node_allgather`` two messages to each rank of the node and one to each other node.

Sources: Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997,
section 3; Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005,
sections 3.1 and 3.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..comm import Communicator, Request, World
from ..comm.communicator import Steps, StepsTo, bounds, join_parts
from ..comm.message_rounds import Copy, RoutedBlock, Routes, routes_of
from ..core.arrays import Array
from . import ring, tree


@dataclass(frozen=True)
class BlockLayout:
    """The positions of one rank's blocks, in bytes."""

    limits: Sequence[tuple[int, int]]
    """The limits in the sent data of the block for each rank; blocks for several ranks may be the same."""
    ends: Sequence[int]
    """The ``n + 1`` limits of the blocks in the received data, in the order of the senders."""
    firsts: Sequence[int]
    """The position in each rank's data at which its block for this rank begins."""
    longest: int
    """The size of the longest sent data of any rank, equal on all ranks."""
    largest: int
    """The size of the largest block, equal on all ranks."""
    keeps_own: bool = False
    """True if no other rank needs the block of this rank for itself."""
    carried: np.ndarray | None = None
    """Shape ``(k, m)``: the bytes that each of the k ranks of this node sends to each of the m ranks of other nodes to
    which this rank sends in `by_node`; None for blocks of one size.
    """
    writes: Sequence[tuple[int, int]] = ()
    """For each rank the bytes at the end of its block that this rank may write itself, in a node, and their position in
    the received data of that rank. Empty if all ranks read.
    """
    written: Sequence[int] = ()
    """The bytes at the end of the block from each rank that the rank may write."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of one rank in an exchange of all ranks; arrays are contiguous bytes, dtype uint8."""

    layout: BlockLayout
    sent: np.ndarray
    """Shape ``(nbytes,)``: this rank's data."""
    received: np.ndarray
    """Shape ``(ends[n],)``: gets the blocks for this rank in the order of the senders."""

    def to(self, rank: int) -> np.ndarray:
        """Return the block for ``rank``."""
        first, last = self.layout.limits[rank]
        return self.sent[first:last]

    def of(self, rank: int) -> np.ndarray:
        """Return the place of the block from ``rank``."""
        return self.received[self.layout.ends[rank] : self.layout.ends[rank + 1]]

    def keep_own(self, rank: int) -> None:
        """Copy this rank's block for itself, unless it is in its place already."""
        own, place = self.to(rank), self.of(rank)
        if own.size and own.ctypes.data != place.ctypes.data:
            place[...] = own

    def fill(self, data: np.ndarray) -> None:
        """Copy the blocks for this rank from the data of all ranks, shape ``(n, nbytes)``, uint8."""
        ends = self.layout.ends
        for rank, first in enumerate(self.layout.firsts):
            begin, end = ends[rank], ends[rank + 1]
            self.received[begin:end] = data[rank, first : first + end - begin]


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return the limits of consecutive blocks of ``sizes``, beginning with 0."""
    return [0, *itertools.accumulate(sizes)]


def alltoall_layout(sizes: np.ndarray, rank: int) -> BlockLayout:
    """Return the layout of an alltoall of ``sizes``, shape ``(n, n)``: the bytes that each rank sends to each."""
    own, starts = offsets(sizes[rank].tolist()), np.cumsum(sizes, axis=1) - sizes
    ends = offsets(sizes[:, rank].tolist())
    longest, largest = int(sizes.sum(axis=1).max()), int(sizes.max())
    return BlockLayout(list(itertools.pairwise(own)), ends, starts[:, rank].tolist(), longest, largest, True)


def layout_of_messages(sent: Sequence[int], received: Sequence[int], carried: np.ndarray | None) -> BlockLayout:
    """Return the layout of an alltoall by messages, of the bytes sent to each rank and received from each.

    What other ranks exchange is unknown, except what this one passes on: see `BlockLayout.carried`.
    """
    n, limits = len(sent), list(itertools.pairwise(offsets(sent)))
    return BlockLayout(limits, offsets(received), [0] * n, sum(sent), max(sent), True, carried)


def even_alltoall_layout(nbytes: int, ranks: int, rank: int) -> BlockLayout:
    """Return the layout of an alltoall of blocks of one size; ``nbytes`` is that of all blocks of a rank."""
    ends = bounds(nbytes, ranks)
    return BlockLayout(list(itertools.pairwise(ends)), ends, [ends[rank]] * ranks, nbytes, -(-nbytes // ranks), True)


def allgather_layout(ends: Sequence[int], rank: int) -> BlockLayout:
    """Return the layout of an allgather; ``ends`` are the ``n + 1`` limits of the parts of all ranks."""
    n = len(ends) - 1
    longest = max(last - first for first, last in itertools.pairwise(ends))
    return BlockLayout([(0, ends[rank + 1] - ends[rank])] * n, ends, [0] * n, longest, longest)


_READ_BY_ROOT_NBYTES = 2 << 20
"""Blocks from this size on, beyond the caches, are written to the root of a gather, which is busy with its own one."""


def _read_by_root(size: int, n: int) -> int:
    """Return the bytes of another rank's block that the root of a gather reads: a quarter of a block in all."""
    return size // (4 * max(n - 1, 1)) if size < _READ_BY_ROOT_NBYTES else 0


def gather_layout(sizes: Sequence[int], rank: int, root: int) -> BlockLayout:
    """Return the layout of a gather of parts of ``sizes`` on ``root``, which does not copy them all by itself."""
    n, largest, is_root = len(sizes), max(sizes), rank == root
    limits = [(0, sizes[rank] if other == root else 0) for other in range(n)]
    ends = offsets(sizes) if is_root else [0] * (n + 1)
    read = [_read_by_root(size, n) for size in sizes]
    ours, place = sizes[rank] - read[rank], sum(sizes[:rank]) + read[rank]
    writes = [(ours if rank != root == other else 0, place) for other in range(n)]
    written = [sizes[other] - read[other] if rank == root != other else 0 for other in range(n)]
    return BlockLayout(limits, ends, [0] * n, largest, largest, is_root, None, writes, written)


def scatter_layout(sizes: Sequence[int], rank: int, root: int) -> BlockLayout:
    """Return the layout of a scatter in which ``root`` sends ``sizes[r]`` bytes to rank r; other ranks send nothing."""
    n, limits = len(sizes), offsets(sizes)
    mine = list(itertools.pairwise(limits)) if rank == root else [(0, 0)] * n
    ends = [0] * (root + 1) + [sizes[rank]] * (n - root)
    firsts = [limits[rank] if other == root else 0 for other in range(n)]
    return BlockLayout(mine, ends, firsts, limits[-1], max(sizes), True)


def written_layout(sizes: Sequence[int], rank: int, places: dict[int, list[int]]) -> BlockLayout:
    """Return the layout of blocks that each rank writes to receivers, of ``sizes[r]`` bytes from rank r to each.

    ``places`` has for each receiver the position, relative to its received data, at which each rank writes its block;
    0 for blocks that the receiver itself copies, one after another.
    """
    mine = places.get(rank)
    is_copied = [mine is not None and place == 0 for place in mine or sizes]
    ends = offsets([size if copies else 0 for size, copies in zip(sizes, is_copied, strict=True)])
    written = [0 if mine is None or copies else size for size, copies in zip(sizes, is_copied, strict=True)]
    at = [places[receiver][rank] if receiver in places else 0 for receiver in range(len(sizes))]
    writes = [(sizes[rank] if place else 0, place) for place in at]
    limits, longest = [(0, sizes[rank])] * len(sizes), max(sizes)
    return BlockLayout(limits, ends, [0] * len(sizes), longest, longest, writes=writes, written=written)


def read_layout(sizes: Sequence[int], rank: int, root: int, places: Sequence[int]) -> BlockLayout:
    """Return the layout of a scatter in which rank r reads ``sizes[r]`` bytes, ``places[r]`` after root's data begin.

    The positions may be anywhere in the memory of ``root``, so the blocks are never staged, which a largest block of 0
    says.
    """
    n = len(sizes)
    ends = [0] * (root + 1) + [sizes[rank]] * (n - root)
    firsts = [places[rank] if other == root else 0 for other in range(n)]
    return BlockLayout([(0, 0)] * n, ends, firsts, max(sizes), 0)


def broadcast_layout(nbytes: int, ranks: int, rank: int, root: int) -> BlockLayout:
    """Return the layout of a broadcast of ``nbytes`` bytes, which ``root`` does not send to itself.

    It writes as many bytes as every other rank reads.
    """
    limits = [(0, nbytes if rank == root != other else 0) for other in range(ranks)]
    ends = [0] * (ranks + 1) if rank == root else [0] * (root + 1) + [nbytes] * (ranks - root)
    ours = nbytes // ranks
    writes = [(ours * (rank == root != other), nbytes - ours) for other in range(ranks)]
    written = [ours * (other == root != rank) for other in range(ranks)]
    return BlockLayout(limits, ends, [0] * ranks, nbytes, nbytes, writes=writes, written=written)


def routed(sizes: np.ndarray, layout: BlockLayout, rank: int) -> tuple[Routes, list[Copy]]:
    """Return the routes of all blocks, and the copies of those for ``rank`` to their places.

    Args:
        sizes: shape ``(n, n)``: the bytes that each rank sends to each; shape ``(n,)``: one block for all ranks.
        layout: the positions of this rank's blocks.
        rank: this rank.
    """
    n = len(sizes)
    if sizes.ndim == 1:
        everyone = (1 << n) - 1
        pairs = [
            (RoutedBlock(source, size, everyone - (1 << source)), rank) for source, size in enumerate(sizes.tolist())
        ]
    else:
        pairs = [
            (RoutedBlock(source, size, (1 << dest) * (source != dest)), dest)
            for source, of_source in enumerate(sizes.tolist())
            for dest, size in enumerate(of_source)
        ]
    blocks = [block for block, _ in pairs]
    routes = routes_of(blocks, [layout.limits[dest][0] for _, dest in pairs], rank, n)
    kept = [
        place._replace(to=layout.ends[block.source])
        for (block, dest), place in zip(pairs, routes.places, strict=True)
        if dest == rank and place is not None and block.nbytes
    ]
    return routes, kept


def direct(blocks: Blocks, world: World, tag: int) -> Steps:
    """Move all blocks at once, each as a message; the specification of the other algorithms."""
    comm = world.comm
    other_ranks = [rank for rank in range(comm.size) if rank != comm.rank]
    yield [comm.irecv(blocks.of(rank), rank, tag) for rank in other_ranks if blocks.of(rank).size] + [
        comm.isend(blocks.to(rank), rank, tag) for rank in other_ranks if blocks.to(rank).size
    ]


def pairwise(blocks: Blocks, world: World, tag: int) -> Steps:
    """Move the blocks in n - 1 stages, in each of which a rank sends to one rank and receives from one."""
    n, me = world.size, world.rank
    for distance in range(1, n):
        yield _both(world.comm, blocks.to((me + distance) % n), distance, blocks.of((me - distance) % n), tag)


def _both(comm: Communicator, sent: np.ndarray, distance: int, received: np.ndarray, tag: int) -> list[Request]:
    """Return the requests of a message to the rank at ``distance`` and of one from the rank at minus it, if any."""
    n, me = comm.size, comm.rank
    requests: list[Request] = []
    if received.size:
        requests.append(comm.irecv(received, (me - distance) % n, tag))
    if sent.size:
        requests.append(comm.isend(sent, (me + distance) % n, tag))
    return requests


def ring_allgather(blocks: Blocks, world: World, tag: int) -> Steps:
    """Move the parts of an allgather once around a ring."""
    parts: list[Array] = [blocks.of(rank) for rank in range(world.size)]
    yield from ring.gather_shards(parts, ring.Ring.through(world.comm), tag)


def bruck_allgather(blocks: Blocks, world: World, tag: int) -> Steps:
    """Move the parts of an allgather in log2 n stages, in each of which a rank passes on up to all that it has."""
    n, me = world.size, world.rank
    distance = 1
    while distance < n:
        count = min(distance, n - distance)
        own = [(me + i) % n for i in range(count)]
        other_ranks = [(me + distance + i) % n for i in range(count)]
        received = np.empty(sum(blocks.of(rank).size for rank in other_ranks), np.uint8)
        sent = np.concatenate([blocks.of(rank) for rank in own])
        yield _both(world.comm, sent, -distance, received, tag)
        _distribute(received, [blocks.of(rank) for rank in other_ranks])
        distance *= 2


def by_node_allgather(blocks: Blocks, world: World, tag: int) -> Steps:
    """Move the parts of an allgather with one message from each rank to each other node.

    The receiver there has the sender's number on its node, and passes on all that it has received to its neighbors.
    """
    comm, me, nodes = world.comm, world.rank, nodes_of(world)
    neighbors = [rank for rank in nodes.here if rank != me]
    carried_by = dict(zip(nodes.here, nodes.carried, strict=True))
    yield [
        *(comm.irecv(blocks.of(rank), rank, tag) for rank in neighbors + carried_by[me] if blocks.of(rank).size),
        *(comm.isend(blocks.of(me), rank, tag) for rank in neighbors + nodes.partners() if blocks.of(me).size),
    ]
    sizes = {rank: sum(blocks.of(other).size for other in carried_by[rank]) for rank in nodes.here}
    received = {rank: np.empty(sizes[rank], np.uint8) for rank in neighbors if sizes[rank]}
    joined = _joined([blocks.of(rank) for rank in carried_by[me]])
    yield [
        *(comm.irecv(part, rank, tag + 1) for rank, part in received.items()),
        *(comm.isend(joined, rank, tag + 1) for rank in neighbors if joined.size),
    ]
    for rank, part in received.items():
        _distribute(part, [blocks.of(other) for other in carried_by[rank]])


def _distribute(joined: np.ndarray, places: Sequence[np.ndarray]) -> None:
    """Copy consecutive pieces of ``joined`` to ``places``."""
    first = 0
    for place in places:
        place[...] = joined[first : first + place.size]
        first += place.size


def tree_broadcast(blocks: Blocks, world: World, tag: int) -> Steps:
    """Move the parts of an allgather to which only one rank contributes, along a binomial tree."""
    root = next(rank for rank in range(world.size) if blocks.of(rank).size)
    yield from tree.broadcast(blocks.received, root, world.comm, tag)


def bruck(blocks: Blocks, world: World, tag: int) -> Steps:
    """Move blocks of one size in about log2 n stages: fewer and longer messages, for short blocks."""
    n, me = world.size, world.rank
    size = blocks.layout.ends[1]
    # Row i is on its way to the rank at distance i; each stage moves the rows with one bit of i set.
    rows = np.roll(blocks.sent.reshape(n, size), -me, axis=0)
    distance = 1
    while distance < n:
        moved = [i for i in range(n) if i & distance]
        sent, received = rows[moved], np.empty((len(moved), size), np.uint8)
        yield _both(world.comm, sent.reshape(-1), distance, received.reshape(-1), tag)
        rows[moved] = received
        distance *= 2
    # Row i has come from the rank at distance i before this one.
    blocks.received.reshape(n, size)[...] = np.roll(rows[::-1], me + 1, axis=0)


def by_node(blocks: Blocks, world: World, tag: int) -> Steps:
    """Move the blocks of an alltoall with one message from each node to each rank of another node.

    A rank first collects, from the ranks of its node, their blocks for the ranks of other nodes whose number on their
    node is its own, and then sends each of these ranks all blocks of the node in one message.
    """
    size = blocks.layout.ends[1]
    nodes = nodes_of(world)
    carried = blocks.layout.carried
    if carried is None:
        carried = np.full((len(nodes.here), len(nodes.carried[nodes.number])), size)
    yield from _by_node(blocks, world, tag, nodes, carried)


def counts_by_node(counts: np.ndarray, world: World, tag: int) -> StepsTo[tuple[np.ndarray, np.ndarray | None]]:
    """Move one number to each rank, of ``counts``, shape ``(n,)``, int64.

    Returns:
        The numbers received from each rank, shape ``(n,)``, and those of the messages that this rank passes on in
            `by_node`, see `BlockLayout.carried`; None if no node has several ranks.
    """
    received = np.empty_like(counts)
    layout = even_alltoall_layout(counts.nbytes, counts.size, world.rank)
    blocks = Blocks(layout, counts.view(np.uint8), received.view(np.uint8))
    blocks.keep_own(world.rank)
    if not 1 < world.num_nodes < world.size:
        yield from bruck(blocks, world, tag)
        return received, None
    nodes = nodes_of(world)
    shape = len(nodes.here), len(nodes.carried[nodes.number])
    collected = yield from _by_node(blocks, world, tag, nodes, np.full(shape, counts.itemsize))
    return received, np.concatenate([part.view(np.int64) for part in collected]).reshape(shape)


def passed_on_of(counts: np.ndarray, world: World) -> np.ndarray | None:
    """Return the second result of `counts_by_node`, given the numbers of all ranks, shape ``(n, n)``."""
    if not 1 < world.num_nodes < world.size:
        return None
    nodes = nodes_of(world)
    return counts[nodes.here][:, np.array(nodes.carried[nodes.number], int)]


def _by_node(blocks: Blocks, world: World, tag: int, nodes: Nodes, carried: np.ndarray) -> StepsTo[list[np.ndarray]]:
    """Run `by_node`; return what this rank has collected from each rank of its node."""
    comm, me, here = world.comm, world.rank, nodes.here
    targets = nodes.carried[nodes.number]
    own = _joined([blocks.to(target) for target in targets])
    collected = [
        own if rank == me else np.empty(int(sizes.sum()), np.uint8) for rank, sizes in zip(here, carried, strict=True)
    ]
    passed_on = {
        carrier: _joined([blocks.to(target) for target in nodes.carried[number]])
        for number, carrier in enumerate(here)
        if carrier != me
    }
    yield [
        *(comm.irecv(blocks.of(rank), rank, tag) for rank in here if rank != me and blocks.of(rank).size),
        *(comm.isend(blocks.to(rank), rank, tag) for rank in here if rank != me and blocks.to(rank).size),
        *(
            comm.irecv(part, rank, tag + 1)
            for rank, part in zip(here, collected, strict=True)
            if rank != me and part.size
        ),
        *(comm.isend(part, carrier, tag + 1) for carrier, part in passed_on.items() if part.size),
    ]
    pieces = [_cut(part, sizes) for part, sizes in zip(collected, carried, strict=True)]
    sent = [_joined([part[i] for part in pieces]) for i in range(len(targets))]
    received = [np.empty(sum(blocks.of(rank).size for rank in node), np.uint8) for node in nodes.other_nodes]
    yield [
        *(
            comm.irecv(part, partner, tag)
            for partner, part in zip(nodes.partners(), received, strict=True)
            if part.size
        ),
        *(comm.isend(part, target, tag) for target, part in zip(targets, sent, strict=True) if part.size),
    ]
    for node, part in zip(nodes.other_nodes, received, strict=True):
        _distribute(part, [blocks.of(rank) for rank in node])
    return collected


@dataclass(frozen=True)
class Nodes:
    """The ranks by node, as `by_node` needs them."""

    here: list[int]
    """The ranks of this node."""
    number: int
    """The position of this rank in `here`."""
    other_nodes: list[list[int]]
    """The ranks of each other node."""
    carried: list[list[int]]
    """The ranks of other nodes with which each rank of this node exchanges: those that have its number on theirs."""

    def partners(self) -> list[int]:
        """Return the rank of each other node that has this one's number there."""
        return [node[self.number % len(node)] for node in self.other_nodes]


def nodes_of(world: World) -> Nodes:
    """Return the ranks by node; every rank must call the first time."""

    def gathered() -> Nodes:
        numbers = np.zeros(world.size, np.int32)
        numbers[world.rank] = world.node
        join_parts(numbers, world.comm)
        nodes: list[list[int]] = [[] for _ in range(world.num_nodes)]
        for rank, number in enumerate(numbers.tolist()):
            nodes[number].append(rank)
        here = nodes.pop(world.node)
        carried: list[list[int]] = [[] for _ in here]
        for node in nodes:
            for place, rank in enumerate(node):
                carried[place % len(here)].append(rank)
        return Nodes(here, here.index(world.rank), nodes, carried)

    return world.keep(nodes_of, gathered)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _cut(joined: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return np.split(joined, np.cumsum(sizes)[:-1]) if sizes.size else []


ALGORITHMS = {
    "direct": direct,
    "pairwise": pairwise,
    "ring": ring_allgather,
    "bruck_allgather": bruck_allgather,
    "by_node_allgather": by_node_allgather,
    "tree": tree_broadcast,
    "bruck": bruck,
    "by_node": by_node,
}
"""The algorithms of messages by name."""
