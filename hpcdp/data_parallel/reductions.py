"""Reductions of gradient buckets: their interface, and those in host memory.

A reduction says where the memory of the buckets is, sums a bucket over all ranks, and gathers the sums inside a node.

- `SharedMemoryReduction`: all ranks share the memory of one node. A bucket has a row for each rank, and the owner of a
  shard (a range of columns) sums it over the rows.
- `HierarchicalReduction`: the same inside each node, then over the nodes by messages along the rail, compressed if
  asked. A rank that shares memory with no other is a node of its own.
- `gpu.GpuReduction`: buckets on GPUs.
- `deterministic.DeterministicReduction`: sums whose bits do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import numpy as np

from .. import kernels
from ..comm import Communicator, Request, World
from ..comm.communicator import Steps
from ..comm.gpu_transports import GpuTransport
from ..comm.shared_memory import NodeMemory
from ..comm.tasks import ProgressEngine, TaskGroup
from ..comm.watchdog import WatchedBarrier
from ..compression import Compression
from ..core.arrays import Array, array_namespace, is_half, is_host, words
from . import inter_node
from .buckets import Bucket, Layout, Parameter, Slot, State
from .inter_node import Coder, InterNodeReduction, slots_by_bucket

Reduce = Callable[[Request | None], Steps]
"""``reduce(turn)`` makes the steps that sum a bucket; messages begin when it is their ``turn``, None: at once."""


class BucketReduction(Protocol):
    """Where buckets of gradients are in memory, and how they are summed. All ranks must make it together.

    The methods that announce an event do nothing unless a class needs the event.
    """

    memory: NodeMemory
    """Memory that the ranks with rows in the same buckets share."""
    gate: WatchedBarrier
    """Barrier of the ranks of `memory`."""
    comm: Communicator | None
    """All ranks, for messages of a step; None where `memory` is that of all ranks."""
    coder: Coder | None = None
    """Encoder of this rank's shards for other nodes; None where this rank sends nothing."""
    copies: tuple[int, int] = (1, 0)
    """How many ranks sum this rank's shards, and the index of this rank among them."""
    is_counted: bool = True
    """Whether this rank's shards count in sums over all shards: each node holds the same ones, and the first counts."""
    sends_messages: bool = True
    """Whether some rank sends its gradients by messages."""
    sums_rows: bool = False
    """Whether a sum is one pass over the rows of a bucket, so that an update may do it in its own pass."""
    keeps_unsent: bool = False
    """Whether compression keeps gradients that it has not sent in a step for later steps."""
    orders_by_stream: bool = False
    """Whether a stream of the GPU orders reductions, updates and the next forward, so that the host never waits."""
    is_deterministic: bool = False
    """Whether sums have the same bits on any number of ranks."""
    is_last_backward: bool = True
    """Whether the current backward is the last one of the step."""
    own_virtual_shards: range = range(1)
    """Virtual shards of each step that this rank computes, one backward each."""
    virtual_shard: int = 0
    """The virtual shard whose gradients are written now."""
    nbytes: int = 0
    """Bytes of sums that this rank holds besides its rows of the buckets."""
    way: GpuTransport | None = None
    """How GPUs of a node exchange data; None where buckets are summed on the host."""
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context for waits of the GPU's stream for other ranks."""

    def allocate(self, layout: Layout) -> list[Bucket]:
        """Allocate the buckets of ``layout``; every rank must call once, before any other method."""
        ...

    def begin_step(self) -> None:
        """Begin a step; no gradient is written."""
        return

    def written(self, bucket: Bucket, name: str, param: Parameter) -> None:
        """Note that backward has written the gradient of ``param``, which is in ``bucket`` under ``name``.

        Raises:
            ConfigError: gradients of this parameter cannot be summed.
        """
        return

    def end_backward(self, bucket: Bucket) -> None:
        """Note that the current backward has written all its gradients in ``bucket``."""
        return

    def next_backward(self) -> None:
        """Begin the next backward of the same step, after `end_backward` of every bucket."""
        return

    def keep_unsent(self, names: Set[str]) -> None:
        """Send nothing in this step of the parameters ``names``; call before `prepare`."""
        return

    def rescale_unsent(self, factor: float) -> None:
        """Multiply the gradients that compression has not sent by ``factor``, after a change of the loss scale."""
        for feedback in () if self.coder is None else self.coder.feedback:
            feedback.rescale(factor)

    def prepare(self, bucket: Bucket) -> Reduce:
        """Return the reduction of a filled bucket, which sums this rank's shard in place in its own row.

        This thread's streams have all work that fills the bucket. Another thread may run the reduction, also when this
        one has begun the next step. At its end it calls `Bucket.mark_reduced`.
        """
        ...

    def reduce(self, buckets: Sequence[Bucket]) -> None:
        """Reduce all buckets in this thread. Every rank must call, when all have left backward."""
        ...

    def reduced(self, buckets: Sequence[Bucket]) -> None:
        """Make the sums visible to this thread and its stream, once all steps of `prepare` have ended."""
        return

    def gather(self, buckets: Sequence[Bucket]) -> None:
        """Copy the reduced shards from their owners to the rows of the node's other ranks, where those lack them."""
        ...

    def reduce_everywhere(self, buckets: Sequence[Bucket]) -> None:
        """Make each rank's row the sum over all ranks: `reduce` and `gather`."""
        self.reduce(buckets)
        self.gather(buckets)

    def gather_parameters(self, buckets: Sequence[Bucket], flats: Sequence[Array]) -> None:
        """Copy updated shards of parameters from their owners to the node's other ranks, where those lack them.

        Args:
            buckets: all of them; their contents may be overwritten.
            flats: the parameters of each bucket, of which this rank has updated its shard.
        """
        return


