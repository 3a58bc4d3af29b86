"""Reductions, optimizer updates and gradient encodings of CuPy arrays.

Functions have the names and arguments of `reference.gradients`.

- Reductions and norms (`reduce.cu`, `norms.cu`): rows are combined in one pass over memory, to the same bits; norms are
  equal up to rounding in float64. Functions that return numbers wait for the current stream.
- Updates (`update.cu`, `lars.cu`): one pass over memory, the same bits. For CUDA graphs, which freeze numbers,
  coefficients may be a float64 array on the GPU. So may ``scale``, shape ``(1,)``, which replaces the scale in the
  coefficients. LARS reads the norms on the GPU without a wait of the host.
- Encodings (`quantise.cu`, `compress.cu`, `top_k.cuh`): scales of blocks are equal up to rounding; all else has the
  same bits for the same scales. Nothing is copied to the host, and nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...core.arrays import Array, array_namespace, to_host
from ...core.arrays import words as bits_of
from ...errors import UnsupportedError
from .. import cuda
from ..reference.gradients import EVERY_ROW, Rows, num_blocks

_ROW_DTYPES = ("uint16", "int16", "float32", "float64", "int32", "int64")
MAX_ROWS = 32
"""Most rows that `combine` takes; also defined in `reduce.cu`."""

_POINTERS = np.dtype([("at", np.uint64, MAX_ROWS)])


def combine(rows: Rows, lo: int, hi: int, out: Array, op: int) -> None:
    """See `reference.combine`; at most 32 rows."""
    _launch_combine([rows[k][lo:hi] for k in range(len(rows))], [out], op)


def combine_into(rows: Rows, lo: int, hi: int, row: int, op: int) -> None:
    """See `reference.combine_into`; at most 32 rows."""
    columns = [rows[k][lo:hi] for k in range(len(rows))]
    _launch_combine(columns, columns if row == EVERY_ROW else [columns[row]], op)


def _launch_combine(rows: list[Array], targets: list[Array], op: int) -> None:
    of_type = cuda.type_name("combine", _ROW_DTYPES, rows[0].size, *rows, *targets)
    if len(rows) > MAX_ROWS:
        raise UnsupportedError("combine", expected=f"at most {MAX_ROWS} rows", got=len(rows))
    pointers = (_pointers(rows), np.int32(len(rows)), _pointers(targets), np.int32(len(targets)))
    blocks = cuda.blocks(-(-rows[0].nbytes // 16))
    cuda.launch("reduce", f"combine_{of_type}", blocks, *pointers, np.int64(rows[0].size), np.int32(op))


def _pointers(rows: list[Array]) -> np.ndarray:
    made = np.zeros(1, _POINTERS)
    made["at"][0, : len(rows)] = [row.data.ptr for row in rows]
    return made


_DTYPES = ("uint16", "int16", "float32", "float64")
_PIECES = 128
"""Blocks that sum one layer; also defined in `norms.cu`."""


def all_finite(x: Array) -> bool:
    """See `reference.all_finite`."""
    of_type = cuda.type_name("all_finite", _DTYPES, x.size, x)
    flag = array_namespace(x).zeros(1, dtype=np.int32)
    cuda.launch("norms", f"find_not_finite_{of_type}", cuda.blocks(-(-x.nbytes // 16)), x, np.int64(x.size), flag)
    return not int(flag[0])


def sum_of_squares(x: Array) -> float:
    """See `reference.sum_of_squares`."""
    return sums_of_squares((x,))[0]


def sums_of_squares(xs: Iterable[Array]) -> list[float]:
    """See `reference.sums_of_squares`; waits once for all."""
    arrays = list(xs)
    return to_host(all_squares(arrays)).tolist() if arrays else []


def all_squares(xs: Sequence[Array]) -> Array:
    """Return `sums_of_squares` of one or more arrays, in float64 on their GPU, without waiting."""
    xp = array_namespace(*xs)
    out = xp.empty(len(xs), dtype=np.float64)
    for number, x in enumerate(xs):
        of_type = cuda.type_name("sum_of_squares", _DTYPES, x.size, x)
        blocks = min(cuda.blocks(-(-x.nbytes // 16)), cuda.MAX_PARTS)
        partial = xp.empty(blocks, dtype=np.float64)
        cuda.launch("norms", f"sum_of_squares_{of_type}", blocks, x, np.int64(x.size), partial)
        cuda.launch("norms", "add_partials_f64", 1, partial, np.int64(blocks), out[number : number + 1])
    return out


def clipped_scale(squares: Array, scale: float | Array, most: float) -> Array:
    """See `reference.clipped_scale`; returns float64, shape ``(1,)``, on the GPU of ``squares``, without waiting.

    ``scale`` may be on the GPU, too.
    """
    cuda.check("clipped_scale", ("float64",), squares.size, squares)
    number, place = (np.float64(scale), cuda.NOWHERE) if isinstance(scale, float) else (np.float64(1), scale)
    out = array_namespace(squares).empty(1, dtype=np.float64)
    cuda.launch("norms", "clipped_scale", 1, squares, np.int64(squares.size), number, place, np.float64(most), out)
    return out


def segment_squares(params: Array, grads: Array, bounds: Array, out: Array) -> None:
    """See `reference.segment_squares`; does not wait."""
    of_type = cuda.type_name("segment_squares", _DTYPES, params.size, params, grads)
    cuda.check("segment_squares", ("int64",), bounds.size, bounds)
    layers = bounds.size - 1
    cuda.check("segment_squares", ("float64",), 2 * layers, out)
    partial = array_namespace(params).empty((layers, 2, _PIECES), dtype=np.float64)
    cuda.launch("norms", f"segment_squares_{of_type}", layers * _PIECES, params, grads, bounds, partial)
    cuda.launch("norms", "add_partials_f64", 2 * layers, partial, np.int64(_PIECES), out)


Coefficients = tuple[float, ...] | Array


def sgd(param: Array, grad: Array, coefficients: Coefficients, scale: Array | None = None) -> None:
    """See `reference.sgd`."""
    _launch("sgd", (param, grad), coefficients, 3, scale)


def sgd_momentum(
    param: Array, grad: Array, velocity: Array, coefficients: Coefficients, scale: Array | None = None
) -> None:
    """See `reference.sgd_momentum`."""
    _launch("sgd_momentum", (param, grad, velocity), coefficients, 4, scale)


def sgd_nesterov(
    param: Array, grad: Array, velocity: Array, coefficients: Coefficients, scale: Array | None = None
) -> None:
    """See `reference.sgd_nesterov`."""
    _launch("sgd_nesterov", (param, grad, velocity), coefficients, 4, scale)


def adam(param: Array, grad: Array, m: Array, v: Array, coefficients: Coefficients, scale: Array | None = None) -> None:
    """See `reference.adam`."""
    _launch("adam", (param, grad, m, v), coefficients, 9, scale)


def _launch(name: str, arrays: tuple[Array, ...], coefficients: Coefficients, count: int, scale: Array | None) -> None:
    param = arrays[0]
    of_type = cuda.type_name(name, ("float32", "float64"), param.size, *arrays)
    numbers, place = coefficients, cuda.NOWHERE
    if not isinstance(coefficients, tuple):
        cuda.check(name, ("float64",), count, coefficients)
        numbers, place = (0.0,) * count, coefficients
    if scale is not None:
        cuda.check(name, ("float64",), 1, scale)
    scalars = map(param.dtype.type, numbers)
    scale_at = cuda.NOWHERE if scale is None else scale
    cuda.launch_elementwise("update", f"{name}_{of_type}", arrays, *scalars, place, scale_at)


def lars_sgd(param: Array, grad: Array, squares: Array, coefficients: tuple[float, float, float, float]) -> None:
    """See `reference.lars_sgd`."""
    _launch_lars("sgd", (param, grad), squares, coefficients)


def lars_sgd_momentum(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """See `reference.lars_sgd_momentum`."""
    _launch_lars("sgd_momentum", (param, grad, velocity), squares, coefficients)


def lars_sgd_nesterov(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """See `reference.lars_sgd_nesterov`."""
    _launch_lars("sgd_nesterov", (param, grad, velocity), squares, coefficients)


def _launch_lars(name: str, arrays: tuple[Array, ...], squares: Array, coefficients: tuple[float, ...]) -> None:
    param = arrays[0]
    of_type = cuda.type_name(name, ("float32", "float64"), param.size, *arrays)
    cuda.check(name, ("float64",), 2, squares)
    lr, weight_decay, scale, *momentum, trust = coefficients
    rounded, numbers = map(param.dtype.type, (lr, *momentum)), map(np.float64, (weight_decay, scale, trust))
    cuda.launch_elementwise("lars", f"lars_{name}_{of_type}", arrays, *rounded, squares, *numbers)


_PACKED_DTYPES = ("uint16", "float32", "float64")


def pack_two_bit(grad: Array, residual: Array, threshold: float, magnitude: float, words: Array) -> None:
    """See `reference.pack_two_bit`."""
    _pack("pack_two_bit", 16, (grad, residual), threshold, magnitude, words)


def unpack_two_bit(words: Array, magnitude: float, out: Array) -> None:
    """See `reference.unpack_two_bit`."""
    _unpack("unpack_two_bit", 16, words, magnitude, out)


def pack_one_bit(grad: Array, residual: Array, threshold: float, magnitude: float, words: Array) -> None:
    """See `reference.pack_one_bit`."""
    _pack("pack_one_bit", 32, (grad, residual), threshold, magnitude, words)


def unpack_one_bit(words: Array, magnitude: float, out: Array) -> None:
    """See `reference.unpack_one_bit`."""
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
    """Return ``value`` rounded to an element of ``like``, in the type of its computations."""
    return np.float32(np.float16(value)) if like.dtype == np.uint16 else like.dtype.type(value)


_DIGIT_BITS = 11
"""Bits of a digit; also defined in `top_k.cuh`."""
_SAMPLED_PACKS = 1 << 15


def encode_two_bit(grad: Array, residual: Array, threshold: float, scales: Array, words: Array) -> None:
    """See `reference.encode_two_bit`."""
    _encode_blocks("encode_two_bit", 16, (grad, residual), (threshold,), scales, words)


def decode_two_bit(scales: Array, words: Array, out: Array) -> None:
    """See `reference.decode_two_bit`."""
    _decode_blocks("decode_two_bit", 16, scales, words, out)


def encode_one_bit(
    grad: Array, residual: Array, threshold: float, magnitude: float, scales: Array, words: Array
) -> None:
    """See `reference.encode_one_bit`."""
    _encode_blocks("encode_one_bit", 32, (grad, residual), (threshold, magnitude), scales, words)


def decode_one_bit(scales: Array, words: Array, out: Array) -> None:
    """See `reference.decode_one_bit`."""
    _decode_blocks("decode_one_bit", 32, scales, words, out)


def encode_float16(grad: Array, residual: Array, halves: Array) -> None:
    """See `reference.encode_float16`."""
    _encode_halves("encode_float16", grad, residual, halves)


def encode_bfloat16(grad: Array, residual: Array, halves: Array) -> None:
    """See `reference.encode_bfloat16`."""
    _encode_halves("encode_bfloat16", grad, residual, halves)


def encode_top_k(grad: Array, residual: Array, indices: Array, values: Array) -> None:
    """See `reference.encode_top_k`."""
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
    """Return the elements of each warp, and the number of blocks and warps."""
    warps_of_block, at_once = cuda.THREADS // cuda.WARP, cuda.WARP * 16 // x.itemsize
    length = -(-x.size // (cuda.MAX_PARTS * warps_of_block * at_once)) * at_once
    blocks = -(-x.size // (length * warps_of_block))
    return length, blocks, blocks * warps_of_block


def _digits(bits: int) -> Iterator[tuple[int, int]]:
    """Yield the shift and the bits of each digit of a magnitude of ``bits``, from the highest on."""
    while bits > 0:
        of_digit = min(bits, _DIGIT_BITS)
        bits -= of_digit
        yield bits, of_digit


def _sample(packs: int, chosen_of_pack: float) -> tuple[int, int]:
    """Return the sampling stride in packs, and the number of sampled elements that should become candidates.

    That is the expected number of sent elements in the sample, plus eight deviations. If adjacent elements are alike,
    as many as a pack has, it is still three deviations.
    """
    stride = max(1, packs // _SAMPLED_PACKS)
    expected = -(-packs // stride) * chosen_of_pack
    return stride, math.ceil(expected + 8 * math.sqrt(expected) + 16)


def decode_top_k(indices: Array, values: Array, out: Array) -> None:
    """See `reference.decode_top_k`."""
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
    passed = (grad, residual, np.int64(grad.size), *map(np.float64, numbers), scales, words)
    cuda.launch("compress", f"{name}_{of_type}", blocks, *passed)


def _decode_blocks(name: str, width: int, scales: Array, words: Array, out: Array) -> None:
    out = bits_of(out)
    of_type = _checked_blocks(name, width, scales, words, out)
    blocks = cuda.blocks(-(-out.nbytes // 16))
    cuda.launch("compress", f"{name}_{of_type}", blocks, scales, words, out, np.int64(out.size))


def _checked_blocks(name: str, width: int, scales: Array, words: Array, *arrays: Array) -> str:
    """Return the suffix of the kernel's name for ``arrays``, whose scales and words of ``width`` elements are given."""
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
