"""Additions to some rows of NumPy arrays.

`reference.rows` is the specification.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from .machine_code import kernel
from .reference import rows as reference_rows

_FLOATS = (numba.float32, numba.float64)


@kernel(
    [numba.void(f[:, ::1], numba.int64[::1], f[:, ::1]) for f in _FLOATS],
)
def add_rows(table, rows, values):  # type: ignore[no-untyped-def]
    """See `reference.rows.add_rows`."""
    for k in range(rows.size):
        row, value = table[rows[k]], values[k]
        for j in range(row.size):
            row[j] += value[j]


def add_at(table: np.ndarray, key: Any, values: np.ndarray) -> None:
    """See `reference.rows.add_at`: NumPy adds in their order."""
    reference_rows.add_at(table, key, values)
