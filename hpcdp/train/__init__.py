"""Floor 6: train.

Imports: kvstore, checkpoint, gradients, collectives, compression, nn, optim, data, comm, autograd, engine, trace,
archive, state, kernels, arrays, errors.

`trainer` makes one update of the gradients of all ranks, `fit` is the loop around it, `run` what ``hpcdp train`` does;
`traced` writes down who did what when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tracing import traced

__all__ = ["traced"]


def __getattr__(name: str) -> Any:
    if name == "traced":  # not imported before it is used: the command line asks this package for settings alone
        from .tracing import traced

        return traced
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
