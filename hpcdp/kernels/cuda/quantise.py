"""Gradients in 2 bits or 1 bit an element, the rest being kept, for CuPy arrays. Imports: cuda, reference.compress.

`reference.quantise` is the specification: same names, same arguments, same bits.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Array
from .. import cuda
from ..reference.compress import num_blocks

_DTYPES = ("uint16", "float32", "float64")


def pack_two_bit(grad: Array, residual: Array, threshold: float, magnitude: float, words: Array) -> None:
    """See `reference.quantise.pack_two_bit`."""
    _pack("pack_two_bit", 16, (grad, residual), threshold, magnitude, words)


def unpack_two_bit(words: Array, magnitude: float, out: Array) -> None:
    """See `reference.quantise.unpack_two_bit`."""
    _unpack("unpack_two_bit", 16, words, magnitude, out)


def pack_one_bit(grad: Array, residual: Array, threshold: float, magnitude: float, words: Array) -> None:
    """See `reference.quantise.pack_one_bit`."""
    _pack("pack_one_bit", 32, (grad, residual), threshold, magnitude, words)


def unpack_one_bit(words: Array, magnitude: float, out: Array) -> None:
    """See `reference.quantise.unpack_one_bit`."""
    _unpack("unpack_one_bit", 32, words, magnitude, out)


def _pack(name: str, width: int, arrays: tuple[Array, Array], threshold: float, magnitude: float, words: Array) -> None:
    count = arrays[0].size
    of_type = cuda.type_name(name, _DTYPES, count, *arrays)
    cuda.check(name, ("uint32",), -(-count // width), words)
    scalars = (_rounded(threshold, arrays[0]), _rounded(magnitude, arrays[0]))
    blocks = cuda.blocks(num_blocks(count) * cuda.WARP)
    cuda.launch("quantise", f"{name}_{of_type}", blocks, *arrays, np.int64(count), *scalars, words)


def _unpack(name: str, width: int, words: Array, magnitude: float, out: Array) -> None:
    of_type = cuda.type_name(name, _DTYPES, out.size, out)
    cuda.check(name, ("uint32",), -(-out.size // width), words)
    blocks = cuda.blocks(-(-out.nbytes // 16))
    cuda.launch("quantise", f"{name}_{of_type}", blocks, words, out, np.int64(out.size), _rounded(magnitude, out))


def _rounded(value: float, like: Array) -> np.generic:
    """As an element of ``like``, in the type it is computed in."""
    return np.float32(np.float16(value)) if like.dtype == np.uint16 else like.dtype.type(value)
