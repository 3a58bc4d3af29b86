"""N-way reductions in plain array operations, the specification of `reduce`.

Rows are reduced in their order, so the result has the same bits on every rank and in every run. Floats of 16 bits, as
`hpcdp.core.arrays.words`, are accumulated in float32 and rounded once. A NaN wins in minimum and maximum.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.arrays import Array, array_namespace
from .cast import narrowed, widened

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
