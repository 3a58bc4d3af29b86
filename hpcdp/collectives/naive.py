"""Reference collectives: every rank sends everything to every rank. They specify all other algorithms.

Reductions run in the order of the ranks, 0 first, so all ranks get the same bits. Sent per rank: n - 1 messages of the
rank's whole array (allgather: its shard; broadcast: by the root alone).
"""

from __future__ import annotations

import numpy as np

from ..comm import Communicator, Reduction
from ..comm.communicator import Steps, narrow, reduce_in_order, split


def allreduce(x: np.ndarray, op: Reduction, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm``."""
    inputs = [x if rank == comm.rank else np.empty_like(x) for rank in range(comm.size)]
    yield [comm.irecv(inputs[rank], rank, tag) for rank in _others(comm)] + [
        comm.isend(x, rank, tag) for rank in _others(comm)
    ]
    narrow(reduce_in_order(inputs, op), x)


def reduce_scatter(x: np.ndarray, out: np.ndarray, op: Reduction, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, over all ranks, with this rank's shard in ``out``; ``x`` is overwritten."""
    yield from allreduce(x, op, comm, tag)
    out[...] = split(x, comm.size)[comm.rank]


def allgather(out: np.ndarray, comm: Communicator, tag: int) -> Steps:
    """Complete ``out``, shape ``(count,)``, in which every rank has written its shard."""
    parts = split(out, comm.size)
    yield [comm.irecv(parts[rank], rank, tag) for rank in _others(comm)] + [
        comm.isend(parts[comm.rank], rank, tag) for rank in _others(comm)
    ]


def broadcast(x: np.ndarray, root: int, comm: Communicator, tag: int) -> Steps:
    """Overwrite ``x``, shape ``(count,)``, on all ranks with the values of ``root``."""
    if comm.rank == root:
        yield [comm.isend(x, rank, tag) for rank in _others(comm)]
    else:
        yield [comm.irecv(x, root, tag)]


def reduce(x: np.ndarray, op: Reduction, root: int, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, over all ranks, in place on ``root``; elsewhere it may be overwritten."""
    yield from allreduce(x, op, comm, tag)


def _others(comm: Communicator) -> list[int]:
    return [rank for rank in range(comm.size) if rank != comm.rank]
