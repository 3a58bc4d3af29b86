"""Floats of 16 bits inside a kernel: widened to float32 to be computed with, and rounded once. Imports: lanes, numba.

Numba knows neither format, so a kernel is given their bits as integers (`hpcdp.core.arrays.words`) and tells one from
the other by the sign of these: uint16 is float16 (IEEE binary16), int16 is bfloat16, the upper half of a float32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .lanes import WORD

_float16, _bfloat16 = types.uint16, types.int16
_HALF = ir.IntType(16)


def nearest_bfloat16(builder: Any, value: Any, width: int) -> Any:
    """Floats that are no NaN, ``width`` of them, as the nearest bfloat16, ties to even; in 32 bits, where Numba would
    take 64."""
    word, half = ir.VectorType(WORD, width), ir.VectorType(_HALF, width)
    sixteen, one, below_half = (ir.Constant(word, [number] * width) for number in (16, 1, 0x7FFF))
    bits = builder.bitcast(value, word)
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    return builder.trunc(builder.lshr(builder.add(bits, builder.add(odd, below_half)), sixteen), half)


def any_bfloat16(builder: Any, value: Any) -> Any:
    """A float32 as the bits of the nearest bfloat16; a NaN is made quiet so that it does not become an infinity."""
    quiet = builder.or_(builder.lshr(builder.bitcast(value, WORD), WORD(16)), WORD(0x40))
    rounded = builder.bitcast(nearest_bfloat16(builder, value, 1), _HALF)
    return builder.select(builder.fcmp_unordered("uno", value, value), builder.trunc(quiet, _HALF), rounded)


def of_bfloat16(builder: Any, bits: Any) -> Any:
    """The float32 that the bits of a bfloat16 stand for."""
    return builder.bitcast(builder.shl(builder.zext(bits, WORD), WORD(16)), ir.FloatType())


@intrinsic
def widen(typingctx: Any, value: Any) -> Any:
    """The value as its accumulator's type: a float of 16 bits as float32, anything else unchanged."""
    if value not in (_float16, _bfloat16):
        return value(value), lambda context, builder, signature, args: args[0]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value == _bfloat16:
            return of_bfloat16(builder, args[0])
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(value), generate


@intrinsic
def narrow(typingctx: Any, value: Any, like: Any) -> Any:
    """An accumulator as an element of the array ``like``, rounded to nearest even."""
    dtype = like.dtype
    if dtype not in (_float16, _bfloat16):
        return dtype(dtype, like), lambda context, builder, signature, args: args[0]  # integers wrap

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if dtype == _bfloat16:
            return any_bfloat16(builder, args[0])
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), _HALF)

    return dtype(types.float32, like), generate
