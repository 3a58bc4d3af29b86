"""Floor 5: parallel. Imports: nn, autograd, collectives, comm, kernels, state, replica, arrays, errors.

One model on several ranks: what data parallelism, where every rank has all of it, cannot do.

- `schedules` says in which order the stages of a pipeline compute micro-batches.
- `pipeline` cuts a model into stages on different ranks, or in one process.
- `links` carry activations and their gradients from stage to stage.
- `worlds` says which ranks compute layers together, and which ones have the same part.
- `split` has the layers of which each rank computes a part of the channels.
- `exchanges` are what passes between these, forward and backward.
"""

from .pipeline import Pipeline
from .schedules import SCHEDULES
from .split import ColumnConv2D, ColumnDense, RowConv2D, RowDense
from .worlds import Split, split_world

__all__ = [
    "SCHEDULES",
    "ColumnConv2D",
    "ColumnDense",
    "Pipeline",
    "RowConv2D",
    "RowDense",
    "Split",
    "split_world",
]
