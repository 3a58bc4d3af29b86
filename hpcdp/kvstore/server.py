"""The loop that answers ranks of other nodes, and its other end: what this rank asks them.

It probes for messages with naps that double to a millisecond while nothing comes, so a server that is idle needs no
core; many requests are under way at once. A request that may not take effect yet is tried again, and holds up none.

Source: Li et al., "Scaling distributed machine learning with the parameter server", 2014, section 3.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from .. import errors
from ..comm import Communicator, Request, World
from ..comm.communicator import ENDED, short_name_of, wait_for
from ..comm.world import weakly
from ..data_parallel.overlap import CommunicationLane
from ..errors import HpcdpError, to_stderr
from .protocol import Message, MessageKind, decode, following_nbytes, pieces
from .updaters import described

REQUESTS, ANSWERS = 1, 2
"""Tags."""
_FOLLOWING = 4
"""What is added to them for what follows a message; `ENDED` is another tag of the same communicator."""

_ENDING = 9
"""Of a message that needs no answer: a worker's program has ended, where some have died."""

_LANE = "server"
_LINGER_S, _NAP_S = 1e-3, 50e-6
"""After a message the next one is looked for so long, after naps."""
_AWAKE_S, _LONG_NAP_S = 0.5, 5e-3
"""When nothing has come for so long, naps are as long as this."""
_AT_ONCE = 64
"""So many messages are received before any is answered."""

Attempt = Callable[[], Message | None]
"""What answers a request; None, or a message of kind HELD: not yet."""


class Answers(Protocol):
    """What answers the requests for one store."""

    def answer(self, source: int, message: Message) -> Attempt:
        """How to answer a request of rank ``source``; raises `HpcdpError` for one that is wrong."""
        ...


class PendingRequest:
    """A request under way, complete when its answer is there."""

    def __init__(self, server: Server, number: int, dest: int, say_held: Callable[[Message], None] | None) -> None:
        self._server, self._number, self.dest = server, number, dest
        self._where = server.called(dest)
        self._say_held = say_held
        self._answer: Message | None = None

    def test(self) -> bool:
        """Whether the answer has come."""
        if self._answer is None:
            answer = self._server.answer_to(self._number)
            if answer is None and self.dest in self._server.comm.lost:
                raise HpcdpError(
                    "key-value store", where=f"on {self._where}", expected="an answer", got="none: it has died",
                    remedy="start again from the last checkpoint",
                )  # fmt: skip
            if answer is None or answer.kind is not MessageKind.HELD:
                self._answer = answer
            elif self._say_held is not None:
                self._say_held(answer)
        return self._answer is not None

    def wait(self) -> None:
        """Block until it has."""
        wait_for(self.test)

    @property
    def held_s(self) -> float:
        """For how many seconds a push was held back there, once the answer is here."""
        return 0.0 if self._answer is None or math.isnan(self._answer.rate) else self._answer.rate

    def answer(self) -> Message:
        """The answer, once it is there.

        Raises:
            HpcdpError: what kept the other rank from doing what was asked.
        """
        assert self._answer is not None
        if self._answer.kind is MessageKind.FAILED:
            raise _as_it_was(self._answer.text(), f"on {self._where}")
        return self._answer


def _as_it_was(text: str, where: str) -> HpcdpError:
    """An error of another rank, of the same kind where that is one of hpcdp's."""
    name, _, said = text.partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, HpcdpError):
        return kind(said, where=where)
    return HpcdpError(text, where=where)


