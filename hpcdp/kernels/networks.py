"""Numba kernels of networks: elementwise operations, casts, normalization, sequences.

Functions have the names and arguments of `reference`, and are its own where NumPy is as fast: sums, ReLU,
cross-entropy. Without fastmath, operations round as NumPy's own.

- Chains of operations are known only when a network is planned, too late to compile a kernel for each. `run_chain`
  therefore interprets a chain: all operations for a block that stays in the L1 cache, then the next block.
- Casts take 1-D contiguous arrays that do not overlap; 16-bit floats are passed as their bits in uint16.
- Sums of batch and layer normalization, over a plane or a row, and of sequences run in as many lanes as a vector
  register has (``reassoc``). Their order is the same in every run, because those loops store nothing. Sums of planes
  are added in float64.
- Loops of an LSTM write one array each: with more the compiler would not vectorize, because it would need too many
  alias checks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import float32, float64, types, uint16
from numba.extending import intrinsic, overload
from numba.types import Tuple, UniTuple

from . import reference
from .jit import WORD, Lanes, any_bfloat16, float_kernel, kernel, narrow, nearest_bfloat16, of_bfloat16, widen
from .reference import add as add
from .reference import add_up_rows
from .reference import relu as relu
from .reference import softmax_cross_entropy as softmax_cross_entropy
from .reference import softmax_cross_entropy_gradient as softmax_cross_entropy_gradient

_F = np.float32
_BOUND = _F(7.90531110763549805)
_A1, _A3, _A5, _A7 = map(_F, (4.89352455891786e-03, 6.37261928875436e-04, 1.48572235717979e-05, 5.12229709037114e-08))
_A9, _A11, _A13 = map(_F, (-8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16))
_B0, _B2, _B4, _B6 = map(_F, (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06))

GELU_SLOPE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


def tanh(x):  # type: ignore[no-untyped-def]
    """Return the hyperbolic tangent inside of kernels; in float64 that of the C library.

    In float32 it is Eigen's quotient of polynomials of degree 13 and 6 (``ptanh_float``), with an error of at most 6
    units in the last place. The C library would need a call for each element. NaN stays NaN.
    """
    return np.tanh(x)


@overload(tanh)  # type: ignore[untyped-decorator]
def _tanh(x):  # type: ignore[no-untyped-def]
    if x != numba.float32:
        return lambda x: np.tanh(x)

    def quotient(x):  # type: ignore[no-untyped-def]
        y = _BOUND if x > _BOUND else x  # this form keeps NaN
        y = -_BOUND if y < -_BOUND else y
        s = y * y
        above = (((((_A13 * s + _A11) * s + _A9) * s + _A7) * s + _A5) * s + _A3) * s + _A1
        return y * above / (((_B6 * s + _B4) * s + _B2) * s + _B0)

    return quotient


@numba.njit(inline="always")
def gelu_of(x, half, one, slope, cube):  # type: ignore[no-untyped-def]
    """See `reference.gelu`; the constants 1/2, 1, `GELU_SLOPE` and `GELU_CUBE` have the dtype of ``x``."""
    return half * x * (one + tanh(slope * (x + cube * x * x * x)))


@numba.njit(inline="always")
def gelu_gradient_of(gy, x, half, one, slope, cube):  # type: ignore[no-untyped-def]
    """See `reference.gelu_gradient`; constants as in `gelu_of`."""
    square = x * x
    y = tanh(slope * x * (one + cube * square))
    return gy * (half * (one + y) + half * x * (one - y * y) * slope * (one + (one + one + one) * cube * square))


@float_kernel(lambda f: (f[:, ::1], f[::1], numba.boolean))
def add_bias(y, bias, relu):  # type: ignore[no-untyped-def]
    """See `reference.add_bias`."""
    zero = y.dtype.type(0)
    for row in range(y.shape[0]):
        if relu:
            for i in range(y.shape[1]):
                value = y[row, i] + bias[i]
                y[row, i] = value if value > zero or np.isnan(value) else zero
        else:
            for i in range(y.shape[1]):
                y[row, i] += bias[i]


@float_kernel(lambda f: (f[::1], f[::1], f[::1]))
def _relu_gradient(gy, y, dx):  # type: ignore[no-untyped-def]
    zero = gy.dtype.type(0)
    for i in range(gy.size):
        dx[i] = gy[i] if y[i] > zero else zero


def relu_gradient(gy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """See `reference.relu_gradient`; the arrays must be C-contiguous."""
    _relu_gradient(gy.reshape(-1), y.reshape(-1), dx.reshape(-1))


def bias_gradient(gy: np.ndarray, y: np.ndarray | None, dx: np.ndarray | None, dbias: np.ndarray) -> None:
    """See `reference.bias_gradient`; for rows only."""
    if y is not None and dx is not None:
        relu_gradient(gy, y, dx)
        gy = dx
    add_up_rows(gy, dbias)


@float_kernel(lambda f: (f[::1], f[::1]))
def _gelu(x, out):  # type: ignore[no-untyped-def]
    kind = x.dtype.type
    half, one, slope, cube = kind(0.5), kind(1), kind(GELU_SLOPE), kind(GELU_CUBE)
    for i in range(x.size):
        out[i] = gelu_of(x[i], half, one, slope, cube)


def gelu(x: np.ndarray, out: np.ndarray) -> None:
    """See `reference.gelu`; the arrays must be C-contiguous."""
    _gelu(x.reshape(-1), out.reshape(-1))


@float_kernel(lambda f: (f[::1], f[::1], f[::1]))
def _gelu_gradient(gy, x, dx):  # type: ignore[no-untyped-def]
    kind = x.dtype.type
    half, one, slope, cube = kind(0.5), kind(1), kind(GELU_SLOPE), kind(GELU_CUBE)
    for i in range(x.size):
        dx[i] = gelu_gradient_of(gy[i], x[i], half, one, slope, cube)


def gelu_gradient(gy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """See `reference.gelu_gradient`; the arrays must be C-contiguous."""
    _gelu_gradient(gy.reshape(-1), x.reshape(-1), dx.reshape(-1))


CHAIN_BLOCK = 1024
"""Number of elements of a block."""

(
    _ADD, _SUBTRACT, _MULTIPLY, _DIVIDE, _MAXIMUM, _MINIMUM, _NEGATIVE, _ABS, _SQRT, _SIGN, _GREATER, _EQUAL,
    _WHERE_POSITIVE, _GELU, _GELU_GRADIENT, _COPY,
) = range(16)  # fmt: skip


@intrinsic
def _pointer(typing_context, address, like):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), generate


@numba.njit(inline="always")
def _operand(code, number, start, first, count, zero):  # type: ignore[no-untyped-def]
    place = code[1 + number]
    return numba.carray(_pointer(place[0] + start * place[1] + (start - first) * place[2], zero), (count,))


@kernel([numba.void(numba.int64[:, ::1], f) for f in (numba.float32, numba.float64)])
def run_chain(code, zero):  # type: ignore[no-untyped-def]
    """Compute a chain for all its elements.

    The operations run in order on one block of up to `CHAIN_BLOCK` elements after the other. An operation's result must
    not overlap with its operands, which would take several times as long.

    Args:
        code: int64, four numbers a row. Row 0: number of elements, period after which rows restart (no block spans
            two), numbers of operands and of fillings. Then the operands: address, and the bytes to the next element of
            the whole array and of the row (0 for data that every block restarts). Then the fillings, done once before
            all else: source address, number of elements, and the target address and length that they fill repeatedly.
            Then the operations: index in `reference.OPERATIONS`, numbers of both operands (a single one twice) and of
            the result.
        zero: 0 in the dtype of all elements.
    """
    size, period, num_operands, num_fillings = code[0]
    begin = 1 + num_operands + num_fillings
    kind = numba.carray(_pointer(code[1, 0], zero), (0,)).dtype.type
    one, half, slope, cube = kind(1), kind(0.5), kind(GELU_SLOPE), kind(GELU_CUBE)
    for number in range(1 + num_operands, begin):
        source = numba.carray(_pointer(code[number, 0], zero), (code[number, 1],))
        target = numba.carray(_pointer(code[number, 2], zero), (code[number, 3],))
        for at in range(0, target.size, source.size):
            for i in range(source.size):
                target[at + i] = source[i]
    for first in range(0, size, period):
        last = min(first + period, size)
        for start in range(first, last, CHAIN_BLOCK):
            count = min(CHAIN_BLOCK, last - start)
            for number in range(begin, code.shape[0]):
                operation = code[number, 0]
                a = _operand(code, code[number, 1], start, first, count, zero)
                b = _operand(code, code[number, 2], start, first, count, zero)
                out = _operand(code, code[number, 3], start, first, count, zero)
                if operation == _ADD:
                    for i in range(count):
                        out[i] = a[i] + b[i]
                elif operation == _SUBTRACT:
                    for i in range(count):
                        out[i] = a[i] - b[i]
                elif operation == _MULTIPLY:
                    for i in range(count):
                        out[i] = a[i] * b[i]
                elif operation == _DIVIDE:
                    for i in range(count):
                        out[i] = a[i] / b[i]
                elif operation == _MAXIMUM:  # as in NumPy, the second of two zeros
                    for i in range(count):
                        out[i] = a[i] if a[i] > b[i] or np.isnan(a[i]) else b[i]
                elif operation == _MINIMUM:
                    for i in range(count):
                        out[i] = a[i] if a[i] < b[i] or np.isnan(a[i]) else b[i]
                elif operation == _NEGATIVE:
                    for i in range(count):
                        out[i] = -a[i]
                elif operation == _ABS:
                    for i in range(count):
                        out[i] = abs(a[i])
                elif operation == _SQRT:
                    for i in range(count):
                        out[i] = np.sqrt(a[i])
                elif operation == _SIGN:
                    for i in range(count):
                        out[i] = one if a[i] > zero else -one if a[i] < zero else a[i] if np.isnan(a[i]) else zero
                elif operation == _GREATER:
                    for i in range(count):
                        out[i] = one if a[i] > b[i] else zero
                elif operation == _EQUAL:
                    for i in range(count):
                        out[i] = one if a[i] == b[i] else zero
                elif operation == _WHERE_POSITIVE:
                    for i in range(count):
                        out[i] = b[i] if a[i] > zero else zero
                elif operation == _GELU:
                    for i in range(count):
                        out[i] = gelu_of(a[i], half, one, slope, cube)
                elif operation == _GELU_GRADIENT:
                    for i in range(count):
                        out[i] = gelu_gradient_of(a[i], b[i], half, one, slope, cube)
                elif operation == _COPY:
                    for i in range(count):
                        out[i] = a[i]


@intrinsic
def _bfloat16(typingctx: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return any_bfloat16(builder, args[0])

    return types.uint16(types.float32), generate


@intrinsic
def _round_32(typingctx: Any, x: Any, out: Any, index: Any) -> Any:
    """Round 32 elements from ``index`` on as if none were NaN; return a number that is 0 if none was.

    One instruction compares both halves with each other; 16 or 64 elements took 1.1 times as long.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = Lanes(context, builder, (signature.args[0], args[0]), args[2], 32)
        into = Lanes(context, builder, (signature.args[1], args[1]), args[2], 32)
        value = lanes.load()
        into.store_bits(nearest_bfloat16(builder, value, 32))
        halves = (
            builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(WORD, 16), list(range(first, first + 16))))
            for first in (0, 16)
        )
        unordered = builder.bitcast(builder.fcmp_unordered("uno", *halves), ir.IntType(16))
        return builder.zext(unordered, WORD)

    return types.uint32(x, out, types.intp), generate


