"""The state of every bucket of gradients, and its sum over the ranks.

On CPU a bucket is a row for every rank of the node, in memory that they share; a parameter's gradient is a view of its
own rank's row. Each rank of a node owns a shard of the columns and sums them over the rows; the ranks of a rail then
add up the sums of their nodes. Elsewhere (a device's memory, or a node whose ranks cannot share) a bucket has one row
and every rank is a node of its own.

In this version a step reduces when backward has ended; the hook that marks gradients ready is where reductions will be
launched from while backward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np

from .. import kernels
from ..arrays import Array, array_namespace, is_host
from ..collectives import allreduce, ring
from ..collectives.progress import Progress, drive
from ..collectives.select import choose
from ..comm import Communicator, World
from ..comm.reductions import resolve
from ..comm.shared import Gate, NodeMemory, PrivateMemory
from .buckets import Layout, Slot


class Parameter(Protocol):
    """What a parameter must be for its gradient to be reduced; `hpcdp.nn.Parameter` is one."""

    name: str
    data: Array
    grad: Array
    grad_req: str
    grad_hook: Any


class State(Enum):
    """Where a bucket is on its way."""

    FILLING = "backward has still to write some of its gradients"
    READY = "all its gradients are written"
    REDUCED = "this rank's shard, or all of it, holds the sum over all ranks"


class Bucket:
    """One flat buffer of gradients and this rank's part in it."""

    def __init__(self, number: int, slots: Sequence[Slot], rows: Array, rank: int, shard: tuple[int, int]) -> None:
        self.number = number
        self.slots = slots
        self.rows = rows
        """Shape ``(ranks that share it, elements)``."""
        self.words = kernels.load("reduce").words(rows) if is_host(rows) else rows
        """``rows`` as the kernels take them."""
        self.mine: Array = rows[rank]
        """This rank's row, shape ``(elements,)``."""
        self.shard = shard
        """The columns that this rank sums: first, and one after the last."""
        self.names = frozenset(slot.name for slot in slots)
        self.missing = set(self.names)
        """Parameters whose gradient backward has still to write."""
        self.state = State.FILLING

    def view(self, slot: Slot) -> Array:
        """The gradient of one parameter: a view of this rank's row in the parameter's shape."""
        return self.mine[slot.offset : slot.offset + slot.count].reshape(slot.shape)


