r"""Broadcast, reduce and allreduce over a binomial tree, and allreduce over two binary trees at once.

A binomial tree needs few messages, one after another, which suits short arrays. With numbers counted from the root, the
parent of a rank is its number without the lowest set bit::

            0                 reduce: messages go up; every rank adds its children's sums to its own array,
          / | \                      nearest child first
         4  2  1              broadcast: the same way down, farthest child (with the largest subtree) first
        /|  |
       6 5  3                 allreduce: up, then down
       |
       7

Long arrays are sent in segments, several at a time: while one is reduced others are on the network. In an allreduce
sums go up while results come down, so both directions of a link are in use. Still the root receives log2 n arrays, so
for long ones the ring or two trees at once (`double_tree_allreduce`) are better.

Sent per rank, for S bytes: reduce 1 message a segment and S, the root nothing; broadcast as many messages a segment and
as many times S as the rank has children: log2 n at the root, 0 for every odd number; allreduce both.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, sections
4.2 and 4.4.

Two binary trees, each with half of the array, need few steps and use every link. In one binary tree half of the ranks
are leaves, which send their array up and get the result, while inner ranks receive two arrays and send two results. A
second tree, in which leaves and inner ranks change places, carries the other half, so all ranks have equal work. The
first tree numbers its ranks in order, so odd numbers are leaves. The second is the first with the ranks counted from
the end, or, if n is odd, shifted by one::

    0 ------- 4               7 ------- 3           up: sums of segments; down: results of earlier ones
            /   \                    /   \
           2     6                  5     1
          / \   / \                / \   / \
         1   3 5   7              6   4 2   0

Segments follow each other, so the height of a tree, log2 n, costs its latency once, not once a byte.

Sent per rank, for S bytes: S / 2 to each parent and S / 2 to each child; a rank has a parent in each tree (the root of
one none there) and at most two children in both together: at most 2 S.

Source: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; the
trees as in NCCL since version 2.4 (Jeaugey, "Massively scale your deep learning training with NCCL 2.4", 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..comm import Communicator, Reduction
from ..comm.communicator import Steps, split
from ..comm.progress import in_lanes, messages, together


@dataclass(frozen=True)
class TreePlace:
    """A rank's neighbors in a tree."""

    parent: int | None
    """The parent; None for the root."""
    children: tuple[int, ...]
    """The children in the order in which their sums are added."""


def binomial(rank: int, n: int, root: int) -> TreePlace:
    """Return the place of ``rank`` in the binomial tree over ``n`` ranks."""
    number = (rank - root) % n
    lowest = number & -number or 1 << (n - 1).bit_length()
    distances = [1 << bit for bit in range(lowest.bit_length() - 1) if number + (1 << bit) < n]
    parent = None if number == 0 else (number - lowest + root) % n
    return TreePlace(parent, tuple((number + distance + root) % n for distance in distances))


def reduce_segment(total: np.ndarray, op: Reduction, place: TreePlace, comm: Communicator, tag: int) -> Steps:
    """Reduce ``total``, shape ``(count,)``, into that of the root; on other ranks it holds a partial result."""
    received = [np.empty_like(total) for _ in place.children]
    pairs = zip(received, place.children, strict=True)
    messages = [comm.irecv(incoming, child, tag) for incoming, child in pairs]
    for message, incoming in zip(messages, received, strict=True):
        yield [message]
        op.into(total, incoming)
    if place.parent is not None:
        yield [comm.isend(total, place.parent, tag)]


def broadcast_segment(x: np.ndarray, place: TreePlace, comm: Communicator, tag: int) -> Steps:
    """Overwrite ``x``, shape ``(count,)``, with the values of the root."""
    if place.parent is not None:
        yield [comm.irecv(x, place.parent, tag)]
    yield [comm.isend(x, child, tag) for child in reversed(place.children)]


