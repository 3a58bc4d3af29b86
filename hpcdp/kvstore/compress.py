"""What is pushed in fewer bits: which codec, and the codes of a key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from .. import kernels
from ..arrays import Array, is_host
from ..compression import Compression
from ..errors import UnsupportedError
from .arguments import Key

_ALIGNED_NBYTES = 64


def check_codable(operation: str, values: Iterable[tuple[Key, Array]]) -> None:
    """Raises `UnsupportedError` unless codecs take all ``values``."""
    for key, value in values:
        if not is_host(value) or value.dtype not in (np.float16, np.float32, np.float64):
            got, remedy = value.dtype, None
            if not is_host(value):
                got, remedy = "an array on a device", "set the compression before init: then the host keeps the keys"
            expected = "a NumPy array of float16, float32 or float64 in a store that compresses"
            raise UnsupportedError(operation, where=f"key {key!r}", expected=expected, got=got, remedy=remedy)


class Codes:
    """What one worker pushes of a key, encoded part by part, with what was not sent before.

    Args:
        ends: where the parts begin and end, the first at 0.
        dtype: of the key.
    """

    def __init__(self, compression: Compression, ends: Sequence[int], dtype: np.dtype) -> None:
        for name in ("compress", "cast"):
            kernels.load(name)  # not in the first push, for which others wait
        self._feedback = compression.for_array(int(ends[-1]), dtype)
        self.parts = [slice(int(first), int(last)) for first, last in pairwise(ends)]
        """The elements of each part."""
        self.places: list[slice] = []
        """The bytes of each part's codes in a wire."""
        self.nbytes = 0
        """Of a wire, whose parts begin at cache lines."""
        self.sent_nbytes = 0
        """Of all codes in it."""
        for part in self.parts:
            nbytes = self._feedback.nbytes(part.stop - part.start) if part.stop > part.start else 0
            self.places.append(slice(self.nbytes, self.nbytes + nbytes))
            self.nbytes += -(-nbytes // _ALIGNED_NBYTES) * _ALIGNED_NBYTES
            self.sent_nbytes += nbytes

    @property
    def residual(self) -> np.ndarray:
        """What was not sent yet, shape ``(count,)``."""
        return self._feedback.residual

    def encode(self, x: np.ndarray, wire: np.ndarray) -> None:
        """Encode ``x``, shape ``(count,)``, to ``wire``, uint8, shape ``(nbytes,)``; what is not sent is remembered."""
        for part, place in zip(self.parts, self.places, strict=True):
            if part.stop > part.start:
                self._feedback.encode(x[part], part, wire[place])

    def add(self, codes: Iterable[np.ndarray], out: np.ndarray) -> None:
        """The sum of what the ``codes`` of one part say, in their order; float16 is added in float32.

        Args:
            out: is overwritten, shape ``(elements of the part,)``.
        """
        decode = self._feedback.codec.decode
        added = np.empty_like(out)
        total = np.zeros(out.size, np.result_type(out.dtype, np.float32))
        for each in codes:
            decode(each, added)
            total += added
        out[...] = total
