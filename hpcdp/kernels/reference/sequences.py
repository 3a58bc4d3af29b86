"""Reference operations of networks on sequences: attention, LSTM, embedding, cross-entropy.

Sequences are ``(batch, time, features)``. Results are written into the arrays given for them, all contiguous and of one
float dtype; those must not overlap with the operands. What is added to one row of a table is added in the order in
which it is given, so the same run has the same bits again.
"""

from __future__ import annotations

from typing import Any

from ...core.arrays import Array, array_namespace


def causal_shift(scores: Array, factor: float) -> None:
    """Row i of each matrix times ``factor``, less its largest among the first i + 1, and minus infinity after them.

    Args:
        scores: ``(matrices, time, time)``; changed.
    """
    xp = array_namespace(scores)
    time = scores.shape[-1]
    later = xp.arange(time)[None, :] > xp.arange(time)[:, None]
    scores *= factor
    scores[...] = xp.where(later, -xp.inf, scores)
    scores -= scores.max(axis=-1, keepdims=True)


def normalise_rows(chances: Array) -> None:
    """Each row over its sum; ``chances``, ``(matrices, time, time)``, is changed."""
    chances /= chances.sum(axis=-1, keepdims=True)


def softmax_gradient(chances: Array, gradients: Array, factor: float) -> None:
    """The gradient before a softmax over rows, times ``factor``, of that after it, in place of ``gradients``."""
    along = (gradients * chances).sum(axis=-1, keepdims=True)
    gradients[...] = chances * (gradients - along) * factor


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


def softmax_cross_entropy(logits: Array, labels: Array, chances: Array, losses: Array) -> None:
    """``losses = -log(softmax(logits)[label])`` of each row; changes ``chances`` and ``losses``.

    Args:
        logits: shape ``(rows, classes)``.
        labels: int64, shape ``(rows,)``, from 0 to ``classes - 1``.
        chances: like ``logits``: the softmax of each row.
        losses: shape ``(rows,)``.
    """
    xp = array_namespace(logits, labels)
    shifted = logits - logits.max(axis=1, keepdims=True)
    xp.exp(shifted, out=chances)
    total = chances.sum(axis=1)
    xp.subtract(xp.log(total), shifted[xp.arange(labels.size), labels], out=losses)
    xp.divide(chances, total[:, None], out=chances)


def softmax_cross_entropy_gradient(gy: Array, labels: Array, chances: Array, dx: Array) -> None:
    """The gradient of the logits from the gradient ``gy`` of the losses, shape ``(rows,)``; changes ``dx``."""
    xp = array_namespace(gy, chances)
    xp.multiply(chances, gy[:, None], out=dx)
    dx[xp.arange(labels.size), labels] -= gy


def add_rows(table: Array, rows: Array, values: Array) -> None:
    """``table[rows[k]] += values[k]`` for each k, in that order; ``table`` is changed.

    Args:
        table: ``(number, features)``.
        rows: integers from 0 to ``number - 1``, shape ``(count,)``.
        values: ``(count, features)``.
    """
    add_at(table, rows, values)


def add_at(table: Array, key: Any, values: Array) -> None:
    """``table[key] += values``, where an element that ``key`` names several times gets all that is there for it.

    Args:
        key: of arrays of integers, masks, slices and what else an index may have.
        values: of the shape of ``table[key]``.
    """
    array_namespace(table, values).add.at(table, key, values)
