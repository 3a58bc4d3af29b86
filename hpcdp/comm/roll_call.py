"""Roll calls between the watchdogs of all ranks, and the detection of ranks in different calls.

A rank that waits too long calls the roll. Its question travels down a binary tree whose root it is, and the answers
travel up, each with the missing ranks below: some 3 (n - 1) short messages, of which any rank sends and receives at
most four. A rank that does not answer is skipped, and its children are asked by its parent. The watchdogs answer while
the ranks themselves are stuck.

The lowest of several ranks that wait in a call reports it. A rank that is asked by a higher one answers that it reports
the call itself, or names a lower rank; the higher one then gives up. If many begin at once these are some n log n
messages. Messages fit in any library's eager protocol. No receive is posted, so no memory is used per peer.

Steps of a Trainer and pushes to a store send only their data, so a rank in a step and another in a collective would
wait for each other. No rank ends such a call before all have begun it, and each rank counts its calls of a kind. A
waiting rank publishes its call and the call's number; a rank that has begun fewer of that kind is behind it. If two
ranks are each behind the other and both wait, neither call can end. A rank that computes waits for no other, however
long (`DifferentCalls`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import MismatchError, WorldAborted, listed
from .communicator import Communicator, Request, make_tag
from .shared_memory import NodeMemory

KIND_NBYTES, TEXT_NBYTES = 40, 200
_LOOKS = 2
"""Checks that a rank must have made itself while it seems to wait, because its published call may be outdated."""
_MOST_NAMES = 8


class WaitingCall(NamedTuple):
    """A call in which a rank waits for all others."""

    kind: str
    """The kind of calls that are counted together."""
    item: int
    """The item within the kind."""
    number: int
    """The number of these calls that the rank has begun, including this one."""
    text: str
    """A description for errors."""

    def is_same(self, other: WaitingCall) -> bool:
        """Return whether two ranks wait in the same call."""
        return self[:3] == other[:3]


class DifferentCalls:
    """The calls in which the ranks of a node wait, in its memory; all of them must make it together.

    ``ranks`` are the node's world ranks; ``begun`` returns the number of calls of a kind and item that this rank has
    begun.
    """

    def __init__(self, memory: NodeMemory, ranks: Sequence[int], begun: Callable[[str, int], int]) -> None:
        n = memory.size
        board = np.dtype(
            [
                ("looks", "i8"), ("call", "i8"), ("kind", f"S{KIND_NBYTES}"), ("item", "i8"), ("number", "i8"),
                ("text", f"S{TEXT_NBYTES}"), ("behind", "i8", (n,)), ("different", "i8", (n,)),
            ]
        )  # fmt: skip
        self._board, self._me, self._ranks, self._begun = memory.alloc((n,), board), memory.rank, ranks, begun
        self._waiting: WaitingCall | None = None
        self._number = 0
        self._suspects: dict[int, int] = {}
        """Local ranks with which this one waits mutually, with their number of checks when that was first seen."""

    def look(self, waiting: WaitingCall | None, decides: bool = False) -> dict[int, WaitingCall]:
        """Publish this rank's call, and look for ranks that wait for it in another call.

        Args:
            waiting: this rank's call; None if it does not wait.
            decides: whether it has waited long enough to declare a mismatch itself, not only to follow another rank.

        Returns:
            The calls of all ranks that wait for each other, by rank, including this one; else an empty dict.
        """
        board, me = self._board, self._me
        board["looks"][me] += 1
        if waiting != self._waiting:
            self._say(waiting)
        if waiting is None:
            return {}
        for other in range(len(board)):
            if board["different"][other, me] == self._number:  # the other has raised the error, and may have moved on
                return self._waiting_in(np.flatnonzero(board["different"][other]))
        if any([self._is_different(other) for other in range(len(board)) if other != me]) and decides:
            same = [
                local for local in range(len(board)) if board["call"][local] and self._call_of(local).is_same(waiting)
            ]
            members = sorted({*same, *self._suspects})
            board["different"][me, members] = board["call"][members]
            return self._waiting_in(members)
        return {}

    def _say(self, waiting: WaitingCall | None) -> None:
        board, me = self._board, self._me
        self._waiting = waiting
        self._suspects.clear()
        board["call"][me], board["behind"][me] = 0, 0
        if waiting is not None:
            board["kind"][me], board["text"][me] = waiting.kind.encode(), waiting.text.encode()[:TEXT_NBYTES]
            board["item"][me], board["number"][me], board["different"][me] = waiting.item, waiting.number, 0
            self._number += 1
            board["call"][me] = self._number

    def _is_different(self, other: int) -> bool:
        board, me = self._board, self._me
        call, waiting = int(board["call"][other]), self._call_of(other)
        is_behind = call != 0 and self._begun(waiting.kind, waiting.item) < waiting.number
        board["behind"][me, other] = call if is_behind else 0
        if not is_behind or board["behind"][other, me] != self._number:
            self._suspects.pop(other, None)
            return False
        looks = int(board["looks"][other])
        return looks - self._suspects.setdefault(other, looks) >= _LOOKS

    def _call_of(self, local: int) -> WaitingCall:
        row = self._board[local]
        kind, text = row["kind"].decode(errors="ignore"), row["text"].decode(errors="ignore")
        return WaitingCall(kind, int(row["item"]), int(row["number"]), text)

    def _waiting_in(self, members: Iterable[int]) -> dict[int, WaitingCall]:
        return {self._ranks[local]: self._call_of(local) for local in members}


def mismatch(waiting: Mapping[int, WaitingCall]) -> MismatchError:
    """Return the error for ranks that wait for each other in different calls, by rank; equal on all of them."""
    first = min(waiting)
    in_other_calls = [rank for rank in waiting if not waiting[rank].is_same(waiting[first])]
    odd = min(in_other_calls, default=first)  # no other if a rank has moved on to the call of the others
    named = []
    for call in (waiting[first], waiting[odd]):
        ranks = [rank for rank in sorted(waiting) if waiting[rank].is_same(call)]
        kind = f", one of the {call.kind}," if waiting[first].text == waiting[odd].text else ""
        where = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, _MOST_NAMES)}"
        named.append((f"{call.text}{kind}", where))
    text = waiting[first].text
    operation = text.partition(" (" if text.startswith("the ") else " ")[0]
    error = MismatchError(
        operation, expected=" as on ".join(named[0]), got=" on ".join(named[1]),
        remedy="call the same on all ranks, in the same order",
    )  # fmt: skip
    error.is_on_every_rank = True
    return error


LATE, EARLIER, SILENT = "has not come", "is in an earlier call", "does not answer"
LEFT, CLOSED, GONE, STOPPED = "has left the program", "has closed this world", "is gone", "is stopped"
ABANDONED = "has abandoned a call of this world"
UNABLE = (LEFT, CLOSED, ABANDONED, GONE, STOPPED)
"""States of ranks that are not asked."""
_WORDS = (LATE, EARLIER, SILENT, *UNABLE)

_MOST = 9
"""Missing ranks named in a message; further ones are only counted."""
_MESSAGE = np.dtype(
    [
        ("kind", "i1"), ("alone", "?"), ("first", "i4"), ("number", "i4"), ("calls", "i8"), ("total", "i4"),
        ("named", "i1"), ("ranks", "i4", _MOST), ("words", "i1", _MOST), ("call", f"S{TEXT_NBYTES}"),
        ("compares", "?"), ("other", "i4"), ("kind_of_calls", f"S{KIND_NBYTES}"), ("item", "i8"), ("begun", "i8"),
    ]
)  # fmt: skip
_QUESTION, _AT_WORK, _ANSWER, _REPORTED, _LEAVE = range(5)
_COMPARES = -1
"""The call number in a comparison of calls, which does not concern a number."""
_TAG = make_tag(0, 0)
_ANSWER_S = 1.0
"""Seconds that an answer may take, beside the interval of the other watchdog's checks."""


