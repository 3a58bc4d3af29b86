"""Reductions of gradient buckets: their interface, and those in host memory.

A reduction allocates the buckets, sums a bucket over all ranks, and gathers the sums inside a node.

- `SharedMemoryReduction`: all ranks share the memory of one node. A bucket has a row for each rank, and the owner of a
  shard (a range of columns) sums it over the rows.
- `HierarchicalReduction`: the same inside each node, then a sum over the nodes along the rail (`InterNodeReduction`),
  compressed if requested. A rank that shares memory with no other rank is a node of its own.
- `gpu_reduction.GpuReduction`: buckets on GPUs.
- `deterministic.DeterministicReduction`: sums whose bits do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from .. import kernels
from ..collectives import halving_doubling, ring
from ..comm import Communicator, Reduction, Request, World
from ..comm.communicator import Messages, Steps, make_tag, resolve
from ..comm.gpu_buckets.transport import GpuTransport
from ..comm.progress import ProgressEngine, TaskGroup, messages, together
from ..comm.shared_memory import NodeMemory
from ..comm.watchdog import WatchedBarrier
from ..compression import Compression, ErrorFeedback, compressed_allreduce, sent_and_plain_nbytes
from ..core.arrays import Array, array_namespace, from_host, is_half, is_host, to_host, words
from ..core.state import Part, Sharded
from ..kernels.reference import EVERY_ROW, SUM
from .bucket_layout import Bucket, Layout, ParameterLike, Slot, State

SHORT_NBYTES = 64 << 10
"""Size up to which the number of consecutive messages decides the time, not their length."""


class Coder:
    """Sums of this rank's shard of each bucket over other nodes, with the residual that compression keeps.

    In a step that passes slots as ``unsent``, because no rank has used their parameters, it keeps their residuals:
    other nodes would not use them.
    """

    def __init__(
        self, comm: Communicator, feedback: Sequence[ErrorFeedback], columns: Sequence[tuple[int, int]]
    ) -> None:
        self.comm = comm
        """The ranks that sum the same shards."""
        self.feedback = feedback
        """The error feedback of the shard of every bucket; empty without compression."""
        self.columns = columns
        """The columns of the shard of every bucket: the first, and one after the last."""

    def sent_nbytes(self) -> tuple[int, int]:
        """Return the bytes that all ranks of `comm` send in a step, with and without compression.

        Both are 0 where nothing is compressed.
        """
        return sent_and_plain_nbytes(self.feedback, self.comm.size)


class InterNodeReduction(Coder):
    """Sums over the ranks that own the same shard of every bucket: one rank a node, or all ranks without shared memory.

    Args:
        comm: the ranks that own the same shards.
        signature: see `make_tag`.
        buckets: the buckets to sum.
        compression: how messages are compressed; None: not at all.
        message_nbytes: approximate length of the longest message, the same on all ranks; sums do not depend on it.
    """

    def __init__(
        self,
        comm: Communicator,
        signature: int,
        buckets: Sequence[Bucket],
        compression: Compression | None,
        message_nbytes: int | None = None,
    ) -> None:
        feedback: list[ErrorFeedback] = []
        if compression is not None and comm.size > 1:
            sizes = [(bucket.shard[1] - bucket.shard[0], np.dtype(bucket.mine.dtype)) for bucket in buckets]
            feedback = [compression.for_array(*size) for size in sizes]
        super().__init__(comm, feedback, [bucket.shard for bucket in buckets])
        self._message_nbytes, self._signature = message_nbytes, signature % comm.signatures
        if self.feedback:
            kernels.load("gradients")  # compile now: in the first step all ranks would wait
        self._padding = [padding(bucket.slots, bucket.shard) for bucket in buckets] if self.feedback else []

    def tag(self, bucket: Bucket) -> int:
        """Return the tag of a bucket's messages."""
        return make_tag(self._signature, bucket.number)

    def sum(self, bucket: Bucket, turn: Request | None, unsent: Sequence[Slot] = ()) -> Steps:
        """Sum this rank's shard over all ranks of the rail, in place in its own row.

        Args:
            bucket: the bucket, whose shard holds this node's sum.
            turn: a request that is complete when messages may begin; None: at once.
            unsent: slots whose residuals are kept; see `Coder`.
        """
        if self.comm.size == 1:
            return
        first, last = bucket.shard
        shard = bucket.mine[first:last]
        host = to_host(shard)
        tag = self.tag(bucket)
        if self.feedback:
            feedback = self.feedback[bucket.number]
            aside = set_aside(feedback.residual, unsent, bucket.shard)
            yield from compressed_allreduce(host, feedback, self.comm, tag, turn)
            for part in self._padding[bucket.number]:  # some codecs decode a zero as another value
                host[part] = feedback.residual[part] = 0
            put_back(feedback.residual, host, aside)
        else:
            total = resolve("reduction", "sum", host.dtype)
            number = messages(host.nbytes / self.comm.size, self._message_nbytes)
            yield from together(lanes_of_segment(host, total, self.comm, tag, number, turn))
        if host is not shard:
            shard[...] = from_host(host, shard)


