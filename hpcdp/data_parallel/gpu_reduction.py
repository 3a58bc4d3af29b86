"""Buckets on GPUs: summed inside a node by NCCL or CUDA IPC, between nodes by messages, and gathered again.

`GpuReduction` does for rows on GPUs what `HierarchicalReduction` does for rows in a node's memory::

    backward | reduce-scatter in the node | own shard: host, rail, host | allgather in the node | update

Events order the streams; only the rail makes the host wait. On one node the sum is one allreduce. The rail uses one of

- `Staging`: the shard goes through pinned host memory, in segments;
- `CodeStaging`: the shard is compressed on the GPU, and only its codes go through host memory;
- `Direct`: messages from and to the GPUs' memory, for MPI libraries that take such arrays, without compression.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..collectives import ring
from ..comm import Communicator, Reduction, Request, World, gpu_buckets
from ..comm.communicator import PolledRequest, Steps, StepsTo, make_tag, resolve, split, wait_for
from ..comm.consistency import on_every_rank
from ..comm.gpu_buckets.transport import (
    SUMMED_KINDS,
    GpuTransport,
    NodeRows,
    Part,
    RowSize,
    agree_on_cuda_aware_mpi,
    lone_rows,
    parts_of,
)
from ..comm.progress import LANES, TAGS, ProgressEngine, TaskGroup, in_lanes, messages, segments, together
from ..comm.shared_memory import PrivateMemory
from ..comm.watchdog import WatchedBarrier
from ..compression import Codec, Compression, ErrorFeedback, coded_segments, compressed_allreduce_by, shard_slices
from ..core.arrays import Array, Event, Stream, Streams, gpu
from ..core.checks import choices
from ..errors import DeviceError, UnsupportedError
from .bucket_layout import LINE_NBYTES, Bucket, Layout, ParameterLike, Slot
from .cpu_reduction import (
    BucketReduction,
    Coder,
    Reduce,
    lanes_of_segment,
    padding,
    put_back,
    run_together,
    set_aside,
)

SEGMENT_NBYTES = 8 << 20
"""Longest segment: a copy takes longer than the host's work for it, and a ring cuts it into messages. On an H200 each
copy costs 10 us besides its bytes: 256 MB in segments of 4 MiB take a tenth longer."""

ON_THE_NETWORK = TAGS // LANES
"""Number of segments that are summed at a time, each with its own tags."""

SLOTS = 2 * ON_THE_NETWORK
"""Pinned memory of a bucket, in segments: while half of them are summed, the others are copied."""

_WIDEST = 8
"""Bytes of the widest element; segments have whole elements."""

Sum = Callable[[np.ndarray, int, Request | None], Steps]
"""``sum(x, tag, turn)`` sums ``x`` in place over other nodes, with up to `LANES` tags from ``tag`` on."""


class _StagingSlot:
    """Pinned memory, shape ``(nbytes,)``, and the events after the copies to the host and back to the GPU."""

    def __init__(self, streams: Streams, nbytes: int, *copied_by: Stream) -> None:
        self.memory = streams.pinned(nbytes, *copied_by)
        self.copied, self.returned = streams.event(), streams.event()


class Staging:
    """Sums over nodes through pinned host memory: some segments are on the network while others are copied.

    The segments of a bucket use its `SLOTS` slots of pinned memory in turn, and `ON_THE_NETWORK` are summed at a time::

        slot 0:   to the host | network          | back      | to the host | network ...
        slot 1:               | to the host | network          | back      | to the host ...
        slot 2:                             | to the host | network          | back ...

    Two streams copy, one each way, which a GPU runs at once, and events order the operations. The host waits only for
    the event before a message, which it notices late, after a nap. Meanwhile copies continue: those of all slots are
    launched at once, and the next copy of a slot when its sum is copied back, after that.

    Args:
        streams: streams of this rank's GPU.
        nbytes: bytes of this rank's shard of each bucket.
    """

    def __init__(self, streams: Streams, nbytes: Sequence[int]) -> None:
        self._streams = streams
        self._down, self._up = streams.stream(), streams.stream()
        self._ready = [streams.event() for _ in nbytes]
        ways = self._down, self._up
        self._slots = [[_StagingSlot(streams, size, *ways) for size in _slot_nbytes(shard)] for shard in nbytes]

    def sum(
        self, number: int, part: Array, row: NodeRows, total: Sum, tag: int, turn: Request | None
    ) -> StepsTo[Sequence[Event]]:
        """Sum ``part``, the contiguous shard of bucket ``number``, in place by ``total``.

        It is read after all work that is on ``row.stream`` now.

        Returns:
            The events after which the sum is complete.
        """
        if part.size == 0:
            return ()
        streams, slots = self._streams, self._slots[number]
        streams.record(self._ready[number], row.stream)
        streams.wait_event(self._down, self._ready[number])
        pieces = segments(part, SEGMENT_NBYTES)
        for slot, piece in zip(slots, pieces, strict=False):
            self._copy_to_host(slot, piece)

        def sum_every(first: int) -> Steps:
            for at in range(first, len(pieces), ON_THE_NETWORK):
                slot, host = slots[at % SLOTS], _host(slots[at % SLOTS], pieces[at])
                yield [_passed(streams, slot.copied, row.check)]
                yield from total(host, tag + first * LANES, turn)
                streams.copy_async(pieces[at], host, self._up)
                streams.record(slot.returned, self._up)
                if at + SLOTS < len(pieces):
                    self._copy_to_host(slot, pieces[at + SLOTS])

        yield from together([sum_every(first) for first in range(min(ON_THE_NETWORK, len(pieces)))])
        return tuple(slot.returned for slot in slots[: len(pieces)])

    def _copy_to_host(self, slot: _StagingSlot, piece: Array) -> None:
        """Copy a segment to the host, after the copy back from its slot."""
        streams = self._streams
        streams.wait_event(self._down, slot.returned)
        streams.copy_async(_host(slot, piece), piece, self._down)
        streams.record(slot.copied, self._down)


def _passed(streams: Streams, event: Event, check: Callable[[], None]) -> PolledRequest:
    """Return a request that is complete when ``event`` has passed; each poll calls ``check``, which may raise."""

    def has_passed() -> bool:
        check()
        return streams.query(event)

    return PolledRequest(has_passed)


def _host(slot: _StagingSlot, piece: Array) -> np.ndarray:
    return slot.memory[: piece.nbytes].view(piece.dtype)


def _slot_nbytes(nbytes: int) -> list[int]:
    """Return the bytes of each slot for a shard of ``nbytes``: those of its longest segment.

    CuPy's pool rounds up to a power of two, which a whole segment is, so slots have no extra bytes.
    """
    if nbytes == 0:
        return []
    number = -(-nbytes // SEGMENT_NBYTES)
    return [-(-nbytes // (number * _WIDEST)) * _WIDEST] * min(SLOTS, number)


_ALIGNED = 256
_LONG_NBYTES = 1 << 20
"""Bytes of a message of codes that are independent of the length of segments. Each segment costs the host about twenty
launches, half a millisecond. 64 MB of gradients took 166 ms between two virtual nodes with an H200 as float16, in 273
segments, and 11 to 28 ms by the other codecs, in a few dozen."""


@dataclass(frozen=True)
class Share:
    """This rank's shard of a bucket."""

    part: Array
    """Gradients of the shard, shape ``(count,)``."""
    first: int
    """First column of the shard in the bucket."""
    padding: Sequence[slice]
    """Elements of the shard that belong to no parameter."""


