"""Buckets on GPUs: summed inside the node by NCCL or CUDA IPC, between nodes by messages.

Sums over nodes of what lies on GPUs: in segments through host memory, some on the network while others are copied.

A bucket has `SLOTS` slots of pinned memory, through which its segments go in turn, and of those `ON_THE_NETWORK` are
summed at a time::

    slot 0:   to the host | network          | back      | to the host | network ...
    slot 1:               | to the host | network          | back      | to the host ...
    slot 2:                             | to the host | network          | back ...

Copies go on two streams of their own, one each way, which a GPU does at once. What follows what is said by events, and
the host waits for none but that before a message; it sees that one late, after a nap, and meanwhile the copies go on:
those of all slots are given to the stream at once, and the next one of a slot when its sum goes back, behind that.

Compressed sums over nodes of what lies on GPUs: encoded and decoded there, and codes alone go through host memory.

The messages, and what is in them, are those of `collectives.compressed`::

    GPU     encode the parts of others |                   | decode, add up, encode the sum |             | decode
    host                         to it | to the owners ... | from it                  to it | to all  ... | from it

A bucket has as many slots of memory as segments are under way at once. All is given to one stream, in the order in
which machines come to it, so a slot is free for the next segment when that is encoded.

Sums over nodes of what lies on GPUs, by messages from and to their memory: for MPI libraries that take arrays there.

A library reads and writes such memory at once, whatever a stream has still to do. So a message is posted when an event
has passed that is behind all that the stream was given before, and what has come is there when the message is
complete::

    GPU     reduce-scatter in the node |               | add up |               | add up | ...
    event                              | passes                 | passes                 | passes
    MPI                                | send, receive          | send, receive          | send ...

Segments and the order of each sum are those of `staging`, and so are the bits. But a message is a whole chunk of a
segment: of n nodes the n-th part of 8 MiB. Short messages (`comm.tasks.MESSAGE_NBYTES`) keep host memory
flowing over TCP. From a GPU's memory libraries send nothing without a handshake but a few KB; then the adapter reads it
there, or they bring it through memory of their own, in pieces of 512 KB to 4 MB (UCX's ``RNDV_FRAG_SIZE``) or of 1 MB
(MPICH's ``CH4_OFI_GPU_PIPELINE_BUFFER_SZ``). So each message more is a handshake more, and here an event and a kernel.

Buckets on GPUs: summed inside the node by NCCL or CUDA IPC, across nodes through the host, and brought to all again.

What `HierarchicalReduction` does with rows in a node's memory, for rows on GPUs::

    backward | reduce-scatter in the node | own part: host, rail, host | allgather in the node | update

Streams are ordered by events; only the rail makes the host wait. On one node it is one allreduce. With compression the
own part stays on the GPU and its codes go to the host and over the rail. Where messages take arrays on GPUs
(`cuda_aware`), and without compression, nothing goes to the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..collectives import compressed
from ..comm import Communicator, Reduction, Request, World, cuda_memory, gpu_groups
from ..comm.communicator import PolledRequest, Steps, StepsTo, make_tag, resolve, split, wait_for
from ..comm.consistency import on_every_rank
from ..comm.cuda_memory import SUMMED_KINDS, GpuTransport, NodeRows, Part, RowSize, lone_rows, parts_of
from ..comm.shared_memory import PrivateMemory
from ..comm.tasks import LANES, TAGS, ProgressEngine, TaskGroup, in_lanes, segments, together
from ..comm.watchdog import WatchedBarrier
from ..comm.world import GPU_OF_MESSAGES
from ..compression import Codec, Compression, ErrorFeedback
from ..core.arrays import Array
from ..core.devices import Event, Stream, Streams, gpu
from ..errors import DeviceError, UnsupportedError
from . import reductions
from .buckets import LINE_NBYTES, Bucket, Layout, Parameter, Slot
from .reductions import (
    BucketReduction,
    Reduce,
    lanes_of_segment,
    padding,
    put_back,
    run_together,
    set_aside,
    slots_by_bucket,
)

SEGMENT_NBYTES = 8 << 20
"""The longest segment: long enough for a copy to take longer than the host needs for what comes with one, and for a
ring to cut it into messages. On an H200 each copy takes 10 us besides its bytes: 256 MB in segments of 4 MiB take a
tenth longer."""

ON_THE_NETWORK = TAGS // LANES
"""So many segments are summed at a time: as many as have tags of their own."""

SLOTS = 2 * ON_THE_NETWORK
"""A bucket has pinned memory for so many segments: while half of them are summed, the others are copied."""

_WIDEST = 8
"""Bytes of an element at most: segments are as long as whole elements are."""

Sum = Callable[[np.ndarray, int, Request | None], Steps]
"""``sum(x, tag, turn)`` sums ``x`` in place over other nodes, with up to `LANES` tags from ``tag`` on."""


class _StagingSlot:
    """Pinned memory, shape ``(nbytes,)``, the events behind what was copied there, and behind what was taken back."""

    def __init__(self, streams: Streams, nbytes: int, *copied_by: Stream) -> None:
        self.memory = streams.pinned(nbytes, *copied_by)
        self.brought, self.returned = streams.event(), streams.event()


class Staging:
    """The slots of all buckets of a rank.

    Args:
        streams: of its GPU.
        nbytes: of this rank's part of each bucket.
    """

    def __init__(self, streams: Streams, nbytes: Sequence[int]) -> None:
        self._streams = streams
        self._down, self._up = streams.stream(), streams.stream()
        self._ready = [streams.event() for _ in nbytes]
        ways = self._down, self._up
        self._slots = [[_StagingSlot(streams, size, *ways) for size in _slot_nbytes(each)] for each in nbytes]

    def sum(
        self, number: int, part: Array, row: NodeRows, total: Sum, tag: int, turn: Request | None
    ) -> StepsTo[Sequence[Event]]:
        """Sum ``part``, contiguous, of bucket ``number`` in place with ``total``.

        It is read behind what ``row.stream`` has been given until now. Returns the events behind which the sum is
        there.
        """
        if part.size == 0:
            return ()
        streams, slots = self._streams, self._slots[number]
        streams.record(self._ready[number], row.stream)
        streams.wait_event(self._down, self._ready[number])
        pieces = segments(part, SEGMENT_NBYTES)
        for slot, piece in zip(slots, pieces, strict=False):
            self._bring(slot, piece)

        def every(lane: int) -> Steps:
            for at in range(lane, len(pieces), ON_THE_NETWORK):
                slot, host = slots[at % SLOTS], _host(slots[at % SLOTS], pieces[at])
                yield [self._brought(slot, row)]
                yield from total(host, tag + lane * LANES, turn)
                streams.copy_async(pieces[at], host, self._up)
                streams.record(slot.returned, self._up)
                if at + SLOTS < len(pieces):
                    self._bring(slot, pieces[at + SLOTS])

        yield from together([every(lane) for lane in range(min(ON_THE_NETWORK, len(pieces)))])
        return tuple(slot.returned for slot in slots[: len(pieces)])

    def _bring(self, slot: _StagingSlot, piece: Array) -> None:
        """Copy a segment to the host behind what was taken back from its slot."""
        streams = self._streams
        streams.wait_event(self._down, slot.returned)
        streams.copy_async(_host(slot, piece), piece, self._down)
        streams.record(slot.brought, self._down)

    def _brought(self, slot: _StagingSlot, row: NodeRows) -> PolledRequest:
        def is_there() -> bool:
            row.check()
            return self._streams.query(slot.brought)

        return PolledRequest(is_there)


def _host(slot: _StagingSlot, piece: Array) -> np.ndarray:
    return slot.memory[: piece.nbytes].view(piece.dtype)


def _slot_nbytes(nbytes: int) -> list[int]:
    """Of each slot: enough for the longest of nearly equal segments, and no more slots than there are.

    Not a byte more: CuPy's pool takes the next power of two, which a whole segment is.
    """
    if nbytes == 0:
        return []
    number = -(-nbytes // SEGMENT_NBYTES)
    return [-(-nbytes // (number * _WIDEST)) * _WIDEST] * min(SLOTS, number)


_ALIGNED = 256
_LONG_NBYTES = 1 << 20
"""Of a message of codes, where segments of any length have the same: the host gives a GPU some twenty things to do for
each segment, which takes half a millisecond. 64 MB of gradients took 166 ms between two virtual nodes with an H200 as
float16, in 273 segments, and 11 to 28 by the other codecs, in a few dozen."""


@dataclass(frozen=True)
class Share:
    """This rank's part of a bucket."""

    part: Array
    """Shape ``(count,)``."""
    first: int
    """The column of the bucket with which it begins."""
    padding: Sequence[slice]
    """Elements of it that belong to no parameter."""


