"""The dependency engine: lanes of worker threads that run tasks in the order of their variables.

Contains the traces, the short time slices of lanes that poll, the workers, the engine, and the shutdown of all engines
when the process exits or forks.

Since Linux 6.6 (the EEVDF scheduler) a waking thread waits until the running one has used up its slice, some 3 ms, and
received messages wait with it. Since 6.12 a thread may request shorter slices: it gets the same share of a core, but as
soon as it wakes up. Measured with a reduction of 16 MiB over 1 Gbit/s beside backward, one core per rank: a step took
274 ms without and 235 ms with short slices (docs/benchmarks.md, "Overlap"). Source: Stoica and Abdel-Wahab, "Earliest
eligible virtual deadline first", 1995; sched_setattr(2).
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import operator
import os
import platform
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from sys import _getframe
from threading import get_ident
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from ..core.checks import choices, not_copied, one_of, whole_number
from ..errors import ConfigError, to_stderr
from .scheduler import DeferredTask, Failure, Lane, Task, TaskSchedule, Variable, silent_bell, throw

MAIN = "main"
"""The trace's lane of the training thread."""

CAPACITY = 1 << 18
"""Default number of slices and counts in a trace, 60 to 100 MB."""


class Slice(NamedTuple):
    """An interval on a lane, or an instant, whose end equals its start."""

    name: str
    lane: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] | None
    """Further strings and numbers to show."""
    nests: bool
    """True if slices of the lane may be nested; on a lane with several tasks at a time they are not."""


class Count(NamedTuple):
    """The value of a counter from ``time_ns`` on."""

    name: str
    time_ns: int
    value: float


class Ranges(Protocol):
    """An interface that marks ranges for a profiler of the device, such as the module ``cupy.cuda.nvtx``."""

    def RangePush(self, name: str) -> object:
        """Begin a range within this thread's open one."""

    def RangePop(self) -> object:
        """End the innermost range."""


class Trace:
    """A record of one rank's activity, in memory; `hpcdp.train.chrome_trace` writes one file of all ranks.

    Any thread may add to it; nothing here communicates with other ranks. A traced world keeps it:
    ``world.kept.get(Trace)`` is None without tracing. Look it up when an object is made, not in each step.

    Args:
        capacity: the maximum number of slices and counts; further ones only increase `dropped`.
        clock: returns integer nanoseconds; the engine's slices use `time.perf_counter_ns`.
        ranges: also receives every `span`, see `nvtx`.

    Raises:
        ConfigError: ``capacity`` is not a positive integer.
    """

    def __init__(
        self, capacity: int = CAPACITY, clock: Callable[[], int] = time.perf_counter_ns, ranges: Ranges | None = None
    ) -> None:
        self._capacity = whole_number("Trace", "capacity", capacity, 1)
        self.clock = clock
        self.ranges = ranges
        self.slices: list[Slice] = []
        self.counts: list[Count] = []
        self.dropped = 0
        self._ended = False
        self._lock = threading.Lock()

    def slice(self, name: str, lane: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Add an interval by `clock`, or an instant if start and end are equal; an `engine.Observer`.

        Slices of a lane other than "main" may overlap; they are drawn below each other. ``args`` are strings and
        numbers to show.
        """
        if self._has_room():
            self.slices.append(Slice(name, lane, start_ns, end_ns, args or None, lane == MAIN))

    def span(self, name: str, lane: str = MAIN, **args: Any) -> Span:
        """Return a context that adds a slice when it ends, also by an exception; spans of a lane may be nested."""
        return Span(self, name, lane, args)

    def count(self, name: str, value: float) -> None:
        """Set the counter ``name`` to ``value`` from now on; it is drawn as a curve."""
        if self._has_room():
            self.counts.append(Count(name, self.clock(), value))

    def end(self) -> None:
        """Stop recording; later additions are not counted as dropped."""
        self._ended = True

    def _has_room(self) -> bool:
        if self._ended:
            return False
        if len(self.slices) + len(self.counts) < self._capacity:
            return True
        with self._lock:
            self.dropped += 1
        return False


class Span:
    """A context of `Trace.span`."""

    __slots__ = ("_args", "_lane", "_name", "_start_ns", "_trace")

    def __init__(self, trace: Trace, name: str, lane: str, args: dict[str, Any]) -> None:
        self._trace, self._name, self._lane, self._args = trace, name, lane, args

    def __enter__(self) -> Span:
        ranges = self._trace.ranges
        if ranges is not None:
            ranges.RangePush(self._name)
        self._start_ns = self._trace.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_ns = self._trace.clock()
        if self._trace.ranges is not None:
            self._trace.ranges.RangePop()
        if self._trace._has_room():
            self._trace.slices.append(Slice(self._name, self._lane, self._start_ns, end_ns, self._args or None, True))


def nvtx() -> Ranges | None:
    """Return the module that marks ranges for NVIDIA's profilers; None if it is missing."""
    try:
        module: Any = importlib.import_module("cupy.cuda.nvtx")
        return module
    except ImportError:
        return None


SLICE_NS = 100_000
"""The shortest slice that Linux grants."""

_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275), "ppc64le": (355, 356)}
"""Numbers of the system calls sched_setattr and sched_getattr, for which glibc has no functions before 2.41."""

