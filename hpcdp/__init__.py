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
    from .collectives import Monoid, allgather, allreduce, broadcast, iallreduce, reduce, reduce_scatter
    from .comm.startup import init
    from .comm.world import World
    from .compression import Compression
    from .core import devices
    from .core.devices import Device, cpu, gpu
    from .data_parallel.policy import Policy
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
    "allreduce",
    "autograd",
    "broadcast",
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
    "gpu",
    "iallreduce",
    "init",
    "kernels",
    "kvstore",
    "nn",
    "optim",
    "reduce",
    "reduce_scatter",
    "train",
]

_HOMES = {
    "Compression": "hpcdp.compression",
    "Device": "hpcdp.core.devices",
    "HpcdpError": "hpcdp.errors",
    "Trainer": "hpcdp.train.trainer",
    "Monoid": "hpcdp.collectives",
    "Policy": "hpcdp.data_parallel.policy",
    "World": "hpcdp.comm.world",
    "allgather": "hpcdp.collectives",
    "allreduce": "hpcdp.collectives",
    "broadcast": "hpcdp.collectives",
    "cpu": "hpcdp.core.devices",
    "gpu": "hpcdp.core.devices",
    "iallreduce": "hpcdp.collectives",
    "init": "hpcdp.comm.startup",
    "reduce": "hpcdp.collectives",
    "reduce_scatter": "hpcdp.collectives",
}
"""The modules of the names that are no modules themselves."""


if is_launched():
    from .core.exit import record_exit_status

    record_exit_status()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hpcdp' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        value = importlib.import_module("hpcdp.core.devices" if name == "devices" else f"hpcdp.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
