"""Reference reductions: rows of several ranks, norms, the search for infinities and NaNs.

Rows are reduced in their order, so the result has the same bits on every rank and in every run. Floats of 16 bits, as
`hpcdp.core.arrays.words`, are accumulated in float32 and rounded once. A NaN wins in minimum and maximum. Norms take
1-D contiguous arrays of float32, float64 or `hpcdp.core.arrays.words`; any number of elements, also none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ...core.arrays import Array, array_namespace
from .elementwise import narrowed, widened

SUM, PROD, MIN, MAX, MEAN = 0, 1, 2, 3, 4

EVERY_ROW = -1
"""As ``row`` of `combine_into`."""

Rows = Array | Sequence[Array]
"""An array of shape ``(n, m)``, or n arrays of shape ``(m,)``."""


def combine(rows: Rows, lo: int, hi: int, out: Array, op: int) -> None:
    """Reduce columns ``lo`` to ``hi`` of ``rows`` into ``out``, shape ``(hi - lo,)``, which must not overlap them."""
    out[...] = _combined(rows, lo, hi, op)


def combine_into(rows: Rows, lo: int, hi: int, row: int, op: int) -> None:
    """Reduce columns ``lo`` to ``hi`` of ``rows`` in place: into ``row``, or all if that is `EVERY_ROW`."""
    result = _combined(rows, lo, hi, op)
    for target in range(len(rows)) if row == EVERY_ROW else (row,):
        rows[target][lo:hi] = result


def _combined(rows: Rows, lo: int, hi: int, op: int) -> Array:
    xp = array_namespace(rows[0])
    total = widened(rows[0][lo:hi])
    reduced = {SUM: xp.add, MEAN: xp.add, PROD: xp.multiply, MIN: xp.minimum, MAX: xp.maximum}[op]
    for row in range(1, len(rows)):
        total = reduced(total, widened(rows[row][lo:hi]))
    if op == MEAN:
        total = (total / len(rows)).astype(total.dtype)
    return narrowed(total, rows[0])


ROWS_AT_ONCE = 256


def add_up_rows(x: Array, out: Array | None = None) -> Array:
    """The sum over the first axis, into ``out`` where that is given.

    NumPy adds one row after the other, and its error grows with their number: of 10,000 rows of 0.1 it is 1e-4, of a
    million 1%. So rows are added in blocks, and then their sums.
    """
    if type(x) is not np.ndarray or x.dtype.kind != "f":
        return x.sum(axis=0, out=out)
    while len(x) > ROWS_AT_ONCE:
        starts = range(0, len(x), ROWS_AT_ONCE)
        sums = np.empty((len(starts), *x.shape[1:]), x.dtype)
        for total, start in zip(sums, starts, strict=True):
            np.add.reduce(x[start : start + ROWS_AT_ONCE], axis=0, out=total)
        x = sums
    return np.add.reduce(x, axis=0, out=out)


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
