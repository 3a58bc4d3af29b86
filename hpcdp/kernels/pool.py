"""Average and max pooling of NumPy arrays.

`reference.pool` is the specification, with the same bits: sums are of 0, too, so that none is -0, and add in the same
order, of gradients from the last window to the first. Windows of 2 x 2 without overlap or padding, the usual ones, have
loops of their own that vectorise. Indices are unsigned where Numba would ask of each whether it counts from the end.
"""

from __future__ import annotations

import numba
import numpy as np

from .machine_code import kernel

_FLOATS = (numba.float32, numba.float64)
_PAIR = numba.types.UniTuple(numba.int64, 2)


def _compile(*shapes):  # type: ignore[no-untyped-def]
    """For float32 and float64; a shape is ``f`` (float array) or an array type."""
    signatures = [
        numba.void(*[f[:, :, :, ::1] if each == "f" else each for each in shapes], _PAIR, _PAIR, _PAIR) for f in _FLOATS
    ]
    return kernel(signatures)


@numba.njit(inline="always")
def _plain(kernel, stride, padding):  # type: ignore[no-untyped-def]
    return kernel == (2, 2) and stride == (2, 2) and padding == (0, 0)


@_compile("f", "f")
def average_pool(x, out, kernel, stride, padding):  # type: ignore[no-untyped-def]
    """See `reference.pool.average_pool`."""
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
    """See `reference.pool.average_pool_gradient`."""
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
                    for z in range(dx.shape[3]):  # a slice would make Numba compile what shapes that differ raise
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
    """See `reference.pool.max_pool`."""
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
    """See `reference.pool.max_pool_gradient`."""
    height, width = np.uint64(dx.shape[2]), np.uint64(dx.shape[3])  # what is below 0 is beyond them, unsigned
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