class Question(NamedTuple):
    """Another rank's question about this rank."""

    rank: int
    calls: int
    """The number of calls that the other rank has begun."""
    call: str
    """The call in which it waits."""


class Missing(NamedTuple):
    """The ranks that a call waits for: some by rank with the reason, and their total number."""

    named: Mapping[int, str]
    total: int


class _Roll:
    """A roll call in progress, as one rank of its tree sees it.

    ``first`` is the root and ``number`` counts its roll calls; ``calls`` and ``call`` are the root's, ``alone`` is that
    of `RollCall.call`. ``above`` is the parent, None at the root.
    """

    def __init__(self, first: int, number: int, calls: int, call: bytes, alone: bool, above: int | None) -> None:
        self.first, self.number, self.calls, self.call = first, number, calls, call
        self.alone, self.above = alone, above
        self.unacknowledged: dict[int, float] = {}
        """Children that have not acknowledged the question, and their deadlines (monotonic)."""
        self.at_work: dict[int, float] = {}
        """Children that have acknowledged but not answered it, and their deadlines."""
        self.problems: dict[int, str] = {}
        self.uncounted = 0
        """The number of missing ranks that are not named."""
        self.waiting: WaitingCall | None = None
        """The root's call, if the question compares calls instead of progress."""
        self.other: tuple[int, WaitingCall] | None = None
        """A rank that is behind this call and waits in another one."""

    @property
    def is_over(self) -> bool:
        return not self.unacknowledged and not self.at_work

    @property
    def missing(self) -> Missing:
        return Missing(dict(sorted(self.problems.items())), len(self.problems) + self.uncounted)


