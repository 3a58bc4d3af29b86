"""Allreduce over several rings at once, each with a part of the array.

Two directions of one ring use both directions of every link between neighbours. A machine whose links form several
rings that share none, such as eight GPUs with

    0-1-2-3-4-5-6-7   and   0-3-5-2-4-7-1-6

uses all its links when every ring carries a part as large as its links are fast.

Sent per rank, for S bytes over r rings: 2 r (n - 1) messages, 2 (n - 1) / n S in all.

Source: Wang et al., "Blink: Fast and generic collectives for distributed ML", 2020, section 2; the two rings are those
of Zhang et al., "Dive into Deep Learning", section 13.7, "Ring synchronization", there numbered from 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..comm import Communicator, Reduction
from ..errors import UnsupportedError
from .progress import LANES, TAGS, Steps, together
from .ring import Ring, lanes


def allreduce(
    x: np.ndarray,
    op: Reduction,
    comm: Communicator,
    tag: int,
    orders: Sequence[Sequence[int]],
    weights: Sequence[float] | None = None,
) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm``.

    Args:
        orders: for every ring the ranks in the order in which it visits them; the same on all ranks.
        weights: which share of the array each ring carries, relative to the others; equal ones by default.

    Raises:
        UnsupportedError: an order that does not visit every rank once, or weights that do not fit the orders.
    """
    shares = np.ones(len(orders)) if weights is None else np.asarray(weights, float)
    _check(orders, shares, comm.size)
    ends = np.rint(np.cumsum([0.0, *shares]) / shares.sum() * x.size).astype(np.int64)
    most = max(1, min(LANES, TAGS // len(orders)))
    machines: list[Steps] = []
    for number, order in enumerate(orders):
        part = x[ends[number] : ends[number + 1]]
        machines += lanes(part, op, Ring.through(comm, order), tag + number * most, most)
    yield from together(machines)


def both_ways(x: np.ndarray, op: Reduction, comm: Communicator, tag: int) -> Steps:
    """Allreduce over the ring of all ranks, half of ``x`` each way."""
    clockwise = list(range(comm.size))
    yield from allreduce(x, op, comm, tag, [clockwise, clockwise[::-1]])


def _check(orders: Sequence[Sequence[int]], weights: np.ndarray, n: int) -> None:
    for order in orders:
        if sorted(order) != list(range(n)):
            raise UnsupportedError(
                "allreduce", where="orders", expected=f"every rank from 0 to {n - 1} once", got=list(order)
            )
    fit = 1 <= len(orders) <= TAGS and weights.shape == (len(orders),) and np.isfinite(weights).all()
    if not fit or (weights < 0).any() or not weights.any():
        raise UnsupportedError(
            "allreduce", where="weights",
            expected=f"a positive number for each of 1 to {TAGS} rings", got=f"{weights.tolist()} for {len(orders)}",
        )  # fmt: skip
