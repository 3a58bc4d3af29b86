"""The elements of whole tensors, whichever files they are in: some of them, or all, piece by piece."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np

from ..arrays import BFLOAT16
from .manifest import Tensor
from .shard_reader import ShardReader

PIECE_NBYTES = 16 << 20


def read_elements(reader: ShardReader, tensor: Tensor, first: int, out: np.ndarray) -> None:
    """Fill ``out``, shape ``(count,)``, of the tensor's stored dtype, with its elements from number ``first`` on.

    Raises:
        DataError: a file is missing or damaged; names file and data set.
    """
    last = first + out.size
    holds_first = bisect.bisect_right(tensor.parts, first, key=lambda part: part.first) - 1
    for number in range(max(0, holds_first), len(tensor.parts)):
        part = tensor.parts[number]
        if part.first >= last:
            break
        begin, end = max(first, part.first), min(last, part.first + part.count)
        if begin < end:
            reader.read(part, begin - part.first, out[begin - first : end - first])


def read_whole(reader: ShardReader, tensor: Tensor) -> np.ndarray:
    """A new array of a tensor's shape and stored dtype. Raises what `read_elements` does."""
    array = np.empty(tensor.shape, tensor.stored_dtype)
    read_elements(reader, tensor, 0, array.reshape(-1))
    return array


def pieces(reader: ShardReader, tensor: Tensor) -> Iterator[np.ndarray]:
    """All elements in C order, at most `PIECE_NBYTES` at once, in memory that the next piece takes, too.

    Raises:
        DataError: a file is missing or damaged, or elements are not those that were written.
    """
    buffer = np.empty(min(tensor.count, PIECE_NBYTES // tensor.stored_dtype.itemsize), tensor.stored_dtype)
    for first in range(0, tensor.count, max(1, buffer.size)):
        piece = buffer[: min(buffer.size, tensor.count - first)]
        read_elements(reader, tensor, first, piece)
        yield piece


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """Elements as numbers that NumPy itself has: bfloat16, whose bits come as uint16, as float32, which is exact."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == BFLOAT16 else values
