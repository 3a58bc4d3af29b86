"""Who may run now, and who waits for it: everything that the engine's lock guards."""

from __future__ import annotations

import threading
from heapq import heappop, heappush
from threading import get_ident

from ..errors import ConfigError
from .tasks import DeferredTask, Failure, Lane, Task, Variable, Waiter, ring_last, silent_bell

_ENTERED = -1  # of Task.taken: the task is its lane's now
_LOOK_S = 0.5
_MOST_UNSEEN = 100  # each holds the local variables of what has failed


class Schedule:
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
