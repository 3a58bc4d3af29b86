"""Trace.

What this rank did when, kept in memory while it runs; `hpcdp.train.chrome_trace` makes one file of all ranks.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from ..errors import whole_number

MAIN = "main"
"""The lane of the thread that trains."""

CAPACITY = 1 << 18
"""Slices and counts that a trace keeps unless it is told otherwise, 60 to 100 MB."""


class Slice(NamedTuple):
    """Something that took its time on a lane, or an instant, whose end is its start."""

    name: str
    lane: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] | None
    """What else there is to say: strings and numbers."""
    nests: bool
    """Whether others of its lane may lie in it; those of a lane that does several things at a time may not."""


class Count(NamedTuple):
    """The value of a number from ``time_ns`` on."""

    name: str
    time_ns: int
    value: float


class Ranges(Protocol):
    """What marks ranges for a profiler of the device: the module ``cupy.cuda.nvtx``."""

    def RangePush(self, name: str) -> object:
        """Begin a range within the one that is open on this thread."""

    def RangePop(self) -> object:
        """End the innermost."""


class Trace:
    """What one rank of a world did. Any thread may add to it; nothing here talks to other ranks.

    A world that is traced keeps it: ``world.kept.get(Trace)`` is None where nothing is traced. Ask once, when
    something is made, and not in each step.

    Args:
        capacity: how many slices and counts are kept; later ones are only counted, in `dropped`.
        clock: integers of nanoseconds; the engine's slices are on the clock of `time.perf_counter_ns`.
        ranges: told of every `span` as well, see `nvtx`.

    Raises:
        ConfigError: ``capacity`` is no integer from 1 on.
    """

    def __init__(
        self,
        capacity: int = CAPACITY,
        clock: Callable[[], int] = time.perf_counter_ns,
        ranges: Ranges | None = None,
    ) -> None:
        self._capacity = whole_number("Trace", "capacity", capacity, 1)
        self.clock = clock
        self.ranges = ranges
        self.slices: list[Slice] = []
        self.counts: list[Count] = []
        self.dropped = 0
        self._ended = False
        self._lock = threading.Lock()

    def slice(self, name: str, lane: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Add what went on from ``start_ns`` to ``end_ns`` (the same: an instant); an `engine.Observer`.

        Slices of a lane other than "main" may overlap; they are drawn below each other.

        Args:
            args: shown with the slice: strings and numbers.
        """
        if self._has_room():
            self.slices.append(Slice(name, lane, start_ns, end_ns, args or None, lane == MAIN))

    def span(self, name: str, lane: str = MAIN, **args: Any) -> Span:
        """A context that becomes a slice when it is left, also by an exception; spans of a lane may be nested."""
        return Span(self, name, lane, args)

    def count(self, name: str, value: float) -> None:
        """``value`` is that of the number ``name`` from now on; drawn as a curve."""
        if self._has_room():
            self.counts.append(Count(name, self.clock(), value))

    def end(self) -> None:
        """Keep nothing more; what threads still add is not counted as dropped either."""
        self._ended = True

    def _has_room(self) -> bool:
        if self._ended:
            return False
        if len(self.slices) + len(self.counts) < self._capacity:
            return True
        with self._lock:
            self.dropped += 1
        return False

    def _add(self, each: Slice) -> None:
        if self._has_room():
            self.slices.append(each)


class Span:
    """See `Trace.span`."""

    __slots__ = ("_args", "_lane", "_name", "_start_ns", "_trace")

    def __init__(self, trace: Trace, name: str, lane: str, args: dict[str, Any]) -> None:
        self._trace, self._name, self._lane, self._args = trace, name, lane, args

    def __enter__(self) -> Span:
        ranges = self._trace.ranges
        if ranges is not None:
            ranges.RangePush(self._name)
        self._start_ns = self._trace.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_ns = self._trace.clock()
        if self._trace.ranges is not None:
            self._trace.ranges.RangePop()
        self._trace._add(Slice(self._name, self._lane, self._start_ns, end_ns, self._args or None, True))


def nvtx() -> Ranges | None:
    """The module that marks ranges for profilers of NVIDIA's GPUs; None where it is missing."""
    try:
        module: Any = importlib.import_module("cupy.cuda.nvtx")
        return module
    except ImportError:
        return None
