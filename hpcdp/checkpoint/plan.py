"""Which rank writes what of a state: all of it once, the long tensors of which several have copies in equal parts."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from .tree import Held

WHOLE_NBYTES = 1 << 20
"""Below so many bytes one rank writes all of a part of which several have copies: files of many slivers help nobody."""
PADDED = "gG"
"""Characters of dtypes of whose bytes some are no part of the value, and may be anything."""
_LINE_NBYTES = 64
_SAMPLES, _ENDS = 64, 256


class Piece(NamedTuple):
    """A run of a tensor's elements that this rank writes."""

    name: str
    first: int
    values: np.ndarray
    """Shape ``(count,)``."""
    dtype: str
    """See `Held.dtype`."""
    is_copied: bool = False
    """See `Held.is_copied`."""

    @property
    def dataset(self) -> str:
        """What the run is called in its file."""
        return self.name if self.first == 0 else f"{self.name}@{self.first}"


def own_pieces(held: Iterable[Held]) -> Iterator[Piece]:
    """What this rank writes of what it holds."""
    for each in held:
        for part in each.parts:
            first, last = _own_run(each, part.values.size, part.values.itemsize)
            if last > first:
                yield Piece(each.name, part.first + first, part.values[first:last], each.dtype, each.is_copied)


def _writer(held: Held) -> int:
    """Which copy of a short tensor is written."""
    return zlib.crc32(held.name.encode(errors="surrogatepass")) % held.copies


def _own_run(held: Held, count: int, itemsize: int) -> tuple[int, int]:
    if count * itemsize < WHOLE_NBYTES:
        return (0, count) if _writer(held) == held.copy else (0, 0)
    per_line = max(1, _LINE_NBYTES // itemsize)
    lines = -(-count // per_line)
    first, last = (lines * part // held.copies * per_line for part in (held.copy, held.copy + 1))
    return first, min(last, count)


def described(held: Iterable[Held], copies: int) -> list[str]:
    """What ranks compare before they save: a line a tensor, with a checksum of a sample where all should hold the same.

    Args:
        copies: how many ranks there are.
    """
    lines = []
    for each in held:
        line = f"{each.name} {each.shape} {each.dtype}"
        if each.copies == copies > 1 and len(each.parts) == 1 and each.stored.char not in PADDED:
            line += f" crc32 {_sample(each.parts[0].values):08x}"
        if not each.is_own:
            lines.append(line)
    return lines


def _sample(flat: np.ndarray) -> int:
    if flat.size > 4 * _ENDS:
        flat = np.concatenate([flat[:_ENDS], flat[:: flat.size // _SAMPLES], flat[-_ENDS:]])
    return zlib.crc32(np.ascontiguousarray(flat).view(np.uint8).data)
