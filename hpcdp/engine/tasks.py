"""What is scheduled: variables, tasks, lanes. Nothing here locks; the engine does.

A variable counts who holds it and queues who waits for it, in the order of pushing. It knows nothing of what is done,
so one that lives long and is only read does not grow, and keeps no closure alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from heapq import heappush
from types import FrameType
from typing import Any

from ..errors import UnsupportedError


class Variable:
    """What a task reads or writes: a name for some state, made by `Engine.variable` and used with that engine only."""

    __slots__ = ("__weakref__", "failure", "held", "name", "queue", "schedule")

    def __reduce__(self) -> Any:
        raise UnsupportedError("Variable", expected="what tasks write to be copied or saved", got="the variable")

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
