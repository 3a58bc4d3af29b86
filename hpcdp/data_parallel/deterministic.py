"""Reproducible training: sums and steps whose bits do not depend on the number of ranks.

Floating-point addition is not associative, so the order of a sum decides its bits. Here gradients are summed in a fixed
binary tree, on any number of ranks. Its leaves are the virtual shards of a global batch. Each node of the tree is the
sum of its two halves, of which the first is the longer one where they differ::

    5 leaves       2 ranks       3 ranks
         *            *              *
       *   *        *   A          *   C       A  held by rank 0
      * 2 3 4      A B B B        A B C C      B  by rank 1, which on two ranks holds leaves 2, 3 and 4: two nodes

A rank computes consecutive leaves and keeps the sums of the complete nodes, at most as many as the tree is deep. The
owners of a bucket's columns add up the sums of their node's ranks, and then `allreduce` sums over the nodes: every rank
sends its sums of a part to the part's owner, who adds them in the tree's order and sends the result to all ranks.

Each rank sends 2 (n - 1) messages and (n - 1) (k + 1) S / n bytes for k nodes held. k is 1 where the number of ranks
divides that of leaves and both are powers of two, and at worst about 2 log2(leaves).

`ReproducibleSteps` does the rest: one BLAS thread, the same arithmetic on all ranks, layers that know their virtual
shard, and running statistics that move once per step (docs/reproducibility.md gives the reasons).

Source: pairwise summation, as in Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 4.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from ..autograd import Tensor
from ..comm import Communicator, Request, World
from ..comm.communicator import Steps, bounds, join_parts
from ..comm.consistency import require_same
from ..comm.progress import MESSAGE_NBYTES, in_lanes, together
from ..core.arrays import is_host
from ..core.checks import boolean, whole_number
from ..errors import ConfigError, HpcdpError, warn
from ..nn.virtual_shards import VirtualShard, enter_shard, entered_shard, layers_of, move
from .bucket_layout import Bucket, Layout, ParameterLike
from .cpu_reduction import HierarchicalReduction, Reduce, ReductionRanks

if TYPE_CHECKING:
    from .reducer import Reducer

VIRTUAL_SHARDS = 8
"""The default number of virtual shards, which 2, 4 or 8 ranks divide evenly."""

Node = tuple[int, int]
"""A node of the tree: the first leaf below it, and one after the last."""


def halves(node: Node) -> tuple[Node, Node]:
    """Return the two children of a node that has several leaves."""
    first, end = node
    middle = (first + end + 1) // 2
    return (first, middle), (middle, end)


def cover(node: Node, leaves: Sequence[int]) -> list[Node]:
    """Return the fewest nodes in the subtree of ``node`` that have exactly those of ``leaves`` below them, in order."""
    first, end = node
    within = [leaf for leaf in leaves if first <= leaf < end]
    if not within:
        return []
    if len(within) == end - first:
        return [node]
    return [below for half in halves(node) for below in cover(half, within)]


def fold(node: Node, sums: Mapping[Node, np.ndarray]) -> dict[Node, np.ndarray]:
    """Return the sums of the fewest nodes in the subtree of ``node``, from those of its descendants, added in place."""
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
    """Write the sum of all leaves of ``root`` to ``out``; every rank of ``comm`` must run the steps.

    Args:
        own: the sums of this rank's nodes, each of shape ``(count,)``.
        held: the nodes of every rank of ``comm``, in order; together they make up ``root``.
        root: the root of the tree.
        out: the result, shape ``(count,)``, changed in place.
        comm: the ranks.
        tag: the first of `tasks.LANES` tags.
        turn: a request that is complete when segments may begin; None: at once.
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
    me, peers = comm.rank, [rank for rank in range(comm.size) if rank != comm.rank]
    parts = [slice(*ends) for ends in itertools.pairwise(bounds(out.size, comm.size))]
    dtype = own[held[me][0]].dtype
    sent = {rank: np.concatenate([own[node][parts[rank]] for node in held[me]]) for rank in peers}
    size = parts[me].stop - parts[me].start
    received = {rank: np.empty((len(held[rank]), size), dtype) for rank in peers}
    sends = [comm.isend(sent[rank], rank, tag) for rank in peers]
    yield [*sends, *(comm.irecv(received[rank].reshape(-1), rank, tag) for rank in peers)]
    sums = {node: own[node][parts[me]] for node in held[me]}
    for rank in peers:
        sums |= dict(zip(held[rank], received[rank], strict=True))
    with np.errstate(over="ignore"):  # 16-bit sums may overflow to infinity, which the policy looks for
        out[parts[me]] = fold(root, sums)[root]
    sends = [comm.isend(out[parts[me]], rank, tag) for rank in peers]
    yield [*sends, *(comm.irecv(out[parts[rank]], rank, tag) for rank in peers)]