_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period."""

_ORDINARY, _RUNTIME = 0, 5


def ask_for_short_slices() -> bool:
    """Request short time slices for the calling thread; its priority and share of a core stay the same.

    Returns:
        Whether the system accepted the request. Before Linux 6.12 it does, without an effect.
    """
    attributes = _attributes()
    if attributes is None or attributes[1] != _ORDINARY:
        return False
    attributes[_RUNTIME] = SLICE_NS
    setter, _ = _NUMBERS[platform.machine()]
    return bool(_system().syscall(setter, 0, _ATTRIBUTES.pack(*attributes), 0) == 0)


def _attributes() -> list[int] | None:
    if sys.platform != "linux" or platform.machine() not in _NUMBERS:
        return None
    _, getter = _NUMBERS[platform.machine()]
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if _system().syscall(getter, 0, buffer, _ATTRIBUTES.size, 0) != 0:
        return None
    return list(_ATTRIBUTES.unpack(buffer.raw))


def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


NAPS_S = (50e-6, 1e-3)
"""Seconds of the first and the longest nap between calls of a lane's ``idle``. Each nap is twice as long as the last
while the process computes, and an eighth longer while it waits: naps then delay what ``idle`` waits for by an eighth.
"""
_BUSY = 0.5
"""The share of a nap in which a process that computes uses a core."""

ADVANCED = "advanced"
"""The answer of a lane's ``idle`` whose work has advanced: the next nap is the shortest."""

Observer = Callable[[str, str, int, int], object]
"""``observer(name, lane, start_ns, end_ns)``, on the clock of `time.perf_counter_ns`."""


_living: weakref.WeakSet[Workers] = weakref.WeakSet()


def living_workers() -> list[Workers]:
    """Return the workers of all engines that may have threads; threads can outlive an unreferenced engine."""
    return list(_living)


