"""Numba kernels of gradients: sums over a node's ranks, norms, updates, encodings for the wire.

Functions have the names and arguments of `reference`, which also has LARS.

Reductions: `combine` and `combine_into` have the reference's bits: sums run in the order of the ranks for any blocking,
so the result is the same on every rank and in every run. float16 and bfloat16, as `hpcdp.core.arrays.words`, are
accumulated in float32 and rounded once. Norms are equal up to rounding in float64. They may be reassociated into
several vectors; their order depends only on the compiled code and the number of elements.

A block is accumulated in a small buffer before it is written: reading and writing one array in a loop defeats LLVM's
alias check and vectorization (5 instead of 52 GB/s). Functions that kernels call are ``inline="always"``: compiling
them within the kernels takes 0.7 of the time.

Updates, in one pass over memory, have the reference's bits. Without fastmath LLVM can neither contract a multiplication
and an addition nor reorder. The vectorized body of a loop and its scalar tail therefore round alike, and any split of
the arrays gives the same bits (measured: no slower, the loops wait for memory). ``reduce_*`` sum a block, in the order
of the ranks, into a buffer in the L1 cache, and apply the plain update to it: the operations of `combine` and the
update, so the same bits. A shard is one call: separate calls for blocks of 256 KiB took 102 to 149 us for 1 MB on 2
ranks, this takes 62 to 102. One loop for the sum and the rule took some 20 us less, but needs a second copy of each
rule.

Encodings keep the residual in the same call. The scales of blocks are equal up to rounding, and all else has the same
bits for the same scales. A block's arrays stay in the L1 cache between its passes, so memory is read and written once.
Comparing a vector of elements gives a vector of bits, which is (a part of) a packed word. LLVM does not find that in a
loop over elements (0.04 of the copy rate), so words are packed by vector operations (`jit`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba import float32, float64, intp, types, uint32
from numba.extending import intrinsic

from ..core.arrays import Array
from .jit import WORD, Lanes, kernel, magnitude_bits, narrow, widen
from .networks import _from_bfloat16, to_bfloat16
from .reference import BLOCK, EVERY_ROW, MEAN, MIN, PROD, SHARE, SUM
from .reference import MAX as MAX
from .reference import lars_sgd as lars_sgd
from .reference import lars_sgd_momentum as lars_sgd_momentum
from .reference import lars_sgd_nesterov as lars_sgd_nesterov

ACCUMULATED = 2048
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
    partial = np.empty(ACCUMULATED, type(widen(rows[0, 0])))
    for first in range(lo, hi, ACCUMULATED):
        last = min(first + ACCUMULATED, hi)
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
    partial = np.empty(ACCUMULATED, type(widen(rows[0, 0])))
    targets = range(rows.shape[0]) if row == EVERY_ROW else range(row, row + 1)
    for first in range(lo, hi, ACCUMULATED):
        last = min(first + ACCUMULATED, hi)
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
    partial = np.empty(ACCUMULATED, number)
    for first in range(lo, hi, ACCUMULATED):
        last = min(first + ACCUMULATED, hi)
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


_FLAT = (numba.float32[::1], numba.float64[::1])


def _compile(num_arrays: int, num_coefficients: int):  # type: ignore[no-untyped-def]
    coefficients = numba.types.UniTuple(numba.float64, num_coefficients)
    signatures = [numba.void(*[flat] * num_arrays, coefficients) for flat in _FLAT]
    return kernel(signatures)


@_compile(2, 3)
def sgd(param, grad, coefficients):  # type: ignore[no-untyped-def]
    """Update by SGD without momentum; see `reference.sgd`."""
    lr = param.dtype.type(coefficients[0])
    weight_decay = param.dtype.type(coefficients[1])
    scale = param.dtype.type(coefficients[2])
    for i in range(param.size):
        p = param[i]
        g = grad[i] * scale + p * weight_decay
        param[i] = p - g * lr


@_compile(3, 4)
def sgd_momentum(param, grad, velocity, coefficients):  # type: ignore[no-untyped-def]
    """Update by SGD with momentum; see `reference.sgd_momentum`."""
    lr = param.dtype.type(coefficients[0])
    weight_decay = param.dtype.type(coefficients[1])
    scale = param.dtype.type(coefficients[2])
    momentum = param.dtype.type(coefficients[3])
    for i in range(param.size):
        p = param[i]
        g = grad[i] * scale + p * weight_decay
        v = velocity[i] * momentum + g
        velocity[i] = v
        param[i] = p - v * lr


@_compile(3, 4)
def sgd_nesterov(param, grad, velocity, coefficients):  # type: ignore[no-untyped-def]
    """Update by SGD with Nesterov's momentum; see `reference.sgd_nesterov`."""
    lr = param.dtype.type(coefficients[0])
    weight_decay = param.dtype.type(coefficients[1])
    scale = param.dtype.type(coefficients[2])
    momentum = param.dtype.type(coefficients[3])
    for i in range(param.size):
        p = param[i]
        g = grad[i] * scale + p * weight_decay
        v = velocity[i] * momentum + g
        velocity[i] = v
        param[i] = p - (g + v * momentum) * lr


