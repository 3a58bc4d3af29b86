"""One model on several ranks: tensor parallelism and pipelines.

- `functional`: collectives with gradients, of which other parallel layers can be made; batch normalization over all
  ranks' batches.
- `tensor_parallel`: layers of which each rank computes a part of the channels.
- `pipeline`: a model cut into stages on different ranks, or in one process, and the activations and gradients that pass
  from stage to stage.
"""

from . import functional
from .pipeline import SCHEDULES, Pipeline, Split, split_world
from .tensor_parallel import ColumnConv2D, ColumnDense, RowConv2D, RowDense

__all__ = [
    "SCHEDULES",
    "ColumnConv2D",
    "ColumnDense",
    "Pipeline",
    "RowConv2D",
    "RowDense",
    "Split",
    "functional",
    "split_world",
]
