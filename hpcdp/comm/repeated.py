"""Exchanges in the memory of a node that are repeated by one kernel call, see `hpcdp.kernels.shm_repeated`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from .. import kernels
from ..core import state
from ..errors import UnsupportedError
from .communicator import Steps
from .consistency import Call, InMemory
from .progress import NOT_YET, Operation, PolledOperation, ProgressEngine, RunningTask, run_until_complete
from .world import World

T = TypeVar("T")

SHORT_NBYTES = 1 << 20
"""The longest arrays whose nonblocking exchange begins in the thread of its caller, and is polled there and seldom by
the progress lane: to wake that takes longer than to move them.
"""

_SPINS = 100
"""Polls for other ranks, some 3 us, before a nonblocking call returns: an operation takes longer to make and wait for.
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
        not_yet = memory.exchange.NOT_YET
        progress, meetings, protected = ProgressEngine.of(world), world.meetings, state.held
        watchdog, calls, turn = progress.watchdog, progress.calls, progress.turn
        name, watched = call.operation, f"wait for {call.operation}"

        def start(finish: Callable[[], T], usual: Any, x: Any, out: Any) -> Operation[T] | None:
            if meetings or (protected and state.protection_of(out) is not None):
                return None
            if not (is_short or progress.is_awaited):
                return None
            with turn:
                if not progress.may_begin or not memory.is_idle:
                    return None
                ticket = memory.begin()
                memory.spin(None if progress.is_awaited else _SPINS)
                met = kernel(id(x), id(out))
                memory.wait_shortly(False)
                if met in (done, other):
                    memory.end()
                if met == other:
                    return None
                watchdog.calls += 1
                calls.number += 1
                if met == done:
                    return progress.ended(name, finish())
                arguments = call, ticket, finish, usual
                operation: _ExchangeInProgress[T] = _ExchangeInProgress(progress, (watched, x), self, arguments, x, out)
                if met != not_yet:
                    operation.rest = RunningTask(operation.steps(met))
                progress.add_polled(operation)
                return operation

        return start


class _ExchangeInProgress(PolledOperation[T]):
    """A nonblocking `BoundExchange` for which other ranks have not arrived."""

    rest: RunningTask | None = None
    """The steps that follow a value of the kernel other than ``NOT_YET``; None before it."""

    def __init__(
        self,
        progress: ProgressEngine,
        watched: tuple[Any, ...],
        exchange: BoundExchange,
        arguments: tuple[Any, ...],
        x: Any,
        out: Any,
    ) -> None:
        Operation.__init__(self, progress, watched)
        self._exchange, self._arguments, self._x, self._out = exchange, arguments, x, out

    def _poll(self) -> T:
        if self.rest is None:
            kernel, done, _, memory = self._exchange
            met = kernel(id(self._x), id(self._out))
            if met == done:
                memory.end()
                return self._arguments[2]()  # type: ignore[no-any-return]
            node = memory.memory
            node.meanwhile()
            if met == memory.exchange.NOT_YET and node.failure is None:
                return NOT_YET  # type: ignore[no-any-return]
            self.rest = RunningTask(self.steps(met))
        return self.value if self.rest.advance() else NOT_YET

    def steps(self, met: int) -> Steps:
        """Continue after the kernel has returned ``met``."""
        kernel, done, other, memory = self._exchange
        (call, ticket, finish, usual), changed = self._arguments, memory.exchange.CHANGED
        try:
            while met not in (done, changed):
                if met == other:
                    expected = "an array that keeps its shape and flags until the operation is complete"
                    raise UnsupportedError(call.operation, expected=expected, got="an array that has been changed")
                yield from memory.not_yet(met, call)
                met = kernel(id(self._x), id(self._out))
        finally:
            if met != changed:
                memory.end()
        self.value = finish() if met == done else (yield from usual(ticket))


def repeated_barrier(world: World, memory: InMemory, call: Call) -> Callable[[Any, Any], bool]:
    """Return `BoundExchange.direct_call` of an exchange that only compares ``call``; its objects may be any."""
    repeated = kernels.load("shm_repeated")
    words = [memory.memory.size, call.signature, memory.counters.ctypes.data, memory.state.ctypes.data]
    table = repeated.table_of(None, None, repeated.ANY, words)
    exchange = BoundExchange(repeated.bound(repeated.meet_at, table), memory.exchange.DONE, repeated.OTHER, memory)
    return exchange.direct_call(world, call)
