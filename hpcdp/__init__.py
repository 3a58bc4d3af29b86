"""MPI-native data-parallel training for HPC clusters, on NumPy, CuPy and PyTorch.

Each part is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .core.environment import is_launched

if TYPE_CHECKING:
    from . import (
        autograd,
        checkpoint,
        collectives,
        comm,
        compression,
        data,
        data_parallel,
        engine,
        errors,
        kernels,
        kvstore,
        nn,
        optim,
        train,
    )
    from .collectives import (
        Monoid,
        allgather,
        allgather_object,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        broadcast_object,
        gather,
        gather_object,
        grouped_allgather,
        grouped_allreduce,
        grouped_broadcast,
        grouped_reduce_scatter,
        iallgather,
        iallgather_object,
        iallreduce,
        ialltoall,
        ibarrier,
        ibroadcast,
        ibroadcast_object,
        igather,
        igather_object,
        igrouped_allgather,
        igrouped_allreduce,
        igrouped_broadcast,
        igrouped_reduce_scatter,
        irecv,
        irecv_object,
        ireduce,
        ireduce_scatter,
        iscatter,
        iscatter_object,
        isend,
        isend_object,
        isendrecv,
        recv,
        recv_object,
        reduce,
        reduce_scatter,
        scatter,
        scatter_object,
        send,
        send_object,
        sendrecv,
    )
    from .comm.startup import init
    from .comm.world import World
    from .compression import Compression
    from .core import arrays as devices
    from .core.arrays import Device, cpu, gpu
    from .data_parallel.gradient_policy import Policy
    from .errors import HpcdpError
    from .train.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Compression",
    "Device",
    "HpcdpError",
    "Monoid",
    "Policy",
    "Trainer",
    "World",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "autograd",
    "barrier",
    "broadcast",
    "broadcast_object",
    "checkpoint",
    "collectives",
    "comm",
    "compression",
    "cpu",
    "data",
    "data_parallel",
    "devices",
    "engine",
    "errors",
    "gather",
    "gather_object",
    "gpu",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_broadcast",
    "grouped_reduce_scatter",
    "iallgather",
    "iallgather_object",
    "iallreduce",
    "ialltoall",
    "ibarrier",
    "ibroadcast",
    "ibroadcast_object",
    "igather",
    "igather_object",
    "igrouped_allgather",
    "igrouped_allreduce",
    "igrouped_broadcast",
    "igrouped_reduce_scatter",
    "init",
    "irecv",
    "irecv_object",
    "ireduce",
    "ireduce_scatter",
    "iscatter",
    "iscatter_object",
    "isend",
    "isend_object",
    "isendrecv",
    "kernels",
    "kvstore",
    "nn",
    "optim",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
    "sendrecv",
    "train",
]

_HOMES = {
    "Compression": "hpcdp.compression",
    "Device": "hpcdp.core.arrays",
    "HpcdpError": "hpcdp.errors",
    "Monoid": "hpcdp.collectives",
    "Policy": "hpcdp.data_parallel.gradient_policy",
    "Trainer": "hpcdp.train.trainer",
    "World": "hpcdp.comm.world",
    "allgather": "hpcdp.collectives",
    "allgather_object": "hpcdp.collectives",
    "allreduce": "hpcdp.collectives",
    "alltoall": "hpcdp.collectives",
    "barrier": "hpcdp.collectives",
    "broadcast": "hpcdp.collectives",
    "broadcast_object": "hpcdp.collectives",
    "cpu": "hpcdp.core.arrays",
    "gather": "hpcdp.collectives",
    "gather_object": "hpcdp.collectives",
    "gpu": "hpcdp.core.arrays",
    "grouped_allgather": "hpcdp.collectives",
    "grouped_allreduce": "hpcdp.collectives",
    "grouped_broadcast": "hpcdp.collectives",
    "grouped_reduce_scatter": "hpcdp.collectives",
    "iallgather": "hpcdp.collectives",
    "iallgather_object": "hpcdp.collectives",
    "iallreduce": "hpcdp.collectives",
    "ialltoall": "hpcdp.collectives",
    "ibarrier": "hpcdp.collectives",
    "ibroadcast": "hpcdp.collectives",
    "ibroadcast_object": "hpcdp.collectives",
    "igather": "hpcdp.collectives",
    "igather_object": "hpcdp.collectives",
    "igrouped_allgather": "hpcdp.collectives",
    "igrouped_allreduce": "hpcdp.collectives",
    "igrouped_broadcast": "hpcdp.collectives",
    "igrouped_reduce_scatter": "hpcdp.collectives",
    "init": "hpcdp.comm.startup",
    "irecv": "hpcdp.collectives",
    "irecv_object": "hpcdp.collectives",
    "ireduce": "hpcdp.collectives",
    "ireduce_scatter": "hpcdp.collectives",
    "iscatter": "hpcdp.collectives",
    "iscatter_object": "hpcdp.collectives",
    "isend": "hpcdp.collectives",
    "isend_object": "hpcdp.collectives",
    "isendrecv": "hpcdp.collectives",
    "recv": "hpcdp.collectives",
    "recv_object": "hpcdp.collectives",
    "reduce": "hpcdp.collectives",
    "reduce_scatter": "hpcdp.collectives",
    "scatter": "hpcdp.collectives",
    "scatter_object": "hpcdp.collectives",
    "send": "hpcdp.collectives",
    "send_object": "hpcdp.collectives",
    "sendrecv": "hpcdp.collectives",
}
"""The modules of the names that are no modules themselves."""


if is_launched():
    from .core.environment import record_exit_status

    record_exit_status()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hpcdp' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        value = importlib.import_module("hpcdp.core.arrays" if name == "devices" else f"hpcdp.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
