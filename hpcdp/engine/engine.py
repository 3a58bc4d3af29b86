"""The dependency engine: lanes of worker threads that run tasks in the order of their variables.

The engine: what its users call.

How soon a thread that mostly sleeps gets back a core on which another one computes.

Since Linux 6.6 (the scheduler EEVDF) a thread that wakes up waits until the running one has used up its slice, some
3 ms, and meanwhile messages lie about. Since 6.12 a thread may ask for shorter slices than others; it then gets its
share of the core in smaller pieces, but as soon as it wakes up. Measured with a reduction of 16 MiB over 1 Gbit/s
beside backward, a core a rank: a step took 274 ms without and 235 ms with it (docs/benchmarks.md, "Overlap").

Source: Stoica and Abdel-Wahab, "Earliest eligible virtual deadline first", 1995; sched_setattr(2).

What runs the tasks of a schedule: the threads of the lanes, or, in synchronous mode, whoever pushes.

The engine of this process, and what becomes of all engines when it exits or forks.

Trace.

What this rank did when, kept in memory while it runs; `hpcdp.train.chrome_trace` makes one file of all ranks.
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

from ..core.checks import not_copied, one_of
from ..errors import ConfigError, to_stderr, whole_number
from .scheduler import DeferredTask, Failure, Lane, Task, TaskSchedule, Variable, silent_bell, throw

MAIN = "main"
"""The lane of the thread that trains."""

CAPACITY = 1 << 18
"""Slices and counts that a trace keeps unless it is told otherwise, 60 to 100 MB."""


class Slice(NamedTuple):
    """Something that took its time on a lane, or an instant, whose end is its start."""

    name: str
    lane: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] | None
    """What else there is to say: strings and numbers."""
    nests: bool
    """Whether others of its lane may lie in it; those of a lane that does several things at a time may not."""


class Count(NamedTuple):
    """The value of a number from ``time_ns`` on."""

    name: str
    time_ns: int
    value: float


class Ranges(Protocol):
    """What marks ranges for a profiler of the device: the module ``cupy.cuda.nvtx``."""

    def RangePush(self, name: str) -> object:
        """Begin a range within the one that is open on this thread."""

    def RangePop(self) -> object:
        """End the innermost."""


class Trace:
    """What one rank of a world did. Any thread may add to it; nothing here talks to other ranks.

    A world that is traced keeps it: ``world.kept.get(Trace)`` is None where nothing is traced. Ask once, when
    something is made, and not in each step.

    Args:
        capacity: how many slices and counts are kept; later ones are only counted, in `dropped`.
        clock: integers of nanoseconds; the engine's slices are on the clock of `time.perf_counter_ns`.
        ranges: told of every `span` as well, see `nvtx`.

    Raises:
        ConfigError: ``capacity`` is no integer from 1 on.
    """

    def __init__(
        self,
        capacity: int = CAPACITY,
        clock: Callable[[], int] = time.perf_counter_ns,
        ranges: Ranges | None = None,
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
        """Add what went on from ``start_ns`` to ``end_ns`` (the same: an instant); an `engine.Observer`.

        Slices of a lane other than "main" may overlap; they are drawn below each other.

        Args:
            args: shown with the slice: strings and numbers.
        """
        if self._has_room():
            self.slices.append(Slice(name, lane, start_ns, end_ns, args or None, lane == MAIN))

    def span(self, name: str, lane: str = MAIN, **args: Any) -> Span:
        """A context that becomes a slice when it is left, also by an exception; spans of a lane may be nested."""
        return Span(self, name, lane, args)

    def count(self, name: str, value: float) -> None:
        """``value`` is that of the number ``name`` from now on; drawn as a curve."""
        if self._has_room():
            self.counts.append(Count(name, self.clock(), value))

    def end(self) -> None:
        """Keep nothing more; what threads still add is not counted as dropped either."""
        self._ended = True

    def _has_room(self) -> bool:
        if self._ended:
            return False
        if len(self.slices) + len(self.counts) < self._capacity:
            return True
        with self._lock:
            self.dropped += 1
        return False

    def _add(self, each: Slice) -> None:
        if self._has_room():
            self.slices.append(each)


class Span:
    """See `Trace.span`."""

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
        self._trace._add(Slice(self._name, self._lane, self._start_ns, end_ns, self._args or None, True))


def nvtx() -> Ranges | None:
    """The module that marks ranges for profilers of NVIDIA's GPUs; None where it is missing."""
    try:
        module: Any = importlib.import_module("cupy.cuda.nvtx")
        return module
    except ImportError:
        return None


SLICE_NS = 100_000
"""The shortest that Linux grants."""

