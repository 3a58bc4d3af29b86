"""Sums that do not depend on the number of ranks: virtual shards in a fixed tree.

Allreduce in the order of a fixed binary tree, whoever holds which of its leaves.

The root is the sum of leaves 0 to n - 1, each node that of its two halves, the first of which is the longer one where
they differ. Floating-point addition is not associative, so this order is what makes sums alike: it is the same for
any number of ranks, each of which holds the sums of the fewest nodes that its leaves make up::

    5 leaves       2 ranks       3 ranks
         *            *              *
       *   *        *   A          *   C       A  held by rank 0
      * 2 3 4      A B B B        A B C C      B  by rank 1, which on two ranks holds leaves 2, 3 and 4: two nodes

Rank r owns the r-th part of a segment. Every rank sends its nodes' sums of that part to its owner, who adds them up in
the tree's order and sends the result to everybody.

Sent per rank: 2 (n - 1) messages and (n - 1) (k + 1) S / n bytes for k nodes held; k is 1 where the number of ranks
divides that of leaves and both are powers of two, at worst about 2 log2(leaves).

Source: pairwise summation, as in Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 4.1; the
owners as in `ring` and `compressed`.

Gradients of virtual shards: the same pieces of a global batch on any number of ranks, summed in a fixed tree.

Each rank computes a run of consecutive shards one after another. Their gradients are the leaves of the tree (see
`data_parallel.deterministic`); a rank keeps the sums of the nodes that are complete, no more than the tree is deep.
When its run is over, the owners of the bucket's columns add up what the ranks of the node hold, where it lies, and then
the nodes' sums. Which rank computes a leaf, and who adds two nodes, changes no bit.

What makes a run the same to the bit on any number of ranks, beside the order in which gradients are summed.

One BLAS thread, the same arithmetic on all ranks, layers that know their virtual shard, running statistics that move
once a step by those of all shards in order. docs/reproducibility.md says why each of them is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from ..autograd import Tensor
from ..comm import Communicator, Request, World
from ..comm.communicator import Steps, bounds, join_parts
from ..comm.consistency import require_same
from ..comm.shared_memory import NodeMemory
from ..comm.tasks import MESSAGE_NBYTES, in_lanes, together
from ..comm.watchdog import WatchedBarrier
from ..core.arrays import is_host
from ..errors import ConfigError, HpcdpError
from ..nn.microbatch import VirtualShard, enter_shard, entered_shard, layers_of, move
from .buckets import Bucket, Layout, Parameter
from .reductions import HierarchicalReduction, InterNodeReduction, Reduce

if TYPE_CHECKING:
    from .reducer import Reducer

VIRTUAL_SHARDS = 8
"""The default number: what 8 ranks need, and 2 or 4 divide among them evenly."""

Node = tuple[int, int]
"""The first leaf below it, and one after the last."""


def halves(node: Node) -> tuple[Node, Node]:
    """The two nodes below one of several leaves."""
    first, end = node
    middle = (first + end + 1) // 2
    return (first, middle), (middle, end)


def cover(node: Node, leaves: Sequence[int]) -> list[Node]:
    """The fewest nodes below ``node``, or itself, that have exactly ``leaves`` of it below them, in order."""
    first, end = node
    within = [leaf for leaf in leaves if first <= leaf < end]
    if not within:
        return []
    if len(within) == end - first:
        return [node]
    return [each for half in halves(node) for each in cover(half, within)]


def fold(node: Node, sums: Mapping[Node, np.ndarray]) -> dict[Node, np.ndarray]:
    """The sums of the fewest nodes below ``node``, or itself, by those of others, which are added up in place."""
    if node in sums:
        return {node: sums[node]}
    if node[1] - node[0] <= 1:
        return {}
    left, right = halves(node)
    held = fold(left, sums) | fold(right, sums)
    if left in held and right in held:
        total = held[left]
        total += held[right]
        return {node: total}
    return held


def allreduce(
    own: Mapping[Node, np.ndarray],
    held: Sequence[Sequence[Node]],
    root: Node,
    out: np.ndarray,
    comm: Communicator,
    tag: int,
    turn: Request | None = None,
) -> Steps:
    """Write the sum of ``root``'s leaves to ``out``, shape ``(count,)``; segments begin when it is their ``turn``.

    Args:
        own: the sums of this rank's nodes, each of shape ``(count,)``.
        held: for every rank of ``comm`` the nodes that it holds, in order; together they make up ``root``.
    """
    nbytes = next(iter(own.values())).itemsize * max(len(nodes) for nodes in held)
    pieces = max(1, -(-out.size * nbytes // (MESSAGE_NBYTES * comm.size)))
    columns = [slice(*ends) for ends in itertools.pairwise(bounds(out.size, pieces))]

    def segment(part: slice, tag: int) -> Steps:
        return _segment({node: x[part] for node, x in own.items()}, held, root, out[part], comm, tag)

    yield from together(in_lanes(columns, segment, tag, turn=turn))


def _segment(
    own: Mapping[Node, np.ndarray],
    held: Sequence[Sequence[Node]],
    root: Node,
    out: np.ndarray,
    comm: Communicator,
    tag: int,
) -> Steps:
    me, others = comm.rank, [rank for rank in range(comm.size) if rank != comm.rank]
    parts = [slice(*ends) for ends in itertools.pairwise(bounds(out.size, comm.size))]
    dtype = own[held[me][0]].dtype
    sent = {rank: np.concatenate([own[node][parts[rank]] for node in held[me]]) for rank in others}
    size = parts[me].stop - parts[me].start
    received = {rank: np.empty((len(held[rank]), size), dtype) for rank in others}
    sends = [comm.isend(sent[rank], rank, tag) for rank in others]
    yield [*sends, *(comm.irecv(received[rank].reshape(-1), rank, tag) for rank in others)]
    sums = {node: own[node][parts[me]] for node in held[me]}
    for rank in others:
        sums |= dict(zip(held[rank], received[rank], strict=True))
    with np.errstate(over="ignore"):  # of 16 bits: to an infinity, which whoever cares will look for
        out[parts[me]] = fold(root, sums)[root]
    sends = [comm.isend(out[parts[me]], rank, tag) for rank in others]
    yield [*sends, *(comm.irecv(out[parts[rank]], rank, tag) for rank in others)]


def run_of(num: int, rank: int, size: int) -> range:
    """The virtual shards, of ``num``, that a rank computes."""
    ends = bounds(num, size)
    return range(ends[rank], ends[rank + 1])


def closed_by(leaf: int, run: range, root: Node) -> int:
    """How many nodes of several leaves, all of them in the ``run``, are complete when ``leaf`` is: it is their last."""
    found, node = 0, root
    while node[1] - node[0] > 1:
        found += node[1] == leaf + 1 and node[0] >= run.start
        node = next(half for half in halves(node) if half[0] <= leaf < half[1])
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
        self, num: int, world: World, memory: NodeMemory, buckets: Sequence[Bucket], rail: InterNodeReduction | None
    ) -> None:
        self.num = num
        self.run = run_of(num, world.rank, world.size)
        """Those of this rank."""
        self._root = (0, num)
        self._memory, self._rail = memory, rail
        runs = [run_of(num, rank, world.size) for rank in range(world.size)]
        neighbours = world.node_comm.allgather_json(world.rank) if memory.size > 1 else [world.rank]
        self._of_local = [cover(self._root, runs[rank]) for rank in neighbours]
        """The nodes whose sums each rank of this node holds in the end."""
        together = [leaf for rank in neighbours for leaf in runs[rank]]
        held = [] if rail is None else rail.comm.allgather_json(cover(self._root, together))
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
        held, out = fold(self._root, held), bucket.mine[first:last]
        if self._root in held:
            with np.errstate(over="ignore"):  # as in fixed_tree
                out[...] = held[self._root]
        else:
            assert self._rail is not None
            tag = self._rail.tag(bucket)
            yield from allreduce(held, self._held, self._root, out, self._rail.comm, tag, turn)


class DeterministicReduction(HierarchicalReduction):
    """Buckets on the host whose sums have the same bits on any number of ranks: `VirtualShards` in a fixed tree.

    A step has a backward for each virtual shard of this rank. The owners of a bucket's columns add up the sums that the
    ranks of the node hold, in the memory that they share, and then those of the nodes.

    Args:
        world, gate, memory, num_shards, params, comm, rail, signature: see `HierarchicalReduction`; ``comm`` and
            ``rail`` are None where all ranks share ``memory``.
        num: virtual shards of a global batch.
    """

    is_deterministic = True

    def __init__(
        self,
        world: World,
        gate: WatchedBarrier,
        memory: NodeMemory,
        num_shards: int,
        params: Sequence[Parameter],
        comm: Communicator | None,
        rail: Communicator | None,
        signature: int,
        num: int,
    ) -> None:
        super().__init__(world, gate, memory, num_shards, params, comm, rail, signature, None)
        self._num = num
        self._sums: VirtualShards

    def allocate(self, layout: Layout) -> list[Bucket]:
        buckets = super().allocate(layout)
        self._sums = VirtualShards(self._num, self._world, self.memory, buckets, self.coder)
        self.own_virtual_shards, self.nbytes = self._sums.run, self._sums.nbytes
        self._note_backward()
        return buckets

    def begin_step(self) -> None:
        self._sums.begin()
        self._note_backward()

    def _note_backward(self) -> None:
        self.virtual_shard, self.is_last_backward = self._sums.current, self._sums.is_last

    def written(self, bucket: Bucket, name: str, param: Parameter) -> None:
        if param.grad_req == "add":
            raise ConfigError(
                "backward", where=name, expected="grad_req='write' with reproducible=True", got="grad_req='add'"
            )

    def end_backward(self, bucket: Bucket) -> None:
        self._sums.take(bucket)

    def next_backward(self) -> None:
        self._sums.next()
        self._note_backward()

    def prepare(self, bucket: Bucket) -> Reduce:
        return partial(self._reduce_in_tree, bucket)

    def _reduce_in_tree(self, bucket: Bucket, turn: Request | None) -> Steps:
        yield from self._sums.sum(bucket, turn)
        bucket.mark_reduced()

    def reduce(self, buckets: Sequence[Bucket]) -> None:
        super().reduce(buckets)
        self.reduced(buckets)

    def reduced(self, buckets: Sequence[Bucket]) -> None:
        self.gate.barrier()  # owners add up in the memory of other ranks, which those write in the next step


def _depth(run: range, root: Node) -> int:
    """The most nodes that a rank holds at once."""
    held = deepest = 0
    for leaf in run:
        held += 1 - closed_by(leaf, run, root)
        deepest = max(deepest, held)
    return deepest


def arithmetic() -> str:
    """The libraries and the processor that decide what the last bits of a product or a sum are, in words."""
    from ..kernels.jit import target  # not before: Numba would be loaded with every Trainer

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    pools = [pool for pool in pools if "numpy" in pool["filepath"]] or pools
    blas = sorted({f"{each['internal_api']} {each['version']} {each.get('architecture', '')}" for each in pools})
    simd = np.show_config(mode="dicts").get("SIMD Extensions", {})
    found = " ".join([*simd.get("baseline", ()), *simd.get("found", ())])
    return ", ".join([f"NumPy {np.__version__} {found}", *blas, target()])


def checked_virtual_shards(
    reproducible: bool, num: int | None, params: Sequence[Parameter], compression: object, world: World
) -> int | None:
    """How many virtual shards a `Trainer` of these arguments has, None where it is not reproducible.

    Raises:
        ConfigError: something among them would make bits depend on the number of ranks, or make no sense.
    """
    if not isinstance(reproducible, bool):
        raise ConfigError("Trainer", where="reproducible", expected="True or False", got=repr(reproducible))
    if not reproducible:
        if num is not None:
            raise ConfigError("Trainer", where="virtual_shards", expected="None without reproducible=True", got=num)
        return None
    num = VIRTUAL_SHARDS if num is None else num
    if not isinstance(num, int | np.integer) or isinstance(num, bool) or num < 1:
        raise ConfigError("Trainer", where="virtual_shards", expected="an integer >= 1", got=repr(num))

    def refuse(where: str, expected: str, got: object, remedy: str | None = None) -> ConfigError:
        return ConfigError("Trainer(reproducible=True)", where=where, expected=expected, got=got, remedy=remedy)

    if num < world.size:
        raise refuse("virtual_shards", f"at least one for each of {world.size} ranks", num, "take fewer ranks, or more "
                     "virtual shards from the first step on: their number decides the bits")  # fmt: skip
    if compression is not None:
        raise refuse("compression", "none, since what a node leaves out depends on the number of nodes", compression)
    adding = next((param.name for param in params if param.grad_req == "add"), None)
    if adding is not None:
        raise refuse(adding, "grad_req='write'", "grad_req='add'", "make the global batch larger instead")
    if not all(is_host(param.data) for param in params):
        raise refuse("params", "NumPy arrays, since sums on devices have no fixed order", "arrays on a device")
    return int(num)


def fix_arithmetic(world: World) -> None:
    """Set BLAS to one thread, in which it adds up in one order; every rank must call.

    Raises:
        MismatchError: the ranks compute with different libraries or processors; on every rank.
    """
    threadpool_limits(1, user_api="blas")
    items = [f"arithmetic {arithmetic()}"]
    require_same(world.comm, "Trainer(reproducible=True)", items, "take nodes of one kind, with the same libraries")


class ReproducibleSteps:
    """Which virtual shard of which step this rank computes, and what layers have noted about those of this step.

    Args:
        num: virtual shards of a global batch.
        reducer: the reducer of the gradients.
        params: all that the trainer was given; some belong to layers with running statistics.
    """

    def __init__(self, num: int, reducer: Reducer, params: Sequence[Parameter]) -> None:
        self._num, self._reducer, self._world = num, reducer, reducer.world
        self._layers = layers_of(params)
        self._noted: list[tuple[int, np.ndarray]] = []  # number of a shard of this step, and its row, see _row
        self.met_stranger = False
        """Whether a layer has noted something on this rank in this step that is none of the trainer's."""
        self.begin(1)

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._noted.clear()
        self.met_stranger = False
        self.enter(step)

    @property
    def is_last(self) -> bool:
        """Whether this rank computes no other virtual shard in this step."""
        return self._reducer.is_last_backward

    def enter(self, step: int) -> None:
        """The next forward is that of the current virtual shard."""
        enter_shard(VirtualShard(self, step, self._reducer.virtual_shard))

    def leave(self, count: int) -> None:
        """The current virtual shard of ``count`` samples is computed."""
        shard = entered_shard()
        if shard is None or not shard.is_of(self):
            raise HpcdpError(
                "step", expected="no other Trainer made in this thread since this reproducible one", got="one",
                remedy="train one model after the other",
            )  # fmt: skip
        if count and shard.statistics:
            self._noted.append((shard.number, self._row(count, shard.statistics)))

    def _row(self, count: int, statistics: Sequence[tuple[Tensor, np.ndarray]]) -> np.ndarray:
        """For each running statistic how many samples have passed, then the sums over them, one after the other."""
        buffers = self._buffers()
        sums = {id(buffer): np.zeros(buffer.data.size) for _, buffer in buffers}
        passed = dict.fromkeys(sums, 0.0)
        for buffer, value in statistics:
            if id(buffer) not in sums:
                self.met_stranger = True
                continue
            sums[id(buffer)] += count * value.reshape(-1)
            passed[id(buffer)] += count
        return np.concatenate([list(passed.values()), *sums.values()])

    def _buffers(self) -> list[tuple[float, Tensor]]:
        return [(layer.momentum, buffer) for layer in self._layers for buffer in layer.statistics()]

    def move_statistics(self) -> None:
        """Move running statistics by those of all shards of the step, in order; every rank must call."""
        buffers = self._buffers()
        if not buffers:
            return
        table = np.zeros((self._num, len(buffers) + sum(buffer.data.size for _, buffer in buffers)))
        for number, row in self._noted:
            table[number] = row
        join_parts(table, self._world.comm)
        total = table.sum(axis=0)
        at = len(buffers)
        for passed, (momentum, buffer) in zip(total, buffers, strict=False):
            sums, at = total[at : at + buffer.data.size], at + buffer.data.size
            if passed:
                move(buffer, momentum, (sums / passed).reshape(buffer.shape))
