"""Consistency checks: collective calls are compared between ranks, and errors are raised on all of them.

If ranks hold different values, or one of them fails, every rank raises the same error, so that none waits for one that
has given up. `Refused` replaces the communicators of a world in which this process may not communicate.

Every rank must make the same collective call. Each call is compared before any rank enters the MPI library with it. If
all ranks share memory, each posts a signature of its call beside its counter there (`InMemory`). Between nodes the
signature is the header of messages that pairs of ranks exchange (`message_rounds`), and the data of short calls follow
it. If signatures differ, all ranks know it after the same exchange, and tell each other their calls.
"""

from __future__ import annotations

import hashlib
import json
import sys
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import numpy as np

from .. import errors, kernels
from ..errors import HpcdpError, MismatchError, WorldAborted, listed
from .communicator import MERGED, Communicator, PolledRequest, Steps, StepsTo, exchange_of, resolve
from .message_rounds import ByMessages, OtherForm
from .shared_memory import NodeMemory

if TYPE_CHECKING:
    from .world import World


T = TypeVar("T")
_LONG = 160
"""The length of two texts above which an error shows only the words that differ."""
_PARTS = ("operation", "where", "expected", "got", "remedy")


_BUILT_ALIKE = "build the same model with the same options on every rank"


def require_same(comm: Communicator, operation: str, items: Sequence[str], remedy: str = _BUILT_ALIKE) -> None:
    """Check that every rank passes the same ``items``; every rank must call.

    One hash per rank is exchanged, and the items themselves only if hashes differ.

    Args:
        comm: the ranks to compare.
        operation: the operation that the error names.
        items: one line each, e.g. ``"0.weight (20, 1, 3, 3) float32"``.
        remedy: the advice of the error.

    Raises:
        MismatchError: the same on every rank; it names the ranks and the first difference.
    """
    digests = _exchanged(comm, f"require_same of {operation}", _digest(items))
    _raise_first_difference(comm, operation, items, remedy, digests)


def _digest(items: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(items)).encode()).hexdigest()


def _raise_first_difference(
    comm: Communicator, operation: str, items: Sequence[str], remedy: str, digests: Sequence[str]
) -> None:
    """Raise if the ``digests`` of the ranks' items differ; every rank must call."""
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not odd:
        return
    everything = comm.allgather_json(list(items) if comm.rank in (0, odd[0]) else None)
    alike = [rank for rank in odd if digests[rank] == digests[odd[0]]]
    raise first_difference(operation, everything[0], everything[odd[0]], alike, remedy)


def first_difference(
    operation: str, first: Sequence[str], other: Sequence[str], odd: Sequence[int], remedy: str
) -> MismatchError:
    """Return the error for ranks ``odd`` that have the items ``other`` instead of ``first``, those of rank 0."""
    at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    longer, most = (0, len(first)) if at < len(first) else (odd[0], len(other))
    first_text, other_text = _around_difference(_item(first, at), _item(other, at))
    error = MismatchError(
        operation, where=f"item {at + 1} of {most} on rank {longer}", expected=f"{first_text} as on rank 0",
        got=f"{other_text} on rank{'s' if len(odd) > 1 else ''} {listed(odd, 8)}", remedy=remedy,
    )  # fmt: skip
    error.is_on_every_rank = True
    return error


def _around_difference(first: str, other: str) -> tuple[str, str]:
    """Return two texts, or only the differing words of long ones, because an error's line is cut in its middle."""
    if len(first) + len(other) <= _LONG:
        return first, other
    words = first.split(" "), other.split(" ")
    shorter = min(map(len, words))
    begin = next((i for i in range(shorter) if words[0][i] != words[1][i]), shorter)
    alike = next((i for i in range(shorter - begin) if words[0][-1 - i] != words[1][-1 - i]), shorter - begin)
    if alike and shorter - alike == begin:  # one text lacks the other's words: show the next word too
        alike -= 1
    begin = max(begin - 1, 0)  # include the word before, which may be a name
    cut = [" ".join(text[begin : len(text) - alike]) for text in words]
    before, after = "... " if begin else "", " ..." if alike else ""
    return f"{before}{cut[0]}{after}", f"{before}{cut[1]}{after}"


