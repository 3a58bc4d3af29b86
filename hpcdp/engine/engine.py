"""The engine: what its users call."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from sys import _getframe
from types import TracebackType
from typing import Any, Self

from ..errors import ConfigError, UnsupportedError
from .schedule import Schedule
from .tasks import DeferredTask, Failure, Lane, Task, Variable, throw
from .workers import Observer, Workers

Done = Callable[..., None]
"""What the function of a deferred task is given: ``done()`` when it has ended, ``done(error)`` when it has failed."""


class Engine:
    """Lanes of work ordered by what each task reads and writes.

    As a context it ends with `waitall` and `shutdown`; after an exception with `shutdown` alone. Threads start with the
    first task of a lane and end with `shutdown`, which happens by itself when the process exits. Those of an engine
    that nobody holds any more end when everything pushed is done.

    Args:
        lanes: the names of the lanes, one thread each, or a mapping of names to numbers of threads.
        max_inflight: how many tasks may be pushed and unfinished before `push` blocks.
        synchronous: run every task within its `push`, in the pushing thread, and raise there: for debugging. None asks
            the environment, where ``HPCDP_ENGINE`` may be "synchronous" or "threads" (the default).

    Raises:
        ConfigError: one of these is not valid.
    """

    def __reduce__(self) -> Any:
        raise UnsupportedError("Engine", expected="what tasks write to be copied or saved", got="the engine")

    def __init__(
        self,
        lanes: Iterable[str] | Mapping[str, int] = ("io",),
        max_inflight: int = 64,
        synchronous: bool | None = None,
    ) -> None:
        if isinstance(lanes, str):
            raise ConfigError("Engine", where="lanes", expected="several names, e.g. ('io',)", got=repr(lanes))
        if not isinstance(max_inflight, int) or max_inflight < 1:
            raise ConfigError("Engine", where="max_inflight", expected="an integer, at least 1", got=repr(max_inflight))
        self.synchronous = _asked_in_environment() if synchronous is None else synchronous
        self._schedule = Schedule(max_inflight)
        self._workers = Workers(self._schedule)
        for name, threads in dict(lanes if isinstance(lanes, Mapping) else dict.fromkeys(lanes, 1)).items():
            self.add_lane(name, threads)
        # The lanes' `idle` may lead back to this engine, so what is called at its end must not hold the schedule.
        weakref.finalize(self, _abandon, weakref.ref(self._schedule)).atexit = False

    @property
    def observer(self) -> Observer | None:
        """``observer(name, lane, start_ns, end_ns)`` is called after each task, in the thread where it ended, with
        times of `time.perf_counter_ns`. What it raises is kept for `waitall` like the exception of a task."""
        return self._workers.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._workers.observer = observer

    def variable(self, name: str = "") -> Variable:
        """A new variable without history."""
        return Variable(name, self._schedule)

    def add_lane(self, name: str, threads: int = 1, idle: Callable[[], object] | None = None) -> None:
        """One lane more.

        Args:
            name: not that of another lane of this engine.
            threads: so many tasks of the lane run at a time.
            idle: called on the lane's thread while no task may run there, until it returns something false: true says
                that something is under way, and it is called again after a nap, which a push interrupts. Naps are 50 us
                after a task or when a deferred one has ended, then double up to 1 ms. What ``idle`` raises becomes the
                exception of all deferred tasks of the lane that have not ended.

        Raises:
            ConfigError: the name is taken, there is no thread, or ``idle`` would be called by several.
        """
        if name in self._schedule.lanes:
            raise ConfigError("add_lane", where="name", expected=f"none of {', '.join(self._schedule.lanes)}", got=name)
        if not isinstance(threads, int) or threads < 1 or (idle is not None and threads > 1):
            expected = "at least 1" if idle is None else "1 with idle"
            raise ConfigError("add_lane", where=f"threads of {name}", expected=expected, got=repr(threads))
        self._schedule.lanes[name] = Lane(name, threads, idle)

    def push(
        self,
        fn: Callable[[], object],
        reads: Iterable[Variable] = (),
        writes: Iterable[Variable] = (),
        lane: str = "io",
        priority: int = 0,
        name: str = "",
    ) -> None:
        """Run ``fn()`` on a lane after the earlier tasks that it depends on; return at once.

        Blocks while `max_inflight` tasks are unfinished, except on a lane's own thread. An exception of ``fn``, with a
        note that says which line pushed it, is kept in the written variables until they are written anew: tasks that
        read them are not run and pass it on, and `wait_to_read` raises it.

        Args:
            fn: called without arguments; its result is dropped.
            reads: variables whose earlier writes must be done first.
            writes: variables whose earlier reads and writes must be done first; those that are read, too, stand in
                both.
            lane: the name of a lane.
            priority: of the tasks of a lane that may run, the highest goes first, then the earliest.
            name: for errors and traces; default that of ``fn``.

        Raises:
            ConfigError: there is no such lane, the priority is no integer, a variable is none of this engine, or the
                engine was shut down.
        """
        self._submit(Task(fn, self._lane(lane), priority, name, _getframe(1)), reads, writes)

    def push_deferred(
        self,
        fn: Callable[[Done], object],
        reads: Iterable[Variable] = (),
        writes: Iterable[Variable] = (),
        lane: str = "io",
        priority: int = 0,
        name: str = "",
    ) -> None:
        """Like `push`, for a task that is not done when ``fn`` returns, such as an exchange that it starts.

        ``fn(done)`` runs on the lane, which is then free for other tasks; the variables stay held until ``done()`` or
        ``done(error)`` is called, by any thread, once: more calls do nothing. (MXNet: PushAsync and its on_complete.)
        Anything but an exception as ``error`` is refused, and the task goes on.
        """
        self._submit(DeferredTask(fn, self._lane(lane), priority, name, _getframe(1)), reads, writes)

    def _lane(self, name: str) -> Lane:
        try:
            return self._schedule.lanes[name]
        except KeyError:
            raise ConfigError("push", where="lane", expected=" or ".join(self._schedule.lanes), got=name) from None

    def _submit(self, task: Task, reads: Iterable[Variable], writes: Iterable[Variable]) -> None:
        try:
            task.priority = operator.index(task.priority)
        except TypeError:
            expected = "an integer"
            raise ConfigError("push", where="priority", expected=expected, got=repr(task.priority)) from None
        lane = task.lane
        task.reads = task.shared = reads = tuple(reads)
        writes = tuple(writes)
        for var in (*reads, *writes):
            if getattr(var, "schedule", None) is not self._schedule:
                self._refuse("push", var)
        task.writes = writes = tuple(dict.fromkeys(writes)) if len(writes) > 1 else writes
        for var in reads:
            if var in writes:
                task.shared = tuple(var for var in reads if var not in writes)
                break
        if not (lane.started or self.synchronous):
            self._workers.start(lane)
        self._schedule.enter(task)
        if self.synchronous:
            self._workers.run_inline()
            throw(self._schedule.take_unseen())

    def has_ready(self, lane: str) -> bool:
        """Whether a task of the lane could begin now: for ``idle``, which keeps it from that."""
        return bool(self._schedule.lanes[lane].ready)

    def wait_to_read(self, var: Variable) -> None:
        """Block until every write of ``var`` pushed so far is done; Ctrl-C ends the wait.

        Raises:
            ConfigError: it is not done, and will not be: a task of this engine asks, or the engine was shut down; or it
                is no variable of this engine.
            BaseException: what the last of those writes raised, with its traceback and a note on who pushed it.
        """
        if getattr(var, "schedule", None) is not self._schedule:
            self._refuse("wait_to_read", var)
        throw(self._schedule.wait_for(var))

    def hold(self, var: Variable, unless_spoilt: bool = False) -> bool:
        """Take a variable for writing in this thread, if no task holds it or waits for it; never blocks.

        Whoever got it calls `release`; what is pushed meanwhile waits for that.

        Args:
            unless_spoilt: do not take it while its last write has failed, as who only reads must not: `release` drops
                the error.
        """
        return self._schedule.hold(var, unless_spoilt)

    def release(self, var: Variable, error: BaseException | None = None) -> None:
        """Let go of what `hold` has taken. ``error`` is raised to whoever reads it until it is written anew."""
        self._schedule.release(var, None if error is None else Failure(error))
        if self.synchronous:
            self._workers.run_inline()

    @staticmethod
    def _refuse(operation: str, var: object) -> None:
        got = f"that of another engine, {var!r}" if isinstance(var, Variable) else repr(var)
        raise ConfigError(operation, expected="a variable that variable() of this engine has made", got=got)

    def waitall(self) -> None:
        """Block until everything pushed is done, then raise the first exception that nobody has seen.

        Raises:
            ConfigError: a task of this engine asks, which would wait for itself.
        """
        self.wait_for_all()
        throw(self._schedule.take_unseen())

    def wait_for_all(self) -> None:
        """`waitall`, but what has failed is left to later waits, or is printed at the end."""
        self._schedule.wait_for_all()

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """Drop what has not started, wait for what runs, end the threads. The engine cannot be used again.

        An exception that nobody has seen is printed.

        Args:
            timeout_s: wait no longer than this for what runs.

        Returns:
            Whether nothing runs any more.
        """
        return self._workers.shutdown(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.waitall()
        finally:
            self.shutdown()


def _abandon(schedule: Callable[[], Schedule | None]) -> None:
    """Let the threads of an engine that is gone end; they hold its schedule, so without one there are none."""
    if (found := schedule()) is not None:
        found.abandon()


def _asked_in_environment() -> bool:
    asked = os.environ.get("HPCDP_ENGINE") or "threads"
    if asked not in ("synchronous", "threads"):
        raise ConfigError("Engine", where="HPCDP_ENGINE", expected="synchronous or threads", got=asked)
    return asked == "synchronous"
