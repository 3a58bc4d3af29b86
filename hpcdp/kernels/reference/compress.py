"""Reference encodings of gradients for the wire, in the operations that NumPy and CuPy share.

All arrays are 1-D, contiguous and do not overlap; any number of elements, also none.

``pack_*`` encodes a whole array by one threshold. Gradients, residuals and results are float32, float64, or the bits of
float16 in uint16; threshold and magnitude are rounded to their dtype first. A residual is what was not sent yet, in the
gradient's dtype: a sum is rounded to that before it is compared. The formulas are those of MXNet's kvstore
(``gradient_compression-inl.h``), which sends the threshold in 2 bits, and 1 in 1 bit; the bits are arranged for vectors
instead of for bytes. A NaN is never sent in 2 bits and stays in the residual; in 1 bit it is sent as a negative number
and stays.

``encode_*`` are the codecs of `hpcdp.compression`: in 1 and 2 bits blocks have scales of their own. Gradients,
residuals and results are as above, float16 in 1 and 2 bits alone. Every encoder begins with ``residual += grad``, and
leaves in ``residual`` what it has not sent. What cannot be sent and kept, a NaN or an infinity, is sent and not kept:
it arrives as no finite number, in 1 and 2 bits as a whole block of NaN, and the residual is zero there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...core.arrays import Array, array_namespace
from .elementwise import from_bfloat16, from_float16, to_bfloat16, to_float16


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


BLOCK = 256
"""Elements with a scale of their own: of more, few large ones among many small ones are sent too late."""

SHARE = 0.6
"""Of a block's root mean square: what an element must reach to be sent in 2 bits; for normally distributed ones about
what leaves least behind."""

_LARGEST = 3.4028234e38  # float32


def num_blocks(count: int) -> int:
    """How many scales ``count`` elements have."""
    return -(-count // BLOCK)


def _blocks(count: int) -> Iterator[tuple[int, slice]]:
    for block in range(num_blocks(count)):
        yield block, slice(block * BLOCK, min((block + 1) * BLOCK, count))


def encode_two_bit(grad: Array, residual: Array, threshold: float, scales: Array, words: Array) -> None:
    """`pack_two_bit` block by block; changes ``residual``, ``scales`` and ``words``.

    Args:
        threshold: what an element must reach, and what is sent of it then. 0: it must reach `SHARE` of its block's root
            mean square, and the mean of those that do is sent.
        scales: float32, shape ``(num_blocks(count),)``: what is sent.
        words: uint32, shape ``((count + 15) // 16,)``.
    """
    xp = array_namespace(grad, residual)
    for block, part in _blocks(grad.size):
        total = (_floats(grad[part]) + _floats(residual[part])).astype(xp.float64)
        squares, packed = float(xp.sum(total * total)), words[part.start // 16 : -(-part.stop // 16)]
        limit = sent = threshold
        if threshold == 0 and squares < float("inf"):
            limit = SHARE * (squares / total.size) ** 0.5
            sent = float(xp.mean(abs(total)[abs(total) >= limit]))
        if squares < float("inf") and sent <= _LARGEST:
            scales[block] = sent
            pack_two_bit(grad[part], residual[part], limit, float(scales[block]), packed)
        else:
            scales[block], packed[...], residual[part] = float("nan"), 0xFFFF, 0


def decode_two_bit(scales: Array, words: Array, out: Array) -> None:
    """What `encode_two_bit` sent; changes ``out``, shape ``(count,)``."""
    for block, part in _blocks(out.size):
        unpack_two_bit(words[part.start // 16 : -(-part.stop // 16)], float(scales[block]), out[part])


def encode_one_bit(
    grad: Array, residual: Array, threshold: float, magnitude: float, scales: Array, words: Array
) -> None:
    """`pack_one_bit` block by block; changes ``residual``, ``scales`` and ``words``.

    Args:
        magnitude: of what all blocks send, or 0: each block's mean magnitude.
        scales: float32, shape ``(num_blocks(count),)``: the magnitudes.
        words: uint32, shape ``((count + 31) // 32,)``.
    """
    xp = array_namespace(grad, residual)
    for block, part in _blocks(grad.size):
        total = float(xp.sum(abs(_floats(grad[part]) + _floats(residual[part])), dtype=xp.float64))
        packed = words[part.start // 32 : -(-part.stop // 32)]
        sent = magnitude if magnitude > 0 else total / (part.stop - part.start)
        if total < float("inf") and sent <= _LARGEST:
            scales[block] = sent
            pack_one_bit(grad[part], residual[part], threshold, float(scales[block]), packed)
        else:
            scales[block], packed[...], residual[part] = float("nan"), 0xFFFFFFFF, 0


def decode_one_bit(scales: Array, words: Array, out: Array) -> None:
    """What `encode_one_bit` sent; changes ``out``, shape ``(count,)``."""
    for block, part in _blocks(out.size):
        unpack_one_bit(words[part.start // 32 : -(-part.stop // 32)], float(scales[block]), out[part])


def encode_float16(grad: Array, residual: Array, halves: Array) -> None:
    """Send the nearest float16, as its bits; changes ``residual`` and ``halves``, uint16, shape ``(count,)``.

    From 65520 on that is an infinity.
    """
    residual += grad
    to_float16(residual, halves)
    _keep_rest(residual, halves, from_float16)


def encode_bfloat16(grad: Array, residual: Array, halves: Array) -> None:
    """Send the nearest bfloat16, as its bits; changes ``residual`` and ``halves``, uint16, shape ``(count,)``.

    A float64 is rounded to float32 first.
    """
    residual += grad
    to_bfloat16(residual.astype(array_namespace(residual).float32), halves)
    _keep_rest(residual, halves, from_bfloat16)


def _keep_rest(residual: Array, halves: Array, back: Callable[[Array, Array], None]) -> None:
    xp = array_namespace(residual)
    sent = xp.empty(residual.shape, dtype=xp.float32)
    back(halves, sent)
    arrives = xp.isfinite(sent)
    residual[...] = xp.where(arrives, residual - xp.where(arrives, sent, 0), 0)


def encode_top_k(grad: Array, residual: Array, indices: Array, values: Array) -> None:
    """Send the elements of largest magnitude, a NaN before all, of equal ones the first; changes all but ``grad``.

    Args:
        indices: uint32, shape ``(k,)``, ascending when it returns; k is at most the number of elements.
        values: as ``grad``, shape ``(k,)``.
    """
    xp = array_namespace(grad, residual)
    residual += grad
    is_number = ~xp.isnan(residual)
    order = xp.lexsort(xp.stack([xp.where(is_number, -abs(residual), 0), is_number]))
    chosen = xp.sort(order[: indices.size])
    indices[...], values[...] = chosen, residual[chosen]
    residual[chosen] = 0
    residual[~xp.isfinite(residual)] = 0  # where there are more of them than are sent


def decode_top_k(indices: Array, values: Array, out: Array) -> None:
    """What `encode_top_k` sent, and zeros; changes ``out``, shape ``(count,)``."""
    out[...] = 0
    out[indices] = values