def run_of(num: int, rank: int, size: int) -> range:
    """Return the virtual shards, out of ``num``, that a rank computes."""
    ends = bounds(num, size)
    return range(ends[rank], ends[rank + 1])


def closed_by(leaf: int, run: range, root: Node) -> int:
    """Return the number of nodes whose last leaf is ``leaf`` and that have several leaves, all of them in ``run``."""
    count, node = 0, root
    while node[1] - node[0] > 1:
        count += node[1] == leaf + 1 and node[0] >= run.start
        node = next(half for half in halves(node) if half[0] <= leaf < half[1])
    return count


class DeterministicReduction(HierarchicalReduction):
    """Buckets on the host whose sums have the same bits on any number of ranks, by virtual shards in a fixed tree.

    A step has a backward for each virtual shard of this rank. The owners of a bucket's columns add up the sums that the
    ranks of the node hold, in the memory that they share, and then those of the nodes.

    Args:
        ranks, params: see `HierarchicalReduction`.
        num: number of virtual shards of a global batch, at least one per rank.
    """

    is_deterministic = True

    def __init__(self, ranks: ReductionRanks, params: Sequence[ParameterLike], num: int) -> None:
        super().__init__(ranks, params)
        self._root = root = (0, num)
        size, own = ranks.world.size, ranks.world.rank
        runs = [run_of(num, rank, size) for rank in range(size)]
        self.own_virtual_shards = runs[own]
        neighbors = ranks.world.node_comm.allgather_json(own) if self.memory.size > 1 else [own]
        self._of_local = [cover(root, runs[rank]) for rank in neighbors]
        """Tree nodes whose sums each rank of this machine holds at the end of its run."""
        together = [leaf for rank in neighbors for leaf in runs[rank]]
        held = [] if self._rail is None else self._rail.allgather_json(cover(root, together))
        self._held: list[list[Node]] = [[(first, end) for first, end in nodes] for nodes in held]
        """Tree nodes that each machine of the rail holds."""
        self._closed = [closed_by(leaf, runs[own], root) for leaf in runs[own]]
        self._depth = max(_depth(run, root) for run in runs)
        self._sums: list[np.ndarray] = []
        """Sums of tree nodes, by bucket, local rank and place on the rank's stack."""

    def allocate(self, layout: Layout) -> list[Bucket]:
        """See `BucketReduction.allocate`: also allocates the sums of virtual shards."""
        buckets, memory = super().allocate(layout), self.memory
        for bucket in buckets:
            wide = np.result_type(bucket.mine.dtype, np.float32)
            self._sums.append(memory.alloc((memory.size, self._depth, bucket.mine.size), wide))
        self.nbytes = sum(sums[0].nbytes for sums in self._sums)
        self.begin_step()
        return buckets

    def begin_step(self) -> None:
        """See `BucketReduction.begin_step`."""
        self._top = 0
        self._begin_backward(0)

    def _begin_backward(self, at: int) -> None:
        self._at, self.virtual_shard = at, self.own_virtual_shards[at]
        self.is_last_backward = at == len(self.own_virtual_shards) - 1

    def written(self, bucket: Bucket, name: str, param: ParameterLike) -> None:
        """See `BucketReduction.written`: gradients must not accumulate within a virtual shard."""
        if param.grad_req == "add":
            raise ConfigError(
                "backward", where=name, expected="grad_req='write' with reproducible=True", got="grad_req='add'"
            )

    def end_backward(self, bucket: Bucket) -> None:
        """See `BucketReduction.end_backward`: add the virtual shard's gradients to the sums."""
        stack, closed, top = self._sums[bucket.number][self.memory.rank], self._closed[self._at], self._top
        if not closed:
            stack[top] = bucket.mine
            return
        stack[top - 1] += bucket.mine
        for place in range(top - 1, top - closed, -1):
            stack[place - 1] += stack[place]

    def next_backward(self) -> None:
        """See `BucketReduction.next_backward`: begin the next virtual shard."""
        self._top += 1 - self._closed[self._at]
        self._begin_backward(self._at + 1)

    def prepare(self, bucket: Bucket) -> Reduce:
        """See `BucketReduction.prepare`."""
        return partial(self._reduce_in_tree, bucket)

    def _reduce_in_tree(self, bucket: Bucket, turn: Request | None) -> Steps:
        """Write the sum over all virtual shards to this rank's columns of its own row."""
        if bucket.shard[0] < bucket.shard[1]:
            yield from self._sum_in_tree(bucket, bucket.mine[slice(*bucket.shard)], turn)
        bucket.mark_reduced()

    def _sum_in_tree(self, bucket: Bucket, out: np.ndarray, turn: Request | None) -> Steps:
        held = {
            node: self._sums[bucket.number][local, place, slice(*bucket.shard)]
            for local, nodes in enumerate(self._of_local)
            for place, node in enumerate(nodes)
        }
        held = fold(self._root, held)
        if self._root in held:
            with np.errstate(over="ignore"):  # as in _segment
                out[...] = held[self._root]
        else:
            assert self.coder is not None
            tag = self.coder.tag(bucket)
            yield from allreduce(held, self._held, self._root, out, self.coder.comm, tag, turn)

    def reduce(self, buckets: Sequence[Bucket]) -> None:
        """See `BucketReduction.reduce`."""
        super().reduce(buckets)
        self.reduced(buckets)

    def reduced(self, buckets: Sequence[Bucket]) -> None:
        """See `BucketReduction.reduced`."""
        self.gate.barrier()  # owners add in the memory of other ranks, which write there in the next step


