"""Reverse-mode automatic differentiation on a tape.

Operations on tensors are recorded on the tape while the thread records, and `backward` traverses the tape in reverse
(Griewank and Walther, "Evaluating Derivatives", 2008, chapter 3). The interface is that of MXNet's autograd.
"""

from .async_eager import asynchronous, waitall
from .operators import concatenate, maximum, minimum, stack, where
from .tape import Gradient, backward, grad, is_recording, is_training, pause, predict_mode, record, train_mode
from .tensor import Tensor, as_tensor, on_tape

__all__ = [
    "Gradient",
    "Tensor",
    "as_tensor",
    "asynchronous",
    "backward",
    "concatenate",
    "grad",
    "is_recording",
    "is_training",
    "maximum",
    "minimum",
    "on_tape",
    "pause",
    "predict_mode",
    "record",
    "stack",
    "train_mode",
    "waitall",
    "where",
]
