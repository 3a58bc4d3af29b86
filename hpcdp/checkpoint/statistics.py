"""What the elements of a tensor are like: smallest, largest, mean, how many are no numbers. Read piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .manifest import Tensor
from .reading import pieces, widened
from .shard_reader import ShardReader


@dataclass
class Statistics:
    """Of the elements that are finite, if not said otherwise; of complex ones, of their absolute values."""

    count: int = 0
    """Finite ones."""
    smallest: float = float("nan")
    largest: float = float("nan")
    mean: float = float("nan")
    deviation: float = float("nan")
    """The standard deviation."""
    zeros: int = 0
    nans: int = 0
    infinities: int = 0


def statistics(folder: Path, tensor: Tensor, tell: Callable[[int], object] = lambda nbytes: None) -> Statistics:
    """The statistics of a tensor of the checkpoint in ``folder``; ``tell`` is called with bytes that have been read.

    Raises:
        DataError: a file is missing or damaged.
    """
    of = Statistics()
    spread = 0.0
    with ShardReader(folder, "show") as reader, np.errstate(over="ignore", invalid="ignore"):  # a run may have diverged
        for piece in pieces(reader, tensor):
            tell(piece.nbytes)
            values = widened(piece, tensor.dtype)
            values = np.abs(values) if values.dtype.kind == "c" else values
            if values.dtype.kind == "f":
                of.nans += int(np.count_nonzero(np.isnan(values)))
                of.infinities += int(np.count_nonzero(np.isinf(values)))
                values = values[np.isfinite(values)]
            if values.size == 0:
                continue
            of.zeros += values.size - int(np.count_nonzero(values))
            of.smallest = float(np.fmin(of.smallest, values.min()))
            of.largest = float(np.fmax(of.largest, values.max()))
            mean, deviation, count = float(np.mean(values, dtype="f8")), float(np.std(values, dtype="f8")), values.size
            both = of.count + count
            away = mean - of.mean if of.count else 0.0
            spread += deviation * deviation * count + away * away * of.count * count / both
            of.mean = of.mean + away * count / both if of.count else mean
            of.count = both
    if of.count:
        of.deviation = (spread / of.count) ** 0.5
    return of
