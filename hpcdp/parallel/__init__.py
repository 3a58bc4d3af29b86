"""One model on several ranks: tensor parallelism and pipelines.

- `tensor_parallel`: layers of which each rank computes a part of the channels.
- `pipeline`: a model cut into stages on different ranks, or in one process.
- `p2p`: activations and their gradients from stage to stage, and which ranks hold which part.
"""

from .p2p import Split, split_world
from .pipeline import SCHEDULES, Pipeline
from .tensor_parallel import ColumnConv2D, ColumnDense, RowConv2D, RowDense

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