def lanes_of_segment(
    x: Array, total: Reduction, comm: Messages, tag: int, number: int, turn: Request | None
) -> list[Steps]:
    """Return the exchanges that sum a segment by ``total`` in place, each with its own tag.

    Over a ring there are ``number`` of them, and the bits do not depend on it.
    """
    if comm.size > 2 and x.nbytes <= SHORT_NBYTES:
        return halving_doubling.lanes(x, total, comm, tag)
    return ring.lanes(x, total, ring.Ring.through(comm), tag, number, turn=turn)


def set_aside(residual: Array, slots: Sequence[Slot], columns: tuple[int, int]) -> list[tuple[slice, Array]]:
    """Set the residuals of ``slots`` to zero, in an array of these ``columns``; return their places and old values."""
    first, last = columns
    ends = [(max(first, slot.offset), min(last, slot.offset + slot.count)) for slot in slots]
    parts = [slice(begin - first, end - first) for begin, end in ends if begin < end]
    aside = [(part, residual[part].copy()) for part in parts]
    for part in parts:
        residual[part] = 0
    return aside


def put_back(residual: Array, total: Array, aside: Sequence[tuple[slice, Array]]) -> None:
    """Undo `set_aside` after the sum, and zero these parts of ``total``: some codecs decode a zero as another value."""
    for part, values in aside:
        residual[part] = values
        total[part] = 0


def padding(slots: Sequence[Slot], columns: tuple[int, int]) -> list[slice]:
    """Return the parts of the ``columns`` of a bucket that belong to no parameter, relative to the first column."""
    (first, last), gaps = columns, []
    at = first
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if at < min(last, slot.offset):
            gaps.append(slice(at - first, min(last, slot.offset) - first))
        at = max(at, slot.offset + slot.count)
    return [*gaps, slice(at - first, last - first)] if at < last else gaps


Reduce = Callable[[Request | None], Steps]
"""``reduce(turn)`` returns the steps that sum a bucket; messages begin when ``turn`` is complete, None: at once."""


class BucketReduction(Protocol):
    """Strategy that allocates buckets of gradients and sums them. All ranks must make it together.

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
    """Number of ranks that sum this rank's shards, and the index of this rank among them."""
    is_counted: bool = True
    """True if this rank's shards count in sums over all shards; of the nodes, which hold the same, the first counts."""
    sends_messages: bool = True
    """True if some rank sends its gradients by messages."""
    sums_rows: bool = False
    """True if a sum is one pass over the rows of a bucket, so that an update may do it in its own pass."""
    keeps_unsent: bool = False
    """True if compression keeps gradients that it has not sent in a step for later steps."""
    orders_by_stream: bool = False
    """True if a stream of the GPU orders reductions, updates and the next forward, so that the host never waits."""
    is_deterministic: bool = False
    """True if sums have the same bits on any number of ranks."""
    is_last_backward: bool = True
    """True if the current backward is the last one of the step."""
    own_virtual_shards: range = range(1)
    """Virtual shards of each step that this rank computes, one backward each."""
    virtual_shard: int = 0
    """The virtual shard whose gradients are written now."""
    nbytes: int = 0
    """Bytes of sums that this rank holds besides its rows of the buckets."""
    way: GpuTransport | None = None
    """Transport between the GPUs of a node; None where buckets are summed on the host."""
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Factory of a context around waits of the GPU's stream for other ranks."""

    def allocate(self, layout: Layout) -> list[Bucket]:
        """Allocate the buckets of ``layout``; every rank must call once, before any other method."""
        ...

    _world: World
    _buckets: Sequence[Bucket] = ()
    _unsent: Mapping[int, list[Slot]] = {}
    """Slots of which this step sends nothing, by the number of their bucket."""

    def begin_step(self) -> None:
        """Begin a step; no gradient is written."""
        self._unsent = {}

    def written(self, bucket: Bucket, name: str, param: ParameterLike) -> None:
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
        if self.keeps_unsent:
            slots = {bucket.number: bucket.slots for bucket in self._buckets}
            self._unsent = {number: [slot for slot in own if slot.name in names] for number, own in slots.items()}

    def residual(self, bucket: Bucket) -> Sharded:
        """Return what compression has not sent of a bucket's gradients, shape ``(nodes, elements)``.

        This rank has the row of its node, in the columns that it sums, as a view.
        """
        coder, count = self.coder, bucket.mine.shape[0]
        dtype, parts = np.dtype(bucket.mine.dtype), []
        if coder is not None and coder.feedback:
            first = coder.comm.rank * count + coder.columns[bucket.number][0]
            parts.append(Part(first, coder.feedback[bucket.number].residual))
        nodes = self._world.num_nodes if coder is None else coder.comm.size
        return Sharded((nodes, count), dtype, parts, shares=True)

    def node_nbytes(self) -> tuple[float, float, int]:
        """Return what a node sends in a step that compresses; every rank must call.

        Returns:
            Bytes with and without compression, mean over the nodes, and the number of ranks that sum the same shard.
            All are 0 where nothing is compressed.
        """
        sent = plain = num_ranks = 0.0
        if (coder := self.coder) is not None:
            num_ranks = coder.comm.size
            sent, plain = (nbytes / num_ranks for nbytes in coder.sent_nbytes())
        by_rank = self._world.comm.allgather_json([sent, plain, num_ranks if plain else 0])
        all_sent, all_plain, sizes = zip(*by_rank, strict=True)
        return sum(all_sent) / self._world.num_nodes, sum(all_plain) / self._world.num_nodes, int(max(sizes))

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


