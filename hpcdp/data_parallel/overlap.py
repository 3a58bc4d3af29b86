"""Overlap: reductions during backward, and updates during the next forward, on engine lanes; and its measurement.

`CommunicationLane` lets reductions progress on a thread of the engine while Python computes. A spinning thread would
take the core that backward needs, and one that sleeps too long leaves the network idle. So the lane's engine polls with
naps of 50 us to 1 ms, which do not double while a thread waits for a reduction.

`OverlapScheduler` orders the tasks of a bucket by one variable of the engine. Each rank of a node posts its progress
with each bucket in the node's memory. A reduction begins when all ranks have filled the bucket, and a reader of a
parameter waits until all owners have updated it. Several threads of a program may read parameters, e.g. for logging:
the first one ends the update of a bucket, and a late one must not end that of the next step.

`Scheduler`, its base, reduces in the thread of the program, at the end of a step.

`critical_path` computes the least time of a step with overlap. `CommunicationStats` and `GpuTimes` measure steps.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..comm import World
from ..comm.communicator import PolledRequest, Steps, wait_for
from ..comm.progress import RunningTask
from ..comm.shared_memory import ProgressCounters
from ..comm.watchdog import Watchdog
from ..comm.world import weakly
from ..core.arrays import Event, Streams
from ..engine import Done, Engine, Variable
from ..engine.engine import Trace
from ..errors import listed
from .bucket_layout import Bucket, ParameterLike, State
from .cpu_reduction import BucketReduction

COMMUNICATION, UPDATE = "communication", "update"
"""Names of the lanes of reductions and of updates."""

STALLED_S = 2e-3
"""Seconds without a new message after which a reduction lets less urgent ones send: its peers are not ready."""


class SendPriority:
    """A reduction's permission to send: a request that is complete while no more urgent reduction makes progress.

    The next forward needs the front layers first, so their messages should not queue behind those of others
    (Jayarajan et al., "Priority-based parameter propagation for distributed DNN training", 2019). Reductions that have
    begun continue: ranks may have begun different ones, and each waits for the messages of all ranks.
    """

    def __init__(self, lane: CommunicationLane, priority: int) -> None:
        self.priority = priority
        self.began = 0.0
        self._lane = lane

    def test(self) -> bool:
        """Return whether a message may begin, and if so record that one does."""
        now = time.monotonic()
        if any(turn.priority > self.priority and now - turn.began < STALLED_S for turn in self._lane.turns):
            return False
        self.began = now
        return True

    def wait(self) -> None:
        """Block until a message may begin."""
        wait_for(self.test)


_busy: set[CommunicationLane] = set()
"""Lanes with running reductions, kept alive when the program drops their worlds, because other ranks wait for them."""


class CommunicationLane:
    """The reductions of a rank that run beside its computation. `of` returns the one lane of a world."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.turns: list[SendPriority] = []
        """Permissions of the running reductions, the most urgent first."""
        self._running: list[tuple[RunningTask, Done]] = []
        self._awaited = 0
        engine.add_lane(UPDATE)
        engine.add_lane(COMMUNICATION, idle=weakly(self._poll))  # a strong reference would never be released

    @classmethod
    def of(cls, world: World) -> CommunicationLane:
        """Return the lane of ``world``."""
        return world.kept.get(cls) or world.keep(cls, lambda: cls(world.engine))

    def launch(
        self,
        steps: Callable[[SendPriority], Steps],
        writes: Sequence[Variable],
        priority: int,
        name: str,
        reads: Sequence[Variable] = (),
    ) -> None:
        """Run the steps that ``steps(turn)`` returns on the lane; return at once.

        Args:
            steps: makes the steps, given the permission to send.
            writes: variables held until the steps end; waiting for them raises the error of the steps.
            priority: a higher priority gets the network first.
            name: the name in traces and errors.
            reads: see `Engine.push`.
        """

        def start(done: Done) -> None:
            turn = SendPriority(self, priority)
            place = bisect.bisect_right(self.turns, -priority, key=lambda other: -other.priority)
            self.turns.insert(place, turn)
            self._running.insert(place, (RunningTask(steps(turn)), done))
            _busy.add(self)

        self.engine.push_deferred(start, reads, writes, lane=COMMUNICATION, priority=priority, name=name)

    def wait(self, var: Variable) -> None:
        """Block until ``var`` is written, while reductions progress as fast as possible."""
        self._awaited += 1
        try:
            self.engine.wait_to_read(var)
        finally:
            self._awaited -= 1

    def _poll(self) -> bool:
        while self._awaited and self._running and not self.engine.has_ready(COMMUNICATION):
            wait_for(self._advance)
        self._advance()
        return bool(self._running)

    def _advance(self) -> bool:
        """Advance every reduction; return whether one has ended, another is ready to start, or no thread waits.

        A lane that only advanced its first reduction could deadlock, because ranks may begin different ones first.
        """
        ended: list[tuple[int, Done, Exception | None]] = []
        for place, (task, done) in enumerate(self._running):
            try:
                if task.advance():
                    ended.append((place, done, None))
            except Exception as error:
                ended.append((place, done, error))
        for place, done, failure in reversed(ended):
            del self._running[place], self.turns[place]
            done(failure)
        if not self._running:
            _busy.discard(self)
        return bool(ended) or self.engine.has_ready(COMMUNICATION) or not self._awaited