class RollCall:
    """One rank's part in roll calls; for one thread.

    Args:
        comm: all ranks; for this object only.
        look_s: seconds between two checks for questions.
        about: returns the known problems of this rank and of visible ones, for a rank that waits in a call of this
            number.
        differs: returns this rank's call if it waits without having begun the given one.
    """

    def __init__(
        self,
        comm: Communicator,
        look_s: float,
        about: Callable[[int], dict[int, str]],
        differs: Callable[[WaitingCall], WaitingCall | None],
    ) -> None:
        self.left: dict[int, tuple[int, str]] = {}
        """The number of calls of each rank that makes no more and has notified this one, and the reason."""
        self._comm, self._about, self._differs = comm, about, differs
        self._compared: dict[tuple[str, int], tuple[int, int]] = {}
        """The latest call that another rank has asked about, by kind and item, and that rank."""
        self._step_s = look_s + _ANSWER_S
        self._rolls: dict[tuple[int, int], _Roll] = {}
        self._numbers = 0
        self._own: _Roll | None = None
        self._claimed_call = -1
        self._reporter: tuple[int, int, float] | None = None
        self._sent: list[tuple[Request, np.ndarray]] = []

    @property
    def limit_s(self) -> float:
        """The maximum duration of a roll call in seconds."""
        return self._limit_s(0)

    def call(self, calls: int, call: str, *, alone: bool) -> None:
        """Start a roll call about this rank's call number ``calls``; `result` returns the outcome.

        Args:
            calls: the number of calls that this rank has begun.
            call: a description of the call.
            alone: whether no other rank would report the same call; then it is completed in any case.
        """
        self._numbers += 1
        self._own = roll = _Roll(self._comm.rank, self._numbers, calls, call.encode(), alone, None)
        if not alone:
            self._reporter = calls, self._comm.rank, time.monotonic()
        self._begin(roll)

    def compare(self, waiting: WaitingCall) -> None:
        """Ask all ranks whether one waits in another call than this one; `compared` returns the outcome."""
        self._numbers += 1
        self._own = roll = _Roll(self._comm.rank, self._numbers, _COMPARES, waiting.text.encode(), True, None)
        roll.waiting = waiting
        self._begin(roll)

    def compared(self) -> tuple[int, WaitingCall] | None:
        """End the roll call; return a rank that waits in another call, and that call."""
        own = self._own
        self.result()
        return None if own is None else own.other

    def is_compared(self, waiting: WaitingCall) -> bool:
        """Return whether a lower rank has asked about the same call."""
        number, rank = self._compared.get((waiting.kind, waiting.item), (0, 0))
        return number == waiting.number and rank < self._comm.rank

    @property
    def is_over(self) -> bool:
        """True when the roll call is complete, or given up."""
        return self._own is None or self._own.is_over

    def result(self) -> Missing | None:
        """End the roll call; return the missing ranks, or None if another rank reports the call."""
        own, self._own = self._own, None
        if own is None:
            return None
        self._rolls.pop((own.first, own.number), None)
        for rank in (*own.unacknowledged, *own.at_work):
            own.problems[rank] = SILENT
        return own.missing

    def is_wanted(self, calls: int) -> bool:
        """Return whether this rank has announced that it reports a call."""
        return self._claimed_call == calls

    def reporter(self, calls: int) -> int | None:
        """Return the rank that reports a call, if known and not overdue; else None."""
        known = self._reporter
        if known is None or known[0] != calls or time.monotonic() - known[2] > 2 * self.limit_s:
            return None
        return known[1]

    def turn(self, waits: int | None) -> Iterator[Question]:
        """Receive messages and advance all roll calls; yield new questions. Never blocks.

        Args:
            waits: the number of the call in which this rank waits for others; None for none.
        """
        self._sent = [(request, message) for request, message in self._sent if not self._has_gone(request)]
        for source, message in self._received():
            key = int(message["first"]), int(message["number"])
            roll = self._rolls.get(key)
            if message["kind"] == _LEAVE:
                self.left[source] = int(message["calls"]), _WORDS[message["words"][0]]
            elif message["kind"] == _QUESTION:
                yield from self._take(source, message, waits)
            elif roll is not None and message["kind"] == _AT_WORK:
                if roll.unacknowledged.pop(source, None) is not None:
                    roll.at_work[source] = time.monotonic() + self._limit_s(self._place(roll, source))
            elif roll is not None and message["kind"] == _REPORTED:
                self._reporter = roll.calls, int(message["ranks"][0]), time.monotonic()
                self._give_up(roll)
            elif roll is not None:
                roll.unacknowledged.pop(source, None)
                roll.at_work.pop(source, None)
                roll.problems.pop(source, None)  # its answer was late
                self._add(roll, {int(rank): _WORDS[word] for rank, word in _entries(message)}, int(message["total"]))
                if message["compares"]:
                    roll.other = int(message["other"]), _waiting_of(message)
        for roll in list(self._rolls.values()):
            self._go_on(roll)

    def leave(self, calls: int, why: str, strangers: Sequence[int]) -> None:
        """Notify the next of ``strangers`` that this rank makes no more calls after number ``calls``, and why.

        One suffices: that rank has left too, and notified one in turn, or may have to end the job.
        """
        rank = min(strangers, key=lambda other: (other - self._comm.rank) % self._comm.size, default=None)
        if rank is not None:
            self._send(rank, kind=_LEAVE, calls=calls, words=_WORDS.index(why))
        for _, message in self._sent:  # leak them, because MPI_Finalize may read them after Python has freed objects
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(message))

    @property
    def lost(self) -> set[int]:
        """The ranks that the library has reported dead."""
        return self._comm.lost

    def _take(self, source: int, question: Any, waits: int | None) -> Iterator[Question]:
        first, calls = int(question["first"]), int(question["calls"])
        key = first, int(question["number"])
        if key in self._rolls:
            return
        waiting = _waiting_of(question) if question["compares"] else None
        if waiting is not None:
            self._compared[waiting.kind, waiting.item] = waiting.number, first
        if not question["alone"]:
            if waits == calls and self._comm.rank < first and self.reporter(calls) is None:
                self._claimed_call = calls
                self._reporter = calls, self._comm.rank, time.monotonic()
            known = self.reporter(calls)
            if known is not None and known < first:
                self._send(source, kind=_REPORTED, first=first, number=key[1], ranks=known)
                return
            self._reporter = calls, first, time.monotonic()
            for roll in [other for other in self._rolls.values() if other.calls == calls and other.first > first]:
                self._give_up(roll)
        roll = _Roll(*key, calls, question["call"], bool(question["alone"]), source)
        roll.waiting = waiting
        self._begin(roll)
        if not roll.is_over:
            self._send(source, kind=_AT_WORK, first=first, number=key[1])
        if waiting is None:
            yield Question(first, calls, question["call"].decode(errors="ignore"))

    def _begin(self, roll: _Roll) -> None:
        self._rolls[roll.first, roll.number] = roll
        if roll.waiting is None:
            self._add(roll, self._about(roll.calls))
        elif (own := self._differs(roll.waiting)) is not None:
            roll.other = self._comm.rank, own
        self._ask_below(roll, self._place(roll, self._comm.rank))

    def _ask_below(self, roll: _Roll, place: int) -> None:
        """Ask the children of a place in the tree; descend below those that cannot answer."""
        for below in (2 * place + 1, 2 * place + 2):
            if below >= self._comm.size:
                continue
            rank = (roll.first + below) % self._comm.size
            if roll.problems.get(rank) in UNABLE or rank in self.lost:
                self._ask_below(roll, below)
            else:
                roll.unacknowledged[rank] = time.monotonic() + self._step_s
                self._send(
                    rank, kind=_QUESTION, alone=roll.alone, first=roll.first, number=roll.number, calls=roll.calls,
                    **({"call": roll.call} | _fields_of(roll.waiting)),
                )  # fmt: skip

    def _go_on(self, roll: _Roll) -> None:
        for waiting in (roll.unacknowledged, roll.at_work):
            for rank in [rank for rank, until_s in waiting.items() if time.monotonic() > until_s]:
                del waiting[rank]
                self._add(roll, {rank: SILENT})
                self._ask_below(roll, self._place(roll, rank))
        if roll.is_over and roll.above is not None:
            del self._rolls[roll.first, roll.number]
            missing, total = roll.missing
            named = list(missing.items())[:_MOST]
            ranks, words = [rank for rank, _ in named], [_WORDS.index(why) for _, why in named]
            other, call = roll.other or (-1, None)
            self._send(
                roll.above, kind=_ANSWER, first=roll.first, number=roll.number, total=total, named=len(named),
                ranks=ranks, words=words, other=other, **_fields_of(call),
            )  # fmt: skip

    def _give_up(self, roll: _Roll) -> None:
        """Give up a roll call, because another rank reports the call; tell the parent."""
        del self._rolls[roll.first, roll.number]
        assert self._reporter is not None
        if roll is self._own:
            self._own = None
        elif roll.above is not None:
            ranks = self._reporter[1]
            self._send(roll.above, kind=_REPORTED, first=roll.first, number=roll.number, ranks=ranks)

    def _add(self, roll: _Roll, problems: Mapping[int, str], total: int = 0) -> None:
        for rank, why in problems.items():
            if roll.problems.get(rank) not in UNABLE:  # a known state is more precise than a missing answer
                roll.problems[rank] = why
        roll.uncounted += max(0, total - len(problems))

    def _place(self, roll: _Roll, rank: int) -> int:
        return (rank - roll.first) % self._comm.size

    def _limit_s(self, place: int) -> float:
        """Return the time limit for a place's answer: twice the time of a message per level below it."""
        levels = 1
        while 2 * place + 1 < self._comm.size:
            place, levels = 2 * place + 1, levels + 1
        return 2 * levels * self._step_s

    def _received(self) -> Iterator[tuple[int, Any]]:
        while (received := self._next()) is not None:
            source, message, request = received
            request.wait()  # immediate: an eager message arrives in one piece
            if message.nbytes == _MESSAGE.itemsize:
                yield source, message.view(_MESSAGE)[0]

    def _next(self) -> tuple[int, np.ndarray, Request] | None:
        try:
            return self._comm.irecv_any(_TAG)
        except WorldAborted:
            raise
        except Exception as error:  # the library's, because a rank is gone
            self._comm.takes_note(error)
            return None

    def _send(self, rank: int, **said: Any) -> None:
        message = np.zeros(1, _MESSAGE)
        for name, value in said.items():
            place = message[name][0]
            if isinstance(place, np.ndarray):
                values = np.atleast_1d(np.asarray(value, place.dtype))
                place[: values.size] = values
            else:
                message[name][0] = value
        try:
            self._sent.append((self._comm.isend(message.view(np.uint8), rank, _TAG), message))
        except WorldAborted:
            raise
        except Exception as error:
            self._comm.takes_note(error)

    def _has_gone(self, request: Request) -> bool:
        try:
            return request.test()
        except WorldAborted:
            raise
        except Exception as error:
            self._comm.takes_note(error)
            return True


def _entries(answer: Any) -> Iterator[tuple[int, int]]:
    named = int(answer["named"])
    return zip(answer["ranks"][:named].tolist(), answer["words"][:named].tolist(), strict=True)


def _fields_of(waiting: WaitingCall | None) -> dict[str, Any]:
    """Return the fields of a message that describe ``waiting``."""
    if waiting is None:
        return {}
    kind, item, number, text = waiting
    return {"compares": True, "kind_of_calls": kind.encode(), "item": item, "begun": number, "call": text.encode()}


def _waiting_of(message: Any) -> WaitingCall:
    text = message["call"].decode(errors="ignore")
    return WaitingCall(message["kind_of_calls"].decode(), int(message["item"]), int(message["begun"]), text)
