"""Softmax and cross-entropy of CuPy arrays, in one launch forward and one back. Imports: cuda.

`reference_cross_entropy` is the specification: same names, same arguments, the same numbers up to the rounding of
``exp`` and ``log``. A label that is out of range makes the loss and the chances of its row NaN.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from . import cuda

_DTYPES = ("float32", "float64")


def softmax_cross_entropy(logits: Array, labels: Array, chances: Array, losses: Array) -> None:
    """See `reference_cross_entropy.softmax_cross_entropy`."""
    of_type, (rows, classes) = _checked("softmax_cross_entropy", labels, losses, logits, chances), logits.shape
    packs = -(-classes * logits.itemsize // 16)
    lanes = min(cuda.THREADS, 1 << max(0, packs - 1).bit_length())
    blocks = cuda.blocks(rows * lanes)
    scalars = (np.int64(rows), np.int64(classes), np.int32(lanes))
    cuda.launch("cross_entropy", f"softmax_cross_entropy_{of_type}", blocks, logits, labels, chances, losses, *scalars)


def softmax_cross_entropy_gradient(gy: Array, labels: Array, chances: Array, dx: Array) -> None:
    """See `reference_cross_entropy.softmax_cross_entropy_gradient`."""
    of_type = _checked("softmax_cross_entropy_gradient", labels, gy, chances, dx)
    blocks, scalars = cuda.blocks(-(-dx.nbytes // 16)), (np.int64(dx.size), np.int64(dx.shape[1]))
    cuda.launch("cross_entropy", f"softmax_cross_entropy_gradient_{of_type}", blocks, gy, labels, chances, dx, *scalars)


def _checked(operation: str, labels: Array, of_rows: Array, *arrays: Array) -> str:
    """The last part of the kernel's name for ``arrays``, one element of ``of_rows`` and ``labels`` for each row."""
    of_type = cuda.type_name(operation, _DTYPES, arrays[0].size, *arrays)
    cuda.check(operation, (str(arrays[0].dtype),), arrays[0].shape[0], of_rows)
    cuda.check(operation, ("int64",), arrays[0].shape[0], labels)
    return of_type