class CodeStaging(Coder):
    """Compressed sums over nodes: a `Coder` that encodes and decodes on the GPU; only codes go through host memory.

    The messages and their contents are those of `hpcdp.compression.compressed_allreduce`::

        GPU     encode parts for others |                   | decode, add, encode the sum |             | decode
        host               copy to host | to the owners ... | copy to GPU    copy to host | to all  ... | copy to GPU

    A bucket has a memory slot for each segment that is in progress. All work goes to one stream, in the order in which
    the segments are launched, so a slot is free when the next segment is encoded.

    Args:
        streams: streams of this rank's GPU.
        shares: this rank's shards of the buckets.
        compression: the codec.
        comm: the ranks that sum the same shards, one per node.
    """

    def __init__(self, streams: Streams, shares: Sequence[Share], compression: Compression, comm: Communicator) -> None:
        feedback = [
            compression.for_array(share.part.size, np.dtype(share.part.dtype), streams.zeros) for share in shares
        ]
        super().__init__(comm, feedback, [(share.first, share.first + share.part.size) for share in shares])
        self.shares = shares
        self._streams = streams
        self._stream = streams.stream()
        self._ready, self._summed = ([streams.event() for _ in shares] for _ in range(2))
        self._padding = [_numbers(share.padding, streams) for share in shares]
        self._pieces = [
            _pieces(share.part, feedback.codec, comm.size)
            for share, feedback in zip(shares, self.feedback, strict=True)
        ]
        self._slots = [
            _slots(streams, self._stream, pieces, feedback.codec, comm.size)
            for pieces, feedback in zip(self._pieces, self.feedback, strict=True)
        ]
        streams.follow(self._stream)

    def sum(
        self, number: int, row: NodeRows, tag: int, turn: Request | None, unsent: Sequence[Slot] = ()
    ) -> StepsTo[Sequence[Event]]:
        """Sum this rank's shard of bucket ``number`` in place.

        It is read after all work that is on ``row.stream`` now. Residuals of the slots ``unsent`` are kept, see
        `Coder`.

        Returns:
            The events after which the sum is complete.
        """
        part, streams = self.shares[number].part, self._streams
        if part.size == 0 or self.comm.size == 1:
            return ()
        feedback, slots = self.feedback[number], self._slots[number]
        streams.record(self._ready[number], row.stream)
        streams.wait_event(self._stream, self._ready[number])
        aside: list[tuple[slice, Array]] = []
        if unsent:
            with streams.on_device(), self._stream:
                aside = set_aside(feedback.residual, unsent, self.columns[number])

        def make(x: Array, first: int, lane: int) -> _OnDevice:
            return _OnDevice(x, first, feedback, self.comm, slots[lane], row)

        yield from compressed_allreduce_by(make, self._pieces[number], self.comm, tag, turn)
        if self._padding[number].size:  # some codecs decode a zero as another value
            with streams.on_device(), self._stream:
                part[self._padding[number]] = 0
                feedback.residual[self._padding[number]] = 0
        if aside:
            with streams.on_device(), self._stream:
                put_back(feedback.residual, part, aside)
        streams.record(self._summed[number], self._stream)
        return (self._summed[number],)


