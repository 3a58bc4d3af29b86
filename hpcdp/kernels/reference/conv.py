"""Convolution in plain array operations, the specification of `conv`.

Images are ``(batch, channels, height, width)``, weights ``(out, in, kernel height, kernel width)``. Pairs ``kernel``,
``stride`` and ``padding`` are (vertical, horizontal); padding is zeros, on both sides. Results are written into the
arrays given for them, all of one float dtype; those must not overlap with the operands.
"""

from __future__ import annotations

from ...core.arrays import Array, array_namespace
from ..cuda.cublas import matmul_of
from .windows import Pair, offsets, padded, window


def _unfolded(x: Array, kernel: Pair, stride: Pair, padding: Pair, size: Pair) -> Array:
    """Patches (im2col): shape ``(channels * kernel positions, batch * output positions)``."""
    xp = array_namespace(x)
    wide = padded(x, padding)
    patches = xp.stack([window(wide, at, size, stride) for at in offsets(kernel)], axis=0)
    rows = x.shape[1] * kernel[0] * kernel[1]
    return patches.transpose(2, 0, 1, 3, 4).reshape(rows, x.shape[0] * size[0] * size[1])


def conv2d(x: Array, weight: Array, bias: Array | None, out: Array, stride: Pair, padding: Pair, relu: bool) -> None:
    """``out = weight * x + bias``, cross-correlation, followed by ``max(out, 0)`` if ``relu``; changes ``out``.

    Args:
        bias: shape ``(out channels,)``.
    """
    xp = array_namespace(x, weight)
    batch, channels, height, width = out.shape
    columns = _unfolded(x, weight.shape[2:], stride, padding, (height, width))
    product = matmul_of(xp)(weight.reshape(channels, -1), columns).reshape(channels, batch, height, width)
    if bias is not None:
        product = product + bias[:, None, None, None]
    if relu:
        product = xp.maximum(product, 0)
    out[...] = product.transpose(1, 0, 2, 3)


def conv2d_gradients(
    x: Array,
    weight: Array,
    gy: Array,
    out: Array | None,
    into: tuple[Array | None, Array | None, Array | None],
    stride: Pair,
    padding: Pair,
) -> None:
    """The gradients of `conv2d` from the gradient ``gy`` of its result.

    Args:
        out: the result, if it went through ReLU.
        into: where the gradients of ``x``, ``weight`` and bias go; changes those that are not None.
    """
    xp = array_namespace(x, weight)
    dx, dweight, dbias = into
    if out is not None:
        gy = xp.where(out > 0, gy, 0)
    channels, kernel, size = gy.shape[1], weight.shape[2:], gy.shape[2:]
    flat = gy.transpose(1, 0, 2, 3).reshape(channels, x.shape[0] * size[0] * size[1])
    if dbias is not None:
        dbias[...] = flat.sum(axis=1)
    if dweight is not None:
        columns = _unfolded(x, kernel, stride, padding, size)
        dweight[...] = matmul_of(xp)(flat, columns.T).reshape(weight.shape)
    if dx is not None:
        columns = matmul_of(xp)(weight.reshape(channels, -1).T, flat)
        columns = columns.reshape(x.shape[1], len(offsets(kernel)), x.shape[0], *size)
        wide = xp.zeros_like(padded(x, padding))
        for number, at in enumerate(offsets(kernel)):
            part = window(wide, at, size, stride)
            part += columns[:, number].transpose(1, 0, 2, 3)
        dx[...] = window(wide, padding, x.shape[2:], (1, 1))
