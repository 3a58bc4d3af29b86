"""Floor 2: autograd, reverse-mode differentiation on a tape. Imports: engine, kernels, streams, devices,
holders, arrays, errors.

Operations on tensors are put on the tape while this thread records, and `backward` runs the tape in reverse (Griewank
and Walther, "Evaluating Derivatives", 2008, chapter 3). The faces are those of MXNet's autograd.
"""

from .arrangement import concatenate, stack
from .asynchronous import asynchronous, waitall
from .modes import is_recording, is_training, pause, predict_mode, record, train_mode
from .operators import maximum, minimum, where
from .tape import Gradient, backward, grad
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
