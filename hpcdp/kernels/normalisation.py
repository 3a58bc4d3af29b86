"""Batch and layer normalisation of NumPy arrays.

Functions have the names and arguments of `reference.networks`. Sums over a plane or a row run in as many lanes as a
vector register has (``reassoc``). Their order is the same in every run, because those loops store nothing. Sums of
planes are added in float64.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import float64
from numba.types import Tuple, UniTuple

from .jit import float_kernel

_kernel = partial(float_kernel, fastmath={"reassoc", "contract"})


@_kernel(lambda f: (f[:, :, ::1], f[::1], f[::1], f[:, :, ::1], UniTuple(f[::1], 2), float64))
def batch_norm(x, scale, shift, out, saved, eps):  # type: ignore[no-untyped-def]
    """See `reference.batch_norm`."""
    batch, channels, size = x.shape
    count = batch * size
    for c in range(channels):
        total = 0.0
        for n in range(batch):
            part = x.dtype.type(0)
            for i in range(size):
                part += x[n, c, i]
            total += part
        mean = x.dtype.type(total / count)
        squares = 0.0
        for n in range(batch):
            part = x.dtype.type(0)
            for i in range(size):
                part += (x[n, c, i] - mean) * (x[n, c, i] - mean)
            squares += part
        saved[0][c] = mean
        saved[1][c] = squares / count
        factor = x.dtype.type(scale[c] / np.sqrt(squares / count + eps))
        offset = shift[c]
        for n in range(batch):
            for i in range(size):
                out[n, c, i] = (x[n, c, i] - mean) * factor + offset


@_kernel(
    lambda f: (f[:, :, ::1], f[:, :, ::1], f[::1], UniTuple(f[::1], 2), Tuple((f[:, :, ::1], f[::1], f[::1])), float64)
)
def batch_norm_gradients(gy, x, scale, saved, into, eps):  # type: ignore[no-untyped-def]
    """See `reference.batch_norm_gradients`."""
    dx, dscale, dshift = into
    batch, channels, size = x.shape
    count = batch * size
    for c in range(channels):
        mean = saved[0][c]
        inverse = 1.0 / np.sqrt(saved[1][c] + eps)
        total, product = 0.0, 0.0
        for n in range(batch):
            part, other = x.dtype.type(0), x.dtype.type(0)
            for i in range(size):
                part += gy[n, c, i]
                other += gy[n, c, i] * (x[n, c, i] - mean)
            total += part
            product += other
        dshift[c] = total
        dscale[c] = product * inverse
        factor = x.dtype.type(scale[c] * inverse)
        constant = x.dtype.type(total / count)
        slope = x.dtype.type(product * inverse * inverse / count)
        for n in range(batch):
            for i in range(size):
                dx[n, c, i] = (gy[n, c, i] - constant - (x[n, c, i] - mean) * slope) * factor


@_kernel(lambda f: (f[:, :, ::1], float64[:, ::1]))
def channel_sums(x, sums):  # type: ignore[no-untyped-def]
    """See `reference.channel_sums`."""
    batch, channels, size = x.shape
    for c in range(channels):
        total, squares = 0.0, 0.0
        for n in range(batch):
            for i in range(size):
                value = float64(x[n, c, i])
                total += value
                squares += value * value
        sums[0, c] = total
        sums[1, c] = squares


@_kernel(lambda f: (f[:, :, ::1], f[::1], f[::1], UniTuple(f[::1], 2), f[:, :, ::1], float64))
def normalise(x, scale, shift, saved, out, eps):  # type: ignore[no-untyped-def]
    """See `reference.normalise`."""
    batch, channels, size = x.shape
    for c in range(channels):
        mean = saved[0][c]
        factor = x.dtype.type(scale[c] / np.sqrt(saved[1][c] + eps))
        offset = shift[c]
        for n in range(batch):
            for i in range(size):
                out[n, c, i] = (x[n, c, i] - mean) * factor + offset


@_kernel(lambda f: (f[:, :, ::1], f[:, :, ::1], UniTuple(f[::1], 2), float64[:, ::1], float64))
def gradient_sums(gy, x, saved, sums, eps):  # type: ignore[no-untyped-def]
    """See `reference.gradient_sums`."""
    batch, channels, size = x.shape
    for c in range(channels):
        mean = saved[0][c]
        total, product = 0.0, 0.0
        for n in range(batch):
            part, other = x.dtype.type(0), x.dtype.type(0)
            for i in range(size):
                part += gy[n, c, i]
                other += gy[n, c, i] * (x[n, c, i] - mean)
            total += part
            product += other
        sums[0, c] = total
        sums[1, c] = product / np.sqrt(saved[1][c] + eps)


@_kernel(lambda f: (f[:, :, ::1], f[:, :, ::1], f[::1], UniTuple(f[::1], 2), float64[:, ::1], f[:, :, ::1], float64))
def gradient_of_input(gy, x, scale, saved, means, dx, eps):  # type: ignore[no-untyped-def]
    """See `reference.gradient_of_input`."""
    batch, channels, size = x.shape
    for c in range(channels):
        mean = saved[0][c]
        inverse = 1.0 / np.sqrt(saved[1][c] + eps)
        factor = x.dtype.type(scale[c] * inverse)
        constant = x.dtype.type(means[0, c])
        slope = x.dtype.type(means[1, c] * inverse)
        for n in range(batch):
            for i in range(size):
                dx[n, c, i] = (gy[n, c, i] - constant - (x[n, c, i] - mean) * slope) * factor


@_kernel(lambda f: (f[:, ::1], f[::1], f[::1], f[:, ::1], UniTuple(f[::1], 2), float64))
def layer_norm(x, scale, shift, out, saved, eps):  # type: ignore[no-untyped-def]
    """See `reference.layer_norm`."""
    count = x.shape[1]
    for n in range(x.shape[0]):
        row, into = x[n], out[n]
        total = x.dtype.type(0)
        for j in range(count):
            total += row[j]
        mean = x.dtype.type(total / count)
        squares = x.dtype.type(0)
        for j in range(count):
            squares += (row[j] - mean) * (row[j] - mean)
        inverse = x.dtype.type(1.0 / np.sqrt(squares / count + eps))
        for j in range(count):
            into[j] = (row[j] - mean) * inverse * scale[j] + shift[j]
        saved[0][n] = mean
        saved[1][n] = inverse


@_kernel(lambda f: (f[:, ::1], f[:, ::1], f[::1], UniTuple(f[::1], 2), Tuple((f[:, ::1], f[::1], f[::1]))))
def layer_norm_gradients(gy, x, scale, saved, into):  # type: ignore[no-untyped-def]
    """See `reference.layer_norm_gradients`."""
    dx, dscale, dshift = into
    count = x.shape[1]
    dscale[:] = 0
    dshift[:] = 0
    for n in range(x.shape[0]):
        row, g, to = x[n], gy[n], dx[n]
        mean, inverse = saved[0][n], saved[1][n]
        total, along = x.dtype.type(0), x.dtype.type(0)
        for j in range(count):
            scaled = g[j] * scale[j]
            total += scaled
            along += scaled * (row[j] - mean) * inverse
        total /= count
        along /= count
        for j in range(count):
            dscale[j] += g[j] * (row[j] - mean) * inverse
        for j in range(count):
            dshift[j] += g[j]
        for j in range(count):
            to[j] = (g[j] * scale[j] - total - (row[j] - mean) * inverse * along) * inverse