def _depth(run: range, root: Node) -> int:
    """Return the largest number of nodes that a rank holds at once."""
    held = deepest = 0
    for leaf in run:
        held += 1 - closed_by(leaf, run, root)
        deepest = max(deepest, held)
    return deepest


def arithmetic() -> str:
    """Describe the libraries and the processor, which decide the last bits of products and sums."""
    from ..kernels.jit import target  # imported late: Numba would be loaded with every Trainer

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    pools = [pool for pool in pools if "numpy" in pool["filepath"]] or pools
    blas = sorted({f"{pool['internal_api']} {pool['version']} {pool.get('architecture', '')}" for pool in pools})
    simd = np.show_config(mode="dicts").get("SIMD Extensions", {})
    extensions = " ".join([*simd.get("baseline", ()), *simd.get("found", ())])
    return ", ".join([f"NumPy {np.__version__} {extensions}", *blas, target()])


def checked_virtual_shards(
    reproducible: bool, num: int | None, params: Sequence[ParameterLike], compression: object, world: World
) -> int | None:
    """Return the number of virtual shards of a `Trainer` with these arguments; None where it is not reproducible.

    Raises:
        ConfigError: an argument is invalid, or would make bits depend on the number of ranks.
    """
    if not boolean("Trainer", "reproducible", reproducible):
        if num is not None:
            raise ConfigError("Trainer", where="virtual_shards", expected="None without reproducible=True", got=num)
        return None
    num = VIRTUAL_SHARDS if num is None else whole_number("Trainer", "virtual_shards", num, 1)

    def refuse(where: str, expected: str, got: object, remedy: str | None = None) -> ConfigError:
        return ConfigError("Trainer(reproducible=True)", where=where, expected=expected, got=got, remedy=remedy)

    if num < world.size:
        raise refuse("virtual_shards", f"at least one for each of {world.size} ranks", num, "use fewer ranks, or more "
                     "virtual shards from the first step on: their number decides the bits")  # fmt: skip
    if compression is not None:
        raise refuse("compression", "None, because residuals depend on the number of nodes", compression)
    adding = next((param.name for param in params if param.grad_req == "add"), None)
    if adding is not None:
        raise refuse(adding, "grad_req='write'", "grad_req='add'", "make the global batch larger instead")
    if not all(is_host(param.data) for param in params):
        raise refuse("params", "NumPy arrays, because sums on devices have no fixed order", "arrays on a device")
    return num


def fix_arithmetic(world: World) -> None:
    """Set BLAS to one thread, which adds in a fixed order; every rank must call.

    Raises:
        MismatchError: the ranks compute with different libraries or processors; on every rank.
    """
    threadpool_limits(1, user_api="blas")
    items = [f"arithmetic {arithmetic()}"]
    require_same(world.comm, "Trainer(reproducible=True)", items, "use nodes of one kind, with the same libraries")


class PlainSteps:
    """The steps of a trainer that is not reproducible, which need no bookkeeping."""

    @property
    def arithmetic(self) -> str | None:
        """The libraries and the processor that decide the last bits; None where these are not kept."""
        return None

    @property
    def header(self) -> dict[str, Any]:
        """Entries of the header of `Trainer.save_states`."""
        return {}

    def warn_of_other_arithmetic(self, operation: str, saved_by: str) -> None:
        """Warn that the last bits may differ from those of the processor and libraries of a saved state."""

    def refuse(self, operation: str, remedy: str) -> None:
        """Raise `ConfigError` for an operation that virtual shards do not allow; ``remedy`` says what else to do."""

    @property
    def is_last(self) -> bool:
        """True if this rank computes no other virtual shard in this step."""
        return True

    @property
    def closing_numbers(self) -> tuple[float, ...]:
        """The numbers that this rank adds to the closing exchange of a step; any sum other than 0 is an error."""
        return ()

    def begin(self, step: int) -> None:
        """Begin a step."""

    def enter(self, step: int) -> None:
        """Begin the current virtual shard: the next forward belongs to it."""

    def leave(self, count: int) -> None:
        """End the current virtual shard, which had ``count`` samples."""

    def move_statistics(self) -> None:
        """Move running statistics after an update; every rank must call."""

    def count_of_gradients(self, count: int, held: int) -> int:
        """Return the samples behind the gradients of the last backward.

        Args:
            count: samples that are passed to the last `Trainer.step` of a step.
            held: samples that were passed to the calls of `Trainer.step` before.
        """
        return count + held  # all gradients accumulated