_FILLED, _UPDATED, _PHASES = 1, 2, 2  # milestones of a bucket in a step


class Scheduler:
    """Scheduler of the reductions of one reducer's buckets, in this thread, at the end of the step.

    Args:
        reduction: the reduction of the buckets.
        buckets: all buckets.
    """

    def __init__(self, reduction: BucketReduction, buckets: Sequence[Bucket]) -> None:
        self.times: list[BucketTimes] = []
        """Times of each bucket in the last finished step; empty without overlap."""
        self.waited: Callable[[int, int], None] = lambda begin_ns, end_ns: None
        """Callback for each wait of this rank's computation for an update, with its begin and end in ns."""
        self._reduction, self._buckets = reduction, buckets

    def begin_step(self) -> None:
        """Begin a step; buckets launched from now on belong to it."""

    def launch(self, bucket: Bucket) -> None:
        """Launch the reduction of a bucket in which backward has written all gradients: here, `reduce` begins it."""
        self._reduction.end_backward(bucket)

    def reduce(self) -> None:
        """Block until this rank's shard of every bucket is reduced; every rank must call."""
        self._reduction.reduce(self._buckets)

    def reduce_everywhere(self) -> None:
        """Block until this rank's row of every bucket is the sum; every rank must call, and a barrier must follow."""
        self._reduction.reduce_everywhere(self._buckets)

    def settle(self, bucket: Bucket) -> None:
        """Wait for the update of a bucket, if one is under way."""

    def settle_all(self) -> None:
        """Wait for all updates under way."""

    def let_go(self) -> None:
        """Stop waiting for updates, which may never end."""


