"""Floor 0: batch normalisation of NumPy arrays. Imports: numba.

`reference` is the specification. Sums over a plane run in as many lanes as a vector register has (``reassoc``), the
same in every run since those loops store nothing, and are added up in float64.
"""

from __future__ import annotations

import numba
import numpy as np

_FLOATS = (numba.float32, numba.float64)


@numba.njit(
    [
        numba.void(f[:, :, ::1], f[::1], f[::1], f[:, :, ::1], numba.types.UniTuple(f[::1], 2), numba.float64)
        for f in _FLOATS
    ],
    nogil=True,
    cache=True,
    error_model="numpy",
    fastmath={"reassoc", "contract"},
)
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


@numba.njit(
    [
        numba.void(
            f[:, :, ::1],
            f[:, :, ::1],
            f[::1],
            numba.types.UniTuple(f[::1], 2),
            numba.types.Tuple((f[:, :, ::1], f[::1], f[::1])),
            numba.float64,
        )
        for f in _FLOATS
    ],
    nogil=True,
    cache=True,
    error_model="numpy",
    fastmath={"reassoc", "contract"},
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
