"""Encoding of gradients in NumPy arrays for the wire, in one call that keeps the residual.

Functions have the names and arguments of `reference.gradients`. The scales of blocks are equal up to rounding, and all
else has the same bits for the same scales. A block's arrays stay in the L1 cache between its passes, so memory is read
and written once.

Comparing a vector of elements gives a vector of bits, which is (a part of) a packed word. LLVM does not find that in a
loop over elements (0.04 of the copy rate), so words are packed by vector operations (`jit`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, intp, types, uint32
from numba.extending import intrinsic

from .elementwise import _from_bfloat16, to_bfloat16
from .jit import WORD, Lanes, kernel, magnitude_bits, narrow, widen
from .reference.gradients import BLOCK, SHARE


@intrinsic
def _pack_16(typingctx: Any, grad: Any, residual: Any, index: Any, threshold: Any, magnitude: Any) -> Any:
    """Return the word of 16 elements from ``index`` on; changes ``residual``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        added = Lanes(context, builder, (signature.args[0], args[0]), args[2], 16).load()
        kept = Lanes(context, builder, (signature.args[1], args[1]), args[2], 16)
        total = kept.rounded(builder.fadd(kept.load(), added))
        up = kept.repeat(args[3])
        down = builder.fneg(up)
        plus, minus = builder.fcmp_ordered(">=", total, up), builder.fcmp_ordered("<=", total, down)
        size = kept.repeat(args[4])
        sent = builder.select(plus, size, builder.select(minus, builder.fneg(size), kept.constant(0.0)))
        kept.store(builder.fsub(total, sent))
        return builder.or_(kept.bits(plus), builder.shl(kept.bits(minus), WORD(16)))

    return uint32(grad, residual, intp, float64, float64), generate


