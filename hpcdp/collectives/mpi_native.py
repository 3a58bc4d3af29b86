"""The MPI library's own collectives; 16-bit floats are reduced in float32, which MPI supports.

They block, except the nonblocking allreduce, which all ranks must start in the same order.
"""

from __future__ import annotations

import numpy as np

from ..comm import Reduction, World
from ..comm.communicator import Steps, reducible


def allreduce(x: np.ndarray, op: Reduction, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks."""
    total = op.widened(x)
    world.comm.native_allreduce(total, op.of_partial_results().name)
    op.finish(total, world.size, x)


def allreduce_steps(x: np.ndarray, op: Reduction, world: World, tag: int) -> Steps:
    """Run `allreduce` as a machine."""
    name, total = op.name, reducible(op.widened(x))
    nan = np.isnan(total) if name in ("min", "max") and total.dtype.kind == "f" else None
    started = [world.comm.native_iallreduce(total, op.of_partial_results().name)]
    if nan is not None:  # MPI's minimum and maximum may drop a NaN
        started.append(world.comm.native_iallreduce(nan.view(np.uint8), "max"))
    yield started  # at once: MPI needs the same order of operations on all ranks
    if nan is not None:
        total[nan] = np.nan
    op.finish(total, world.size, x)


def reduce_scatter(x: np.ndarray, out: np.ndarray, op: Reduction, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, over all ranks, with this rank's shard in ``out``; ``x`` is overwritten."""
    total = op.widened(x)
    shard = out if total.dtype == out.dtype else np.empty(out.size, total.dtype)
    world.comm.native_reduce_scatter(total, shard, op.of_partial_results().name)
    op.finish(shard, world.size, out)


def allgather(out: np.ndarray, world: World) -> None:
    """Complete ``out``, shape ``(count,)``, in which every rank has written its shard."""
    world.comm.native_allgather(out)


def broadcast(x: np.ndarray, root: int, world: World) -> None:
    """Overwrite ``x``, shape ``(count,)``, on all ranks with the values of ``root``."""
    world.comm.native_broadcast(x, root)


def reduce(x: np.ndarray, op: Reduction, root: int, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, over all ranks, in place on ``root``; elsewhere it may be overwritten."""
    total = op.widened(x)
    world.comm.native_reduce(total, op.of_partial_results().name, root)
    if world.rank == root:
        op.finish(total, world.size, x)
