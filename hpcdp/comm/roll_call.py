"""How far all ranks are, asked of their watchdogs by a tree: those answer while the ranks themselves are stuck.

A rank that waits too long calls the roll. Its question goes down a binary tree whose root it is, and the answers come
up again, each with the ranks below that are missing: some 3 (n - 1) short messages, and at most two go to, and two
come from, any rank. Who does not answer is passed over, and those below it are asked by who has asked it.

A call that several ranks wait in is reported by the lowest of them. A rank that is asked about it by a higher one
answers that it reports it itself, or knows of a lower one; the higher one gives up then. Where many begin at once these
are some n log n messages.

Messages fit in any library's eager ones. No receive is posted, so nothing is kept for each other rank.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import WorldAborted
from .communicator import Communicator, Request, make_tag

LATE, EARLIER, SILENT = "has not come", "is in an earlier call", "does not answer"
LEFT, CLOSED, GONE, STOPPED = "has left the program", "has closed this world", "is gone", "is stopped"
_WORDS = (LATE, EARLIER, SILENT, LEFT, CLOSED, GONE, STOPPED)
UNABLE = (LEFT, CLOSED, GONE, STOPPED)
"""Of ranks that need not be asked."""

_MOST = 9
"""So many missing ranks are named in a message; the others are counted."""
_MESSAGE = np.dtype(
    [
        ("kind", "i1"), ("alone", "?"), ("first", "i4"), ("number", "i4"), ("calls", "i8"), ("total", "i4"),
        ("named", "i1"), ("ranks", "i4", _MOST), ("words", "i1", _MOST), ("call", "S119"),
    ]
)  # fmt: skip
_QUESTION, _AT_WORK, _ANSWER, _REPORTED, _LEAVE = range(5)
_TAG = make_tag(0, 0)
_ANSWER_S = 1.0
"""How long an answer may take, beside the time until the other watchdog looks."""


class Question(NamedTuple):
    """What another rank wants to know, and why."""

    rank: int
    calls: int
    """How many calls it has begun itself."""
    call: str
    """The one that it waits in."""


class Missing(NamedTuple):
    """The ranks that a call waits for: some by name, with what is the matter with each, and how many they are."""

    named: Mapping[int, str]
    total: int


class _Roll:
    """A roll call under way, as one rank of its tree sees it.

    Args:
        first: the rank that calls the roll, the root.
        number: of that rank's roll calls.
        above: who has asked; None at the root.
    """

    def __init__(self, first: int, number: int, calls: int, call: bytes, alone: bool, above: int | None) -> None:
        self.first, self.number, self.calls, self.call = first, number, calls, call
        self.alone, self.above = alone, above
        self.asked: dict[int, float] = {}
        """Who has not said that it is at work, and when it should have (monotonic)."""
        self.at_work: dict[int, float] = {}
        """Who has not answered yet, and when it should have."""
        self.found: dict[int, str] = {}
        self.uncounted = 0
        """Missing ranks that are not named."""

    @property
    def is_over(self) -> bool:
        return not self.asked and not self.at_work

    @property
    def missing(self) -> Missing:
        return Missing(dict(sorted(self.found.items())), len(self.found) + self.uncounted)


class RollCall:
    """One rank's end of the questions and answers; only one thread may use it.

    Args:
        comm: all ranks; nothing else may use it.
        look_s: how often ranks look for questions.
        about: returns what this rank knows to be wrong with itself, and with ranks that it can see, where another one
            waits in a call of this number.
    """

    def __init__(self, comm: Communicator, look_s: float, about: Callable[[int], dict[int, str]]) -> None:
        self.left: dict[int, int] = {}
        """Of each rank that has left, and has notified this one: how many calls it has begun."""
        self._comm, self._about = comm, about
        self._step_s = look_s + _ANSWER_S
        self._rolls: dict[tuple[int, int], _Roll] = {}
        self._numbers = 0
        self._own: _Roll | None = None
        self._wanted = -1
        self._reporter: tuple[int, int, float] | None = None
        self._sent: list[tuple[Request, np.ndarray]] = []

    @property
    def limit_s(self) -> float:
        """How long a roll call may take."""
        return self._limit_s(0)

    def call(self, calls: int, call: str, *, alone: bool) -> None:
        """Call the roll, this rank being in its call number ``calls``; `result` tells what comes of it.

        Args:
            alone: whether no other rank would report the same: it is called to its end in any case.
        """
        self._numbers += 1
        self._own = roll = _Roll(self._comm.rank, self._numbers, calls, call.encode(), alone, None)
        if not alone:
            self._reporter = calls, self._comm.rank, time.monotonic()
        self._begin(roll)

    @property
    def is_over(self) -> bool:
        """Whether the roll has been called to its end, or given up."""
        return self._own is None or self._own.is_over

    def result(self) -> Missing | None:
        """Return the missing ranks; None where another rank reports the call. The roll call ends here."""
        own, self._own = self._own, None
        if own is None:
            return None
        self._rolls.pop((own.first, own.number), None)
        for rank in (*own.asked, *own.at_work):
            own.found[rank] = SILENT
        return own.missing

    def is_wanted(self, calls: int) -> bool:
        """Return whether this rank has said that it reports a call."""
        return self._wanted == calls

    def reporter(self, calls: int) -> int | None:
        """Return the rank that reports a call, as far as is known, None where there is none, or it should have."""
        known = self._reporter
        if known is None or known[0] != calls or time.monotonic() - known[2] > 2 * self.limit_s:
            return None
        return known[1]

    def turn(self, waits: int | None) -> Iterator[Question]:
        """Take in what has come and go on with all roll calls; yield questions that are new. Never blocks.

        Args:
            waits: the number of the call in which this rank waits for others, None where it is in none.
        """
        self._sent = [(request, message) for request, message in self._sent if not self._has_gone(request)]
        for source, said in self._received():
            key = int(said["first"]), int(said["number"])
            roll = self._rolls.get(key)
            if said["kind"] == _LEAVE:
                self.left[source] = int(said["calls"])
            elif said["kind"] == _QUESTION:
                yield from self._take(source, said, waits)
            elif roll is not None and said["kind"] == _AT_WORK:
                if roll.asked.pop(source, None) is not None:
                    roll.at_work[source] = time.monotonic() + self._limit_s(self._place(roll, source))
            elif roll is not None and said["kind"] == _REPORTED:
                self._reporter = roll.calls, int(said["ranks"][0]), time.monotonic()
                self._give_up(roll)
            elif roll is not None:
                roll.asked.pop(source, None)
                roll.at_work.pop(source, None)
                roll.found.pop(source, None)  # it was late
                self._add(roll, {int(rank): _WORDS[word] for rank, word in _entries(said)}, int(said["total"]))
        for roll in list(self._rolls.values()):
            self._go_on(roll)

    def leave(self, calls: int, strangers: Sequence[int]) -> None:
        """Tell that this rank has begun so many calls and begins no more: the next of ``strangers`` alone.

        That one has left, too, and notified one in turn, or may have to end the job.
        """
        rank = min(strangers, key=lambda other: (other - self._comm.rank) % self._comm.size, default=None)
        if rank is not None:
            self._send(rank, kind=_LEAVE, calls=calls)
        for _, message in self._sent:  # may be read while MPI_Finalize waits, when Python has freed all that it could
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(message))

    @property
    def lost(self) -> set[int]:
        """Those that the library has reported dead."""
        return self._comm.lost

    def _take(self, source: int, said: Any, waits: int | None) -> Iterator[Question]:
        first, calls = int(said["first"]), int(said["calls"])
        key = first, int(said["number"])
        if key in self._rolls:
            return
        if not said["alone"]:
            if waits == calls and self._comm.rank < first and self.reporter(calls) is None:
                self._wanted = calls
                self._reporter = calls, self._comm.rank, time.monotonic()
            known = self.reporter(calls)
            if known is not None and known < first:
                self._send(source, kind=_REPORTED, first=first, number=key[1], ranks=known)
                return
            self._reporter = calls, first, time.monotonic()
            for roll in [each for each in self._rolls.values() if each.calls == calls and each.first > first]:
                self._give_up(roll)
        roll = _Roll(*key, calls, said["call"], bool(said["alone"]), source)
        self._begin(roll)
        if not roll.is_over:
            self._send(source, kind=_AT_WORK, first=first, number=key[1])
        yield Question(first, calls, said["call"].decode(errors="ignore"))

    def _begin(self, roll: _Roll) -> None:
        self._rolls[roll.first, roll.number] = roll
        self._add(roll, self._about(roll.calls))
        self._ask_below(roll, self._place(roll, self._comm.rank))

    def _ask_below(self, roll: _Roll, place: int) -> None:
        """Ask who is below a place in the tree, or who is below those who cannot answer."""
        for below in (2 * place + 1, 2 * place + 2):
            if below >= self._comm.size:
                continue
            rank = (roll.first + below) % self._comm.size
            if roll.found.get(rank) in UNABLE or rank in self.lost:
                self._ask_below(roll, below)
            else:
                roll.asked[rank] = time.monotonic() + self._step_s
                self._send(
                    rank, kind=_QUESTION, alone=roll.alone, first=roll.first, number=roll.number, calls=roll.calls,
                    call=roll.call,
                )  # fmt: skip

    def _go_on(self, roll: _Roll) -> None:
        for waiting in (roll.asked, roll.at_work):
            for rank in [rank for rank, until_s in waiting.items() if time.monotonic() > until_s]:
                del waiting[rank]
                self._add(roll, {rank: SILENT})
                self._ask_below(roll, self._place(roll, rank))
        if roll.is_over and roll.above is not None:
            del self._rolls[roll.first, roll.number]
            missing, total = roll.missing
            named = list(missing.items())[:_MOST]
            ranks, words = [rank for rank, _ in named], [_WORDS.index(why) for _, why in named]
            self._send(
                roll.above, kind=_ANSWER, first=roll.first, number=roll.number, total=total, named=len(named),
                ranks=ranks, words=words,
            )  # fmt: skip

    def _give_up(self, roll: _Roll) -> None:
        """Another rank reports the call; notify the rank that has asked."""
        del self._rolls[roll.first, roll.number]
        assert self._reporter is not None
        if roll is self._own:
            self._own = None
        elif roll.above is not None:
            ranks = self._reporter[1]
            self._send(roll.above, kind=_REPORTED, first=roll.first, number=roll.number, ranks=ranks)

    def _add(self, roll: _Roll, found: Mapping[int, str], total: int = 0) -> None:
        for rank, why in found.items():
            if roll.found.get(rank) not in UNABLE:  # which says more than that nobody answers there
                roll.found[rank] = why
        roll.uncounted += max(0, total - len(found))

    def _place(self, roll: _Roll, rank: int) -> int:
        return (rank - roll.first) % self._comm.size

    def _limit_s(self, place: int) -> float:
        """Return how long the answer of a place may take: twice the time of a message for each level below it."""
        levels = 1
        while 2 * place + 1 < self._comm.size:
            place, levels = 2 * place + 1, levels + 1
        return 2 * levels * self._step_s

    def _received(self) -> Iterator[tuple[int, Any]]:
        while (found := self._next()) is not None:
            source, message, request = found
            request.wait()  # it is here: it came in one piece
            if message.nbytes == _MESSAGE.itemsize:
                yield source, message.view(_MESSAGE)[0]

    def _next(self) -> tuple[int, np.ndarray, Request] | None:
        try:
            return self._comm.irecv_any(_TAG)
        except WorldAborted:
            raise
        except Exception as error:  # the library's: a rank is gone, and will be missed
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


def _entries(said: Any) -> Iterator[tuple[int, int]]:
    named = int(said["named"])
    return zip(said["ranks"][:named].tolist(), said["words"][:named].tolist(), strict=True)
