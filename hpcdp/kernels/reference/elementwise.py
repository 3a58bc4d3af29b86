"""Reference elementwise operations: sums, activations, bias, chains, casts to 16 bits and scaling.

Casts and scaling take 1-D contiguous arrays that do not overlap. The 16-bit numbers of casts are given as their bits in
uint16. Casts to them round to nearest, ties to even (IEEE 754, section 4.3.1): what is too large becomes infinite,
subnormals are kept, and a NaN stays one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...core.arrays import Array, array_namespace, is_half

_SLOPE, _CUBE = math.sqrt(2 / math.pi), 0.044715


def add(a: Array, b: Array, out: Array) -> None:
    """``out = a + b``, of one shape; ``out`` may be either."""
    array_namespace(a).add(a, b, out=out)


def relu(x: Array, out: Array) -> None:
    """``out = max(x, 0)``, in which a NaN stays; ``out`` may be ``x``."""
    array_namespace(x).maximum(x, 0, out=out)


def add_bias(y: Array, bias: Array, relu: bool) -> None:
    """``y += bias``, then ``max(y, 0)`` if ``relu``; changes ``y``, of shape ``(rows, features)`` or images."""
    xp = array_namespace(y, bias)
    y += bias.reshape(-1, *[1] * (y.ndim - 2))
    if relu:
        xp.maximum(y, 0, out=y)


def relu_gradient(gy: Array, y: Array, dx: Array) -> None:
    """``dx = gy`` where the result ``y`` of ReLU is positive, else 0, whatever ``gy`` is; changes ``dx``; any shape."""
    dx[...] = array_namespace(gy, y).where(y > 0, gy, 0)


def bias_gradient(gy: Array, y: Array | None, dx: Array | None, dbias: Array) -> None:
    """``dbias`` becomes the sum of ``gy``, like what `add_bias` takes, over all axes but the second.

    Args:
        y: None, or the result of ReLU: then `relu_gradient` is written to ``dx``, and summed.
    """
    if y is not None:
        relu_gradient(gy, y, dx)
        gy = dx
    dbias[...] = gy.sum(axis=(0, *range(2, gy.ndim)), dtype="float32" if is_half(gy) else None)


def gelu(x: Array, out: Array) -> None:
    """``x`` times nearly the chance of a normal number below it (Hendrycks and Gimpel 2016, section 2, by tanh)."""
    xp = array_namespace(x)
    out[...] = 0.5 * x * (1 + xp.tanh(_SLOPE * (x + _CUBE * x * x * x)))


def gelu_gradient(gy: Array, x: Array, dx: Array) -> None:
    """The gradient of `gelu`; ``dx`` is written."""
    xp = array_namespace(gy, x)
    y = xp.tanh(_SLOPE * (x + _CUBE * x * x * x))
    dx[...] = gy * (0.5 * (1 + y) + 0.5 * x * (1 - y * y) * _SLOPE * (1 + 3 * _CUBE * x * x))


def _of_namespace(name: str) -> Callable[..., Array]:
    return lambda *operands: getattr(array_namespace(*operands), name)(*operands)


def _as_number(relation: str) -> Callable[[Array, Array], Array]:
    def compare(a: Array, b: Array) -> Array:
        xp = array_namespace(a, b)
        return getattr(xp, relation)(a, b).astype(xp.result_type(a, b))

    return compare


def _where_positive(a: Array, b: Array) -> Array:
    return array_namespace(a, b).where(a > 0, b, 0)


def _gelu(a: Array) -> Array:
    out = array_namespace(a).empty(a.shape, dtype=a.dtype)
    gelu(a, out)
    return out


def _gelu_gradient(gy: Array, a: Array) -> Array:
    out = array_namespace(gy, a).empty(a.shape, dtype=a.dtype)
    gelu_gradient(gy, a, out)
    return out


OPERATIONS: dict[str, Callable[..., Array]] = {
    **{name: _of_namespace(name) for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum")},
    **{name: _of_namespace(name) for name in ("negative", "abs", "sqrt", "sign")},
    "greater": _as_number("greater"),
    "equal": _as_number("equal"),
    "where_positive": _where_positive,
    "gelu": _gelu,
    "gelu_gradient": _gelu_gradient,
    "copy": lambda a: a.copy(),
}
"""By name; `chain` knows them by their places in this order. ``greater`` and ``equal`` give 1 or 0, ``where_positive(a,
b)`` is ``b`` where ``a`` is above 0, else 0."""


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
