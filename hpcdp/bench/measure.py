"""Fresh data, alternating timings, what is computed from them, and sizes in bytes as text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..comm import World
from ..core.arrays import BFLOAT16, is_float, is_half
from ..errors import ConfigError, whole_number

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# A prime, so that a segment that ends at the wrong place never looks right.
_PERIOD = 8191
_BFLOAT16_EPS = 2.0**-7

# Gloo's threads still send to other ranks when a call has returned; a rank that spun for the next barrier at once would
# keep them from the core. All candidates start their turns after the same pause.
_SETTLE_S = 0.0005


def bus_factor(ranks: int, collective: str = "allreduce") -> float:
    """What turns algbw (bytes / time) into busbw, the rate at which every rank's link must carry them.

    ``2 (n - 1) / n`` for allreduce, half of it for reduce_scatter and allgather (where all ranks' bytes count), 1 for
    broadcast and reduce (nccl-tests, PERFORMANCE.md).
    """
    if collective in ("broadcast", "reduce"):
        return 1.0 if ranks > 1 else 0.0
    return (2 if collective == "allreduce" else 1) * (ranks - 1) / ranks


class Candidate(Protocol):
    """Something to time: `refresh` writes new input (untimed), `timed` does the work and returns nanoseconds."""

    name: str

    def refresh(self, iteration: int) -> None: ...

    def timed(self) -> int: ...

    def wrong(self, iteration: int) -> int:
        """How many elements of this rank's result differ from what `refresh` of all ranks leads to."""
        ...


class FreshData:
    """Inputs that differ from rank to rank and in every iteration, and what a collective makes of them.

    They are small whole numbers, so that sums are exact in every dtype (float16: up to 66 ranks, bfloat16: 8).
    """

    def __init__(self, rank: int, ranks: int, dtype: Any = np.float32, op: str = "sum") -> None:
        self._rank, self._ranks, self._op = rank, ranks, op
        self._dtype = np.dtype(dtype)
        self._largest = 3 if op == "prod" else 31
        self._numbers = (np.arange(_PERIOD + self._largest) % self._largest + 1).astype(self._dtype)

    def _block(self, rank: int, iteration: int) -> np.ndarray:
        # Ranks with all shifts, each as often, would have the same sum everywhere, and stale ones would look right.
        shift = (7 * (rank % (self._largest - 1)) + iteration) % self._largest
        return self._numbers[shift : shift + _PERIOD]

    def write(self, x: np.ndarray, iteration: int) -> None:
        """Overwrite ``x``, shape ``(count,)``, with this rank's input, from a block that stays in the first cache."""
        block = self._block(self._rank, iteration)
        whole = x.size // _PERIOD * _PERIOD
        if whole:
            x[:whole].reshape(-1, _PERIOD)[...] = block
        x[whole:] = block[: x.size - whole]

    def reduced(self, iteration: int) -> np.ndarray:
        """What all ranks' inputs lead to: a block that a right result repeats."""
        blocks = _wide(np.stack([self._block(rank, iteration) for rank in range(self._ranks)]))
        if self._op == "mean":
            return blocks.mean(axis=0).astype(self._dtype)
        reduction = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[self._op]
        return np.asarray(reduction.reduce(blocks, axis=0, dtype=blocks.dtype)).astype(self._dtype)

    def wrong(self, result: np.ndarray, iteration: int, start: int = 0) -> int:
        """How many of ``result``, shape ``(count,)``, are not elements ``start`` and on of all ranks' reduction."""
        tolerance = 0.0
        if is_float(self._dtype):
            eps = _BFLOAT16_EPS if self._dtype.name == BFLOAT16 else float(np.finfo(self._dtype).eps)
            whole = self._op == "sum" and self._largest * self._ranks <= 2 / eps
            tolerance = 0.0 if whole or self._op in ("min", "max") else 10 * eps
        return count_wrong(result, np.roll(self.reduced(iteration), -start), tolerance)

    def wrong_input(self, result: np.ndarray, iteration: int, rank: int) -> int:
        """How many elements of ``result``, shape ``(count,)``, are not those that `write` gave ``rank``."""
        return count_wrong(result, self._block(rank, iteration), 0.0)


def count_wrong(result: np.ndarray, block: np.ndarray, tolerance: float) -> int:
    """How many elements of ``result``, shape ``(count,)``, differ relatively by more from a repetition of ``block``."""
    count = 0
    for start in range(0, result.size, block.size):
        piece = result[start : start + block.size]
        wanted = block[: piece.size]
        close = piece == wanted if tolerance == 0 else np.isclose(_wide(piece), _wide(wanted), rtol=tolerance)
        count += piece.size - int(np.count_nonzero(close))
    return count


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if is_half(x) else x


@dataclass
class MeasuredCollective:
    """A collective that is called from Python.

    Args:
        name: as printed.
        data: the inputs.
        x: this rank's input, shape ``(count,)``.
        result: where the result ends; may be ``x``.
        call: does it.
        check: how many elements of ``result`` are wrong in this iteration; default those of an allreduce.
    """

    name: str
    data: FreshData
    x: np.ndarray
    result: np.ndarray
    call: Callable[[], Any]
    check: Callable[[np.ndarray, int], int] | None = None

    def refresh(self, iteration: int) -> None:
        self.data.write(self.x, iteration)

    def timed(self) -> int:
        begin = time.perf_counter_ns()
        self.call()
        return time.perf_counter_ns() - begin

    def wrong(self, iteration: int) -> int:
        return (self.check or self.data.wrong)(self.result, iteration)


@dataclass
class Series:
    """One candidate's timings on one rank: nanoseconds in order, ``repeats`` a turn, and its wrong elements."""

    ns: list[int]
    repeats: int
    wrong: int = 0


@dataclass(frozen=True)
class MeasuringSchedule:
    """How often to time a candidate: ``turns`` of ``repeats`` in a row, after ``warmup`` single ones."""

    turns: int
    repeats: int
    warmup: int

    @classmethod
    def for_size(cls, nbytes: int, iterations: int, warmup: int) -> MeasuringSchedule:
        """About ``iterations`` timings up to 1 MB and fewer above, at least 5.

        Small exchanges are repeated within a turn: after an idle millisecond the first one takes some 20 us more.
        """
        if nbytes > 1 << 20:
            iterations = max(min(iterations, 5), iterations * (1 << 20) // nbytes)
        repeats = max(1, min(10, iterations // 3, (4 << 20) // nbytes))
        return cls(max(1, iterations // repeats), repeats, warmup)

    @classmethod
    def exactly(cls, iterations: int, warmup: int, candidates: int) -> MeasuringSchedule:
        """``iterations`` timings; of several candidates up to 10 in a row, for the reason that `for_size` has."""
        repeats = max(n for n in range(1, 11) if iterations % n == 0) if candidates > 1 else 1
        return cls(iterations // repeats, repeats, warmup)


def alternate(
    candidates: Sequence[Candidate], barrier: Callable[[], Any], schedule: MeasuringSchedule, validate: bool = True
) -> dict[str, Series]:
    """Time the candidates turn by turn, so that whatever else the machine does meets all of them.

    Every rank must call with the same candidates. Each timing starts after ``barrier()`` with data written just before.
    Results are checked in the warm-up and after each candidate's last timing.
    """
    series = {candidate.name: Series([], schedule.repeats) for candidate in candidates}
    iteration = 0
    for turn in range(schedule.warmup + schedule.turns):
        warming_up = turn < schedule.warmup
        first = turn % len(candidates)
        for candidate in (*candidates[first:], *candidates[:first]):
            if len(candidates) > 1:
                time.sleep(_SETTLE_S)
            for _ in range(1 if warming_up else schedule.repeats):
                iteration += 1
                candidate.refresh(iteration)
                barrier()
                ns = candidate.timed()
                if not warming_up:
                    series[candidate.name].ns.append(ns)
            if validate and (warming_up or turn == schedule.warmup + schedule.turns - 1):
                series[candidate.name].wrong += candidate.wrong(iteration)
                barrier()
    return series


def gather(world: World, found: dict[str, Series]) -> dict[str, list[Series]]:
    """Every rank's series by candidate, in the order of the ranks; every rank must call."""
    ranks = world.comm.allgather_json({name: [each.ns, each.repeats, each.wrong] for name, each in found.items()})
    return {name: [Series(*rank[name]) for rank in ranks] for name in found}


@dataclass
class Timing:
    """Latencies in microseconds. ``avg``, ``minimum``, ``maximum`` are OSU's: over the ranks' means.

    ``median`` is over `turn_medians`.
    """

    avg: float
    minimum: float
    maximum: float
    median: float
    iterations: int


def turn_medians(ranks: Sequence[Series]) -> np.ndarray:
    """Microseconds of a candidate's turns, shape ``(turns,)``: the median timing of each, by the slowest rank."""
    slowest = np.max([each.ns for each in ranks], axis=0) / 1e3
    return np.asarray(np.median(slowest.reshape(-1, ranks[0].repeats), axis=1))


def timing(ranks: Sequence[Series]) -> Timing:
    """The latencies of one candidate, from every rank's series."""
    means = np.array([np.mean(each.ns) for each in ranks]) / 1e3
    median = float(np.median(turn_medians(ranks)))
    return Timing(float(means.mean()), float(means.min()), float(means.max()), median, len(ranks[0].ns))


def median_ratio(numerator: Sequence[float] | np.ndarray, denominator: Sequence[float] | np.ndarray) -> float:
    """The median of the ratios pair by pair: what the machine did to both members of a pair cancels out."""
    return float(np.median(np.asarray(numerator, np.float64) / np.asarray(denominator, np.float64)))


def largest_difference(found: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """The largest relative difference, one by one; NaN where one is NaN, which Python's ``max`` may pass over."""
    return float(np.max(np.abs(np.asarray(found, np.float64) / np.asarray(expected, np.float64) - 1)))


def wrong(ranks: Sequence[Series]) -> int:
    """The wrong elements of one candidate, over all ranks."""
    return sum(each.wrong for each in ranks)


def parse_size(text: str) -> int:
    """Bytes of ``"4"``, ``"64K"``, ``"16M"`` or ``"1G"`` (binary units, as OSU's and nccl-tests' flags have them).

    Raises:
        ConfigError: the text is none of these, or 0.
    """
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isdecimal() or unit not in _UNITS:
        raise ConfigError("size", expected="a number with K, M or G, e.g. 64K", got=repr(text))
    if int(digits) == 0:
        raise ConfigError("size", expected="1 byte or more", got=repr(text))
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
        ConfigError: not ``min:max``, the minimum is zero or above the maximum, or the factor is below 2.
    """
    whole_number("size factor", None, factor, 2)
    low, separator, high = text.partition(":")
    sizes = []
    size, last = (parse_size(low), parse_size(high)) if separator else (0, 0)
    while 0 < size <= last:
        sizes.append(size)
        size *= factor
    if not sizes:
        raise ConfigError("size range", expected="MIN:MAX with 0 < MIN <= MAX, e.g. 4:64M", got=repr(text))
    return sizes