def _item(items: Sequence[str], at: int) -> str:
    return items[at] if at < len(items) else "nothing more"


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The result of a call on this rank, or its error."""

    value: T | None = None
    error: HpcdpError | None = None

    @classmethod
    def of(cls, fn: Callable[[], T]) -> Outcome[T]:
        """Call ``fn`` and keep its result or `HpcdpError`; other exceptions pass."""
        try:
            return cls(fn())
        except HpcdpError as error:
            return cls(error=error)

    def get(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def on_every_rank(comm: Communicator, fn: Callable[[], T]) -> T:
    """Call ``fn()`` and return its result; every rank must call.

    If it raises an `HpcdpError` on some rank, every rank raises the error of the lowest such rank, which is named
    unless all ranks failed. Other exceptions pass, and so end the job. If a rank is in another collective exchange
    meanwhile, all raise a `MismatchError`.
    """
    return told_to_all(comm, Outcome.of(fn))


def told_to_all(
    comm: Communicator, outcome: Outcome[T], operation: str = "", alike: Sequence[tuple[Sequence[str], str]] = ()
) -> T:
    """Share an outcome as `on_every_rank` does, and check `require_same` in the same exchange.

    Args:
        comm: the ranks; every rank must call.
        outcome: this rank's result or error.
        operation: the operation that a `MismatchError` names.
        alike: items that must be equal on all ranks if none has failed, each with the advice of the error; the same
            number on each rank that has not failed.
    """
    mine = [_described(outcome.error), *([_digest(items) for items, _ in alike] if outcome.error is None else [])]
    try:
        everyone = _exchanged(comm, "on_every_rank", mine)
    except MismatchError as error:  # others are in another call, perhaps because this rank has failed
        raise outcome.error or error from (error if outcome.error else error.__cause__)
    _raise_first([report for report, *_ in everyone], outcome.error)
    for number, (items, remedy) in enumerate(alike, 1):
        _raise_first_difference(comm, operation, items, remedy, [reports[number] for reports in everyone])
    return outcome.value  # type: ignore[return-value]


def on_rank_0(comm: Communicator, fn: Callable[[], T]) -> T:
    """Call ``fn()`` on rank 0 only; return its result, or raise its `HpcdpError`, on every rank. Every rank must call.

    The result is sent to the other ranks as JSON.
    """
    own = Outcome.of(fn) if comm.rank == 0 else Outcome()
    call = f"on_rank_0 of {getattr(fn, '__qualname__', type(fn).__name__).partition('.<locals>')[0]}"
    report, value = _exchanged(comm, call, (_described(own.error), own.value))[0]
    _raise_first([report], own.error)
    return value  # type: ignore[no-any-return]


def _exchanged(comm: Communicator, call: str, value: Any) -> list[Any]:
    """Return every rank's ``value``; raise `MismatchError` on all ranks here unless all make the same ``call``."""
    everyone = comm.allgather_json({"call": call, "value": value})
    calls = [message.get("call") if isinstance(message, dict) else None for message in everyone]
    odd = next((rank for rank, other in enumerate(calls) if other != calls[0]), None)
    if odd is not None:
        raise MismatchError(
            "exchange of all ranks", expected=f"{calls[0] or 'another call'} as on rank 0",
            got=f"{calls[odd] or 'another call'} on rank {odd}",
            remedy="make every collective call on all ranks, in the same order",
        )  # fmt: skip
    return [message["value"] for message in everyone]


