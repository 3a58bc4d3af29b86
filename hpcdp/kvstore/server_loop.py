"""Messages to and from servers, the loop that answers those of other nodes, and this rank's own requests to them.

A `Message` is a header of fixed length, little-endian, then the bytes of an array, codes or text. Messages are checked
before use, and nothing is unpickled. A payload longer than a message follows in pieces: on TCP, two long messages in
opposite directions on one link would block each other's rendezvous.

The loop polls for messages, and sleeps while none arrive, so that an idle server needs no core. Many requests are under
way at once. A request that may not take effect yet is tried again, and does not delay others.

Source: Li et al., "Scaling distributed machine learning with the parameter server", 2014, section 3.
"""

from __future__ import annotations

import json
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from .. import errors
from ..comm import Communicator, Request, World
from ..comm.communicator import ENDED, short_name_of, wait_for
from ..comm.progress import MESSAGE_NBYTES, segments
from ..comm.world import weakly
from ..data_parallel.overlap import CommunicationLane
from ..errors import HpcdpError, MismatchError, to_stderr
from .arguments import STORABLE
from .updaters import described

MOST_NBYTES = 512 << 20
"""Most bytes of a part, so that 32 bits count the bytes of its message."""

VERSION = 1


_HEADER = struct.Struct("<4sBBBBHHIQqqdIQ4x")


HEADER_NBYTES = _HEADER.size


_MAGIC = b"hkvs"


DTYPES = STORABLE
"""Dtypes of payloads; text and codes are uint8."""


NO_STATE = 2**32 - 1
"""`Message.which` of a message about the number of updates alone."""


VALUE = 2**32 - 2
"""`Message.which` of a message that writes the value."""


class MessageKind(IntEnum):
    """A kind of request or answer."""

    PUSH = 1
    PULL = 2
    PUSHPULL = 3
    TICKET = 4
    TAKE = 5
    READ_STATE = 6
    WRITE_STATE = 7
    CLOCK = 8
    GONE = 9
    COMMAND = 10
    DONE = 11
    """The answer to a request that was executed."""
    FAILED = 12
    """The answer to a request that failed, with a text that gives the reason."""
    SCHEDULE = 13
    """A request that sets the sender's learning rate schedule, as JSON."""
    HELD = 14
    """An answer to a push before the final one: the workers for which it waits."""
    LEAVE = 15
    """The sender sends no more requests for a store, whose keys are dropped after all workers have left."""
    PASS = 16
    """The sender skips a push of a key, and counts it for the staleness bound."""


