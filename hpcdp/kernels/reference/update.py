"""Reference optimizer updates, in the operations that NumPy and CuPy share.

All arrays are 1-D, contiguous, of one float dtype and one size, and do not overlap. Coefficients are Python floats and
are rounded to the arrays' dtype before use. Every operation is elementwise, in the order in which it stands here.

Updates by LARS take ``squares``, too, float64, shape ``(2,)``: of the norms of the layer's weights and of its gradient
before ``scale``, as `reference.reduce.segment_squares` has them, and the trust as the last coefficient. What the norms
make of the coefficients is computed in float64, and then rounded.
"""

from __future__ import annotations

from ...core.arrays import Array, array_namespace


def sgd(param: Array, grad: Array, coefficients: tuple[float, float, float]) -> None:
    """``p -= lr * (scale * g + weight_decay * p)``; changes ``param``.

    Args:
        coefficients: ``(lr, weight_decay, scale)``.
    """
    lr, weight_decay, scale = coefficients
    g = grad * scale + param * weight_decay
    param[...] = param - g * lr


def sgd_momentum(param: Array, grad: Array, velocity: Array, coefficients: tuple[float, float, float, float]) -> None:
    """``v = momentum * v + g``, ``p -= lr * v`` (Polyak 1964, in the form of Sutskever et al. 2013, without dampening).

    Changes ``param`` and ``velocity``.

    Args:
        coefficients: ``(lr, weight_decay, scale, momentum)``.
    """
    lr, weight_decay, scale, momentum = coefficients
    g = grad * scale + param * weight_decay
    velocity[...] = velocity * momentum + g
    param[...] = param - velocity * lr


def sgd_nesterov(param: Array, grad: Array, velocity: Array, coefficients: tuple[float, float, float, float]) -> None:
    """``v = momentum * v + g``, ``p -= lr * (g + momentum * v)`` (Sutskever et al. 2013, section 2).

    Changes ``param`` and ``velocity``.

    Args:
        coefficients: ``(lr, weight_decay, scale, momentum)``.
    """
    lr, weight_decay, scale, momentum = coefficients
    g = grad * scale + param * weight_decay
    velocity[...] = velocity * momentum + g
    param[...] = param - (g + velocity * momentum) * lr


def adam(param: Array, grad: Array, m: Array, v: Array, coefficients: tuple[float, ...]) -> None:
    """Adam (Kingma and Ba 2015, algorithm 1) and AdamW (Loshchilov and Hutter 2019, algorithm 2).

    ``p = shrink * p - step_size * m / (sqrt(v) * root_scale + eps)``; changes ``param``, ``m`` and ``v``.

    Args:
        coefficients: ``(step_size, weight_decay, scale, shrink, 1 - beta1, beta2, 1 - beta2, root_scale, eps)``, where
            ``step_size`` is ``lr / (1 - beta1**step)``, ``root_scale`` is ``1 / sqrt(1 - beta2**step)``; Adam has
            ``shrink`` 1, AdamW has ``weight_decay`` 0 and ``shrink`` ``1 - lr * weight_decay``.
    """
    step_size, weight_decay, scale, shrink, one_minus_beta1, beta2, one_minus_beta2, root_scale, eps = coefficients
    xp = array_namespace(param, grad, m, v)
    g = grad * scale + param * weight_decay
    m[...] = m + (g - m) * one_minus_beta1
    v[...] = v * beta2 + (g * g) * one_minus_beta2
    param[...] = param * shrink - (m / (xp.sqrt(v) * root_scale + eps)) * step_size


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


def lars_sgd(param: Array, grad: Array, squares: Array, coefficients: tuple[float, float, float, float]) -> None:
    """`reference.sgd` of a layer; ``coefficients`` are ``(lr, weight_decay, scale, trust)``."""
    sgd(param, grad, _of_layer(squares, param, coefficients))  # type: ignore[arg-type]


def lars_sgd_momentum(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """`reference.sgd_momentum` of a layer; ``coefficients``: ``(lr, weight_decay, scale, momentum, trust)``."""
    sgd_momentum(param, grad, velocity, _of_layer(squares, param, coefficients))  # type: ignore[arg-type]


def lars_sgd_nesterov(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """`reference.sgd_nesterov` of a layer; ``coefficients`` as of `lars_sgd_momentum`."""
    sgd_nesterov(param, grad, velocity, _of_layer(squares, param, coefficients))  # type: ignore[arg-type]