def allreduce_segment(x: np.ndarray, op: Reduction, place: TreePlace, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks."""
    total = op.widened(x)
    yield from reduce_segment(total, op, place, comm, tag)
    if place.parent is None:
        op.finish(total, comm.size, x)
    yield from broadcast_segment(x, place, comm, tag)


def allreduce(x: np.ndarray, op: Reduction, comm: Communicator, tag: int, nbytes: int | None = None) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm``, in messages of ``nbytes``."""
    place = binomial(comm.rank, comm.size, 0)
    pieces = split(x, messages(x.nbytes, nbytes))
    yield from together(
        in_lanes(pieces, lambda piece, lane_tag: allreduce_segment(piece, op, place, comm, lane_tag), tag)
    )


def broadcast(x: np.ndarray, root: int, comm: Communicator, tag: int, nbytes: int | None = None) -> Steps:
    """Overwrite ``x``, shape ``(count,)``, on all ranks with the values of ``root``, in messages of ``nbytes``."""
    place = binomial(comm.rank, comm.size, root)
    pieces = split(x, messages(x.nbytes, nbytes))
    yield from together(in_lanes(pieces, lambda piece, lane_tag: broadcast_segment(piece, place, comm, lane_tag), tag))


def reduce(x: np.ndarray, op: Reduction, root: int, comm: Communicator, tag: int, nbytes: int | None = None) -> Steps:
    """Reduce ``x``, shape ``(count,)``, over all ranks, in place on ``root``; elsewhere it may be overwritten.

    It goes in messages of ``nbytes``.
    """
    place = binomial(comm.rank, comm.size, root)

    def segment(piece: np.ndarray, lane_tag: int) -> Steps:
        total = op.widened(piece)
        yield from reduce_segment(total, op, place, comm, lane_tag)
        if place.parent is None:
            op.finish(total, comm.size, piece)

    yield from together(in_lanes(split(x, messages(x.nbytes, nbytes)), segment, tag))


def in_order_tree(number: int, n: int) -> TreePlace:
    """Return the place of ``number`` in the first tree over ``n`` ranks."""
    if number == 0:
        return TreePlace(None, (1 << (n - 1).bit_length() - 1,) if n > 1 else ())
    lowest = number & -number
    above = (number ^ lowest) | (lowest << 1)
    parent = above if above < n else number ^ lowest
    half = lowest >> 1
    if not half:
        return TreePlace(parent, ())
    right = half
    while number + right >= n and right:
        right >>= 1
    return TreePlace(parent, (number - half, number + right) if right else (number - half,))


def tree_numbers(rank: int, n: int) -> tuple[int, int]:
    """Return the numbers of ``rank`` in both trees over ``n`` ranks."""
    return rank, n - 1 - rank if n % 2 == 0 else (rank - 1) % n


def double_trees(rank: int, n: int) -> tuple[TreePlace, TreePlace]:
    """Return the places of ``rank`` in both trees over ``n`` ranks."""

    def numbered(number: int) -> int:
        """Return the rank with this number in the second tree."""
        return n - 1 - number if n % 2 == 0 else (number + 1) % n

    first, second = (in_order_tree(number, n) for number in tree_numbers(rank, n))
    parent = None if second.parent is None else numbered(second.parent)
    return first, TreePlace(parent, tuple(numbered(child) for child in second.children))


def double_tree_allreduce(
    x: np.ndarray, op: Reduction, comm: Communicator, tag: int, nbytes: int | None = None
) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm``, in messages of ``nbytes``."""
    machines: list[Steps] = []
    for place, half in zip(double_trees(comm.rank, comm.size), split(x, 2), strict=True):

        def segment(piece: np.ndarray, lane_tag: int, place: TreePlace = place) -> Steps:
            return allreduce_segment(piece, op, place, comm, lane_tag)

        machines += in_lanes(split(half, messages(half.nbytes, nbytes)), segment, tag + len(machines))
    yield from together(machines)
