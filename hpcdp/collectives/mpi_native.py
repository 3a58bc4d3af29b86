"""The MPI library's own collectives; floats of 16 bits go through float32, which MPI knows.

They block, but for the nonblocking allreduce, for which all ranks must start theirs in one order.
"""

from __future__ import annotations

import numpy as np

from ..comm import Reduction, World
from ..comm.communicator import Steps, reducible


def allreduce(x: np.ndarray, op: Reduction, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks."""
    world.comm.native_allreduce(x, op.name)


def allreduce_steps(x: np.ndarray, op: Reduction, world: World, tag: int) -> Steps:
    """`allreduce` as a machine."""
    name, total = op.name, reducible(x)
    nan = np.isnan(total) if name in ("min", "max") and total.dtype.kind == "f" else None
    started = [world.comm.native_iallreduce(total, op.without_mean().name)]
    if nan is not None:  # which MPI's own minimum and maximum may drop
        started.append(world.comm.native_iallreduce(nan.view(np.uint8), "max"))
    yield started  # all in one stage: later ones would meet other operations of MPI in another order on every rank
    if nan is not None:
        total[nan] = np.nan
    op.finish(total, world.size, x)


def reduce_scatter(x: np.ndarray, out: np.ndarray, op: Reduction, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, over all ranks, this rank's part into ``out``; ``x`` is overwritten."""
    world.comm.native_reduce_scatter(x, out, op.name)


def allgather(out: np.ndarray, world: World) -> None:
    """Complete ``out``, shape ``(count,)``, in which every rank has written its own part."""
    world.comm.native_allgather(out)


def broadcast(x: np.ndarray, root: int, world: World) -> None:
    """Overwrite ``x``, shape ``(count,)``, on all ranks with that of ``root``."""
    world.comm.native_broadcast(x, root)


def reduce(x: np.ndarray, op: Reduction, root: int, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, over all ranks, in place on ``root``; elsewhere it may be overwritten."""
    world.comm.native_reduce(x, op.name, root)
