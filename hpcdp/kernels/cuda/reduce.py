"""N-way reductions for CuPy arrays, in one pass over memory. Imports: cuda, reference.reduce.

`reference.reduce` is the specification: same names, same arguments, same bits.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Array
from ...errors import UnsupportedError
from .. import cuda
from ..reference.reduce import EVERY_ROW, Rows

_DTYPES = ("uint16", "int16", "float32", "float64", "int32", "int64")
MAX_ROWS = 32
"""`reduce.cu` says so, too."""

_POINTERS = np.dtype([("at", np.uint64, MAX_ROWS)])


def combine(rows: Rows, lo: int, hi: int, out: Array, op: int) -> None:
    """See `reference.reduce.combine`; at most 32 rows."""
    _launch([rows[k][lo:hi] for k in range(len(rows))], [out], op)


def combine_into(rows: Rows, lo: int, hi: int, row: int, op: int) -> None:
    """See `reference.reduce.combine_into`; at most 32 rows."""
    columns = [rows[k][lo:hi] for k in range(len(rows))]
    _launch(columns, columns if row == EVERY_ROW else [columns[row]], op)


def _launch(rows: list[Array], targets: list[Array], op: int) -> None:
    of_type = cuda.type_name("combine", _DTYPES, rows[0].size, *rows, *targets)
    if len(rows) > MAX_ROWS:
        raise UnsupportedError("combine", expected=f"at most {MAX_ROWS} rows", got=len(rows))
    given = (_pointers(rows), np.int32(len(rows)), _pointers(targets), np.int32(len(targets)))
    blocks = cuda.blocks(-(-rows[0].nbytes // 16))
    cuda.launch("reduce", f"combine_{of_type}", blocks, *given, np.int64(rows[0].size), np.int32(op))


def _pointers(rows: list[Array]) -> np.ndarray:
    made = np.zeros(1, _POINTERS)
    made["at"][0, : len(rows)] = [row.data.ptr for row in rows]
    return made