_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275), "ppc64le": (355, 356)}
"""Of the system calls sched_setattr and sched_getattr, for which glibc has no functions before 2.41."""

_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period."""

_ORDINARY, _RUNTIME = 0, 5


def ask_for_short_slices() -> bool:
    """Let the calling thread have its share of a core soon and in small pieces; its priority stays as it is.

    Returns:
        Whether the system took the wish. Before Linux 6.12 it does, and nothing changes.
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
"""The first and the longest nap between calls of a lane's ``idle``; each is twice as long as the one before."""

Observer = Callable[[str, str, int, int], object]
"""``observer(name, lane, start_ns, end_ns)``, on the clock of `time.perf_counter_ns`."""


_living: weakref.WeakSet[Workers] = weakref.WeakSet()


def living_workers() -> list[Workers]:
    """Those of all engines of this process that may have threads; threads outlive an engine that nobody holds."""
    return list(_living)


class Workers:
    """Runs tasks, tells the schedule of their end, and the observer when."""

    def __init__(self, schedule: TaskSchedule) -> None:
        self.observer: Observer | None = None
        self._schedule = schedule
        self._turn = threading.Lock()  # of one pusher to run tasks inline
        _living.add(self)

    def start(self, lane: Lane) -> None:
        """Start a lane's threads; more than there may be end by themselves."""
        for number in range(lane.limit):
            suffix = f"-{number}" if lane.limit > 1 else ""
            name = f"hpcdp-{lane.name}{suffix}"
            threading.Thread(target=self._run_lane, args=(lane,), name=name, daemon=True).start()
        lane.started = True

    def _run_lane(self, lane: Lane) -> None:
        schedule = self._schedule
        with schedule.lock:
            if schedule.closed or len(lane.threads) == lane.limit:
                return  # two threads have pushed the lane's first task, or Ctrl-C came while its threads were started
            lane.threads.append(threading.current_thread())
            schedule.own[get_ident()] = lane
        if lane.idle is not None:  # it naps, and finds what has come meanwhile
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
        """Wait until the bell, which lies among those of the lane, is rung, or a nap is over. Returns the next nap."""
        pending = len(lane.deferred)
        if lane.idle is None or not self._ask(lane, lane.idle):
            bell.acquire()
            return NAPS_S[0]
        if len(lane.deferred) < pending:
            nap_s = NAPS_S[0]
        if not bell.acquire(timeout=nap_s):
            with self._schedule.lock:
                if bell in lane.asleep:
                    lane.asleep.remove(bell)
                else:
                    bell.acquire()
        return min(2 * nap_s, NAPS_S[1])

    def _ask(self, lane: Lane, idle: Callable[[], object]) -> bool:
        """Whether something is under way."""
        try:
            return bool(idle())
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
        """Run a task, unless something that it reads is spoilt. Returns why it has failed."""
        for var in task.reads:
            if var.failure is not None:
                task.fn = None
                return var.failure
        observer = self.observer
        start_ns = time.perf_counter_ns() if observer is not None else 0
        # Frames of the traceback lead to this one: a local variable with the failure would keep all of them alive.
        try:
            if isinstance(task, DeferredTask):
                task.name, task.start_ns = task.label(), start_ns
                task.fn(partial(self._done, task))
            else:
                task.fn()
            return None
        except BaseException as error:  # carried to whoever waits, KeyboardInterrupt too
            error.add_note(task.pushed_by())
            return Failure(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        finally:
            if observer is not None and not task.deferred:
                self._observe(task, start_ns)
            task.fn = None  # what the closure holds can go now

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
        observer = self.observer  # which another thread may take away
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
        """For a child made by fork, where they do not exist: what waits or pushes is told of a shutdown."""
        self._schedule.forget()
        self._turn = threading.Lock()

    def run_inline(self) -> None:
        """Run all that may run. What a task pushes runs after it, within the outermost push."""
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


def _abandon(schedule: Callable[[], TaskSchedule | None]) -> None:
    """Let the threads of an engine that is gone end; they hold its schedule, so without one there are none."""
    if (found := schedule()) is not None:
        found.abandon()


def _asked_in_environment() -> bool:
    asked = os.environ.get("HPCDP_ENGINE") or "threads"
    return one_of("Engine", "HPCDP_ENGINE", asked, ("synchronous", "threads")) == "synchronous"


EXIT_LIMIT_S = 5.0
"""So long a process that exits waits for the tasks that run; what has not started is dropped."""

_default: Engine | None = None
_default_lock = threading.Lock()


def default_engine() -> Engine:
    """The engine of this process, made at first use, with the lane "io"; a child made by fork gets one of its own."""
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
