"""Floor 6: train.

Imports: kvstore, checkpoint, gradients, collectives, compression, nn, optim, data, comm, autograd, engine, trace,
archive, state, kernels, streams, devices, holders, replacing, arrays, launched, toml,
errors.

`trainers` make one update of the gradients of all ranks, `TrainStep` a step with forward and backward, `fit` is the
loop around it, `runs` what ``hpcdp train`` does; `traced` writes down who did what when, `SyncBatchNorm` normalises by
the batches of all ranks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sync_batch_norm import SyncBatchNorm
    from .tracing import traced
    from .train_step import TrainStep

__all__ = ["SyncBatchNorm", "TrainStep", "traced"]

_HOMES = {"SyncBatchNorm": "sync_batch_norm", "TrainStep": "train_step", "traced": "tracing"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:  # not imported before it is used: the command line asks this package for settings alone
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