class _Slot:
    """Memory for the codes of one segment, in pinned memory and in the same order on the GPU."""

    def __init__(
        self, streams: Streams, stream: Stream, code_nbytes: int, part_count: int, n: int, like: Array
    ) -> None:
        self.streams, self.stream = streams, stream
        self.coded = streams.event()
        step = -(-code_nbytes // _ALIGNED) * _ALIGNED
        self._sent, self._received = (slice(at * n * step, (at + 1) * n * step) for at in range(2))
        self._host = streams.pinned(2 * n * step, stream)
        self._on_gpu = streams.empty((2 * n * step,), np.dtype(np.uint8), stream)
        self._codes = [slice(number * step, number * step + code_nbytes) for number in range(2 * n)]
        self.added = streams.empty((part_count,), np.dtype(like.dtype), stream)
        """Memory for a decoded part, shape ``(count of the longest part,)``."""

    def codes(self, nbytes: Sequence[int]) -> list[tuple[np.ndarray, Array]]:
        """Return the memory of codes of ``nbytes`` on the host and on the GPU: those to send, then the received."""
        places = [slice(code.start, code.start + size) for code, size in zip(self._codes, nbytes, strict=True)]
        return [(self._host[place], self._on_gpu[place]) for place in places]

    def to_host(self) -> None:
        """Begin to copy the codes to send to the host; `coded` is recorded after it."""
        self.streams.copy_async(self._host[self._sent], self._on_gpu[self._sent], self.stream)
        self.streams.record(self.coded, self.stream)

    def from_host(self, *, received: bool) -> None:
        """Begin to copy codes to the GPU: the ``received`` ones, or the sums in the place of those sent."""
        at = self._received if received else self._sent
        self.streams.copy_async(self._on_gpu[at], self._host[at], self.stream)


class _OnDevice:
    """`compression.Coding` of an array on a GPU."""

    def __init__(
        self, x: Array, first: int, feedback: ErrorFeedback, comm: Communicator, slot: _Slot, row: NodeRows
    ) -> None:
        self._feedback, self._comm, self._slot, self._row = feedback, comm, slot, row
        n, me = comm.size, comm.rank
        self._parts, self._places = split(x, n), shard_slices(x, first, n)
        nbytes = [feedback.nbytes(part.size) for part in self._parts]
        codes = slot.codes([*nbytes, *[nbytes[me]] * n])
        self.sent, self.received = ([host for host, _ in half] for half in (codes[:n], codes[n:]))
        self._sent, self._received = ([on_gpu for _, on_gpu in half] for half in (codes[:n], codes[n:]))
        self._is_encoded = False

    def encode(self, rank: int) -> Steps:
        if not self._is_encoded:
            self._is_encoded = True
            with self._slot.streams.on_device(), self._slot.stream:
                for other, code in enumerate(self._sent):
                    if other != self._comm.rank:
                        self._feedback.encode(self._parts[other], self._places[other], code)
            self._slot.to_host()
            yield [_passed(self._slot.streams, self._slot.coded, self._row.check)]

    def add_up(self) -> Steps:
        me, codec = self._comm.rank, self._feedback.codec
        total = self._parts[me]
        added = self._slot.added[: total.size]
        self._slot.from_host(received=True)
        with self._slot.streams.on_device(), self._slot.stream:
            for rank, code in enumerate(self._received):
                if rank != me:
                    codec.decode(code, added)
                    total += added
            self._feedback.encode(total, self._places[me], self._sent[me], codec.of_sum(self._comm.size))
        self._slot.to_host()
        yield [_passed(self._slot.streams, self._slot.coded, self._row.check)]

    def decode(self) -> None:
        self._slot.from_host(received=False)
        of_sum = self._feedback.codec.of_sum(self._comm.size)
        with self._slot.streams.on_device(), self._slot.stream:
            for part, code in zip(self._parts, self._sent, strict=True):
                of_sum.decode(code, part)


def _pieces(part: Array, codec: Codec, n: int) -> list[Array]:
    """Return the segments of ``part``; empty where nothing is sent."""
    if part.size == 0 or n == 1:
        return []
    return coded_segments(part, codec, n, _LONG_NBYTES if codec.by_element else None)


def _slots(streams: Streams, stream: Stream, pieces: Sequence[Array], codec: Codec, n: int) -> list[_Slot]:
    if not pieces:
        return []
    counts = [part.size for piece in pieces for part in split(piece, n)]
    nbytes = max(codec.nbytes(count, np.dtype(pieces[0].dtype)) for count in set(counts))
    return [_Slot(streams, stream, nbytes, max(counts), n, pieces[0]) for _ in range(min(LANES, len(pieces)))]


def _numbers(places: Sequence[slice], streams: Streams) -> Array:
    """Return the indices of the elements in all of ``places``, on the GPU."""
    indices = [np.arange(place.start, place.stop) for place in places]
    return streams.array(np.concatenate(indices) if indices else np.zeros(0, np.int64))


class Direct:
    """Sums over nodes by messages from and to the memory of GPUs, in the place of `Staging`.

    An MPI library accesses such memory at once, regardless of the stream's pending work. So a message is posted when an
    event after that work has passed, and received data is valid when the message is complete::

        GPU     reduce-scatter in the node |               | add up |               | add up | ...
        event                              | passes                 | passes                 | passes
        MPI                                | send, receive          | send, receive          | send ...

    Segments and the order of each sum are those of `Staging`, and so are the bits. But a message is a whole chunk of a
    segment: 8 MiB / n for n nodes. Short messages (`MESSAGE_NBYTES`) only keep host memory flowing over TCP. From a
    GPU's memory, libraries send all but a few KB after a handshake. Then the adapter reads the memory, or the library
    pipelines it through its own, in pieces of 512 KB to 4 MB (UCX's ``RNDV_FRAG_SIZE``) or of 1 MB (MPICH's
    ``CH4_OFI_GPU_PIPELINE_BUFFER_SZ``). So each further message costs a handshake, and here an event and a kernel.

    Args:
        streams: streams of this rank's GPU.
        num_buckets: the number of buckets.
        comm: the ranks that sum the same shards, one per node; its messages take arrays on GPUs.
    """

    def __init__(self, streams: Streams, num_buckets: int, comm: Communicator) -> None:
        self._streams, self._comm = streams, comm
        self._stream = streams.stream()
        self._ready, self._summed = ([streams.event() for _ in range(num_buckets)] for _ in range(2))
        self._free: list[Event] = []

    def sum(self, number: int, part: Array, row: NodeRows, tag: int, turn: Request | None) -> StepsTo[Sequence[Event]]:
        """Sum ``part``, the contiguous shard of bucket ``number``, in place over all ranks; see `Staging.sum`."""
        if part.size == 0 or self._comm.size == 1:
            return ()
        streams = self._streams
        streams.record(self._ready[number], row.stream)
        # The host waits, not the stream, where the wait would delay the sums of other buckets.
        yield [_passed(streams, self._ready[number], row.check)]
        comm = _Link(self._comm, streams, self._stream, row.check, self._free)

        def through(segment: Array, own_tag: int) -> Steps:
            with streams.on_device(), self._stream:
                exchanges = lanes_of_segment(segment, _SUM, comm, own_tag, 1, turn)
            return together([_on_stream(streams, self._stream, steps) for steps in exchanges])

        yield from together(in_lanes(segments(part, SEGMENT_NBYTES), through, tag))
        streams.record(self._summed[number], self._stream)
        return (self._summed[number],)


def _add(total: Array, x: Array) -> None:
    total += x


_SUM = Reduction("sum", _add)


def _on_stream(streams: Streams, stream: Stream, steps: Steps) -> Steps:
    """Run ``steps`` with their array operations, and memory allocations, on ``stream``."""
    while True:
        with streams.on_device(), stream:
            stage = next(steps, None)
        if stage is None:
            return
        yield stage


class _Link:
    """A communicator of arrays on a GPU, whose messages wait for the earlier work of a stream."""

    def __init__(
        self, comm: Communicator, streams: Streams, stream: Stream, check: Callable[[], None], free: list[Event]
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._streams, self._stream, self._check, self._free = comm, streams, stream, check, free
        self._waiting: deque[tuple[Event, _Posted, Callable[[], Request]]] = deque()

    def isend(self, x: Array, dest: int, tag: int = 0) -> _Posted:
        return self._post_later(partial(self._comm.isend, x, dest, tag))

    def irecv(self, x: Array, source: int, tag: int = 0) -> _Posted:
        return self._post_later(partial(self._comm.irecv, x, source, tag))

    def _post_later(self, post: Callable[[], Request]) -> _Posted:
        event = self._free.pop() if self._free else self._streams.event()
        self._streams.record(event, self._stream)
        message = _Posted(self)
        self._waiting.append((event, message, post))
        return message

    def post(self) -> None:
        """Post all messages whose events have passed: a test of one message may need another to be sent."""
        while self._waiting:
            self._check()
            event, message, post = self._waiting[0]
            if not self._streams.query(event):
                return
            self._waiting.popleft()
            self._free.append(event)
            with self._streams.on_device():
                message.request = post()


class _Posted:
    """A message that its link posts when its event has passed."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self.request: Request | None = None

    def test(self) -> bool:
        self._link.post()
        return self.request is not None and self.request.test()

    def wait(self) -> None:
        wait_for(self.test)


class GpuReduction(BucketReduction):
    """Buckets on GPUs, one row per rank: summed inside the node by NCCL or CUDA IPC, between nodes by messages.

    Args:
        params: the parameters, all on one GPU, which is this thread's current device.
        layout: the place of each parameter.
        world: the ranks, more than one.
        comm: all ranks, for messages.
        rail: the ranks of `World.rail_comm`, for messages; None where this rank has none.
        signature: see `make_tag`.
        compression: how messages between nodes, or with ``inside_nodes`` between ranks, are compressed; None: not at
            all.
        sharded: leave each shard of the sums with its owner in the node, until `gather` copies it to the others.

    Raises:
        DeviceError: another device is current; on all ranks. Also see `gpu_buckets.make`.
        ConfigError: see `agree_on_cuda_aware_mpi`; on all ranks.
        UnsupportedError: parameters on several GPUs, on all ranks; dtypes that cannot be sent between nodes. Also see
            `gpu_buckets.make`.
    """

    orders_by_stream = True

    def __init__(
        self,
        params: Sequence[ParameterLike],
        layout: Layout,
        world: World,
        comm: Communicator,
        rail: Communicator | None,
        signature: int,
        compression: Compression | None,
        sharded: bool = False,
    ) -> None:
        self.memory, self.comm = PrivateMemory(), comm
        self.gate = WatchedBarrier(self.memory, ProgressEngine.of(world).watchdog)
        self.keeps_unsent = compression is not None
        self._world, self._sharded = world, sharded
        self._streams = streams = on_every_rank(world.comm, lambda: streams_of(params))
        self._counts = layout.counts
        sizes = [
            RowSize(_padded(count, world.num_rails, dtype), dtype)
            for count, dtype in zip(layout.counts, layout.dtypes, strict=True)
        ]
        self._rows: Sequence[NodeRows]
        if compression is not None and compression.inside_nodes:
            self._rows, way = lone_rows(streams, sizes), GpuTransport.HOST
        else:
            self._rows, way = gpu_buckets.make(world, streams, sizes)
        self.way = way
        alone = way is GpuTransport.HOST
        owners, ranks, self._rank = (1, 1, 0) if alone else (world.num_rails, world.local_size, world.local_rank)
        self._parts = [parts_of(size.count, owners, ranks) for size in sizes]
        if compression is not None:  # codes depend on where a shard begins: use the shards of the CPU
            self._parts = [_shards(layout, number, owners, ranks) for number in range(len(sizes))]
        self.sends_messages = alone or world.num_nodes > 1
        self._across = comm if alone else rail
        self.goes_direct = False
        """True if messages go from and to GPUs' memory, and not through the host; the same on all ranks."""
        self._staging: Staging | None = None
        self._direct: Direct | None = None
        self.coder: CodeStaging | None = None
        if self.sends_messages:
            _require_sums_on_the_host(sizes)
            self.goes_direct = compression is None and agree_on_cuda_aware_mpi(world)[0]
            if compression is None and not self.goes_direct and layout.longest_nbytes >= ring.LONG_NBYTES:
                ring.fit_messages(world)
            if self.goes_direct:
                world.sends_from(streams.device, self)
            if self._across is not None and compression is not None:
                self.coder = CodeStaging(streams, self._shares(layout), compression, self._across)
            elif self._across is not None and self.goes_direct:
                self._direct = Direct(streams, len(sizes), self._across)
            elif self._across is not None:
                self._staging = Staging(streams, [self._part(number).nbytes for number in range(len(sizes))])
        self._signature = signature
        self._writers: list[dict[int, Stream]] = [{} for _ in sizes]
        """Streams, by address, that have written each bucket since it was last `filled`."""
        self._written: list[list[Event]] = [[] for _ in sizes]
        """Events for the writing streams of each bucket."""
        self._filled: list[Sequence[Event]] = [() for _ in sizes]
        """Events after which each bucket is filled."""
        self._done = [streams.event() for _ in sizes]
        self._ends: list[Sequence[Event]] = [() for _ in sizes]
        """Events after the last operation on each bucket."""
        if alone or not sharded:
            self.copies = (world.size, world.rank)
        elif rail is not None:
            self.copies = (rail.size, rail.rank)
        self.is_counted = self.copies[1] == 0

    def allocate(self, layout: Layout) -> list[Bucket]:
        """See `BucketReduction.allocate`: the memory is that of the rows."""
        self._buckets = [
            Bucket(number, layout.slots_of(number), self.rows(number), 0, self.shard(number))
            for number in range(len(layout.counts))
        ]
        return list(self._buckets)

    def prepare(self, bucket: Bucket) -> Reduce:
        """See `BucketReduction.prepare`."""
        self.filled(bucket)
        return partial(self._reduce, bucket, self._unsent.get(bucket.number, ()))

    def _reduce(self, bucket: Bucket, unsent: Sequence[Slot], turn: Request | None) -> Steps:
        yield from self.sum(bucket, turn, unsent)
        bucket.mark_reduced()

    def reduce(self, buckets: Sequence[Bucket]) -> None:
        """See `BucketReduction.reduce`."""
        with self.waiting():
            run_together(self._world, [(bucket, self.prepare(bucket)) for bucket in buckets])
            self.reduced(buckets)

    def reduced(self, buckets: Sequence[Bucket]) -> None:
        """See `BucketReduction.reduced`."""
        for bucket in buckets:
            self.summed(bucket)

    def gather(self, buckets: Sequence[Bucket]) -> None:
        """See `BucketReduction.gather`: by an allgather of the shards."""
        if not self._sharded:
            return
        with self.waiting():
            for bucket in buckets:
                self.filled(bucket)
            with ProgressEngine.of(self._world).watchdog.watching("allgather", lambda: "shards on GPUs"):
                TaskGroup([self.allgather(bucket) for bucket in buckets]).wait()
            self.reduced(buckets)

    def gather_parameters(self, buckets: Sequence[Bucket], flats: Sequence[Array]) -> None:
        """See `BucketReduction.gather_parameters`: through the rows of the buckets."""
        if not self._sharded:
            return
        for bucket, flat in zip(buckets, flats, strict=True):
            columns = slice(*bucket.shard)
            bucket.mine[columns] = flat[columns]
        self.gather(buckets)
        for bucket, flat in zip(buckets, flats, strict=True):
            first, last = bucket.shard
            flat[:first], flat[last:] = bucket.mine[:first], bucket.mine[last:]

    def rows(self, number: int) -> Array:
        """Return the row of this rank's gradients of bucket ``number``, shape ``(1, count)``."""
        return self._rows[number].mine[: self._counts[number]].reshape(1, self._counts[number])

    def written(self, bucket: Bucket, name: str, param: ParameterLike) -> None:
        """See `BucketReduction.written`: record the stream of backward."""
        self.record_writer(bucket)

    def record_writer(self, bucket: Bucket) -> None:
        """Record that this thread's current stream writes into the bucket's row; several streams may write."""
        stream = self._streams.current()
        self._writers[bucket.number][stream.ptr] = stream

    def filled(self, bucket: Bucket) -> None:
        """Record the events after which the bucket is filled; call before `sum` and `allgather`."""
        self.record_writer(bucket)
        writers, events = self._writers[bucket.number], self._written[bucket.number]
        while len(events) < len(writers):
            events.append(self._streams.event())
        for event, stream in zip(events, writers.values(), strict=False):
            self._streams.record(event, stream)
        self._filled[bucket.number] = tuple(events[: len(writers)])
        writers.clear()

    def sum(self, bucket: Bucket, turn: Request | None, unsent: Sequence[Slot] = ()) -> Steps:
        """Sum a bucket over all ranks, in place on each; the steps end when the last GPU operation is launched.

        Args:
            bucket: the bucket, after `filled`.
            turn: a request that is complete when messages may begin; None: at once.
            unsent: slots whose residuals are kept; see `Coder`.
        """
        number, filled = bucket.number, self._filled[bucket.number]
        row, parts = self._rows[number], self._parts[number]
        if not (self.sends_messages or self._sharded):
            yield from row.allreduce(filled)
            self._note(number)
            return
        yield from row.reduce_scatter(parts, filled)
        self._note(number)
        summed_over_nodes = (yield from self._sum_over_nodes(number, row, turn, unsent)) if self.sends_messages else ()
        if self._sharded:
            self._ends[number] = (*self._ends[number], *summed_over_nodes)
        else:
            yield from row.allgather(parts, summed_over_nodes)
            self._note(number)

    def allgather(self, bucket: Bucket) -> Steps:
        """Copy each shard of a bucket from its owner's row to those of the node's other ranks, as `sum` does."""
        number = bucket.number
        yield from self._rows[number].allgather(self._parts[number], self._filled[number])
        self._note(number)

    def _note(self, number: int) -> None:
        self._streams.record(self._done[number], self._rows[number].stream)
        self._ends[number] = (self._done[number],)

    def _sum_over_nodes(
        self, number: int, row: NodeRows, turn: Request | None, unsent: Sequence[Slot]
    ) -> StepsTo[Sequence[Event]]:
        """Sum this rank's shard over the nodes; return the events after which the sum is complete."""
        across = self._across
        if across is None:
            return ()
        tag = make_tag(self._signature % across.signatures, number)
        if self.coder is not None:
            return (yield from self.coder.sum(number, row, tag, turn, unsent))
        if self._direct is not None:
            return (yield from self._direct.sum(number, self._part(number), row, tag, turn))
        assert self._staging is not None

        def total(x: np.ndarray, tag: int, turn: Request | None) -> Steps:
            kind = resolve("reduction", "sum", x.dtype)
            number = messages(x.nbytes / across.size, ring.message_nbytes(self._world))
            return together(lanes_of_segment(x, kind, across, tag, number, turn))

        return (yield from self._staging.sum(number, self._part(number), row, total, tag, turn))

    def summed(self, bucket: Bucket) -> None:
        """Let this thread's current stream wait for the results of `sum` or `allgather`, after those."""
        self._streams.wait_events(self._streams.current(), self._ends[bucket.number])

    def shard(self, number: int) -> Part:
        """Return the columns of a bucket that this rank owns in its node; all if every rank gets all sums."""
        count = self._counts[number]
        first, last = self._parts[number][self._rank] if self._sharded else (0, count)
        return min(first, count), min(last, count)

    def _part(self, number: int) -> Array:
        return self._rows[number].mine[slice(*self._parts[number][self._rank])]

    def _shares(self, layout: Layout) -> list[Share]:
        columns = [parts[self._rank] for parts in self._parts]
        return [
            Share(self._part(number), first, padding(layout.slots_of(number), (first, last)))
            for number, (first, last) in enumerate(columns)
        ]


def _require_sums_on_the_host(sizes: Sequence[RowSize]) -> None:
    odd = next((size.dtype for size in sizes if size.dtype.name not in SUMMED_KINDS), None)
    if odd is not None:
        raise UnsupportedError("reduction over nodes", where="dtype", expected=choices(SUMMED_KINDS), got=odd)


def _padded(count: int, parts: int, dtype: np.dtype) -> int:
    """Return ``count`` rounded up to equal parts, which NCCL needs, of whole cache lines."""
    unit = parts * LINE_NBYTES // dtype.itemsize
    return -(-count // unit) * unit


def _shards(layout: Layout, number: int, owners: int, ranks: int) -> list[Part]:
    """Return the shards of a bucket as on the CPU; those of ranks that own none are empty."""
    count = layout.counts[number]
    return [layout.shard(number, owners, rank) if rank < owners else (count, count) for rank in range(ranks)]


def streams_of(params: Sequence[ParameterLike]) -> Streams:
    """Return the streams of the GPU of all ``params``, which must be this thread's current device.

    Raises:
        DeviceError: another device is current.
        UnsupportedError: the parameters are on several GPUs.
    """
    devices = sorted({int(param.data.device.id) for param in params})
    if len(devices) > 1:
        got = f"parameters on {' and '.join(str(gpu(number)) for number in devices)}"
        raise UnsupportedError("reduction", where="device", expected="all parameters on one GPU", got=got,
                               remedy="call net.to(world.device)")  # fmt: skip
    streams = Streams(gpu(devices[0]))
    if streams.current_device() != streams.device:
        expected = f"{streams.device}, where the parameters are, as this thread's current device"
        raise DeviceError("reduction", where="device", expected=expected, got=streams.current_device(),
                          remedy="call world.device.use() before any computation")  # fmt: skip
    return streams