class ReproducibleSteps(PlainSteps):
    """The virtual shard that this rank computes, and the statistics of layers in the virtual shards of a step.

    Args:
        num: number of virtual shards of a global batch.
        reducer: the reducer of the gradients.
        params: all parameters of the trainer, some of layers with running statistics.
    """

    def __init__(self, num: int, reducer: Reducer, params: Sequence[ParameterLike]) -> None:
        self._num, self._reducer, self._world = num, reducer, reducer.world
        self._layers = layers_of(params)
        self._noted: list[tuple[int, np.ndarray]] = []  # virtual shards of this step and their rows, see _row
        self._met_stranger = False
        """True if a layer that is not the trainer's has noted statistics on this rank in this step."""
        self.begin(1)

    @property
    def arithmetic(self) -> str:
        """See `PlainSteps.arithmetic`."""
        return arithmetic()

    @property
    def header(self) -> dict[str, Any]:
        """See `PlainSteps.header`."""
        return {"virtual_shards": self._num, "arithmetic": arithmetic()}

    def warn_of_other_arithmetic(self, operation: str, saved_by: str) -> None:
        """See `PlainSteps.warn_of_other_arithmetic`."""
        if saved_by not in ("", arithmetic()):
            warn(
                f"{operation}: saved where arithmetic was {saved_by}, and here it is {arithmetic()}: last bits may "
                "differ from here on"
            )

    def refuse(self, operation: str, remedy: str) -> None:
        """See `PlainSteps.refuse`."""
        raise ConfigError(
            operation, expected="a Trainer without reproducible=True", got="a reproducible Trainer",
            remedy=f"{remedy}, or make the Trainer without it",
        )  # fmt: skip

    def begin(self, step: int) -> None:
        """See `PlainSteps.begin`."""
        self._noted.clear()
        self._met_stranger = False
        self.enter(step)

    @property
    def is_last(self) -> bool:
        """See `PlainSteps.is_last`."""
        return self._reducer.is_last_backward

    @property
    def closing_numbers(self) -> tuple[float, ...]:
        """See `PlainSteps.closing_numbers`: whether a layer that is not the trainer's has noted statistics."""
        return (self._met_stranger,)

    def count_of_gradients(self, count: int, held: int) -> int:
        """See `PlainSteps.count_of_gradients`: the gradients of earlier virtual shards are summed apart."""
        return count

    def enter(self, step: int) -> None:
        """See `PlainSteps.enter`."""
        enter_shard(VirtualShard(self, step, self._reducer.virtual_shard))

    def leave(self, count: int) -> None:
        """See `PlainSteps.leave`.

        Raises:
            HpcdpError: another Trainer was made in this thread.
        """
        shard = entered_shard()
        if shard is None or not shard.is_of(self):
            raise HpcdpError(
                "step", expected="one Trainer in this thread at a time", got="a step after another Trainer's",
                remedy="train one model after the other",
            )  # fmt: skip
        if count and shard.statistics:
            self._noted.append((shard.number, self._row(count, shard.statistics)))

    def _row(self, count: int, statistics: Sequence[tuple[Tensor, np.ndarray]]) -> np.ndarray:
        """Return the number of samples of each running statistic, followed by their sums."""
        buffers = self._buffers()
        sums = {id(buffer): np.zeros(buffer.data.size) for _, buffer in buffers}
        passed = dict.fromkeys(sums, 0.0)
        for buffer, value in statistics:
            if id(buffer) not in sums:
                self._met_stranger = True
                continue
            sums[id(buffer)] += count * value.reshape(-1)
            passed[id(buffer)] += count
        return np.concatenate([list(passed.values()), *sums.values()])

    def _buffers(self) -> list[tuple[float, Tensor]]:
        return [(layer.momentum, buffer) for layer in self._layers for buffer in layer.statistics()]

    def move_statistics(self) -> None:
        """See `PlainSteps.move_statistics`: by the statistics of all virtual shards of the step, in order."""
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
