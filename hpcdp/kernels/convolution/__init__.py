"""Convolution and pooling of NumPy arrays, and the choice of the convolution algorithm by shapes.

Functions have the names and arguments of `reference`; all arrays must be C-contiguous. Pooling has its bits:
sums start from 0, so that none is -0, and add in the same order, gradients from the last window to the first. The usual
windows of 2 x 2 without overlap or padding have separate loops that vectorize. Indices are unsigned where Numba would
check each for a negative value.
"""

from __future__ import annotations

import numba
import numpy as np

from .. import empty, load
from ..jit import are_eight, kernel
from . import im2col

_FLOATS = (numba.float32, numba.float64)
_PAIR = numba.types.UniTuple(numba.int64, 2)

Pair = tuple[int, int]

_CHANNELS, _TILES = 16, 32
"""Channels, in and out, and tiles from which Winograd's transforms cost less than they save."""
_POSITIONS, _DEPTH = 64, 16
"""Results per plane, and products per result, from which starting and finishing a sum costs little."""


def _by_winograd(x: np.ndarray, weight: np.ndarray, out: np.ndarray, stride: Pair, padding: Pair) -> bool:
    if x.dtype != np.float32 or weight.shape[2:] != (3, 3) or stride != (1, 1) or max(padding) > 2:
        return False
    batch, _, height, width = out.shape
    tiles, positions = batch * -(-height // 4) * -(-width // 4), batch * height * width
    products_saved = 36 * tiles <= 9 * positions / 2
    return min(weight.shape[:2]) >= _CHANNELS and tiles >= _TILES and products_saved


def _directly(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> bool:
    """Return whether results and the gradient of the weights are computed without unfolding.

    That suits processors for which BLAS packs the unfolded patches once more; with longer vectors it does not
    (`products`). Sums have lanes for eight channels. Each call reorders the weights, so there must be as many positions
    as channels.
    """
    batch, channels, height, width = out.shape
    if x.dtype != np.float32 or height * width < _POSITIONS or batch * height * width < channels:
        return False
    is_deep = channels > 0 and weight[0].size >= _DEPTH
    return is_deep and _fills_lanes(channels) and are_eight()


def _directly_to_input(x: np.ndarray, weight: np.ndarray, out: np.ndarray, stride: Pair) -> bool:
    """Return whether the input's gradient, which has sums at all places of the input, is computed without unfolding."""
    sums = -(-x.shape[2] // stride[0]) * -(-x.shape[3] // stride[1])
    are_wanted = 0 < 3 * sums <= 4 * out.shape[2] * out.shape[3]
    return _directly(x, weight, out) and are_wanted and _fills_lanes(weight.shape[1])


def _fills_lanes(channels: int) -> bool:
    return 4 * channels >= 3 * (-(-channels // 8) * 8)


def conv2d(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    out: np.ndarray,
    stride: Pair,
    padding: Pair,
    relu: bool,
) -> None:
    """See `reference.conv2d`."""
    if _by_winograd(x, weight, out, stride, padding):
        load("convolution.winograd").conv2d(x, weight, bias, out, padding, relu)
    elif _directly(x, weight, out):
        load("convolution.direct").conv2d(x, weight, bias, out, stride, padding, relu)
    else:
        im2col.conv2d(x, weight, bias, out, stride, padding, relu)


def conv2d_gradients(
    x: np.ndarray,
    weight: np.ndarray,
    gy: np.ndarray,
    out: np.ndarray | None,
    into: tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None],
    stride: Pair,
    padding: Pair,
) -> None:
    """See `reference.conv2d_gradients`."""
    by_winograd = _by_winograd(x, weight, gy, stride, padding)
    if not by_winograd and not _directly(x, weight, gy):
        im2col.conv2d_gradients(x, weight, gy, out, into, stride, padding)
        return
    dx, dweight, dbias = into
    if out is not None:
        before_relu = empty(gy.shape, gy.dtype)
        load("networks").relu_gradient(gy, out, before_relu)
        gy = before_relu
    if by_winograd:
        if dx is not None:
            load("convolution.winograd").gradient_of_input(gy, weight, dx, padding)
        if dweight is not None:
            load("convolution.winograd").gradient_of_weight(x, gy, dweight, padding)
    else:
        if dx is not None and _directly_to_input(x, weight, gy, stride):
            load("convolution.direct").gradient_of_input(gy, weight, dx, stride, padding)
        elif dx is not None:
            im2col.conv2d_gradients(x, weight, gy, None, (dx, None, None), stride, padding)
        if dweight is not None:
            load("convolution.direct").gradient_of_weight(x, gy, dweight, stride, padding)
    if dbias is not None:
        dbias[...] = gy.sum(axis=(0, 2, 3))


def _compile(*shapes):  # type: ignore[no-untyped-def]
    """Decorate a kernel for float32 and float64; a shape is ``f`` (float array) or an array type."""
    signatures = [
        numba.void(*[f[:, :, :, ::1] if shape == "f" else shape for shape in shapes], *[_PAIR] * 3) for f in _FLOATS
    ]
    return kernel(signatures)


@numba.njit(inline="always")
def _plain(kernel, stride, padding):  # type: ignore[no-untyped-def]
    return kernel == (2, 2) and stride == (2, 2) and padding == (0, 0)


@_compile("f", "f")
def average_pool(x, out, kernel, stride, padding):  # type: ignore[no-untyped-def]
    """See `reference.average_pool`."""
    share = x.dtype.type(1.0 / (kernel[0] * kernel[1]))
    for n in range(out.shape[0]):
        for c in range(out.shape[1]):
            for y in range(out.shape[2]):
                if _plain(kernel, stride, padding):
                    for z in range(out.shape[3]):
                        upper = x[n, c, 2 * y, 2 * z] + x[n, c, 2 * y, 2 * z + 1]
                        total = upper + x[n, c, 2 * y + 1, 2 * z] + x[n, c, 2 * y + 1, 2 * z + 1]
                        out[n, c, y, z] = (total + x.dtype.type(0)) * share
                    continue
                top = y * stride[0] - padding[0]
                for z in range(out.shape[3]):
                    left = z * stride[1] - padding[1]
                    total = x.dtype.type(0)
                    for i in range(max(0, top), min(top + kernel[0], x.shape[2])):
                        for j in range(max(0, left), min(left + kernel[1], x.shape[3])):
                            total += x[n, c, np.uint64(i), np.uint64(j)]
                    out[n, c, y, z] = total * share


@_compile("f", "f")
def average_pool_gradient(gy, dx, kernel, stride, padding):  # type: ignore[no-untyped-def]
    """See `reference.average_pool_gradient`."""
    share = dx.dtype.type(1.0 / (kernel[0] * kernel[1]))
    for n in range(gy.shape[0]):
        for c in range(gy.shape[1]):
            if _plain(kernel, stride, padding):
                for y in range(gy.shape[2]):
                    for z in range(gy.shape[3]):
                        part = dx.dtype.type(0) + gy[n, c, y, z] * share
                        dx[n, c, 2 * y, 2 * z] = part
                        dx[n, c, 2 * y, 2 * z + 1] = part
                    for z in range(2 * gy.shape[3], dx.shape[3]):
                        dx[n, c, 2 * y, z] = 0
                    for z in range(dx.shape[3]):  # a slice would compile the error for mismatched shapes
                        dx[n, c, 2 * y + 1, z] = dx[n, c, 2 * y, z]
                dx[n, c, 2 * gy.shape[2] :, :] = 0
                continue
            dx[n, c, :, :] = 0
            for y in range(gy.shape[2] - 1, -1, -1):
                for z in range(gy.shape[3] - 1, -1, -1):
                    part = gy[n, c, y, z] * share
                    for i in range(max(0, y * stride[0] - padding[0]), y * stride[0] - padding[0] + kernel[0]):
                        for j in range(max(0, z * stride[1] - padding[1]), z * stride[1] - padding[1] + kernel[1]):
                            if i < dx.shape[2] and j < dx.shape[3]:
                                dx[n, c, i, j] += part


@_compile("f", "f", numba.int32[:, :, :, ::1])
def max_pool(x, out, chosen, kernel, stride, padding):  # type: ignore[no-untyped-def]
    """See `reference.max_pool`."""
    for n in range(out.shape[0]):
        for c in range(out.shape[1]):
            for y in range(out.shape[2]):
                for z in range(out.shape[3]):
                    top, left = y * stride[0] - padding[0], z * stride[1] - padding[1]
                    largest = x.dtype.type(-np.inf)
                    number = max(0, -top) * kernel[1] + max(0, -left)
                    for i in range(max(0, -top), min(kernel[0], x.shape[2] - top)):
                        for j in range(max(0, -left), min(kernel[1], x.shape[3] - left)):
                            value = x[n, c, top + i, left + j]
                            if value > largest or value != value:
                                largest = value
                                number = i * kernel[1] + j
                    out[n, c, y, z] = largest
                    chosen[n, c, y, z] = number


@_compile("f", numba.int32[:, :, :, ::1], "f")
def max_pool_gradient(gy, chosen, dx, kernel, stride, padding):  # type: ignore[no-untyped-def]
    """See `reference.max_pool_gradient`."""
    height, width = np.uint64(dx.shape[2]), np.uint64(dx.shape[3])  # unsigned: negative indices are beyond them
    for n in range(gy.shape[0]):
        for c in range(gy.shape[1]):
            dx[n, c, :, :] = 0
            for y in range(gy.shape[2] - 1, -1, -1):
                for z in range(gy.shape[3] - 1, -1, -1):
                    at = np.uint64(y), np.uint64(z)
                    number = chosen[n, c, at[0], at[1]]
                    i = np.uint64(y * stride[0] - padding[0] + number // kernel[1])
                    j = np.uint64(z * stride[1] - padding[1] + number % kernel[1])
                    if i < height and j < width:
                        dx[n, c, i, j] += gy[n, c, at[0], at[1]]
