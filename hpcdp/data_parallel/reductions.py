"""Reductions of gradient buckets: their interface, and those in host memory.

A reduction says where the memory of the buckets is, sums a bucket over all ranks, and gathers the sums inside a node.

- `SharedMemoryReduction`: all ranks share the memory of one node. A bucket has a row for each rank, and the owner of a
  shard (a range of columns) sums it over the rows.
- `HierarchicalReduction`: the same inside each node, then over the nodes by messages along the rail, compressed if
  asked. A rank that shares memory with no other is a node of its own.
- `gpu.GpuReduction`: buckets on GPUs.
- `deterministic.DeterministicReduction`: sums whose bits do not depend on the number of ranks.

The inter-node part of a reduction, along the rails.

How long messages between nodes are: where links are fast, longer than what TCP likes. A job tries several.

Over TCP a message of `progress.MESSAGE_NBYTES` goes at once, and a longer one waits for its receiver. But Python takes
some 20 us for each, so 60 KB are 3 GB/s at most, and 256 KB 13. Sums do not depend on it.

What a rank sums with those of other nodes that own the same shard: messages, compressed if asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import numpy as np

from .. import kernels
from ..collectives import compressed, halving_doubling, ring
from ..comm import Communicator, Reduction, Request, World
from ..comm.communicator import Messages, Steps, make_tag, resolve
from ..comm.cuda_memory import GpuTransport
from ..comm.shared_memory import NodeMemory
from ..comm.tasks import MESSAGE_NBYTES, ProgressEngine, TaskGroup, in_lanes, run_until_complete, segments, together
from ..comm.watchdog import WatchedBarrier
from ..compression import Compression, ErrorFeedback
from ..core.arrays import Array, array_namespace, from_host, is_half, is_host, to_host, words
from .buckets import Bucket, Layout, Parameter, Slot, State

LONGER_NBYTES = (256 << 10, 1 << 20)
"""4 MB are no sooner: on links of 10 and 25 Gbit/s they took as long as 1 MB, and in memory."""
_FROM_NBYTES = 1 << 20
"""Buckets that are shorter go in few messages anyhow."""
_MESSAGES, _TURNS = 4, 3
_GAIN = 1.1
"""What makes a step worth it: turns vary by some percent."""


def fitting(world: World, comm: Communicator | None, longest_nbytes: int) -> int:
    """Bytes of a message between the ranks of ``comm``, all of which must call with the same, and get the same.

    The first call for as many ranks in a world takes some milliseconds, over 1 Gbit/s 110.

    Args:
        longest_nbytes: of the longest bucket.
    """
    if comm is None or comm.size == 1 or longest_nbytes < _FROM_NBYTES:
        return MESSAGE_NBYTES
    lasting: int = world.keep(("message length", comm.size), lambda: measured(comm))
    return lasting


def measured(comm: Communicator) -> int:
    """See `fitting`: the longest of which each is worth it over the one before, on the slowest rank of ``comm``."""
    chosen = MESSAGE_NBYTES
    for longer in LONGER_NBYTES:
        before, then = _seconds(comm, (chosen, longer), _MESSAGES * longer)
        if before <= _GAIN * then:
            break
        chosen = longer
    return chosen


def _seconds(comm: Communicator, lengths: tuple[int, int], nbytes: int) -> tuple[float, float]:
    """Of messages of each of two lengths, in turn: what each rank sends to the next one is added up there, and the sum
    sent on, as in a ring."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    own, received = np.zeros((2, nbytes // 4), np.float32)
    total = resolve("reduction", "sum", own.dtype)

    def exchanged(pair: tuple[np.ndarray, np.ndarray], tag: int) -> Steps:
        yield [comm.isend(pair[0], right, tag), comm.irecv(pair[1], left, tag)]
        total.into(*pair)
        yield [comm.isend(pair[0], right, tag), comm.irecv(pair[1], left, tag)]

    def seconds(length: int) -> float:
        pairs = list(zip(segments(own, length), segments(received, length), strict=True))
        comm.barrier()
        begin = time.perf_counter()
        run_until_complete(together(in_lanes(pairs, exchanged, make_tag(0, 0))))
        return time.perf_counter() - begin

    turns = [[seconds(length) for length in lengths] for _ in range(_TURNS)]
    best = [min(each) for each in zip(*turns, strict=True)]
    first, second = (max(each) for each in zip(*comm.allgather_json(best), strict=True))
    return first, second


SHORT_NBYTES = 64 << 10
"""Up to so many bytes the number of messages after one another counts, not their length."""


class Coder(Protocol):
    """What encodes this rank's part of each bucket for other nodes, and remembers what they have not got yet.

    Of parameters that no rank has used in a step, the ``unsent`` of its sums, it keeps that: nobody would use it.
    """

    @property
    def comm(self) -> Communicator:
        """The ranks that sum the same parts."""
        ...

    @property
    def feedback(self) -> Sequence[ErrorFeedback]:
        """For every bucket what encodes that part; empty where nothing is compressed."""
        ...

    def columns(self, number: int) -> tuple[int, int]:
        """Of bucket ``number`` the part: the first column, and one after the last."""
        ...

    def sent_nbytes(self) -> tuple[int, int]:
        """Bytes that all ranks of `comm` together send in a step, and what they would without compression; 0 where
        nothing is compressed."""
        ...