class OverlapScheduler(Scheduler):
    """Scheduler of reductions on the communication lane, and of updates on the update lane. All ranks must make it.

    Args:
        world: the ranks.
        reduction: how buckets are reduced.
        buckets: all buckets.
        params: the parameters by name.
        lane: the lane of reductions.
    """

    def __init__(
        self,
        world: World,
        reduction: BucketReduction,
        buckets: Sequence[Bucket],
        params: Mapping[str, ParameterLike],
        lane: CommunicationLane,
    ) -> None:
        super().__init__(reduction, buckets)
        self._memory, self._params, self._lane = reduction.memory, params, lane
        self._watchdog = Watchdog.of(world)
        self._trace: Trace | None = world.kept.get(Trace)
        self._step = 0
        self._updating: dict[int, int] = {}
        """Milestone that owners post at the end of a running update, by bucket."""
        self._ending = threading.Lock()
        self._computes = threading.get_ident()
        self._milestones = ProgressCounters(self._memory, len(buckets))
        self._variables = [lane.engine.variable(f"bucket {bucket.number}") for bucket in buckets]
        world.endings.add(self.settle_all)  # a rank that ended earlier would leave others waiting

    def begin_step(self) -> None:
        """See `Scheduler.begin_step`."""
        if not self._updating:
            self._note_times()
        self._step += 1
        self._computes = threading.get_ident()

    def launch(self, bucket: Bucket) -> None:
        """See `Scheduler.launch`: the reduction begins when all ranks of the node have launched the bucket."""
        number = bucket.number
        bucket.ready_ns = time.perf_counter_ns()
        self._reduction.end_backward(bucket)
        reduction = self._reduction.prepare(bucket)
        bucket.state = State.LAUNCHED
        bucket.launched_ns = time.perf_counter_ns()
        filled = _PHASES * self._step + _FILLED  # computed now: this rank may be a step further when the task begins
        self._milestones.post(filled, number)

        def when_filled(turn: SendPriority) -> Steps:
            if self._memory.size > 1:
                yield [PolledRequest(lambda: self._milestones.reached(filled, number))]
            yield from reduction(turn)

        self._lane.launch(when_filled, [self._variables[number]], number, f"bucket {number}")

    def reduce(self) -> None:
        """See `Scheduler.reduce`; all buckets must be launched."""
        with self._reduction.waiting():
            for bucket in reversed(self._buckets):
                self.wait(bucket)
            self._reduction.reduced(self._buckets)

    def reduce_everywhere(self) -> None:
        """See `Scheduler.reduce_everywhere`; all buckets must be launched."""
        self.reduce()
        self._reduction.gather(self._buckets)

    def wait(self, bucket: Bucket) -> None:
        """Block until the bucket, which must be launched in this step, is reduced."""
        behind = partial(self._behind, bucket, _PHASES * self._step + _FILLED)
        with self._watchdog.watching("reduction", bucket.described, behind):
            self._lane.wait(self._variables[bucket.number])

    def update_later(self, bucket: Bucket, update: Callable[[], None]) -> None:
        """Run ``update()``, which updates the parameters of this rank, on the update lane when the bucket is reduced.

        A thread that reads ``data`` or ``grad`` of one of the bucket's parameters waits until all owners of the node
        have updated their shards.
        """
        number, updated = bucket.number, _PHASES * self._step + _UPDATED

        def run() -> None:
            update()
            self._milestones.post(updated, number)

        var = self._variables[number]
        self._lane.engine.push(run, [var], [var], UPDATE, number, f"update of bucket {number}")
        self._updating[number] = updated
        self._hook(bucket, lambda param: self.settle(bucket))

    def settle(self, bucket: Bucket) -> None:
        """See `Scheduler.settle`."""
        updated = self._updating.get(bucket.number)
        if updated is None:
            return
        begin = time.perf_counter_ns()
        behind = partial(self._behind, bucket, updated - _UPDATED + _FILLED, updated)
        with self._watchdog.watching("update", bucket.described, behind):
            self._lane.wait(self._variables[bucket.number])
            self._milestones.wait(updated, bucket.number)
        self._end_update(bucket, updated)  # after the wait: readers wait meanwhile, and an error is raised again
        if threading.get_ident() != self._computes:
            return
        end = time.perf_counter_ns()
        self.waited(begin, end)
        if self._trace is not None:
            self._trace.slice(f"wait for bucket {bucket.number}", "main", begin, end)
        if not self._updating:
            self._note_times()

    def _end_update(self, bucket: Bucket, updated: int) -> None:
        with self._ending:
            if self._updating.get(bucket.number) == updated:
                bucket.state = State.FILLING  # first: a thread that sees no update may write gradients
                self._hook(bucket, None)
                del self._updating[bucket.number]

    def settle_all(self) -> None:
        """See `Scheduler.settle_all`."""
        for bucket in reversed(self._buckets):
            self.settle(bucket)

    def let_go(self) -> None:
        """See `Scheduler.let_go`."""
        for bucket in self._buckets:
            if (updated := self._updating.get(bucket.number)) is not None:
                self._end_update(bucket, updated)

    def _behind(self, bucket: Bucket, *milestones: int) -> list[int]:
        """Return the local ranks that have not reached the first incomplete one of ``milestones``."""
        behind = (self._milestones.behind(number, bucket.number) for number in milestones if self._memory.size > 1)
        return next(filter(None, behind), [])

    def _hook(self, bucket: Bucket, hook: Callable[[ParameterLike], None] | None) -> None:
        for slot in bucket.slots:
            param: Any = self._params[slot.name]
            param.data_hook = param.update_hook = hook

    def _note_times(self) -> None:
        self.times = [
            BucketTimes(bucket.number, bucket.mine.nbytes, bucket.ready_ns, bucket.launched_ns, bucket.done_ns)
            for bucket in self._buckets
        ]
        if self._trace is not None:
            for times in self.times:
                ready = f"bucket {times.number} ready"
                self._trace.slice(ready, "main", times.ready_ns, times.ready_ns, nbytes=times.nbytes)


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

    A step is a forward pass, a backward pass, and for every bucket a reduction between its last gradient and the first
    layer of the *next* forward that reads its parameters. The thread that computes runs one thing at a time, and so
    does the network. From the beginning of a backward to the end of the next forward,

    - computation alone takes ``B + between + F``;
    - bucket b is ready ``r_b`` after the beginning of backward, and keeps the network busy for ``c_b``. Then
      ``q_b = u_b + F - n_b`` remains: its update, and the rest of forward from the point ``n_b`` that needs the bucket.

    In any order of buckets, a set S of them cannot begin before the first is ready, takes the sum of its reductions,
    and leaves at least the shortest of its rests. So no step is shorter than

        max( B + between + F,  max over S of  min_S r  +  sum_S c  +  min_S q )

    A network that always serves the ready bucket with the longest rest reaches this bound (the preemptive schedule of
    Jackson, "Scheduling a production line to minimize maximum tardiness", 1955; that the bound over sets is tight:
    Carlier, "The one-machine sequencing problem", 1982, section 2). It suffices to examine, for each time and rest, the
    set of all buckets that are ready no earlier and have at least this rest: n^2 sets.

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
