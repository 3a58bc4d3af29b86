"""How long a GPU takes for the parts of a step, by events on its stream: the host gives it the work and goes on."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

from ...streams import Event, Streams

EXPOSED = "exposed"
"""The part that waits for other ranks."""


class GpuTimes:
    """Seconds of the named parts of each step, on the stream that is current there.

    A step is read when the events of the next one have passed, so nothing waits for the GPU but `finish`.

    Args:
        streams: of the GPU.
        read: told of each part that is read, by its name and seconds.
    """

    def __init__(self, streams: Streams, read: Callable[[str, float], None]) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Of the steps that have been read since `start`, by name."""
        self._streams, self._read = streams, read
        self._free: list[Event] = []
        self._step: list[tuple[str, Event, Event]] = []
        self._steps: deque[list[tuple[str, Event, Event]]] = deque()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What the GPU is given within it is of that part; one part may be within another."""
        begin = self._mark()
        try:
            yield
        finally:
            self._step.append((name, begin, self._mark()))

    def _mark(self) -> Event:
        event = self._free.pop() if self._free else self._streams.event(timed=True)
        self._streams.record(event, self._streams.current())
        return event

    def end_step(self) -> None:
        """What follows is of the next step; reads those before, as far as the GPU has come."""
        if self._step:
            self._steps.append(self._step)
            self._step = []
        while len(self._steps) > 1 and self._streams.query(self._steps[1][-1][2]):
            self._take(self._steps.popleft())

    def finish(self) -> None:
        """Wait until the GPU has done the last step, and read all."""
        self.end_step()
        if self._steps:
            self._streams.synchronize(self._steps[-1][-1][2])
        while self._steps:
            self._take(self._steps.popleft())

    def start(self) -> None:
        """Read all, and forget it."""
        self.finish()
        self.seconds.clear()

    def _take(self, step: list[tuple[str, Event, Event]]) -> None:
        for name, begin, end in step:
            seconds = self._streams.seconds_between(begin, end)
            self.seconds[name] += seconds
            self._read(name, seconds)
            self._free += (begin, end)