_LIKE_HALVES = (np.dtype("int16"), np.dtype("uint16"))
"""Dtypes of keys of stores whose elements kernels would treat as 16-bit floats (`hpcdp.core.arrays.words`)."""


def sum_rows(bucket: Bucket, row: int) -> None:
    """Sum this rank's shard over the rows of ``bucket``, on the host, into one row, or with `EVERY_ROW` into all."""
    first, last = bucket.shard
    if last == first or len(bucket.rows) == 1:
        return
    if bucket.rows.dtype in _LIKE_HALVES:
        targets = slice(None) if row == EVERY_ROW else row
        bucket.rows[targets, first:last] = bucket.rows[:, first:last].sum(axis=0, dtype=bucket.rows.dtype)
    else:
        kernels.load("gradients").combine_into(bucket.words, first, last, row, SUM)


def run_together(world: World, reductions: Sequence[tuple[Bucket, Reduce]]) -> None:
    """Run the reductions of all buckets in this thread, in any order, and wait for them."""

    def unreduced() -> str:
        buckets = [bucket for bucket, _ in reductions]
        first, *others = [bucket for bucket in buckets if bucket.state is not State.REDUCED] or buckets
        return first.described() + (f" and {len(others)} more" if others else "")

    with ProgressEngine.of(world).watchdog.watching("reduction", unreduced):
        TaskGroup([reduce(None) for _, reduce in reductions]).wait()


@dataclass(frozen=True)
class ReductionRanks:
    """The ranks of a reduction, the memory that they share, and their communicators."""

    world: World
    gate: WatchedBarrier
    """Barrier of the ranks of `memory`."""
    memory: NodeMemory
    """Memory of the rows; not used for a single rank, which may have its rows on a GPU."""
    num_shards: int
    """Ranks of `memory` that own a shard."""
    comm: Communicator | None = None
    """All ranks; None where they share `memory`."""
    rail: Communicator | None = None
    """Ranks that own the same shard on all nodes; None where all ranks share `memory`, or this rank owns none."""
    signature: int = 0
    """See `make_tag`."""


