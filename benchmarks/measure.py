"""Sizes, fresh data, alternating timings and what is computed from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# A prime, so that a segment that ends at the wrong place never looks right.
_PERIOD = 8191


def parse_size(text: str) -> int:
    """Bytes of ``"4"``, ``"64K"``, ``"16M"`` or ``"1G"`` (binary units, as OSU's and nccl-tests' flags have them).

    Raises:
        ConfigError: the text is none of these.
    """
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isdigit() or unit not in _UNITS:
        raise ConfigError("size", expected="a number with K, M or G, e.g. 64K", got=repr(text))
    return int(digits) * _UNITS[unit]


def format_size(nbytes: int) -> str:
    """The shortest of ``4``, ``64K``, ``16M``, ``1G``."""
    for unit in ("G", "M", "K"):
        if nbytes >= _UNITS[unit] and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)


def size_range(text: str, factor: int = 2) -> list[int]:
    """The sizes in bytes of ``"min:max"``, each ``factor`` times the one before.

    Raises:
        ConfigError: not ``min:max``, or the minimum is zero or above the maximum.
    """
    low, separator, high = text.partition(":")
    sizes = []
    size, last = (parse_size(low), parse_size(high)) if separator else (0, 0)
    while 0 < size <= last:
        sizes.append(size)
        size *= factor
    if not sizes:
        raise ConfigError("size range", expected="MIN:MAX with 0 < MIN <= MAX, e.g. 4:64M", got=repr(text))
    return sizes


def bus_factor(ranks: int) -> float:
    """What turns an allreduce's algbw (bytes / time) into busbw: ``2 (n - 1) / n`` (nccl-tests, PERFORMANCE.md)."""
    return 2 * (ranks - 1) / ranks


class Candidate(Protocol):
    """Something to time: `refresh` writes new input (untimed), `timed` does the work and returns nanoseconds."""

    name: str

    def refresh(self, iteration: int) -> None: ...

    def timed(self) -> int: ...

    def wrong(self, iteration: int) -> int:
        """How many elements of this rank's result differ from what `refresh` of all ranks leads to."""
        ...


class FreshData:
    """Inputs of an allreduce that differ on every rank and in every iteration, and the result that they lead to.

    They are small whole numbers, so that sums are exact in every dtype.
    """

    def __init__(self, rank: int, ranks: int, dtype: Any = np.float32, op: str = "sum") -> None:
        self._rank, self._ranks, self._op = rank, ranks, op
        self._dtype = np.dtype(dtype)
        self._largest = 3 if op == "prod" else 31
        self._numbers = (np.arange(_PERIOD + self._largest) % self._largest + 1).astype(self._dtype)

    def _block(self, rank: int, iteration: int) -> np.ndarray:
        shift = (7 * rank + iteration) % self._largest
        return self._numbers[shift : shift + _PERIOD]

    def write(self, x: np.ndarray, iteration: int) -> None:
        """Overwrite ``x``, shape ``(count,)``, with this rank's input, from a block that stays in the first cache."""
        block = self._block(self._rank, iteration)
        whole = x.size // _PERIOD * _PERIOD
        if whole:
            x[:whole].reshape(-1, _PERIOD)[...] = block
        x[whole:] = block[: x.size - whole]

    def wrong(self, result: np.ndarray, iteration: int) -> int:
        """How many elements of ``result``, shape ``(count,)``, are not the reduction over all ranks."""
        blocks = np.stack([self._block(rank, iteration) for rank in range(self._ranks)])
        if self._op == "mean":
            wanted = blocks.mean(axis=0).astype(self._dtype)
        else:
            reduction = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[self._op]
            wanted = reduction.reduce(blocks, axis=0, dtype=self._dtype)
        tolerance = 0.01 if self._dtype.itemsize == 2 else 1e-5
        exact = self._op in ("sum", "min", "max")
        count = 0
        for start in range(0, result.size, _PERIOD):
            piece = result[start : start + _PERIOD]
            good = wanted[: piece.size]
            count += np.count_nonzero(piece != good if exact else ~np.isclose(piece, good, rtol=tolerance))
        return int(count)


@dataclass
class Exchange:
    """An allreduce that is called from Python.

    Args:
        name: as printed.
        data: the inputs.
        x: this rank's input, shape ``(count,)``.
        result: where the sum ends; may be ``x``.
        call: does the allreduce.
        settle_s: how long this rank sleeps after each timing, for a library whose threads still send to the others when
            the call returns: a rank that spun for the next barrier would keep them from the core.
    """

    name: str
    data: FreshData
    x: np.ndarray
    result: np.ndarray
    call: Callable[[], Any]
    settle_s: float = 0.0

    def refresh(self, iteration: int) -> None:
        self.data.write(self.x, iteration)

    def timed(self) -> int:
        begin = time.perf_counter_ns()
        self.call()
        elapsed = time.perf_counter_ns() - begin
        if self.settle_s:
            time.sleep(self.settle_s)
        return elapsed

    def wrong(self, iteration: int) -> int:
        return self.data.wrong(self.result, iteration)


@dataclass
class Series:
    """One candidate's timings on this rank (nanoseconds, in order) and its wrong elements."""

    ns: list[int]
    wrong: int = 0


def alternate(
    candidates: Sequence[Candidate], barrier: Callable[[], Any], iterations: int, warmup: int, validate: bool = True
) -> dict[str, Series]:
    """Time the candidates turn by turn, so that whatever else the machine does meets all of them.

    Every rank must call with the same candidates. Each timing starts after ``barrier()`` with data written just
    before. Results are checked in the warm-up and in the last iteration, outside the timings.
    """
    series = {candidate.name: Series([]) for candidate in candidates}
    for iteration in range(warmup + iterations):
        turn = iteration % len(candidates)
        for candidate in (*candidates[turn:], *candidates[:turn]):
            candidate.refresh(iteration)
            barrier()
            ns = candidate.timed()
            if iteration >= warmup:
                series[candidate.name].ns.append(ns)
            if validate and (iteration < warmup or iteration == warmup + iterations - 1):
                series[candidate.name].wrong += candidate.wrong(iteration)
                barrier()
    return series


@dataclass
class Timing:
    """Latencies in microseconds. ``avg``, ``minimum``, ``maximum`` are OSU's: over the ranks' means.

    ``median`` is that of the iterations, each counted by its slowest rank.
    """

    avg: float
    minimum: float
    maximum: float
    median: float
    iterations: int


def slowest_rank(ns: Sequence[Sequence[int]]) -> np.ndarray:
    """Microseconds of every iteration, shape ``(iterations,)``, from nanoseconds by rank and iteration."""
    return np.asarray(ns, np.float64).max(axis=0) / 1e3


def timing(ns: Sequence[Sequence[int]]) -> Timing:
    """The latencies of one candidate, from nanoseconds by rank and iteration."""
    means = np.asarray(ns, np.float64).mean(axis=1) / 1e3
    median = float(np.median(slowest_rank(ns)))
    return Timing(float(means.mean()), float(means.min()), float(means.max()), median, len(ns[0]))


def median_ratio(numerator: Sequence[float] | np.ndarray, denominator: Sequence[float] | np.ndarray) -> float:
    """The median of the ratios pair by pair: what the machine did to both members of a pair cancels out."""
    return float(np.median(np.asarray(numerator, np.float64) / np.asarray(denominator, np.float64)))


def iterations_for(nbytes: int, iterations: int) -> int:
    """``iterations`` up to 1 MB, fewer above it, at least 5, so that no size takes much longer than the others."""
    return iterations if nbytes <= 1 << 20 else max(min(iterations, 5), iterations * (1 << 20) // nbytes)
