"""Floor 0: one step of an LSTM, forward and backward, for NumPy arrays. Imports: numba.

`reference_sequences` is the specification. Loops write one array each: with more the compiler would have to compare too
many places to be sure that they are apart, and would not use vector registers.
"""

from __future__ import annotations

import numba

from .hyperbolic import tanh

_FLOATS = (numba.float32, numba.float64)
_BLOCK = 128
"""Rows that are read across at a time: as many as the innermost cache holds of batches of 64."""


@numba.njit(
    [numba.void(f[:, :, ::1], f[:, ::1], numba.int64, f[:, :, ::1], f[:, :, ::1], f[:, ::1]) for f in _FLOATS],
    nogil=True,
    cache=True,
    error_model="numpy",
    fastmath={"contract"},
)
def lstm_step(gates, recurrent, t, cells, out, hidden):  # type: ignore[no-untyped-def]
    """See `reference_sequences.lstm_step`."""
    size = hidden.shape[1]
    half = gates.dtype.type(0.5)
    for first in range(0, 4 * size, _BLOCK):
        last = min(first + _BLOCK, 4 * size)
        part = recurrent[first:last]
        for b in range(gates.shape[0]):
            row = gates[b, t, first:last]
            for j in range(row.size):
                row[j] += part[j, b]
    for b in range(gates.shape[0]):
        for number in range(4):
            gate = gates[b, t, number * size : (number + 1) * size]
            if number == 2:
                for j in range(size):
                    gate[j] = tanh(gate[j])
            else:
                for j in range(size):
                    gate[j] = half * tanh(half * gate[j]) + half
        for j in range(size):
            cells[b, t + 1, j] = gates[b, t, j] * gates[b, t, 2 * size + j] + gates[b, t, size + j] * cells[b, t, j]
        for j in range(size):
            hidden[b, j] = gates[b, t, 3 * size + j] * tanh(cells[b, t + 1, j])
        for j in range(size):
            out[b, t, j] = hidden[b, j]


@numba.njit(
    [
        numba.void(f[:, :, ::1], f[:, ::1], f[:, ::1], numba.int64, f[:, :, ::1], f[:, :, ::1], f[:, :, ::1], f[:, ::1])
        for f in _FLOATS
    ],
    nogil=True,
    cache=True,
    error_model="numpy",
    fastmath={"contract"},
)
def lstm_step_gradients(gy, dhidden, dcell, t, gates, cells, dgates, now):  # type: ignore[no-untyped-def]
    """See `reference_sequences.lstm_step_gradients`."""
    size = dhidden.shape[1]
    one = gates.dtype.type(1)
    for b in range(gates.shape[0]):
        for j in range(size):
            dhidden[b, j] += gy[b, t, j]
        for j in range(size):
            o = gates[b, t, 3 * size + j]
            now[b, 3 * size + j] = dhidden[b, j] * tanh(cells[b, t + 1, j]) * o * (one - o)
        for j in range(size):
            y = tanh(cells[b, t + 1, j])
            dcell[b, j] += dhidden[b, j] * gates[b, t, 3 * size + j] * (one - y * y)
        for j in range(size):
            i = gates[b, t, j]
            now[b, j] = dcell[b, j] * gates[b, t, 2 * size + j] * i * (one - i)
        for j in range(size):
            f = gates[b, t, size + j]
            now[b, size + j] = dcell[b, j] * cells[b, t, j] * f * (one - f)
        for j in range(size):
            g = gates[b, t, 2 * size + j]
            now[b, 2 * size + j] = dcell[b, j] * gates[b, t, j] * (one - g * g)
        for j in range(size):
            dcell[b, j] *= gates[b, t, size + j]
        for j in range(4 * size):
            dgates[b, t, j] = now[b, j]
