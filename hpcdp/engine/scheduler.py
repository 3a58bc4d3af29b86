"""Variables, tasks and lanes, and the schedule that decides which task may run.

A variable counts its holders and queues its waiters in the order of pushing. It keeps no record of completed tasks, so
a long-lived variable that is only read does not grow, and keeps no closure alive. `TaskSchedule` contains everything
that the engine's lock guards; the other classes do not lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from threading import get_ident
from types import FrameType
from typing import Any

from ..core.checks import not_copied
from ..errors import ConfigError


class Variable:
    """A name for state that tasks read or write; made by `Engine.variable` for that engine only."""

    __slots__ = ("__weakref__", "failure", "held", "name", "queue", "schedule")

    __reduce__ = not_copied("Variable", "the variable", what="what tasks write")

    def __init__(self, name: str, schedule: object) -> None:
        self.name = name
        self.schedule = schedule  # its lock guards this variable
        self.held = 0  # the number of readers that hold it, or -1 for a writer
        self.queue: deque[tuple[Task | Waiter, bool]] | None = None  # waiters, and whether they write
        self.failure: Failure | None = None  # of the last write

    def __repr__(self) -> str:
        return f"Variable({self.name!r})"

    def enqueue(self, who: Task | Waiter, writing: bool) -> None:
        """Append a waiter to the queue."""
        if self.queue is None:
            self.queue = deque()
        if isinstance(who, Task):
            who.blockers += 1
            who.num_claimed += 1
        self.queue.append((who, writing))

    def admit(self) -> list[Task]:
        """Admit waiters that may hold the variable now; return the tasks that wait for no variable any more."""
        queue, free = self.queue, []
        while queue and self.held >= 0:
            who, writing = queue[0]
            if writing and self.held:
                break
            queue.popleft()
            if isinstance(who, Waiter):
                who.settle(self.failure)
                continue
            self.held = -1 if writing else self.held + 1
            who.blockers -= 1
            if not who.blockers:
                free.append(who)
        return free


class Failure:
    """An exception of a task with its original traceback, because each raise lengthens a traceback."""

    __slots__ = ("error", "traceback")

    def __init__(self, error: BaseException) -> None:
        self.error, self.traceback = error, error.__traceback__


def throw(failure: Failure | None) -> None:
    """Raise a failure, if any, with its original traceback."""
    if failure is not None:
        error, trace = failure.error, failure.traceback
        try:
            raise error.with_traceback(trace)
        finally:
            del failure, error, trace  # this frame is part of the traceback: a reference would be a cycle


class Task:
    """A function, the variables that it reads and writes, and its progress.

    ``frame`` is that of the caller of `Engine.push`. Keeping it would keep the caller's variables alive, so only its
    code and instruction are kept; an error looks up the line.
    """

    __slots__ = (
        "blockers", "code", "fn", "instruction", "lane", "name", "num_claimed", "order", "priority", "reads", "shared",
        "writes",
    )  # fmt: skip
    deferred = False

    def __init__(self, fn: Callable[..., object], lane: Lane, priority: int, name: str, frame: FrameType) -> None:
        self.fn: Any = fn  # None when it has run
        self.lane = lane
        self.priority = priority
        self.name = name
        self.code = frame.f_code
        self.instruction = frame.f_lasti
        self.blockers = 0  # the number of variables in whose queue it waits
        self.num_claimed = (
            0  # the number of variables that it holds or waits for, in the order of `writes`, then `shared`
        )
        self.order: int
        self.reads: tuple[Variable, ...]
        self.writes: tuple[Variable, ...]  # each once
        self.shared: tuple[Variable, ...]  # read but not written

    def label(self) -> str:
        """Return its name, else that of its function."""
        return self.name or getattr(self.fn, "__qualname__", type(self.fn).__qualname__)

    def pushed_by(self) -> str:
        """Return the line that pushed it, as a traceback shows lines."""
        spans = self.code.co_lines()
        line = next((line for start, end, line in spans if start <= self.instruction < end), None)
        place = f'  File "{self.code.co_filename}", line {line}, in {self.code.co_qualname}'
        return f'Task "{self.label()}" of lane "{self.lane.name}" was pushed by:\n{place}'


class DeferredTask(Task):
    """A task that continues after its function has returned, until ``done`` is called."""

    __slots__ = ("finished", "start_ns")
    deferred = True

    def __init__(self, fn: Callable[..., object], lane: Lane, priority: int, name: str, frame: FrameType) -> None:
        super().__init__(fn, lane, priority, name, frame)
        self.finished = False
        self.start_ns = 0


class Waiter:
    """A thread that waits for the writes of a variable; its bell is rung when they are done or dropped."""

    __slots__ = ("bell", "dropped", "failure", "rung")

    def __init__(self, dropped: bool) -> None:
        self.bell = silent_bell()
        self.rung, self.dropped = False, dropped
        self.failure: Failure | None = None

    def settle(self, failure: Failure | None, dropped: bool = False) -> None:
        """Wake the thread, once."""
        if not self.rung:
            self.rung, self.failure, self.dropped = True, failure, dropped
            self.bell.release()


class Lane:
    """A group of threads, the tasks that they may run now, and the bells of those that sleep."""

    def __init__(self, name: str, threads: int, idle: Callable[[], object] | None) -> None:
        self.name, self.limit, self.idle = name, threads, idle
        self.ready: list[tuple[int, int, Task]] = []
        self.asleep: list[threading.Lock] = []
        self.threads: list[threading.Thread] = []
        self.deferred: set[DeferredTask] = set()  # unfinished
        self.started = False

    def make_ready(self, task: Task, own: Lane | None) -> None:
        """Add a ready task and wake a thread; a caller on a thread of lane ``own`` takes the first one itself."""
        heappush(self.ready, (-task.priority, task.order, task))
        if self.asleep and (self is not own or len(self.ready) > 1):
            ring_last(self.asleep)


def silent_bell() -> threading.Lock:
    """Return an acquired lock: a thread waits by acquiring it and is woken by its release."""
    bell = threading.Lock()
    bell.acquire()
    return bell


def ring_last(bells: list[threading.Lock]) -> None:
    """Ring and remove the last bell, without a point for Ctrl-C in between (unlike ``bells.pop()``)."""
    bell = bells[-1]
    del bells[-1]
    bell.release()


_ENTERED = -1  # a value of Task.taken: the task belongs to its lane
_LOOK_S = 0.5
_MOST_UNSEEN = 100  # a limit, because each failure keeps the local variables of its frames


class TaskSchedule:
    """Unfinished tasks, by lane and by variable.

    The last reference to a closure or an exception may be the last one to anything, and the lock must be free for code
    that runs when it is dropped. So methods that drop such references return them to the caller.
    """

    def __init__(self, max_inflight: int) -> None:
        self.lock = threading.Lock()
        self.lanes: dict[str, Lane] = {}
        self.own: dict[int, Lane] = {}  # lanes by the identifiers of the threads that run tasks
        self.closed = False
        self.abandoned = False  # whether the engine is unreferenced
        self._max_inflight = max_inflight
        self._pushed = self._inflight = self._running = 0
        self._unseen: list[Failure] = []  # in order of occurrence
        self._room: list[threading.Lock] = []  # bells of threads that wait to push, and below for the end of all tasks
        self._drained: list[threading.Lock] = []
        self._waiters: set[Waiter] = set()

    def enter(self, task: Task) -> None:
        """Accept a task once fewer than `max_inflight` are unfinished; it holds its variables or queues for them."""
        lane = task.lane
        while True:
            with self.lock:
                if self.closed:
                    raise ConfigError("push", expected="a running engine", got="an engine after shutdown()")
                if self._inflight < self._max_inflight or get_ident() in self.own:
                    # Ctrl-C may raise after any call and at the end of each loop iteration, but nowhere else.
                    try:
                        for var in task.writes:
                            if var.held or var.queue:
                                var.enqueue(task, True)
                            else:
                                task.num_claimed += 1
                                var.held = -1
                        for var in task.shared:
                            if var.held < 0 or var.queue:
                                var.enqueue(task, False)
                            else:
                                task.num_claimed += 1
                                var.held += 1
                        self._pushed += 1
                        self._inflight += 1
                        task.order = self._pushed
                        task.num_claimed = _ENTERED
                        if not task.blockers:
                            heappush(lane.ready, (-task.priority, task.order, task))
                            if lane.asleep:
                                ring_last(lane.asleep)
                    except BaseException:
                        self._withdraw(task)
                        raise
                    return
                bell = silent_bell()
                self._room.append(bell)
            _hear(bell)

    def hold(self, var: Variable, unless_spoilt: bool) -> bool:
        """Let a thread that runs no task write a variable, if it is free."""
        held = False
        try:
            with self.lock:
                if var.held or var.queue or self.closed or get_ident() in self.own:
                    return False
                if unless_spoilt and var.failure is not None:
                    return False
                held, var.held = True, -1
        except BaseException:  # Ctrl-C after the lock was released
            if held:
                self.release(var, var.failure)
            raise
        return True

    def release(self, var: Variable, failure: Failure | None) -> None:
        """Release a written variable; its previous failure is dropped outside the lock."""
        with self.lock:
            dropped, var.failure, var.held = var.failure, failure, 0
            if var.queue:
                self._admit(var, None)
        del dropped

    def _withdraw(self, task: Task) -> None:
        """Undo an interrupted `enter`, or complete it."""
        if task.num_claimed == _ENTERED:
            if task.lane.asleep:
                ring_last(task.lane.asleep)
            return
        for number, var in enumerate((*task.writes, *task.shared)[: task.num_claimed]):
            writing = number < len(task.writes)
            if var.queue and (task, writing) in var.queue:
                var.queue.remove((task, writing))
            else:
                var.held = 0 if writing else var.held - 1

    def take(self, lane: Lane) -> Task | None:
        """Return the next task for a thread of a lane, or None. The caller holds the lock."""
        if not lane.ready:
            return None
        task = heappop(lane.ready)[2]
        self._running += 1
        if isinstance(task, DeferredTask):
            lane.deferred.add(task)
        return task

    def leave(self, task: Task, failure: Failure | None) -> object:
        """Record that a task's function has returned. The caller holds the lock and drops the result without it."""
        self._running -= 1
        dropped = None
        if not isinstance(task, DeferredTask):
            dropped = self._complete(task, failure, task.lane)
        elif failure is not None:
            dropped = self._end(task, failure, task.lane)
            if dropped is None:  # its function raised after it had called done()
                self._keep_unseen(failure)
        if self.closed and not self._running:
            _ring(self._drained)
        return dropped

    def end(self, task: DeferredTask, failure: Failure | None) -> bool:
        """Record the end of a deferred task; return whether this is the first call for it."""
        with self.lock:
            dropped = self._end(task, failure, None)
        if self.abandoned:
            self.abandon()
        return dropped is not None

    def _end(self, task: DeferredTask, failure: Failure | None, own: Lane | None) -> list[Failure] | None:
        if task.finished or self.closed:
            return None
        task.finished = True
        task.lane.deferred.discard(task)
        return self._complete(task, failure, own)

    def _complete(self, task: Task, failure: Failure | None, own: Lane | None) -> list[Failure]:
        """Release a task's variables; a thread of lane ``own`` calls and takes a task next."""
        dropped = []
        for var in task.writes:
            if var.failure is not None:
                dropped.append(var.failure)
            var.failure = failure
            var.held = 0
            if var.queue:
                self._admit(var, own)
        for var in task.shared:
            var.held -= 1
            if var.queue and not var.held:
                self._admit(var, own)
        self._inflight -= 1
        if failure is not None:
            self._keep_unseen(failure)
        if self._room:
            _ring(self._room)
        if self._drained and not self._inflight:
            _ring(self._drained)
        return dropped

    def _admit(self, var: Variable, own: Lane | None) -> None:
        for free in var.admit():
            if not self.closed:
                free.lane.make_ready(free, own)

    def refuse_own(self, operation: str, where: str | None) -> None:
        """Refuse a wait in a thread that runs a task, which could keep the awaited task from running.

        Raises:
            ConfigError: this thread runs a task.
        """
        lane = self.own.get(get_ident())
        if lane is not None:
            raise ConfigError(
                operation, where=where, expected="a thread other than those of the engine's lanes",
                got=f"a task of lane {lane.name}",
                remedy="read the variable, or use another engine; a DataLoader inside a data set needs prefetch=0",
            )  # fmt: skip

    def wait_for(self, var: Variable) -> Failure | None:
        """Sleep until the queued writes of a variable are done; return the failure of the last one."""
        waiter: Waiter | None = None
        try:
            with self.lock:
                if var.held >= 0 and not var.queue:
                    return self._see(var.failure)
                self.refuse_own("wait_to_read", var.name)
                waiter = Waiter(dropped=self.closed)
                if not self.closed:
                    self._waiters.add(waiter)
                    var.enqueue(waiter, False)
            if not waiter.dropped:
                _hear(waiter.bell)
        finally:
            if waiter is not None:
                with self.lock:
                    self._waiters.discard(waiter)
                    if var.queue and (waiter, False) in var.queue:
                        var.queue.remove((waiter, False))
        if waiter.dropped:
            raise ConfigError("wait_to_read", where=var.name, expected="a running engine", got="shutdown()")
        with self.lock:
            return self._see(waiter.failure)

    def wait_for_all(self) -> None:
        """Sleep until no task is unfinished; after `close` until none is running."""
        while True:
            with self.lock:
                if not (self._running if self.closed else self._inflight):
                    return
                self.refuse_own("waitall", None)
                bell = silent_bell()
                self._drained.append(bell)
            _hear(bell)

    def _see(self, failure: Failure | None) -> Failure | None:
        if failure in self._unseen:
            self._unseen.remove(failure)
        return failure

    def keep_unseen(self, failure: Failure) -> None:
        """Keep a failure for a later wait."""
        with self.lock:
            self._keep_unseen(failure)

    def _keep_unseen(self, failure: Failure) -> None:
        if failure not in self._unseen and len(self._unseen) < _MOST_UNSEEN:
            self._unseen.append(failure)

    def take_unseen(self) -> Failure | None:
        """Return and remove the first failure that no wait has raised."""
        with self.lock:
            return self._see(self._unseen[0]) if self._unseen else None

    def close(self) -> list[threading.Thread]:
        """Drop tasks that have not started and wake all threads; return the threads of the lanes."""
        lanes = self.lanes.values()
        with self.lock:
            self.closed = True
            dropped = [(lane.ready, lane.deferred) for lane in lanes]
            for lane in lanes:
                lane.ready, lane.deferred = [], set()
                _ring(lane.asleep)
            for waiter in self._waiters:
                waiter.settle(None, dropped=True)
            _ring(self._room)
            if not self._running:
                _ring(self._drained)
            threads = [thread for lane in lanes for thread in lane.threads]
        del dropped
        return threads

    def abandon(self) -> None:
        """Let the threads end when no task is unfinished, because nobody can push any more.

        The engine's finalizer calls it, possibly in garbage collection under the lock, so it never blocks on the lock.
        The lock's holder, a thread that is about to sleep or ends a deferred task, calls it afterwards.
        """
        self.abandoned = True
        if self.lock.acquire(blocking=False):
            try:
                if not self._inflight:
                    self.closed = True
                    for lane in self.lanes.values():
                        _ring(lane.asleep)
            finally:
                self.lock.release()

    def forget(self) -> None:
        """Close the schedule in a child made by fork, where no lane thread exists and the lock may be held."""
        self.lock, self.closed, self.own, self._running = threading.Lock(), True, {}, 0
        for lane in self.lanes.values():
            lane.ready, lane.threads, lane.asleep, lane.deferred = [], [], [], set()


def _hear(bell: threading.Lock) -> None:
    """Sleep until the bell rings or a signal handler raises.

    The timeout is needed because a signal does not wake this thread if another thread takes it, or if it comes just
    before the sleep.
    """
    while not bell.acquire(timeout=_LOOK_S):
        pass


def _ring(bells: list[threading.Lock]) -> None:
    while bells:
        ring_last(bells)