class CodeStaging:
    """A `rail.Coder` of parts on a GPU: encodes and sends this rank's.

    Args:
        streams: of its GPU.
        shares: of the buckets.
        compression: how.
        comm: the ranks that sum the same parts; one a node.
    """

    def __init__(self, streams: Streams, shares: Sequence[Share], compression: Compression, comm: Communicator) -> None:
        self.comm = comm
        self.shares = shares
        self.feedback = [
            compression.for_array(each.part.size, np.dtype(each.part.dtype), streams.zeros) for each in shares
        ]
        """See `Coder`."""
        self._streams = streams
        self._stream = streams.stream()
        self._ready, self._summed = ([streams.event() for _ in shares] for _ in range(2))
        self._padding = [_numbers(each.padding, streams) for each in shares]
        self._pieces = [
            _pieces(each.part, feedback.codec, comm.size) for each, feedback in zip(shares, self.feedback, strict=True)
        ]
        self._slots = [
            _slots(streams, self._stream, pieces, feedback.codec, comm.size)
            for pieces, feedback in zip(self._pieces, self.feedback, strict=True)
        ]
        streams.follow(self._stream)

    def sum(
        self, number: int, row: NodeRows, tag: int, turn: Request | None, unsent: Sequence[Slot] = ()
    ) -> StepsTo[Sequence[Event]]:
        """Sum this rank's part of bucket ``number`` in place; returns the events behind which the sum is there.

        It is read behind what ``row.stream`` has been given until now.

        Args:
            unsent: see `Coder`.
        """
        part, streams = self.shares[number].part, self._streams
        if part.size == 0 or self.comm.size == 1:
            return ()
        feedback, slots = self.feedback[number], self._slots[number]
        streams.record(self._ready[number], row.stream)
        streams.wait_event(self._stream, self._ready[number])
        kept: list[tuple[slice, Array]] = []
        if unsent:
            with streams.on_device(), self._stream:
                kept = set_aside(feedback.residual, unsent, self.columns(number))

        def make(x: Array, first: int, lane: int) -> _OnDevice:
            return _OnDevice(x, first, feedback, self.comm, slots[lane], row)

        yield from compressed.allreduce_by(make, self._pieces[number], self.comm, tag, turn)
        if self._padding[number].size:  # some codecs send something for nothing
            with streams.on_device(), self._stream:
                part[self._padding[number]] = 0
                feedback.residual[self._padding[number]] = 0
        if kept:
            with streams.on_device(), self._stream:
                put_back(feedback.residual, part, kept)
        streams.record(self._summed[number], self._stream)
        return (self._summed[number],)

    def columns(self, number: int) -> tuple[int, int]:
        """See `Coder`."""
        share = self.shares[number]
        return share.first, share.first + share.part.size

    def sent_nbytes(self) -> tuple[int, int]:
        """See `Coder`."""
        return compressed.sent_and_plain_nbytes(self.feedback, self.comm.size)


