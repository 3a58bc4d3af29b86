"""Casts to the 16-bit formats and scaling in plain array operations, the specification of `cast`.

All arrays are 1-D, contiguous and do not overlap. The 16-bit numbers of casts are given as their bits in uint16. Casts
to them round to nearest, ties to even (IEEE 754, section 4.3.1): what is too large becomes infinite, subnormals are
kept, and a NaN stays one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.arrays import Array, array_namespace


def to_float16(x: Array, out: Array) -> None:
    """float32, here float64, too, to the bits of IEEE binary16; changes ``out``."""
    xp = array_namespace(x, out)
    with np.errstate(over="ignore"):
        out[...] = x.astype(xp.float16).view(xp.uint16)


def from_float16(x: Array, out: Array) -> None:
    """The bits of IEEE binary16 to float32, exactly; changes ``out``."""
    xp = array_namespace(x, out)
    out[...] = x.view(xp.float16).astype(xp.float32)


def to_bfloat16(x: Array, out: Array) -> None:
    """float32 to the bits of bfloat16, the upper half of a float32; changes ``out``.

    Adding 0x7fff carries into the upper half above a tie, and one more does at a tie whose upper half is odd. A NaN
    must not be rounded, it could become infinite: it is cut off and made quiet.
    """
    xp = array_namespace(x, out)
    bits = x.view(xp.uint32)
    upper = bits >> 16
    rounded = (bits + ((upper & 1) + 0x7FFF)) >> 16
    out[...] = xp.where(x != x, upper | 0x40, rounded).astype(xp.uint16)


def from_bfloat16(x: Array, out: Array) -> None:
    """The bits of bfloat16 to float32, exactly; changes ``out``."""
    xp = array_namespace(x, out)
    out[...] = (x.astype(xp.uint32) << 16).view(xp.float32)


def widened(x: Array) -> Any:
    """``x``, of any shape, in the type that it is computed in: `hpcdp.core.arrays.words` as float32, all else as it
    is."""
    xp = array_namespace(x)
    if x.dtype not in (xp.uint16, xp.int16):
        return x
    wide, from_words = xp.empty(x.shape, dtype=xp.float32), from_float16 if x.dtype == xp.uint16 else from_bfloat16
    from_words(x.view(xp.uint16), wide)
    return wide


def narrowed(wide: Array, like: Array) -> Any:
    """What `widened` has made of an array like ``like`` as words again, rounded; all else as it is."""
    xp = array_namespace(wide, like)
    if like.dtype not in (xp.uint16, xp.int16):
        return wide
    found, to_words = xp.empty(wide.shape, dtype=xp.uint16), to_float16 if like.dtype == xp.uint16 else to_bfloat16
    to_words(wide, found)
    return found.view(like.dtype)


def follow(wide: Array, x: Array) -> None:
    """Elements of ``wide``, float32, that are not rounded to those of `hpcdp.core.arrays.words` ``x`` become these."""
    xp = array_namespace(wide, x)
    xp.copyto(wide, widened(x), where=narrowed(wide, x) != x)


def scale(x: Array, factor: float) -> None:
    """``x *= factor``, in place; ``factor`` is rounded to the dtype first.

    `hpcdp.core.arrays.words` are multiplied in float32 and rounded once.
    """
    scale_into(x, factor, x)


def scale_into(x: Array, factor: float, out: Array) -> None:
    """``out = x * factor``, as `scale`; changes ``out``."""
    wide = widened(x)
    out[...] = narrowed(wide * wide.dtype.type(factor), x)