@_compile(4, 9)
def adam(param, grad, m, v, coefficients):  # type: ignore[no-untyped-def]
    """Update by Adam or AdamW; see `reference.adam`."""
    step_size = param.dtype.type(coefficients[0])
    weight_decay = param.dtype.type(coefficients[1])
    scale = param.dtype.type(coefficients[2])
    shrink = param.dtype.type(coefficients[3])
    one_minus_beta1 = param.dtype.type(coefficients[4])
    beta2 = param.dtype.type(coefficients[5])
    one_minus_beta2 = param.dtype.type(coefficients[6])
    root_scale = param.dtype.type(coefficients[7])
    eps = param.dtype.type(coefficients[8])
    for i in range(param.size):
        p = param[i]
        g = grad[i] * scale + p * weight_decay
        first = m[i] + (g - m[i]) * one_minus_beta1
        second = v[i] * beta2 + (g * g) * one_minus_beta2
        m[i] = first
        v[i] = second
        param[i] = p * shrink - (first / (np.sqrt(second) * root_scale + eps)) * step_size


_SUM_BLOCK = 1024
"""Number of elements summed at a time."""

REDUCING_DTYPES = (np.dtype("float32"), np.dtype("float64"))
"""Dtypes for which these are called."""

_coefficients = {count: types.UniTuple(types.float64, count) for count in (3, 4, 9)}


def _compile_reducing(num_states: int, num_coefficients: int):  # type: ignore[no-untyped-def]
    signatures = []
    for dtype in REDUCING_DTYPES:
        t = getattr(types, dtype.name)
        flats = [types.Array(t, 1, "C")] * (1 + num_states)
        signatures.append(
            types.void(types.Array(t, 2, "C"), types.intp, types.intp, *flats, _coefficients[num_coefficients])
        )
    return kernel(signatures)


# A factory that closes over the rule would be compiled by every process: Numba's cache key contains the identity of
# kernels in the closure, which differs between processes (measured: no hit in a second run).


@_compile_reducing(0, 3)
def reduce_sgd(rows, lo, hi, param, coefficients):  # type: ignore[no-untyped-def]
    """Sum columns ``lo`` to ``hi`` of ``rows``, shape ``(n, m)``, and update ``param``, shape ``(hi - lo,)``.

    ``coefficients`` and the rule are those of `sgd`. The variants with state take arrays of the shape of ``param``.
    """
    grad = np.empty(_SUM_BLOCK, param.dtype)
    for first in range(0, param.size, _SUM_BLOCK):
        last = min(first + _SUM_BLOCK, param.size)
        combine(rows, lo + first, lo + last, grad[: last - first], SUM)
        sgd(param[first:last], grad[: last - first], coefficients)


@_compile_reducing(1, 4)
def reduce_sgd_momentum(rows, lo, hi, param, velocity, coefficients):  # type: ignore[no-untyped-def]
    """Sum and update by SGD with momentum, as `reduce_sgd`."""
    grad = np.empty(_SUM_BLOCK, param.dtype)
    for first in range(0, param.size, _SUM_BLOCK):
        last = min(first + _SUM_BLOCK, param.size)
        combine(rows, lo + first, lo + last, grad[: last - first], SUM)
        sgd_momentum(param[first:last], grad[: last - first], velocity[first:last], coefficients)


@_compile_reducing(1, 4)
def reduce_sgd_nesterov(rows, lo, hi, param, velocity, coefficients):  # type: ignore[no-untyped-def]
    """Sum and update by SGD with Nesterov's momentum, as `reduce_sgd`."""
    grad = np.empty(_SUM_BLOCK, param.dtype)
    for first in range(0, param.size, _SUM_BLOCK):
        last = min(first + _SUM_BLOCK, param.size)
        combine(rows, lo + first, lo + last, grad[: last - first], SUM)
        sgd_nesterov(param[first:last], grad[: last - first], velocity[first:last], coefficients)


