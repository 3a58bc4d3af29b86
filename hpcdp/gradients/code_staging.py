"""Compressed sums over nodes of what lies on GPUs: encoded and decoded there, and codes alone go through host memory.

The messages, and what is in them, are those of `collectives.compressed`::

    GPU     encode the parts of others |                   | decode, add up, encode the sum |             | decode
    host                         to it | to the owners ... | from it                  to it | to all  ... | from it

A bucket has as many slots of memory as segments are under way at once. All is given to one stream, in the order in
which machines come to it, so a slot is free for the next segment when that is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from ..collectives import compressed
from ..collectives.progress import LANES, Steps
from ..comm import Communicator, Request
from ..comm.communicator import split
from ..comm.node_rows import NodeRows
from ..comm.steps import StepsTo, Until
from ..compression import Codec, Compression, ErrorFeedback
from ..streams import Event, Stream, Streams
from .buckets import Slot
from .rail import put_back, set_aside

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

        return [Until(is_there)]


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
