"""What runs the tasks of a schedule: the threads of the lanes, or, in synchronous mode, whoever pushes."""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident

from ..errors import ConfigError, to_stderr
from .schedule import Schedule
from .slices import ask_for_short_slices
from .tasks import DeferredTask, Failure, Lane, Task, silent_bell

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

    def __init__(self, schedule: Schedule) -> None:
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
