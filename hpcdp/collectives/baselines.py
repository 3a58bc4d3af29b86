"""The two baselines of each collective: the reference, which specifies all other algorithms, and the MPI library's own.

In the reference every rank sends everything to every rank. Reductions run in the order of the ranks, 0 first, so all
ranks get the same bits. Sent per rank: n - 1 messages of the rank's whole array (allgather: its shard; broadcast: by
the root alone).

The MPI library's collectives block, except the nonblocking allreduce, which all ranks must start in the same order.
16-bit floats are reduced in float32, which MPI supports.
"""

from __future__ import annotations

import numpy as np

from ..comm import Communicator, Reduction, World
from ..comm.communicator import Steps, narrow, reduce_in_order, reducible, split


def reference_allreduce(x: np.ndarray, op: Reduction, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm``."""
    inputs = [x if rank == comm.rank else np.empty_like(x) for rank in range(comm.size)]
    yield [comm.irecv(inputs[rank], rank, tag) for rank in _others(comm)] + [
        comm.isend(x, rank, tag) for rank in _others(comm)
    ]
    narrow(reduce_in_order(inputs, op), x)


def reference_reduce_scatter(x: np.ndarray, out: np.ndarray, op: Reduction, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, over all ranks, with this rank's shard in ``out``; ``x`` is overwritten."""
    yield from reference_allreduce(x, op, comm, tag)
    out[...] = split(x, comm.size)[comm.rank]


def reference_allgather(out: np.ndarray, comm: Communicator, tag: int) -> Steps:
    """Complete ``out``, shape ``(count,)``, in which every rank has written its shard."""
    parts = split(out, comm.size)
    yield [comm.irecv(parts[rank], rank, tag) for rank in _others(comm)] + [
        comm.isend(parts[comm.rank], rank, tag) for rank in _others(comm)
    ]


def reference_broadcast(x: np.ndarray, root: int, comm: Communicator, tag: int) -> Steps:
    """Overwrite ``x``, shape ``(count,)``, on all ranks with the values of ``root``."""
    if comm.rank == root:
        yield [comm.isend(x, rank, tag) for rank in _others(comm)]
    else:
        yield [comm.irecv(x, root, tag)]


def reference_reduce(x: np.ndarray, op: Reduction, root: int, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, over all ranks, in place on ``root``; elsewhere it may be overwritten."""
    yield from reference_allreduce(x, op, comm, tag)


def _others(comm: Communicator) -> list[int]:
    return [rank for rank in range(comm.size) if rank != comm.rank]


def native_allreduce(x: np.ndarray, op: Reduction, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks."""
    total = op.widened(x)
    world.comm.native_allreduce(total, op.of_partial_results().name)
    op.finish(total, world.size, x)


def native_allreduce_steps(x: np.ndarray, op: Reduction, world: World, tag: int) -> Steps:
    """Run `native_allreduce` as a machine."""
    name, total = op.name, reducible(op.widened(x))
    nan = np.isnan(total) if name in ("min", "max") and total.dtype.kind == "f" else None
    started = [world.comm.native_iallreduce(total, op.of_partial_results().name)]
    if nan is not None:  # MPI's minimum and maximum may drop a NaN
        started.append(world.comm.native_iallreduce(nan.view(np.uint8), "max"))
    yield started  # at once: MPI needs the same order of operations on all ranks
    if nan is not None:
        total[nan] = np.nan
    op.finish(total, world.size, x)


def native_reduce_scatter(x: np.ndarray, out: np.ndarray, op: Reduction, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, over all ranks, with this rank's shard in ``out``; ``x`` is overwritten."""
    total = op.widened(x)
    shard = out if total.dtype == out.dtype else np.empty(out.size, total.dtype)
    world.comm.native_reduce_scatter(total, shard, op.of_partial_results().name)
    op.finish(shard, world.size, out)


def native_allgather(out: np.ndarray, world: World) -> None:
    """Complete ``out``, shape ``(count,)``, in which every rank has written its shard."""
    world.comm.native_allgather(out)


def native_broadcast(x: np.ndarray, root: int, world: World) -> None:
    """Overwrite ``x``, shape ``(count,)``, on all ranks with the values of ``root``."""
    world.comm.native_broadcast(x, root)


def native_reduce(x: np.ndarray, op: Reduction, root: int, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, over all ranks, in place on ``root``; elsewhere it may be overwritten."""
    total = op.widened(x)
    world.comm.native_reduce(total, op.of_partial_results().name, root)
    if world.rank == root:
        op.finish(total, world.size, x)
