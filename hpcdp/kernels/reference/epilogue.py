"""Bias and activation after a product or a convolution, in plain array operations, the specification of
`epilogue`.

All arrays are of one float dtype.
"""

from __future__ import annotations

from ...core.arrays import Array, array_namespace, is_half


def add_bias(y: Array, bias: Array, relu: bool) -> None:
    """``y += bias``, then ``max(y, 0)`` if ``relu``; changes ``y``, of shape ``(rows, features)`` or images."""
    xp = array_namespace(y, bias)
    y += bias.reshape(-1, *[1] * (y.ndim - 2))
    if relu:
        xp.maximum(y, 0, out=y)


def relu_gradient(gy: Array, y: Array, dx: Array) -> None:
    """``dx = gy`` where the result ``y`` of ReLU is positive, else 0, whatever ``gy`` is; changes ``dx``; any shape."""
    dx[...] = array_namespace(gy, y).where(y > 0, gy, 0)


def bias_gradient(gy: Array, y: Array | None, dx: Array | None, dbias: Array) -> None:
    """``dbias`` becomes the sum of ``gy``, like what `add_bias` takes, over all axes but the second.

    Args:
        y: None, or the result of ReLU: then `relu_gradient` is written to ``dx``, and summed.
    """
    if y is not None:
        relu_gradient(gy, y, dx)
        gy = dx
    dbias[...] = gy.sum(axis=(0, *range(2, gy.ndim)), dtype="float32" if is_half(gy) else None)
