"""Floor 1: the dependency engine. Imports: errors.

Work is pushed with the variables that it reads and writes; it runs on the thread of a lane as soon as everything pushed
before it that touches those variables allows: readers of a variable together, a writer alone, in the order of pushing.
The design is that of MXNet's dependency engine (Chen et al., "MXNet: A Flexible and Efficient Machine Learning Library
for Heterogeneous Distributed Systems", 2015, section 3.2).
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence

from .errors import ConfigError


class Variable:
    """What a task reads or writes: a name for some state, made by `Engine.variable`."""

    __slots__ = ("error", "last_write", "name", "reads_since")

    def __init__(self, name: str) -> None:
        self.name = name
        self.last_write: _Task | None = None
        self.reads_since: list[_Task] = []
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"Variable({self.name!r})"


class _Task:
    __slots__ = ("blockers", "done", "fn", "followers", "lane", "order", "priority", "reads", "writes")

    def __init__(
        self,
        fn: Callable[[], object],
        reads: Sequence[Variable],
        writes: Sequence[Variable],
        lane: _Lane,
        rank: tuple[int, int],
    ) -> None:
        self.fn = fn
        self.reads = reads
        self.writes = writes
        self.lane = lane
        self.priority, self.order = rank
        self.blockers = 0
        self.followers: list[_Task] = []
        self.done = False

    def __lt__(self, other: _Task) -> bool:
        return (-self.priority, self.order) < (-other.priority, other.order)


class _Lane:
    """A thread and the heap of tasks that may run on it now."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.ready: list[_Task] = []
        self.wake = threading.Condition(engine._lock)
        self.thread = threading.Thread(target=engine._run_lane, args=(self,), name=f"hpcdp-{name}", daemon=True)


