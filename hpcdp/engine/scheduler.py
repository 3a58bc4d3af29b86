"""Tasks, variables and the order in which tasks become ready.

What is scheduled: variables, tasks, lanes. Nothing here locks; the engine does.

A variable counts who holds it and queues who waits for it, in the order of pushing. It knows nothing of what is done,
so one that lives long and is only read does not grow, and keeps no closure alive.

Who may run now, and who waits for it: everything that the engine's lock guards.
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
    """What a task reads or writes: a name for some state, made by `Engine.variable` and used with that engine only."""

    __slots__ = ("__weakref__", "failure", "held", "name", "queue", "schedule")

    __reduce__ = not_copied("Variable", "the variable", what="what tasks write")

    def __init__(self, name: str, schedule: object) -> None:
        self.name = name
        self.schedule = schedule  # whose lock guards it
        self.held = 0  # by so many readers, or -1: by a writer
        self.queue: deque[tuple[Task | Waiter, bool]] | None = None  # who waits, and whether to write
        self.failure: Failure | None = None  # of the last write

    def __repr__(self) -> str:
        return f"Variable({self.name!r})"

    def enqueue(self, who: Task | Waiter, writing: bool) -> None:
        """Wait in the queue, behind all who wait already."""
        if self.queue is None:
            self.queue = deque()
        if isinstance(who, Task):
            who.blockers += 1
            who.taken += 1
        self.queue.append((who, writing))

    def admit(self) -> list[Task]:
        """Let in those of the queue who may hold it now. Returns the tasks that wait for nothing any more."""
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
    """An exception of a task, with the traceback that it had then: one that is raised again and again grows."""

    __slots__ = ("error", "traceback")

    def __init__(self, error: BaseException) -> None:
        self.error, self.traceback = error, error.__traceback__


def throw(failure: Failure | None) -> None:
    """Raise a failure, if there is one, as if for the first time."""
    if failure is not None:
        error, trace = failure.error, failure.traceback
        try:
            raise error.with_traceback(trace)
        finally:
            del failure, error, trace  # a frame of the traceback that held it would keep all that it shows alive


class Task:
    """A function, what it reads and writes, and where it stands.

    Args:
        frame: that of the caller of `Engine.push`. A frame would keep the caller's variables alive, so the code and the
            instruction are kept, and the line is looked up when an error asks for it.
    """

    __slots__ = (
        "blockers",
        "code",
        "fn",
        "instruction",
        "lane",
        "name",
        "order",
        "priority",
        "reads",
        "shared",
        "taken",
        "writes",
    )
    deferred = False

    def __init__(self, fn: Callable[..., object], lane: Lane, priority: int, name: str, frame: FrameType) -> None:
        self.fn: Any = fn  # None when it has run
        self.lane = lane
        self.priority = priority
        self.name = name
        self.code = frame.f_code
        self.instruction = frame.f_lasti
        self.blockers = 0  # variables in whose queue it waits
        self.taken = 0  # variables that it holds or waits for, in the order of `writes`, then `shared`
        self.order: int
        self.reads: tuple[Variable, ...]
        self.writes: tuple[Variable, ...]  # each once
        self.shared: tuple[Variable, ...]  # read and not written

    def label(self) -> str:
        """Its name, else that of its function."""
        return self.name or getattr(self.fn, "__qualname__", type(self.fn).__qualname__)

    def pushed_by(self) -> str:
        """The line that pushed it, as a traceback shows lines."""
        spans = self.code.co_lines()
        line = next((line for start, end, line in spans if start <= self.instruction < end), None)
        place = f'  File "{self.code.co_filename}", line {line}, in {self.code.co_qualname}'
        return f'Task "{self.label()}" of lane "{self.lane.name}" was pushed by:\n{place}'


class DeferredTask(Task):
    """A task that goes on when its function has returned, until somebody says that it is done."""

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
    """Threads, the tasks that may run on them now, and the bells of those that sleep."""

    def __init__(self, name: str, threads: int, idle: Callable[[], object] | None) -> None:
        self.name, self.limit, self.idle = name, threads, idle
        self.ready: list[tuple[int, int, Task]] = []
        self.asleep: list[threading.Lock] = []
        self.threads: list[threading.Thread] = []
        self.deferred: set[DeferredTask] = set()  # not ended
        self.started = False

    def make_ready(self, task: Task, own: Lane | None) -> None:
        """Ring for a task, unless a thread of lane ``own`` asks, which takes the first one itself."""
        heappush(self.ready, (-task.priority, task.order, task))
        if self.asleep and (self is not own or len(self.ready) > 1):
            ring_last(self.asleep)


def silent_bell() -> threading.Lock:
    """A lock that is taken: to wait is to take it, to ring is to release it."""
    bell = threading.Lock()
    bell.acquire()
    return bell


def ring_last(bells: list[threading.Lock]) -> None:
    """Ring the last of the bells and remove it, so that Ctrl-C cannot come between (it could after ``bells.pop()``)."""
    bell = bells[-1]
    del bells[-1]
    bell.release()


_ENTERED = -1  # of Task.taken: the task is its lane's now
_LOOK_S = 0.5
_MOST_UNSEEN = 100  # each holds the local variables of what has failed


class TaskSchedule:
    """Tasks that have been pushed and are not finished, by lane and by variable.

    [Note: what drops under the lock] The last reference to a closure or an exception may be the last one to anything.
    What its end runs must not find the lock taken, so methods that drop such references give them to the caller.
    """

    def __init__(self, max_inflight: int) -> None:
        self.lock = threading.Lock()
        self.lanes: dict[str, Lane] = {}
        self.own: dict[int, Lane] = {}  # the threads that run tasks
        self.closed = False
        self.abandoned = False  # nobody holds the engine any more
        self._max_inflight = max_inflight
        self._pushed = self._inflight = self._running = 0
        self._unseen: list[Failure] = []  # the first one first
        self._room: list[threading.Lock] = []  # the bells of who waits for room, for the end of all, for a variable
        self._drained: list[threading.Lock] = []
        self._waiters: set[Waiter] = set()

    def enter(self, task: Task) -> None:
        """Let a task in when there is room for it: it holds its variables, or waits in their queues."""
        lane = task.lane
        while True:
            with self.lock:
                if self.closed:
                    raise ConfigError("push", expected="a running engine", got="one that was shut down")
                if self._inflight < self._max_inflight or get_ident() in self.own:
                    # Ctrl-C may raise after any call and at the end of each turn of a loop, but nowhere else.
                    try:
                        for var in task.writes:
                            if var.held or var.queue:
                                var.enqueue(task, True)
                            else:
                                task.taken += 1
                                var.held = -1
                        for var in task.shared:
                            if var.held < 0 or var.queue:
                                var.enqueue(task, False)
                            else:
                                task.taken += 1
                                var.held += 1
                        self._pushed += 1
                        self._inflight += 1
                        task.order = self._pushed
                        task.taken = _ENTERED
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
        """Let a thread that runs no task write a variable, if that is free."""
        held = False
        try:
            with self.lock:
                if var.held or var.queue or self.closed or get_ident() in self.own:
                    return False
                if unless_spoilt and var.failure is not None:
                    return False
                held, var.held = True, -1
        except BaseException:  # Ctrl-C, when the lock was let go
            if held:
                self.release(var, var.failure)
            raise
        return True

    def release(self, var: Variable, failure: Failure | None) -> None:
        """It has written; the failure that is dropped is dropped without the lock."""
        with self.lock:
            dropped, var.failure, var.held = var.failure, failure, 0
            if var.queue:
                self._admit(var, None)
        del dropped

    def _withdraw(self, task: Task) -> None:
        """Undo what was interrupted half-way, or complete it."""
        if task.taken == _ENTERED:
            if task.lane.asleep:
                ring_last(task.lane.asleep)
            return
        for number, var in enumerate((*task.writes, *task.shared)[: task.taken]):
            writing = number < len(task.writes)
            if var.queue and (task, writing) in var.queue:
                var.queue.remove((task, writing))
            else:
                var.held = 0 if writing else var.held - 1

    def take(self, lane: Lane) -> Task | None:
        """The task that a thread of a lane runs next. The lock is held."""
        if not lane.ready:
            return None
        task = heappop(lane.ready)[2]
        self._running += 1
        if isinstance(task, DeferredTask):
            lane.deferred.add(task)
        return task

    def leave(self, task: Task, failure: Failure | None) -> object:
        """The function of a task has returned. The lock is held; the result is to be dropped without it."""
        self._running -= 1
        dropped = None
        if not isinstance(task, DeferredTask):
            dropped = self._complete(task, failure, task.lane)
        elif failure is not None:
            dropped = self._end(task, failure, task.lane)
            if dropped is None:  # its function has raised after it had said that it is done
                self._keep_unseen(failure)
        if self.closed and not self._running:
            _ring(self._drained)
        return dropped

    def end(self, task: DeferredTask, failure: Failure | None) -> bool:
        """A deferred task has ended. Returns whether nobody has said so before."""
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
        """Let go of a task's variables; a thread of lane ``own`` asks and takes a task next."""
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
        """A task that waits for another could keep it from running.

        Raises:
            ConfigError: this thread runs a task.
        """
        lane = self.own.get(get_ident())
        if lane is not None:
            raise ConfigError(
                operation,
                where=where,
                expected="a thread other than those of the engine's lanes",
                got=f"a task of lane {lane.name}",
                remedy="read the variable, or use another engine; a DataLoader inside a data set needs prefetch=0",
            )

    def wait_for(self, var: Variable) -> Failure | None:
        """Sleep until the writes of a variable that stand in its queue are done. Returns the failure of the last."""
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
            raise ConfigError("wait_to_read", where=var.name, expected="a running engine", got="a shutdown")
        with self.lock:
            return self._see(waiter.failure)

    def wait_for_all(self) -> None:
        """Sleep until nothing is unfinished, or, after `close`, until nothing runs."""
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
        """Somebody should see it."""
        with self.lock:
            self._keep_unseen(failure)

    def _keep_unseen(self, failure: Failure) -> None:
        if failure not in self._unseen and len(self._unseen) < _MOST_UNSEEN:
            self._unseen.append(failure)

    def take_unseen(self) -> Failure | None:
        """The first failure that nobody has seen; it is seen now."""
        with self.lock:
            return self._see(self._unseen[0]) if self._unseen else None

    def close(self) -> list[threading.Thread]:
        """Drop what has not started and wake everybody. Returns the threads of the lanes."""
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
        """Nobody can push any more: let the threads end when nothing is unfinished.

        Whatever drops the engine calls it, garbage collection under the lock, too. So it does not wait for the lock:
        who has it, a thread that is about to sleep or that ends a deferred task, calls it thereafter.
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
        """Close in a child made by fork, where nobody sleeps and any thread may have held the lock."""
        self.lock, self.closed, self.own, self._running = threading.Lock(), True, {}, 0
        for lane in self.lanes.values():
            lane.ready, lane.threads, lane.asleep, lane.deferred = [], [], [], set()


def _hear(bell: threading.Lock) -> None:
    """Sleep until it rings, or until a signal's handler raises.

    A signal that another thread has taken, or that has come when this one was about to sleep, does not wake it.
    """
    while not bell.acquire(timeout=_LOOK_S):
        pass


def _ring(bells: list[threading.Lock]) -> None:
    while bells:
        ring_last(bells)
