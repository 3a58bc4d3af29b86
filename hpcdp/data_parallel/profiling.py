"""Times of a step: the critical path, waiting for communication, and the parts of a step on a GPU.

`critical_path` computes the least time of a step from the times of its parts. A step is a forward pass, a backward
pass, and for every bucket a reduction between its last gradient and the first layer of the *next* forward that reads
its parameters. The thread that computes runs one thing at a time, and so does the network. From the beginning of a
backward to the end of the next forward,

- computation alone takes ``B + between + F``;
- bucket b is ready ``r_b`` after the beginning of backward, and keeps the network busy for ``c_b``. Then
  ``q_b = u_b + F - n_b`` remains: its update, and the rest of forward from the point ``n_b`` that needs the bucket.

In any order of buckets, a set S of them cannot begin before the first is ready, takes the sum of its reductions, and
leaves at least the shortest of its rests. So no step is shorter than

    max( B + between + F,  max over S of  min_S r  +  sum_S c  +  min_S q )

A network that always serves the ready bucket with the longest rest reaches this bound (the preemptive schedule of
Jackson, "Scheduling a production line to minimize maximum tardiness", 1955; that the bound over sets is tight: Carlier,
"The one-machine sequencing problem", 1982, section 2). It suffices to examine, for each time and rest, the set of all
buckets that are ready no earlier and have at least this rest: n^2 sets.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..core.arrays import Event, Streams
from ..errors import listed


class BucketTimes(NamedTuple):
    """Times of a bucket in one step, in ns of `time.perf_counter_ns`."""

    number: int
    nbytes: int
    ready_ns: int
    """When backward had written its last gradient."""
    launched_ns: int
    done_ns: int
    """When this rank's shard was reduced."""


class BucketCost(NamedTuple):
    """Costs of a bucket in a step, in seconds."""

    number: int
    ready_s: float
    """Time from the beginning of backward until its gradients are written."""
    reduction_s: float
    """Time for which the network is busy with it."""
    needed_s: float
    """Time from the beginning of the next forward until a layer reads its parameters; the whole forward if none."""
    update_s: float = 0.0
    """Time from the end of its reduction until its parameters may be read."""


class CriticalPath(NamedTuple):
    """The longest chain of a step."""

    seconds: float
    buckets: tuple[int, ...]
    """Numbers of the consecutive buckets on it, in the order in which they are ready; empty for computation alone."""

    def __str__(self) -> str:
        if not self.buckets:
            return "computation"
        return f"bucket{'s' if len(self.buckets) > 1 else ''} {listed(self.buckets, 4)}"


def critical_path(
    forward_s: float, backward_s: float, buckets: Sequence[BucketCost], between_s: float = 0.0
) -> CriticalPath:
    """Return the least time of a step, from the end of one forward to the end of the next.

    Args:
        forward_s: seconds of computation of forward, without waiting.
        backward_s: seconds of computation of backward, without waiting.
        buckets: the costs of the buckets, in any order.
        between_s: seconds of other work between a backward and the next forward, e.g. reading data.
    """
    longest = CriticalPath(forward_s + backward_s + between_s, ())
    rests = [(bucket.update_s + forward_s - bucket.needed_s, bucket) for bucket in buckets]
    rests.sort(key=lambda rest: -rest[0])
    for earliest_s in {bucket.ready_s for bucket in buckets}:
        busy_s = 0.0
        later = [(rest_s, bucket) for rest_s, bucket in rests if bucket.ready_s >= earliest_s]
        for count, (rest_s, bucket) in enumerate(later, 1):
            busy_s += bucket.reduction_s
            if earliest_s + busy_s + rest_s > longest.seconds:
                order = sorted((other for _, other in later[:count]), key=lambda other: (other.ready_s, other.number))
                longest = CriticalPath(earliest_s + busy_s + rest_s, tuple(other.number for other in order))
    return longest


