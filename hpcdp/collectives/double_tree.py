"""Allreduce over two binary trees at once, each with half of the array: few steps, and every link in use.

In a binary tree half of the ranks are leaves, which send their array up and get the result, while inner ranks receive
two arrays and send two results. So a second tree, in which the inner ranks are leaves and the leaves inner ranks,
carries the other half, and every rank has the same to do. The first tree numbers its ranks in order, so odd numbers are
leaves; the second is the first with the ranks counted from the end, or, where n is odd, shifted by one::

    0 ------- 4               7 ------- 3           up: sums of segments; down: results of earlier ones
            /   \\                    /   \\
           2     6                  5     1
          / \\   / \\                / \\   / \\
         1   3 5   7              6   4 2   0

Segments follow each other, so the height of a tree, log2 n, costs its latency once, not once a byte.

Sent per rank, for S bytes: S / 2 to each parent and S / 2 to each child; a rank has a parent in each tree (the root of
one none there) and at most two children in both together: at most 2 S.

Source: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; the
trees as in NCCL since version 2.4 (Jeaugey, "Massively scale your deep learning training with NCCL 2.4", 2019).
"""

from __future__ import annotations

import numpy as np

from ..comm import Communicator, Reduction
from ..comm.communicator import split
from .progress import MESSAGE_NBYTES, Steps, in_lanes, segments, together
from .tree import Place, allreduce_segment

SEGMENT_NBYTES = MESSAGE_NBYTES
"""Longer halves go in segments of about so many bytes."""


def in_order(number: int, n: int) -> Place:
    """The place of ``number`` in the first tree over ``n`` ranks."""
    if number == 0:
        return Place(None, (1 << (n - 1).bit_length() - 1,) if n > 1 else ())
    lowest = number & -number
    above = (number ^ lowest) | (lowest << 1)
    parent = above if above < n else number ^ lowest
    half = lowest >> 1
    if not half:
        return Place(parent, ())
    right = half
    while number + right >= n and right:
        right >>= 1
    return Place(parent, (number - half, number + right) if right else (number - half,))


def numbers(rank: int, n: int) -> tuple[int, int]:
    """The numbers of ``rank`` in both trees over ``n`` ranks."""
    return rank, n - 1 - rank if n % 2 == 0 else (rank - 1) % n


def trees(rank: int, n: int) -> tuple[Place, Place]:
    """The places of ``rank`` in both trees over ``n`` ranks."""

    def numbered(number: int) -> int:
        """The rank of this number in the second tree."""
        return n - 1 - number if n % 2 == 0 else (number + 1) % n

    first, second = (in_order(number, n) for number in numbers(rank, n))
    parent = None if second.parent is None else numbered(second.parent)
    return first, Place(parent, tuple(numbered(child) for child in second.children))


def allreduce(x: np.ndarray, op: Reduction, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm``."""
    machines: list[Steps] = []
    for place, half in zip(trees(comm.rank, comm.size), split(x, 2), strict=True):

        def segment(piece: np.ndarray, own_tag: int, place: Place = place) -> Steps:
            return allreduce_segment(piece, op, place, comm, own_tag)

        machines += in_lanes(segments(half, SEGMENT_NBYTES), segment, tag + len(machines))
    yield from together(machines)
