"""Norms and the search for infinities and NaNs in plain array operations, the specification of `norms`.

Arrays are 1-D and contiguous, float32, float64 or `hpcdp.core.arrays.words`; any number of elements, also none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...core.arrays import Array, array_namespace
from .cast import widened


def all_finite(x: Array) -> bool:
    """Whether no element of ``x`` is infinite or NaN."""
    return bool(array_namespace(x).isfinite(widened(x)).all())


def sum_of_squares(x: Array) -> float:
    """The sum of the squares of ``x``, in float64.

    But for float64 it is finite exactly if all elements are: the square of no other number overflows.
    """
    xp = array_namespace(x)
    wide = widened(x).astype(xp.float64)
    return float((wide * wide).sum())


def sums_of_squares(xs: Iterable[Array]) -> list[float]:
    """`sum_of_squares` of each."""
    return [float(sum_of_squares(x)) for x in xs]


def clipped_scale(squares: Iterable[float], scale: float, most: float) -> float:
    """The scale by which a gradient is at most ``most`` long, whose parts have these sums of squares: ``scale``, where
    it is that already, and where it is not finite.

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013, algorithm 1.
    """
    norm = math.sqrt(sum(squares))
    return most / norm if norm < math.inf and norm * scale > most else scale


def segment_squares(params: Array, grads: Array, bounds: Array, out: Array) -> None:
    """The squared norms that LARS needs (You, Gitman and Ginsburg 2017, algorithm 1), of every layer in one reading.

    Squares, so that the parts of a layer that ranks own add up. Changes ``out``.

    Args:
        params: the weights of all layers, flat, shape ``(count,)``.
        grads: their gradients, likewise.
        bounds: int64, shape ``(layers + 1,)``, ascending: layer k is elements ``bounds[k]`` to ``bounds[k + 1]``.
        out: float64, shape ``(layers, 2)``: the sums of squares of a layer's weights and of its gradients.
    """
    for segment in range(bounds.size - 1):
        first, last = int(bounds[segment]), int(bounds[segment + 1])
        out[segment, 0] = sum_of_squares(params[first:last])
        out[segment, 1] = sum_of_squares(grads[first:last])
