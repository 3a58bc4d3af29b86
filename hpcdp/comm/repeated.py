"""Exchanges in the memory of a node that are repeated by one kernel call, see `hpcdp.kernels.shm_repeated`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from .. import kernels
from ..core import state
from ..errors import UnsupportedError
from .communicator import Steps
from .consistency import Call, InMemory
from .progress import NOT_YET, Operation, ProgressEngine, RunningTask, run_until_complete
from .world import World

T = TypeVar("T")

SHORT_NBYTES = 64 << 10
"""The longest arrays whose nonblocking exchange begins in the thread of its caller, and is polled there and seldom by
the progress lane: to wake that takes longer than to move them.
"""


class BoundExchange(NamedTuple):
    """An exchange in the memory of a node, ready to be repeated by one kernel call; see `kernels.shm_repeated`."""

    kernel: Callable[[int, int], int]
    """``kernel(id(x), id(out))`` runs the exchange if both are objects like those of the first call."""
    done: int
    """The value that the kernel returns when the exchange is complete."""
    other: int
    """The value that it returns for other objects, of which it changes nothing."""
    memory: InMemory

    def direct_call(self, world: World, call: Call) -> Callable[[Any, Any], bool]:
        """Return a function ``run(x, out)`` that makes a repeated ``call`` with little work around the kernel.

        It returns False if the call must be made in the usual way, also for objects that are no arrays like those of
        the first call. Everything that does not change from call to call is looked up here. The watchdog sees a call
        only if it waits longer than the kernel does, a fraction of a second.
        """
        kernel, done, other, memory = self
        progress, meetings, protected = ProgressEngine.of(world), world.meetings, state.held
        watchdog, calls, active = progress.watchdog, progress.calls, progress.active

        def run(x: Any, out: Any) -> bool:
            if meetings or active.running or (protected and state.protection_of(out) is not None):
                return False
            if not memory.is_patient:
                memory.be_patient()
            watchdog.calls += 1
            calls.number += 1
            met = kernel(id(x), id(out))
            return met == done or resume(met, x, out)

        def resume(met: int, x: Any, out: Any) -> bool:
            watched = call.operation, x
            watchdog.enter(watched)
            try:
                while met not in (done, other, memory.exchange.CHANGED):
                    run_until_complete(memory.not_yet(met, call))
                    met = kernel(id(x), id(out))
            finally:
                watchdog.leave(watched)
            if met == done:
                return True
            watchdog.calls -= 1
            calls.number -= 1
            return False

        return run

    def started_call(self, world: World, call: Call, is_short: bool) -> Callable[..., Operation[Any] | None]:
        """Return a function that makes a repeated nonblocking ``call``.

        ``start(finish, usual, x, out)`` posts this rank's part at once. It returns the operation, which is complete if
        all ranks arrive while the kernel polls; its result is ``finish()``. The steps ``usual(ticket)`` go on if ranks
        announce other counts than before. It returns None if the call must be made in the usual way.

        Args:
            world: the ranks.
            call: the call.
            is_short: False if only a caller that waits at once gains by it: the progress lane, which overlaps long
                exchanges with computation, is not woken.
        """
        kernel, done, other, memory = self
        progress, meetings, protected = ProgressEngine.of(world), world.meetings, state.held
        watchdog, calls, turn, name = progress.watchdog, progress.calls, progress.turn, call.operation

        def start(finish: Callable[[], T], usual: Any, x: Any, out: Any) -> Operation[T] | None:
            if meetings or (protected and state.protection_of(out) is not None):
                return None
            if not (is_short or progress.is_awaited):
                return None
            with turn:
                if not progress.may_begin or not memory.is_idle:
                    return None
                ticket = memory.begin()
                if progress.is_awaited:
                    memory.spin()
                    met = kernel(id(x), id(out))
                    memory.wait_shortly(False)
                else:
                    memory.be_patient(False)
                    met = kernel(id(x), id(out))
                if met in (done, other):
                    memory.end()
                if met == other:
                    return None
                watchdog.calls += 1
                calls.number += 1
                if met == done:
                    return progress.ended(name, finish())
                poll: _PollOfExchange[Any] = _PollOfExchange(self, call, ticket, met, finish, usual, x, out)
                return progress.start_polled(name, poll, x, None, list)  # it polls in the kernel itself

        return start


class _PollOfExchange(Generic[T]):
    """The poll of a `BoundExchange` for which other ranks have not arrived, see `ProgressEngine.start_polled`."""

    __slots__ = ("_arguments", "_exchange", "_objects", "_rest", "_value")

    def __init__(self, exchange: BoundExchange, call: Call, ticket: int, met: int, *arguments: Any) -> None:
        finish, usual, x, out = arguments
        self._exchange, self._objects, self._value = exchange, (x, out), NOT_YET
        self._arguments = call, ticket, finish, usual
        self._rest: RunningTask | None = None
        if met != exchange.memory.exchange.NOT_YET:
            self._rest = RunningTask(self._steps(met))

    def __call__(self) -> T:
        if self._rest is None:
            kernel, done, _, memory = self._exchange
            x, out = self._objects
            met, node = kernel(id(x), id(out)), memory.memory
            if met == done:
                memory.end()
                return self._arguments[2]()  # type: ignore[no-any-return]
            node.meanwhile()
            if met == memory.exchange.NOT_YET and node.failure is None:
                return NOT_YET  # type: ignore[no-any-return]
            self._rest = RunningTask(self._steps(met))
        self._rest.advance()
        return self._value  # type: ignore[no-any-return]

    def _steps(self, met: int) -> Steps:
        """Continue after the kernel has returned another value than that it waits."""
        kernel, done, other, memory = self._exchange
        (x, out), (call, ticket, finish, usual), changed = self._objects, self._arguments, memory.exchange.CHANGED
        try:
            while met not in (done, changed):
                if met == other:
                    expected = "an array that keeps its shape and flags until the operation is complete"
                    raise UnsupportedError(call.operation, expected=expected, got="an array that has been changed")
                yield from memory.not_yet(met, call)
                met = kernel(id(x), id(out))
        finally:
            if met != changed:
                memory.end()
        self._value = finish() if met == done else (yield from usual(ticket))


def repeated_barrier(world: World, memory: InMemory, call: Call) -> Callable[[Any, Any], bool]:
    """Return `BoundExchange.direct_call` of an exchange that only compares ``call``; its objects may be any."""
    repeated = kernels.load("shm_repeated")
    words = [memory.memory.size, call.signature, memory.counters.ctypes.data, memory.state.ctypes.data]
    table = repeated.table_of(None, None, repeated.ANY, words)
    exchange = BoundExchange(repeated.bound(repeated.meet_at, table), memory.exchange.DONE, repeated.OTHER, memory)
    return exchange.direct_call(world, call)