class _Slot:
    """Memory for the codes of one segment: in pinned memory and, in the same order, on the GPU."""

    def __init__(
        self, streams: Streams, stream: Stream, code_nbytes: int, part_count: int, n: int, like: Array
    ) -> None:
        self.streams, self.stream = streams, stream
        self.coded = streams.event()
        step = -(-code_nbytes // _ALIGNED) * _ALIGNED
        self._sent, self._received = (slice(at * n * step, (at + 1) * n * step) for at in range(2))
        self._host = streams.pinned(2 * n * step, stream)
        self._there = streams.empty((2 * n * step,), np.dtype(np.uint8), stream)
        self._codes = [slice(number * step, number * step + code_nbytes) for number in range(2 * n)]
        self.added = streams.empty((part_count,), np.dtype(like.dtype), stream)
        """For what is decoded, shape ``(count,)`` of the longest part."""

    def codes(self, nbytes: Sequence[int]) -> list[tuple[np.ndarray, Array]]:
        """Where codes of so many bytes are, on the host and on the GPU: those to be sent, then those received."""
        places = [slice(each.start, each.start + size) for each, size in zip(self._codes, nbytes, strict=True)]
        return [(self._host[each], self._there[each]) for each in places]

    def to_host(self) -> None:
        """Begin to copy what is to be sent; `coded` is behind it."""
        self.streams.copy_async(self._host[self._sent], self._there[self._sent], self.stream)
        self.streams.record(self.coded, self.stream)

    def from_host(self, *, received: bool) -> None:
        """Begin to copy what was ``received``, or else what has become of what is to be sent."""
        at = self._received if received else self._sent
        self.streams.copy_async(self._there[at], self._host[at], self.stream)


class _OnDevice:
    """`compressed.Coding` of an array on a GPU."""

    def __init__(
        self, x: Array, first: int, feedback: ErrorFeedback, comm: Communicator, slot: _Slot, row: NodeRows
    ) -> None:
        self._feedback, self._comm, self._slot, self._row = feedback, comm, slot, row
        n, me = comm.size, comm.rank
        self._parts, self._places = split(x, n), compressed.places_of(x, first, n)
        nbytes = [feedback.nbytes(part.size) for part in self._parts]
        codes = slot.codes([*nbytes, *[nbytes[me]] * n])
        self.sent, self.received = ([host for host, _ in half] for half in (codes[:n], codes[n:]))
        self._sent, self._received = ([there for _, there in half] for half in (codes[:n], codes[n:]))
        self._is_encoded = False

    def encode(self, rank: int) -> Steps:
        if not self._is_encoded:
            self._is_encoded = True
            with self._slot.streams.on_device(), self._slot.stream:
                for other, code in enumerate(self._sent):
                    if other != self._comm.rank:
                        self._feedback.encode(self._parts[other], self._places[other], code)
            self._slot.to_host()
            yield self._coded()

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
        yield self._coded()

    def decode(self) -> None:
        self._slot.from_host(received=False)
        of_sum = self._feedback.codec.of_sum(self._comm.size)
        with self._slot.streams.on_device(), self._slot.stream:
            for part, code in zip(self._parts, self._sent, strict=True):
                of_sum.decode(code, part)

    def _coded(self) -> Sequence[Request]:
        def is_there() -> bool:
            self._row.check()
            return self._slot.streams.query(self._slot.coded)

        return [PolledRequest(is_there)]


def _pieces(part: Array, codec: Codec, n: int) -> list[Array]:
    """The segments of ``part``; none where nothing is sent."""
    if part.size == 0 or n == 1:
        return []
    return compressed.pieces_of(part, codec, n, _LONG_NBYTES if codec.by_element else None)


def _slots(streams: Streams, stream: Stream, pieces: Sequence[Array], codec: Codec, n: int) -> list[_Slot]:
    if not pieces:
        return []
    counts = [part.size for piece in pieces for part in split(piece, n)]
    nbytes = max(codec.nbytes(count, np.dtype(pieces[0].dtype)) for count in set(counts))
    return [_Slot(streams, stream, nbytes, max(counts), n, pieces[0]) for _ in range(min(LANES, len(pieces)))]


def _numbers(places: Sequence[slice], streams: Streams) -> Array:
    """The elements in all of ``places``, on the GPU."""
    found = [np.arange(each.start, each.stop) for each in places]
    return streams.array(np.concatenate(found) if found else np.zeros(0, np.int64))


class Direct:
    """What takes the place of a `staging.Staging`.

    Args:
        streams: of this rank's GPU.
        num_buckets: so many.
        comm: the ranks that sum the same parts; one a node. Its messages take arrays on GPUs.
    """

    def __init__(self, streams: Streams, num_buckets: int, comm: Communicator) -> None:
        self._streams, self._comm = streams, comm
        self._stream = streams.stream()
        self._ready, self._summed = ([streams.event() for _ in range(num_buckets)] for _ in range(2))
        self._free: list[Event] = []

    def sum(self, number: int, part: Array, row: NodeRows, tag: int, turn: Request | None) -> StepsTo[Sequence[Event]]:
        """Sum ``part``, contiguous, of bucket ``number`` in place over all ranks.

        It is read behind what ``row.stream`` has been given until now. Returns the events behind which the sum is
        there.
        """
        if part.size == 0 or self._comm.size == 1:
            return ()
        streams = self._streams
        streams.record(self._ready[number], row.stream)

        def is_ready() -> bool:
            row.check()
            return streams.query(self._ready[number])

        yield [PolledRequest(is_ready)]  # not on the stream: there it would hold up the sums of other buckets
        comm = _Link(self._comm, streams, self._stream, row.check, self._free)

        def through(segment: Array, own_tag: int) -> Steps:
            with streams.on_device(), self._stream:
                machines = lanes_of_segment(segment, _SUM, comm, own_tag, segment.nbytes, turn)
            return together([_given_to(streams, self._stream, each) for each in machines])

        yield from together(in_lanes(segments(part, SEGMENT_NBYTES), through, tag))
        streams.record(self._summed[number], self._stream)
        return (self._summed[number],)


def _add(total: Array, x: Array) -> None:
    total += x


_SUM = Reduction("sum", _add)


def _given_to(streams: Streams, stream: Stream, steps: Steps) -> Steps:
    """``steps``, whose operations on arrays go to ``stream``, and its memory comes from there."""
    while True:
        with streams.on_device(), stream:
            stage = next(steps, None)
        if stage is None:
            return
        yield stage


class _Link:
    """A communicator of arrays on a GPU, whose messages wait for what a stream was given before them."""

    def __init__(
        self, comm: Communicator, streams: Streams, stream: Stream, check: Callable[[], None], free: list[Event]
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._streams, self._stream, self._check, self._free = comm, streams, stream, check, free
        self._waiting: deque[tuple[Event, _Posted, Callable[[], Request]]] = deque()

    def isend(self, x: Array, dest: int, tag: int = 0) -> _Posted:
        return self._behind(partial(self._comm.isend, x, dest, tag))

    def irecv(self, x: Array, source: int, tag: int = 0) -> _Posted:
        return self._behind(partial(self._comm.irecv, x, source, tag))

    def _behind(self, post: Callable[[], Request]) -> _Posted:
        event = self._free.pop() if self._free else self._streams.event()
        self._streams.record(event, self._stream)
        message = _Posted(self)
        self._waiting.append((event, message, post))
        return message

    def post(self) -> None:
        """Post what may go, whoever asks: who waits for a message may have to send one before."""
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
    """A message of a link that is posted when its event has passed."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self.request: Request | None = None

    def test(self) -> bool:
        self._link.post()
        return self.request is not None and self.request.test()

    def wait(self) -> None:
        wait_for(self.test)


class GpuReduction(BucketReduction):
    """Buckets on GPUs, one row a rank: summed inside the node by NCCL or CUDA IPC, between nodes by messages.

    Args:
        params: all on one GPU, which is this thread's current device.
        layout: where each of them goes.
        world: the ranks, several.
        comm: all ranks, for messages.
        rail: of `World.rail_comm`, for messages; None where this rank has none.
        signature: see `make_tag`.
        compression: how what goes between nodes is compressed, or with its ``inside_nodes`` between ranks. None: not.
        sharded: leave each part of the sums with its owner in the node, until `gather` copies it to the others.

    Raises:
        DeviceError: another device is current; on all ranks. And see `node_groups.make`.
        ConfigError: see `cuda_aware.agreed`; on all ranks.
        UnsupportedError: parameters on several GPUs, on all ranks; dtypes that no node can send to others. And see
            `node_groups.make`.
    """

    orders_by_stream = True

    def __init__(
        self,
        params: Sequence[Parameter],
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
        self._buckets: Sequence[Bucket] = ()
        self._unsent: dict[int, list[Slot]] = {}
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
            self._rows, way = gpu_groups.make(world, streams, sizes)
        self.way = way
        alone = way is GpuTransport.HOST
        owners, ranks, self._rank = (1, 1, 0) if alone else (world.num_rails, world.local_size, world.local_rank)
        self._parts = [parts_of(each.count, owners, ranks) for each in sizes]
        if compression is not None:  # codes begin with a part: these are those of the CPU
            self._parts = [_shards(layout, number, owners, ranks) for number in range(len(sizes))]
        self.sends_messages = alone or world.num_nodes > 1
        self._across = comm if alone else rail
        self.goes_direct = False
        """Whether messages go from and to GPUs' memory, and not through the host; alike on all ranks."""
        self._staging: Staging | None = None
        self._direct: Direct | None = None
        self.coder: CodeStaging | None = None
        if self.sends_messages:
            _require_sums_on_the_host(sizes)
            self.goes_direct = compression is None and cuda_memory.agreed(world)[0]
            if self.goes_direct:
                world.keep(GPU_OF_MESSAGES, lambda: streams.device)
            if self._across is not None and compression is not None:
                self.coder = CodeStaging(streams, self._shares(layout), compression, self._across)
            elif self._across is not None and self.goes_direct:
                self._direct = Direct(streams, len(sizes), self._across)
            elif self._across is not None:
                self._staging = Staging(streams, [self._part(number).nbytes for number in range(len(sizes))])
                self._message_nbytes = reductions.fitting(world, self._across, layout.longest_nbytes)
        self._signature = signature
        self._writers: list[dict[int, Stream]] = [{} for _ in sizes]
        """Of each bucket the streams, by address, to which what it holds was given since it was `filled`."""
        self._written: list[list[Event]] = [[] for _ in sizes]
        """Of each bucket as many events as streams have written it at most in a step."""
        self._filled: list[Sequence[Event]] = [() for _ in sizes]
        """Of each bucket the events behind which it is filled."""
        self._done = [streams.event() for _ in sizes]
        self._behind: list[Sequence[Event]] = [() for _ in sizes]
        """Of each bucket the events behind what was last done with it."""
        if alone or not sharded:
            self.copies = (world.size, world.rank)
        elif rail is not None:
            self.copies = (rail.size, rail.rank)
        self.is_counted = self.copies[1] == 0

    def allocate(self, layout: Layout) -> list[Bucket]:
        self._buckets = [
            Bucket(number, layout.slots_of(number), self.rows(number), 0, self.shard(number))
            for number in range(len(layout.counts))
        ]
        return list(self._buckets)

    def begin_step(self) -> None:
        self._unsent = {}

    def keep_unsent(self, names: Set[str]) -> None:
        if self.keeps_unsent:
            self._unsent = slots_by_bucket(self._buckets, names)

    def prepare(self, bucket: Bucket) -> Reduce:
        self.filled(bucket)
        return partial(self._reduce, bucket, self._unsent.get(bucket.number, ()))

    def _reduce(self, bucket: Bucket, unsent: Sequence[Slot], turn: Request | None) -> Steps:
        yield from self.sum(bucket, turn, unsent)
        bucket.mark_reduced()

    def reduce(self, buckets: Sequence[Bucket]) -> None:
        with self.waiting():
            run_together(self._world, [(bucket, self.prepare(bucket)) for bucket in buckets])
            self.reduced(buckets)

    def reduced(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self.summed(bucket)

    def gather(self, buckets: Sequence[Bucket]) -> None:
        if not self._sharded:
            return
        with self.waiting():
            for bucket in buckets:
                self.filled(bucket)
            with ProgressEngine.of(self._world).watchdog.watching("allgather", lambda: "shards on GPUs"):
                TaskGroup([self.allgather(bucket) for bucket in buckets]).wait()
            self.reduced(buckets)

    def gather_parameters(self, buckets: Sequence[Bucket], flats: Sequence[Array]) -> None:
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
        """Where the gradients of bucket ``number`` are to be written, shape ``(1, count)``."""
        return self._rows[number].mine[: self._counts[number]].reshape(1, self._counts[number])

    def written(self, bucket: Bucket, name: str, param: Parameter) -> None:
        self.record_writer(bucket)

    def record_writer(self, bucket: Bucket) -> None:
        """Record that this thread's current stream writes into the bucket's row; other streams may write, too."""
        stream = self._streams.current()
        self._writers[bucket.number][stream.ptr] = stream

    def filled(self, bucket: Bucket) -> None:
        """Record the events behind which the bucket is filled, on all streams that write it and on the current one.

        Call it before `sum` and `allgather`.
        """
        self.record_writer(bucket)
        writers, events = self._writers[bucket.number], self._written[bucket.number]
        while len(events) < len(writers):
            events.append(self._streams.event())
        for event, stream in zip(events, writers.values(), strict=False):
            self._streams.record(event, stream)
        self._filled[bucket.number] = tuple(events[: len(writers)])
        writers.clear()

    def sum(self, bucket: Bucket, turn: Request | None, unsent: Sequence[Slot] = ()) -> Steps:
        """Sum a bucket over all ranks, in place on each; it ends when the last work for that is given to the GPU.

        Args:
            unsent: see `Coder`.
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
            self._behind[number] = (*self._behind[number], *summed_over_nodes)
        else:
            yield from row.allgather(parts, summed_over_nodes)
            self._note(number)

    def allgather(self, bucket: Bucket) -> Steps:
        """Bring each part of a bucket from its owner's row to those of the node's other ranks, as `sum` does."""
        number = bucket.number
        yield from self._rows[number].allgather(self._parts[number], self._filled[number])
        self._note(number)

    def _note(self, number: int) -> None:
        self._streams.record(self._done[number], self._rows[number].stream)
        self._behind[number] = (self._done[number],)

    def _sum_over_nodes(
        self, number: int, row: NodeRows, turn: Request | None, unsent: Sequence[Slot]
    ) -> StepsTo[Sequence[Event]]:
        """Sum this rank's part; returns the events behind which the sum is there."""
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
            return together(lanes_of_segment(x, kind, across, tag, self._message_nbytes, turn))

        return (yield from self._staging.sum(number, self._part(number), row, total, tag, turn))

    def summed(self, bucket: Bucket) -> None:
        """What this thread's current stream is given from now on finds what `sum` or `allgather` has made; called after
        those."""
        self._streams.wait_events(self._streams.current(), self._behind[bucket.number])

    def shard(self, number: int) -> Part:
        """The columns of a bucket that this rank owns in its node; all where every rank gets all sums."""
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
    strange = next((each.dtype for each in sizes if each.dtype.name not in SUMMED_KINDS), None)
    if strange is not None:
        raise UnsupportedError("reduction over nodes", where="dtype", expected=" or ".join(SUMMED_KINDS), got=strange)


def _padded(count: int, parts: int, dtype: np.dtype) -> int:
    """So many elements that all parts are alike, as NCCL wants them, and whole cache lines; alike on all nodes."""
    unit = parts * LINE_NBYTES // dtype.itemsize
    return -(-count // unit) * unit


def _shards(layout: Layout, number: int, owners: int, ranks: int) -> list[Part]:
    """The parts of a bucket as on the CPU; those of ranks that own none are empty."""
    count = layout.counts[number]
    return [layout.shard(number, owners, rank) if rank < owners else (count, count) for rank in range(ranks)]


def streams_of(params: Sequence[Parameter]) -> Streams:
    """Those of the GPU that all ``params`` are on, which is this thread's current device.

    Raises:
        DeviceError: it is not.
        UnsupportedError: they are on several.
    """
    devices = sorted({int(param.data.device.id) for param in params})
    if len(devices) > 1:
        found = " and ".join(str(gpu(each)) for each in devices)
        raise UnsupportedError("reduction", where="device", expected="all parameters on one GPU", got=found,
                               remedy="net.to(world.device)")  # fmt: skip
    streams = Streams(gpu(devices[0]))
    if streams.current_device() != streams.device:
        expected = f"{streams.device}, where the parameters are, as this thread's current device"
        raise DeviceError("reduction", where="device", expected=expected, got=streams.current_device(),
                          remedy="call world.device.use() before anything is computed")  # fmt: skip
    return streams