@dataclass
class Message:
    """A message between a worker and a server."""

    kind: MessageKind
    store: int = 0
    key: int = 0
    """Number of the key, in the order of `init`."""
    part: int = 0
    request: int = 0
    """Number that the sender gives to a request, and that its answer repeats."""
    ticket: int = -1
    """Position among the operations on a key of several parts; -1 for a key of one part."""
    number: int = 0
    """Version, or another number that depends on ``kind``."""
    rate: float = float("nan")
    """Learning rate of a push, NaN for a schedule's; in the answer to a push, the seconds that it waited."""
    which: int = 0
    """Number of an optimizer state, in the order of their names."""
    coded: bool = False
    """True if ``payload`` holds a codec's codes."""
    payload: np.ndarray | None = None
    """A contiguous array of one of `DTYPES`."""

    def encode(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the message as bytes, dtype uint8, and the pieces that follow it, views of a long payload."""
        body = np.empty(0, np.uint8) if self.payload is None else self.payload
        data = body.reshape(-1).view(np.uint8)
        follows = HEADER_NBYTES + data.size > MESSAGE_NBYTES
        message = np.empty(HEADER_NBYTES + (0 if follows else data.size), np.uint8)
        _HEADER.pack_into(
            message.data, 0, _MAGIC, VERSION, self.kind, DTYPES.index(body.dtype), self.coded, self.store, self.part,
            self.key, self.request, self.ticket, self.number, self.rate, self.which, data.size if follows else 0,
        )  # fmt: skip
        if follows:
            return message, pieces(data)
        message[HEADER_NBYTES:] = data
        return message, []

    def text(self) -> str:
        """Return the payload as text."""
        return "" if self.payload is None else self.payload.tobytes().decode(errors="replace")

    @classmethod
    def of_text(cls, kind: MessageKind, text: str, **fields: int) -> Message:
        """Return a message with text; halves of surrogate pairs, as in some file names, are escaped."""
        return cls(kind, payload=np.frombuffer(text.encode(errors="backslashreplace"), np.uint8), **fields)  # type: ignore[arg-type]


def pieces(data: np.ndarray) -> list[np.ndarray]:
    """Return views of a long payload's bytes in sending order."""
    return segments(data, MESSAGE_NBYTES)


def following_nbytes(message: np.ndarray) -> int:
    """Return the number of bytes that follow a message in `pieces`; 0 for none, and for an invalid message."""
    if message.size != HEADER_NBYTES or bytes(message[:4]) != _MAGIC:
        return 0
    nbytes: int = _HEADER.unpack_from(message.data)[-1]
    return nbytes if MESSAGE_NBYTES - HEADER_NBYTES < nbytes <= MOST_NBYTES else 0


def decode(message: np.ndarray, following: np.ndarray | None = None) -> Message:
    """Decode a message from its bytes, dtype uint8, and those that followed; the payload is a view of them.

    Raises:
        MismatchError: the bytes are not those of `Message.encode` in this version.
    """
    if message.size < HEADER_NBYTES:
        raise MismatchError(
            "key-value store message", expected=f"{HEADER_NBYTES} bytes or more", got=f"{message.size} bytes"
        )
    magic, version, kind, dtype, coded, store, part, *fields, follow = _HEADER.unpack_from(message.data)
    if magic != _MAGIC or version != VERSION:
        got = f"{bytes(magic)!r}, version {version}"
        raise MismatchError("key-value store message", expected=f"{_MAGIC!r}, version {VERSION}", got=got)
    if kind not in set(MessageKind) or dtype >= len(DTYPES) or coded > 1:
        got = f"kind {kind}, dtype {dtype}, coded {coded}"
        raise MismatchError("key-value store message", expected="a known kind and dtype", got=got)
    body = message[HEADER_NBYTES:] if following is None else following
    if follow != (0 if following is None else following.size):
        expected, got = f"{0 if following is None else following.size} following bytes", f"a length of {follow}"
        raise MismatchError("key-value store message", expected=expected, got=got)
    if body.size % DTYPES[dtype].itemsize:
        got = f"{body.size} bytes"
        raise MismatchError("key-value store message", expected=f"whole elements of {DTYPES[dtype]}", got=got)
    payload = np.frombuffer(body, DTYPES[dtype]) if body.size else np.empty(0, DTYPES[dtype])
    key, request, ticket, number, rate, which = fields
    return Message(MessageKind(kind), store, key, part, request, ticket, number, rate, which, bool(coded), payload)


REQUESTS, ANSWERS = 1, 2
"""Tags of requests and of answers."""
_FOLLOWING = 4
"""Number added to a message's tag for its following pieces; `ENDED` is another tag of the same communicator."""

_ENDING = 9
"""Tag of the message that announces the end of a worker's program after another has died."""

_LANE = "server"
_LINGER_S, _NAP_S = 1e-3, 50e-6
"""Seconds of fast polling after a message, and of sleep between two of these polls."""
_AWAKE_S, _LONG_NAP_S = 0.5, 5e-3
"""Seconds without a message before polling slows down, and of sleep between two polls then."""
_AT_ONCE = 64
"""Most messages received before any is answered."""

Attempt = Callable[[], Message | None]
"""A function that tries to answer a request; None, or a message of kind HELD, means not yet."""


class RequestHandler(Protocol):
    """The handler of requests for one store."""

    def answer(self, source: int, message: Message) -> Attempt:
        """Return the attempt to answer a request of rank ``source``; raise `HpcdpError` for an invalid one."""
        ...


class PendingRequest:
    """A request under way, which completes with its answer.

    Args:
        on_held: called with a message of kind HELD that arrives before the answer.
    """

    def __init__(self, server: Server, number: int, dest: int, on_held: Callable[[Message], None] | None) -> None:
        self._server, self._number, self.dest = server, number, dest
        self._where = server.called(dest)
        self._on_held = on_held
        self._answer: Message | None = None

    def test(self) -> bool:
        """Return whether the answer has arrived."""
        if self._answer is None:
            answer = self._server.answer_to(self._number)
            if answer is None and self.dest in self._server.comm.lost:
                raise HpcdpError(
                    "key-value store", where=f"on {self._where}", expected="an answer", got="none: it has died",
                    remedy="start again from the last checkpoint",
                )  # fmt: skip
            if answer is None or answer.kind is not MessageKind.HELD:
                self._answer = answer
            elif self._on_held is not None:
                self._on_held(answer)
        return self._answer is not None

    def wait(self) -> None:
        """Block until the answer has arrived."""
        wait_for(self.test)

    @property
    def held_s(self) -> float:
        """Seconds that a push waited at the server, once the answer has arrived."""
        return 0.0 if self._answer is None or math.isnan(self._answer.rate) else self._answer.rate

    def answer(self) -> Message:
        """Return the answer, which must have arrived.

        Raises:
            HpcdpError: the other rank failed to execute the request.
        """
        assert self._answer is not None
        if self._answer.kind is MessageKind.FAILED:
            raise _remote_error(self._answer.text(), f"on {self._where}")
        return self._answer


def _remote_error(text: str, where: str) -> HpcdpError:
    """Return an error of another rank, of the same class where that is one of hpcdp's."""
    name, _, message = text.partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, HpcdpError):
        return kind(message, where=where)
    return HpcdpError(text, where=where)


