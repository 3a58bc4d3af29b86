"""Casts between float32 and the 16-bit formats, and scaling, for NumPy arrays. Imports: reduce, numba.

`reference_cast` is the specification: same names, same arguments. All arrays are 1-D, contiguous and do not overlap;
16-bit numbers are given as their bits in uint16 (`reduce.words` of a float16 array; NumPy has no bfloat16).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, float64, njit, types, uint16
from numba.extending import intrinsic

from .reduce import BLOCK, narrow, widen

_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


@intrinsic
def _rounded(typingctx: Any, value: Any) -> Any:
    """A float32 that is no NaN as the nearest bfloat16; Numba would compute in 64 bits, on half as many lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.add(bits, builder.add(odd, word(0x7FFF)))
        return builder.trunc(builder.lshr(rounded, word(16)), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _quiet(typingctx: Any, value: Any) -> Any:
    """The upper half of a NaN, made quiet so that it does not become an infinity."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        upper = builder.lshr(builder.bitcast(args[0], word), word(16))
        return builder.trunc(builder.or_(upper, word(0x40)), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _from_bfloat16(typingctx: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), ir.FloatType())

    return types.float32(types.uint16), generate


@njit([types.void(float32[::1], uint16[::1])], **_options)
def to_float16(x, out):  # type: ignore[no-untyped-def]
    """See `reference_cast.to_float16`."""
    for i in range(out.size):
        out[i] = narrow(x[i], out)


@njit([types.void(uint16[::1], float32[::1])], **_options)
def from_float16(x, out):  # type: ignore[no-untyped-def]
    """See `reference_cast.from_float16`."""
    for i in range(out.size):
        out[i] = widen(x[i])


@njit([types.void(float32[::1], uint16[::1])], nogil=True, cache=True, error_model="numpy", fastmath={"reassoc"})
def to_bfloat16(x, out):  # type: ignore[no-untyped-def]
    """See `reference_cast.to_bfloat16`.

    A block is rounded as if there were no NaN. Its sum, which costs one addition where a choice for every element would
    cost three operations, is NaN if there is one; then the block's NaNs are written again.
    """
    for first in range(0, x.size, BLOCK):
        last = min(first + BLOCK, x.size)
        block, into = x[first:last], out[first:last]
        total = float32(0)
        for i in range(block.size):
            total += block[i]
            into[i] = _rounded(block[i])
        if np.isnan(total):  # or infinities of both signs
            for i in range(block.size):
                if np.isnan(block[i]):
                    into[i] = _quiet(block[i])


@njit([types.void(uint16[::1], float32[::1])], **_options)
def from_bfloat16(x, out):  # type: ignore[no-untyped-def]
    """See `reference_cast.from_bfloat16`."""
    for i in range(out.size):
        out[i] = _from_bfloat16(x[i])


@njit(**_options)
def scale(x, factor):  # type: ignore[no-untyped-def]
    """See `reference_cast.scale`; other dtypes than float32 and float64 are compiled when they are first met."""
    by = type(widen(x.dtype.type(0)))(factor)
    for i in range(x.size):
        x[i] = narrow(widen(x[i]) * by, x)


@njit(**_options)
def scale_into(x, factor, out):  # type: ignore[no-untyped-def]
    """See `reference_cast.scale_into`; compiled as `scale`."""
    by = type(widen(x.dtype.type(0)))(factor)
    for i in range(out.size):
        out[i] = narrow(widen(x[i]) * by, out)


for _t in (float32, float64):
    scale.compile(types.void(_t[::1], float64))
    scale_into.compile(types.void(_t[::1], float64, _t[::1]))