class Engine:
    """Lanes of work ordered by what each task reads and writes.

    Args:
        lanes: the names of the lanes, one thread each.
        max_inflight: how many tasks may be pushed and unfinished before `push` blocks.
    """

    def __init__(self, lanes: Iterable[str] = ("io",), max_inflight: int = 64) -> None:
        if max_inflight < 1:
            raise ConfigError("Engine", where="max_inflight", expected="at least 1", got=max_inflight)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._lanes = {name: _Lane(name, self) for name in lanes}
        self._max_inflight = max_inflight
        self._inflight = 0
        self._running = 0
        self._order = itertools.count()
        self._unraised: BaseException | None = None
        self._closed = False

    def variable(self, name: str = "") -> Variable:
        """A new variable without history."""
        return Variable(name)

    def push(
        self,
        fn: Callable[[], object],
        reads: Sequence[Variable] = (),
        writes: Sequence[Variable] = (),
        lane: str = "io",
        priority: int = 0,
    ) -> None:
        """Run ``fn()`` on a lane after the earlier tasks that it depends on; return at once.

        Blocks while `max_inflight` tasks are unfinished, except on a lane's own thread. An exception of ``fn`` is kept
        in the written variables: tasks that read them are not run and pass it on, and `wait_to_read` raises it.

        Args:
            fn: called without arguments; its result is dropped.
            reads: variables whose earlier writes must be done first.
            writes: variables whose earlier reads and writes must be done first.
            lane: the name of a lane.
            priority: of the tasks of a lane that may run, the highest goes first, then the earliest.
        """
        if lane not in self._lanes:
            raise ConfigError("push", where="lane", expected=" or ".join(self._lanes), got=lane)
        home = self._lanes[lane]
        with self._lock:
            if threading.current_thread() not in (each.thread for each in self._lanes.values()):
                self._changed.wait_for(lambda: self._closed or self._inflight < self._max_inflight)
            if self._closed:
                raise ConfigError("push", expected="a running engine", got="one that was shut down")
            if not home.thread.is_alive():
                home.thread.start()
            written = list(dict.fromkeys(writes))
            only_read = [var for var in dict.fromkeys(reads) if var not in written]
            task = _Task(fn, tuple(reads), written, home, (priority, next(self._order)))
            blockers: set[_Task] = set()
            for var in only_read:
                if var.last_write is not None:
                    blockers.add(var.last_write)
                var.reads_since = [earlier for earlier in var.reads_since if not earlier.done]
                var.reads_since.append(task)
            for var in written:
                if var.last_write is not None:
                    blockers.add(var.last_write)
                blockers.update(var.reads_since)
                var.last_write, var.reads_since = task, []
            for blocker in blockers:
                if not blocker.done:
                    blocker.followers.append(task)
                    task.blockers += 1
            self._inflight += 1
            if task.blockers == 0:
                self._make_ready(task)

    def _make_ready(self, task: _Task) -> None:
        heapq.heappush(task.lane.ready, task)
        task.lane.wake.notify()

    def _run_lane(self, lane: _Lane) -> None:
        while True:
            with self._lock:
                lane.wake.wait_for(lambda: self._closed or lane.ready)
                if not lane.ready:
                    return
                task = heapq.heappop(lane.ready)
                self._running += 1
                error = next((var.error for var in task.reads if var.error is not None), None)
            if error is None:
                try:
                    task.fn()
                except BaseException as raised:  # carried to whoever waits, KeyboardInterrupt too
                    error = raised
            self._finish(task, error)
            del task, error  # an idle lane must not keep alive what its last task held

    def _finish(self, task: _Task, error: BaseException | None) -> None:
        with self._lock:
            task.done = True
            for var in task.writes:
                var.error = error
            if error is not None and self._unraised is None:
                self._unraised = error
            for follower in task.followers:
                follower.blockers -= 1
                if follower.blockers == 0 and not self._closed:
                    self._make_ready(follower)
            task.followers = []
            task.fn = _nothing  # what the closure held can go now
            self._inflight -= 1
            self._running -= 1
            self._changed.notify_all()

    def wait_to_read(self, var: Variable) -> None:
        """Block until every write of ``var`` pushed so far is done; Ctrl-C ends the wait.

        Raises:
            ConfigError: called by a task whose own lane is to do that write, which would never happen.
            BaseException: what the last of those writes raised, with its traceback.
        """
        with self._lock:
            write = var.last_write
            if write is not None:
                if not write.done and write.lane.thread is threading.current_thread():
                    raise ConfigError(
                        "wait_to_read",
                        where=var.name,
                        expected="a thread other than that of the lane which writes it",
                        got=f"a task of lane {write.lane.name}",
                        remedy="use another lane or engine; a DataLoader inside a data set needs prefetch=0",
                    )
                self._changed.wait_for(lambda: write.done or self._closed)
                if not write.done:
                    raise ConfigError("wait_to_read", where=var.name, expected="a running engine", got="a shutdown")
            error = var.error
            if error is not None and error is self._unraised:
                self._unraised = None
        if error is not None:
            raise error

    def waitall(self) -> None:
        """Block until everything pushed so far is done, then raise the first exception that nobody has seen."""
        with self._lock:
            self._changed.wait_for(lambda: self._inflight == 0)
            error, self._unraised = self._unraised, None
        if error is not None:
            raise error

    def shutdown(self) -> None:
        """Drop what has not started, wait for what runs, end the threads. The engine cannot be used again."""
        with self._lock:
            self._closed = True
            self._inflight = self._running  # what waits for these is dropped too
            for lane in self._lanes.values():
                lane.ready.clear()
                lane.wake.notify_all()
            self._changed.notify_all()
        for lane in self._lanes.values():
            if lane.thread.is_alive() and lane.thread is not threading.current_thread():
                lane.thread.join()


def _nothing() -> None:
    pass


_default: Engine | None = None
_default_lock = threading.Lock()


def default_engine() -> Engine:
    """The engine of this process, made at first use and shut down at exit."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Engine()
            atexit.register(_default.shutdown)
        return _default
