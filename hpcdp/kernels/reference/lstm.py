"""The steps of an LSTM in plain array operations, the specification of `lstm`.

Results are written into the arrays given for them, all of one float dtype.
"""

from __future__ import annotations

from ...core.arrays import Array, array_namespace


def lstm_step(bias: Array, product: Array, t: int, gates: Array, cells: Array, inputs: Array) -> None:
    """One step of an LSTM (Hochreiter and Schmidhuber 1997; with forget gates, Gers, Schmidhuber and Cummins 2000).

    Arrays of all steps begin with time, so that what a step takes lies together.

    Args:
        bias: ``(4 size,)``, of the input, forget, candidate and output gates.
        product: ``(batch, 4 size)``, ``inputs[t]`` times the weights.
        gates: ``(time, batch, 4 size)``, of which ``t``, the values of the gates, is written.
        cells: ``(time + 1, batch, size)``; ``t`` is read and ``t + 1`` written.
        inputs: ``(time + 1, batch, features + size)``, of each step what it is given and the hidden values of the step
            before; the hidden values of this one are written at ``t + 1``.
    """
    xp = array_namespace(gates, bias)
    size = cells.shape[2]
    total = product + bias
    i, f, o = (0.5 * xp.tanh(0.5 * total[:, k * size : (k + 1) * size]) + 0.5 for k in (0, 1, 3))
    g = xp.tanh(total[:, 2 * size : 3 * size])
    gates[t] = xp.concatenate([i, f, g, o], axis=1)
    cells[t + 1] = i * g + f * cells[t]
    inputs[t + 1, :, -size:] = o * xp.tanh(cells[t + 1])


def lstm_step_gradients(
    gy: Array, dinputs: Array, dcell: Array, t: int, gates: Array, cells: Array, dgates: Array, dbias: Array
) -> None:
    """The gradients of `lstm_step`.

    Args:
        gy: ``(batch, time, size)``, of the hidden values from outside of the LSTM.
        dinputs: of ``inputs``; ``gy`` at ``t`` is added to that of the hidden values at ``t + 1``.
        dcell: ``(batch, size)``, of the cells after this step; becomes that of the cells before it.
        dgates: at ``t`` the gradient of the gates before their activation; written.
        dbias: the same, summed over the batch, is added to it.
    """
    xp = array_namespace(gy, gates)
    size = dcell.shape[1]
    i, f, g, o = (gates[t, :, k * size : (k + 1) * size] for k in range(4))
    dhidden = dinputs[t + 1, :, -size:]
    dhidden += gy[:, t]
    y = xp.tanh(cells[t + 1])
    dcell += dhidden * o * (1 - y * y)
    parts = [
        dcell * g * i * (1 - i),
        dcell * cells[t] * f * (1 - f),
        dcell * i * (1 - g * g),
        dhidden * y * o * (1 - o),
    ]
    dgates[t] = xp.concatenate(parts, axis=1)
    dbias += dgates[t].sum(axis=0)
    dcell *= f
