"""Matrix products in the order in which BLAS is fastest."""

from __future__ import annotations

from ..arrays import Array, array_namespace
from ..kernels.buffers import empty

_FEW_ROWS, _MANY_COLUMNS = 64, 128


def times_transposed(g: Array, w: Array, out: Array) -> None:
    """``out = g @ w.T`` for ``g``, ``(rows, columns)``, and a larger ``w``, ``(others, columns)``; writes ``out``.

    With few rows most of the time goes into packing ``w``, which BLAS does faster as the left operand and not turned
    round: by this way the product of 16 x 2048 and 2048 x 2048 takes 0.6 of the time, with 64 rows 0.85, the turned
    result's copy included. A single row is no product for BLAS but a pass over ``w``.
    """
    xp = array_namespace(g, w)
    if 1 < g.shape[0] <= _FEW_ROWS and w.shape[1] >= _MANY_COLUMNS:
        turned = empty((out.shape[1], out.shape[0]), out.dtype, xp)
        out[...] = xp.matmul(w, g.T, out=turned).T
    else:
        xp.matmul(g, w.T, out=out)
