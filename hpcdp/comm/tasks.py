"""Tasks: resumable exchanges of messages, which progress together.

Collectives under way: state machines that are resumed whenever what they wait for has come.

A machine is a generator. It posts the messages of a stage together, yields their requests, and is resumed when all of
them are complete; a local variable is its state. So an algorithm reads from top to bottom like a blocking one, and yet
many of them can progress together, in any order, in one thread.

Segments are pipelined in the same way: each lane of segments is a machine with a tag of its own, `TaskGroup` is a
request that is complete when all its machines have ended, and so one stage of a machine can be a whole set of others.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from ..core.arrays import Array
from ..errors import UnsupportedError
from .communicator import LANE_BITS, OPERATION_BITS, Request, Steps, make_tag, split, wait_for
from .consistency import Calls
from .watchdog import Watchdog
from .world import World

T = TypeVar("T")

TAGS = 1 << LANE_BITS
"""Tags of one operation: as many lanes of segments may it have."""

PATIENCE_S = 1.0

_abandoned: list[object] = []
"""Requests that nobody waits for any more after an error: MPI may still write into their arrays."""


def run_until_complete(steps: Steps) -> None:
    """Run one machine to its end, blocking."""
    for stage in steps:
        try:
            for request in reversed(stage):  # receives stand last: who waits for one sees what has come instead
                request.wait()
        except BaseException:
            _abandoned.append((stage, steps))
            raise


class Watched:
    """That ``test()`` has become true, under the eyes of a watchdog as long as somebody asks again and again.

    Who asks seldom, between other things, has waited for no longer than `PATIENCE_S` each time.
    """

    def __init__(self, test: Callable[[], bool], watchdog: Watchdog, x: np.ndarray) -> None:
        self.call = "wait for an iallreduce", x
        self.waited_s = 0.0
        self._test, self._watchdog = test, watchdog
        self._asked: float | None = None

    def test(self) -> bool:
        """Whether it has."""
        watchdog, now = self._watchdog, time.monotonic()
        if self._asked is not None:
            self.waited_s += min(now - self._asked, PATIENCE_S)
        self._asked = now
        done = True
        try:
            done = self._test()
        finally:
            if not done:
                if watchdog.asked is None or watchdog.asked.waited_s < self.waited_s:
                    watchdog.asked = self
            else:
                self.settled()
        return done

    def settled(self) -> None:
        """It is asked for in vain no longer."""
        if self._watchdog.asked is self:
            self._watchdog.asked = None

    def wait(self) -> None:
        """Block until it has."""
        wait_for(self.test)


class RunningTask:
    """One machine and the requests that it waits for."""

    __slots__ = ("_steps", "_waiting")

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._waiting: list[Request] = []

    def advance(self) -> bool:
        """Go on as far as the requests allow; whether that was to the end."""
        waiting = self._waiting
        while True:
            while waiting:
                try:
                    if not waiting[-1].test():
                        return False
                except BaseException as error:  # Ctrl-C, too: what waits for a segment is not complete without it
                    return self._fail(error)
                waiting.pop()
            stage = next(self._steps, None)
            if stage is None:
                return True
            waiting.extend(stage)

    def _fail(self, error: BaseException) -> bool:
        """Raise ``error`` where the machine waits; whether that has ended it."""
        _abandoned.append(self._waiting)
        self._waiting = []
        try:
            self._waiting = list(self._steps.throw(error))
        except StopIteration:
            return True
        return False


class TaskGroup:
    """Machines that progress together, in any order; itself a request."""

    def __init__(self, machines: Iterable[Steps]) -> None:
        self.running = [RunningTask(steps) for steps in machines]

    def add(self, steps: Steps) -> None:
        """Start one more machine."""
        machine = RunningTask(steps)
        if not machine.advance():
            self.running.append(machine)

    def test(self) -> bool:
        """Give every machine a turn; whether all have ended."""
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
    """The machines as one; a single one keeps its stages, so that a blocking call waits for it without naps."""
    if len(machines) == 1:
        yield from machines[0]
    else:
        yield [TaskGroup(machines)]


LANES = 16
"""So many segments are on their way at once: while one is added up, others keep the link busy."""

MESSAGE_NBYTES = 60 << 10
"""How long a message of a pipeline should be. Over TCP, Open MPI and MPICH send up to 64 KB at once; longer ones wait
until the receiver, which may be busy or asleep, has answered."""


def segments(x: Array, nbytes: int) -> list[Array]:
    """``x``, shape ``(count,)``, in nearly equal pieces of at most about ``nbytes`` bytes; at least one."""
    return split(x, max(1, -(-x.nbytes // nbytes)))


def in_lanes(
    items: Sequence[T], steps: Callable[[T, int], Steps], tag: int, most: int = LANES, turn: Request | None = None
) -> list[Steps]:
    """Machines that run ``steps(item, tag)`` for all ``items``, at most ``most`` at a time, each with a tag of its own.

    The machine of a lane takes every ``most``-th item, one after another; each waits for its ``turn``, if there is one.
    """
    most = min(most, TAGS, len(items))

    def one_after_another(lane: int) -> Steps:
        for item in items[lane::most]:
            if turn is not None:
                yield [turn]
            yield from steps(item, tag + lane)

    return [one_after_another(lane) for lane in range(most)]


class ProgressEngine:
    """The operations of a world that have been started and have not ended, and the tags that tell them apart.

    Those of all worlds that are parts of one progress together: ranks may wait for them in different orders.
    """

    def __init__(self, world: World) -> None:
        self.watchdog = Watchdog.of(world)
        self.calls = Calls.of(world)
        self.prepared: set[object] = set()
        """What algorithms have had made in this world, see `Algorithm.prepare`."""
        self._signatures = world.comm.signatures
        self._active = TaskGroup([])
        self._turn = threading.RLock()
        """Of who lets `_active` progress: worlds may be used by different threads."""
        self._round = 0
        self._all: list[weakref.ref[ProgressEngine]] = world.common.setdefault(ProgressEngine, [])
        self._all[:] = [each for each in self._all if each() is not None]
        self._all.append(weakref.ref(self))
        world.under_way.add(self.finish)

    @classmethod
    def of(cls, world: World) -> ProgressEngine:
        """That of ``world``; every rank must call the first time."""
        return world.kept.get(cls) or world.keep(cls, lambda: cls(world))

    def tag(self, signature: int) -> int:
        """Return the first tag of the latest call's operation, the same on all ranks, which call in one order.

        Args:
            signature: of what ranks must agree on; the messages of those that do not never meet.
        """
        round_, number = divmod(self.calls.number, 1 << OPERATION_BITS)
        if round_ != self._round:
            self._round = round_
            self.finish()  # whoever has the tags that come now for the second time
        return make_tag(signature % self._signatures, number)

    def start(self, steps: Steps, x: np.ndarray) -> Request:
        """Let a machine that reduces ``x`` progress with the others whenever one of their requests is asked for.

        An error ends this machine alone, and is raised to whoever asks for it; at once where there is no way to do it.
        """
        ended = False
        failure: BaseException | None = None

        def to_its_end() -> Steps:
            nonlocal ended, failure
            try:
                yield from steps
            except Exception as error:
                failure = error
            except BaseException as error:  # Ctrl-C ends the wait, and the operation is not complete
                failure = error
                raise
            finally:
                ended = True
                watched.settled()  # others may have ended it, and nobody need ask again

        def test() -> bool:
            if not ended:
                self._go_on()
            if failure is not None:
                raise failure
            return ended

        watched = Watched(test, self.watchdog, x)
        with self._turn:
            self._active.add(to_its_end())
        if isinstance(failure, UnsupportedError):
            raise failure
        return watched

    def finish(self) -> None:
        """Block until no operation is under way: before a blocking call, during which none would progress."""
        if self._active.running:
            wait_for(self._go_on)

    def _go_on(self) -> bool:
        """Give every machine a turn, also those of other worlds; whether all of this one's have ended."""
        for each in self._all:
            progress = each()
            if progress is not None and progress._active.running and progress._turn.acquire(blocking=False):
                try:
                    progress._active.test()
                finally:
                    progress._turn.release()
        return not self._active.running