class Workers:
    """The threads of an engine: they run tasks and report the end to the schedule and the observer."""

    def __init__(self, schedule: TaskSchedule) -> None:
        self.observer: Observer | None = None
        self._schedule = schedule
        self._turn = threading.Lock()  # held by the thread that runs tasks inline
        _living.add(self)

    def start(self, lane: Lane) -> None:
        """Start a lane's threads; surplus ones end by themselves."""
        for number in range(lane.limit):
            suffix = f"-{number}" if lane.limit > 1 else ""
            name = f"hpcdp-{lane.name}{suffix}"
            threading.Thread(target=self._run_lane, args=(lane,), name=name, daemon=True).start()
        lane.started = True

    def _run_lane(self, lane: Lane) -> None:
        schedule = self._schedule
        with schedule.lock:
            if schedule.closed or len(lane.threads) == lane.limit:
                return  # two threads pushed the lane's first task, or Ctrl-C interrupted the start of its threads
            lane.threads.append(threading.current_thread())
            schedule.own[get_ident()] = lane
        if lane.idle is not None:  # the lane polls between naps
            ask_for_short_slices()
        bell, nap_s = silent_bell(), NAPS_S[0]
        last: Task | None = None
        failure: Failure | None = None
        while True:
            with schedule.lock:
                dropped = schedule.leave(last, failure) if last is not None else None
                task = schedule.take(lane)
                if task is None:
                    if schedule.closed:
                        del schedule.own[get_ident()]
                        break
                    lane.asleep.append(bell)
            last = failure = None
            del dropped
            if task is None:
                if schedule.abandoned:
                    schedule.abandon()
                nap_s = self._doze(lane, bell, nap_s)
            else:
                failure, last, nap_s = self._run(task), task, NAPS_S[0]
                task = None
        if schedule.abandoned and not schedule.own:
            self._tell_unseen()

    def _doze(self, lane: Lane, bell: threading.Lock, nap_s: float) -> float:
        """Wait until the lane's bell is rung or a nap is over; return the length of the next nap."""
        pending = len(lane.deferred)
        answer = lane.idle is not None and self._ask(lane, lane.idle)
        if not answer:
            bell.acquire()
            return NAPS_S[0]
        if len(lane.deferred) < pending or answer == ADVANCED:
            nap_s = NAPS_S[0]
        began_s, used_s = time.perf_counter(), time.process_time()
        if not bell.acquire(timeout=nap_s):
            with self._schedule.lock:
                if bell in lane.asleep:
                    lane.asleep.remove(bell)
                else:
                    bell.acquire()
        is_busy = time.process_time() - used_s > _BUSY * (time.perf_counter() - began_s)
        return min(nap_s * (2 if is_busy else 1.125), NAPS_S[1])

    def _ask(self, lane: Lane, idle: Callable[[], object]) -> object:
        """Call ``idle``; return its answer, true if it has work in progress."""
        try:
            return idle()
        except BaseException as error:
            failure = Failure(error)
        deferred = tuple(lane.deferred)
        if not deferred:
            self._schedule.keep_unseen(failure)
        for task in deferred:
            failure.error.add_note(task.pushed_by())
            self._end(task, failure)
        return False

    def _run(self, task: Task) -> Failure | None:
        """Run a task unless a variable that it reads holds a failure; return the failure, if any."""
        for var in task.reads:
            if var.failure is not None:
                task.fn = None
                return var.failure
        observer = self.observer
        start_ns = time.perf_counter_ns() if observer is not None else 0
        # A local variable with the failure would keep all frames of the traceback alive, because they lead here.
        try:
            if isinstance(task, DeferredTask):
                task.name, task.start_ns = task.label(), start_ns
                task.fn(partial(self._done, task))
            else:
                task.fn()
            return None
        except BaseException as error:  # raised again in the waiting thread, also KeyboardInterrupt
            error.add_note(task.pushed_by())
            return Failure(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        finally:
            if observer is not None and not task.deferred:
                self._observe(task, start_ns)
            task.fn = None  # free the closure

    def _done(self, task: DeferredTask, error: BaseException | None = None) -> None:
        if error is None:
            self._end(task, None)
        elif not isinstance(error, BaseException):
            raise ConfigError("done", where=task.label(), expected="nothing, or an exception", got=repr(error))
        elif not task.finished:
            error.add_note(task.pushed_by())
            self._end(task, Failure(error))

    def _end(self, task: DeferredTask, failure: Failure | None) -> None:
        if self._schedule.end(task, failure) and task.start_ns:
            self._observe(task, task.start_ns)

    def _observe(self, task: Task, start_ns: int) -> None:
        end_ns = time.perf_counter_ns()
        observer = self.observer  # a copy, because another thread may reset it
        try:
            if observer is not None:
                observer(task.label(), task.lane.name, start_ns, end_ns)
        except BaseException as error:
            self._schedule.keep_unseen(Failure(error))

    def shutdown(self, timeout_s: float | None) -> bool:
        """See `Engine.shutdown`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        threads = self._schedule.close()
        if threading.current_thread() not in threads:  # two tasks that shut down would wait for each other's lane
            for thread in threads:
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self._tell_unseen()
        return not any(thread.is_alive() for thread in threads)

    def _tell_unseen(self) -> None:
        while (failure := self._schedule.take_unseen()) is not None:
            lines = traceback.format_exception(failure.error.with_traceback(failure.traceback))
            to_stderr("hpcdp: a task failed, and nobody waited for it:\n" + "".join(lines).rstrip())

    def forget_threads(self) -> None:
        """Mark the threads as gone in a child made by fork; waits and pushes there report a shutdown."""
        self._schedule.forget()
        self._turn = threading.Lock()

    def run_inline(self) -> None:
        """Run all ready tasks. Tasks that a task pushes run after it, within the outermost push."""
        schedule, me = self._schedule, get_ident()
        if me in schedule.own:
            return
        with self._turn:
            while True:
                with schedule.lock:
                    busy = [lane for lane in schedule.lanes.values() if lane.ready]
                    if not busy:
                        return
                    lane = min(busy, key=lambda lane: lane.ready[0][:2])
                    task = schedule.take(lane)
                    schedule.own[me] = lane
                try:
                    assert task is not None
                    failure = self._run(task)
                    with schedule.lock:
                        dropped = schedule.leave(task, failure)
                    del dropped
                    while isinstance(task, DeferredTask) and not (task.finished or schedule.closed):
                        if lane.idle is None or not self._ask(lane, lane.idle):
                            time.sleep(NAPS_S[0])
                finally:
                    del schedule.own[me]


Done = Callable[..., None]
"""The argument of a deferred task's function: ``done()`` marks success, ``done(error)`` failure."""


class Engine:
    """Lanes of work that is ordered by what each task reads and writes.

    As a context it ends with `waitall` and `shutdown`, after an exception with `shutdown` alone. Threads start with the
    first task of a lane and end with `shutdown`, which also happens when the process exits. Threads of an unreferenced
    engine end when all pushed tasks are done.

    Args:
        lanes: the names of the lanes, one thread each, or a mapping of names to numbers of threads.
        max_inflight: the number of unfinished tasks at which `push` blocks.
        synchronous: run every task within its `push`, in the pushing thread, and raise there; for debugging. None reads
            the environment variable ``HPCDP_ENGINE``: "synchronous" or "threads" (the default).

    Raises:
        ConfigError: an argument is not valid.
    """

    __reduce__ = not_copied("Engine", "the engine", what="what tasks write")

    def __init__(
        self,
        lanes: Iterable[str] | Mapping[str, int] = ("io",),
        max_inflight: int = 64,
        synchronous: bool | None = None,
    ) -> None:
        if isinstance(lanes, str):
            raise ConfigError("Engine", where="lanes", expected="several names, e.g. ('io',)", got=repr(lanes))
        self.synchronous = _asked_in_environment() if synchronous is None else synchronous
        self._schedule = TaskSchedule(whole_number("Engine", "max_inflight", max_inflight, 1))
        self._workers = Workers(self._schedule)
        for name, threads in dict(lanes if isinstance(lanes, Mapping) else dict.fromkeys(lanes, 1)).items():
            self.add_lane(name, threads)
        # The lanes' `idle` may refer to this engine, so its finalizer must not hold the schedule.
        weakref.finalize(self, _abandon, weakref.ref(self._schedule)).atexit = False

    @property
    def observer(self) -> Observer | None:
        """A function called after each task: ``observer(name, lane, start_ns, end_ns)``.

        It runs in the thread where the task ended, with times of `time.perf_counter_ns`. An exception of it is kept for
        `waitall`, like that of a task.
        """
        return self._workers.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._workers.observer = observer

    def variable(self, name: str = "") -> Variable:
        """Return a new variable without history."""
        return Variable(name, self._schedule)

    def add_lane(self, name: str, threads: int = 1, idle: Callable[[], object] | None = None) -> None:
        """Add a lane.

        Args:
            name: a name that no other lane of this engine has.
            threads: the number of tasks of the lane that may run at a time.
            idle: called on the lane's thread while none of its tasks can run. True means that work is in progress: it
                is called again after a nap, which a push interrupts. Naps are 50 us after a task, when a deferred one
                has ended, or when ``idle`` returns `ADVANCED`; then they grow to 1 ms. An exception of ``idle``
                becomes that of all unfinished deferred tasks of the lane.

        Raises:
            ConfigError: the name is taken, there is no thread, or ``idle`` has several.
        """
        if name in self._schedule.lanes:
            raise ConfigError("add_lane", where="name", expected=f"none of {', '.join(self._schedule.lanes)}", got=name)
        expected, most = (None, None) if idle is None else ("1 with idle", 1)
        whole_number("add_lane", f"threads of {name}", threads, 1, most, expected=expected)
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
        note that names the pushing line, stays in the written variables until they are written again. Tasks that read
        them are skipped and pass it on, and `wait_to_read` raises it.

        Args:
            fn: called without arguments; its result is dropped.
            reads: variables whose earlier writes must be done first.
            writes: variables whose earlier reads and writes must be done first. A variable may be in both.
            lane: the name of a lane.
            priority: the highest of a lane's ready tasks runs first, then the earliest.
            name: for errors and traces; default that of ``fn``.

        Raises:
            ConfigError: the lane does not exist, the priority is no integer, a variable belongs to another engine, or
                the engine was shut down.
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
        """Push a task that is not done when ``fn`` returns, such as an exchange that it starts; otherwise like `push`.

        ``fn(done)`` runs on the lane, which is then free for other tasks. The variables stay held until any thread
        calls ``done()`` or ``done(error)``; further calls do nothing. (MXNet: PushAsync and its on_complete.) An
        ``error`` that is no exception is refused, and the task continues.
        """
        self._submit(DeferredTask(fn, self._lane(lane), priority, name, _getframe(1)), reads, writes)

    def _lane(self, name: str) -> Lane:
        try:
            return self._schedule.lanes[name]
        except KeyError:
            raise ConfigError("push", where="lane", expected=choices(self._schedule.lanes), got=name) from None

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
        """Return whether a task of the lane could start now; for ``idle``, which delays it."""
        return bool(self._schedule.lanes[lane].ready)

    def wait_to_read(self, var: Variable) -> None:
        """Block until every write of ``var`` pushed so far is done; Ctrl-C ends the wait.

        Raises:
            ConfigError: the wait would never end, because a task of this engine waits or the engine was shut down; or
                the variable belongs to another engine.
            BaseException: the exception of the last of those writes, with its traceback and a note on who pushed it.
        """
        if getattr(var, "schedule", None) is not self._schedule:
            self._refuse("wait_to_read", var)
        throw(self._schedule.wait_for(var))

    def hold(self, var: Variable, unless_spoilt: bool = False) -> bool:
        """Acquire a variable for writing in this thread if no task holds it or waits for it; return whether it was.

        Never blocks. The caller must then call `release`; tasks pushed meanwhile wait for that. With ``unless_spoilt``
        a variable whose last write failed is not acquired: a thread that only reads must not, because `release` drops
        the error.
        """
        return self._schedule.hold(var, unless_spoilt)

    def release(self, var: Variable, error: BaseException | None = None) -> None:
        """Release a variable acquired by `hold`; ``error`` is raised to its readers until it is written again."""
        self._schedule.release(var, None if error is None else Failure(error))
        if self.synchronous:
            self._workers.run_inline()

    @staticmethod
    def _refuse(operation: str, var: object) -> None:
        got = f"{var!r} of another engine" if isinstance(var, Variable) else repr(var)
        raise ConfigError(operation, expected="a variable of this engine", got=got, remedy="call engine.variable()")

    def waitall(self) -> None:
        """Block until all pushed tasks are done, then raise the first exception that was not raised before.

        Raises:
            ConfigError: a task of this engine calls it, which would wait for itself.
        """
        self.wait_for_all()
        throw(self._schedule.take_unseen())

    def wait_for_all(self) -> None:
        """Block until all pushed tasks are done; failures are left to later waits, or printed at the end."""
        self._schedule.wait_for_all()

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """Drop tasks that have not started, wait for running ones, and end the threads.

        The engine cannot be used again. Exceptions that were never raised are printed.

        Args:
            timeout_s: the maximum wait for running tasks in seconds; None waits without a limit.

        Returns:
            Whether all threads have ended.
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


def _abandon(schedule: Callable[[], TaskSchedule | None]) -> None:
    """Let the threads of an unreferenced engine end. They hold its schedule, so without one there are none."""
    if (living := schedule()) is not None:
        living.abandon()


def _asked_in_environment() -> bool:
    setting = os.environ.get("HPCDP_ENGINE") or "threads"
    return one_of("Engine", "HPCDP_ENGINE", setting, ("synchronous", "threads")) == "synchronous"


EXIT_LIMIT_S = 5.0
"""Seconds that an exiting process waits for running tasks; tasks that have not started are dropped."""

_default: Engine | None = None
_default_lock = threading.Lock()


def default_engine() -> Engine:
    """Return the engine of this process, made at first use, with the lane "io".

    A child made by fork gets one of its own.
    """
    global _default
    with _default_lock:
        if _default is None:
            _default = Engine()
        return _default


def _shut_down_all() -> None:
    deadline = time.monotonic() + EXIT_LIMIT_S
    for workers in living_workers():
        workers.shutdown(max(0.0, deadline - time.monotonic()))


def _forget_all() -> None:
    global _default, _default_lock
    _default, _default_lock = None, threading.Lock()
    for workers in living_workers():
        workers.forget_threads()


atexit.register(_shut_down_all)
os.register_at_fork(after_in_child=_forget_all)
