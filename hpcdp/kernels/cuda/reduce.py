"""Reductions of CuPy arrays: rows of several ranks, norms, the search for what is not finite (`reduce.cu`, `norms.cu`).

Functions have the names and arguments of `reference.reduce`. Rows are combined in one pass over memory, to the same
bits; norms have the same sums up to rounding in float64. What returns numbers waits for the current stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...core.arrays import Array, array_namespace, to_host
from ...errors import UnsupportedError
from .. import cuda
from ..reference.reduce import EVERY_ROW, Rows

_ROW_DTYPES = ("uint16", "int16", "float32", "float64", "int32", "int64")
MAX_ROWS = 32
"""`reduce.cu` says so, too."""

_POINTERS = np.dtype([("at", np.uint64, MAX_ROWS)])


def combine(rows: Rows, lo: int, hi: int, out: Array, op: int) -> None:
    """See `reference.reduce.combine`; at most 32 rows."""
    _launch_combine([rows[k][lo:hi] for k in range(len(rows))], [out], op)


def combine_into(rows: Rows, lo: int, hi: int, row: int, op: int) -> None:
    """See `reference.reduce.combine_into`; at most 32 rows."""
    columns = [rows[k][lo:hi] for k in range(len(rows))]
    _launch_combine(columns, columns if row == EVERY_ROW else [columns[row]], op)


def _launch_combine(rows: list[Array], targets: list[Array], op: int) -> None:
    of_type = cuda.type_name("combine", _ROW_DTYPES, rows[0].size, *rows, *targets)
    if len(rows) > MAX_ROWS:
        raise UnsupportedError("combine", expected=f"at most {MAX_ROWS} rows", got=len(rows))
    given = (_pointers(rows), np.int32(len(rows)), _pointers(targets), np.int32(len(targets)))
    blocks = cuda.blocks(-(-rows[0].nbytes // 16))
    cuda.launch("reduce", f"combine_{of_type}", blocks, *given, np.int64(rows[0].size), np.int32(op))


def _pointers(rows: list[Array]) -> np.ndarray:
    made = np.zeros(1, _POINTERS)
    made["at"][0, : len(rows)] = [row.data.ptr for row in rows]
    return made


_DTYPES = ("uint16", "int16", "float32", "float64")
_PIECES = 128
"""Blocks that sum one layer; `norms.cu` says so, too."""


def all_finite(x: Array) -> bool:
    """See `reference.reduce.all_finite`."""
    of_type = cuda.type_name("all_finite", _DTYPES, x.size, x)
    found = array_namespace(x).zeros(1, dtype=np.int32)
    cuda.launch("norms", f"find_not_finite_{of_type}", cuda.blocks(-(-x.nbytes // 16)), x, np.int64(x.size), found)
    return not int(found[0])


def sum_of_squares(x: Array) -> float:
    """See `reference.reduce.sum_of_squares`."""
    return sums_of_squares((x,))[0]


def sums_of_squares(xs: Iterable[Array]) -> list[float]:
    """See `reference.reduce.sums_of_squares`; waits once for all."""
    given = list(xs)
    return to_host(all_squares(given)).tolist() if given else []


def all_squares(xs: Sequence[Array]) -> Array:
    """`sums_of_squares` of one or more arrays, in float64 on their GPU; waits for nothing."""
    xp = array_namespace(*xs)
    out = xp.empty(len(xs), dtype=np.float64)
    for number, x in enumerate(xs):
        of_type = cuda.type_name("sum_of_squares", _DTYPES, x.size, x)
        blocks = min(cuda.blocks(-(-x.nbytes // 16)), cuda.MAX_PARTS)
        partial = xp.empty(blocks, dtype=np.float64)
        cuda.launch("norms", f"sum_of_squares_{of_type}", blocks, x, np.int64(x.size), partial)
        cuda.launch("norms", "add_partials_f64", 1, partial, np.int64(blocks), out[number : number + 1])
    return out


def clipped_scale(squares: Array, scale: float | Array, most: float) -> Array:
    """See `reference.reduce.clipped_scale`: float64, shape ``(1,)``, on the GPU of ``squares``, where ``scale`` may be,
    too; waits for nothing."""
    cuda.check("clipped_scale", ("float64",), squares.size, squares)
    number, place = (np.float64(scale), cuda.NOWHERE) if isinstance(scale, float) else (np.float64(1), scale)
    out = array_namespace(squares).empty(1, dtype=np.float64)
    cuda.launch("norms", "clipped_scale", 1, squares, np.int64(squares.size), number, place, np.float64(most), out)
    return out


def segment_squares(params: Array, grads: Array, bounds: Array, out: Array) -> None:
    """See `reference.reduce.segment_squares`; waits for nothing."""
    of_type = cuda.type_name("segment_squares", _DTYPES, params.size, params, grads)
    cuda.check("segment_squares", ("int64",), bounds.size, bounds)
    layers = bounds.size - 1
    cuda.check("segment_squares", ("float64",), 2 * layers, out)
    partial = array_namespace(params).empty((layers, 2, _PIECES), dtype=np.float64)
    cuda.launch("norms", f"segment_squares_{of_type}", layers * _PIECES, params, grads, bounds, partial)
    cuda.launch("norms", "add_partials_f64", 2 * layers, partial, np.int64(_PIECES), out)