@_compile_reducing(2, 9)
def reduce_adam(rows, lo, hi, param, m, v, coefficients):  # type: ignore[no-untyped-def]
    """Sum and update by Adam or AdamW, as `reduce_sgd`."""
    grad = np.empty(_SUM_BLOCK, param.dtype)
    for first in range(0, param.size, _SUM_BLOCK):
        last = min(first + _SUM_BLOCK, param.size)
        combine(rows, lo + first, lo + last, grad[: last - first], SUM)
        adam(param[first:last], grad[: last - first], m[first:last], v[first:last], coefficients)


REDUCING_RULES = {
    "sgd": reduce_sgd,
    "sgd_momentum": reduce_sgd_momentum,
    "sgd_nesterov": reduce_sgd_nesterov,
    "adam": reduce_adam,
}
"""The fused updates by the names of the plain ones."""


@intrinsic
def _pack_16(typingctx: Any, grad: Any, residual: Any, index: Any, threshold: Any, magnitude: Any) -> Any:
    """Return the word of 16 elements from ``index`` on; changes ``residual``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        added = Lanes(context, builder, (signature.args[0], args[0]), args[2], 16).load()
        lanes = Lanes(context, builder, (signature.args[1], args[1]), args[2], 16)
        total = lanes.rounded(builder.fadd(lanes.load(), added))
        up = lanes.repeat(args[3])
        down = builder.fneg(up)
        plus, minus = builder.fcmp_ordered(">=", total, up), builder.fcmp_ordered("<=", total, down)
        size = lanes.repeat(args[4])
        sent = builder.select(plus, size, builder.select(minus, builder.fneg(size), lanes.constant(0.0)))
        lanes.store(builder.fsub(total, sent))
        return builder.or_(lanes.bits(plus), builder.shl(lanes.bits(minus), WORD(16)))

    return uint32(grad, residual, intp, float64, float64), generate


@intrinsic
def _unpack_16(typingctx: Any, word: Any, magnitude: Any, out: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = Lanes(context, builder, (signature.args[2], args[2]), args[3], 16)
        up = into.repeat(args[1])
        negative = builder.select(into.flags(args[0], 16), builder.fneg(up), into.constant(0.0))
        into.store(builder.select(into.flags(args[0], 0), up, negative))
        return context.get_dummy_value()

    return types.none(uint32, float64, out, intp), generate


@intrinsic
def _pack_32(typingctx: Any, grad: Any, residual: Any, index: Any, threshold: Any, magnitude: Any) -> Any:
    """Return the word of 32 elements from ``index`` on; changes ``residual``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        added = Lanes(context, builder, (signature.args[0], args[0]), args[2], 32).load()
        lanes = Lanes(context, builder, (signature.args[1], args[1]), args[2], 32)
        total = lanes.rounded(builder.fadd(lanes.load(), added))
        plus = builder.fcmp_ordered(">", total, lanes.repeat(args[3]))
        sent = lanes.repeat(args[4])
        lanes.store(builder.fsub(total, builder.select(plus, sent, builder.fneg(sent))))
        return lanes.bits(plus)

    return uint32(grad, residual, intp, float64, float64), generate


