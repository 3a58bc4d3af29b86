"""Elementwise kernels for NumPy arrays: bias and activation, GELU, chains of operations, casts, scaling.

Functions have the names and arguments of `reference.networks`. Sums and ReLU are the reference's, because NumPy is as
fast. Without fastmath, operations round as NumPy's own.

Chains are known only when a network is planned, too late to compile a kernel for each. `run_chain` therefore interprets
a chain: all operations for a block that stays in the L1 cache, then the next block. Casts take 1-D contiguous arrays
that do not overlap; 16-bit floats are passed as their bits in uint16.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import float32, types, uint16
from numba.extending import intrinsic, overload

from .jit import WORD, Lanes, any_bfloat16, float_kernel, kernel, narrow, nearest_bfloat16, of_bfloat16, widen
from .reference.gradients import add_up_rows
from .reference.networks import add as add
from .reference.networks import relu as relu

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