class SharedMemoryReduction(BucketReduction):
    """Buckets in memory that all ranks share: the owner of a shard sums it over the rows, and no message is sent.

    Args:
        ranks: the ranks and their memory.
        params: the parameters, whose device is that of the buckets.
    """

    sums_rows = True
    sends_messages = False

    def __init__(self, ranks: ReductionRanks, params: Sequence[ParameterLike]) -> None:
        self.memory, self.gate, self.comm = ranks.memory, ranks.gate, ranks.comm
        self._world, self._num_shards = ranks.world, ranks.num_shards
        self._namespace = array_namespace(*(param.data for param in params))
        kernels.load("gradients")  # compiled before the first step

    def allocate(self, layout: Layout) -> list[Bucket]:
        """See `BucketReduction.allocate`."""
        buckets = [self._bucket(layout, number) for number in range(len(layout.counts))]
        for dtype in {words(bucket.mine).dtype for bucket in buckets if is_half(bucket.mine) and is_host(bucket.mine)}:
            self._compile_for_halves(dtype)
        return buckets

    def _bucket(self, layout: Layout, number: int) -> Bucket:
        memory, count, dtype = self.memory, layout.counts[number], layout.dtypes[number]
        shape = memory.size, count
        rows = memory.alloc(shape, dtype) if memory.size > 1 else self._namespace.zeros(shape, dtype=dtype)
        owns_some = memory.rank < self._num_shards
        shard = layout.shard(number, self._num_shards, memory.rank) if owns_some else (0, 0)
        return Bucket(number, layout.slots_of(number), rows, memory.rank, shard)

    def _compile_for_halves(self, dtype: np.dtype) -> None:
        """Compile kernels now, because all ranks would wait for that in the first step."""
        nothing, reduce = np.zeros((1, 1), dtype), kernels.load("gradients")
        reduce.combine_into(nothing, 0, 0, 0, SUM)
        reduce.sum_of_squares(nothing[0])
        kernels.load("networks")

    def sum_shard(self, bucket: Bucket, everywhere: bool = False) -> None:
        """Sum this rank's shard over the rows, into its own row or into all rows."""
        sum_rows(bucket, EVERY_ROW if everywhere else self.memory.rank)

    def prepare(self, bucket: Bucket) -> Reduce:
        """See `BucketReduction.prepare`."""
        return partial(self._reduce, bucket)

    def _reduce(self, bucket: Bucket, turn: Request | None) -> Steps:
        self.sum_shard(bucket)
        bucket.mark_reduced()
        yield from ()

    def reduce(self, buckets: Sequence[Bucket]) -> None:
        """See `BucketReduction.reduce`."""
        for bucket in buckets:
            self.sum_shard(bucket)
            bucket.state = State.REDUCED

    def reduce_everywhere(self, buckets: Sequence[Bucket]) -> None:
        """See `BucketReduction.reduce_everywhere`: one pass writes the sums to all rows."""
        for bucket in buckets:
            self.sum_shard(bucket, everywhere=True)
            bucket.state = State.REDUCED

    def gather(self, buckets: Sequence[Bucket]) -> None:
        """See `BucketReduction.gather`: copy this rank's shard to all rows."""
        for bucket in buckets:
            columns = slice(*bucket.shard)
            for other in range(self.memory.size):
                if other != self.memory.rank:
                    bucket.rows[other, columns] = bucket.mine[columns]


class HierarchicalReduction(SharedMemoryReduction):
    """Buckets in each node's shared memory: the owner of a shard sums it over the rows, then over the nodes.

    Args:
        ranks: the ranks, their memory and communicators.
        params: see `SharedMemoryReduction`.
        compression: how messages are compressed; None: not at all.
    """

    sums_rows = False
    sends_messages = True

    def __init__(
        self, ranks: ReductionRanks, params: Sequence[ParameterLike], compression: Compression | None = None
    ) -> None:
        super().__init__(ranks, params)
        rail = ranks.rail
        self.keeps_unsent = compression is not None
        self.copies = (1, 0) if rail is None else (rail.size, rail.rank)
        self.is_counted = self.memory.size == self._world.size or (rail is not None and rail.rank == 0)
        self.coder: InterNodeReduction | None = None
        self._rail, self._signature, self._compression = rail, ranks.signature, compression

    def allocate(self, layout: Layout) -> list[Bucket]:
        """See `BucketReduction.allocate`."""
        self._buckets = buckets = super().allocate(layout)
        if layout.longest_nbytes >= ring.LONG_NBYTES and not self.keeps_unsent:
            ring.fit_messages(self._world)
        if self._rail is not None:
            nbytes = ring.message_nbytes(self._world)
            self.coder = InterNodeReduction(self._rail, self._signature, buckets, self._compression, nbytes)
        return buckets

    def prepare(self, bucket: Bucket) -> Reduce:
        """See `BucketReduction.prepare`."""
        return partial(self._reduce_over_nodes, bucket, self._unsent.get(bucket.number, ()))

    def _reduce_over_nodes(self, bucket: Bucket, unsent: Sequence[Slot], turn: Request | None) -> Steps:
        self.sum_shard(bucket)
        if self.coder is not None:
            yield from self.coder.sum(bucket, turn, unsent)
        bucket.mark_reduced()

    def reduce(self, buckets: Sequence[Bucket]) -> None:
        """See `BucketReduction.reduce`."""
        run_together(self._world, [(bucket, self.prepare(bucket)) for bucket in buckets])

    def reduce_everywhere(self, buckets: Sequence[Bucket]) -> None:
        """See `BucketReduction.reduce_everywhere`."""
        self.reduce(buckets)
        self.gather(buckets)
