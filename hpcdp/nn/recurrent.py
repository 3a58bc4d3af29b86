"""Recurrent layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..arrays import Array
from ..autograd import Gradient, Tensor, as_tensor, on_tape
from ..autograd.registry import Call, operator
from ..errors import UnsupportedError, whole_number
from ..kernels import reference_sequences
from ..kernels.buffers import empty
from . import deferred
from .init import Initialiser, Xavier
from .module import Module, Parameter
from .operands import alike, called, contiguous, kernels_for, refreshed


@operator("lstm", ("x", "weight", "recurrent_weight", "bias"))
def lstm(x: Any, weight: Any, recurrent_weight: Any, bias: Any) -> Tensor:
    """A whole sequence through an LSTM that begins with zeros, as one operation.

    The products with the input, and those of backward that sum over time, are made for all steps at once; what is left
    for a step is one product with the hidden values and one pass over the gates.

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
    compute = kernels_for("lstm", a, reference_sequences)
    rows = a.reshape(batch * time, features)
    gates = empty((batch, time, 4 * size), a.dtype, xp)
    flat = gates.reshape(batch * time, 4 * size)
    cells, out = empty((batch, time + 1, size), a.dtype, xp), empty((batch, time, size), a.dtype, xp)
    hidden, recurrent = xp.empty((batch, size), dtype=a.dtype), xp.empty((4 * size, batch), dtype=a.dtype)
    turned = xp.empty((4 * size, size), dtype=a.dtype)
    """With which both products of a step take a quarter to a third less time than with ``u``."""

    def again(place: Array) -> list[Call]:
        calls = [call for pair in zip((a, w, u, b), given, strict=True) for call in refreshed(*pair)]
        calls += [
            (partial(xp.matmul, out=flat), (rows, w)),
            (kernels_for("epilogue", a).add_bias, (flat, b, False)),
            (cells.__setitem__, ((slice(None), 0), 0)),
            (recurrent.__setitem__, (..., 0)),
        ]
        calls += [(turned.__setitem__, (..., u.T))] if time > 1 else []
        product = partial(xp.matmul, out=recurrent)
        for t in range(time):
            calls += [(product, (turned, hidden.T))] if t else []
            calls += [(compute.lstm_step, (gates, recurrent, t, cells, place, hidden))]
        return calls

    called(again(out))

    def pullback(
        gy: Array, dx: Gradient | None, dweight: Gradient | None, drecurrent: Gradient | None, dbias: Gradient | None
    ) -> None:
        g = contiguous(gy)
        dgates, now = empty(gates.shape, a.dtype, xp), xp.empty((batch, 4 * size), dtype=a.dtype)
        dhidden, dcell = (xp.zeros((batch, size), dtype=a.dtype) for _ in range(2))
        for t in range(time - 1, -1, -1):
            compute.lstm_step_gradients(g, dhidden, dcell, t, gates, cells, dgates, now)
            if t:
                xp.matmul(now, turned, out=dhidden)
        each = dgates.reshape(batch * time, 4 * size)
        if dbias is not None:
            dbias.add(xp.sum(each, axis=0, out=dbias.empty()))
        if drecurrent is not None:
            before = empty((batch, time, size), a.dtype, xp)
            before[:, :1], before[:, 1:] = 0, out[:, :-1]
            drecurrent.add(xp.matmul(before.reshape(batch * time, size).T, each, out=drecurrent.empty()))
        if dweight is not None:
            dweight.add(xp.matmul(rows.T, each, out=dweight.empty()))
        if dx is not None:
            place = dx.empty()
            xp.matmul(each, w.T, out=place.reshape(rows.shape))
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

        def gates(shape: tuple[int, ...]) -> np.ndarray:
            return np.concatenate([initial((shape[0], size)) for _ in range(4)], axis=1)

        self.weight = deferred.parameter((in_features, 4 * size), gates)
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
