"""Overlap: reductions and updates on engine lanes while Python computes.

The communication lane: reductions that progress on a thread of their own while Python computes.

A spinning thread would take the core that backward needs, and one that sleeps too long leaves the network idle: the
lane's engine polls with naps of 50 us to 1 ms, and without doubling them while somebody waits for a reduction.

What buckets do beside computation: reductions that backward launches, and updates while the next forward runs.

Both are tasks of the communication lane's engine, ordered by one variable a bucket. How far each rank of the node has
got with each bucket is posted in its memory: a reduction begins when all have filled theirs, and whoever reads a
parameter waits until all owners have updated it.

Threads of the program may read parameters, too, such as one that logs or evaluates: whoever comes first ends the update
of a bucket, and one that comes late must not take the next step's for it.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ..comm import World
from ..comm.communicator import PolledRequest, Steps, wait_for
from ..comm.shared_memory import ProgressCounters
from ..comm.tasks import RunningTask
from ..comm.watchdog import Watchdog
from ..comm.world import weakly
from ..engine import Done, Engine, Variable
from ..engine.engine import Trace
from .buckets import Bucket, Parameter, State
from .profiling import BucketTimes
from .reductions import BucketReduction

COMMUNICATION, UPDATE = "communication", "update"
"""The names of the lanes: reductions, and the updates that follow them."""

STALLED_S = 2e-3
"""A machine that has begun no message for so long does not hold up less urgent ones: its peers have not come."""


class SendPriority:
    """A machine's place in the queue for the network: a request, complete while no more urgent machine gets on.

    Front layers are needed first by the next forward, so their messages should not queue behind those of others
    (Jayarajan et al., "Priority-based parameter propagation for distributed DNN training", 2019). Machines that have
    begun go on: ranks may have begun others, and each waits for the messages of all.
    """

    def __init__(self, lane: CommunicationLane, priority: int) -> None:
        self.priority = priority
        self.began = 0.0
        self._lane = lane

    def test(self) -> bool:
        """Whether it may begin another message; then it counts as having begun."""
        now = time.monotonic()
        if any(each.priority > self.priority and now - each.began < STALLED_S for each in self._lane.turns):
            return False
        self.began = now
        return True

    def wait(self) -> None:
        """Block until it may."""
        wait_for(self.test)


_busy: set[CommunicationLane] = set()
"""Those with something under way, which goes on when nobody holds their worlds any more: other ranks wait for it."""


class CommunicationLane:
    """What a rank has under way beside its computation. Use `of`: one for a world."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.turns: list[SendPriority] = []
        """Of the machines under way, the most urgent first."""
        self._machines: list[tuple[RunningTask, Done]] = []
        self._awaited = 0
        engine.add_lane(UPDATE)
        engine.add_lane(COMMUNICATION, idle=weakly(self._poll))  # a thread would keep it, and so the engine, for ever

    @classmethod
    def of(cls, world: World) -> CommunicationLane:
        """That of ``world``."""
        return world.kept.get(cls) or world.keep(cls, lambda: cls(_engine_of(world)))

    def launch(
        self,
        steps: Callable[[SendPriority], Steps],
        writes: Sequence[Variable],
        priority: int,
        name: str,
        reads: Sequence[Variable] = (),
    ) -> None:
        """Let the machine that ``steps(turn)`` makes progress on the lane; return at once.

        Args:
            reads: see `Engine.push`.
            writes: held until the machine has ended; waiting for them raises what it raised.
            priority: higher ones get the network first.
            name: for traces and errors.
        """

        def start(done: Done) -> None:
            turn = SendPriority(self, priority)
            place = bisect.bisect_right(self.turns, -priority, key=lambda each: -each.priority)
            self.turns.insert(place, turn)
            self._machines.insert(place, (RunningTask(steps(turn)), done))
            _busy.add(self)

        self.engine.push_deferred(start, reads, writes, lane=COMMUNICATION, priority=priority, name=name)

    def wait(self, var: Variable) -> None:
        """Block until ``var`` is written; reductions progress as fast as they can meanwhile."""
        with self._urgently():
            self.engine.wait_to_read(var)

    @contextlib.contextmanager
    def _urgently(self) -> Iterator[None]:
        self._awaited += 1
        try:
            yield
        finally:
            self._awaited -= 1

    def _poll(self) -> bool:
        while self._awaited and self._machines and not self.engine.has_ready(COMMUNICATION):
            wait_for(self._advance)
        self._advance()
        return bool(self._machines)

    def _advance(self) -> bool:
        """Give every machine a turn; whether one has ended, another is to be started, or nobody waits.

        Ranks whose lanes each stayed with what has begun there would wait for each other's for ever.
        """
        ended: list[tuple[int, Done, Exception | None]] = []
        for place, (machine, done) in enumerate(self._machines):
            try:
                if machine.advance():
                    ended.append((place, done, None))
            except Exception as error:
                ended.append((place, done, error))
        for place, done, failure in reversed(ended):
            del self._machines[place], self.turns[place]
            done(failure)
        if not self._machines:
            _busy.discard(self)
        return bool(ended) or self.engine.has_ready(COMMUNICATION) or not self._awaited


def _engine_of(world: World) -> Engine:
    def make() -> Engine:
        engine = Engine(lanes=(), max_inflight=1 << 20)
        trace = world.kept.get(Trace)
        if trace is not None:
            engine.observer = trace.slice
        return engine

    return world.keep(Engine, make)


