"""Layer normalisation, GELU and causal softmax of NumPy arrays.

`reference.sequences` is the specification. Sums over a row run in as many lanes as a vector register has (``reassoc``),
the same in every run.
"""

from __future__ import annotations

import numba
import numpy as np

from . import hyperbolic
from .hyperbolic import GELU_CUBE, GELU_SLOPE
from .machine_code import kernel

_FLOATS = (numba.float32, numba.float64)
_LANES = {"reassoc", "contract"}


@kernel(
    [numba.void(f[:, ::1], f[::1], f[::1], f[:, ::1], numba.types.UniTuple(f[::1], 2), numba.float64) for f in _FLOATS],
    fastmath=_LANES,
)
def layer_norm(x, scale, shift, out, saved, eps):  # type: ignore[no-untyped-def]
    """See `reference.sequences.layer_norm`."""
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


@kernel(
    [
        numba.void(
            f[:, ::1], f[:, ::1], f[::1], numba.types.UniTuple(f[::1], 2),
            numba.types.Tuple((f[:, ::1], f[::1], f[::1])),
        )
        for f in _FLOATS
    ],
    fastmath=_LANES,
)  # fmt: skip
def layer_norm_gradients(gy, x, scale, saved, into):  # type: ignore[no-untyped-def]
    """See `reference.sequences.layer_norm_gradients`."""
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


@kernel([numba.void(f[::1], f[::1]) for f in _FLOATS])
def _gelu(x, out):  # type: ignore[no-untyped-def]
    kind = x.dtype.type
    half, one, slope, cube = kind(0.5), kind(1), kind(GELU_SLOPE), kind(GELU_CUBE)
    for i in range(x.size):
        out[i] = hyperbolic.gelu(x[i], half, one, slope, cube)


def gelu(x: np.ndarray, out: np.ndarray) -> None:
    """See `reference.sequences.gelu`; the arrays must be C-contiguous."""
    _gelu(x.reshape(-1), out.reshape(-1))


@kernel([numba.void(f[::1], f[::1], f[::1]) for f in _FLOATS])
def _gelu_gradient(gy, x, dx):  # type: ignore[no-untyped-def]
    kind = x.dtype.type
    half, one, slope, cube = kind(0.5), kind(1), kind(GELU_SLOPE), kind(GELU_CUBE)
    for i in range(x.size):
        dx[i] = hyperbolic.gelu_gradient(gy[i], x[i], half, one, slope, cube)


def gelu_gradient(gy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """See `reference.sequences.gelu_gradient`; the arrays must be C-contiguous."""
    _gelu_gradient(gy.reshape(-1), x.reshape(-1), dx.reshape(-1))


@kernel([numba.void(f[:, :, ::1], numba.float64) for f in _FLOATS])
def causal_shift(scores, factor):  # type: ignore[no-untyped-def]
    """See `reference.sequences.causal_shift`."""
    by = scores.dtype.type(factor)
    for n in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            row = scores[n, i]
            largest = row[0] * by
            for j in range(i + 1):
                row[j] *= by
                if row[j] > largest or np.isnan(row[j]):
                    largest = row[j]
            for j in range(i + 1):
                row[j] -= largest
            for j in range(i + 1, row.size):
                row[j] = -np.inf


@kernel([numba.void(f[:, :, ::1]) for f in _FLOATS], fastmath=_LANES)
def normalise_rows(chances):  # type: ignore[no-untyped-def]
    """See `reference.sequences.normalise_rows`."""
    for n in range(chances.shape[0]):
        for i in range(chances.shape[1]):
            row = chances[n, i]
            total = chances.dtype.type(0)
            for j in range(row.size):
                total += row[j]
            by = chances.dtype.type(1) / total
            for j in range(row.size):
                row[j] *= by


@kernel(
    [numba.void(f[:, :, ::1], f[:, :, ::1], numba.float64) for f in _FLOATS],
    fastmath=_LANES,
)
def softmax_gradient(chances, gradients, factor):  # type: ignore[no-untyped-def]
    """See `reference.sequences.softmax_gradient`."""
    by = chances.dtype.type(factor)
    for n in range(chances.shape[0]):
        for i in range(chances.shape[1]):
            row, to = chances[n, i], gradients[n, i]
            along = chances.dtype.type(0)
            for j in range(row.size):
                along += row[j] * to[j]
            for j in range(row.size):
                to[j] = row[j] * (to[j] - along) * by
