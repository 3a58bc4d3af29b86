"""Training: `fit` and its callbacks, evaluation, metrics, reports, and the runs of ``hpcdp train``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chrome_trace import traced
    from .sync_batch_norm import SyncBatchNorm
    from .trainer import TrainStep

__all__ = ["SyncBatchNorm", "TrainStep", "traced"]

_HOMES = {"SyncBatchNorm": "sync_batch_norm", "TrainStep": "trainer", "traced": "chrome_trace"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:  # not imported before it is used: the command line asks this package for settings alone
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
