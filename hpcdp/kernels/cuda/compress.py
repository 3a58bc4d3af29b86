"""Gradients of CuPy arrays encoded for the wire (`quantise.cu`, `compress.cu`, `top_k.cuh`).

Functions have the names and arguments of `reference.compress`; the scales of blocks are the same up to rounding, and
everything else has the same bits for the same scales. Nothing is copied to the host and nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...core.arrays import Array, array_namespace
from ...core.arrays import words as bits_of
from .. import cuda
from ..reference.compress import num_blocks

_PACKED_DTYPES = ("uint16", "float32", "float64")


def pack_two_bit(grad: Array, residual: Array, threshold: float, magnitude: float, words: Array) -> None:
    """See `reference.compress.pack_two_bit`."""
    _pack("pack_two_bit", 16, (grad, residual), threshold, magnitude, words)


def unpack_two_bit(words: Array, magnitude: float, out: Array) -> None:
    """See `reference.compress.unpack_two_bit`."""
    _unpack("unpack_two_bit", 16, words, magnitude, out)


def pack_one_bit(grad: Array, residual: Array, threshold: float, magnitude: float, words: Array) -> None:
    """See `reference.compress.pack_one_bit`."""
    _pack("pack_one_bit", 32, (grad, residual), threshold, magnitude, words)


def unpack_one_bit(words: Array, magnitude: float, out: Array) -> None:
    """See `reference.compress.unpack_one_bit`."""
    _unpack("unpack_one_bit", 32, words, magnitude, out)


def _pack(name: str, width: int, arrays: tuple[Array, Array], threshold: float, magnitude: float, words: Array) -> None:
    count = arrays[0].size
    of_type = cuda.type_name(name, _PACKED_DTYPES, count, *arrays)
    cuda.check(name, ("uint32",), -(-count // width), words)
    scalars = (_rounded(threshold, arrays[0]), _rounded(magnitude, arrays[0]))
    blocks = cuda.blocks(num_blocks(count) * cuda.WARP)
    cuda.launch("quantise", f"{name}_{of_type}", blocks, *arrays, np.int64(count), *scalars, words)


def _unpack(name: str, width: int, words: Array, magnitude: float, out: Array) -> None:
    of_type = cuda.type_name(name, _PACKED_DTYPES, out.size, out)
    cuda.check(name, ("uint32",), -(-out.size // width), words)
    blocks = cuda.blocks(-(-out.nbytes // 16))
    cuda.launch("quantise", f"{name}_{of_type}", blocks, words, out, np.int64(out.size), _rounded(magnitude, out))


def _rounded(value: float, like: Array) -> np.generic:
    """As an element of ``like``, in the type it is computed in."""
    return np.float32(np.float16(value)) if like.dtype == np.uint16 else like.dtype.type(value)


_DTYPES = ("uint16", "int16", "float32", "float64")
_DIGIT_BITS = 11
"""`top_k.cuh` says so, too."""
_SAMPLED_PACKS = 1 << 15


def encode_two_bit(grad: Array, residual: Array, threshold: float, scales: Array, words: Array) -> None:
    """See `reference.compress.encode_two_bit`."""
    _encode_blocks("encode_two_bit", 16, (grad, residual), (threshold,), scales, words)


def decode_two_bit(scales: Array, words: Array, out: Array) -> None:
    """See `reference.compress.decode_two_bit`."""
    _decode_blocks("decode_two_bit", 16, scales, words, out)


def encode_one_bit(
    grad: Array, residual: Array, threshold: float, magnitude: float, scales: Array, words: Array
) -> None:
    """See `reference.compress.encode_one_bit`."""
    _encode_blocks("encode_one_bit", 32, (grad, residual), (threshold, magnitude), scales, words)


def decode_one_bit(scales: Array, words: Array, out: Array) -> None:
    """See `reference.compress.decode_one_bit`."""
    _decode_blocks("decode_one_bit", 32, scales, words, out)


def encode_float16(grad: Array, residual: Array, halves: Array) -> None:
    """See `reference.compress.encode_float16`."""
    _encode_halves("encode_float16", grad, residual, halves)


def encode_bfloat16(grad: Array, residual: Array, halves: Array) -> None:
    """See `reference.compress.encode_bfloat16`."""
    _encode_halves("encode_bfloat16", grad, residual, halves)


def encode_top_k(grad: Array, residual: Array, indices: Array, values: Array) -> None:
    """See `reference.compress.encode_top_k`."""
    grad, residual, values = (bits_of(x) for x in (grad, residual, values))
    of_type, xp = cuda.type_name("encode_top_k", _DTYPES, grad.size, grad, residual), array_namespace(grad)
    cuda.check("encode_top_k", (str(grad.dtype),), indices.size, values)
    cuda.check("encode_top_k", ("uint32",), indices.size, indices)
    if not grad.size:
        return
    count, k = np.int64(grad.size), np.int64(indices.size)
    length, blocks, warps = _stretches(grad)
    digits = [(np.int32(shift), np.int32(bits)) for shift, bits in _digits(8 * grad.itemsize - 1)]
    search, *rows = xp.zeros((4 + len(digits), 1 << _DIGIT_BITS), xp.uint32)
    of_sample, of_all, of_digits = rows[:2], rows[2:4], rows[4:]
    elements = 16 // grad.itemsize  # of a pack
    stride, wanted = _sample(grad.size // elements, indices.size / grad.size * elements)
    blocks_of_sample = cuda.blocks(-(-grad.size // (elements * stride)))
    for number, counts in enumerate(of_sample):
        sampled = (grad, residual, count, np.int64(stride), np.int64(wanted), np.bool_(number == 0), *digits[number])
        cuda.launch("compress", f"sample_floor_{of_type}", blocks_of_sample, *sampled, search, counts)
    numbers = xp.empty((3, warps), xp.uint32)
    candidates = (numbers[0], xp.empty(grad.size, xp.uint32), xp.empty_like(grad))
    for again, counts in zip((False, True), of_all, strict=True):
        passed = (grad, residual, count, np.int64(length), k, np.bool_(again), search, counts, *candidates)
        cuda.launch("compress", f"collect_{of_type}", blocks, *passed)
    among = (count, np.int64(length), *candidates)
    for digit, counts in zip(digits[1:], of_digits, strict=True):
        cuda.launch("compress", f"find_digit_{of_type}", blocks, *among, *digit, search, counts)
    chosen = (search, numbers[1:], xp.empty((2, blocks), xp.uint32))
    cuda.launch("compress", f"count_chosen_{of_type}", blocks, *among, *chosen)
    cuda.launch("compress", f"write_chosen_{of_type}", blocks, *among, *chosen, residual, indices, values)


def _stretches(x: Array) -> tuple[int, int, int]:
    """How many elements each warp has, and how many blocks and warps that takes."""
    warps_of_block, at_once = cuda.THREADS // cuda.WARP, cuda.WARP * 16 // x.itemsize
    length = -(-x.size // (cuda.MAX_PARTS * warps_of_block * at_once)) * at_once
    blocks = -(-x.size // (length * warps_of_block))
    return length, blocks, blocks * warps_of_block


def _digits(bits: int) -> Iterator[tuple[int, int]]:
    """The shift and the bits of each digit of a magnitude of ``bits``, from the highest on."""
    while bits > 0:
        of_digit = min(bits, _DIGIT_BITS)
        bits -= of_digit
        yield bits, of_digit


def _sample(packs: int, chosen_of_pack: float) -> tuple[int, int]:
    """Of how many packs one is looked at, and how many elements of those should be candidates.

    That is what is sent of so many on average, and eight deviations more; should elements that lie side by side be
    alike, as many as a pack has, it is still three.
    """
    stride = max(1, packs // _SAMPLED_PACKS)
    expected = -(-packs // stride) * chosen_of_pack
    return stride, math.ceil(expected + 8 * math.sqrt(expected) + 16)


def decode_top_k(indices: Array, values: Array, out: Array) -> None:
    """See `reference.compress.decode_top_k`."""
    values, out = bits_of(values), bits_of(out)
    of_type = cuda.type_name("decode_top_k", _DTYPES, out.size, out)
    cuda.check("decode_top_k", (str(out.dtype),), indices.size, values)
    cuda.check("decode_top_k", ("uint32",), indices.size, indices)
    out[...] = 0
    passed = (indices, values, np.int64(indices.size), out, np.int64(out.size))
    cuda.launch("compress", f"decode_top_k_{of_type}", cuda.blocks(indices.size), *passed)


def _encode_blocks(
    name: str, width: int, arrays: tuple[Array, Array], numbers: tuple[float, ...], scales: Array, words: Array
) -> None:
    grad, residual = map(bits_of, arrays)
    of_type = _checked_blocks(name, width, scales, words, grad, residual)
    blocks = cuda.blocks(num_blocks(grad.size) * cuda.WARP)
    passed = (grad, residual, np.int64(grad.size), *(np.float64(each) for each in numbers), scales, words)
    cuda.launch("compress", f"{name}_{of_type}", blocks, *passed)


def _decode_blocks(name: str, width: int, scales: Array, words: Array, out: Array) -> None:
    out = bits_of(out)
    of_type = _checked_blocks(name, width, scales, words, out)
    blocks = cuda.blocks(-(-out.nbytes // 16))
    cuda.launch("compress", f"{name}_{of_type}", blocks, scales, words, out, np.int64(out.size))


def _checked_blocks(name: str, width: int, scales: Array, words: Array, *arrays: Array) -> str:
    """The last part of the kernel's name for ``arrays``, whose scales and words of ``width`` elements are given."""
    count = arrays[0].size
    of_type = cuda.type_name(name, _DTYPES, count, *arrays)
    cuda.check(name, ("float32",), num_blocks(count), scales)
    cuda.check(name, ("uint32",), -(-count // width), words)
    return of_type


def _encode_halves(name: str, grad: Array, residual: Array, halves: Array) -> None:
    grad, residual = bits_of(grad), bits_of(residual)
    of_type = cuda.type_name(name, _DTYPES, grad.size, grad, residual)
    cuda.check(name, ("uint16",), grad.size, halves)
    cuda.launch_elementwise("compress", f"{name}_{of_type}", (grad, residual, halves))
