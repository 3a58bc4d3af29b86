"""Casts between float32 and the 16-bit formats, and scaling, for NumPy arrays. Imports: halves, lanes, numba.

`reference.cast` is the specification: same names, same arguments. All arrays are 1-D, contiguous and do not overlap;
the 16-bit numbers of casts are given as their bits in uint16, whose format the name of the cast says.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float32, types, uint16
from numba.extending import intrinsic

from .halves import any_bfloat16, narrow, nearest_bfloat16, of_bfloat16, widen
from .lanes import WORD, Lanes
from .machine_code import kernel


@intrinsic
def _bfloat16(typingctx: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return any_bfloat16(builder, args[0])

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


# No factory for these loops: what closes over an intrinsic is not found in Numba's cache by the next process.
@kernel([types.void(float32[::1], uint16[::1])])
def to_float16(x, out):  # type: ignore[no-untyped-def]
    """See `reference.cast.to_float16`."""
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    for i in range(out.size):
        out[i] = narrow(x[i], out)


@kernel([types.void(uint16[::1], float32[::1])])
def from_float16(x, out):  # type: ignore[no-untyped-def]
    """See `reference.cast.from_float16`."""
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    for i in range(out.size):
        out[i] = widen(x[i])


@kernel([types.void(float32[::1], uint16[::1])])
def to_bfloat16(x, out):  # type: ignore[no-untyped-def]
    """See `reference.cast.to_bfloat16`.

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
    """See `reference.cast.from_bfloat16`."""
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    for i in range(out.size):
        out[i] = _from_bfloat16(x[i])


@kernel()
def follow(wide, x):  # type: ignore[no-untyped-def]
    """See `reference.cast.follow`."""
    if wide.size != x.size:
        raise ValueError("wide must have as many elements as x")
    for i in range(wide.size):
        if narrow(wide[i], x) != x[i]:
            wide[i] = widen(x[i])


@kernel()
def scale(x, factor):  # type: ignore[no-untyped-def]
    """See `reference.cast.scale`."""
    by = type(widen(x.dtype.type(0)))(factor)
    for i in range(x.size):
        x[i] = narrow(widen(x[i]) * by, x)


@kernel()
def scale_into(x, factor, out):  # type: ignore[no-untyped-def]
    """See `reference.cast.scale_into`."""
    by = type(widen(x.dtype.type(0)))(factor)
    if out.size != x.size:
        raise ValueError("out must have as many elements as x")
    for i in range(out.size):
        out[i] = narrow(widen(x[i]) * by, out)