def run_together(world: World, reductions: Sequence[tuple[Bucket, Reduce]]) -> None:
    """Run the reductions of all buckets in this thread, in any order, and wait for them."""

    def unreduced() -> str:
        buckets = [bucket for bucket, _ in reductions]
        first, *others = [bucket for bucket in buckets if bucket.state is not State.REDUCED] or buckets
        return first.described() + (f" and {len(others)} more" if others else "")

    with ProgressEngine.of(world).watchdog.watching("reduction", unreduced):
        TaskGroup([reduce(None) for _, reduce in reductions]).wait()


class SharedMemoryReduction(BucketReduction):
    """Buckets in memory that all ranks share: the owner of a shard sums it over the rows, and no message is sent.

    Args:
        world: the ranks.
        gate: barrier of the ranks of ``memory``.
        memory: memory of the rows; of a single rank, which may have its rows on a GPU, it is not used.
        num_shards: ranks of ``memory`` that own a shard.
        params: the parameters, whose device that of the buckets is.
    """

    sums_rows = True
    sends_messages = False

    def __init__(
        self, world: World, gate: WatchedBarrier, memory: NodeMemory, num_shards: int, params: Sequence[Parameter]
    ) -> None:
        self.memory, self.gate = memory, gate
        self.comm: Communicator | None = None
        self._world, self._num_shards = world, num_shards
        self._namespace = array_namespace(*(param.data for param in params))
        self._kernels = kernels.load("reduce")

    def allocate(self, layout: Layout) -> list[Bucket]:
        buckets = [self._bucket(layout, number) for number in range(len(layout.counts))]
        for dtype in {words(bucket.mine).dtype for bucket in buckets if is_half(bucket.mine) and is_host(bucket.mine)}:
            self._compile_for_halves(dtype)
        return buckets

    def _bucket(self, layout: Layout, number: int) -> Bucket:
        memory, count, dtype = self.memory, layout.counts[number], layout.dtypes[number]
        rows = memory.alloc((memory.size, count), dtype) if memory.size > 1 else self._row(count, dtype)
        owns_some = memory.rank < self._num_shards
        shard = layout.shard(number, self._num_shards, memory.rank) if owns_some else (0, 0)
        return Bucket(number, layout.slots_of(number), rows, memory.rank, shard)

    def _row(self, count: int, dtype: np.dtype) -> Array:
        return self._namespace.zeros((1, count), dtype=dtype)

    def _compile_for_halves(self, dtype: np.dtype) -> None:
        """Compile kernels now, because all ranks would wait for it in the first step."""
        nothing = np.zeros((1, 1), dtype)
        self._kernels.combine_into(nothing, 0, 0, 0, self._kernels.SUM)
        self._kernels.sum_of_squares(nothing[0])
        kernels.load("elementwise")

    def sum_shard(self, bucket: Bucket, everywhere: bool = False) -> None:
        """Sum this rank's shard over the rows, into its own row or into all rows."""
        first, last = bucket.shard
        if self.memory.size > 1 and last > first:
            row = self._kernels.EVERY_ROW if everywhere else self.memory.rank
            self._kernels.combine_into(bucket.words, first, last, row, self._kernels.SUM)

    def prepare(self, bucket: Bucket) -> Reduce:
        return partial(self._reduce, bucket)

    def _reduce(self, bucket: Bucket, turn: Request | None) -> Steps:
        self.sum_shard(bucket)
        bucket.mark_reduced()
        yield from ()

    def reduce(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self.sum_shard(bucket)
            bucket.state = State.REDUCED

    def reduce_everywhere(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self.sum_shard(bucket, everywhere=True)
            bucket.state = State.REDUCED

    def gather(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            columns = slice(*bucket.shard)
            for other in range(self.memory.size):
                if other != self.memory.rank:
                    bucket.rows[other, columns] = bucket.mine[columns]


class HierarchicalReduction(SharedMemoryReduction):
    """Buckets in each node's shared memory: the owner of a shard sums it over the rows, then over the nodes.

    Args:
        world, gate, memory, num_shards, params: see `SharedMemoryReduction`.
        comm: all ranks; None only where they share ``memory``.
        rail: ranks that own the same shard on all nodes; None where this rank owns none.
        signature: see `make_tag`.
        compression: how messages are compressed; None: not at all.
    """

    sums_rows = False
    sends_messages = True

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
        compression: Compression | None,
    ) -> None:
        super().__init__(world, gate, memory, num_shards, params)
        self.comm = comm
        self.keeps_unsent = compression is not None
        self.copies = (1, 0) if rail is None else (rail.size, rail.rank)
        self.is_counted = memory.size == world.size or (rail is not None and rail.rank == 0)
        self.coder: InterNodeReduction | None = None
        self._rail, self._signature, self._compression = rail, signature, compression
        self._buckets: Sequence[Bucket] = ()
        self._unsent: dict[int, list[Slot]] = {}

    def allocate(self, layout: Layout) -> list[Bucket]:
        self._buckets = buckets = super().allocate(layout)
        if self._rail is not None:
            self.coder = self._between_nodes(self._rail, layout, buckets)
        return buckets

    def _between_nodes(self, rail: Communicator, layout: Layout, buckets: Sequence[Bucket]) -> InterNodeReduction:
        longest = 0 if self._compression is not None else layout.longest_nbytes
        message_nbytes = inter_node.fitting(self._world, rail, longest)
        return InterNodeReduction(rail, self._signature, buckets, self._compression, message_nbytes)

    def begin_step(self) -> None:
        self._unsent = {}

    def keep_unsent(self, names: Set[str]) -> None:
        if self.keeps_unsent:
            self._unsent = slots_by_bucket(self._buckets, names)

    def prepare(self, bucket: Bucket) -> Reduce:
        return partial(self._reduce_over_nodes, bucket, self._unsent.get(bucket.number, ()))

    def _reduce_over_nodes(self, bucket: Bucket, unsent: Sequence[Slot], turn: Request | None) -> Steps:
        self.sum_shard(bucket)
        if self.coder is not None:
            yield from self.coder.sum(bucket, turn, unsent)
        bucket.mark_reduced()

    def reduce(self, buckets: Sequence[Bucket]) -> None:
        run_together(self._world, [(bucket, self.prepare(bucket)) for bucket in buckets])

    def reduce_everywhere(self, buckets: Sequence[Bucket]) -> None:
        self.reduce(buckets)
        self.gather(buckets)
