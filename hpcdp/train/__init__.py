"""Training: `fit` and its callbacks, evaluation, metrics, reports, and the runs of ``hpcdp train``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..parallel.functional import SyncBatchNorm
    from . import callbacks, checkpoints, fit, metrics
    from .chrome_trace import traced
    from .trainer import TrainStep

_HOMES = {"SyncBatchNorm": ".parallel.functional", "TrainStep": "trainer", "traced": "chrome_trace"}
"""The modules of the names that are not modules."""

__all__ = [
    "SyncBatchNorm",
    "TrainStep",
    "callbacks",
    "checkpoints",
    "fit",
    "metrics",
    "traced",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    # Imported on first use, because the command line imports this package for the settings only.
    module = importlib.import_module(f".{_HOMES.get(name, name)}", __name__)
    return getattr(module, name) if name in _HOMES else module


def __dir__() -> list[str]:
    return __all__
