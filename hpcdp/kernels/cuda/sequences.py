"""Cross-entropy of CuPy arrays, and additions to rows of a table (`cross_entropy.cu`, `rows.cu`).

Functions have the names and arguments of `reference.sequences`. Cross-entropy has the same numbers up to the rounding
of ``exp`` and ``log``; of logits of 16 bits chances and losses are float32, and so are the gradients that come back. A
label that is out of range makes the loss and the chances of its row NaN. Additions to rows have the same bits, without
atomic additions, whose order changes from run to run; rows not in the table are left out. Nothing is waited for, but
where an index has a mask, which CuPy waits for. Attention and LSTM are the reference's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...core.arrays import Array, array_namespace, words
from .. import cuda
from ..reference.sequences import causal_shift as causal_shift
from ..reference.sequences import lstm_step as lstm_step
from ..reference.sequences import lstm_step_gradients as lstm_step_gradients
from ..reference.sequences import normalise_rows as normalise_rows
from ..reference.sequences import softmax_gradient as softmax_gradient

_KEPT = 8
"""Packs of 16 bytes of a row that a thread keeps; `cross_entropy.cu` says so, too."""


def softmax_cross_entropy(logits: Array, labels: Array, chances: Array, losses: Array) -> None:
    """See `reference.sequences.softmax_cross_entropy`."""
    of_type, (rows, classes) = _checked("softmax_cross_entropy", logits, labels, chances, losses), logits.shape
    packs = -(-classes * chances.itemsize // 16)
    lanes = min(cuda.THREADS, _power_of_two(max(min(packs, 8), -(-packs // _KEPT))))
    blocks = cuda.blocks(rows * lanes)
    scalars = (np.int64(rows), np.int64(classes), np.int32(lanes))
    cuda.launch("cross_entropy", f"softmax_cross_entropy_{of_type}", blocks, logits, labels, chances, losses, *scalars)


def softmax_cross_entropy_gradient(gy: Array, labels: Array, chances: Array, dx: Array) -> None:
    """See `reference.sequences.softmax_cross_entropy_gradient`."""
    of_type = _checked("softmax_cross_entropy_gradient", dx, labels, chances, gy)
    blocks, scalars = cuda.blocks(-(-dx.nbytes // 16)), (np.int64(dx.size), np.int64(dx.shape[1]))
    cuda.launch("cross_entropy", f"softmax_cross_entropy_gradient_{of_type}", blocks, gy, labels, chances, dx, *scalars)


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def _checked(operation: str, x: Array, labels: Array, chances: Array, of_rows: Array) -> str:
    """The last part of a kernel's name for logits ``x``, or their gradient; ``of_rows`` has one number a row."""
    of_type = cuda.type_name(operation, cuda.FLOATS, x.size, x)
    cuda.check(operation, (cuda.wide_type(x),), x.size, chances)
    cuda.check(operation, (cuda.wide_type(x),), x.shape[0], of_rows)
    cuda.check(operation, ("int64",), x.shape[0], labels)
    return of_type


_DTYPES = ("uint16", "int16", "float32", "float64")
_DIGIT_BITS = 8
_CHUNK = 1024
"""Places that a block sorts, unless there are too many for the blocks of a launch."""


def add_rows(table: Array, rows: Array, values: Array) -> None:
    """See `reference.sequences.add_rows`."""
    table, values = words(table), words(values)
    (number, features), count = table.shape, rows.size
    of_type = cuda.type_name("add_rows", _DTYPES, count * features, values)
    cuda.check("add_rows", (str(values.dtype),), number * features, table)
    cuda.check("add_rows", ("int64",), count, rows)
    if number == 0:  # no digit would be sorted by, and `order` would have what nobody has written
        return
    xp, chunk = array_namespace(table), max(_CHUNK, -(-count // cuda.MAX_BLOCKS))
    blocks = -(-count // chunk)
    counts, starts = xp.empty((blocks, cuda.THREADS), dtype=np.uint32), xp.empty((blocks, cuda.THREADS), dtype=np.int64)
    order, other = xp.empty(count, dtype=np.int64), xp.empty(count, dtype=np.int64)
    for shift in range(0, int(number).bit_length(), _DIGIT_BITS):
        what = rows, np.int64(count), np.int64(number), order, np.int64(chunk), np.int32(shift), np.bool_(shift == 0)
        cuda.launch("rows", "count_digits", blocks, *what, counts)
        cuda.launch("rows", "find_starts", min(blocks, 1), counts, np.int64(blocks), starts)
        cuda.launch("rows", "sort_by_digit", blocks, *what, starts, other)
        order, other = other, order
    sizes = np.int64(count), np.int64(number)
    threads = cuda.blocks(count * features)
    cuda.launch("rows", f"add_sorted_{of_type}", threads, rows, *sizes, order, values, np.int64(features), table)


def add_at(table: Array, key: Any, values: Array) -> None:
    """See `reference.sequences.add_at`; ``table`` is contiguous."""
    xp, axes = array_namespace(table, values), _axes(key, table.ndim)
    number, features = math.prod(table.shape[:axes]), math.prod(table.shape[axes:])
    rows = xp.arange(number).reshape(table.shape[:axes])[key]
    flat = xp.ascontiguousarray(values).reshape(rows.size, features)
    add_rows(table.reshape(number, features), xp.ascontiguousarray(rows).reshape(-1), flat)


def _axes(key: Any, ndim: int) -> int:
    """So many axes are chosen from, the first ones; what comes behind them is taken as it is."""
    parts, axes = key if isinstance(key, tuple) else (key,), 0
    for part in parts:
        if part is Ellipsis or isinstance(part, (bool, list)):
            return ndim
        if part is not None:
            axes += part.ndim if str(getattr(part, "dtype", "")) == "bool" else 1
    return axes