def reduction_seconds(times: Sequence[BucketTimes]) -> list[float]:
    """Return for how many seconds the network was busy with each bucket, in the order of ``times``.

    Concurrent reductions share the time equally, so that the sum is the time with any reduction.
    """
    changes = sorted([(bucket.launched_ns, 1) for bucket in times] + [(bucket.done_ns, -1) for bucket in times])
    under_way, shared_ns, at = 0, 0.0, {}
    for (now_ns, change), (next_ns, _) in itertools.pairwise([*changes, (changes[-1][0], 0)] if changes else []):
        at[now_ns] = shared_ns
        under_way += change
        if next_ns > now_ns and under_way:
            shared_ns += (next_ns - now_ns) / under_way
    return [(at[bucket.done_ns] - at[bucket.launched_ns]) / 1e9 for bucket in times]


def mirrored_need(ready_s: float, forward_s: float, backward_s: float) -> float:
    """Estimate when forward needs a bucket that backward has ready after ``ready_s``, from the reversed layer order."""
    return forward_s * min(1.0, max(0.0, 1.0 - ready_s / backward_s)) if backward_s > 0 else 0.0


_WAITS_KEPT = 256
"""Number of recent waits to compare with communication: those of a step or two, one for each bucket."""


class CommunicationStats:
    """Seconds of communication in a trainer's steps on this rank; no moment counts twice."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_s = 0.0
        """Time of communication: waits for other ranks, sums, and updates fused into sums; for a store the exposed
        part alone."""
        self.exposed_s = 0.0
        """Part of `total_s` during which this rank did nothing else."""
        self._waits: deque[tuple[int, int]] = deque(maxlen=_WAITS_KEPT)
        self._ran_until_ns = 0

    def waited_on_gpu(self, seconds: float) -> None:
        """Add a wait of the GPU, measured by events."""
        self.exposed_s += seconds
        self.total_s += seconds

    def waited(self, begin_ns: int, end_ns: int, on_host: bool = True) -> None:
        """Add a wait of this rank; waits within it must have been added before.

        Args:
            begin_ns: begin of the wait.
            end_ns: end of the wait.
            on_host: whether the host computes. Otherwise the wait itself costs nothing, and it only exposes the
                communication that runs beside it.
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
        """Add communication beside computation, in the order of steps; it is hidden where no wait covers it."""
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
"""Name of the part that waits for other ranks."""


class GpuTimes:
    """Seconds of the named parts of each step, by events on the GPU's current stream.

    The events of a step are read when those of the next step are complete, so only `finish` waits for the GPU.

    Args:
        streams: streams of the GPU.
        read: callback for each part that is read, with its name and seconds.
    """

    def __init__(self, streams: Streams, read: Callable[[str, float], None]) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of the steps read since `start`, by name of the part."""
        self._streams, self._read = streams, read
        self._free: list[Event] = []
        self._step: list[tuple[str, Event, Event]] = []
        self._steps: deque[list[tuple[str, Event, Event]]] = deque()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the work launched within this context as part ``name``; parts may be nested."""
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
        """End a step, and read earlier steps that the GPU has completed."""
        if self._step:
            self._steps.append(self._step)
            self._step = []
        while len(self._steps) > 1 and self._streams.query(self._steps[1][-1][2]):
            self._take(self._steps.popleft())

    def finish(self) -> None:
        """Wait until the GPU has completed the last step, and read all steps."""
        self.end_step()
        if self._steps:
            self._streams.synchronize(self._steps[-1][-1][2])
        while self._steps:
            self._take(self._steps.popleft())

    def start(self) -> None:
        """Read all steps, and reset `seconds`."""
        self.finish()
        self.seconds.clear()

    def _take(self, step: list[tuple[str, Event, Event]]) -> None:
        for name, begin, end in step:
            seconds = self._streams.seconds_between(begin, end)
            self.seconds[name] += seconds
            self._read(name, seconds)
            self._free += (begin, end)
