"""Resumable algorithms (`Steps`) that progress together in one thread.

An algorithm is a generator. It starts the messages of a stage, yields their requests, and is resumed when all of them
are complete; its local variables are its state. It reads from top to bottom like a blocking one, yet many can progress
together, in any order.

Segments of a message are pipelined in the same way: each lane of segments is an algorithm with a tag of its own. A
`TaskGroup` is a request that is complete when all its algorithms have ended, so that one stage can consist of many
others.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from ..core.arrays import Array
from ..engine.engine import ADVANCED
from ..errors import UnsupportedError, WorldAborted, interrupts
from .communicator import LANE_BITS, OPERATION_BITS, PolledRequest, Request, Steps, StepsTo, make_tag, split, wait_for
from .consistency import Call, Calls
from .node_messages import Mailbox
from .watchdog import OWN, Watchdog, is_of_all
from .world import World, weakly

T = TypeVar("T")

TAGS = 1 << LANE_BITS
"""Tags of one operation, the maximum number of its lanes of segments."""

WAIT_FOR = "wait for "
"""The beginning of the name of an operation in progress, for the watchdog."""
YIELDS = 200
"""Tests, each after a yield of the core, before a thread that waits for an operation naps: some 0.2 ms."""
PATIENCE_S = 1.0
"""Seconds that count as waiting time between two tests."""

_abandoned: list[object] = []
"""Requests abandoned after an error, into whose arrays MPI may still write."""


def run_until_complete(steps: StepsTo[T]) -> T:
    """Run one algorithm to its end, blocking; return its result."""
    while True:
        try:
            stage = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            for request in reversed(stage):  # receives are last: waiting for one detects a message of another call
                request.wait()
        except BaseException:
            _abandoned.append((stage, steps))
            raise


class Operation(Generic[T]):
    """A nonblocking operation in progress; made by `ProgressEngine.start`.

    The watchdog observes it for as long as its owner tests it in vain. At most `PATIENCE_S` per test count as waiting
    time, because an owner that tests rarely does other work.
    """

    value: T
    """The result, once it is complete."""
    is_over = False
    """True once it is complete or has failed."""
    error: BaseException | None = None
    """Why it has failed."""
    convert: Callable[[T], Any] | None = None
    """Makes what `wait` returns of the result, for callers whose arrays are of another kind; `test` calls it once the
    operation is complete, until it succeeds.
    """
    spin: Callable[[], object] | None = None
    """Polls in a kernel for what it waits for."""
    may_nap = False
    """True if the progress lane may nap before it polls."""
    waited_s = 0.0
    _tested_at: float | None = None

    def __init__(self, progress: ProgressEngine, call: tuple[Any, ...]) -> None:
        self.call, self._progress = call, progress
        self._callbacks: list[Callable[[], object]] = []

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` when the operation is over, in the thread that has completed it; at once if it is over.

        Callbacks are called in the order in which they were added.

        The callback may start operations, but must not wait for them.
        """
        self._callbacks.append(callback)
        if self.is_over:
            self.run_callbacks()

    def run_callbacks(self) -> None:
        """Call the callbacks that have not been called, each once."""
        while (callback := _next(self._callbacks)) is not None:
            callback()

    def has_ended(self) -> bool:
        """Return whether it is complete, or raise its error, without advancing any operation."""
        if self.error is not None:
            raise self.error
        return self.is_over

    def test(self) -> bool:
        """Return whether it is complete; never block.

        Raises:
            HpcdpError: the operation has failed.
        """
        watchdog, now = self._progress.watchdog, time.monotonic()
        if self._tested_at is not None:
            self.waited_s += min(now - self._tested_at, PATIENCE_S)
        self._tested_at = now
        done = True
        try:
            if not self.is_over:
                self._progress.advance_all()
            done = self.has_ended()
        finally:
            if not done:
                if watchdog.tested is None or watchdog.tested.waited_s < self.waited_s:
                    watchdog.tested = self
            elif watchdog.tested is self:
                watchdog.tested = None
        if done and self.convert is not None:
            self.value = self.convert(self.value)
            self.convert = None
        return done

    def watch(self) -> None:
        """Let the watchdog observe it until `unwatch`, because its owner waits for it without testing it."""
        self._progress.watchdog.enter(self.call)

    def unwatch(self) -> None:
        """End what `watch` began; nothing if it has not."""
        self._progress.watchdog.leave(self.call)

    def end(self, error: BaseException | None = None) -> None:
        """Note that it is over, with its `value` or an error.

        What interrupts the thread that advances it is an error of that thread; the operation is incomplete for good.
        """
        progress = self._progress
        if error is not None:
            name = self.call[0].removeprefix(WAIT_FOR)
            if is_of_all(self.call):
                progress.watchdog.abandon(name, error)
            if interrupts(error):
                got = f"{type(error).__name__} in the thread that advanced it"
                error = WorldAborted(name, expected="the operation's end", got=got)
        self.error, self.is_over = error, True
        if progress.watchdog.tested is self:  # another request's test may have ended it
            progress.watchdog.tested = None
        if self._callbacks:
            progress.note_end(self)

    def wait(self) -> T:
        """Block until it is complete, and return its result; poll in the kernels first, as a blocking call does.

        Raises:
            HpcdpError: the operation has failed.
        """
        if not self.is_over:
            self._progress.spin(self)
        if self.is_over and self.convert is None:
            self.has_ended()
        else:
            wait_for(self.test, YIELDS)
        return self.value


