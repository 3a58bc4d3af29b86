"""Reference convolution and pooling, in the operations that NumPy and CuPy share.

Images are ``(batch, channels, height, width)``, weights ``(out, in, kernel height, kernel width)``. Pairs ``kernel``,
``stride`` and ``padding`` are (vertical, horizontal); padding is on both sides, of a convolution with zeros. Results
are written into the arrays given for them, all of one float dtype; those must not overlap with the operands.
"""

from __future__ import annotations

from ...core.arrays import Array, array_namespace
from ..cuda.cublas import matmul_of

Pair = tuple[int, int]


def output_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """How many positions a window of ``kernel`` has along an axis of ``size``."""
    return (size + 2 * padding - kernel) // stride + 1


def padded(x: Array, padding: Pair, value: float = 0.0) -> Array:
    """``x`` with ``value`` around it; itself without padding."""
    if padding == (0, 0):
        return x
    (batch, channels, height, width), (top, left) = x.shape, padding
    xp = array_namespace(x)
    wide = xp.full((batch, channels, height + 2 * top, width + 2 * left), value, dtype=x.dtype)
    wide[:, :, top : top + height, left : left + width] = x
    return wide


def window(wide: Array, at: Pair, size: Pair, stride: Pair) -> Array:
    """The view of ``wide`` that element ``at`` of the window sees over all positions."""
    (i, j), (height, width), (down, right) = at, size, stride
    return wide[:, :, i : i + (height - 1) * down + 1 : down, j : j + (width - 1) * right + 1 : right]


def offsets(kernel: Pair) -> list[Pair]:
    """The elements of a window, along its rows."""
    return [(i, j) for i in range(kernel[0]) for j in range(kernel[1])]


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


def average_pool(x: Array, out: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """``out`` becomes the mean of each window, padding counted; changes ``out``."""
    wide = padded(x, padding)
    total = sum(window(wide, at, out.shape[2:], stride) for at in offsets(kernel))
    out[...] = total * (1.0 / (kernel[0] * kernel[1]))


def average_pool_gradient(gy: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """The gradient of `average_pool`; changes ``dx``."""
    xp = array_namespace(gy)
    wide = xp.zeros_like(padded(dx, padding))
    share = gy * (1.0 / (kernel[0] * kernel[1]))
    for at in offsets(kernel):
        part = window(wide, at, gy.shape[2:], stride)
        part += share
    dx[...] = window(wide, padding, dx.shape[2:], (1, 1))


def max_pool(x: Array, out: Array, chosen: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """``out`` becomes the largest element of each window, padding never being it; changes ``out`` and ``chosen``.

    Args:
        chosen: int32, like ``out``: which element of the window it is, counted along its rows; the first of equal ones,
            but the last NaN, which counts as larger than all.
    """
    xp = array_namespace(x)
    wide = padded(x, padding, -xp.inf)
    is_inside = padded(xp.ones((1, 1, *x.shape[2:]), dtype=bool), padding, False)
    out[...] = -xp.inf
    chosen[...] = -1
    for number, at in enumerate(offsets(kernel)):
        part = window(wide, at, out.shape[2:], stride)
        larger = (part > out) | (part != part) | ((chosen < 0) & window(is_inside, at, out.shape[2:], stride))
        chosen[...] = xp.where(larger, xp.asarray(number, dtype=chosen.dtype), chosen)
        out[...] = xp.where(larger, part, out)


def max_pool_gradient(gy: Array, chosen: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """The gradient of `max_pool`; changes ``dx``."""
    xp = array_namespace(gy)
    wide = xp.zeros_like(padded(dx, padding))
    for number, at in enumerate(offsets(kernel)):
        part = window(wide, at, gy.shape[2:], stride)
        part += xp.where(chosen == number, gy, 0)
    dx[...] = window(wide, padding, dx.shape[2:], (1, 1))