class _Arriving:
    """A message being received, with its following pieces."""

    def __init__(self, comm: Communicator, tag: int, source: int, message: np.ndarray, request: Request) -> None:
        self.source, self._message = source, message
        self._rest: np.ndarray | None = None
        self._comm, self._tag, self._begun = comm, tag + _FOLLOWING, False
        self._requests = deque([request])

    def test(self) -> bool:
        """Return whether all of it has arrived; to be called after its sender's earlier messages have."""
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
"""Servers with stores that some workers still use: they must live even if this rank drops store and world."""


class Server:
    """A rank's end of the exchange with other nodes, which all ranks make collectively; use `of`.

    Args:
        group: workers, then servers; its ranks are the addresses.
        has_servers: whether separate processes are servers.
    """

    def __init__(self, group: World, has_servers: bool) -> None:
        # Separate servers cannot duplicate the communicator: they may never learn of a store.
        self.comm = group.comm if has_servers else group.comm.duplicate()
        self._workers = group.size - group.num_servers
        self.stores: dict[int, RequestHandler] = {}
        self._left: dict[int, set[int]] = {}
        """By store: this rank once it has left, and the ranks of `_below` whose subtrees have left."""
        own, workers = self.comm.rank, self._workers
        below = [rank for rank in (2 * own + 1, 2 * own + 2) if rank < self.comm.size]
        self._above = (own - 1) // 2 if own else None
        """Parent in a binary tree of all ranks, which announce the end of a store with 2 (n - 1) messages."""
        self._below = below
        self._to_leave = {rank for rank in (own, *below) if rank < workers}  # the subtree of a server has servers only
        self.commands: deque[dict[str, Any]] = deque()
        """Collective commands of worker 0 to this server."""
        self.sent_nbytes = 0
        """Bytes that this rank has sent."""
        self._arriving: list[_Arriving] = []
        self._answering: list[_Arriving] = []
        self._waiting: list[tuple[int, int, Attempt]] = []
        self._answers: dict[int, Message] = {}
        self._sending: deque[Request] = deque()
        self._requests = 0
        self._looking = threading.Lock()
        self._counting = threading.RLock()  # reentrant: dropping a store while it is held calls `leave`
        self._complained = False
        self._idle_since = time.monotonic()
        self._engine = engine = CommunicationLane.of(group).engine  # whose threads end with it
        engine.add_lane(_LANE, idle=weakly(self._poll))  # a strong reference would keep the engine alive forever
        engine.push(lambda: None, lane=_LANE, name="start of the server")
        if not has_servers:
            group.endings.add(self.end)  # runs after the endings of stores, which are made later

    @classmethod
    def of(cls, group: World, has_servers: bool) -> Server:
        """Return the server of ``group``; all its ranks must call."""
        return group.kept.get(cls) or group.keep(cls, lambda: cls(group, has_servers))

    def called(self, rank: int) -> str:
        """Return the name of a worker or server in errors."""
        return short_name_of(rank, self._workers)

    def ask(self, dest: int, message: Message, on_held: Callable[[Message], None] | None = None) -> PendingRequest:
        """Send a request to another rank; ``on_held`` is called if it reports that a push waits."""
        with self._counting:
            self._requests += 1
            message.request = number = self._requests
        self._send(dest, message, REQUESTS)
        return PendingRequest(self, number, dest, on_held)

    def tell(self, dest: int, message: Message) -> None:
        """Send a request to another rank, and drop its answer."""
        self._send(dest, message, REQUESTS)

    def leave(self, store: int) -> None:
        """Announce that this worker sends no more requests for a store, whose keys are dropped after the last one.

        A rank that has left, with its subtree, announces it to its parent; the root announces the end to all.
        """
        self._count_left(store, self.comm.rank)

    def serve(self, store: int, answers: RequestHandler) -> None:
        """Answer requests for a store until all of its workers have left."""
        with self._counting:
            self.stores[store] = answers
            _busy.add(self)

    def _count_left(self, store: int, rank: int) -> None:
        """Record that ``rank`` has left: this one, or a neighbor in the tree."""
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
        """Remove and return the answer to a request; None before it has arrived."""
        if number not in self._answers and self._looking.acquire(blocking=False):
            try:
                self._collect_answers()
            finally:
                self._looking.release()
        return self._answers.pop(number, None)

    def _send(self, dest: int, message: Message, tag: int) -> None:
        first, following = message.encode()
        with self._counting:  # keeps the following pieces of two messages in their order
            self.sent_nbytes += first.nbytes + sum(piece.nbytes for piece in following)
            self._drop_sent()
            if dest in self.comm.lost:
                return  # waiting for its answer raises the error
            try:
                self._sending.append(self.comm.isend(first, dest, tag))
                self._sending.extend(self.comm.isend(piece, dest, tag + _FOLLOWING) for piece in following)
            except Exception as error:
                if not self.comm.takes_note(error):
                    raise

    def _drop_sent(self) -> None:
        """Drop completed sends, one by one, because a store dropped meanwhile sends and calls this recursively."""
        for _ in range(len(self._sending)):
            if self._sending:
                request = self._sending.popleft()
                if not self._has_ended(request):
                    self._sending.append(request)

    def _has_ended(self, transfer: Request | _Arriving) -> bool:
        """Return whether a message was transferred, or its other end has died."""
        try:
            return transfer.test()
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
        """Make progress without waiting, and return whether anything has happened or is arriving."""
        for _ in range(_AT_ONCE):
            begun = self.comm.irecv_any(REQUESTS)
            if begun is None:
                break
            self._arriving.append(_Arriving(self.comm, REQUESTS, *begun))
        busy = bool(self._arriving)
        for arrived in self._take_complete(self._arriving):
            self._receive(arrived)
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
        while (begun := self.comm.irecv_any(ANSWERS)) is not None:
            self._answering.append(_Arriving(self.comm, ANSWERS, *begun))
        for arrived in self._take_complete(self._answering):
            message = arrived.decoded()
            if message.request:
                self._answers[message.request] = message

    def _take_complete(self, arriving: list[_Arriving]) -> list[_Arriving]:
        """Remove and return complete messages in order, none before an earlier one of its sender.

        Incomplete messages of dead ranks are dropped.
        """
        complete, left, behind = [], [], set[int]()
        for message in arriving:
            if message.source in behind or not self._has_ended(message):
                behind.add(message.source)
                left.append(message)
            elif message.source not in self.comm.lost:
                complete.append(message)
        arriving[:] = left
        return complete

    def _receive(self, arrived: _Arriving) -> None:
        source = arrived.source
        try:
            message = arrived.decoded()
        except HpcdpError as error:  # no answer is possible: the request's number is unknown
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
        except Exception as error:  # the loop must go on
            self._answer(source, message.request, Message.of_text(MessageKind.FAILED, str(error)))
            return
        if not self._try(source, message.request, attempt):
            self._waiting.append((source, message.request, attempt))

    def _try(self, source: int, request: int, attempt: Attempt) -> bool:
        try:
            answer = attempt()
        except Exception as error:  # a function of the user may raise anything
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
        """Answer requests until all workers have left all stores.

        This is not a collective call, because a rank may have dropped its world after that.
        """
        while (self.stores or self._sending) and not self.comm.lost:
            time.sleep(_LONG_NAP_S)
        if self.comm.lost:
            self._end_without_the_dead()

    def _end_without_the_dead(self) -> None:
        """Answer requests until the others end, too, because a dead rank cannot pass on that all have left."""
        missing = set(range(self.comm.size)) - {self.comm.rank}
        for rank in missing:
            self._send(rank, Message(MessageKind.DONE), _ENDING)
        while self.stores and missing - self.comm.lost:
            received = self.comm.irecv_any(_ENDING)
            if received is None:
                time.sleep(_LONG_NAP_S)
            else:
                missing.discard(received[0])

    def next_commands(self, num_workers: int) -> Iterator[dict[str, Any]]:
        """Yield the commands to a server in order, until all workers have ended or died."""
        workers = set(range(num_workers))
        ended = set[int]()
        while not workers <= ended | self.comm.lost or self.commands:
            if self.commands:
                yield self.commands.popleft()
            elif (received := self.comm.irecv_any(ENDED)) is not None:
                ended.add(received[0])
            else:
                time.sleep(_LONG_NAP_S)


def _command(source: int, text: str) -> dict[str, Any]:
    try:
        command = json.loads(text)
    except ValueError:
        command = None
    if source != 0 or not isinstance(command, dict) or not isinstance(command.get("do"), str):
        raise HpcdpError("command to a server", expected="a JSON command of rank 0", got=f"{text!r:.80}")
    return command
