"""Broadcast, reduce and allreduce over a binomial tree: few messages, one after another, for short arrays.

With numbers counted from the root, the parent of a rank is its number without the lowest bit that is set::

            0                 reduce: messages go up; every rank adds its children's sums to its own array,
          / | \\                      nearest child first
         4  2  1              broadcast: the same way down, farthest child (with the largest subtree) first
        /|  |
       6 5  3                 allreduce: up, then down
       |
       7

Long arrays go in segments, several at a time: while one is added up others are on their way, and in an allreduce sums
go up while results come down, so both directions of a link are in use. Still the root receives log2 n arrays: for long
ones the ring or two trees at once (`double_tree`) are better.

Sent per rank, for S bytes: reduce 1 message a segment and S, the root nothing; broadcast as many messages a segment and
as many times S as the rank has children: log2 n at the root, 0 for every odd number; allreduce both.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, sections
4.2 and 4.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..comm import Communicator, Reduction
from .progress import MESSAGE_NBYTES, Steps, in_lanes, segments, together

SEGMENT_NBYTES = MESSAGE_NBYTES
"""Longer arrays go in segments of about so many bytes."""


@dataclass(frozen=True)
class Place:
    """A rank's neighbours in a tree."""

    parent: int | None
    """None for the root."""
    children: tuple[int, ...]
    """In the order in which their sums are added."""


def binomial(rank: int, n: int, root: int) -> Place:
    """The place of ``rank`` in the binomial tree over ``n`` ranks."""
    number = (rank - root) % n
    lowest = number & -number or 1 << (n - 1).bit_length()
    distances = [1 << bit for bit in range(lowest.bit_length() - 1) if number + (1 << bit) < n]
    parent = None if number == 0 else (number - lowest + root) % n
    return Place(parent, tuple((number + distance + root) % n for distance in distances))


def reduce_segment(total: np.ndarray, op: Reduction, place: Place, comm: Communicator, tag: int) -> Steps:
    """Reduce ``total``, shape ``(count,)``, into that of the root; elsewhere a partial result is left in it."""
    received = [np.empty_like(total) for _ in place.children]
    pairs = zip(received, place.children, strict=True)
    messages = [comm.irecv(incoming, child, tag) for incoming, child in pairs]
    for message, incoming in zip(messages, received, strict=True):
        yield [message]
        op.into(total, incoming)
    if place.parent is not None:
        yield [comm.isend(total, place.parent, tag)]


def broadcast_segment(x: np.ndarray, place: Place, comm: Communicator, tag: int) -> Steps:
    """Overwrite ``x``, shape ``(count,)``, with that of the root."""
    if place.parent is not None:
        yield [comm.irecv(x, place.parent, tag)]
    yield [comm.isend(x, child, tag) for child in reversed(place.children)]


def allreduce_segment(x: np.ndarray, op: Reduction, place: Place, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks."""
    total = op.widened(x)
    yield from reduce_segment(total, op, place, comm, tag)
    if place.parent is None:
        op.finish(total, comm.size, x)
    yield from broadcast_segment(x, place, comm, tag)


def allreduce(x: np.ndarray, op: Reduction, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm``."""
    place = binomial(comm.rank, comm.size, 0)

    def segment(piece: np.ndarray, own_tag: int) -> Steps:
        return allreduce_segment(piece, op, place, comm, own_tag)

    yield from together(in_lanes(segments(x, SEGMENT_NBYTES), segment, tag))


def broadcast(x: np.ndarray, root: int, comm: Communicator, tag: int) -> Steps:
    """Overwrite ``x``, shape ``(count,)``, on all ranks with that of ``root``."""
    place = binomial(comm.rank, comm.size, root)

    def segment(piece: np.ndarray, own_tag: int) -> Steps:
        return broadcast_segment(piece, place, comm, own_tag)

    yield from together(in_lanes(segments(x, SEGMENT_NBYTES), segment, tag))


def reduce(x: np.ndarray, op: Reduction, root: int, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, over all ranks, in place on ``root``; elsewhere it may be overwritten."""
    place = binomial(comm.rank, comm.size, root)

    def segment(piece: np.ndarray, own_tag: int) -> Steps:
        total = op.widened(piece)
        yield from reduce_segment(total, op, place, comm, own_tag)
        if place.parent is None:
            op.finish(total, comm.size, piece)

    yield from together(in_lanes(segments(x, SEGMENT_NBYTES), segment, tag))