def _described(error: HpcdpError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    parts = {name: getattr(error, name) for name in _PARTS}
    kind = next(base.__name__ for base in type(error).__mro__ if hasattr(errors, base.__name__))
    return {"kind": kind} | {k: None if v is None else str(v) for k, v in parts.items()}


def _raise_first(reports: list[dict[str, Any] | None], own: HpcdpError | None) -> None:
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    report = reports[failed[0]]
    assert report is not None
    kind = getattr(errors, report["kind"])
    rank = failed[0] if len(failed) < len(reports) else None
    error = kind(**{name: report[name] for name in _PARTS}, rank=rank)
    error.is_on_every_rank = True
    raise error from own


FIELDS = ("comm", "call_comm", "node_comm", "rail_comm", "node_memory", "divide")
"""The fields of a `World` by which it communicates."""


class Refused:
    """A stand-in for a communicator that raises ``kind`` at any use, named after the function that the program called.

    ``rank`` and ``size`` are the communicator's, ``why`` are the parts of the error.
    """

    def __init__(self, kind: type[HpcdpError], rank: int, size: int, **why: Any) -> None:
        self.rank, self.size = rank, size
        self._kind, self._why = kind, why

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy, pickle and NumPy look up some
            raise AttributeError(name)
        self._refuse()

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise the error."""
        self._refuse()

    __contains__ = __len__ = __getitem__ = __call__

    def __repr__(self) -> str:
        return "refused"

    def _refuse(self) -> NoReturn:
        raise self._kind(called(sys._getframe(2))[1], **self._why)


def called(frame: FrameType | None) -> tuple[str, str]:
    """Return the public function that a program has called: the outermost of hpcdp on the stack below ``frame``.

    Returns:
        The public name of its class, which may be empty, and its own name. For a constructor or ``__call__`` the latter
            is the class's, for a context ``with``, for an attribute made on demand the attribute's.
    """
    package = __package__.partition(".")[0]
    owner, name = "", "communicate"
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(f"{package}."):
            if names := _public_name(frame, sys.modules[package].__all__):
                owner, name = names
        elif module != "contextlib":
            break
        frame = frame.f_back
    return owner, name


def _public_name(frame: FrameType, public: Collection[str]) -> tuple[str, str] | None:
    code, local_vars = frame.f_code, frame.f_locals
    path = code.co_qualname
    if "<locals>" in path:  # the wrapper of a decorator: take the decorated function
        functions: list[Any] = [local_vars.get(free) for free in code.co_freevars]
        path = next((function.__qualname__ for function in functions if hasattr(function, "__code__")), "")
        if not path or "<locals>" in path:
            return None
    owner, _, name = path.rpartition(".")
    owner = owner.rpartition(".")[2]
    if owner and code.co_argcount:
        this = local_vars.get(code.co_varnames[0])
        kind = this if isinstance(this, type) else type(this)
        classes = [base.__name__ for base in kind.__mro__]
        if owner in classes:
            known_as = getattr(kind, "public_name", classes[0])
            owner = next((name for name in classes if name in public), known_as)
    if name == "__getattr__":
        name = str(local_vars.get(code.co_varnames[1]))
    elif name in ("__enter__", "__exit__"):
        name = "with"
    elif name.startswith("__"):
        name = owner
    return owner, name


def refuse(world: World, kind: type[HpcdpError], new_kept: Any, **why: Any) -> None:
    """Let all communication of ``world`` fail from now on; ``new_kept`` replaces its `World.kept`."""
    for name in FIELDS:
        if (before := getattr(world, name)) is not None and not isinstance(before, Refused):
            rank, size = getattr(before, "rank", 0), getattr(before, "size", 1)
            object.__setattr__(world, name, Refused(kind, rank, size, **why))
    object.__setattr__(world, "kept", Refused(kind, 0, 1, **why) if new_kept is None else new_kept)


_TEXT_NBYTES = 1 << 10
_MAX = resolve("counts", "max", np.dtype(np.int64))
FIRST_CALLS = 16
"""Calls of a world that are compared by messages in Python first: a program with few calls needs no compiled kernels.
"""
_ALIKE = "call it with the same arguments, and in the same order, on all ranks"


class Call:
    """A collective call, as all ranks must make it.

    Args:
        operation: its name.
        facts: one line each; all must be equal on all ranks.
    """

    __slots__ = ("facts", "operation", "signature")

    def __init__(self, operation: str, *facts: str) -> None:
        self.operation = operation
        self.facts = facts or (operation,)
        self.signature = zlib.crc32("\n".join(self.facts).encode())

    def differs_from(self, everyone: Sequence[str]) -> MismatchError:
        """Return the error for ranks whose calls are the texts ``everyone``, by rank."""
        items = [text.split("\n") for text in everyone]
        odd = [rank for rank, own in enumerate(items) if own != items[0]]
        if not odd:  # the texts were cut, or signatures damaged
            error = MismatchError(
                self.operation, expected="the same call on every rank", got="different calls", remedy=_ALIKE
            )
            error.is_on_every_rank = True
            return error
        operation = items[0][0].partition(" ")[0]
        alike = [rank for rank in odd if items[rank] == items[odd[0]]]
        return first_difference(operation, items[0], items[odd[0]], alike, _ALIKE)

    def __str__(self) -> str:
        return "\n".join(self.facts)


class _ExchangeCall(Call):
    """An ``allgather_json``, whose text begins with the public function that the program has called."""

    __slots__ = ()

    def __str__(self) -> str:
        owner, name = called(sys._getframe(1))
        public = f"{owner}.{name}" if owner not in ("", name) else name
        return "\n".join([public, *self.facts])


_SHORT_WAIT = 300, 100_000
"""Polls, some 8 us, and then nanoseconds that the progress lane waits for other ranks in a kernel: the time of a chunk.
"""


class InMemory:
    """Comparison through memory that all ranks share; all ranks must make it together.

    Data exchanges between the ranks may use its counters too: see `hpcdp.collectives.intra_node`. Exchanges run one
    after another, in the order in which they began.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self.exchange = kernels.load("shm_exchange")
        self.memory = memory
        self.counters = memory.alloc((memory.size * self.exchange.STRIDE,), np.int32)
        self.state = self.exchange.state_of(memory.rank, memory.patience)
        # Views that Python writes in a third of the time that an element of an array takes.
        self._spins, self._sleep_ns = (self.state[i:].data for i in (self.exchange.SPINS, self.exchange.SLEEP_NS))
        self._patience: tuple[int, int] = tuple(memory.patience.tolist())
        self.arrival = _Arrival(memory, self.counters, self.state)
        self._texts = memory.alloc((memory.size, _TEXT_NBYTES), np.uint8)
        self._meet, self._done = self.exchange.meet, self.exchange.DONE
        self._different = self.exchange.DIFFERENT
        self.is_patient = True
        self._tickets = self._served = 0

    def agree(self, call: Call) -> None:
        """Block until every rank has made ``call``; no exchange of `steps` may be in progress."""
        self.be_patient()
        signature, n = call.signature, self.memory.size
        while (met := self._meet(self.counters, n, self.state, signature)) != self._done:
            if met == self._different:
                for stage in self.difference(call):
                    for request in stage:
                        request.wait()
            self.memory.check()

    def steps(self, call: Call) -> Steps:
        """Return `agree` as resumable steps. Steps that follow it in an algorithm run in the order of the calls."""
        return self._steps(call, self.begin())

    def _steps(self, call: Call, ticket: int) -> Steps:
        yield from self.turn(ticket, patient=False)
        try:
            yield from self._arrive(call)
        finally:
            self.end()

    def _arrive(self, call: Call) -> Steps:
        while (met := self._meet(self.counters, self.memory.size, self.state, call.signature)) != self._done:
            yield from self.not_yet(met, call)

    def not_yet(self, met: int, call: Call) -> Steps:
        """Wait after an exchange that has returned ``met`` and is not complete yet.

        Raises:
            MismatchError: the ranks made different calls.
        """
        if met == self._different:
            yield from self.difference(call)
        if met == self.exchange.UNREADABLE:
            raise WorldAborted(
                call.operation, expected="the memory of the node's other ranks",
                got="an error of process_vm_readv(2) or process_vm_writev(2)",
            )  # fmt: skip
        yield [self.arrival]

    @property
    def is_idle(self) -> bool:
        """True if no exchange of `begin` is in progress."""
        return self._served == self._tickets

    def begin(self) -> int:
        """Return the ticket of an exchange, which runs after all earlier ones."""
        self._tickets += 1
        return self._tickets - 1

    def turn(self, ticket: int, patient: bool) -> Steps:
        """Wait for the turn of an exchange; a ``patient`` one waits in the kernels. Call `end` afterwards."""
        if self._served != ticket:
            yield [PolledRequest(lambda: self._served == ticket)]
        self.be_patient(patient)

    def end(self) -> None:
        """Let the next exchange run."""
        self._served += 1

    def be_patient(self, patient: bool = True) -> None:
        """Choose whether kernels wait for other ranks, or return at once if some have not arrived."""
        if patient != self.is_patient:
            self.is_patient = patient
            self._spins[0], self._sleep_ns[0] = self._patience if patient else (0, 0)

    def wait_shortly(self, waits: bool) -> None:
        """Let kernels that return at once wait for `_SHORT_WAIT` first, or not; for a thread with nothing to do."""
        if not self.is_patient:
            self._spins[0], self._sleep_ns[0] = _SHORT_WAIT if waits else (0, 0)

    def spin(self, most: int | None = None) -> None:
        """Let kernels that return at once poll before that; default as often as a blocking call. See `wait_shortly`."""
        self.be_patient(False)
        self._spins[0] = self._patience[0] if most is None else min(most, self._patience[0])

    def difference(self, call: Call) -> Steps:
        """Raise the error for ranks that have made different calls; all ranks must run it.

        Raises:
            MismatchError: always; the same on every rank.
        """
        text, mine = str(call).encode()[:_TEXT_NBYTES], self._texts[self.memory.rank]
        mine[:] = 0
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        # The texts stay until all ranks arrive at another exchange, so every rank has read them.
        while self._meet(self.counters, self.memory.size, self.state, 0) != self._done:
            yield [self.arrival]
        raise call.differs_from([row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in self._texts])


class _Arrival:
    """A request: all ranks have arrived at this rank's exchange."""

    def __init__(self, memory: NodeMemory, counters: np.ndarray, state: np.ndarray) -> None:
        self._memory, self._counters, self._state = memory, counters, state
        exchange = kernels.load("shm_exchange")
        self._wait_all, self._sequence = exchange.wait_all, exchange.SEQUENCE

    def _arrived(self, spins: int, sleep_ns: int) -> bool:
        number = np.int64(self._state[self._sequence]).astype(np.int32)
        return bool(self._wait_all(self._counters, self._memory.size, number, spins, sleep_ns))

    def test(self) -> bool:
        self._memory.check()
        return self._arrived(0, 0)

    def wait(self) -> None:
        while not self._arrived(*self._memory.patience):
            self._memory.check()


class Calls:
    """The collective calls of a world's ranks, which must all be the same; see `of`."""

    def __init__(self, world: World) -> None:
        self.messages = ByMessages(world.call_comm)
        self.memory: InMemory | None = None
        """None if ranks do not share memory, or have not made many calls yet."""
        self.number = 0
        """The number of the latest call, equal on all ranks, also after calls that differed. Code that compares a call
        without `agree` or `steps` must increment it."""
        self._rank, self._size, self._alone = world.rank, world.size, world.size == 1
        self._node = world.node_memory if world.node_memory.size == world.size else None
        self._by_messages = 0

    @classmethod
    def of(cls, world: World) -> Calls:
        """Return the calls of ``world``."""
        return world.kept.get(cls) or world.keep(cls, lambda: cls(world))

    def agree(self, call: Call) -> None:
        """Block until every rank of the world has made ``call``.

        Operations started before must have ended (`World.settle`).

        Raises:
            MismatchError: some rank has made another call; the same error on every rank.
        """
        self.number += 1
        if self.memory is not None:
            self.memory.agree(call)
        elif not self._alone:
            self.messages.agree(call)
            self._by_messages += 1
            if self._node is not None and self._by_messages >= FIRST_CALLS:
                self.share_memory(self._node)

    def share_memory(self, memory: NodeMemory) -> InMemory:
        """Compare calls in ``memory`` of all ranks from now on; all ranks call it together."""
        if self.memory is None:
            self.memory = InMemory(memory)
        return self.memory

    def steps(self, call: Call) -> Steps:
        """Return `agree` as resumable steps. Steps that follow it in an algorithm run in the order of the calls."""
        self.number += 1
        return (self.messages if self.memory is None else self.memory).steps(call)

    def largest(self, call: Call, number: int, then: Callable[[int], StepsTo[T]]) -> StepsTo[T]:
        """Return resumable steps that compare ``call`` by messages, and continue with the largest number of any rank.

        Args:
            call: the call.
            number: this rank's number.
            then: returns the steps that follow.
        """
        self.number += 1
        numbers = np.array([number], np.int64)
        exchange = self.messages.steps(call, self.messages.sums(numbers, _MAX))

        def steps() -> StepsTo[T]:
            yield from exchange
            return (yield from then(int(numbers[0])))

        return steps()

    def gather(self, call: Call, counts: np.ndarray, then: Callable[[np.ndarray], StepsTo[T]]) -> StepsTo[T]:
        """Return resumable steps that compare ``call`` by messages, gather every rank's ``counts``, and continue.

        Args:
            call: the call.
            counts: shape ``(k,)``, int64; k is equal on all ranks that make the same call.
            then: returns the steps that follow, given shape ``(n, k)``, the counts by rank.

        Returns:
            Steps that return the result of those that follow.
        """
        self.number += 1

        def started() -> tuple[np.ndarray, Steps]:
            gathered = self._row_of(counts)
            return gathered, self.messages.steps(call, self.messages.sums(gathered.reshape(-1), MERGED))

        first = started()

        def steps() -> StepsTo[T]:
            gathered, exchange = first
            try:
                yield from exchange
            except OtherForm:
                gathered, exchange = started()
                yield from exchange
            return (yield from then(gathered))

        return steps()

    def gather_now(self, call: Call, counts: np.ndarray) -> np.ndarray:
        """Compare ``call`` by messages, and return every rank's ``counts`` as for `gather`, blocking.

        Operations started before must have ended.
        """
        self.number += 1
        while True:
            gathered = self._row_of(counts)
            try:
                self.messages.agree(call, self.messages.sums(gathered.reshape(-1), MERGED))
            except OtherForm:
                continue
            return gathered

    def _row_of(self, counts: np.ndarray) -> np.ndarray:
        numbers = np.zeros((self._size, counts.size), np.int64)
        numbers[self._rank] = counts
        return numbers


_NAMELESS = "as in a step of fit or a report"
_exchanges: dict[str, Call] = {}


def compare_exchanges(world: World) -> None:
    """Compare ``allgather_json`` exchanges of all ranks of ``world`` with the collective calls of others."""
    exchange, world_ref = exchange_of(world.comm), weakref.ref(world)

    def compared(value: Any) -> list[Any]:
        if (alive := world_ref()) is not None:
            alive.settle()
            name = str(value.get("call", _NAMELESS)) if type(value) is dict else _NAMELESS
            call = _exchanges.get(name)
            if call is None:
                call = _exchanges[name] = _ExchangeCall("exchange", f"exchange of all ranks ({name})")
            Calls.of(alive).agree(call)
        return exchange(value)

    world.comm.allgather_json = compared  # type: ignore[method-assign]
