"""Gradients encoded in one call that keeps what is not sent, for NumPy arrays. Imports: cast, halves, norms, quantise,
numba.

`reference.compress` is the specification: same names, same arguments; the scales of blocks are the same up to rounding,
and everything else to the bit for the same scales. A block's arrays stay in the first cache between its passes, so
memory is read and written once.
"""

from __future__ import annotations

import numpy as np
from numba import float32, float64, uint32

from .cast import _from_bfloat16, to_bfloat16
from .halves import narrow, widen
from .machine_code import kernel
from .norms import _magnitude
from .quantise import pack_one_bit, pack_two_bit, unpack_one_bit, unpack_two_bit
from .reference.compress import BLOCK, SHARE

_DIGITS = ((19, 12), (7, 12), (0, 7))
"""Of a float32's magnitude, which has 31 bits: how far each is shifted to the left, and how many bits it has."""


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
    """See `reference.compress.encode_two_bit`."""
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
    """See `reference.compress.decode_two_bit`."""
    for block in range(scales.size):
        first, last = block * BLOCK, min((block + 1) * BLOCK, out.size)
        unpack_two_bit(words[first // 16 : (last + 15) // 16], scales[block], out[first:last])


@kernel()
def encode_one_bit(grad, residual, threshold, magnitude, scales, words):  # type: ignore[no-untyped-def]
    """See `reference.compress.encode_one_bit`."""
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
    """See `reference.compress.decode_one_bit`."""
    for block in range(scales.size):
        first, last = block * BLOCK, min((block + 1) * BLOCK, out.size)
        unpack_one_bit(words[first // 32 : (last + 31) // 32], scales[block], out[first:last])


@kernel()
def encode_float16(grad, residual, halves):  # type: ignore[no-untyped-def]
    """See `reference.compress.encode_float16`."""
    for i in range(grad.size):
        total = residual[i] + grad[i]
        halves[i] = narrow(total, halves)
        rest = total - widen(halves[i])
        residual[i] = rest if abs(rest) < np.inf else float32(0)


@kernel()
def encode_bfloat16(grad, residual, halves):  # type: ignore[no-untyped-def]
    """See `reference.compress.encode_bfloat16`, block by block: NaNs are looked for in many elements at a time."""
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
    """See `reference.compress.encode_top_k`. The smallest magnitude that is sent is found digit by digit."""
    if indices.size == 0:
        return
    for i in range(grad.size):
        residual[i] += grad[i]
    found, ties = uint32(0), indices.size
    for digit in range(len(_DIGITS)):
        shift, bits = _DIGITS[digit]
        counts = np.zeros(1 << bits, np.int64)
        for i in range(residual.size):
            magnitude = _magnitude(residual[i])
            if magnitude >> (shift + bits) == found:
                counts[(magnitude >> shift) & ((1 << bits) - 1)] += 1
        at = counts.size - 1
        while counts[at] < ties:
            ties -= counts[at]
            at -= 1
        found = uint32(found << bits | at)
    place = 0
    for i in range(residual.size):
        magnitude = _magnitude(residual[i])
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
        for i in range(residual.size):  # more of them than are sent
            residual[i] = residual[i] if abs(residual[i]) < np.inf else float32(0)


@kernel()
def decode_top_k(indices, values, out):  # type: ignore[no-untyped-def]
    """See `reference.compress.decode_top_k`."""
    out[:] = 0
    for place in range(indices.size):
        if indices[place] < out.size:
            out[indices[place]] = values[place]