class _Arriving:
    """A message on its way, with what follows it."""

    def __init__(self, comm: Communicator, tag: int, source: int, message: np.ndarray, request: Request) -> None:
        self.source, self._message = source, message
        self._rest: np.ndarray | None = None
        self._comm, self._tag, self._begun = comm, tag + _FOLLOWING, False
        self._requests = deque([request])

    def test(self) -> bool:
        """Whether all of it is here; to be asked when all of its sender's earlier ones are."""
        while True:
            while self._requests and self._requests[0].test():
                self._requests.popleft()
            if self._requests or self._begun:
                return not self._requests
            self._begun = True
            if nbytes := following_nbytes(self._message):
                self._rest = np.empty(nbytes, np.uint8)
                self._requests.extend(self._comm.irecv(piece, self.source, self._tag) for piece in pieces(self._rest))

    def decoded(self) -> Message:
        """See `decode`."""
        return decode(self._message, self._rest)


_busy: set[Server] = set()
"""Those of whose stores some workers have not left, who may ask when this rank holds neither store nor world."""


class Server:
    """A rank's end of the exchange with ranks of other nodes. All ranks make it together; use `of`.

    Args:
        group: workers and servers; its ranks are the addresses.
    """

    def __init__(self, group: World, has_servers: bool) -> None:
        # Behind servers of their own there is nobody else; they may never hear of a store, and wait for nothing.
        self.comm = group.comm if has_servers else group.comm.duplicate()
        self._ending = None if has_servers else group.comm.duplicate()  # what fails on it spoils no other messages
        self._workers = group.size - group.num_servers
        self.stores: dict[int, Answers] = {}
        self._left: dict[int, set[int]] = {}
        """Of a store that not all workers have left: this rank, if it has, and those of `_below` whose workers have."""
        own, workers = self.comm.rank, self._workers
        below = [rank for rank in (2 * own + 1, 2 * own + 2) if rank < self.comm.size]
        self._above = (own - 1) // 2 if own else None
        """A binary tree of all ranks, by which they tell that workers have left a store: 2 (n - 1) messages in all."""
        self._below = below
        self._to_leave = {rank for rank in (own, *below) if rank < workers}  # behind a server there are servers alone
        self.commands: deque[dict[str, Any]] = deque()
        """What the first worker has told this server to do together with all others."""
        self.sent_nbytes = 0
        """By this rank, to others."""
        self._arriving: list[_Arriving] = []
        self._answering: list[_Arriving] = []
        self._waiting: list[tuple[int, int, Attempt]] = []
        self._answers: dict[int, Message] = {}
        self._sending: deque[Request] = deque()
        self._requests = 0
        self._looking = threading.Lock()
        self._counting = threading.RLock()  # a store that is dropped meanwhile tells so within
        self._complained = False
        self._idle_since = time.monotonic()
        self._engine = engine = CommunicationLane.of(group).engine  # whose threads end with it
        engine.add_lane(_LANE, idle=weakly(self._poll))  # a thread would keep it, and so the engine, for ever
        engine.push(lambda: None, lane=_LANE, name="start of the server")
        if not has_servers:
            group.endings.add(self.end)  # called after those of the stores, which were made later

    @classmethod
    def of(cls, group: World, has_servers: bool) -> Server:
        """That of ``group``; all its ranks must call."""
        return group.kept.get(cls) or group.keep(cls, lambda: cls(group, has_servers))

    def called(self, rank: int) -> str:
        """What errors call a worker or a server."""
        return short_name_of(rank, self._workers)

    def ask(self, dest: int, message: Message, say_held: Callable[[Message], None] | None = None) -> PendingRequest:
        """Send a request to another rank; ``say_held`` is given what that says while it holds a push back."""
        with self._counting:
            self._requests += 1
            message.request = number = self._requests
        self._send(dest, message, REQUESTS)
        return PendingRequest(self, number, dest, say_held)

    def tell(self, dest: int, message: Message) -> None:
        """Send a request to another rank, and drop its answer."""
        self._send(dest, message, REQUESTS)

    def leave(self, store: int) -> None:
        """Ask for nothing of a store any more: what keeps its keys drops them once the last worker has left.

        Whoever has left, with all below it in the tree, says so upwards; the root says downwards that all have.
        """
        self._count_left(store, self.comm.rank)

    def serve(self, store: int, answers: Answers) -> None:
        """Answer what others ask of a store, until all of its workers have left."""
        with self._counting:
            self.stores[store] = answers
            _busy.add(self)

    def _count_left(self, store: int, rank: int) -> None:
        """Take note that ``rank`` has left, this one or one that is next to it in the tree."""
        with self._counting:
            left = self._left.setdefault(store, set())
            left.add(rank)
            have_all_left = rank == self._above or (self._above is None and left == self._to_leave)
            if have_all_left:
                del self._left[store]
                for dest in self._below:
                    self.tell(dest, Message(MessageKind.LEAVE, store))
                self.stores.pop(store, None)
            elif left == self._to_leave and self._above is not None:
                self.tell(self._above, Message(MessageKind.LEAVE, store))

    def answer_to(self, number: int) -> Message | None:
        """The answer to a request, given out once; None: it has not come."""
        if number not in self._answers and self._looking.acquire(blocking=False):
            try:
                self._collect_answers()
            finally:
                self._looking.release()
        return self._answers.pop(number, None)

    def _send(self, dest: int, message: Message, tag: int) -> None:
        first, following = message.encode()
        with self._counting:  # what follows one message comes before what follows the next
            self.sent_nbytes += first.nbytes + sum(piece.nbytes for piece in following)
            self._drop_sent()
            if dest in self.comm.lost:
                return  # who waits for its answer is told
            try:
                self._sending.append(self.comm.isend(first, dest, tag))
                self._sending.extend(self.comm.isend(piece, dest, tag + _FOLLOWING) for piece in following)
            except Exception as error:
                if not self.comm.takes_note(error):
                    raise

    def _drop_sent(self) -> None:
        """One by one: a store that is dropped meanwhile sends, and so comes here within, and all others stay kept."""
        for _ in range(len(self._sending)):
            if self._sending:
                each = self._sending.popleft()
                if not self._has_ended(each):
                    self._sending.append(each)

    def _has_ended(self, moving: Request | _Arriving) -> bool:
        """Whether a message is here, or there, or its other end has died."""
        try:
            return moving.test()
        except Exception as error:
            if not self.comm.takes_note(error):
                raise
            return True

    def _poll(self) -> bool:
        with self._counting:
            if not (self.stores or self._sending):
                _busy.discard(self)
        if self._look():
            until = time.monotonic() + _LINGER_S
            while time.monotonic() < until:
                if self._look():
                    until = time.monotonic() + _LINGER_S
                else:
                    time.sleep(_NAP_S)
            self._idle_since = until
        elif time.monotonic() - self._idle_since > _AWAKE_S:
            time.sleep(_LONG_NAP_S)
        return True

    def _look(self) -> bool:
        """Go on with everything as far as possible; whether anything has happened or is arriving."""
        for _ in range(_AT_ONCE):
            found = self.comm.irecv_any(REQUESTS)
            if found is None:
                break
            self._arriving.append(_Arriving(self.comm, REQUESTS, *found))
        busy = bool(self._arriving)
        for each in self._take_complete(self._arriving):
            self._receive(each)
        for waiting in tuple(self._waiting):
            if self._try(*waiting):
                self._waiting.remove(waiting)
                busy = True
        if self._sending:
            with self._counting:
                self._drop_sent()
        with self._looking:
            self._collect_answers()
        return busy or bool(self._answering)

    def _collect_answers(self) -> None:
        while (found := self.comm.irecv_any(ANSWERS)) is not None:
            self._answering.append(_Arriving(self.comm, ANSWERS, *found))
        for each in self._take_complete(self._answering):
            message = each.decoded()
            if message.request:
                self._answers[message.request] = message

    def _take_complete(self, arriving: list[_Arriving]) -> list[_Arriving]:
        """Those that are here, in their order; none before an earlier one of its sender. They leave the list.

        What the dead have sent in part is dropped.
        """
        complete, left, behind = [], [], set[int]()
        for each in arriving:
            if each.source in behind or not self._has_ended(each):
                behind.add(each.source)
                left.append(each)
            elif each.source not in self.comm.lost:
                complete.append(each)
        arriving[:] = left
        return complete

    def _receive(self, arrived: _Arriving) -> None:
        source = arrived.source
        try:
            message = arrived.decoded()
        except HpcdpError as error:  # nobody can be told: who knows which request it was
            self._complain(source, error)
            return
        try:
            if message.kind is MessageKind.COMMAND:
                self.commands.append(_command(source, message.text()))
                self._answer(source, message.request, Message(MessageKind.DONE))
                return
            if message.store not in self.stores:
                expected = f"one of the stores {sorted(self.stores)}"
                raise HpcdpError("key-value store message", expected=expected, got=f"store {message.store}")
            if message.kind is MessageKind.LEAVE:
                self._count_left(message.store, source)
                return
            attempt = self.stores[message.store].answer(source, message)
        except Exception as error:  # whatever it is, the loop goes on
            self._answer(source, message.request, Message.of_text(MessageKind.FAILED, str(error)))
            return
        if not self._try(source, message.request, attempt):
            self._waiting.append((source, message.request, attempt))

    def _try(self, source: int, request: int, attempt: Attempt) -> bool:
        try:
            answer = attempt()
        except Exception as error:  # a user's function may raise anything
            answer = Message.of_text(MessageKind.FAILED, described(error))
        if answer is not None:
            self._answer(source, request, answer)
        return answer is not None and answer.kind is not MessageKind.HELD

    def _answer(self, dest: int, request: int, answer: Message) -> None:
        answer.request = request
        self._send(dest, answer, ANSWERS)

    def _complain(self, source: int, error: HpcdpError) -> None:
        if not self._complained:
            self._complained = True
            own = self.called(self.comm.rank)
            to_stderr(f"{own}: from {self.called(source)}: {error}")

    def end(self) -> None:
        """Go on answering until all workers have ended, those whose keys lie elsewhere, too; every worker must call."""
        count = np.ones(1)
        assert self._ending is not None
        try:
            ended = None if self.comm.lost else self._ending.native_iallreduce(count, "sum")
            while ended is not None and not self.comm.lost and not ended.test():
                time.sleep(_LONG_NAP_S)
        except Exception as error:
            # Of the death of another one a library may tell by whatever error.
            if not (self._ending.takes_note(error) or self.comm.lost):
                raise
        if count[0] != self.comm.size:  # Open MPI says so only on some ranks
            self._end_without_the_dead()

    def _end_without_the_dead(self) -> None:
        missing = set(range(self.comm.size)) - {self.comm.rank}
        for rank in missing:
            self._send(rank, Message(MessageKind.DONE), _ENDING)
        while missing - self.comm.lost:
            found = self.comm.irecv_any(_ENDING)
            if found is None:
                time.sleep(_LONG_NAP_S)
            else:
                missing.discard(found[0])

    def next_commands(self, num_workers: int) -> Iterator[dict[str, Any]]:
        """The commands to a server, one after another, until all workers have ended, or died."""
        workers = set(range(num_workers))
        ended = set[int]()
        while not workers <= ended | self.comm.lost or self.commands:
            if self.commands:
                yield self.commands.popleft()
            elif (found := self.comm.irecv_any(ENDED)) is not None:
                ended.add(found[0])
            else:
                time.sleep(_LONG_NAP_S)


def _command(source: int, text: str) -> dict[str, Any]:
    try:
        command = json.loads(text)
    except ValueError:
        command = None
    if source != 0 or not isinstance(command, dict) or not isinstance(command.get("do"), str):
        raise HpcdpError("command to a server", expected="JSON with what to do, from rank 0", got=f"{text!r:.80}")
    return command
