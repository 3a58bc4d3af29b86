"""A chain of elementwise operations in one pass over memory, in blocks that stay in the first-level cache.

`reference.chain` is the specification of the operations; there is no fastmath here, so that each rounds
as NumPy's own.

Chains are known only when a network is planned, so this is no kernel for one chain, which would have to be compiled
then, but one that reads what to do: all operations for a block, then the next block.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from .hyperbolic import GELU_CUBE, GELU_SLOPE, gelu, gelu_gradient
from .machine_code import kernel

BLOCK = 1024
"""Elements."""

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
def run(code, zero):  # type: ignore[no-untyped-def]
    """Compute a chain for all its elements.

    Operations are made in their order for one block of up to `BLOCK` elements after the other. What one of them writes
    must not overlap with what it reads, or it takes several times as long.

    Args:
        code: int64, four numbers a row: first how many elements, the period after which rows begin again (no block
            lies in two), and the numbers of operands and of fillings. Then the operands: the address of each, and how
            many bytes further the next element of the whole and of the row is (0 for what each block begins with
            anew). Then the fillings, made once before all else: the address of some elements, how many, and to which
            address they are copied over and over, up to how many. Then the operations: their places in
            `reference.chain.OPERATIONS`, the numbers of both operands (of the only one twice) and of the result.
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
        for start in range(first, last, BLOCK):
            count = min(BLOCK, last - start)
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
                elif operation == _MAXIMUM:  # of two zeros the second one, as NumPy's
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
                        out[i] = gelu(a[i], half, one, slope, cube)
                elif operation == _GELU_GRADIENT:
                    for i in range(count):
                        out[i] = gelu_gradient(a[i], b[i], half, one, slope, cube)
                elif operation == _COPY:
                    for i in range(count):
                        out[i] = a[i]
