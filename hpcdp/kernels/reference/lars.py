"""SGD of a layer at a rate that its norms give, in plain array operations, the specification of `lars`.

Arrays are as for `reference.update`, and ``squares`` beside them, float64, shape ``(2,)``: of the norms of the layer's
weights and of its gradient before ``scale``, as `reference.norms.segment_squares` has them. Coefficients are those of
`reference.update`, and the trust as the last; what the norms make of them is computed in float64, and then rounded.
"""

from __future__ import annotations

from ...core.arrays import Array, array_namespace
from . import update


def _rates(squares: Array, weight_decay: float, scale: float, trust: float) -> tuple[Array, Array]:
    """Weight decay and scale of the layer: times ``trust * |w| / (scale * |g| + weight_decay * |w|)``, if that has a
    meaning (You, Gitman and Ginsburg 2017, algorithm 1)."""
    xp = array_namespace(squares)
    weights, gradient = xp.sqrt(squares[0]), xp.sqrt(squares[1])
    has_meaning = (weights != 0) & (gradient != 0)
    length = xp.where(has_meaning, gradient * scale + weight_decay * weights, 1.0)
    factor = xp.where(has_meaning, trust * weights / length, 1.0)
    return weight_decay * factor, scale * factor


def _of_layer(squares: Array, like: Array, coefficients: tuple[float, ...]) -> tuple[float, ...]:
    lr, weight_decay, scale, *momentum, trust = coefficients
    rates = (each.astype(like.dtype) for each in _rates(squares, weight_decay, scale, trust))
    return (lr, *rates, *momentum)  # type: ignore[return-value]


def sgd(param: Array, grad: Array, squares: Array, coefficients: tuple[float, float, float, float]) -> None:
    """`reference.update.sgd` of a layer; ``coefficients`` are ``(lr, weight_decay, scale, trust)``."""
    update.sgd(param, grad, _of_layer(squares, param, coefficients))  # type: ignore[arg-type]


def sgd_momentum(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """`reference.update.sgd_momentum` of a layer; ``coefficients``: ``(lr, weight_decay, scale, momentum, trust)``."""
    update.sgd_momentum(param, grad, velocity, _of_layer(squares, param, coefficients))  # type: ignore[arg-type]


def sgd_nesterov(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """`reference.update.sgd_nesterov` of a layer; ``coefficients`` as of `sgd_momentum`."""
    update.sgd_nesterov(param, grad, velocity, _of_layer(squares, param, coefficients))  # type: ignore[arg-type]