@intrinsic
def _unpack_32(typingctx: Any, word: Any, magnitude: Any, out: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = Lanes(context, builder, (signature.args[2], args[2]), args[3], 32)
        sent = into.repeat(args[1])
        into.store(builder.select(into.flags(args[0], 0), sent, builder.fneg(sent)))
        return context.get_dummy_value()

    return types.none(uint32, float64, out, intp), generate


# No factory: Numba's cache misses functions that close over an intrinsic in the next process. Separate functions for
# the tails took 0.3 s more to compile, of 1.0.
@kernel()
def pack_two_bit(grad, residual, threshold, magnitude, words):  # type: ignore[no-untyped-def]
    """See `reference.pack_two_bit`."""
    if residual.size != grad.size or words.size * 16 < grad.size:
        raise ValueError("residual must have as many elements as grad, and words a bit field for each")
    full_words = grad.size // 16
    for k in range(full_words):
        words[k] = _pack_16(grad, residual, 16 * k, threshold, magnitude)
    tail = grad.size - 16 * full_words
    if tail:
        last_grad, last_residual = np.zeros(16, grad.dtype), np.zeros(16, residual.dtype)
        for i in range(tail):
            last_grad[i], last_residual[i] = grad[16 * full_words + i], residual[16 * full_words + i]
        used = (1 << tail) - 1  # the padding's zeros may reach the threshold
        words[full_words] = _pack_16(last_grad, last_residual, 0, threshold, magnitude) & (used << 16 | used)
        for i in range(tail):
            residual[16 * full_words + i] = last_residual[i]


@kernel()
def unpack_two_bit(words, magnitude, out):  # type: ignore[no-untyped-def]
    """See `reference.unpack_two_bit`."""
    if words.size * 16 < out.size:
        raise ValueError("words must have a bit field for each element of out")
    full_words = out.size // 16
    for k in range(full_words):
        _unpack_16(words[k], magnitude, out, 16 * k)
    tail = out.size - 16 * full_words
    if tail:
        last = np.empty(16, out.dtype)
        _unpack_16(words[full_words], magnitude, last, 0)
        for i in range(tail):
            out[16 * full_words + i] = last[i]


@kernel()
def pack_one_bit(grad, residual, threshold, magnitude, words):  # type: ignore[no-untyped-def]
    """See `reference.pack_one_bit`."""
    if residual.size != grad.size or words.size * 32 < grad.size:
        raise ValueError("residual must have as many elements as grad, and words a bit field for each")
    full_words = grad.size // 32
    for k in range(full_words):
        words[k] = _pack_32(grad, residual, 32 * k, threshold, magnitude)
    tail = grad.size - 32 * full_words
    if tail:
        last_grad, last_residual = np.zeros(32, grad.dtype), np.zeros(32, residual.dtype)
        for i in range(tail):
            last_grad[i], last_residual[i] = grad[32 * full_words + i], residual[32 * full_words + i]
        used = (1 << tail) - 1  # the padding's zeros may be above the threshold
        words[full_words] = _pack_32(last_grad, last_residual, 0, threshold, magnitude) & used
        for i in range(tail):
            residual[32 * full_words + i] = last_residual[i]


@kernel()
def unpack_one_bit(words, magnitude, out):  # type: ignore[no-untyped-def]
    """See `reference.unpack_one_bit`."""
    if words.size * 32 < out.size:
        raise ValueError("words must have a bit field for each element of out")
    full_words = out.size // 32
    for k in range(full_words):
        _unpack_32(words[k], magnitude, out, 32 * k)
    tail = out.size - 32 * full_words
    if tail:
        last = np.empty(32, out.dtype)
        _unpack_32(words[full_words], magnitude, last, 0)
        for i in range(tail):
            out[32 * full_words + i] = last[i]


_DIGITS = ((19, 12), (7, 12), (0, 7))
"""Digits of a float32's magnitude, which has 31 bits: left shift and number of bits of each."""


@kernel(fastmath={"reassoc", "contract"})
def _squares(grad, residual):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(residual.size):
        element = float64(widen(grad[i]) + widen(residual[i]))
        total += element * element
    return total


@kernel(fastmath={"reassoc", "contract"})
def _magnitudes(grad, residual):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(residual.size):
        total += abs(widen(grad[i]) + widen(residual[i]))
    return total


@kernel(fastmath={"reassoc", "contract"})
def _mean_from(grad, residual, threshold):  # type: ignore[no-untyped-def]
    # In the elements' own type, without branches: a vector at a time, 20 times as fast.
    limit, none = type(widen(residual[0]))(threshold), type(widen(residual[0]))(0)
    total, number = none, none
    for i in range(residual.size):
        magnitude = abs(widen(grad[i]) + widen(residual[i]))
        total += magnitude if magnitude >= limit else none
        number += type(magnitude)(1) if magnitude >= limit else none
    return total / max(number, type(number)(1))


@kernel()
def encode_two_bit(grad, residual, threshold, scales, words):  # type: ignore[no-untyped-def]
    """See `reference.encode_two_bit`."""
    for block in range(scales.size):
        first, last = block * BLOCK, min((block + 1) * BLOCK, grad.size)
        added, left, packed = grad[first:last], residual[first:last], words[first // 16 : (last + 15) // 16]
        total, limit, sent = _squares(added, left), threshold, threshold
        if threshold == 0:
            limit = SHARE * np.sqrt(total / (last - first))
            sent = _mean_from(added, left, limit)
        scales[block] = sent
        if np.isfinite(total) and np.isfinite(scales[block]):
            pack_two_bit(added, left, limit, scales[block], packed)
        else:
            scales[block] = np.nan
            packed[:] = 0xFFFF
            left[:] = 0


@kernel()
def decode_two_bit(scales, words, out):  # type: ignore[no-untyped-def]
    """See `reference.decode_two_bit`."""
    for block in range(scales.size):
        first, last = block * BLOCK, min((block + 1) * BLOCK, out.size)
        unpack_two_bit(words[first // 16 : (last + 15) // 16], scales[block], out[first:last])


@kernel()
def encode_one_bit(grad, residual, threshold, magnitude, scales, words):  # type: ignore[no-untyped-def]
    """See `reference.encode_one_bit`."""
    for block in range(scales.size):
        first, last = block * BLOCK, min((block + 1) * BLOCK, grad.size)
        added, left, packed = grad[first:last], residual[first:last], words[first // 32 : (last + 31) // 32]
        total = _magnitudes(added, left)
        scales[block] = magnitude if magnitude > 0 else total / (last - first)
        if np.isfinite(total) and np.isfinite(scales[block]):
            pack_one_bit(added, left, threshold, scales[block], packed)
        else:
            scales[block] = np.nan
            packed[:] = 0xFFFFFFFF
            left[:] = 0


@kernel()
def decode_one_bit(scales, words, out):  # type: ignore[no-untyped-def]
    """See `reference.decode_one_bit`."""
    for block in range(scales.size):
        first, last = block * BLOCK, min((block + 1) * BLOCK, out.size)
        unpack_one_bit(words[first // 32 : (last + 31) // 32], scales[block], out[first:last])


@kernel()
def encode_float16(grad, residual, halves):  # type: ignore[no-untyped-def]
    """See `reference.encode_float16`."""
    for i in range(grad.size):
        total = residual[i] + grad[i]
        halves[i] = narrow(total, halves)
        error = total - widen(halves[i])
        residual[i] = error if abs(error) < np.inf else float32(0)


@kernel()
def encode_bfloat16(grad, residual, halves):  # type: ignore[no-untyped-def]
    """See `reference.encode_bfloat16`; block by block, so that the search for NaNs is vectorized."""
    for first in range(0, grad.size, BLOCK):
        part = slice(first, min(first + BLOCK, grad.size))
        _encode_bfloat16(grad[part], residual[part], halves[part])


@kernel()
def _encode_bfloat16(grad, residual, halves):  # type: ignore[no-untyped-def]
    for i in range(grad.size):
        residual[i] += grad[i]
    to_bfloat16(residual, halves)
    for i in range(grad.size):
        error = residual[i] - _from_bfloat16(halves[i])
        residual[i] = error if abs(error) < np.inf else float32(0)


@kernel()
def encode_top_k(grad, residual, indices, values):  # type: ignore[no-untyped-def]
    """See `reference.encode_top_k`; finds the smallest magnitude that is sent digit by digit."""
    if indices.size == 0:
        return
    for i in range(grad.size):
        residual[i] += grad[i]
    leading_bits, ties = uint32(0), indices.size
    for digit in range(len(_DIGITS)):
        shift, bits = _DIGITS[digit]
        counts = np.zeros(1 << bits, np.int64)
        for i in range(residual.size):
            magnitude = magnitude_bits(residual[i])
            if magnitude >> (shift + bits) == leading_bits:
                counts[(magnitude >> shift) & ((1 << bits) - 1)] += 1
        at = counts.size - 1
        while counts[at] < ties:
            ties -= counts[at]
            at -= 1
        leading_bits = uint32(leading_bits << bits | at)
    place = 0
    for i in range(residual.size):
        magnitude = magnitude_bits(residual[i])
        if magnitude < leading_bits:
            continue
        if magnitude == leading_bits:
            if ties == 0:
                continue
            ties -= 1
        indices[place], values[place] = i, residual[i]
        residual[i] = 0
        place += 1
    if not np.isfinite(values[0] if indices.size == 1 else np.abs(values).max()):
        for i in range(residual.size):  # there may be more than are sent
            residual[i] = residual[i] if abs(residual[i]) < np.inf else float32(0)


@kernel()
def decode_top_k(indices, values, out):  # type: ignore[no-untyped-def]
    """See `reference.decode_top_k`."""
    out[:] = 0
    for place in range(indices.size):
        if indices[place] < out.size:
            out[indices[place]] = values[place]