@intrinsic
def _from_bfloat16(typingctx: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return of_bfloat16(builder, args[0])

    return types.float32(types.uint16), generate


# No factory for these loops: Numba's cache misses functions that close over an intrinsic in the next process.
@kernel([types.void(float32[::1], uint16[::1])])
def to_float16(x, out):  # type: ignore[no-untyped-def]
    """See `reference.to_float16`."""
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    for i in range(out.size):
        out[i] = narrow(x[i], out)


@kernel([types.void(uint16[::1], float32[::1])])
def from_float16(x, out):  # type: ignore[no-untyped-def]
    """See `reference.from_float16`."""
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    for i in range(out.size):
        out[i] = widen(x[i])


@kernel([types.void(float32[::1], uint16[::1])])
def to_bfloat16(x, out):  # type: ignore[no-untyped-def]
    """See `reference.to_bfloat16`.

    NaNs are detected in 32 elements at a time; a branch for every element took a quarter of the time.
    """
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    whole = x.size - x.size % 32
    for first in range(0, whole, 32):
        if _round_32(x, out, first):
            for i in range(first, first + 32):
                out[i] = _bfloat16(x[i])
    for i in range(whole, x.size):
        out[i] = _bfloat16(x[i])


@kernel([types.void(uint16[::1], float32[::1])])
def from_bfloat16(x, out):  # type: ignore[no-untyped-def]
    """See `reference.from_bfloat16`."""
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    for i in range(out.size):
        out[i] = _from_bfloat16(x[i])


@kernel()
def follow(wide, x):  # type: ignore[no-untyped-def]
    """See `reference.follow`."""
    if wide.size != x.size:
        raise ValueError("wide must have as many elements as x")
    for i in range(wide.size):
        if narrow(wide[i], x) != x[i]:
            wide[i] = widen(x[i])


@kernel()
def scale(x, factor):  # type: ignore[no-untyped-def]
    """See `reference.scale`."""
    by = type(widen(x.dtype.type(0)))(factor)
    for i in range(x.size):
        x[i] = narrow(widen(x[i]) * by, x)


@kernel()
def scale_into(x, factor, out):  # type: ignore[no-untyped-def]
    """See `reference.scale_into`."""
    by = type(widen(x.dtype.type(0)))(factor)
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    for i in range(out.size):
        out[i] = narrow(widen(x[i]) * by, out)


_kernel = partial(float_kernel, fastmath={"reassoc", "contract"})


@_kernel(lambda f: (f[:, :, ::1], f[::1], f[::1], f[:, :, ::1], UniTuple(f[::1], 2), float64))
def batch_norm(x, scale, shift, out, saved, eps):  # type: ignore[no-untyped-def]
    """See `reference.batch_norm`."""
    batch, channels, size = x.shape
    count = batch * size
    for c in range(channels):
        total = 0.0
        for n in range(batch):
            part = x.dtype.type(0)
            for i in range(size):
                part += x[n, c, i]
            total += part
        mean = x.dtype.type(total / count)
        squares = 0.0
        for n in range(batch):
            part = x.dtype.type(0)
            for i in range(size):
                part += (x[n, c, i] - mean) * (x[n, c, i] - mean)
            squares += part
        saved[0][c] = mean
        saved[1][c] = squares / count
        factor = x.dtype.type(scale[c] / np.sqrt(squares / count + eps))
        offset = shift[c]
        for n in range(batch):
            for i in range(size):
                out[n, c, i] = (x[n, c, i] - mean) * factor + offset


@_kernel(
    lambda f: (f[:, :, ::1], f[:, :, ::1], f[::1], UniTuple(f[::1], 2), Tuple((f[:, :, ::1], f[::1], f[::1])), float64)
)
def batch_norm_gradients(gy, x, scale, saved, into, eps):  # type: ignore[no-untyped-def]
    """See `reference.batch_norm_gradients`."""
    dx, dscale, dshift = into
    batch, channels, size = x.shape
    count = batch * size
    for c in range(channels):
        mean = saved[0][c]
        inverse = 1.0 / np.sqrt(saved[1][c] + eps)
        total, product = 0.0, 0.0
        for n in range(batch):
            part, other = x.dtype.type(0), x.dtype.type(0)
            for i in range(size):
                part += gy[n, c, i]
                other += gy[n, c, i] * (x[n, c, i] - mean)
            total += part
            product += other
        dshift[c] = total
        dscale[c] = product * inverse
        factor = x.dtype.type(scale[c] * inverse)
        constant = x.dtype.type(total / count)
        slope = x.dtype.type(product * inverse * inverse / count)
        for n in range(batch):
            for i in range(size):
                dx[n, c, i] = (gy[n, c, i] - constant - (x[n, c, i] - mean) * slope) * factor


@_kernel(lambda f: (f[:, :, ::1], float64[:, ::1]))
def channel_sums(x, sums):  # type: ignore[no-untyped-def]
    """See `reference.channel_sums`."""
    batch, channels, size = x.shape
    for c in range(channels):
        total, squares = 0.0, 0.0
        for n in range(batch):
            for i in range(size):
                value = float64(x[n, c, i])
                total += value
                squares += value * value
        sums[0, c] = total
        sums[1, c] = squares


@_kernel(lambda f: (f[:, :, ::1], f[::1], f[::1], UniTuple(f[::1], 2), f[:, :, ::1], float64))
def normalize(x, scale, shift, saved, out, eps):  # type: ignore[no-untyped-def]
    """See `reference.normalize`."""
    batch, channels, size = x.shape
    for c in range(channels):
        mean = saved[0][c]
        factor = x.dtype.type(scale[c] / np.sqrt(saved[1][c] + eps))
        offset = shift[c]
        for n in range(batch):
            for i in range(size):
                out[n, c, i] = (x[n, c, i] - mean) * factor + offset


@_kernel(lambda f: (f[:, :, ::1], f[:, :, ::1], UniTuple(f[::1], 2), float64[:, ::1], float64))
def gradient_sums(gy, x, saved, sums, eps):  # type: ignore[no-untyped-def]
    """See `reference.gradient_sums`."""
    batch, channels, size = x.shape
    for c in range(channels):
        mean = saved[0][c]
        total, product = 0.0, 0.0
        for n in range(batch):
            part, other = x.dtype.type(0), x.dtype.type(0)
            for i in range(size):
                part += gy[n, c, i]
                other += gy[n, c, i] * (x[n, c, i] - mean)
            total += part
            product += other
        sums[0, c] = total
        sums[1, c] = product / np.sqrt(saved[1][c] + eps)


@_kernel(lambda f: (f[:, :, ::1], f[:, :, ::1], f[::1], UniTuple(f[::1], 2), float64[:, ::1], f[:, :, ::1], float64))
def gradient_of_input(gy, x, scale, saved, means, dx, eps):  # type: ignore[no-untyped-def]
    """See `reference.gradient_of_input`."""
    batch, channels, size = x.shape
    for c in range(channels):
        mean = saved[0][c]
        inverse = 1.0 / np.sqrt(saved[1][c] + eps)
        factor = x.dtype.type(scale[c] * inverse)
        constant = x.dtype.type(means[0, c])
        slope = x.dtype.type(means[1, c] * inverse)
        for n in range(batch):
            for i in range(size):
                dx[n, c, i] = (gy[n, c, i] - constant - (x[n, c, i] - mean) * slope) * factor


@_kernel(lambda f: (f[:, ::1], f[::1], f[::1], f[:, ::1], UniTuple(f[::1], 2), float64))
def layer_norm(x, scale, shift, out, saved, eps):  # type: ignore[no-untyped-def]
    """See `reference.layer_norm`."""
    count = x.shape[1]
    for n in range(x.shape[0]):
        row, into = x[n], out[n]
        total = x.dtype.type(0)
        for j in range(count):
            total += row[j]
        mean = x.dtype.type(total / count)
        squares = x.dtype.type(0)
        for j in range(count):
            squares += (row[j] - mean) * (row[j] - mean)
        inverse = x.dtype.type(1.0 / np.sqrt(squares / count + eps))
        for j in range(count):
            into[j] = (row[j] - mean) * inverse * scale[j] + shift[j]
        saved[0][n] = mean
        saved[1][n] = inverse


@_kernel(lambda f: (f[:, ::1], f[:, ::1], f[::1], UniTuple(f[::1], 2), Tuple((f[:, ::1], f[::1], f[::1]))))
def layer_norm_gradients(gy, x, scale, saved, into):  # type: ignore[no-untyped-def]
    """See `reference.layer_norm_gradients`."""
    dx, dscale, dshift = into
    count = x.shape[1]
    dscale[:] = 0
    dshift[:] = 0
    for n in range(x.shape[0]):
        row, g, to = x[n], gy[n], dx[n]
        mean, inverse = saved[0][n], saved[1][n]
        total, along = x.dtype.type(0), x.dtype.type(0)
        for j in range(count):
            scaled = g[j] * scale[j]
            total += scaled
            along += scaled * (row[j] - mean) * inverse
        total /= count
        along /= count
        for j in range(count):
            dscale[j] += g[j] * (row[j] - mean) * inverse
        for j in range(count):
            dshift[j] += g[j]
        for j in range(count):
            to[j] = (g[j] * scale[j] - total - (row[j] - mean) * inverse * along) * inverse


_LANES = {"reassoc", "contract"}


@float_kernel(lambda f: (f[:, :, ::1], numba.float64))
def causal_shift(scores, factor):  # type: ignore[no-untyped-def]
    """See `reference.causal_shift`."""
    by = scores.dtype.type(factor)
    for n in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            row = scores[n, i]
            largest = row[0] * by
            for j in range(i + 1):
                row[j] *= by
                if row[j] > largest or np.isnan(row[j]):
                    largest = row[j]
            for j in range(i + 1):
                row[j] -= largest
            for j in range(i + 1, row.size):
                row[j] = -np.inf


@float_kernel(lambda f: (f[:, :, ::1],), fastmath=_LANES)
def normalize_rows(chances):  # type: ignore[no-untyped-def]
    """See `reference.normalize_rows`."""
    for n in range(chances.shape[0]):
        for i in range(chances.shape[1]):
            row = chances[n, i]
            total = chances.dtype.type(0)
            for j in range(row.size):
                total += row[j]
            by = chances.dtype.type(1) / total
            for j in range(row.size):
                row[j] *= by


@float_kernel(lambda f: (f[:, :, ::1], f[:, :, ::1], numba.float64), fastmath=_LANES)
def softmax_gradient(chances, gradients, factor):  # type: ignore[no-untyped-def]
    """See `reference.softmax_gradient`."""
    by = chances.dtype.type(factor)
    for n in range(chances.shape[0]):
        for i in range(chances.shape[1]):
            row, to = chances[n, i], gradients[n, i]
            along = chances.dtype.type(0)
            for j in range(row.size):
                along += row[j] * to[j]
            for j in range(row.size):
                to[j] = row[j] * (to[j] - along) * by


@float_kernel(
    lambda f: (f[::1], f[:, ::1], numba.int64, f[:, :, ::1], f[:, :, ::1], f[:, :, ::1]), fastmath={"contract"}
)
def lstm_step(bias, product, t, gates, cells, inputs):  # type: ignore[no-untyped-def]
    """See `reference.lstm_step`."""
    size = cells.shape[2]
    first_hidden = inputs.shape[2] - size
    half = gates.dtype.type(0.5)
    for b in range(gates.shape[1]):
        for number in range(4):
            first, end = number * size, (number + 1) * size
            gate, total, offset = gates[t, b, first:end], product[b, first:end], bias[first:end]
            if number == 2:
                for j in range(size):
                    gate[j] = tanh(total[j] + offset[j])
            else:
                for j in range(size):
                    gate[j] = half * tanh(half * (total[j] + offset[j])) + half
        for j in range(size):
            cells[t + 1, b, j] = gates[t, b, j] * gates[t, b, 2 * size + j] + gates[t, b, size + j] * cells[t, b, j]
        for j in range(size):
            inputs[t + 1, b, first_hidden + j] = gates[t, b, 3 * size + j] * tanh(cells[t + 1, b, j])


@float_kernel(
    lambda f: (f[:, :, ::1], f[:, :, ::1], f[:, ::1], numba.int64, f[:, :, ::1], f[:, :, ::1], f[:, :, ::1], f[::1]),
    fastmath={"contract"},
)
def lstm_step_gradients(gy, dinputs, dcell, t, gates, cells, dgates, dbias):  # type: ignore[no-untyped-def]
    """See `reference.lstm_step_gradients`."""
    size = dcell.shape[1]
    one = gates.dtype.type(1)
    for b in range(gates.shape[1]):
        dhidden = dinputs[t + 1, b, dinputs.shape[2] - size :]
        for j in range(size):
            dhidden[j] += gy[b, t, j]
        for j in range(size):
            dgates[t, b, 3 * size + j] = tanh(cells[t + 1, b, j])
        for j in range(size):
            y = dgates[t, b, 3 * size + j]
            dcell[b, j] += dhidden[j] * gates[t, b, 3 * size + j] * (one - y * y)
        for j in range(size):
            i = gates[t, b, j]
            dgates[t, b, j] = dcell[b, j] * gates[t, b, 2 * size + j] * i * (one - i)
        for j in range(size):
            f = gates[t, b, size + j]
            dgates[t, b, size + j] = dcell[b, j] * cells[t, b, j] * f * (one - f)
        for j in range(size):
            g = gates[t, b, 2 * size + j]
            dgates[t, b, 2 * size + j] = dcell[b, j] * gates[t, b, j] * (one - g * g)
        for j in range(size):
            o = gates[t, b, 3 * size + j]
            dgates[t, b, 3 * size + j] *= dhidden[j] * o * (one - o)
        for j in range(size):
            dcell[b, j] *= gates[t, b, size + j]
        for j in range(4 * size):
            dbias[j] += dgates[t, b, j]


@float_kernel(lambda f: (f[:, ::1], numba.int64[::1], f[:, ::1]))
def add_rows(table, rows, values):  # type: ignore[no-untyped-def]
    """See `reference.add_rows`."""
    for k in range(rows.size):
        row, value = table[rows[k]], values[k]
        for j in range(row.size):
            row[j] += value[j]


def add_at(table: np.ndarray, key: Any, values: np.ndarray) -> None:
    """See `reference.add_at`; NumPy adds in order."""
    reference.add_at(table, key, values)
