"""Softmax and cross-entropy in plain array operations, the specification of `cross_entropy`.

All arrays are contiguous and do not overlap; floats are of one dtype. NumPy arrays have no other kernels for it.
"""

from __future__ import annotations

from ...core.arrays import Array, array_namespace


def softmax_cross_entropy(logits: Array, labels: Array, chances: Array, losses: Array) -> None:
    """``losses = -log(softmax(logits)[label])`` of each row; changes ``chances`` and ``losses``.

    Args:
        logits: shape ``(rows, classes)``.
        labels: int64, shape ``(rows,)``, from 0 to ``classes - 1``.
        chances: like ``logits``: the softmax of each row.
        losses: shape ``(rows,)``.
    """
    xp = array_namespace(logits, labels)
    shifted = logits - logits.max(axis=1, keepdims=True)
    xp.exp(shifted, out=chances)
    total = chances.sum(axis=1)
    xp.subtract(xp.log(total), shifted[xp.arange(labels.size), labels], out=losses)
    xp.divide(chances, total[:, None], out=chances)


def softmax_cross_entropy_gradient(gy: Array, labels: Array, chances: Array, dx: Array) -> None:
    """The gradient of the logits from the gradient ``gy`` of the losses, shape ``(rows,)``; changes ``dx``."""
    xp = array_namespace(gy, chances)
    xp.multiply(chances, gy[:, None], out=dx)
    dx[xp.arange(labels.size), labels] -= gy