@intrinsic
def _unpack_16(typingctx: Any, word: Any, magnitude: Any, out: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = Lanes(context, builder, (signature.args[2], args[2]), args[3], 16)
        up = into.repeat(args[1])
        negative = builder.select(into.flags(args[0], 16), builder.fneg(up), into.constant(0.0))
        into.store(builder.select(into.flags(args[0], 0), up, negative))
        return context.get_dummy_value()

    return types.none(uint32, float64, out, intp), generate


@intrinsic
def _pack_32(typingctx: Any, grad: Any, residual: Any, index: Any, threshold: Any, magnitude: Any) -> Any:
    """Return the word of 32 elements from ``index`` on; changes ``residual``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        added = Lanes(context, builder, (signature.args[0], args[0]), args[2], 32).load()
        kept = Lanes(context, builder, (signature.args[1], args[1]), args[2], 32)
        total = kept.rounded(builder.fadd(kept.load(), added))
        plus = builder.fcmp_ordered(">", total, kept.repeat(args[3]))
        sent = kept.repeat(args[4])
        kept.store(builder.fsub(total, builder.select(plus, sent, builder.fneg(sent))))
        return kept.bits(plus)

    return uint32(grad, residual, intp, float64, float64), generate


@intrinsic
def _unpack_32(typingctx: Any, word: Any, magnitude: Any, out: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = Lanes(context, builder, (signature.args[2], args[2]), args[3], 32)
        sent = into.repeat(args[1])
        into.store(builder.select(into.flags(args[0], 0), sent, builder.fneg(sent)))
        return context.get_dummy_value()

    return types.none(uint32, float64, out, intp), generate


# No factory: Numba's cache misses functions that close over an intrinsic in the next process. Separate functions for
# the tails took 0.3 s more to compile, of 1.0.
@kernel()
def pack_two_bit(grad, residual, threshold, magnitude, words):  # type: ignore[no-untyped-def]
    """See `reference.pack_two_bit`."""
    if residual.size != grad.size or words.size * 16 < grad.size:
        raise ValueError("residual must have as many elements as grad, and words a bit field for each")
    whole = grad.size // 16
    for k in range(whole):
        words[k] = _pack_16(grad, residual, 16 * k, threshold, magnitude)
    rest = grad.size - 16 * whole
    if rest:
        last_grad, last_residual = np.zeros(16, grad.dtype), np.zeros(16, residual.dtype)
        for i in range(rest):
            last_grad[i], last_residual[i] = grad[16 * whole + i], residual[16 * whole + i]
        used = (1 << rest) - 1  # the padding's zeros may reach the threshold
        words[whole] = _pack_16(last_grad, last_residual, 0, threshold, magnitude) & (used << 16 | used)
        for i in range(rest):
            residual[16 * whole + i] = last_residual[i]


@kernel()
def unpack_two_bit(words, magnitude, out):  # type: ignore[no-untyped-def]
    """See `reference.unpack_two_bit`."""
    if words.size * 16 < out.size:
        raise ValueError("words must have a bit field for each element of out")
    whole = out.size // 16
    for k in range(whole):
        _unpack_16(words[k], magnitude, out, 16 * k)
    rest = out.size - 16 * whole
    if rest:
        last = np.empty(16, out.dtype)
        _unpack_16(words[whole], magnitude, last, 0)
        for i in range(rest):
            out[16 * whole + i] = last[i]


@kernel()
def pack_one_bit(grad, residual, threshold, magnitude, words):  # type: ignore[no-untyped-def]
    """See `reference.pack_one_bit`."""
    if residual.size != grad.size or words.size * 32 < grad.size:
        raise ValueError("residual must have as many elements as grad, and words a bit field for each")
    whole = grad.size // 32
    for k in range(whole):
        words[k] = _pack_32(grad, residual, 32 * k, threshold, magnitude)
    rest = grad.size - 32 * whole
    if rest:
        last_grad, last_residual = np.zeros(32, grad.dtype), np.zeros(32, residual.dtype)
        for i in range(rest):
            last_grad[i], last_residual[i] = grad[32 * whole + i], residual[32 * whole + i]
        used = (1 << rest) - 1  # the padding's zeros may be above the threshold
        words[whole] = _pack_32(last_grad, last_residual, 0, threshold, magnitude) & used
        for i in range(rest):
            residual[32 * whole + i] = last_residual[i]


@kernel()
def unpack_one_bit(words, magnitude, out):  # type: ignore[no-untyped-def]
    """See `reference.unpack_one_bit`."""
    if words.size * 32 < out.size:
        raise ValueError("words must have a bit field for each element of out")
    whole = out.size // 32
    for k in range(whole):
        _unpack_32(words[k], magnitude, out, 32 * k)
    rest = out.size - 32 * whole
    if rest:
        last = np.empty(32, out.dtype)
        _unpack_32(words[whole], magnitude, last, 0)
        for i in range(rest):
            out[32 * whole + i] = last[i]


_DIGITS = ((19, 12), (7, 12), (0, 7))
"""Digits of a float32's magnitude, which has 31 bits: left shift and number of bits of each."""


@kernel(fastmath={"reassoc", "contract"})
def _squares(grad, residual):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(residual.size):
        each = float64(widen(grad[i]) + widen(residual[i]))
        total += each * each
    return total


@kernel(fastmath={"reassoc", "contract"})
def _magnitudes(grad, residual):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(residual.size):
        total += abs(widen(grad[i]) + widen(residual[i]))
    return total


@kernel(fastmath={"reassoc", "contract"})
def _mean_from(grad, residual, threshold):  # type: ignore[no-untyped-def]
    # In the elements' own type, without branches: a vector at a time, 20 times as fast.
    limit, none = type(widen(residual[0]))(threshold), type(widen(residual[0]))(0)
    total, number = none, none
    for i in range(residual.size):
        each = abs(widen(grad[i]) + widen(residual[i]))
        total += each if each >= limit else none
        number += type(each)(1) if each >= limit else none
    return total / max(number, type(number)(1))


@kernel()
def encode_two_bit(grad, residual, threshold, scales, words):  # type: ignore[no-untyped-def]
    """See `reference.encode_two_bit`."""
    for block in range(scales.size):
        first, last = block * BLOCK, min((block + 1) * BLOCK, grad.size)
        added, kept, packed = grad[first:last], residual[first:last], words[first // 16 : (last + 15) // 16]
        total, limit, sent = _squares(added, kept), threshold, threshold
        if threshold == 0:
            limit = SHARE * np.sqrt(total / (last - first))
            sent = _mean_from(added, kept, limit)
        scales[block] = sent
        if np.isfinite(total) and np.isfinite(scales[block]):
            pack_two_bit(added, kept, limit, scales[block], packed)
        else:
            scales[block] = np.nan
            packed[:] = 0xFFFF
            kept[:] = 0


@kernel()
def decode_two_bit(scales, words, out):  # type: ignore[no-untyped-def]
    """See `reference.decode_two_bit`."""
    for block in range(scales.size):
        first, last = block * BLOCK, min((block + 1) * BLOCK, out.size)
        unpack_two_bit(words[first // 16 : (last + 15) // 16], scales[block], out[first:last])


@kernel()
def encode_one_bit(grad, residual, threshold, magnitude, scales, words):  # type: ignore[no-untyped-def]
    """See `reference.encode_one_bit`."""
    for block in range(scales.size):
        first, last = block * BLOCK, min((block + 1) * BLOCK, grad.size)
        added, kept, packed = grad[first:last], residual[first:last], words[first // 32 : (last + 31) // 32]
        total = _magnitudes(added, kept)
        scales[block] = magnitude if magnitude > 0 else total / (last - first)
        if np.isfinite(total) and np.isfinite(scales[block]):
            pack_one_bit(added, kept, threshold, scales[block], packed)
        else:
            scales[block] = np.nan
            packed[:] = 0xFFFFFFFF
            kept[:] = 0


@kernel()
def decode_one_bit(scales, words, out):  # type: ignore[no-untyped-def]
    """See `reference.decode_one_bit`."""
    for block in range(scales.size):
        first, last = block * BLOCK, min((block + 1) * BLOCK, out.size)
        unpack_one_bit(words[first // 32 : (last + 31) // 32], scales[block], out[first:last])


@kernel()
def encode_float16(grad, residual, halves):  # type: ignore[no-untyped-def]
    """See `reference.encode_float16`."""
    for i in range(grad.size):
        total = residual[i] + grad[i]
        halves[i] = narrow(total, halves)
        rest = total - widen(halves[i])
        residual[i] = rest if abs(rest) < np.inf else float32(0)


@kernel()
def encode_bfloat16(grad, residual, halves):  # type: ignore[no-untyped-def]
    """See `reference.encode_bfloat16`; block by block, so that the search for NaNs is vectorised."""
    for first in range(0, grad.size, BLOCK):
        part = slice(first, min(first + BLOCK, grad.size))
        _encode_bfloat16(grad[part], residual[part], halves[part])


@kernel()
def _encode_bfloat16(grad, residual, halves):  # type: ignore[no-untyped-def]
    for i in range(grad.size):
        residual[i] += grad[i]
    to_bfloat16(residual, halves)
    for i in range(grad.size):
        rest = residual[i] - _from_bfloat16(halves[i])
        residual[i] = rest if abs(rest) < np.inf else float32(0)


@kernel()
def encode_top_k(grad, residual, indices, values):  # type: ignore[no-untyped-def]
    """See `reference.encode_top_k`; finds the smallest magnitude that is sent digit by digit."""
    if indices.size == 0:
        return
    for i in range(grad.size):
        residual[i] += grad[i]
    found, ties = uint32(0), indices.size
    for digit in range(len(_DIGITS)):
        shift, bits = _DIGITS[digit]
        counts = np.zeros(1 << bits, np.int64)
        for i in range(residual.size):
            magnitude = magnitude_bits(residual[i])
            if magnitude >> (shift + bits) == found:
                counts[(magnitude >> shift) & ((1 << bits) - 1)] += 1
        at = counts.size - 1
        while counts[at] < ties:
            ties -= counts[at]
            at -= 1
        found = uint32(found << bits | at)
    place = 0
    for i in range(residual.size):
        magnitude = magnitude_bits(residual[i])
        if magnitude < found:
            continue
        if magnitude == found:
            if ties == 0:
                continue
            ties -= 1
        indices[place], values[place] = i, residual[i]
        residual[i] = 0
        place += 1
    if not np.isfinite(values[0] if indices.size == 1 else np.abs(values).max()):
        for i in range(residual.size):  # there may be more than are sent
            residual[i] = residual[i] if abs(residual[i]) < np.inf else float32(0)


@kernel()
def decode_top_k(indices, values, out):  # type: ignore[no-untyped-def]
    """See `reference.decode_top_k`."""
    out[:] = 0
    for place in range(indices.size):
        if indices[place] < out.size:
            out[indices[place]] = values[place]
