"""Reductions of NumPy arrays: rows shared by a node's ranks, norms, and the search for non-finite values.

Functions have the names and arguments of `reference.gradients`. `combine` and `combine_into` have its bits: sums run in
the order of the ranks for any blocking, so the result is the same on every rank and in every run. float16 and bfloat16,
as `hpcdp.core.arrays.words`, are accumulated in float32 and rounded once. Norms are equal up to rounding in float64.
They may be reassociated into several vectors; their order depends only on the compiled code and the number of elements,
so the same run gives the same bits.

A block is accumulated in a small buffer before it is written: reading and writing one array in a loop defeats LLVM's
alias check and vectorisation (5 instead of 52 GB/s). Functions that kernels call are ``inline="always"``: compiling
them within the kernels takes 0.7 of the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float64, types
from numba.extending import intrinsic

from ..core.arrays import Array
from .jit import kernel, magnitude_bits, narrow, widen
from .reference.gradients import EVERY_ROW as EVERY_ROW
from .reference.gradients import MAX as MAX
from .reference.gradients import MEAN, MIN, PROD, SUM

BLOCK = 2048
"""Number of elements accumulated at a time; they stay in the L1 cache."""


@kernel(inline="always")
def start(partial, row):  # type: ignore[no-untyped-def]
    """Begin a block: ``partial`` becomes ``row``."""
    for i in range(row.size):
        partial[i] = widen(row[i])


@kernel(inline="always")
def accumulate(partial, row, op):  # type: ignore[no-untyped-def]
    """Reduce ``row`` elementwise into ``partial``."""
    if op in (SUM, MEAN):
        for i in range(row.size):
            partial[i] += widen(row[i])
    elif op == PROD:
        for i in range(row.size):
            partial[i] *= widen(row[i])
    elif op == MIN:  # a NaN wins, as in numpy.minimum
        for i in range(row.size):
            a, b = partial[i], widen(row[i])
            partial[i] = a if (a < b or a != a) else b
    else:
        for i in range(row.size):
            a, b = partial[i], widen(row[i])
            partial[i] = a if (a > b or a != a) else b


@kernel(inline="always")
def divide(partial, n):  # type: ignore[no-untyped-def]
    """Divide a sum over ``n`` rows by ``n``."""
    divisor = type(partial[0])(n)
    for i in range(partial.size):
        partial[i] = partial[i] / divisor


@kernel(inline="always")
def finish(partial, out):  # type: ignore[no-untyped-def]
    """Write an accumulated block to ``out``, rounded to its dtype."""
    for i in range(out.size):
        out[i] = narrow(partial[i], out)


@kernel(inline="always")
def sum_in_both(a, b):  # type: ignore[no-untyped-def]
    """Replace ``a`` and ``b``, shape ``(count,)``, by their sum; the cache lines read are those written."""
    for i in range(a.size):
        total = narrow(widen(a[i]) + widen(b[i]), a)
        a[i] = total
        b[i] = total


@kernel(inline="always")
def _sum_of_two(a, b, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = narrow(widen(a[i]) + widen(b[i]), out)


@kernel(inline="always")
def _sum_of_four(a, b, c, d, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = narrow(widen(a[i]) + widen(b[i]) + widen(c[i]) + widen(d[i]), out)


@kernel()
def combine(rows, lo, hi, out, op):  # type: ignore[no-untyped-def]
    """Reduce columns ``lo`` to ``hi`` of ``rows``, shape ``(n, m)``, into ``out``, shape ``(hi - lo,)``.

    ``out`` must not overlap ``rows``; see `combine_into` for that.
    """
    if rows.shape[0] == 2 and op == SUM:
        _sum_of_two(rows[0, lo:hi], rows[1, lo:hi], out)
        return
    if rows.shape[0] == 4 and op == SUM:  # in one pass, because storing partial sums runs at 0.75 of the copy rate
        _sum_of_four(rows[0, lo:hi], rows[1, lo:hi], rows[2, lo:hi], rows[3, lo:hi], out)
        return
    partial = np.empty(BLOCK, type(widen(rows[0, 0])))
    for first in range(lo, hi, BLOCK):
        last = min(first + BLOCK, hi)
        start(partial, rows[0, first:last])
        for row in range(1, rows.shape[0]):
            accumulate(partial, rows[row, first:last], op)
        if op == MEAN:
            divide(partial, rows.shape[0])
        finish(partial, out[first - lo : last - lo])


@kernel()
def combine_into(rows, lo, hi, row, op):  # type: ignore[no-untyped-def]
    """Reduce columns ``lo`` to ``hi`` of ``rows``, shape ``(n, m)``, in place into ``row``, or into all for -1."""
    if rows.shape[0] == 2 and op == SUM and row == EVERY_ROW:
        sum_in_both(rows[0, lo:hi], rows[1, lo:hi])
        return
    partial = np.empty(BLOCK, type(widen(rows[0, 0])))
    targets = range(rows.shape[0]) if row == EVERY_ROW else range(row, row + 1)
    for first in range(lo, hi, BLOCK):
        last = min(first + BLOCK, hi)
        start(partial, rows[0, first:last])
        for other in range(1, rows.shape[0]):
            accumulate(partial, rows[other, first:last], op)
        if op == MEAN:
            divide(partial, rows.shape[0])
        for target in targets:
            finish(partial, rows[target, first:last])


@kernel(inline="always")
def _scaled_sum_in_both(a, b, prescale, factor):  # type: ignore[no-untyped-def]
    for i in range(a.size):
        total = narrow((widen(a[i]) * prescale + widen(b[i]) * prescale) * factor, a)
        a[i] = total
        b[i] = total


@kernel(inline="always")
def _accumulate_scaled(partial, row, prescale):  # type: ignore[no-untyped-def]
    for i in range(row.size):
        partial[i] += widen(row[i]) * prescale


@kernel(inline="always")
def _multiply(partial, factor):  # type: ignore[no-untyped-def]
    for i in range(partial.size):
        partial[i] = partial[i] * factor


@kernel()
def combine_staged(x, rows, me, lo, hi, op, prescale, divisor, factor):  # type: ignore[no-untyped-def]
    """Reduce columns ``lo`` to ``hi`` of ``rows``, shape ``(n, m)``, with ``x`` as row ``me``, into all of them.

    The cache lines read are those written, so each moves between cores once. Inputs of a sum are first multiplied by
    ``prescale``, and the sum is divided by ``divisor`` (1 for two rows) and then multiplied by ``factor``, in the
    accumulator's dtype; all are 1 for integers and other reductions.
    """
    n, number = rows.shape[0], type(widen(rows[0, 0]))
    before, over, after = number(prescale), number(divisor), number(factor)
    if n == 2 and op == SUM:
        if before == 1 and after == 1:
            sum_in_both(x[lo:hi], rows[1 - me, lo:hi])
        else:
            _scaled_sum_in_both(x[lo:hi], rows[1 - me, lo:hi], before, after)
        return
    partial = np.empty(BLOCK, number)
    for first in range(lo, hi, BLOCK):
        last = min(first + BLOCK, hi)
        block = partial[: last - first]
        start(block, x[first:last] if me == 0 else rows[0, first:last])
        if before != 1:
            _multiply(block, before)
        for other in range(1, n):
            row = x[first:last] if me == other else rows[other, first:last]
            if before != 1:
                _accumulate_scaled(block, row, before)
            else:
                accumulate(block, row, op)
        if over != 1:
            divide(block, over)
        if after != 1:
            _multiply(block, after)
        finish(partial, x[first:last])
        for other in range(n):
            if other != me:
                finish(partial, rows[other, first:last])


_SEARCH_BLOCK = 1 << 14
"""Number of elements checked before the search may end."""


@intrinsic
def _larger(typingctx: Any, a: Any, b: Any) -> Any:
    """Return the larger of two magnitudes; Numba's own would compute in 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", *args), *args)

    return a(a, a), generate