_FILLED, _UPDATED, _PHASES = 1, 2, 2  # what is posted for each bucket in each step


class Scheduler(Protocol):
    """When the reductions of the buckets of one reducer run, and the updates that follow them."""

    times: list[BucketTimes]
    """When each bucket was ready, launched and reduced in the last finished step; empty without overlap."""
    waited: Callable[[int, int], None]
    """Called for each wait of this rank's computation for an update, with its begin and end in ns."""

    def begin_step(self) -> None:
        """Begin a step; buckets launched from now on belong to it."""
        ...

    def launch(self, bucket: Bucket) -> None:
        """Take over a bucket in which backward has written all gradients."""
        ...

    def reduce(self) -> None:
        """Block until this rank's shard of every bucket is reduced; every rank must call."""
        ...

    def reduce_everywhere(self) -> None:
        """Block until this rank's row of every bucket is the sum; every rank must call, and a barrier must follow."""
        ...

    def update_later(self, bucket: Bucket, update: Callable[[], None]) -> None:
        """Call ``update()``, which updates the parameters that this rank owns, as soon as the bucket is reduced."""
        ...

    def settle(self, bucket: Bucket) -> None:
        """Wait for the update of a bucket, if one is under way."""
        ...

    def settle_all(self) -> None:
        """Wait for all updates under way."""
        ...

    def let_go(self) -> None:
        """Stop waiting for updates: those under way may never end."""
        ...


class SequentialScheduler:
    """Reductions in this thread, when the step ends.

    Args:
        reduction: how buckets are reduced.
        buckets: all buckets.
    """

    def __init__(self, reduction: BucketReduction, buckets: Sequence[Bucket]) -> None:
        self.times: list[BucketTimes] = []
        self.waited: Callable[[int, int], None] = lambda begin_ns, end_ns: None
        self._reduction, self._buckets = reduction, buckets
        self.launch = reduction.end_backward
        """See `Scheduler.launch`: the reduction itself begins in `reduce`."""

    def begin_step(self) -> None:
        """See `Scheduler.begin_step`."""

    def reduce(self) -> None:
        """See `Scheduler.reduce`."""
        self._reduction.reduce(self._buckets)

    def reduce_everywhere(self) -> None:
        """See `Scheduler.reduce_everywhere`."""
        self._reduction.reduce_everywhere(self._buckets)

    def update_later(self, bucket: Bucket, update: Callable[[], None]) -> None:
        """See `Scheduler.update_later`: reduce the bucket and update now."""
        self._reduction.reduce([bucket])
        update()

    def settle(self, bucket: Bucket) -> None:
        """See `Scheduler.settle`: no update is under way."""

    def settle_all(self) -> None:
        """See `Scheduler.settle_all`: no update is under way."""

    def let_go(self) -> None:
        """See `Scheduler.let_go`: no update is under way."""


class OverlapScheduler:
    """Reductions on the communication lane while backward runs, updates on the update lane. All ranks must make it.

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
        params: Mapping[str, Parameter],
        lane: CommunicationLane,
    ) -> None:
        self.times: list[BucketTimes] = []
        self.waited: Callable[[int, int], None] = lambda begin_ns, end_ns: None
        memory = reduction.memory
        self._reduction, self._memory = reduction, memory
        self._buckets, self._params, self._lane = buckets, params, lane
        self._watchdog = Watchdog.of(world)
        self._trace: Trace | None = world.kept.get(Trace)
        self._step = 0
        self._updating: dict[int, int] = {}
        """What owners post for the update of a bucket that is under way."""
        self._ending = threading.Lock()
        self._computes = threading.get_ident()
        self._milestones = ProgressCounters(memory, len(buckets))
        self._variables = [lane.engine.variable(f"bucket {each.number}") for each in buckets]
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
        filled = _PHASES * self._step + _FILLED  # now: when the task begins, this rank may be a step further
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
        """Block until the bucket, which was launched in this step, is reduced."""
        behind = partial(self._behind, bucket, _PHASES * self._step + _FILLED)
        with self._watchdog.watching("reduction", bucket.described, behind):
            self._lane.wait(self._variables[bucket.number])

    def update_later(self, bucket: Bucket, update: Callable[[], None]) -> None:
        """See `Scheduler.update_later`: it runs on the update lane.

        A thread that reads ``data`` or ``grad`` of one of the bucket's parameters waits until all owners of the node
        have updated theirs.
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
        self._end_update(bucket, updated)  # not before: whoever reads meanwhile waits, too, and an error stays one
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
                bucket.state = State.FILLING  # first: who sees no update any more may write gradients
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
        """The local ranks that have not reached the first of ``milestones`` that is not reached by all."""
        found = (self._milestones.behind(number, bucket.number) for number in milestones if self._memory.size > 1)
        return next(filter(None, found), [])

    def _hook(self, bucket: Bucket, hook: Callable[[Parameter], None] | None) -> None:
        for slot in bucket.slots:
            param: Any = self._params[slot.name]
            param.data_hook = param.update_hook = hook

    def _note_times(self) -> None:
        self.times = [
            BucketTimes(each.number, each.mine.nbytes, each.ready_ns, each.launched_ns, each.done_ns)
            for each in self._buckets
        ]
        if self._trace is not None:
            for each in self.times:
                ready = f"bucket {each.number} ready"
                self._trace.slice(ready, "main", each.ready_ns, each.ready_ns, nbytes=each.nbytes)
