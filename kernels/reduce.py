"""N-way reductions of memory shared by a node's ranks.

All sums run in the order of the ranks, whatever the blocking, so the result has the same bits on every rank and in
every run. float16 is accumulated in float32 and rounded once.

A block is accumulated in a small buffer of its own before it is written anywhere: an array that is read and written in
one loop defeats LLVM's alias check, and then nothing is vectorised (5 instead of 52 GB/s).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

SUM, PROD, MIN, MAX, MEAN = 0, 1, 2, 3, 4
_BLOCK = 2048

_half = types.uint16


def words(x: np.ndarray) -> np.ndarray:
    """``x`` as the kernels take it: float16, which Numba does not know, as its bits in uint16; no copy."""
    return x.view(np.uint16) if x.dtype == np.float16 else x


EVERY_ROW = -1
"""As ``row`` of `combine_into`."""

# Compiled at once for what every job uses; the other dtypes when they are first met, since all would take 10 s.
_common = [types.float32, types.float64, types.int64]

_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


def _c(dtype: Any, ndim: int) -> Any:
    return types.Array(dtype, ndim, "C")


@intrinsic
def _widen(typingctx: Any, value: Any) -> Any:
    """The value as its accumulator's type: float16 as float32, anything else unchanged."""
    if value != _half:
        return value(value), lambda context, builder, signature, args: args[0]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(_half), generate


@intrinsic
def _narrow(typingctx: Any, value: Any, like: Any) -> Any:
    """An accumulator as an element of the array ``like``, rounded to nearest even."""
    dtype = like.dtype
    if dtype != _half:
        return dtype(dtype, like), lambda context, builder, signature, args: args[0]  # integers wrap

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return _half(types.float32, like), generate


@njit(**_options)
def _start(partial, row):  # type: ignore[no-untyped-def]
    for i in range(row.size):
        partial[i] = _widen(row[i])


@njit(**_options)
def _accumulate(partial, row, op):  # type: ignore[no-untyped-def]
    if op in (SUM, MEAN):
        for i in range(row.size):
            partial[i] += _widen(row[i])
    elif op == PROD:
        for i in range(row.size):
            partial[i] *= _widen(row[i])
    elif op == MIN:  # a NaN wins, as in numpy.minimum
        for i in range(row.size):
            a, b = partial[i], _widen(row[i])
            partial[i] = a if (a < b or a != a) else b
    else:
        for i in range(row.size):
            a, b = partial[i], _widen(row[i])
            partial[i] = a if (a > b or a != a) else b


@njit(**_options)
def _divide(partial, n):  # type: ignore[no-untyped-def]
    divisor = type(partial[0])(n)
    for i in range(partial.size):
        partial[i] = partial[i] / divisor


@njit(**_options)
def _finish(partial, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = _narrow(partial[i], out)


@njit(**_options)
def combine(rows, lo, hi, out, op):  # type: ignore[no-untyped-def]
    """Reduce columns ``lo`` to ``hi`` of ``rows``, shape ``(n, m)``, into ``out``, shape ``(hi - lo,)``.

    ``out`` must not overlap ``rows``; see `combine_into` for that.
    """
    partial = np.empty(_BLOCK, type(_widen(rows[0, 0])))
    for start in range(lo, hi, _BLOCK):
        stop = min(start + _BLOCK, hi)
        _start(partial, rows[0, start:stop])
        for row in range(1, rows.shape[0]):
            _accumulate(partial, rows[row, start:stop], op)
        if op == MEAN:
            _divide(partial, rows.shape[0])
        _finish(partial, out[start - lo : stop - lo])


@njit(**_options)
def combine_into(rows, lo, hi, row, op):  # type: ignore[no-untyped-def]
    """Reduce columns ``lo`` to ``hi`` of ``rows``, shape ``(n, m)``, in place: into ``row``, or all where that is -1."""
    partial = np.empty(_BLOCK, type(_widen(rows[0, 0])))
    first = 0 if row == EVERY_ROW else row
    last = rows.shape[0] if row == EVERY_ROW else row + 1
    for start in range(lo, hi, _BLOCK):
        stop = min(start + _BLOCK, hi)
        _start(partial, rows[0, start:stop])
        for other in range(1, rows.shape[0]):
            _accumulate(partial, rows[other, start:stop], op)
        if op == MEAN:
            _divide(partial, rows.shape[0])
        for target in range(first, last):
            _finish(partial, rows[target, start:stop])


for _t in _common:
    _start.compile(types.void(_c(_t, 1), _c(_t, 1)))
    _accumulate.compile(types.void(_c(_t, 1), _c(_t, 1), types.intp))
    _divide.compile(types.void(_c(_t, 1), types.intp))
    _finish.compile(types.void(_c(_t, 1), _c(_t, 1)))
    combine.compile(types.void(_c(_t, 2), types.intp, types.intp, _c(_t, 1), types.intp))
    combine_into.compile(types.void(_c(_t, 2), types.intp, types.intp, types.intp, types.intp))