class Reducer:
    """The buckets of a model's parameters. All ranks must make it together, with the same layout.

    Args:
        params: parameters whose ``grad`` and ``grad_hook`` it takes over.
        layout: where each of them goes.
        world: the ranks.
    """

    def __init__(self, params: Sequence[Parameter], layout: Layout, world: World) -> None:
        self.layout = layout
        self.world = world
        on_host = all(is_host(param.data) for param in params)
        self.memory: NodeMemory = world.node_memory if on_host else PrivateMemory()
        together = self.memory is world.node_memory
        self.rail: Communicator | None = world.rail_comm if together else world.comm
        self.num_shards = world.num_rails if together else 1
        self.on_one_node = self.memory.size == world.size
        """Whether all ranks share the memory of the buckets, so that no message is needed."""
        self.gate = Gate(self.memory)
        self._progress = Progress.of(world)
        self._namespace = array_namespace(*(param.data for param in params))
        self._reduce = kernels.load("reduce")
        self.buckets = [self._make_bucket(number) for number in range(len(layout.counts))]
        self.params = {param.name: param for param in params}
        for param, slot in zip(params, layout.slots, strict=True):
            param.grad = self.buckets[slot.bucket].view(slot)
            param.grad_hook = self._written
        self._over_rings = {each.number for each in self.buckets if self._is_for_rings(each)}
        self.num_missing = len(params)
        """Gradients that backward has still to write in this step."""
        self._overwriting: dict[str, str] | None = None
        self._bucket_of = {slot.name: self.buckets[slot.bucket] for slot in layout.slots}

    def _make_bucket(self, number: int) -> Bucket:
        count, dtype = self.layout.counts[number], self.layout.dtypes[number]
        if self.memory.size == 1:
            rows = self._namespace.zeros((1, count), dtype=dtype)
        else:
            rows = self.memory.alloc((self.memory.size, count), dtype)
        owns_some = self.memory.rank < self.num_shards
        shard = self.layout.shard(number, self.num_shards, self.memory.rank) if owns_some else (0, 0)
        slots = [slot for slot in self.layout.slots if slot.bucket == number]
        return Bucket(number, slots, rows, self.memory.rank, shard)

    def _is_for_rings(self, bucket: Bucket) -> bool:
        """Whether a bucket goes over nodes as in the hierarchical algorithm, rather than by the MPI library's own."""
        if self.on_one_node or self.rail is self.world.comm:
            return False
        rows = bucket.rows
        op = resolve("reduce_shard", "sum", rows.dtype)
        return choose("allreduce", rows[0].nbytes, rows.dtype, op, self.world) == "hierarchical"

    def _written(self, param: Parameter) -> None:
        bucket = self._bucket_of[param.name]
        if param.name in bucket.missing:
            bucket.missing.remove(param.name)
            self.num_missing -= 1
        bucket.state = State.FILLING if bucket.missing else State.READY

    @property
    def missing(self) -> list[str]:
        """Parameters that backward has not written since the last step, in the model's order."""
        if not self.num_missing:
            return []
        return [slot.name for slot in self.layout.slots if slot.name in self.buckets[slot.bucket].missing]

    def tally(self, *numbers: int) -> list[int]:
        """The sums of a few ``numbers`` over all ranks, which must all call with as many; they wait for each other."""
        if not self.on_one_node:
            return allreduce(np.array(numbers, np.int64), world=self.world).tolist()
        watchdog = self._progress.watchdog
        watchdog.calls += 1
        watchdog.call = "the closing exchange of a step", numbers
        try:
            self._progress.finish()  # as before any blocking collective
            return self.gate.tally(*numbers)
        finally:
            watchdog.call = None

    def fill_missing_with_zeros(self) -> None:
        """Make gradients that backward has not written zero, so that they add nothing."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.name in bucket.missing:
                    bucket.view(slot)[...] = 0
            bucket.state = State.READY

    def reset(self) -> None:
        """Begin a step: every gradient is to be written anew."""
        for bucket in self.buckets:
            bucket.missing = set(bucket.names)
            bucket.state = State.FILLING
        self.num_missing = len(self.params)

    def accumulate(self) -> None:
        """From now on backward adds to the gradients; what it has not written in this step counts as zero."""
        if self._overwriting is None:
            self._overwriting = {name: param.grad_req for name, param in self.params.items()}
            self.fill_missing_with_zeros()
            for param in self.params.values():
                param.grad_req = "add"

    @property
    def accumulating(self) -> bool:
        """Whether backward adds to the gradients."""
        return self._overwriting is not None

    def overwrite(self) -> None:
        """Undo `accumulate`."""
        if self._overwriting is not None:
            for name, grad_req in self._overwriting.items():
                self.params[name].grad_req = grad_req
            self._overwriting = None

    def _sum_shard_into(self, bucket: Bucket, row: int) -> None:
        first, last = bucket.shard
        if self.memory.size > 1 and last > first:
            self._reduce.combine_into(bucket.words, first, last, row, self._reduce.SUM)

    def reduce_shard(self, bucket: Bucket) -> Array:
        """Sum this rank's shard over all ranks of the world, in place in its own row; a view of it, shape ``(n,)``.

        Every rank must call it for every bucket, in the same order, after all have left backward.
        """
        self._sum_shard_into(bucket, self.memory.rank)
        first, last = bucket.shard
        shard = bucket.mine[first:last]
        if not self.on_one_node:
            with self._progress.watchdog.watching("reduction of a bucket", shard):
                self._sum_over_nodes(bucket, shard)
        bucket.state = State.REDUCED
        return shard

    def _sum_over_nodes(self, bucket: Bucket, shard: Array) -> None:
        if self.rail is self.world.comm:
            allreduce(shard, world=self.world)
            return
        self._progress.finish()
        # Also ranks without a rail take a tag, so that later ones are the same everywhere.
        tag = self._progress.tag("bucket", bucket.number)
        if self.rail is None:
            return
        if bucket.number in self._over_rings:
            drive(ring.allreduce(shard, resolve("reduce_shard", "sum", shard.dtype), self.rail, tag))
        else:
            self.rail.native_allreduce(shard, "sum")

    def sum_of_squares(self) -> float:
        """This rank's part of the summed gradients' squared norm; the parts of all ranks add up to it.

        The shards must be reduced. Accumulated in float64.
        """
        if self.rail is None or self.rail.rank > 0:  # every node holds the same sums: the first one's count
            return 0.0
        xp = self._namespace
        shards = [bucket.mine[slice(*bucket.shard)] for bucket in self.buckets]
        return float(sum(float(xp.sum(shard * shard, dtype=xp.float64)) for shard in shards))

    def reduce_everywhere(self) -> None:
        """Make every rank's row of every bucket the sum over all ranks; every rank must call, outside of backward."""
        for bucket in self.buckets:
            first, last = bucket.shard
            if self.on_one_node:
                self._sum_shard_into(bucket, self._reduce.EVERY_ROW)
                bucket.state = State.REDUCED
            else:
                shard = self.reduce_shard(bucket)
                for other in range(self.memory.size):
                    if other != self.memory.rank:
                        bucket.rows[other, first:last] = shard
        self.gate.barrier()