@intrinsic
def _is_finite(typingctx: Any, magnitude: Any) -> Any:
    infinity = {
        types.uint16: 0x7C00, types.int16: 0x7F80, types.uint32: 0x7F800000, types.uint64: 0x7FF0000000000000,
    }[magnitude]  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.icmp_unsigned("<", args[0], args[0].type(infinity)), ir.IntType(1))

    return types.boolean(magnitude), generate


@kernel()
def all_finite(x):  # type: ignore[no-untyped-def]
    """See `reference.all_finite`."""
    for first in range(0, x.size, _SEARCH_BLOCK):
        block = x[first : min(first + _SEARCH_BLOCK, x.size)]
        largest = magnitude_bits(block[0])
        for i in range(1, block.size):
            largest = _larger(largest, magnitude_bits(block[i]))
        if not _is_finite(largest):
            return False
    return True


@kernel(fastmath={"reassoc", "contract"})
def sum_of_squares(x):  # type: ignore[no-untyped-def]
    """See `reference.sum_of_squares`.

    The halves are summed side by side: LLVM makes four sums of one loop, which wait for their additions (0.63 of the
    copy rate in the cache against 1.0).
    """
    half = x.size // 2
    lower, upper = x[:half], x[half : 2 * half]
    total, other = 0.0, 0.0
    for i in range(half):
        a, b = float64(widen(lower[i])), float64(widen(upper[i]))
        total += a * a
        other += b * b
    if x.size % 2:
        last = float64(widen(x[x.size - 1]))
        other += last * last
    return total + other


def sums_of_squares(xs: Iterable[Array]) -> list[float]:
    """See `reference.sums_of_squares`."""
    return [float(sum_of_squares(x)) for x in xs]


@kernel()
def segment_squares(params, grads, bounds, out):  # type: ignore[no-untyped-def]
    """See `reference.segment_squares`."""
    for segment in range(bounds.size - 1):
        first, last = bounds[segment], bounds[segment + 1]
        out[segment, 0] = sum_of_squares(params[first:last])
        out[segment, 1] = sum_of_squares(grads[first:last])
