"""Gradients of virtual shards: the same pieces of a global batch on any number of ranks, summed in a fixed tree.

Each rank computes a run of consecutive shards one after another. Their gradients are the leaves of the tree (see
`collectives.fixed_tree`); a rank keeps the sums of the nodes that are complete, no more than the tree is deep. When its
run is over, the owners of the bucket's columns add up what the ranks of the node hold, where it lies, and then the
nodes' sums. Which rank computes a leaf, and who adds two nodes, changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives import fixed_tree
from ..collectives.fixed_tree import Node
from ..collectives.progress import Steps
from ..comm import Request, World
from ..comm.communicator import bounds
from ..comm.shared import NodeMemory
from .bucket import Bucket
from .rail import Rail


def run_of(num: int, rank: int, size: int) -> range:
    """The virtual shards, of ``num``, that a rank computes."""
    ends = bounds(num, size)
    return range(ends[rank], ends[rank + 1])


def closed_by(leaf: int, run: range, root: Node) -> int:
    """How many nodes of several leaves, all of them in the ``run``, are complete when ``leaf`` is: it is their last."""
    found, node = 0, root
    while node[1] - node[0] > 1:
        found += node[1] == leaf + 1 and node[0] >= run.start
        node = next(half for half in fixed_tree.halves(node) if half[0] <= leaf < half[1])
    return found


class VirtualShards:
    """This rank's sums of gradients in the current step. All ranks must make it together.

    Args:
        num: how many virtual shards a global batch has, at least one a rank.
        world: the ranks.
        memory: where those that share the buckets see each other's sums.
        buckets: those of the gradients, on the host.
        rail: with whom this rank's columns are summed; None on one node, and where this rank owns none.
    """

    def __init__(
        self, num: int, world: World, memory: NodeMemory, buckets: Sequence[Bucket], rail: Rail | None
    ) -> None:
        self.num = num
        self.run = run_of(num, world.rank, world.size)
        """Those of this rank."""
        self._root = (0, num)
        self._memory, self._rail = memory, rail
        runs = [run_of(num, rank, world.size) for rank in range(world.size)]
        neighbours = world.node_comm.allgather_json(world.rank) if memory.size > 1 else [world.rank]
        self._of_local = [fixed_tree.cover(self._root, runs[rank]) for rank in neighbours]
        """The nodes whose sums each rank of this node holds in the end."""
        together = [leaf for rank in neighbours for leaf in runs[rank]]
        held = [] if rail is None else rail.comm.allgather_json(fixed_tree.cover(self._root, together))
        self._held: list[list[Node]] = [[(first, end) for first, end in nodes] for nodes in held]
        """Those that each node of the rail holds."""
        self._closed = [closed_by(leaf, self.run, self._root) for leaf in self.run]
        depth = max(_depth(run, self._root) for run in runs)
        self._sums = [
            memory.alloc((memory.size, depth, bucket.mine.size), np.result_type(bucket.mine.dtype, np.float32))
            for bucket in buckets
        ]
        """For every bucket, rank of the node and place on its stack the sum of a node."""
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._at = self._top = 0

    @property
    def current(self) -> int:
        """The shard whose gradients are written now."""
        return self.run[self._at]

    @property
    def is_last(self) -> bool:
        """Whether it is the last one of this rank."""
        return self._at == len(self.run) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of sums that this rank holds."""
        return sum(sums[0].nbytes for sums in self._sums)

    def take(self, bucket: Bucket) -> None:
        """Add this rank's gradients in ``bucket``, those of the current shard, to what it holds."""
        stack, closed, top = self._sums[bucket.number][self._memory.rank], self._closed[self._at], self._top
        if not closed:
            stack[top] = bucket.mine
            return
        stack[top - 1] += bucket.mine
        for place in range(top - 1, top - closed, -1):
            stack[place - 1] += stack[place]

    def next(self) -> None:
        """Every bucket is taken; the gradients of the next shard follow."""
        self._top += 1 - self._closed[self._at]
        self._at += 1

    def sum(self, bucket: Bucket, turn: Request | None) -> Steps:
        """Write the sum over all shards to this rank's columns of its own row; the node's ranks have taken theirs."""
        first, last = bucket.shard
        if last == first:
            return
        held = {
            node: self._sums[bucket.number][local, place, first:last]
            for local, nodes in enumerate(self._of_local)
            for place, node in enumerate(nodes)
        }
        held, out = fixed_tree.fold(self._root, held), bucket.mine[first:last]
        if self._root in held:
            with np.errstate(over="ignore"):  # as in fixed_tree
                out[...] = held[self._root]
        else:
            assert self._rail is not None
            tag = self._rail.tag(bucket)
            yield from fixed_tree.allreduce(held, self._held, self._root, out, self._rail.comm, tag, turn)


def _depth(run: range, root: Node) -> int:
    """The most nodes that a rank holds at once."""
    held = deepest = 0
    for leaf in run:
        held += 1 - closed_by(leaf, run, root)
        deepest = max(deepest, held)
    return deepest
