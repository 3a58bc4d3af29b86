"""Casts between float32 and the 16-bit formats, and scaling, for NumPy arrays. Imports: lanes, reduce, numba.

`reference_cast` is the specification: same names, same arguments. All arrays are 1-D, contiguous and do not overlap;
16-bit numbers are given as their bits in uint16 (`reduce.words` of a float16 array; NumPy has no bfloat16).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float32, types, uint16
from numba.extending import intrinsic

from .lanes import WORD, Lanes
from .machine_code import kernel
from .reduce import narrow, widen


def _rounded(builder: Any, value: Any, width: int) -> Any:
    """Floats that are no NaN, ``width`` of them, as the nearest bfloat16; in 32 bits, where Numba would take 64."""
    word, half = ir.VectorType(WORD, width), ir.VectorType(ir.IntType(16), width)
    sixteen, one, below_half = (ir.Constant(word, [number] * width) for number in (16, 1, 0x7FFF))
    bits = builder.bitcast(value, word)
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    return builder.trunc(builder.lshr(builder.add(bits, builder.add(odd, below_half)), sixteen), half)


@intrinsic
def _bfloat16(typingctx: Any, value: Any) -> Any:
    """A float32 as the bits of the nearest bfloat16; a NaN is made quiet so that it does not become an infinity."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        quiet = builder.or_(builder.lshr(builder.bitcast(args[0], WORD), WORD(16)), WORD(0x40))
        rounded = builder.bitcast(_rounded(builder, args[0], 1), ir.IntType(16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.select(is_nan, builder.trunc(quiet, ir.IntType(16)), rounded)

    return types.uint16(types.float32), generate


@intrinsic
def _round_32(typingctx: Any, x: Any, out: Any, index: Any) -> Any:
    """Round 32 elements from ``index`` on as if none were NaN; returns a number that is 0 if none was.

    Comparing one half with the other is one instruction for both; 16 elements or 64 took 1.1 times as long.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = Lanes(context, builder, (signature.args[0], args[0]), args[2], 32)
        into = Lanes(context, builder, (signature.args[1], args[1]), args[2], 32)
        value = lanes.load()
        into.store_bits(_rounded(builder, value, 32))
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
        return builder.bitcast(builder.shl(builder.zext(args[0], WORD), WORD(16)), ir.FloatType())

    return types.float32(types.uint16), generate


# No factory for these loops: what closes over an intrinsic is not found in Numba's cache by the next process.
@kernel([types.void(float32[::1], uint16[::1])])
def to_float16(x, out):  # type: ignore[no-untyped-def]
    """See `reference_cast.to_float16`."""
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    for i in range(out.size):
        out[i] = narrow(x[i], out)


@kernel([types.void(uint16[::1], float32[::1])])
def from_float16(x, out):  # type: ignore[no-untyped-def]
    """See `reference_cast.from_float16`."""
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    for i in range(out.size):
        out[i] = widen(x[i])


@kernel([types.void(float32[::1], uint16[::1])])
def to_bfloat16(x, out):  # type: ignore[no-untyped-def]
    """See `reference_cast.to_bfloat16`.

    NaNs are looked for in 32 elements at a time: a choice in every element took a quarter of the time.
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
    """See `reference_cast.from_bfloat16`."""
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    for i in range(out.size):
        out[i] = _from_bfloat16(x[i])


@kernel()
def scale(x, factor):  # type: ignore[no-untyped-def]
    """See `reference_cast.scale`."""
    by = type(widen(x.dtype.type(0)))(factor)
    for i in range(x.size):
        x[i] = narrow(widen(x[i]) * by, x)


@kernel()
def scale_into(x, factor, out):  # type: ignore[no-untyped-def]
    """See `reference_cast.scale_into`."""
    by = type(widen(x.dtype.type(0)))(factor)
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    for i in range(out.size):
        out[i] = narrow(widen(x[i]) * by, out)
