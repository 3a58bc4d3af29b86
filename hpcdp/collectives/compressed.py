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

import numpy as np

from ..comm import Communicator, Request
from ..comm.communicator import bounds, split
from ..compression import Codec, ErrorFeedback
from .progress import MESSAGE_NBYTES, Steps, in_lanes, segments, together

_SAMPLE = 1 << 16
"""Elements by which it is reckoned how much shorter a codec makes messages."""


def allreduce(
    x: np.ndarray, feedback: ErrorFeedback, comm: Communicator, tag: int, turn: Request | None = None
) -> Steps:
    """Sum ``x``, shape ``(count,)``, in place over all ranks of ``comm``; segments begin when it is their ``turn``.

    Args:
        feedback: made for ``count`` elements of this dtype; kept from one call to the next.
    """
    pieces = _pieces(x, feedback.codec, comm.size)
    items = list(zip(pieces, bounds(x.size, len(pieces))[:-1], strict=True))
    machines = in_lanes(items, lambda item, own: _segment(*item, feedback, comm, own), tag, turn=turn)
    yield from together(machines)


def sent_nbytes(count: int, dtype: np.dtype, codec: Codec, n: int) -> int:
    """How many bytes all ``n`` ranks together send for an array of ``count`` elements: 2 (n - 1) times its parts'."""
    pieces = _pieces(np.empty(count, dtype), codec, n)
    return 2 * (n - 1) * sum(codec.nbytes(part.size, part.dtype) for piece in pieces for part in split(piece, n))


def _pieces(x: np.ndarray, codec: Codec, n: int) -> list[np.ndarray]:
    """Segments whose encoded parts are about as long as a message should be."""
    shorter = _SAMPLE * x.dtype.itemsize / codec.nbytes(_SAMPLE, x.dtype)
    return segments(x, int(MESSAGE_NBYTES * n * shorter))


def _segment(x: np.ndarray, first: int, feedback: ErrorFeedback, comm: Communicator, tag: int) -> Steps:
    """Sum ``x``, which are the elements from ``first`` on of what ``feedback`` was made for."""
    me, others = comm.rank, [rank for rank in range(comm.size) if rank != comm.rank]
    parts = split(x, comm.size)
    ends = [first + end for end in bounds(x.size, comm.size)]
    places = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
    wires = [np.empty(feedback.nbytes(part.size), np.uint8) for part in parts]
    received = {rank: np.empty_like(wires[me]) for rank in others}
    sends = []
    for rank in others:
        feedback.encode(parts[rank], places[rank], wires[rank])
        sends.append(comm.isend(wires[rank], rank, tag))
    yield [*sends, *(comm.irecv(received[rank], rank, tag) for rank in others)]
    total, added = parts[me], np.empty_like(parts[me])
    for rank in others:
        feedback.codec.decode(received[rank], added)
        total += added
    of_sum = feedback.codec.of_sum(comm.size)
    feedback.encode(total, places[me], wires[me], of_sum)
    sends = [comm.isend(wires[me], rank, tag) for rank in others]
    yield [*sends, *(comm.irecv(wires[rank], rank, tag) for rank in others)]
    for rank in range(comm.size):
        of_sum.decode(wires[rank], parts[rank])
