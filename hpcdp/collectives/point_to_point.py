"""Messages between two ranks, of arrays whose shape and dtype the receiver need not know.

A message says the shape and dtype of its array. Up to `SHORT_NBYTES` it carries the data as well; longer data follow in
a message of their own, which is received in place. Messages from one rank with one tag arrive in the order in which
they were sent, whichever of them is waited for first, and go to the first receive that was started for them.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, overload

import numpy as np

from ..comm import World
from ..comm.communicator import OPERATION_BITS, Communicator, PolledRequest, Request, StepsTo, make_tag
from ..comm.tasks import Operation, ProgressEngine
from ..core.arrays import Array, dtype_of_char, in_kind_of_sender, kind_number
from ..core.checks import whole_number
from ..errors import MismatchError
from .data_movement import ArrayT
from .staging import (
    accepts_tensors,
    bring_back,
    bytes_of,
    check_array,
    check_writeable,
    checked_root,
    kind_of_call,
    movable,
    ranks_of,
)

SHORT_NBYTES = 8 << 10
"""The longest data that the message with the shape carries: they are copied, but need no second message."""

_TAG_BITS = OPERATION_BITS + 5
_MOST_TAG = (1 << _TAG_BITS) - 1
_DTYPE, _KIND, _AXES, _FOLLOWS, _SHAPE = range(5)
"""Words of a message: the dtype, the kind (`kind_number`), the axes, whether data follow, and then the shape."""
_WORD, _MOST_AXES = 8, 64
_MOST_HEADER = _WORD * (_SHAPE + _MOST_AXES)
"""The longest message without data."""
_MOST_KNOWN = 4096
"""The most kinds of short messages whose beginning a rank keeps."""
_SPINS, _YIELDS = 300, 2000
"""Tests for a message before a blocking receive yields its core, if each rank has one, and before it naps: some 0.3 ms
and a millisecond.
"""


@accepts_tensors
def send(x: Array, dest: int, tag: int = 0, world: World | None = None) -> None:
    """Send ``x`` to rank ``dest``, which calls `recv`; return when ``x`` may change again.

    A long array is not sent before the receiver waits for it, so two ranks that first send and then receive use
    `isend` or `sendrecv`.

    Args:
        x: an array of NumPy, CuPy or PyTorch, of any integer, float, complex or bool dtype and any shape.
        dest: the receiver.
        tag: a number from 0 to 16383 that tells messages of two ranks apart.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        UnsupportedError: ``x`` is no such array, or ``dest`` no rank.
        ConfigError: the tag is not valid.
    """
    world = ranks_of(world)
    requests, dest = _sent(x, dest, tag, world)
    _wait_for_sent(requests, x, dest, world)


@accepts_tensors
def isend(x: Array, dest: int, tag: int = 0, world: World | None = None) -> Operation[None]:
    """Start a `send`, with the same arguments and errors; ``x`` may not change before the end."""
    world = ranks_of(world)
    requests, dest = _sent(x, dest, tag, world)
    return ProgressEngine.of(world).start(f"send to rank {dest}", _when_complete(requests), x, [dest])


def _sent(x: Array, dest: int, tag: int, world: World) -> tuple[list[Request], int]:
    """Start the messages with ``x``; return their requests, which keep the sent memory alive, and the receiver."""
    known: dict[object, tuple[bytes, int]] = world.keep(_sent, dict)
    key = None
    if type(x) is np.ndarray and x.flags.carray and type(dest) is int and type(tag) is int:
        key = dest, tag, x.shape, x.dtype, kind_of_call()
        if (again := known.get(key)) is not None:
            header, number = again
            return [world.comm.isend_whole(np.frombuffer(header + x.tobytes(), np.uint8), dest, number)], dest
    dest, tag, comm = checked_root("send", dest, world, "dest"), _checked_tag("send", tag), world.comm
    host = movable("send", x)
    follows = host.nbytes > SHORT_NBYTES
    words = (ord(host.dtype.char), kind_number(kind_of_call()), host.ndim, follows, *host.shape)
    nbytes = _WORD * len(words)
    message = np.empty(nbytes + (0 if follows else host.nbytes), np.uint8)
    message[:nbytes].view(np.int64)[:] = words
    if follows:
        data = comm.isend(bytes_of(host), dest, _tag(comm, tag, 1))
        return [data, comm.isend_whole(message, dest, _tag(comm, tag, 0))], dest
    message[nbytes:] = bytes_of(host)
    if key is not None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[key] = message[:nbytes].tobytes(), _tag(comm, tag, 0)
    return [comm.isend_whole(message, dest, _tag(comm, tag, 0))], dest


def _wait_for_sent(requests: list[Request], x: Array, dest: int, world: World) -> None:
    if not all(request.test() for request in requests):
        ProgressEngine.of(world).run(f"send to rank {dest}", _when_complete(requests), x, [dest])


def _when_complete(requests: list[Request]) -> StepsTo[None]:
    yield requests


@overload
def recv(out: None = None, source: int = 0, tag: int = 0, world: World | None = None) -> Array: ...
@overload
def recv(out: None = None, *, source: None, tag: int = 0, world: World | None = None) -> tuple[Array, int]: ...
@overload
def recv(out: ArrayT, source: int = 0, tag: int = 0, world: World | None = None) -> ArrayT: ...
@overload
def recv(out: ArrayT, source: None, tag: int = 0, world: World | None = None) -> tuple[ArrayT, int]: ...
@accepts_tensors
def recv(out: Array | None = None, source: int | None = 0, tag: int = 0, world: World | None = None) -> Any:
    """Receive an array that rank ``source`` sends, or any rank.

    Args:
        out: receives the values, and has the shape and dtype of the sent array. Default a new array in host memory, or
            a tensor if one was sent and this rank has imported PyTorch.
        source: the sender; None for any rank, as MPI's ANY_SOURCE.
        tag: the tag of `send`.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        ``out``, or the new array. With ``source=None`` a pair: the array, and the rank that has sent it.

    Raises:
        MismatchError: the sent array has another shape or dtype than ``out``, which is unchanged.
        UnsupportedError: ``out`` is no writeable array, or ``source`` no rank.
        ConfigError: the tag is not valid.
    """
    world = ranks_of(world)
    return _Receiving(out, source, tag, world).run(world)


@overload
def irecv(out: None = None, source: int = 0, tag: int = 0, world: World | None = None) -> Operation[Array]: ...
@overload
def irecv(
    out: None = None, *, source: None, tag: int = 0, world: World | None = None
) -> Operation[tuple[Array, int]]: ...
@overload
def irecv(out: ArrayT, source: int = 0, tag: int = 0, world: World | None = None) -> Operation[ArrayT]: ...
@overload
def irecv(out: ArrayT, source: None, tag: int = 0, world: World | None = None) -> Operation[tuple[ArrayT, int]]: ...
@accepts_tensors
def irecv(out: Array | None = None, source: int | None = 0, tag: int = 0, world: World | None = None) -> Operation[Any]:
    """Start a `recv`, with the same arguments and errors; ``wait()`` returns its result."""
    world = ranks_of(world)
    receiving = _Receiving(out, source, tag, world)
    return ProgressEngine.of(world).start(receiving.name, receiving.steps(), out, receiving.peers)


class _Receiving:
    """A valid call of `recv` or `irecv`."""

    def __init__(self, out: Array | None, source: int | None, tag: int, world: World) -> None:
        tag = _checked_tag("recv", tag)
        if source is not None:
            source = checked_root("recv", source, world, "source")
        if out is not None:
            check_array("recv", "out", out)
            check_writeable("recv", "out", out)
        self._out, self._source = out, source
        self._spins = _SPINS if world.cores >= world.local_size else 0
        inbox: _Inbox | None = world.kept.get((_Inbox, tag))
        self._inbox = inbox or world.keep((_Inbox, tag), lambda: _Inbox(world.comm, tag))
        self._receive: _Receive | None = None
        self.peers = [] if source is None else [source]
        """The ranks that it waits for, see `ProgressEngine.start`."""

    @property
    def name(self) -> str:
        """The name in reports."""
        return "recv from any rank" if self._source is None else f"recv from rank {self._source}"

    def run(self, world: World) -> Any:
        """Receive, blocking; return what `recv` returns."""
        progress = ProgressEngine.of(world)
        if not progress.active.running and self._is_here_soon():
            return self.result()
        return progress.run(self.name, self.steps(), self._out, self.peers)

    def _is_here_soon(self) -> bool:
        """Start it; return whether a short message for it arrives while this thread spins, as most do."""
        receive, inbox = self._inbox.post(self._out, self._source), self._inbox
        self._receive = receive
        try:
            for _ in range(self._spins + 1):
                if inbox.has_for(receive):
                    assert receive.request is not None
                    return receive.request.test()
        except BaseException:
            inbox.drop(receive)
            raise
        return False

    def steps(self) -> StepsTo[Any]:
        """Run the receive as an algorithm, also after `_is_here_soon`."""
        # In the first step, during which no other thread starts an operation.
        receive, inbox = self._receive or self._inbox.post(self._out, self._source), self._inbox
        self._receive = receive
        try:
            if not inbox.has_for(receive):
                yield [PolledRequest(lambda: inbox.has_for(receive), _YIELDS, self._spins)]
            assert receive.request is not None
            yield [receive.request]
            return self.result()
        finally:
            inbox.drop(receive)

    def result(self) -> Any:
        """Return what `recv` returns, when the data are here."""
        assert self._receive is not None
        return self._receive.result(with_sender=self._source is None)


@overload
def sendrecv(x: Array, dest: int, source: int, out: None = None, tag: int = 0, world: World | None = None) -> Array: ...
@overload
def sendrecv(
    x: Array, dest: int, source: None, out: None = None, tag: int = 0, world: World | None = None
) -> tuple[Array, int]: ...
@overload
def sendrecv(x: Array, dest: int, source: int, out: ArrayT, tag: int = 0, world: World | None = None) -> ArrayT: ...
@overload
def sendrecv(
    x: Array, dest: int, source: None, out: ArrayT, tag: int = 0, world: World | None = None
) -> tuple[ArrayT, int]: ...
@accepts_tensors
def sendrecv(
    x: Array, dest: int, source: int | None, out: Array | None = None, tag: int = 0, world: World | None = None
) -> Any:
    """Send ``x`` to rank ``dest`` and receive an array from rank ``source`` at the same time.

    Args:
        x: as for `send`.
        dest: the receiver of ``x``.
        source: the sender of the result, or None, as for `recv`; calls `sendrecv`, or `send`.
        out: as for `recv`; may not share memory with ``x``.
        tag: the tag of both messages.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        The result of `recv`.

    Raises:
        HpcdpError: as `send` and `recv`.
    """
    world = ranks_of(world)
    receiving = _Receiving(out, source, tag, world)
    requests, dest = _sent(x, dest, tag, world)
    received = receiving.run(world)
    _wait_for_sent(requests, x, dest, world)
    return received


@overload
def isendrecv(
    x: Array, dest: int, source: int, out: None = None, tag: int = 0, world: World | None = None
) -> Operation[Array]: ...
@overload
def isendrecv(
    x: Array, dest: int, source: None, out: None = None, tag: int = 0, world: World | None = None
) -> Operation[tuple[Array, int]]: ...
@overload
def isendrecv(
    x: Array, dest: int, source: int, out: ArrayT, tag: int = 0, world: World | None = None
) -> Operation[ArrayT]: ...
@overload
def isendrecv(
    x: Array, dest: int, source: None, out: ArrayT, tag: int = 0, world: World | None = None
) -> Operation[tuple[ArrayT, int]]: ...
@accepts_tensors
def isendrecv(
    x: Array, dest: int, source: int | None, out: Array | None = None, tag: int = 0, world: World | None = None
) -> Operation[Any]:
    """Start a `sendrecv`, with the same arguments and errors; ``x`` may not change before the end."""
    world = ranks_of(world)
    receiving = _Receiving(out, source, tag, world)
    requests, dest = _sent(x, dest, tag, world)

    def steps() -> StepsTo[Any]:
        received = yield from receiving.steps()
        yield requests
        return received

    name = f"send to rank {dest} and {receiving.name}"
    return ProgressEngine.of(world).start(name, steps(), x, receiving.peers)


class _Receive:
    """A receive that has been started; its message is here once `request` is set."""

    def __init__(self, out: Array | None, source: int | None) -> None:
        self.source = source
        self.request: Request | None = None
        self._out = out
        self._host: Any = None

    def match(self, comm: Communicator, sender: int, message: np.ndarray, request: Request, tag: int) -> None:
        """Take the message that has arrived from ``sender``; if data follow it, start to receive them."""
        self.source, self._message, self.request = sender, message, request
        if message.size <= _MOST_HEADER:  # data may follow; such a short message is complete at once
            request.wait()
            if _words(message)[_FOLLOWS]:
                self.request = comm.irecv(bytes_of(self._memory()), sender, tag)

    def _memory(self) -> np.ndarray:
        """Return the memory for the array that the message describes: ``out`` itself if possible."""
        words = _words(self._message)
        axes = int(words[_AXES])
        self._sent = tuple(words[_SHAPE : _SHAPE + axes].tolist()), dtype_of_char(chr(words[_DTYPE]))
        out = self._out
        self._fits = out is None or (tuple(out.shape), out.dtype) == self._sent
        self._in_place = self._fits and type(out) is np.ndarray and out.flags.carray
        self._host = out if self._in_place else np.empty(*self._sent)
        return self._host  # type: ignore[no-any-return]

    def result(self, with_sender: bool) -> Any:
        """Return the received array, when `request` is complete."""
        if self._host is None:
            data = bytes_of(self._memory())
            first = self._message.size - data.size
            data[...] = self._message[first:]
        out, (shape, dtype) = self._out, self._sent
        if out is not None and not self._fits:
            raise MismatchError(
                "recv", where="out", expected=f"{shape} {dtype.name}, as rank {self.source} sent",
                got=f"{out.shape} {out.dtype}",
            )  # fmt: skip
        if out is None:
            out = in_kind_of_sender(int(_words(self._message)[_KIND]), self._host)
        elif not self._in_place:
            bring_back(self._host, out)
        return (out, self.source) if with_sender else out


class _Inbox:
    """The receives of one tag that wait for a message, in the order in which they were started."""

    def __init__(self, comm: Communicator, tag: int) -> None:
        self._comm, self._tags = comm, [_tag(comm, tag, is_data) for is_data in (0, 1)]
        self._waiting: deque[_Receive] = deque()
        self._turn = threading.Lock()
        """Held by the thread that looks for messages: receives may be waited for by different threads."""

    def post(self, out: Array | None, source: int | None) -> _Receive:
        """Start a receive."""
        receive = _Receive(out, source)
        with self._turn:
            self._waiting.append(receive)
        return receive

    def drop(self, receive: _Receive) -> None:
        """End a receive that may still wait."""
        with self._turn:
            if receive.request is None:
                self._waiting.remove(receive)

    def has_for(self, receive: _Receive) -> bool:
        """Return whether a message for ``receive`` is here; never block."""
        with self._turn:
            while receive.request is None:
                begun = self._comm.irecv_any(self._tags[0], receive.source)
                if begun is None:
                    return False
                sender = begun[0]
                first = next(other for other in self._waiting if other.source in (None, sender))
                self._waiting.remove(first)
                first.match(self._comm, *begun, self._tags[1])
            return True


def _words(message: np.ndarray) -> np.ndarray:
    return message[: message.size // _WORD * _WORD].view(np.int64)


def _tag(comm: Communicator, tag: int, is_data: int) -> int:
    number, lane = divmod(tag << 1 | is_data, 1 << _TAG_BITS + 1 - OPERATION_BITS)
    return make_tag(comm.signatures, number, lane)


def _checked_tag(operation: str, tag: int) -> int:
    return whole_number(operation, "tag", tag, 0, _MOST_TAG)
