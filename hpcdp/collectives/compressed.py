"""Allreduce that stays compressed on the wire.

Rank r owns the r-th part of a segment. Every rank encodes the other parts and sends each to its owner, who decodes what
comes and adds it to its own; then it encodes the sum and sends that to everybody. What an encoder leaves out is added
to what it encodes next time (`compression.ErrorFeedback`): a rank remembers it for the parts that it sends, the owner
of a part for its sum, so one array is enough for both::

    rank 0    own  e(b)  e(c)             residual:  of the sum of a, of its b, of its c
    rank 1    e(a)  own  e(c)      -->    residual:  of its a, of the sum of b, of its c
    rank 2    e(a)  e(b)  own             residual:  of its a, of its b, of the sum of c

Its own part the owner adds as it is. The owner, too, takes the sum as the others decode it, so all ranks end with the
same bits.

Sent per rank: 2 (n - 1) messages and 2 (n - 1) w(S / n) bytes a segment, where w is what the codec makes of a part.

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
"""Elements by which it is reckoned how much shorter a codec makes messages."""


class Coding(Protocol):
    """One segment and its codes, for a rank: whoever has the array encodes and decodes.

    Machines end when host memory holds what they are for; codes are what a message carries.
    """

    @property
    def sent(self) -> Sequence[np.ndarray]:
        """The code of each part, uint8: what this rank sends to its owner, and in the end what its owner has sent."""
        ...

    @property
    def received(self) -> Sequence[np.ndarray]:
        """Codes of this rank's own part, one from each rank, uint8; its own is not used."""
        ...

    def encode(self, rank: int) -> Steps:
        """Encode the part of another rank; called for each of them in order."""
        ...

    def add_up(self) -> Steps:
        """Decode what was received, add it to this rank's own part in the order of the ranks, and encode the sum."""
        ...

    def decode(self) -> None:
        """Decode the sums of all parts."""
        ...


MakeCoding = Callable[[Array, int, int], Coding]
"""``make(x, first, lane)``: that of the segment ``x``, whose first element has the number ``first`` in the array; those
of one lane come one after another."""


def allreduce(
    x: np.ndarray, feedback: ErrorFeedback, comm: Communicator, tag: int, turn: Request | None = None
) -> Steps:
    """Sum ``x``, shape ``(count,)``, in place over all ranks of ``comm``; segments begin when it is their ``turn``.

    Args:
        feedback: made for ``count`` elements of this dtype; kept from one call to the next.
    """
    pieces = pieces_of(x, feedback.codec, comm.size)
    yield from allreduce_by(lambda x, first, lane: _OnHost(x, first, feedback, comm), pieces, comm, tag, turn)


def allreduce_by(
    make: MakeCoding, pieces: Sequence[Array], comm: Communicator, tag: int, turn: Request | None
) -> Steps:
    """`allreduce` of an array that may be anywhere, by the codings that ``make`` makes of its segments, ``pieces``."""
    items = list(zip(pieces, itertools.accumulate((piece.size for piece in pieces), initial=0), strict=False))
    machines = in_lanes(items, lambda item, own: _segment(make(*item, own - tag), comm, own), tag, turn=turn)
    yield from together(machines)


def sent_and_plain_nbytes(feedback: Sequence[ErrorFeedback], n: int) -> tuple[int, int]:
    """How many bytes all ``n`` ranks together send for arrays that these encode, and what they would uncompressed."""
    sent = sum(sent_nbytes(each.residual.size, np.dtype(each.residual.dtype), each.codec, n) for each in feedback)
    return sent, sum(2 * (n - 1) * each.residual.nbytes for each in feedback)


def sent_nbytes(count: int, dtype: np.dtype, codec: Codec, n: int) -> int:
    """How many bytes all ``n`` ranks together send for an array of ``count`` elements: 2 (n - 1) times its parts'."""
    pieces = pieces_of(np.empty(count, dtype), codec, n)
    return 2 * (n - 1) * sum(codec.nbytes(part.size, part.dtype) for piece in pieces for part in split(piece, n))


def pieces_of(x: Array, codec: Codec, n: int, nbytes: int | None = None) -> list[Array]:
    """Segments whose encoded parts are about as long as a message should be: ``nbytes``, or `MESSAGE_NBYTES`."""
    shorter = _SAMPLE * x.dtype.itemsize / codec.nbytes(_SAMPLE, x.dtype)
    return segments(x, int((nbytes or MESSAGE_NBYTES) * n * shorter))


def places_of(x: Array, first: int, n: int) -> list[slice]:
    """Where the parts of a segment, which begins with element ``first`` of an array, lie in that."""
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
        self._feedback.encode(self._parts[rank], self._places[rank], self.sent[rank])
        yield from ()

    def add_up(self) -> Steps:
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
        of_sum = self._feedback.codec.of_sum(self._size)
        for part, code in zip(self._parts, self.sent, strict=True):
            of_sum.decode(code, part)
