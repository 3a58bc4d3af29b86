"""One step of an LSTM, forward and backward, for NumPy arrays.

`reference.sequences` is the specification. Loops write one array each: with more the compiler would have to compare too
many places to be sure that they are apart, and would not use vector registers.
"""

from __future__ import annotations

import numba

from .hyperbolic import tanh
from .machine_code import kernel

_FLOATS = (numba.float32, numba.float64)


@kernel(
    [numba.void(f[::1], f[:, ::1], numba.int64, f[:, :, ::1], f[:, :, ::1], f[:, :, ::1]) for f in _FLOATS],
    fastmath={"contract"},
)
def lstm_step(bias, product, t, gates, cells, inputs):  # type: ignore[no-untyped-def]
    """See `reference.lstm.lstm_step`."""
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


@kernel(
    [
        numba.void(f[:, :, ::1], f[:, :, ::1], f[:, ::1], numba.int64, f[:, :, ::1], f[:, :, ::1], f[:, :, ::1], f[::1])
        for f in _FLOATS
    ],
    fastmath={"contract"},
)
def lstm_step_gradients(gy, dinputs, dcell, t, gates, cells, dgates, dbias):  # type: ignore[no-untyped-def]
    """See `reference.lstm.lstm_step_gradients`."""
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