class InterNodeReduction:
    """The ranks that own the same shard of every bucket, one a node; or all ranks, where none share memory.

    Args:
        comm: theirs.
        signature: see `make_tag`.
        buckets: those that it will sum.
        compression: how; None: as they are.
        message_nbytes: about the longest message, on all ranks alike; sums do not depend on it.
    """

    def __init__(
        self,
        comm: Communicator,
        signature: int,
        buckets: Sequence[Bucket],
        compression: Compression | None,
        message_nbytes: int = MESSAGE_NBYTES,
    ) -> None:
        self.comm, self._message_nbytes = comm, message_nbytes
        self._signature = signature % comm.signatures
        self.feedback = (
            [compression.for_array(each.shard[1] - each.shard[0], np.dtype(each.mine.dtype)) for each in buckets]
            if compression is not None and comm.size > 1
            else []
        )
        """See `Coder`."""
        self._shards = [each.shard for each in buckets]
        if self.feedback:
            kernels.load("compress")  # not in the first step, for which all ranks wait
        self._padding = [padding(each.slots, each.shard) for each in buckets] if self.feedback else []

    def tag(self, bucket: Bucket) -> int:
        """Of the messages of a bucket."""
        return make_tag(self._signature, bucket.number)

    def sum(self, bucket: Bucket, turn: Request | None, unsent: Sequence[Slot] = ()) -> Steps:
        """Sum this rank's shard over all ranks of the rail, in place in its own row.

        Args:
            unsent: see `Coder`.
        """
        if self.comm.size == 1:
            return
        first, last = bucket.shard
        shard = bucket.mine[first:last]
        host = to_host(shard)
        tag = self.tag(bucket)
        if self.feedback:
            feedback = self.feedback[bucket.number]
            kept = set_aside(feedback.residual, unsent, bucket.shard)
            yield from compressed.allreduce(host, feedback, self.comm, tag, turn)
            for part in self._padding[bucket.number]:  # some codecs send something for nothing
                host[part] = feedback.residual[part] = 0
            put_back(feedback.residual, host, kept)
        else:
            total = resolve("reduction", "sum", host.dtype)
            yield from together(lanes_of_segment(host, total, self.comm, tag, self._message_nbytes, turn))
        if host is not shard:
            shard[...] = from_host(host, shard)

    def columns(self, number: int) -> tuple[int, int]:
        """See `Coder`."""
        return self._shards[number]

    def sent_nbytes(self) -> tuple[int, int]:
        """See `Coder`."""
        return compressed.sent_and_plain_nbytes(self.feedback, self.comm.size)


def lanes_of_segment(
    x: Array, total: Reduction, comm: Messages, tag: int, nbytes: int, turn: Request | None
) -> list[Steps]:
    """The machines that add up a segment by ``total`` in place, each with a tag of its own, in messages of at most
    about ``nbytes``; the same bits, however long those are."""
    if _is_short(x, comm):
        return halving_doubling.lanes(x, total, comm, tag)
    return ring.lanes_of_chunks(x, total, ring.Ring.through(comm), tag, nbytes, turn)


def _is_short(x: Array, comm: Messages) -> bool:
    return comm.size > 2 and x.nbytes <= SHORT_NBYTES


def node_nbytes(coder: Coder | None, world: World) -> tuple[float, float]:
    """Bytes that a node sends in a step, mean over the nodes, and what it would without compression; every rank must
    call. Both are 0 without compression."""
    own = (0.0, 0.0) if coder is None else [each / coder.comm.size for each in coder.sent_nbytes()]
    sent, plain = (sum(each) / world.num_nodes for each in zip(*world.comm.allgather_json(own), strict=True))
    return sent, plain


def slots_by_bucket(buckets: Sequence[Bucket], names: Set[str]) -> dict[int, list[Slot]]:
    """Return the slots of the parameters ``names``, by the number of their bucket."""
    slots = {bucket.number: [slot for slot in bucket.slots if slot.name in names] for bucket in buckets if names}
    return {number: of_bucket for number, of_bucket in slots.items() if of_bucket}


def set_aside(residual: Array, slots: Sequence[Slot], columns: tuple[int, int]) -> list[tuple[slice, Array]]:
    """Make what was not sent yet of ``slots`` zero, in an array of these ``columns``; return what it was, and where."""
    first, last = columns
    ends = [(max(first, slot.offset), min(last, slot.offset + slot.count)) for slot in slots]
    parts = [slice(begin - first, end - first) for begin, end in ends if begin < end]
    kept = [(part, residual[part].copy()) for part in parts]
    for part in parts:
        residual[part] = 0
    return kept


def put_back(residual: Array, total: Array, kept: Sequence[tuple[slice, Array]]) -> None:
    """Undo `set_aside` when the sum is there, which is ``total``: some codecs send something for nothing."""
    for part, values in kept:
        residual[part] = values
        total[part] = 0


def padding(slots: Sequence[Slot], columns: tuple[int, int]) -> list[slice]:
    """Those of the ``columns`` of a bucket that belong to no parameter; 0 is the first of these columns."""
    return list(_gaps(slots, *columns))


def _gaps(slots: Sequence[Slot], first: int, last: int) -> Iterator[slice]:
    at = first
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if at < min(last, slot.offset):
            yield slice(at - first, min(last, slot.offset) - first)
        at = max(at, slot.offset + slot.count)
    if at < last:
        yield slice(at - first, last - first)


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
        message_nbytes = fitting(self._world, rail, longest)
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
