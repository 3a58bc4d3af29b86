"""How many calls the ranks of other nodes have made, asked of their watchdogs, which answer while those are stuck.

A rank asks another one again only when it has answered; so at most one question and one answer are on their way from
one rank to another, each has a receive of its own, and each fits in any library's eager messages.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import WorldAborted
from .communicator import Communicator, Request, make_tag

_MESSAGE = np.dtype([("calls", np.int64), ("within", np.bool_), ("call", "S119")])
_QUESTION, _ANSWER = range(2)


class Question(NamedTuple):
    """What another rank wants to know, and why."""

    rank: int
    calls: int
    """How many calls it has begun itself."""
    call: str
    """The one that it waits in."""


class Answer(NamedTuple):
    """How far another rank is."""

    calls: int
    within: bool
    """Whether it is in a call."""


class RollCall:
    """One rank's end of the questions and answers; only one thread may use it.

    Args:
        comm: all ranks; nothing else may use it.
        others: those that this one may ask, and that may ask it.
    """

    def __init__(self, comm: Communicator, others: Sequence[int]) -> None:
        self.answers: dict[int, Answer] = {}
        """The latest of each rank that has ever been asked and has answered."""
        self.left: dict[int, int] = {}
        """Of each rank that has left, and has told this one: how many calls it has begun."""
        self._comm = comm
        self._incoming, self._outgoing = blocks = np.zeros((2, 2, comm.size), _MESSAGE)
        self._sent: dict[tuple[int, int], Request] = {}
        self._asked: dict[int, Request] = {}
        self._questions = {rank: self._receive(_QUESTION, rank) for rank in others}
        # A question may come while MPI_Finalize waits for the others, when Python has freed all that it could.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(blocks))
        weakref.finalize(self, _cancel, comm, self._questions, self._asked, blocks).atexit = False

    def ask(self, ranks: Iterable[int], calls: int, call: str) -> set[int]:
        """Ask ``ranks`` how far they are, this one being in its call number ``calls``; those that can be asked.

        One that still owes an answer is not asked again: what it answers then is as new.
        """
        reached = set()
        for rank in self._questions.keys() & set(ranks):
            self.answers.pop(rank, None)
            if rank not in self._asked:
                self._asked[rank] = self._receive(_ANSWER, rank)
                self._send(_QUESTION, rank, (calls, True, call.encode()))
            reached.add(rank)
        return reached

    def questions(self) -> Iterator[Question]:
        """Take in what has come, answers, too; those who have asked must be answered. Never blocks."""
        for rank in [rank for rank, request in self._asked.items() if self._has_come(request)]:
            del self._asked[rank]
            said = self._incoming[_ANSWER, rank]
            self.answers[rank] = Answer(int(said["calls"]), bool(said["within"]))
        for rank in [rank for rank, request in self._questions.items() if self._has_come(request)]:
            said = self._incoming[_QUESTION, rank]
            if said["calls"] < 0:
                del self._questions[rank]
                self.left[rank] = -1 - int(said["calls"])
                continue
            question = Question(rank, int(said["calls"]), said["call"].decode(errors="ignore"))
            self._questions[rank] = self._receive(_QUESTION, rank)
            yield question

    def answer(self, rank: int, calls: int, within: bool) -> None:
        """Tell ``rank``, which has asked, how many calls this one has begun, and whether it is in one."""
        self._send(_ANSWER, rank, (calls, within, b""))

    def leave(self, calls: int) -> None:
        """Tell that this rank has begun so many calls and begins no more: the next rank of another node alone, which
        has left, too, and told one in turn, or may have to end the job."""
        rank = min(self._questions, key=lambda other: (other - self._comm.rank) % self._comm.size, default=None)
        if rank is not None:
            self._send(_QUESTION, rank, (-1 - calls, False, b""))

    def _receive(self, kind: int, rank: int) -> Request:
        place = self._incoming[kind, rank : rank + 1]
        return self._comm.irecv(place.view(np.uint8), rank, make_tag(0, kind))

    def _send(self, kind: int, rank: int, said: tuple[int, bool, bytes]) -> None:
        before = self._sent.get((kind, rank))
        if before is not None:
            before.test()  # it is complete, or the other rank would have neither asked again nor answered
        place = self._outgoing[kind, rank : rank + 1]
        place[0] = said
        self._sent[kind, rank] = self._comm.isend(place.view(np.uint8), rank, make_tag(0, kind))

    @property
    def lost(self) -> set[int]:
        """Those of which the library has told that they have died."""
        return self._comm.lost

    def _has_come(self, request: Request) -> bool:
        try:
            return request.test()
        except WorldAborted:
            raise
        except Exception as error:  # the library's: the other one is gone, and will be missed
            self._comm.takes_note(error)
            return False


def _cancel(comm: Communicator, questions: dict[int, Request], asked: dict[int, Request], blocks: np.ndarray) -> None:
    """Receive no more, for a world that ends before the program: its communicator could not be freed."""
    for each in (*questions.values(), *asked.values()):
        comm.cancel(each)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(blocks))
