"""Floor 8: the public face. Imports: every room, each only when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import exits
from .launched import is_launched

if TYPE_CHECKING:
    from hpcdp import (
        autograd,
        checkpoint,
        collectives,
        comm,
        compression,
        data,
        devices,
        engine,
        errors,
        gradients,
        kernels,
        kvstore,
        nn,
        optim,
        train,
    )
    from hpcdp.collectives import Monoid, allgather, allreduce, broadcast, iallreduce, reduce, reduce_scatter
    from hpcdp.comm.starting import init
    from hpcdp.comm.world import World
    from hpcdp.compression import Compression
    from hpcdp.devices import Device, cpu, gpu
    from hpcdp.errors import HpcdpError
    from hpcdp.train.trainers.policy import Policy
    from hpcdp.train.trainers.trainer import Trainer

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
    "devices",
    "engine",
    "errors",
    "gpu",
    "gradients",
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
    "Device": "hpcdp.devices",
    "HpcdpError": "hpcdp.errors",
    "Trainer": "hpcdp.train.trainers.trainer",
    "Monoid": "hpcdp.collectives",
    "Policy": "hpcdp.train.trainers.policy",
    "World": "hpcdp.comm.world",
    "allgather": "hpcdp.collectives",
    "allreduce": "hpcdp.collectives",
    "broadcast": "hpcdp.collectives",
    "cpu": "hpcdp.devices",
    "gpu": "hpcdp.devices",
    "iallreduce": "hpcdp.collectives",
    "init": "hpcdp.comm.starting",
    "reduce": "hpcdp.collectives",
    "reduce_scatter": "hpcdp.collectives",
}
"""The modules of the names that are no modules themselves."""


if is_launched():
    exits.note()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hpcdp' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        value = importlib.import_module(f"hpcdp.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
