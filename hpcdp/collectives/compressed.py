"""Allreduce with compressed messages and error feedback.

Rank r owns the r-th shard of a segment. Every rank encodes the other shards and sends each to its owner. The owner
decodes them, adds them to its own, encodes the sum and sends it to all. The part that an encoder omits is added to what
it encodes next (`compression.ErrorFeedback`). A rank keeps the residuals of the shards that it sends, the owner of a
shard that of its sum, so one array is enough for both::

    rank 0    own  e(b)  e(c)             residual:  of the sum of a, of its b, of its c
    rank 1    e(a)  own  e(c)      -->    residual:  of its a, of the sum of b, of its c
    rank 2    e(a)  e(b)  own             residual:  of its a, of its b, of the sum of c

The owner adds its own shard uncompressed. It, too, decodes the encoded sum, so all ranks end with the same bits.

Sent per rank: 2 (n - 1) messages and 2 (n - 1) w(S / n) bytes a segment, where w is the encoded size of a shard.

Source: Bernstein et al., "signSGD with majority vote", 2018, and Tang et al., "DoubleSqueeze", 2019 (compressing both
ways, with error feedback at both ends); the owners as parameter servers as in Li et al., "Scaling distributed machine
learning with the parameter server", 2014.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ..comm import Communicator, Request
from ..comm.communicator import Steps, bounds, resolve, split
from ..comm.tasks import MESSAGE_NBYTES, in_lanes, segments, together
from ..compression import Codec, ErrorFeedback
from ..core.arrays import Array

_SAMPLE = 1 << 16
"""Number of elements from which the compression ratio is computed."""


class Coding(Protocol):
    """One segment of a rank and its encoded shards, in host or device memory.

    Machines end when the codes are in host memory, from which messages are sent.
    """

    @property
    def sent(self) -> Sequence[np.ndarray]:
        """The code of each shard, uint8: first what this rank sends to the owner, finally what the owner has sent."""
        ...

    @property
    def received(self) -> Sequence[np.ndarray]:
        """Codes of this rank's own shard, one from each rank, uint8; its own entry is unused."""
        ...

    def encode(self, rank: int) -> Steps:
        """Encode another rank's shard; called for each rank in order."""
        ...

    def add_up(self) -> Steps:
        """Decode the received codes, add them to this rank's shard in the order of the ranks, and encode the sum."""
        ...

    def decode(self) -> None:
        """Decode the sums of all shards."""
        ...


MakeCoding = Callable[[Array, int, int], Coding]
"""``make(x, first, lane)``: the coding of the segment ``x``, which starts at element ``first`` of the array.

Segments of one lane are processed one after another.
"""


def allreduce(
    x: np.ndarray, feedback: ErrorFeedback, comm: Communicator, tag: int, turn: Request | None = None
) -> Steps:
    """Sum ``x``, shape ``(count,)``, in place over all ranks of ``comm``.

    Args:
        x: float array on the host; changed in place.
        feedback: made for ``count`` elements of this dtype; reused by later calls.
        comm: the communicator.
        tag: first of the tags of its messages.
        turn: a request for which the segments wait before they begin.
    """
    pieces = pieces_of(x, feedback.codec, comm.size)
    yield from allreduce_by(lambda x, first, lane: _OnHost(x, first, feedback, comm), pieces, comm, tag, turn)


def allreduce_by(
    make: MakeCoding, pieces: Sequence[Array], comm: Communicator, tag: int, turn: Request | None
) -> Steps:
    """Run `allreduce` for an array on any device, with the coding ``make`` of each of its segments ``pieces``."""
    items = list(zip(pieces, itertools.accumulate((piece.size for piece in pieces), initial=0), strict=False))
    machines = in_lanes(
        items, lambda item, lane_tag: _segment(make(*item, lane_tag - tag), comm, lane_tag), tag, turn=turn
    )
    yield from together(machines)


def sent_and_plain_nbytes(feedback: Sequence[ErrorFeedback], n: int) -> tuple[int, int]:
    """Return the bytes that all ``n`` ranks send for the arrays of ``feedback``, compressed and uncompressed."""
    arrays = [(coder.residual, coder.codec) for coder in feedback]
    sent = sum(sent_nbytes(x.size, np.dtype(x.dtype), codec, n) for x, codec in arrays)
    return sent, sum(2 * (n - 1) * x.nbytes for x, _ in arrays)


def sent_nbytes(count: int, dtype: np.dtype, codec: Codec, n: int) -> int:
    """Return the bytes that all ``n`` ranks send for ``count`` elements: 2 (n - 1) times the encoded size."""
    pieces = pieces_of(np.empty(count, dtype), codec, n)
    return 2 * (n - 1) * sum(codec.nbytes(part.size, part.dtype) for piece in pieces for part in split(piece, n))


def pieces_of(x: Array, codec: Codec, n: int, nbytes: int | None = None) -> list[Array]:
    """Return segments whose encoded shards have about the message size ``nbytes``, by default `MESSAGE_NBYTES`."""
    ratio = _SAMPLE * x.dtype.itemsize / codec.nbytes(_SAMPLE, x.dtype)
    return segments(x, int((nbytes or MESSAGE_NBYTES) * n * ratio))


def places_of(x: Array, first: int, n: int) -> list[slice]:
    """Return the positions in the array of the shards of a segment that starts at element ``first``."""
    ends = [first + end for end in bounds(x.size, n)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def _segment(coding: Coding, comm: Communicator, tag: int) -> Steps:
    me, others = comm.rank, [rank for rank in range(comm.size) if rank != comm.rank]
    sends = []
    for rank in others:
        yield from coding.encode(rank)
        sends.append(comm.isend(coding.sent[rank], rank, tag))
    yield [*sends, *(comm.irecv(coding.received[rank], rank, tag) for rank in others)]
    yield from coding.add_up()
    sends = [comm.isend(coding.sent[me], rank, tag) for rank in others]
    yield [*sends, *(comm.irecv(coding.sent[rank], rank, tag) for rank in others)]
    coding.decode()


class _OnHost:
    """`Coding` of a NumPy array."""

    def __init__(self, x: np.ndarray, first: int, feedback: ErrorFeedback, comm: Communicator) -> None:
        self._feedback, self._me, self._size = feedback, comm.rank, comm.size
        self._parts, self._places = split(x, comm.size), places_of(x, first, comm.size)
        self.sent = [np.empty(feedback.nbytes(part.size), np.uint8) for part in self._parts]
        self.received = [np.empty_like(self.sent[self._me]) for _ in self._parts]

    def encode(self, rank: int) -> Steps:
        """See `Coding.encode`."""
        self._feedback.encode(self._parts[rank], self._places[rank], self.sent[rank])
        yield from ()

    def add_up(self) -> Steps:
        """See `Coding.add_up`."""
        me, codec = self._me, self._feedback.codec
        total, added = self._parts[me], np.empty_like(self._parts[me])
        add = resolve("allreduce", "sum", total.dtype).into
        for rank in range(self._size):
            if rank != me:
                codec.decode(self.received[rank], added)
                add(total, added)
        self._feedback.encode(total, self._places[me], self.sent[me], codec.of_sum(self._size))
        yield from ()

    def decode(self) -> None:
        """See `Coding.decode`."""
        of_sum = self._feedback.codec.of_sum(self._size)
        for part, code in zip(self._parts, self.sent, strict=True):
            of_sum.decode(code, part)
