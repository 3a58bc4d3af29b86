"""Floor 2: autograd. Imports: kernels, arrays, errors.

Reverse-mode differentiation on a tape, with the words of MXNet's autograd.

- `modes`: whether operations are recorded, and whether layers train or predict.
- `tape`: what was recorded, and running it backward.
- `tensor`: the array that operations are recorded for.
- `operators`: the operations.
"""

from .modes import is_recording, is_training, pause, predict_mode, record, train_mode
from .operators import (
    absolute,
    concatenate,
    exp,
    log,
    maximum,
    minimum,
    relu,
    sigmoid,
    sqrt,
    tanh,
    where,
)
from .tape import backward, grad
from .tensor import Tensor

__all__ = [
    "Tensor",
    "absolute",
    "backward",
    "concatenate",
    "exp",
    "grad",
    "is_recording",
    "is_training",
    "log",
    "maximum",
    "minimum",
    "pause",
    "predict_mode",
    "record",
    "relu",
    "sigmoid",
    "sqrt",
    "tanh",
    "train_mode",
    "where",
]
