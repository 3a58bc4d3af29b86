"""Allreduce by sending everything to everybody: slow, short, and the specification of all others.

The order of the reduction is that of the ranks, 0 first, so all ranks get the same bits.
Sent per rank: ``n - 1`` messages, ``(n - 1) * nbytes`` bytes.
"""

from __future__ import annotations

import numpy as np

from ..comm import World
from ..comm.communicator import reduce_in_order


def allreduce(x: np.ndarray, op: str, world: World) -> None:
    """Reduce the contiguous host array ``x`` in place over all ranks. Any op, any numeric dtype, any world."""
    comm = world.comm
    inputs = [x if rank == comm.rank else np.empty_like(x) for rank in range(comm.size)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    requests = [comm.irecv(inputs[rank], rank) for rank in others] + [comm.isend(x, rank) for rank in others]
    for request in requests:
        request.wait()
    x[...] = reduce_in_order(inputs, op)
