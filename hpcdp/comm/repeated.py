"""Calls that are repeated with little work around a kernel, see `hpcdp.kernels.shm_repeated`.

In the memory of a node such a call is one kernel call (`BoundExchange`). Over hosts it is a kernel call before and
after each message (`RepeatedRounds`): after a wait Python takes several times as long as usual, because the caches are
cold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from .. import kernels
from ..core import state
from ..errors import UnsupportedError
from .communicator import Reduction, Steps, Swapping, real_numbers
from .consistency import FIRST_CALLS, Call, Calls, InMemory
from .message_rounds import (
    COMPARED,
    HEADER_NBYTES,
    MOST_NBYTES,
    USUAL,
    WHOLE_NBYTES,
    ByMessages,
    Copy,
    Differs,
    OtherForm,
    Routes,
    SummedPart,
    first_word,
    parts_of,
    parts_on_the_way,
    power_of_two,
)
from .progress import NOT_YET, WAIT_FOR, Operation, PolledOperation, ProgressEngine, RunningTask, run_until_complete
from .world import World

if TYPE_CHECKING:
    from ..kernels.shm_repeated import Like

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
            try:
                met = kernel(id(x), id(out))
                return met == done or resume(met, x, out)
            except BaseException as error:
                watchdog.abandon(call.operation, error)
                raise

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
        name, watched = call.operation, f"{WAIT_FOR}{call.operation}"

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


def repeated_barrier(world: World, call: Call) -> Callable[[Any, Any], bool] | None:
    """Return a repeated call that only compares ``call``; its objects may be any. None if it is too early for one."""
    calls = Calls.of(world)
    memory = calls.memory
    if memory is None and (calls.number < FIRST_CALLS or world.size == 1):
        return None
    repeated = kernels.load("shm_repeated")
    if memory is None:
        rounds = len(calls.messages.rounds)
        nothing = repeated_moves(world, call, Routes([[]] * rounds, [0] * rounds, [], 0), [], None, None, repeated.ANY)
        return None if nothing is None else nothing.direct_call(world, call)
    words = [memory.memory.size, call.signature, memory.counters.ctypes.data, memory.state.ctypes.data]
    table = repeated.table_of(None, None, repeated.ANY, words)
    exchange = BoundExchange(repeated.bound(repeated.meet_at, table), memory.exchange.DONE, repeated.OTHER, memory)
    return exchange.direct_call(world, call)


class RepeatedRounds:
    """A call by `message_rounds`, ready to be repeated.

    Args:
        kernel: ``kernel(stage, id(x), id(out))`` does the work before round ``stage``, or after the last one, if both
            are objects like those of the first call.
        messages: the messages of the world.
        sent: the bytes of data that each round sends.
        received: the bytes that each round receives.
    """

    def __init__(
        self, kernel: Callable[[int, int, int], int], messages: ByMessages, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        self._kernel, self._messages, self._sent, self._received = kernel, messages, sent, received

    def direct_call(self, world: World, call: Call) -> Callable[[Any, Any], bool]:
        """Return a function ``run(x, out)`` as `BoundExchange.direct_call` does.

        It also returns False, after an exchange, if some rank has sent data in another form.
        """
        kernel, messages = self._kernel, self._messages
        progress, meetings, protected = ProgressEngine.of(world), world.meetings, state.held
        watchdog, calls, active = progress.watchdog, progress.calls, progress.active
        done, different = (getattr(kernels.load("message_stages"), name) for name in ("DONE", "DIFFERENT"))
        rounds = []
        for number, (lane, peer, sends, receives) in enumerate(messages.rounds):
            sent, received = messages.buffers(number)
            parts = parts_of(sent[: HEADER_NBYTES + self._sent[number]]) if sends else []
            swap = messages.comm.swapper(parts, received[:WHOLE_NBYTES] if receives else None, peer)
            has_rest = receives and HEADER_NBYTES + self._received[number] > WHOLE_NBYTES
            rounds.append((number + 1, swap, lane, peer, received if has_rest else None))
        nothing = Swapping((), ())

        def run(x: Any, out: Any) -> bool:
            if meetings or active.running or (protected and state.protection_of(out) is not None):
                return False
            if kernel(0, id(x), id(out)) != done:
                return False
            watchdog.calls += 1
            calls.number += 1
            tag = messages.next_tag()
            try:
                for stage, swap, lane, peer, rest in rounds:
                    swapping = swap(tag + lane)
                    if swapping is not None or rest is not None:
                        wait(swapping or nothing, rest, peer, tag + lane, x)
                    met = kernel(stage, id(x), id(out))
                    if met != done:
                        give_up(met, stage, tag)
                        return False
            except BaseException as error:
                watchdog.abandon(call.operation, error)
                raise
            return True

        def wait(swapping: Swapping, rest: np.ndarray | None, peer: int, tag: int, x: Any) -> None:
            watched = call.operation, x
            watchdog.enter(watched)
            try:
                for request in swapping.incoming:
                    request.wait()
                if rest is not None:
                    messages.receive_rest(rest, peer, tag)
                for request in swapping.outgoing:
                    request.wait()
            finally:
                watchdog.leave(watched)

        def give_up(met: int, stage: int, tag: int) -> None:
            """Let all ranks know that one has met a message of another call, or in another form."""
            lane, peer, *_ = messages.rounds[stage - 1]
            if rounds[stage - 1][-1] is None:
                messages.receive_rest(messages.buffers(stage - 1)[1], peer, tag + lane)
            try:
                messages.run_rounds(call, tag, first=stage, met=Differs() if met == different else OtherForm())
            except OtherForm:
                watchdog.calls -= 1
                calls.number -= 1

        return run


def repeated_sum(
    world: World,
    call: Call,
    x: np.ndarray,
    op: Reduction,
    parts: Sequence[SummedPart],
    first: int,
    out: Like | None,
    rule: int,
) -> RepeatedRounds | None:
    """Return a call that reduces ``parts`` of arrays like ``x``, in ``op``.

    Args:
        world: the ranks.
        call: the call.
        x: an array like those that are reduced.
        op: the reduction.
        parts: the parts.
        first: the element of ``x`` with which what this rank receives begins.
        out: what the array that receives is like; None if there is none.
        rule: see `kernels.shm_repeated.table_of`.

    Returns:
        The call; None if there is no kernel.
    """
    numbers, rank, n = real_numbers(x), world.rank, world.size
    is_sum = op.named and op.name in ("sum", "mean")
    if not _is_repeated(world, call) or not is_sum or not 0 < x.nbytes <= MOST_NBYTES:
        return None
    kernel, repeated = kernels.load("message_stages"), kernels.load("shm_repeated")
    if numbers.dtype not in kernels.load("shm_exchange").DTYPES:
        return None
    messages, p, size = Calls.of(world).messages, power_of_two(n), x.itemsize
    rounds = messages.rounds
    memory = np.empty((len(rounds) + 1, x.nbytes), np.uint8)  # of sums that are not in a message
    sent = [_places(parts_on_the_way(parts, round_, rank, p, sends=True), size) for round_ in rounds]
    received = [_places(parts_on_the_way(parts, round_, rank, p, sends=False), size) for round_ in rounds]
    nbytes = [[sum(part.last - part.first for part in places) * size for places in side] for side in (sent, received)]
    heads, stages = _heads(messages, call, nbytes[0]), []
    mine = {part: (kernel.X, part.first * size) for part in parts}
    for number, head in enumerate(heads):
        words: list[int] = []
        if number:
            mine = dict.fromkeys(received[number - 1], (kernel.MEMORY, 0)) | mine  # a part may come back as a sum
        for part in list(mine):
            how, others, is_sent = kernel.SCALE if number == 0 else kernel.KEEP, 0, False
            if number and part in received[number - 1]:
                lane, peer, *_ = rounds[number - 1]
                order = kernel.MINE_FIRST if peer > rank else kernel.OTHERS_FIRST
                how = kernel.TAKE if messages.is_result(lane) else order
                others = messages.buffers(number - 1)[1].ctypes.data + HEADER_NBYTES + received[number - 1][part]
            if number < len(rounds):
                place, is_sent = kernel.MEMORY, part in sent[number]
                if how == kernel.KEEP and not is_sent:
                    continue
                message = messages.buffers(number)[0].ctypes.data + HEADER_NBYTES
                to = message + sent[number][part] if is_sent else memory[number].ctypes.data + part.first * size
            elif out is not None and part.receiver in (None, rank):
                place, to = kernel.OUT, (part.first - first) * size
            else:
                continue
            words += [how, *mine[part], others, place, to, (part.last - part.first) * (size // numbers.itemsize)]
            mine[part] = place, to
            if is_sent and part.receiver is not None:  # from here on another rank has its sum
                del mine[part]
        stages.append([*head, len(words) // 7, *words])
    table = repeated.table_of(
        (x.dtype, x.size, None), out, rule,
        kernel.words_of_stages(stages, (COMPARED, call.signature, USUAL), op.factors(n)),
    )  # fmt: skip
    run = repeated.bound(kernel.sum_at, table, dtype=numbers.dtype)
    run.memory = memory  # type: ignore[attr-defined]
    return RepeatedRounds(run, messages, *nbytes)


def _places(parts: Sequence[SummedPart], itemsize: int) -> dict[SummedPart, int]:
    """Return where each part begins in a message that has these, in bytes after the header."""
    ends = accumulate(((part.last - part.first) * itemsize for part in parts), initial=0)
    return dict(zip(parts, ends, strict=False))


def repeated_moves(
    world: World,
    call: Call,
    routes: Routes,
    kept: Sequence[Copy],
    x: Like | None,
    out: Like | None,
    rule: int,
    form: int = USUAL,
) -> RepeatedRounds | None:
    """Return a call that moves blocks by ``routes``; this rank gets those that are ``kept`` in the array ``out``.

    ``rule`` is that of `kernels.shm_repeated.table_of`. None if there are messages that are too long.
    """
    if not _is_repeated(world, call) or routes.longest > MOST_NBYTES:
        return None
    kernel, repeated = kernels.load("message_stages"), kernels.load("shm_repeated")
    messages = Calls.of(world).messages

    def words_of(copies: Sequence[Copy], place: int, begin: int) -> list[int]:
        words = [len(copies)]
        for source, at, to, nbytes in copies:
            data = 0 if source is None else messages.buffers(source)[1].ctypes.data + HEADER_NBYTES
            words += [kernel.X if source is None else kernel.MEMORY, data + at, place, begin + to, nbytes]
        return words

    nbytes = [sum(copy.nbytes for copy in copies) for copies in routes.sent]
    heads = _heads(messages, call, nbytes)
    stages = [
        [*head, *words_of(copies, kernel.MEMORY, head[1] + HEADER_NBYTES)]
        for head, copies in zip(heads, routes.sent, strict=False)
    ]
    stages.append([*heads[-1], *words_of(kept, kernel.OUT, 0)])
    table = repeated.table_of(x, out, rule, kernel.words_of_stages(stages, (COMPARED, call.signature, form)))
    return RepeatedRounds(repeated.bound(kernel.move_at, table), messages, nbytes, routes.received)


def _is_repeated(world: World, call: Call) -> bool:
    """Return whether calls like ``call`` are compared by messages, and block."""
    return world.node_memory.size < world.size and not call.operation.startswith("i")


def _heads(messages: ByMessages, call: Call, nbytes: Sequence[int]) -> list[list[int]]:
    """Return the first three words of all stages, given the bytes of data that each round sends."""
    received = [0, *(messages.buffers(i)[1].ctypes.data * round_.receives for i, round_ in enumerate(messages.rounds))]
    sent = [*(messages.buffers(i)[0].ctypes.data * round_.sends for i, round_ in enumerate(messages.rounds)), 0]
    words = [*(first_word(call.signature, size) for size in nbytes), 0]
    return [list(head) for head in zip(received, sent, words, strict=True)]
