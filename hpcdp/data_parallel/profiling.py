"""Times of a step: the critical path, waiting for communication, and a GPU's parts.

The least time that a step can take, from what its parts took: a pure function.

A step is a forward pass, a backward pass, and for every bucket a reduction between its last gradient and the first
layer of the *next* forward that reads its parameters. The thread that computes does one thing at a time, and so does
the network. From the beginning of a backward to the end of the next forward,

- computation alone takes ``B + between + F``;
- bucket b is ready ``r_b`` after backward began, keeps the network busy for ``c_b``, and when it is done there are
  ``q_b = u_b + F - n_b`` still to come: its update, and what forward has left from where it needs the bucket, ``n_b``.

Whatever the order in which buckets go, a set S of them cannot begin before the first is ready, takes the sum of its
reductions, and leaves at least the shortest of its rests. So no step is shorter than

    max( B + between + F,  max over S of  min_S r  +  sum_S c  +  min_S q )

and a network that always serves the most urgent bucket that is ready, the one with the longest rest, reaches it (the
preemptive schedule of Jackson, "Scheduling a production line to minimize maximum tardiness", 1955; that the bound over
sets is tight: Carlier, "The one-machine sequencing problem", 1982, section 2). Only the sets of all buckets that are
ready from some time on and have at least some rest need to be looked at, n^2 of them.

Where the time of a trainer's steps went: waits of this rank, and what ran beside its computation.

How long a GPU takes for the parts of a step, by events on its stream: the host gives it the work and goes on.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..core.devices import Event, Streams
from ..errors import listed


class BucketTimes(NamedTuple):
    """When a bucket was where in one step, in ns of `time.perf_counter_ns`."""

    number: int
    nbytes: int
    ready_ns: int
    """Backward had written its last gradient."""
    launched_ns: int
    done_ns: int
    """This rank's part was reduced."""


class BucketCost(NamedTuple):
    """What a bucket asks of a step, in seconds."""

    number: int
    ready_s: float
    """From the beginning of backward until its gradients are written."""
    reduction_s: float
    """That the network is busy with it."""
    needed_s: float
    """From the beginning of the next forward until a layer reads its parameters; that of the whole forward if none."""
    update_s: float = 0.0
    """From the end of its reduction until its parameters may be read."""


class CriticalPath(NamedTuple):
    """The longest chain of a step."""

    seconds: float
    buckets: tuple[int, ...]
    """The numbers of the buckets that follow each other on it, in the order of their becoming ready; none where
    computation alone takes longest."""

    def __str__(self) -> str:
        if not self.buckets:
            return "computation"
        return f"bucket{'s' if len(self.buckets) > 1 else ''} {listed(self.buckets, 4)}"


def critical_path(
    forward_s: float, backward_s: float, buckets: Sequence[BucketCost], between_s: float = 0.0
) -> CriticalPath:
    """The least time from one forward's end to the next one's, which is that of a step.

    Args:
        forward_s, backward_s: computation alone, without waiting.
        buckets: in any order.
        between_s: what else the computing thread does between a backward and the next forward, e.g. reading data.
    """
    longest = CriticalPath(forward_s + backward_s + between_s, ())
    rests = [(each.update_s + forward_s - each.needed_s, each) for each in buckets]
    rests.sort(key=lambda rest: -rest[0])
    for earliest_s in {each.ready_s for each in buckets}:
        busy_s = 0.0
        later = [(rest_s, each) for rest_s, each in rests if each.ready_s >= earliest_s]
        for count, (rest_s, each) in enumerate(later, 1):
            busy_s += each.reduction_s
            if earliest_s + busy_s + rest_s > longest.seconds:
                order = sorted((other for _, other in later[:count]), key=lambda other: (other.ready_s, other.number))
                longest = CriticalPath(earliest_s + busy_s + rest_s, tuple(other.number for other in order))
    return longest


def reduction_seconds(times: Sequence[BucketTimes]) -> list[float]:
    """How long the network was busy with each bucket, in the order of ``times``.

    While several are under way each of them counts for its part of the time, so that all add up to the time in which
    any was.
    """
    changes = sorted([(each.launched_ns, 1) for each in times] + [(each.done_ns, -1) for each in times])
    under_way, shared_ns, at = 0, 0.0, {}
    for (now_ns, change), (next_ns, _) in itertools.pairwise([*changes, (changes[-1][0], 0)] if changes else []):
        at[now_ns] = shared_ns
        under_way += change
        if next_ns > now_ns and under_way:
            shared_ns += (next_ns - now_ns) / under_way
    return [(at[each.done_ns] - at[each.launched_ns]) / 1e9 for each in times]


def mirrored_need(ready_s: float, forward_s: float, backward_s: float) -> float:
    """About when forward needs what backward has ready after ``ready_s``: it passes the layers the other way round."""
    return forward_s * min(1.0, max(0.0, 1.0 - ready_s / backward_s)) if backward_s > 0 else 0.0


_WAITS_KEPT = 256
"""So many of the last waits can cover what ran beside them: those of a step or two, one for each bucket."""


class CommunicationStats:
    """Where the time of a trainer's steps went, on this rank, in seconds; no moment counts twice."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_s = 0.0
        """In communication: waiting for other ranks, summing over them, and updates that are fused into the sum. Of a
        store: the exposed part alone."""
        self.exposed_s = 0.0
        """The part of it during which this rank did nothing else."""
        self._waits: deque[tuple[int, int]] = deque(maxlen=_WAITS_KEPT)
        self._ran_until_ns = 0

    def waited_on_gpu(self, seconds: float) -> None:
        """The GPU has waited for so long, as its events say."""
        self.exposed_s += seconds
        self.total_s += seconds

    def waited(self, begin_ns: int, end_ns: int, on_host: bool = True) -> None:
        """This rank has waited from then to then; what it waited within that was told before.

        Args:
            on_host: computes there. Else the wait is no loss by itself, and only what ran beside it is not hidden.
        """
        added_ns = end_ns - begin_ns
        while self._waits and self._waits[-1][1] > begin_ns:
            inner_begin_ns, inner_end_ns = self._waits.pop()
            added_ns -= inner_end_ns - inner_begin_ns
            begin_ns = min(begin_ns, inner_begin_ns)
        self._waits.append((begin_ns, end_ns))
        if on_host:
            self.exposed_s += added_ns / 1e9
            self.total_s += added_ns / 1e9

    def ran(self, spans: Iterable[tuple[int, int]]) -> None:
        """Something was under way in these spans, told in the order of steps: hidden, where no wait covers it."""
        later = [(max(begin_ns, self._ran_until_ns), end_ns) for begin_ns, end_ns in spans]
        if not later:
            return
        self.total_s += (_covered_ns([*self._waits, *later]) - _covered_ns(self._waits)) / 1e9
        self._ran_until_ns = max(self._ran_until_ns, *(end_ns for _, end_ns in later))
        while self._waits and self._waits[0][1] <= self._ran_until_ns:
            self._waits.popleft()


def _covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    total_ns = until_ns = 0
    for begin_ns, end_ns in sorted(spans):
        total_ns += max(0, end_ns - max(begin_ns, until_ns))
        until_ns = max(until_ns, end_ns)
    return total_ns


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
