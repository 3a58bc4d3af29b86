"""Recurrent layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array
from ..autograd import Gradient, Tensor, as_tensor, on_tape
from ..autograd.registry import Call, operator
from ..errors import UnsupportedError, whole_number
from ..kernels.buffers import empty
from . import deferred
from .half import in_float32
from .init import Initialiser, Xavier
from .module import Module
from .operands import alike, called, contiguous, kernels_for, refreshed
from .parameter import Parameter

_PADDING = 16
"""Between rows of weights: at a distance of a power of two they take each other's place in the caches."""


@operator("lstm", ("x", "weight", "recurrent_weight", "bias"))
@in_float32()
def lstm(x: Any, weight: Any, recurrent_weight: Any, bias: Any) -> Tensor:
    """A whole sequence through an LSTM that begins with zeros, as one operation.

    A step is one product, of its input and the hidden values before it with both weights, and one pass over the gates;
    so is a step of backward. The gradients of the weights are one product over all steps.

    Args:
        x: shape ``(batch, time, in)``.
        weight: shape ``(in, 4 size)``: input, forget, candidate and output gates side by side.
        recurrent_weight: shape ``(size, 4 size)``.
        bias: shape ``(4 size,)``.

    Returns:
        The hidden values of all steps, ``(batch, time, size)``.
    """
    given = [as_tensor(each).data for each in (x, weight, recurrent_weight, bias)]
    a, w, u, b = map(contiguous, given)
    xp = alike("lstm", a, w, u, b)
    size = u.shape[0]
    if a.ndim != 3 or w.shape != (a.shape[2], 4 * size) or u.shape != (size, 4 * size) or b.shape != (4 * size,):
        raise UnsupportedError(
            "lstm", expected="shapes (batch, time, in), (in, 4 size), (size, 4 size) and (4 size,)",
            got=", ".join(str(tuple(each.shape)) for each in (a, w, u, b)),
        )  # fmt: skip
    batch, time, features = a.shape
    compute = kernels_for("lstm", a)
    multiply = kernels_for("products", a).multiply
    both = features + size
    inputs, gates = empty((time + 1, batch, both), a.dtype, xp), empty((time, batch, 4 * size), a.dtype, xp)
    cells, out = empty((time + 1, batch, size), a.dtype, xp), empty((batch, time, size), a.dtype, xp)
    weights = empty((both, 4 * size + _PADDING), a.dtype, xp)[:, : 4 * size]
    product = empty((batch, 4 * size), a.dtype, xp)  # of each step: it stays in the cache, as `gates` would not

    def again(place: Array) -> list[Call]:
        calls = [call for pair in zip((a, w, u, b), given, strict=True) for call in refreshed(*pair)]
        if time > 1:
            calls += [(weights[:features].__setitem__, (..., w)), (weights[features:].__setitem__, (..., u))]
        calls += [
            (inputs[:time, :, :features].__setitem__, (..., a.swapaxes(0, 1))),
            (inputs[0, :, features:].__setitem__, (..., 0)),
            (cells[0].__setitem__, (..., 0)),
        ]
        for t in range(time):
            factors = (inputs[t], weights) if t else (inputs[0, :, :features], w)
            calls += [
                (multiply, (*factors, product)),
                (compute.lstm_step, (b, product, t, gates, cells, inputs)),
            ]
        return [*calls, (place.__setitem__, (..., inputs[1:, :, features:].swapaxes(0, 1)))]

    called(again(out))

    def pullback(
        gy: Array, dx: Gradient | None, dweight: Gradient | None, drecurrent: Gradient | None, dbias: Gradient | None
    ) -> None:
        g = contiguous(gy)
        dgates, dinputs = empty(gates.shape, a.dtype, xp), empty(inputs.shape, a.dtype, xp)
        dcell, sums = (xp.zeros(shape, dtype=a.dtype) for shape in ((batch, size), b.shape))
        dinputs[time] = 0
        for t in range(time - 1, -1, -1):
            compute.lstm_step_gradients(g, dinputs, dcell, t, gates, cells, dgates, sums)
            if t:
                multiply(dgates[t], weights.T, dinputs[t])
        if dbias is not None:
            dbias.add(sums)
        if dweight is not None or drecurrent is not None:
            rows = inputs[:time].reshape(time * batch, both)
            products = empty((both, 4 * size), a.dtype, xp)
            multiply(rows.T, dgates.reshape(time * batch, 4 * size), products)
            if dweight is not None:
                dweight.add(products[:features])
            if drecurrent is not None:
                drecurrent.add(products[features:])
        if dx is not None:
            if time:
                multiply(dgates[0], w.T, dinputs[0, :, :features])
            place = dx.empty()
            place[...] = dinputs[:time, :, :features].swapaxes(0, 1)
            dx.add(place)

    return on_tape(out, (x, weight, recurrent_weight, bias), pullback, again)


class LSTM(Module):
    """Long short-term memory over ``(batch, time, in_features)``, from zeros in each batch: ``(batch, time, size)``.

    Gates lie side by side in the weights: input, forget, candidate, output. That of forgetting starts with a bias of 1
    (Jozefowicz, Zaremba and Sutskever 2015, section 2.2), the others at 0.

    Args:
        in_features: None: that of the first input.
        weight_init: called for the weights of each gate; None is `init.Xavier()`.
    """

    def __init__(self, in_features: int | None, size: int, weight_init: Initialiser | None = None) -> None:
        for where, number in (("in_features", 1 if in_features is None else in_features), ("size", size)):
            whole_number("LSTM", where, number, 1)
        initial = weight_init or Xavier()
        deferred.require_draw(initial)

        def gates(shape: tuple[int, ...]) -> np.ndarray:
            return np.concatenate([deferred.drawn(initial, (shape[0], size)) for _ in range(4)], axis=1)

        self.weight = deferred.parameter((in_features, 4 * size), gates, initial)
        self.recurrent_weight = Parameter(gates((size, 4 * size)))
        self.bias = Parameter(np.repeat(np.array([0, 1, 0, 0], np.float32), size))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            deferred.settle(self.weight, x.shape[2])
        features = self.weight.shape[0]
        if x.ndim != 3 or x.shape[2] != features:
            raise UnsupportedError(
                "forward", where=repr(self), expected=f"input of shape (batch, time, {features})", got=tuple(x.shape)
            )
        return lstm(x, self.weight, self.recurrent_weight, self.bias)

    def describe(self) -> str:
        return f"{deferred.shape_of(self.weight)[0]}, {self.recurrent_weight.shape[0]}"