NOT_YET: Any = object()
"""The answer of a poll, see `ProgressEngine.start_polled`, before there is a result."""


class PolledOperation(Operation[T]):
    """A nonblocking operation without stages, in the place of a task; see `ProgressEngine.start_polled`."""

    stages = 0
    may_nap = True

    def __init__(
        self, progress: ProgressEngine, call: tuple[Any, ...], poll: Callable[[], T], spin: Callable[[], object] | None
    ) -> None:
        super().__init__(progress, call)
        self._poll, self.spin = poll, spin

    def watch(self) -> None:
        """See `Operation.watch`; the progress lane polls from now on, because nobody tests the operation."""
        super().watch()
        self._progress.wake()

    def advance(self) -> bool:
        """Poll; return whether the operation is over."""
        if self.is_over:
            return True
        try:
            value = self._poll()
            if value is not NOT_YET:
                self.value = value
                self.end()
        except BaseException as error:
            self.end(error)
            if interrupts(error):
                raise
        return self.is_over


class RunningTask:
    """An algorithm and the requests that it waits for."""

    __slots__ = ("_steps", "_waiting", "stages")

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.stages = 0
        """The number of stages that have begun."""
        self._waiting: list[Request] = []

    def advance(self) -> bool:
        """Continue as far as the requests allow; return whether the algorithm has ended."""
        waiting = self._waiting
        while True:
            while waiting:
                try:
                    if not waiting[-1].test():
                        return False
                except BaseException as error:  # also Ctrl-C: without its segment the operation is not complete
                    return self._fail(error)
                waiting.pop()
            stage = next(self._steps, None)
            self.stages += 1
            if stage is None:
                return True
            waiting.extend(stage)

    def _fail(self, error: BaseException) -> bool:
        """Raise ``error`` in the algorithm at its wait; return whether that has ended it."""
        _abandoned.append(self._waiting)
        self._waiting = []
        has_ended = False
        try:
            self._waiting = list(self._steps.throw(error))
        except StopIteration:
            has_ended = True
        if interrupts(error):
            raise error
        return has_ended


class TaskGroup:
    """Algorithms that progress together, in any order; itself a request."""

    def __init__(self, machines: Iterable[Steps]) -> None:
        self.running: list[RunningTask | PolledOperation[Any]] = [RunningTask(steps) for steps in machines]

    def add(self, steps: Steps) -> None:
        """Start one more algorithm."""
        machine = RunningTask(steps)
        if not machine.advance():
            self.running.append(machine)

    def test(self) -> bool:
        """Advance every algorithm; return whether all have ended."""
        if self.running:
            try:
                self.running = [machine for machine in self.running if not machine.advance()]
            except BaseException:
                _abandoned.append(self.running)
                raise
        return not self.running

    def wait(self) -> None:
        """Block until all have ended."""
        wait_for(self.test)


def together(machines: Sequence[Steps]) -> Steps:
    """Run algorithms as one; a single one keeps its stages, so that a blocking call waits for it without naps."""
    if len(machines) == 1:
        yield from machines[0]
    else:
        yield [TaskGroup(machines)]


def all_ended(machines: Sequence[Steps]) -> Steps:
    """Run algorithms that make collective calls, begun in this order, all to their ends; then raise the first error.

    Every rank must make each of the calls, also after one that has failed.
    """
    errors: list[Exception] = []

    def caught(machine: Steps) -> Steps:
        try:
            yield from machine
        except Exception as error:
            if interrupts(error):
                raise
            errors.append(error)

    yield [TaskGroup(map(caught, machines))]
    if errors:
        raise errors[0]


_MOST_CALLS = 64
"""The most collective calls that an operation makes when it begins."""

