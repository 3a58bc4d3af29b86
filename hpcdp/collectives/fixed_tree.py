"""Allreduce in the order of a fixed binary tree, whoever holds which of its leaves.

The root is the sum of leaves 0 to n - 1, each node that of its two halves, the first of which is the longer one where
they differ. Floating-point addition is not associative, so this order is what makes sums alike: it is the same for
any number of ranks, each of which holds the sums of the fewest nodes that its leaves make up::

    5 leaves       2 ranks       3 ranks
         *            *              *
       *   *        *   A          *   C       A  held by rank 0
      * 2 3 4      A B B B        A B C C      B  by rank 1, which on two ranks holds leaves 2, 3 and 4: two nodes

Rank r owns the r-th part of a segment. Every rank sends its nodes' sums of that part to its owner, who adds them up in
the tree's order and sends the result to everybody.

Sent per rank: 2 (n - 1) messages and (n - 1) (k + 1) S / n bytes for k nodes held; k is 1 where the number of ranks
divides that of leaves and both are powers of two, at worst about 2 log2(leaves).

Source: pairwise summation, as in Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 4.1; the
owners as in `ring` and `compressed`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from ..comm import Communicator, Request
from ..comm.communicator import bounds
from .progress import MESSAGE_NBYTES, Steps, in_lanes, together

Node = tuple[int, int]
"""The first leaf below it, and one after the last."""


def halves(node: Node) -> tuple[Node, Node]:
    """The two nodes below one of several leaves."""
    first, end = node
    middle = (first + end + 1) // 2
    return (first, middle), (middle, end)


def cover(node: Node, leaves: Sequence[int]) -> list[Node]:
    """The fewest nodes below ``node``, or itself, that have exactly ``leaves`` of it below them, in order."""
    first, end = node
    within = [leaf for leaf in leaves if first <= leaf < end]
    if not within:
        return []
    if len(within) == end - first:
        return [node]
    return [each for half in halves(node) for each in cover(half, within)]


def fold(node: Node, sums: Mapping[Node, np.ndarray]) -> dict[Node, np.ndarray]:
    """The sums of the fewest nodes below ``node``, or itself, by those of others, which are added up in place."""
    if node in sums:
        return {node: sums[node]}
    if node[1] - node[0] <= 1:
        return {}
    left, right = halves(node)
    held = fold(left, sums) | fold(right, sums)
    if left in held and right in held:
        total = held[left]
        total += held[right]
        return {node: total}
    return held


def allreduce(
    own: Mapping[Node, np.ndarray],
    held: Sequence[Sequence[Node]],
    root: Node,
    out: np.ndarray,
    comm: Communicator,
    tag: int,
    turn: Request | None = None,
) -> Steps:
    """Write the sum of ``root``'s leaves to ``out``, shape ``(count,)``; segments begin when it is their ``turn``.

    Args:
        own: the sums of this rank's nodes, each of shape ``(count,)``.
        held: for every rank of ``comm`` the nodes that it holds, in order; together they make up ``root``.
    """
    nbytes = next(iter(own.values())).itemsize * max(len(nodes) for nodes in held)
    pieces = max(1, -(-out.size * nbytes // (MESSAGE_NBYTES * comm.size)))
    columns = [slice(*ends) for ends in itertools.pairwise(bounds(out.size, pieces))]

    def segment(part: slice, tag: int) -> Steps:
        return _segment({node: x[part] for node, x in own.items()}, held, root, out[part], comm, tag)

    yield from together(in_lanes(columns, segment, tag, turn=turn))


def _segment(
    own: Mapping[Node, np.ndarray],
    held: Sequence[Sequence[Node]],
    root: Node,
    out: np.ndarray,
    comm: Communicator,
    tag: int,
) -> Steps:
    me, others = comm.rank, [rank for rank in range(comm.size) if rank != comm.rank]
    parts = [slice(*ends) for ends in itertools.pairwise(bounds(out.size, comm.size))]
    dtype = own[held[me][0]].dtype
    sent = {rank: np.concatenate([own[node][parts[rank]] for node in held[me]]) for rank in others}
    size = parts[me].stop - parts[me].start
    received = {rank: np.empty((len(held[rank]), size), dtype) for rank in others}
    sends = [comm.isend(sent[rank], rank, tag) for rank in others]
    yield [*sends, *(comm.irecv(received[rank].reshape(-1), rank, tag) for rank in others)]
    sums = {node: own[node][parts[me]] for node in held[me]}
    for rank in others:
        sums |= dict(zip(held[rank], received[rank], strict=True))
    with np.errstate(over="ignore"):  # of 16 bits: to an infinity, which whoever cares will look for
        out[parts[me]] = fold(root, sums)[root]
    sends = [comm.isend(out[parts[me]], rank, tag) for rank in others]
    yield [*sends, *(comm.irecv(out[parts[rank]], rank, tag) for rank in others)]
