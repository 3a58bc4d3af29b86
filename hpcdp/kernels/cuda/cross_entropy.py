"""Softmax and cross-entropy of CuPy arrays, in one launch forward and one back. Imports: cuda.

`reference.cross_entropy` is the specification: same names, same arguments, the same numbers up to the rounding of
``exp`` and ``log``. Of logits of 16 bits chances and losses are float32, and so are the gradients that come back. A
label that is out of range makes the loss and the chances of its row NaN.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Array
from .. import cuda

_KEPT = 8
"""Packs of 16 bytes of a row that a thread keeps; `cross_entropy.cu` says so, too."""


def softmax_cross_entropy(logits: Array, labels: Array, chances: Array, losses: Array) -> None:
    """See `reference.cross_entropy.softmax_cross_entropy`."""
    of_type, (rows, classes) = _checked("softmax_cross_entropy", logits, labels, chances, losses), logits.shape
    packs = -(-classes * chances.itemsize // 16)
    lanes = min(cuda.THREADS, _power_of_two(max(min(packs, 8), -(-packs // _KEPT))))
    blocks = cuda.blocks(rows * lanes)
    scalars = (np.int64(rows), np.int64(classes), np.int32(lanes))
    cuda.launch("cross_entropy", f"softmax_cross_entropy_{of_type}", blocks, logits, labels, chances, losses, *scalars)


def softmax_cross_entropy_gradient(gy: Array, labels: Array, chances: Array, dx: Array) -> None:
    """See `reference.cross_entropy.softmax_cross_entropy_gradient`."""
    of_type = _checked("softmax_cross_entropy_gradient", dx, labels, chances, gy)
    blocks, scalars = cuda.blocks(-(-dx.nbytes // 16)), (np.int64(dx.size), np.int64(dx.shape[1]))
    cuda.launch("cross_entropy", f"softmax_cross_entropy_gradient_{of_type}", blocks, gy, labels, chances, dx, *scalars)


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def _checked(operation: str, x: Array, labels: Array, chances: Array, of_rows: Array) -> str:
    """The last part of a kernel's name for logits ``x``, or their gradient; ``of_rows`` has one number a row."""
    of_type = cuda.type_name(operation, cuda.FLOATS, x.size, x)
    cuda.check(operation, (cuda.wide_type(x),), x.size, chances)
    cuda.check(operation, (cuda.wide_type(x),), x.shape[0], of_rows)
    cuda.check(operation, ("int64",), x.shape[0], labels)
    return of_type
