"""Gradients in 2 bits or 1 bit an element in plain array operations, the specification of `quantise`.

All arrays are 1-D, contiguous and do not overlap; any number of elements, also none. Gradients, residuals and results
are float32, float64, or the bits of float16 in uint16; threshold and magnitude are rounded to their dtype first. A
residual is what was not sent yet, in the gradient's dtype: a sum is rounded to that before it is compared. The formulas
are those of MXNet's kvstore (``gradient_compression-inl.h``), which sends the threshold in 2 bits, and 1 in 1 bit; the
bits are arranged for vectors instead of for bytes. A NaN is never sent in 2 bits and stays in the residual; in 1 bit it
is sent as a negative number and stays.
"""

from __future__ import annotations

from typing import Any

from ...core.arrays import Array, array_namespace


def _floats(x: Array) -> Array:
    xp = array_namespace(x)
    return x.view(xp.float16) if x.dtype == xp.uint16 else x


def _packed(flags: Array, width: int) -> Array:
    """Truth values as uint32 words of ``width`` bits, the first value lowest."""
    xp = array_namespace(flags)
    lanes = xp.zeros(-(-flags.size // width) * width, dtype=xp.uint32)
    lanes[: flags.size] = flags
    return (lanes.reshape(-1, width) << xp.arange(width, dtype=xp.uint32)).sum(axis=1, dtype=xp.uint32)


def _unpacked(words: Array, width: int, count: int) -> Any:
    """The first ``count`` truth values in words of ``width`` bits."""
    xp = array_namespace(words)
    bits = (words[:, None] >> xp.arange(width, dtype=xp.uint32)) & 1
    return bits.reshape(-1)[:count] != 0


def pack_two_bit(grad: Array, residual: Array, threshold: float, magnitude: float, words: Array) -> None:
    """``residual += grad``, then send ``magnitude`` where it is at least ``threshold``, ``-magnitude`` where it is at
    most ``-threshold``, else nothing, and subtract what was sent from ``residual``; changes ``residual`` and ``words``.

    Args:
        threshold: 0 or more.
        words: uint32, shape ``((count + 15) // 16,)``. In each, bit i says that element i of 16 is positive, bit
            16 + i that it is negative; bits of elements that do not exist are 0.
    """
    xp = array_namespace(grad, residual, words)
    added, kept = _floats(grad), _floats(residual)
    kept += added
    limit = kept.dtype.type(threshold)
    plus, minus = kept >= limit, kept <= -limit
    sent = kept.dtype.type(magnitude)
    kept -= xp.where(plus, sent, xp.where(minus, -sent, kept.dtype.type(0)))
    words[...] = _packed(plus, 16) | (_packed(minus, 16) << 16)


def unpack_two_bit(words: Array, magnitude: float, out: Array) -> None:
    """What `pack_two_bit` sent; changes ``out``, shape ``(count,)``."""
    xp = array_namespace(words, out)
    into = _floats(out)
    sent = into.dtype.type(magnitude)
    minus = xp.where(_unpacked(words >> 16, 16, out.size), -sent, into.dtype.type(0))
    into[...] = xp.where(_unpacked(words, 16, out.size), sent, minus)


def pack_one_bit(grad: Array, residual: Array, threshold: float, magnitude: float, words: Array) -> None:
    """``residual += grad``, then send ``magnitude`` where it is above ``threshold``, else ``-magnitude``, and subtract
    what was sent from ``residual``; changes ``residual`` and ``words``.

    Args:
        words: uint32, shape ``((count + 31) // 32,)``. In each, bit i says that element i of 32 is 1; bits of elements
            that do not exist are 0.
    """
    xp = array_namespace(grad, residual, words)
    added, kept = _floats(grad), _floats(residual)
    kept += added
    plus = kept > kept.dtype.type(threshold)
    sent = kept.dtype.type(magnitude)
    kept -= xp.where(plus, sent, -sent)
    words[...] = _packed(plus, 32)


def unpack_one_bit(words: Array, magnitude: float, out: Array) -> None:
    """What `pack_one_bit` sent; changes ``out``, shape ``(count,)``."""
    xp = array_namespace(words, out)
    into = _floats(out)
    sent = into.dtype.type(magnitude)
    into[...] = xp.where(_unpacked(words, 32, out.size), sent, -sent)
