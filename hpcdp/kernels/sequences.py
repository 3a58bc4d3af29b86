"""Kernels of sequence networks for NumPy arrays: causal softmax, LSTM, additions to rows of a table.

Functions have the names and arguments of `reference.networks`. Cross-entropy is the reference's, because NumPy is as
fast. Sums over a row run in as many lanes as a vector register has (``reassoc``), the same in every run. Loops of an
LSTM write one array each: with more the compiler would not vectorise, because it would need too many alias checks.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from .elementwise import tanh
from .jit import float_kernel
from .reference import networks
from .reference.networks import softmax_cross_entropy as softmax_cross_entropy
from .reference.networks import softmax_cross_entropy_gradient as softmax_cross_entropy_gradient

_LANES = {"reassoc", "contract"}


@float_kernel(lambda f: (f[:, :, ::1], numba.float64))
def causal_shift(scores, factor):  # type: ignore[no-untyped-def]
    """See `reference.causal_shift`."""
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


@float_kernel(lambda f: (f[:, :, ::1],), fastmath=_LANES)
def normalise_rows(chances):  # type: ignore[no-untyped-def]
    """See `reference.normalise_rows`."""
    for n in range(chances.shape[0]):
        for i in range(chances.shape[1]):
            row = chances[n, i]
            total = chances.dtype.type(0)
            for j in range(row.size):
                total += row[j]
            by = chances.dtype.type(1) / total
            for j in range(row.size):
                row[j] *= by


@float_kernel(lambda f: (f[:, :, ::1], f[:, :, ::1], numba.float64), fastmath=_LANES)
def softmax_gradient(chances, gradients, factor):  # type: ignore[no-untyped-def]
    """See `reference.softmax_gradient`."""
    by = chances.dtype.type(factor)
    for n in range(chances.shape[0]):
        for i in range(chances.shape[1]):
            row, to = chances[n, i], gradients[n, i]
            along = chances.dtype.type(0)
            for j in range(row.size):
                along += row[j] * to[j]
            for j in range(row.size):
                to[j] = row[j] * (to[j] - along) * by


@float_kernel(
    lambda f: (f[::1], f[:, ::1], numba.int64, f[:, :, ::1], f[:, :, ::1], f[:, :, ::1]), fastmath={"contract"}
)
def lstm_step(bias, product, t, gates, cells, inputs):  # type: ignore[no-untyped-def]
    """See `reference.lstm_step`."""
    size = cells.shape[2]
    first_hidden = inputs.shape[2] - size
    half = gates.dtype.type(0.5)
    for b in range(gates.shape[1]):
        for number in range(4):
            first, end = number * size, (number + 1) * size
            gate, total, offset = gates[t, b, first:end], product[b, first:end], bias[first:end]
            if number == 2:
                for j in range(size):
                    gate[j] = tanh(total[j] + offset[j])
            else:
                for j in range(size):
                    gate[j] = half * tanh(half * (total[j] + offset[j])) + half
        for j in range(size):
            cells[t + 1, b, j] = gates[t, b, j] * gates[t, b, 2 * size + j] + gates[t, b, size + j] * cells[t, b, j]
        for j in range(size):
            inputs[t + 1, b, first_hidden + j] = gates[t, b, 3 * size + j] * tanh(cells[t + 1, b, j])


@float_kernel(
    lambda f: (f[:, :, ::1], f[:, :, ::1], f[:, ::1], numba.int64, f[:, :, ::1], f[:, :, ::1], f[:, :, ::1], f[::1]),
    fastmath={"contract"},
)
def lstm_step_gradients(gy, dinputs, dcell, t, gates, cells, dgates, dbias):  # type: ignore[no-untyped-def]
    """See `reference.lstm_step_gradients`."""
    size = dcell.shape[1]
    one = gates.dtype.type(1)
    for b in range(gates.shape[1]):
        dhidden = dinputs[t + 1, b, dinputs.shape[2] - size :]
        for j in range(size):
            dhidden[j] += gy[b, t, j]
        for j in range(size):
            dgates[t, b, 3 * size + j] = tanh(cells[t + 1, b, j])
        for j in range(size):
            y = dgates[t, b, 3 * size + j]
            dcell[b, j] += dhidden[j] * gates[t, b, 3 * size + j] * (one - y * y)
        for j in range(size):
            i = gates[t, b, j]
            dgates[t, b, j] = dcell[b, j] * gates[t, b, 2 * size + j] * i * (one - i)
        for j in range(size):
            f = gates[t, b, size + j]
            dgates[t, b, size + j] = dcell[b, j] * cells[t, b, j] * f * (one - f)
        for j in range(size):
            g = gates[t, b, 2 * size + j]
            dgates[t, b, 2 * size + j] = dcell[b, j] * gates[t, b, j] * (one - g * g)
        for j in range(size):
            o = gates[t, b, 3 * size + j]
            dgates[t, b, 3 * size + j] *= dhidden[j] * o * (one - o)
        for j in range(size):
            dcell[b, j] *= gates[t, b, size + j]
        for j in range(4 * size):
            dbias[j] += dgates[t, b, j]


@float_kernel(lambda f: (f[:, ::1], numba.int64[::1], f[:, ::1]))
def add_rows(table, rows, values):  # type: ignore[no-untyped-def]
    """See `reference.add_rows`."""
    for k in range(rows.size):
        row, value = table[rows[k]], values[k]
        for j in range(row.size):
            row[j] += value[j]


def add_at(table: np.ndarray, key: Any, values: np.ndarray) -> None:
    """See `reference.add_at`; NumPy adds in order."""
    networks.add_at(table, key, values)