_LANE = "progress"
"""The name of the engine's lane on which a world's nonblocking operations progress."""

_IDLE_POLLS = 30
"""Polls of the lane, at most 1 ms apart, after the last operation of `ProgressEngine.start_polled`."""

_TURN_S = 1e-3
"""How long a thread that waits for an operation waits for another one to end its poll: the lane polls for 0.3 ms."""

LANES = 16
"""Segments in flight at once: while one is added up, others keep the link busy."""

MESSAGE_NBYTES = 60 << 10
"""The length of a pipelined message, unless longer ones are faster. Over TCP, Open MPI and MPICH send up to 64 KB at
once; longer messages wait until the receiver, which may be busy or asleep, has answered.
"""
_FULL = 8
"""Messages that keep a pipeline full."""


def messages(total_nbytes: float, nbytes: int | None = None) -> int:
    """Return the number of messages of at most about ``nbytes``, default `MESSAGE_NBYTES`, for ``total_nbytes``.

    There are more and shorter ones, of `MESSAGE_NBYTES` or more, if they are too few to keep a pipeline full.
    """
    short = max(1, -int(-total_nbytes // MESSAGE_NBYTES))
    return short if nbytes is None else max(min(short, _FULL), -int(-total_nbytes // nbytes))


def segments(x: Array, nbytes: int) -> list[Array]:
    """Split ``x``, shape ``(count,)``, into nearly equal pieces of at most about ``nbytes`` bytes; at least one."""
    return split(x, max(1, -(-x.nbytes // nbytes)))


def in_lanes(
    items: Sequence[T], steps: Callable[[T, int], Steps], tag: int, most: int = LANES, turn: Request | None = None
) -> list[Steps]:
    """Return algorithms that run ``steps(item, tag)`` for all ``items``, at most ``most`` at a time.

    Each lane has its own tag and takes every ``most``-th item, one after another. Before each item it waits for
    ``turn``, if given.
    """
    most = min(most, TAGS, len(items))

    def one_after_another(lane: int) -> Steps:
        for item in items[lane::most]:
            if turn is not None:
                yield [turn]
            yield from steps(item, tag + lane)

    return [one_after_another(lane) for lane in range(most)]


class ProgressEngine:
    """The operations in progress of a world, and the tags that distinguish them.

    Operations of all worlds that are parts of one world progress together, because ranks may wait for them in different
    orders.
    """

    def __init__(self, world: World) -> None:
        self.watchdog = Watchdog.of(world)
        self.calls = Calls.of(world)
        self.prepared: set[object] = set()
        """Functions that `prepare` has called in this world."""
        self._signatures = world.comm.signatures
        self.active = TaskGroup([])
        """The operations in progress."""
        self._not_begun: deque[object] = deque()
        """Tokens of operations that have not begun, because they wait for another one, or for those before them."""
        self._num_begun = 0
        """The number of operations of all ranks that have begun and not ended."""
        self._over: list[Operation[Any]] = []
        """Operations that are over, and whose callbacks have not been called."""
        self.turn = threading.RLock()
        """Held by the thread that advances `active`: worlds may be used by different threads."""
        self._round = 0
        self._world = weakref.ref(world)
        self._mailbox: Mailbox | None = world.kept.get(Mailbox)
        self._has_lane = False
        self._is_polled = False
        """True while the lane polls between naps, False while it sleeps until it is woken."""
        self._lingers = False
        """True while the lane polls although no operation is in progress."""
        self._polls_left = 0
        """How often it does so before it sleeps."""
        self.is_awaited = False
        """True while operations are started that the caller waits for at once: they poll for other ranks of the node in
        the kernels before they wake the progress lane."""
        self._all: list[weakref.ref[ProgressEngine]] = world.common.setdefault(ProgressEngine, [])
        self._all[:] = [reference for reference in self._all if reference() is not None]
        self._all.append(weakref.ref(self))
        world.under_way.add(self.finish)

    @classmethod
    def of(cls, world: World) -> ProgressEngine:
        """Return the engine of ``world``; every rank must make the first call."""
        return world.kept.get(cls) or world.keep(cls, lambda: cls(world))

    def tag(self, signature: int) -> int:
        """Return the first tag of the latest call's operation, equal on all ranks, which call in one order.

        Args:
            signature: a hash of what ranks must agree on; messages with different signatures never match.
        """
        round_, number = divmod(self.calls.number, 1 << OPERATION_BITS)
        if round_ != self._round:
            self._round = round_
            self.finish()  # the tags start again, so earlier operations must have ended
        return make_tag(signature % self._signatures, number)

    def prepare(self, make: Callable[[World], object], world: World, call: Call) -> None:
        """Call ``make(world)``, in which all ranks communicate, unless an earlier call has; every rank must call.

        Earlier operations end first, and all ranks must have made the same ``call``.
        """
        if make not in self.prepared:
            self.finish()
            self.calls.agree(call)
            make(world)
            self.prepared.add(make)

    def ended(self, name: str, value: T) -> Operation[T]:
        """Return an operation that is complete, with its result."""
        operation: Operation[T] = Operation(self, (name,))
        operation.value, operation.is_over = value, True
        return operation

    def start(
        self,
        name: str,
        steps: StepsTo[T],
        x: object,
        peers: Sequence[int] | None = None,
        after: Operation[Any] | None = None,
    ) -> Operation[T]:
        """Start an algorithm. It progresses on the world's progress lane, and whenever any request of it is tested.

        Without MPI's THREAD_MULTIPLE it progresses during tests only. An error ends this algorithm alone and is raised
        by its request; at once if no algorithm is possible.

        Args:
            name: the operation's name in reports.
            steps: the algorithm; its first steps run at once.
            x: the array that reports describe.
            peers: for an operation that not all ranks start, the one rank that it waits for, or none if that may be any
                rank. None if all ranks start it.
            after: an operation whose end the first steps wait for, or whose error they raise. So do operations of all
                ranks that are started later, which keep their order.
        """
        waits = after is not None or (bool(self._not_begun) and peers is None)
        operation: Operation[T] = Operation(self, _watched(name, x, peers))

        def to_its_end() -> Steps:
            try:
                if waits:
                    yield from self._turn_after(after)
                self._num_begun += peers is None
                try:
                    operation.value = yield from steps
                finally:
                    self._num_begun -= peers is None
            except GeneratorExit:
                raise  # the engine is gone
            except BaseException as error:
                operation.end(error)
                if interrupts(error):
                    raise
            else:
                operation.end()

        memory = self.calls.memory if self.is_awaited else None
        with self.turn:
            if memory is not None:
                memory.spin()
            try:
                self.active.add(to_its_end())
            finally:
                if memory is not None:
                    memory.wait_shortly(False)
            if not operation.is_over and (self._lingers or not self._is_polled):
                self._poll_on_lane()
        self._call_back()
        if isinstance(operation.error, UnsupportedError):
            raise operation.error
        return operation

    def start_polled(
        self,
        name: str,
        poll: Callable[[], T],
        x: object,
        peers: Sequence[int] | None = None,
        spin: Callable[[], object] | None = None,
    ) -> Operation[T]:
        """Start an operation that ends with the result of ``poll()``, which returns `NOT_YET` before.

        It progresses as an operation of `start`, with less work around it. If such operations follow each other, the
        progress lane is not woken for each, but polls after a nap of at most 1 ms: most of them are over before, and a
        thread that wakes takes the GIL from the one that waits.

        Args:
            name: as for `start`.
            poll: never blocks; called by one thread at a time.
            x: as for `start`.
            peers: as for `start`.
            spin: polls in a kernel for what the operation waits for; None: for a message.
        """
        if spin is None and self._mailbox is not None:
            spin = self._mailbox.spin
        operation = PolledOperation(self, _watched(name, x, peers), poll, spin)
        with self.turn:
            self.add_polled(operation)
        return operation

    def add_polled(self, operation: PolledOperation[Any]) -> None:
        """Start an operation, see `start_polled`; the caller holds `turn`."""
        self._polls_left = _IDLE_POLLS
        self.active.running.append(operation)
        if not self._is_polled or (self._lingers and self._has_gpu()):
            self._poll_on_lane()

    @property
    def may_begin(self) -> bool:
        """True if an operation of all ranks need not wait for earlier ones to begin."""
        return not self._not_begun

    @property
    def has_collectives(self) -> bool:
        """True while an operation of all ranks is in progress, for which others may wait."""
        polled = (task for task in self.active.running if isinstance(task, PolledOperation))
        return bool(self._num_begun or self._not_begun) or any(is_of_all(task.call) for task in polled)

    def wake(self) -> None:
        """Let the progress lane poll at once, if it naps or sleeps."""
        with self.turn:
            self._poll_on_lane()

    def note_end(self, operation: Operation[Any]) -> None:
        """Let the callbacks of an operation that is over be run when ``turn`` is released."""
        self._over.append(operation)

    def _turn_after(self, first: Operation[Any] | None) -> Steps:
        """Wait until ``first`` has ended, and all operations that were started before have begun."""
        token = object()
        self._not_begun.append(token)

        def may_begin() -> bool:
            if self._not_begun[0] is not token or not (first is None or first.has_ended()):
                return False
            round_ = self.calls.number + _MOST_CALLS >> OPERATION_BITS
            if round_ == self._round:
                return True
            if self._num_begun:
                return False
            self._round = round_  # here, because `tag` would finish this operation, too
            self.calls.number = max(self.calls.number, round_ << OPERATION_BITS)
            return True

        try:
            yield [PolledRequest(may_begin)]
        finally:
            self._not_begun.remove(token)

    def run(self, name: str, steps: StepsTo[T], x: object, peers: Sequence[int] | None = None) -> T:
        """Run an algorithm to its end, while operations that are in progress go on; return its result.

        Arguments as for `start`.
        """
        if self.active.running:
            return self.start(name, steps, x, peers).wait()
        if peers is None:
            with self.watchdog.watching(name, x):
                return run_until_complete(steps)
        call = name, x, list, OWN, *peers
        self.watchdog.enter(call)
        try:
            return run_until_complete(steps)
        finally:
            self.watchdog.leave(call)

    def finish(self) -> None:
        """Block until no operation is in progress; needed before a blocking call, during which none would progress."""
        if self.active.running:
            wait_for(self.advance_all)

    def spin(self, operation: Operation[Any]) -> None:
        """Advance the operations of this world, and poll for other ranks of the node, without the GIL, if none ends.

        For a thread that waits for ``operation``, with a core of its own. While another thread advances the operations,
        it returns at once, or within `_TURN_S` if the progress lane may nap next, see `start_polled`.
        """
        memory, spin = self.calls.memory, operation.spin
        if not self.turn.acquire(False) and not (operation.may_nap and self.turn.acquire(timeout=_TURN_S)):
            return
        try:
            if memory is not None:
                memory.spin()
            if not self.active.test() and not operation.is_over and spin is not None and spin():
                self.active.test()
        finally:
            if memory is not None:
                memory.wait_shortly(False)
            self.turn.release()
            if self._over:
                self._call_back()

    def _poll_on_lane(self) -> None:
        """Wake the progress lane; the caller holds `turn`."""
        world = self._world()
        if world is None or not world.concurrent:
            return
        if not self._has_lane:
            world.engine.add_lane(_LANE, idle=weakly(self._poll))
            self._has_lane = True
        self._is_polled, self._lingers = True, False
        device = world.gpu_of_messages
        # A task that held the world would keep it alive until the lane has run it.
        world.engine.push(list if device is None else device.use, lane=_LANE, name=_LANE)

    def _has_gpu(self) -> bool:
        """Return whether a message has been in a GPU's memory, which the lane must select."""
        world = self._world()
        return world is not None and world.gpu_of_messages is not None

    def _poll(self) -> object:
        """Advance the operations of this world, on the lane; return whether some are in progress, or `ADVANCED`."""
        if not self.turn.acquire(blocking=False):
            return True
        memory = self.calls.memory
        try:
            began = self._stages()
            if memory is not None:
                memory.wait_shortly(True)  # in the kernels, without the GIL
            self._lingers = self.active.test()
            self._polls_left -= self._lingers
            self._is_polled = not self._lingers or self._polls_left > 0
            return self._is_polled and (began == self._stages() or ADVANCED)
        finally:
            if memory is not None:
                memory.wait_shortly(False)
            self.turn.release()
            self._call_back()

    def _stages(self) -> int:
        return sum(task.stages for task in self.active.running)

    def advance_all(self) -> bool:
        """Advance every algorithm, also of other worlds; return whether all of this world's have ended."""
        for reference in self._all:
            progress = reference()
            if progress is not None and progress.active.running and progress.turn.acquire(blocking=False):
                try:
                    progress.active.test()
                finally:
                    progress.turn.release()
                    progress._call_back()
        return not self.active.running

    def _call_back(self) -> None:
        """Run the callbacks of operations that are over; not while `turn` is held, since they may start operations."""
        while (operation := _next(self._over)) is not None:
            operation.run_callbacks()


def _watched(name: str, x: object, peers: Sequence[int] | None) -> tuple[Any, ...]:
    """Return an operation as `Watchdog.watching` describes calls; arguments as for `ProgressEngine.start`."""
    return (f"{WAIT_FOR}{name}", x) if peers is None else (name, x, list, OWN, *peers)


def _next(queue: list[T]) -> T | None:
    """Remove and return the first item of a short queue that other threads use, too; None if there is none."""
    try:
        return queue.pop(0) if queue else None  # an exception takes 1 us
    except IndexError:
        return None
