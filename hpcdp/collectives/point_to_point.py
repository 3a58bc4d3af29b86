"""Messages between two ranks, of arrays whose shape and dtype the receiver need not know.

A message says the shape and dtype of its array. It carries short data as well, or the beginning of somewhat longer
data, of which the rest follows in a second message. Longer data follow in a message of their own, which is received in
place; inside a node both ranks copy them from process to process instead (`comm.node_messages`). Messages from one rank
with one tag arrive in the order in which they were sent, whichever of them is waited for first, and go to the first
receive that was started for them.

A blocking call for arrays like those of an earlier one is a single compiled call if the other rank is in the node, and
a `short_messages.RepeatedSend` or `RepeatedReceive` elsewhere.

The message of an object (`objects`) names a dtype that no array has, so that neither is received as the other.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import numpy as np

from ..comm import World
from ..comm.communicator import COMPLETE, OPERATION_BITS, Communicator, PolledRequest, Request, StepsTo, make_tag
from ..comm.message_rounds import WHOLE_NBYTES
from ..comm.node_messages import KERNEL_SPINS, SPINS, YIELDS, Mailbox, OfferedData
from ..comm.progress import NOT_YET, Operation, ProgressEngine, TaskGroup
from ..core.arrays import Array, dtype_of_char, in_kind_of_sender, kind_number
from ..core.checks import whole_number
from ..core.state import held, protection_of
from ..errors import MismatchError
from .data_movement import ArrayT
from .short_messages import RepeatedReceive, RepeatedSend, swapped
from .staging import (
    accepts_tensors,
    apart,
    are_plain,
    bring_back,
    bytes_of,
    check_array,
    check_writeable,
    checked_root,
    movable,
    present,
    ranks_of,
    with_tensors,
)

SHORT_IN_NODE_NBYTES = 256 << 10
"""The longest data that the message with the shape carries inside a node: they are copied, but need no second message,
and no answer of the receiver. By MPI the message has at most `WHOLE_NBYTES`.
"""

_TAG_BITS = OPERATION_BITS + 5
_MOST_TAG = (1 << _TAG_BITS) - 1
_DTYPE, _KIND, _AXES, _DATA, _SHAPE = range(5)
"""Words of a message: the dtype, the kind (`kind_number`), the axes, where the data are, and then the shape."""
_WITHIN, _FOLLOW, _OFFERED, _BEGUN = range(4)
"""Places of the data: in the message, in the next one, in the memory of the sender (`Mailbox.offerer`), or in the
message, which then has `WHOLE_NBYTES`, and the rest in the next one.
"""
_OBJECT = ord("O")
"""In place of a dtype in the message of an object, which is sent as bytes; arrays of NumPy's dtype "O" are refused."""
_ANY = -1
_WORD, _MOST_AXES = 8, 64
_MOST_HEADER = _WORD * (_SHAPE + _MOST_AXES + 1)
"""The longest message without data."""
_MOST_BEGUN_NBYTES = 2 * WHOLE_NBYTES - _MOST_HEADER
"""The longest data of which the message carries the beginning."""
_MOST_KNOWN = 4096
"""The most kinds of messages whose calls a rank keeps."""
_QUICK = "short messages"
"""The key of a world's functions that make the calls of short messages by one kernel call, by their arguments."""
_NOTHING: dict[object, Any] = {}


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
    if type(x) is np.ndarray and type(dest) is int and type(tag) is int:
        push = world.kept.get(_QUICK, _NOTHING).get(("send", dest, tag, x.shape, x.dtype, present.kind))
        if push is not None and push(x):
            return
    if not are_plain(x):
        return with_tensors(send, x=x, dest=dest, tag=tag, world=world)
    send_as("send", x, dest, tag, world)


def send_as(name: str, x: Array, dest: int, tag: int, world: World) -> None:
    """Send an array, or the bytes of an object, as the function ``name``, whose errors it raises."""
    requests, dest = _sent(name, x, dest, tag, world, may_poll=True)
    if requests:
        _wait_for_sent(requests, x, dest, world)


@accepts_tensors
def isend(x: Array, dest: int, tag: int = 0, world: World | None = None) -> Operation[None]:
    """Start a `send`, with the same arguments and errors; ``x`` may not change before the end."""
    return isend_as("isend", x, dest, tag, ranks_of(world))


def isend_as(name: str, x: Array, dest: int, tag: int, world: World) -> Operation[None]:
    """Start `send_as`, with the same arguments."""
    requests, dest = _sent(name, x, dest, tag, world)
    progress = ProgressEngine.of(world)
    if not requests:
        return progress.ended("send", None)
    spin = requests[0].spin if type(requests[0]) is OfferedData else None
    return progress.start_polled(f"send to rank {dest}", _polled(requests, None), x, [dest], spin)


def _is_of_object(name: str) -> bool:
    """Return whether a function of this name sends or receives an object."""
    return name.endswith("_object")


def _sent(name: str, x: Array, dest: int, tag: int, world: World, may_poll: bool = False) -> tuple[list[Request], int]:
    """Start the messages with ``x``; return their requests, which keep the sent memory alive, and the receiver.

    With ``may_poll``, poll for the receiver of long data in a kernel, see `Mailbox.offerer`.
    """
    known: dict[object, Callable[[np.ndarray, bool], list[Request]]] = world.kept.get(_sent) or world.keep(_sent, dict)
    key, is_object = None, _is_of_object(name)
    if type(x) is np.ndarray and x.flags.carray and type(dest) is int and type(tag) is int:
        key = dest, tag, x.shape, x.dtype, _OBJECT if is_object else present.kind
        if (send := known.get(key)) is not None:
            return send(x, may_poll), dest
    dest, tag = checked_root(name, dest, world, "dest"), _checked_tag(name, tag)
    host = movable(name, x)
    send = _sender_of(host, dest, tag, world, is_object)
    if key is not None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[key] = send
        mailbox = _mailbox_of(world, dest)
        if mailbox is not None and host.nbytes <= SHORT_IN_NODE_NBYTES and not is_object:
            header = _header(host, kind_number(present.kind), _WITHIN)
            _remember(world, ("send", *key), mailbox.pusher(dest, tag, header, host))
        elif mailbox is None and host.nbytes <= _MOST_BEGUN_NBYTES and not is_object:
            header = _header(host, kind_number(present.kind), _place_of(host))
            _remember(world, ("send", *key), _repeated_send(world, dest, tag, header, host))
    return send(host, may_poll), dest


def _place_of(x: np.ndarray) -> int:
    """Return the place of the data in a message of an array like ``x`` by MPI."""
    if _WORD * (_SHAPE + x.ndim) + x.nbytes < WHOLE_NBYTES:
        return _WITHIN
    return _BEGUN if x.nbytes <= _MOST_BEGUN_NBYTES else _FOLLOW


def _tags(comm: Communicator, tag: int) -> tuple[int, int]:
    """Return the tags of a message and of data that follow."""
    return _tag(comm, tag, 0), _tag(comm, tag, 1)


def _repeated_send(world: World, dest: int, tag: int, header: np.ndarray, like: np.ndarray) -> RepeatedSend:
    progress = ProgressEngine.of(world)

    def wait(requests: Sequence[Request], x: np.ndarray) -> None:
        progress.run(f"send to rank {dest}", _when_complete(requests), x, [dest])

    return RepeatedSend(world.comm, dest, _tags(world.comm, tag), header, like, _order_of(world, dest, tag), wait)


def _order_of(world: World, dest: int, tag: int) -> threading.Lock:
    """Return the lock that is held while the parts of a message are sent: other threads send none between them."""
    lock: threading.Lock = world.keep((_order_of, dest, tag), threading.Lock)
    return lock


def _remember(world: World, key: object, call: Callable[..., Any]) -> None:
    """Let a call that is like an earlier one be a single ``call`` of a kernel."""
    quick: dict[object, Callable[..., Any]] = world.keep(_QUICK, dict)
    if len(quick) >= _MOST_KNOWN:
        quick.clear()
    quick[key] = call


def _header(x: np.ndarray, kind: int, data: int, is_object: bool = False) -> np.ndarray:
    """Return the message of an array like ``x``, or of an object with these bytes, before its data, int64."""
    return np.array([_OBJECT if is_object else ord(x.dtype.char), kind, x.ndim, data, *x.shape])


def _sender_of(
    x: np.ndarray, dest: int, tag: int, world: World, is_object: bool
) -> Callable[[np.ndarray, bool], list[Request]]:
    """Return a function ``send(x, may_poll)`` for arrays like ``x``, contiguous and in host memory; see `_sent`."""
    comm, mailbox, kind = world.comm, _mailbox_of(world, dest), kind_number(present.kind)
    is_short, place = x.nbytes <= SHORT_IN_NODE_NBYTES, _place_of(x)
    (number, data_number), order = _tags(comm, tag), _order_of(world, dest, tag)
    header = _header(x, kind, place if mailbox is None else _WITHIN if is_short else _FOLLOW, is_object)
    head = header.tobytes()

    def by_mpi(x: np.ndarray, may_poll: bool) -> list[Request]:
        if place == _FOLLOW:
            with order:
                data = comm.isend(bytes_of(x), dest, data_number)
                return [data, comm.isend_whole(np.frombuffer(head, np.uint8), dest, number)]
        message = np.frombuffer(head + x.tobytes(), np.uint8)
        with order:
            first = comm.isend_whole(message[:WHOLE_NBYTES], dest, number)
            return [first] if place == _WITHIN else [first, comm.isend(message[WHOLE_NBYTES:], dest, data_number)]

    if mailbox is None:
        return by_mpi
    nothing = np.empty(0, np.uint8)
    send = mailbox.sender(dest, tag, header, x if is_short else nothing)

    def by_copy(x: np.ndarray, may_poll: bool) -> list[Request]:
        request = send(x)
        return [] if request is None else [request]

    send_data, active = partial(comm.isend, dest=dest, tag=data_number), ProgressEngine.of(world).active
    offer = mailbox.offerer(dest, tag, _header(x, kind, _OFFERED, is_object), send_data)

    def by_offer(x: np.ndarray, may_poll: bool) -> list[Request]:
        data = x.reshape(-1).view(np.uint8)
        requests = offer(data, may_poll and not active.running)
        if requests is None:
            with order:
                message = send(nothing)
                requests = [send_data(data)] if message is None else [send_data(data), message]
        return requests

    return by_copy if is_short else by_offer


def _mailbox_of(world: World, rank: int | None) -> Mailbox | None:
    """Return the mailbox for messages with ``rank``, or with any rank; None if they go by MPI alone."""
    mailbox: Mailbox | None = world.kept.get(Mailbox)
    has_it = mailbox is not None and (mailbox.has_all if rank is None else rank in mailbox.local_of)
    return mailbox if has_it else None


def _wait_for_sent(requests: list[Request], x: Array, dest: int, world: World) -> None:
    for request in requests:
        if not request.test():
            ProgressEngine.of(world).run(f"send to rank {dest}", _when_complete(requests), x, [dest])
            return


def _when_complete(requests: Sequence[Request], value: Any = None) -> StepsTo[Any]:
    yield requests
    return value


def _polled(requests: list[Request], value: Any) -> Callable[[], Any]:
    """Return a function that returns ``value`` when all requests are complete, and `NOT_YET` before."""

    def poll() -> Any:
        while requests:
            if not requests[-1].test():
                return NOT_YET
            requests.pop()
        return value

    return poll


@overload
def recv(out: None = None, source: int = 0, tag: int = 0, world: World | None = None) -> Array: ...
@overload
def recv(out: None = None, *, source: None, tag: int = 0, world: World | None = None) -> tuple[Array, int]: ...
@overload
def recv(out: ArrayT, source: int = 0, tag: int = 0, world: World | None = None) -> ArrayT: ...
@overload
def recv(out: ArrayT, source: None, tag: int = 0, world: World | None = None) -> tuple[ArrayT, int]: ...
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
        MismatchError: the sent array has another shape or dtype than ``out``, or the message is an object of
            `send_object`; ``out`` is unchanged, and the message is dropped.
        UnsupportedError: ``out`` is no writeable array, or ``source`` no rank.
        ConfigError: the tag is not valid.
    """
    world = ranks_of(world)
    if type(out) is np.ndarray and type(source) is int and type(tag) is int:
        take = world.kept.get(_QUICK, _NOTHING).get(("recv", source, tag, out.shape, out.dtype))
        if take is not None and not (held and protection_of(out)) and take(out):
            return out
    if not are_plain(out):
        return with_tensors(recv, out=out, source=source, tag=tag, world=world)
    known = _known_receive(out, source, tag, world)
    if known is not None and (taken := known.take(out, source)) is not None:
        return taken.wait(world)
    return _Receiving("recv", out, source, tag, world).run()


def recv_object_as_bytes(source: int | None, tag: int, world: World) -> Any:
    """Receive an object of `send_as`; return its bytes, for ``source=None`` with its sender, as `recv` does."""
    return _Receiving("recv_object", None, source, tag, world).run()


def irecv_object_as_bytes(source: int | None, tag: int, world: World) -> Operation[Any]:
    """Start `recv_object_as_bytes`, with the same arguments."""
    return _Receiving("irecv_object", None, source, tag, world).start()


def _known_receive(out: Array | None, source: int | None, tag: int, world: World) -> _Known | None:
    """Return how an array as in an earlier call is received; None if the usual way is needed."""
    if (type(source) is not int and source is not None) or type(tag) is not int:
        return None
    known: dict[object, _Known] | None = world.kept.get(_known_receive)
    if known is None:
        return None
    if out is None:
        return known.get((source, tag))
    if type(out) is not np.ndarray or not out.flags.carray or protection_of(out) is not None:
        return None
    return known.get((source, tag, out.shape, out.dtype))


class _Known(NamedTuple):
    """A receive of messages with arrays of one kind by a kernel."""

    shape: tuple[int, ...]
    dtype: np.dtype
    now: Callable[[np.ndarray, int, OfferedData | None], tuple[int, Request] | None]
    """See `Mailbox.receiver`."""
    spins: int
    """Polls of a blocking call."""
    inbox: _Inbox
    """The earlier receives with the tag, to which the message may belong."""
    active: TaskGroup
    """Operations in progress, which a kernel would hold up."""

    def take(
        self, out: Array | None, source: int | None, blocks: bool = True, sent: Sequence[Request] = ()
    ) -> _Taken | None:
        """Take a message by one kernel, while messages are ``sent``; return None if the usual way is needed."""
        if self.inbox.waiting or (blocks and self.active.running):
            return None
        if out is None:
            out = np.empty(self.shape, self.dtype)
        own = sent[0] if sent and type(sent[0]) is OfferedData else None
        taken = self.now(out, self.spins if blocks else 0, own)
        if taken is None:
            return None
        sender, request = taken
        return _Taken(out if source is not None else (out, sender), sender, request)


class _Taken(NamedTuple):
    """A message that a kernel has taken, of which the sender may still write a part."""

    received: Any
    """The result of `recv`."""
    sender: int
    request: Request

    def wait(self, world: World) -> Any:
        """Return the result of `recv` when it is complete."""
        if self.request is not COMPLETE:
            steps = _when_complete([self.request], self.received)
            ProgressEngine.of(world).run(self._name, steps, self._x, [self.sender])
        return self.received

    def start(self, world: World) -> Operation[Any]:
        """Return the operation of `irecv`."""
        progress = ProgressEngine.of(world)
        if self.request is COMPLETE:
            return progress.ended("recv", self.received)
        return progress.start_polled(self._name, _polled([self.request], self.received), self._x, [self.sender])

    @property
    def _name(self) -> str:
        return f"recv from rank {self.sender}"

    @property
    def _x(self) -> Any:
        return self.received if isinstance(self.received, np.ndarray) else self.received[0]


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
    known = _known_receive(out, source, tag, world)
    if known is not None and (taken := known.take(out, source, blocks=False)) is not None:
        return taken.start(world)
    return _Receiving("irecv", out, source, tag, world, known).start()


class _Receiving:
    """A valid call of a function that receives."""

    def __init__(
        self, called: str, out: Array | None, source: int | None, tag: int, world: World, known: _Known | None = None
    ) -> None:
        if known is None:
            tag = _checked_tag(called, tag)
            if source is not None:
                source = checked_root(called, source, world, "source")
            if out is not None:
                check_array(called, "out", out)
                check_writeable(called, "out", out)
            inbox: _Inbox | None = world.kept.get((_Inbox, tag))
            self._inbox = inbox or world.keep((_Inbox, tag), lambda: _Inbox(world, tag))
        else:
            self._inbox = known.inbox
        self._out, self._source, self._tag, self._world, self._known = out, source, tag, world, known
        self._called = called
        self._spins = SPINS if world.cores >= world.local_size else 0
        self._receive: _Receive | None = None
        self.peers = [] if source is None else [source]
        """The ranks that it waits for, see `ProgressEngine.start`."""

    @property
    def name(self) -> str:
        """The name in reports."""
        return "recv from any rank" if self._source is None else f"recv from rank {self._source}"

    def run(self, sent: Sequence[Request] = ()) -> Any:
        """Receive, blocking, while messages are ``sent``; return what `recv` returns."""
        progress = ProgressEngine.of(self._world)
        if not progress.active.running and self._is_here_soon():
            return self.result()
        return progress.run(self.name, self.steps(sent), self._out, self.peers)

    def start(self) -> Operation[Any]:
        """Receive, not blocking; return the operation, whose result is that of `recv`."""
        return ProgressEngine.of(self._world).start_polled(self.name, self.poller(), self._out, self.peers)

    def _remember(self, received: Array) -> None:
        """Let a kernel receive arrays like this one from now on."""
        mailbox = _mailbox_of(self._world, self._source)
        if type(received) is not np.ndarray or not received.flags.carray:
            return
        if mailbox is None:
            if self._out is not None and self._source is not None and received.nbytes <= _MOST_BEGUN_NBYTES:
                quick_key = "recv", self._source, self._tag, received.shape, received.dtype
                if quick_key not in self._world.kept.get(_QUICK, _NOTHING):
                    repeated = _repeated_receive(self._world, self._source, self._tag, received)
                    _remember(self._world, quick_key, repeated)
            return
        known: dict[object, _Known] = self._world.keep(_known_receive, dict)
        shape, dtype, is_short = received.shape, received.dtype, received.nbytes <= SHORT_IN_NODE_NBYTES
        anonymous = self._out is None
        key = (self._source, self._tag) if anonymous else (self._source, self._tag, shape, dtype)
        if key in known and not anonymous:
            return
        if len(known) >= _MOST_KNOWN:
            known.clear()
        header = _header(received, kind_number(None) if anonymous else _ANY, _WITHIN if is_short else _OFFERED)
        instead = None if is_short else self._inbox.data_by_mpi
        now = mailbox.receiver(self._source, self._tag, header, instead, received)
        active, spins = ProgressEngine.of(self._world).active, KERNEL_SPINS if self._spins else 0
        known[key] = _Known(shape, dtype, now, spins, self._inbox, active)
        if is_short and not anonymous and self._source is not None:
            take = mailbox.taker(self._source, self._tag, header, received, spins, (self._inbox.waiting, active))
            _remember(self._world, ("recv", *key), take)

    def _is_here_soon(self) -> bool:
        """Start it; return whether a short message for it arrives while this thread spins, as most do."""
        receive, inbox = self._inbox.post(self._called, self._out, self._source), self._inbox
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

    def steps(self, sent: Sequence[Request] = ()) -> StepsTo[Any]:
        """Run the receive as an algorithm, also after `_is_here_soon`.

        It tests what is ``sent``, too: the receiver of `OfferedData` may wait for its answer before it sends to this
        rank.
        """
        # In the first step, during which no other thread starts an operation.
        receive, inbox = self._receive or self._inbox.post(self._called, self._out, self._source), self._inbox
        self._receive = receive
        try:
            if not inbox.has_for(receive):
                yield [PolledRequest(_testing(sent, lambda: inbox.has_for(receive)), YIELDS, self._spins)]
            request = receive.request
            assert request is not None
            yield [PolledRequest(_testing(sent, request.test), YIELDS) if sent else request]
            return self.result()
        finally:
            inbox.drop(receive)

    def poller(self) -> Callable[[], Any]:
        """Start it; return a function that returns what `recv` returns when the data are here, and `NOT_YET` before."""
        inbox, source, known = self._inbox, self._source, self._known
        receive = self._receive = inbox.post(self._called, self._out, source)
        array: Any = self._out
        if known is not None and array is None:
            array = np.empty(known.shape, known.dtype)
        is_known = False

        def poll() -> Any:
            nonlocal is_known
            try:
                if receive.request is None:
                    is_known = known is not None and inbox.take_known(receive, known, array)
                    if not is_known and not inbox.has_for(receive):
                        return NOT_YET
                assert receive.request is not None
                if not receive.request.test():
                    return NOT_YET
            except BaseException:
                inbox.drop(receive)
                raise
            if not is_known:
                return self.result()
            return array if source is not None else (array, receive.source)

        return poll

    def result(self) -> Any:
        """Return what `recv` returns, when the data are here."""
        assert self._receive is not None
        received = self._receive.result(with_sender=self._source is None)
        if _is_of_object(self._called):
            return received
        self._remember(received if self._source is not None else received[0])
        return received


def _testing(requests: Sequence[Request], test: Callable[[], bool]) -> Callable[[], bool]:
    """Return ``test``, with tests of ``requests`` before it."""

    def tested() -> bool:
        for request in requests:
            request.test()
        return test()

    return tested


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
def sendrecv(
    x: Array, dest: int, source: int | None, out: Array | None = None, tag: int = 0, world: World | None = None
) -> Any:
    """Send ``x`` to rank ``dest`` and receive an array from rank ``source`` at the same time.

    Args:
        x: as for `send`.
        dest: the receiver of ``x``.
        source: the sender of the result, or None, as for `recv`; calls `sendrecv`, or `send`.
        out: as for `recv`; may overlap ``x``, which is copied then.
        tag: the tag of both messages.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        The result of `recv`.

    Raises:
        HpcdpError: as `send` and `recv`.
    """
    world = ranks_of(world)
    key = swap = None
    if type(x) is type(out) is np.ndarray and type(dest) is type(source) is type(tag) is int:
        key = dest, source, tag, x.shape, out.shape, present.kind  # the kernel compares the dtypes
        swap = world.kept.get(_QUICK, _NOTHING).get(key)
        if swap is not None and not (held and protection_of(out)):
            is_sent, is_received = swap(x, out)
            if is_received:
                return out
            if is_sent:
                return _Receiving("sendrecv", out, source, tag, world).run()
    if not are_plain(x, out):
        return with_tensors(sendrecv, x=x, dest=dest, source=source, out=out, tag=tag, world=world)
    x = apart(x, out)
    known = _known_receive(out, source, tag, world)
    # Raises before anything is sent.
    receiving = None if known is not None else _Receiving("sendrecv", out, source, tag, world)
    requests, dest = _sent("sendrecv", x, dest, tag, world)
    if key is not None and swap is None:
        _remember_swap(key, x, out, None if requests else known, world)
    taken = None if known is None else known.take(out, source, sent=requests)
    if taken is not None:
        received = taken.wait(world)
    else:
        received = (receiving or _Receiving("sendrecv", out, source, tag, world)).run(requests)
    if requests:
        _wait_for_sent(requests, x, dest, world)
    return received


def _remember_swap(key: tuple[Any, ...], x: np.ndarray, out: Any, known: _Known | None, world: World) -> None:
    """Let a `sendrecv` with this key be a single call of a kernel, if both messages are short and in the node.

    Over hosts it is a `RepeatedSend` and a `RepeatedReceive`.
    """
    (dest, source, tag), mailbox = key[:3], _mailbox_of(world, key[0])
    if mailbox is _mailbox_of(world, source) is None:
        quick = world.kept.get(_QUICK, _NOTHING)
        push = quick.get(("send", dest, tag, x.shape, x.dtype, present.kind))
        take = quick.get(("recv", source, tag, out.shape, out.dtype))
        if push is not None and take is not None:
            _remember(world, key, partial(swapped, push, take))
        return
    is_short = max(x.nbytes, out.nbytes) <= SHORT_IN_NODE_NBYTES
    if mailbox is None or known is None or mailbox is not _mailbox_of(world, source) or not is_short:
        return
    headers = _header(x, kind_number(present.kind), _WITHIN), _header(out, _ANY, _WITHIN)
    before = known.inbox.waiting, known.active
    _remember(world, key, mailbox.swapper(dest, source, tag, headers, (x, out), known.spins, before))


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
    receiving = _Receiving("isendrecv", out, source, tag, world)
    requests, dest = _sent("isendrecv", apart(x, out), dest, tag, world)

    def steps() -> StepsTo[Any]:
        received = yield from receiving.steps(requests)
        yield requests
        return received

    name = f"send to rank {dest} and {receiving.name}"
    return ProgressEngine.of(world).start(name, steps(), x, receiving.peers)


def _repeated_receive(world: World, source: int, tag: int, like: np.ndarray) -> RepeatedReceive:
    inbox: _Inbox = world.kept[_Inbox, tag]
    name, progress = f"recv from rank {source}", ProgressEngine.of(world)

    def wait(requests: Sequence[Request], x: np.ndarray) -> None:
        progress.run(name, _when_complete(requests), x, [source])

    def matched(called: str, message: np.ndarray, out: np.ndarray | None) -> tuple[_Receive, Request]:
        receive = _Receive(called, out, source)
        receive.match(inbox, source, message[: _length_of(message)], COMPLETE)
        assert receive.request is not None
        return receive, receive.request

    def other(called: str, message: np.ndarray, out: np.ndarray) -> None:
        receive, request = matched(called, message, out)
        wait([request], out)
        receive.result(with_sender=False)

    def drop(message: np.ndarray) -> None:
        inbox.dropped.append(matched("recv", message, None)[0])

    header = _header(like, _ANY, _place_of(like))
    return RepeatedReceive(
        world.comm, source, _tags(world.comm, tag), header, like, inbox, progress.active, wait, other, drop
    )


def _length_of(message: np.ndarray) -> int:
    """Return the bytes of the message that begins with ``message``, of which at most `WHOLE_NBYTES` have come."""
    words = message[:_MOST_HEADER].view(np.int64)
    axes = int(words[_AXES])
    begin = _WORD * (_SHAPE + axes)
    if words[_DATA] in (_FOLLOW, _OFFERED):
        return begin
    itemsize = 1 if words[_DTYPE] == _OBJECT else dtype_of_char(chr(words[_DTYPE])).itemsize
    return min(begin + math.prod(words[_SHAPE : _SHAPE + axes].tolist()) * itemsize, WHOLE_NBYTES)


class _Receive:
    """A receive that has been started; its message is here once `request` is set."""

    def __init__(self, called: str, out: Array | None, source: int | None) -> None:
        self.source = source
        self.request: Request | None = None
        self._called, self._wants_object = called, _is_of_object(called)
        self._out = out
        self._host: Any = None

    def match(self, inbox: _Inbox, sender: int, message: np.ndarray, request: Request) -> None:
        """Take the message that has arrived from ``sender``; receive its data if they are elsewhere."""
        self.source, self._message, self.request = sender, message, request
        if _MOST_HEADER < message.size < WHOLE_NBYTES:
            return
        request.wait()  # such a message is complete at once, or soon
        where = _words(message)[_DATA]
        if where == _WITHIN:
            return
        data = bytes_of(self._memory())
        if where == _BEGUN:
            head = _WORD * (_SHAPE + int(_words(message)[_AXES]))
            first = message.size - head
            data[:first] = message[head:]
            data = data[first:]
        self.request = inbox.data_of(message, data, sender, where == _OFFERED)

    def _memory(self) -> np.ndarray:
        """Return the memory for the array that the message describes: ``out`` itself if possible."""
        words = _words(self._message)
        axes = int(words[_AXES])
        self._is_object = bool(words[_DTYPE] == _OBJECT)
        dtype = np.dtype(np.uint8) if self._is_object else dtype_of_char(chr(words[_DTYPE]))
        self._sent = tuple(words[_SHAPE : _SHAPE + axes].tolist()), dtype
        out = self._out
        is_alike = out is None or (tuple(out.shape), out.dtype) == self._sent
        self._fits = is_alike and self._is_object == self._wants_object
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
        if self._is_object != self._wants_object:
            expected, got, remedy = "an array", "an object", "call recv_object()"
            if self._wants_object:
                expected, got, remedy = "an object", f"an array, {shape} {dtype.name}", "call recv()"
            where = f"the message of rank {self.source}"
            raise MismatchError(self._called, where=where, expected=expected, got=got, remedy=remedy)
        if out is not None and not self._fits:
            raise MismatchError(
                self._called, where="out", expected=f"{shape} {dtype.name}, as rank {self.source} sent",
                got=f"{out.shape} {out.dtype}",
            )  # fmt: skip
        if out is None:
            out = in_kind_of_sender(int(_words(self._message)[_KIND]), self._host)
        elif not self._in_place:
            bring_back(self._host, out)
        return (out, self.source) if with_sender else out


class _Inbox:
    """The receives of one tag that wait for a message, in the order in which they were started."""

    def __init__(self, world: World, tag: int) -> None:
        self._comm, self._tag = world.comm, tag
        self._numbers = [_tag(world.comm, tag, is_data) for is_data in (0, 1)]
        self._mailbox: Mailbox | None = world.kept.get(Mailbox)
        self.waiting: deque[_Receive] = deque()
        self.dropped: list[_Receive] = []
        """Messages that nobody wants any more; their data may still be on their way."""
        self._claimed: set[int] = set()
        self._turn = threading.Lock()
        """Held by the thread that looks for messages: receives may be waited for by different threads."""

    def claim(self, source: int) -> bool:
        """See `short_messages.ReceiveOrder`."""
        with self._turn:
            if self.waiting or source in self._claimed:
                return False
            self._claimed.add(source)
            return True

    def release(self, source: int) -> None:
        """See `short_messages.ReceiveOrder`."""
        with self._turn:
            self._claimed.remove(source)

    def post(self, called: str, out: Array | None, source: int | None) -> _Receive:
        """Start a receive of the function ``called``."""
        receive = _Receive(called, out, source)
        with self._turn:
            self.waiting.append(receive)
        return receive

    def drop(self, receive: _Receive) -> None:
        """End a receive that may still wait."""
        with self._turn:
            if receive.request is None:
                self.waiting.remove(receive)

    def has_for(self, receive: _Receive) -> bool:
        """Return whether a message for ``receive`` is here; never block."""
        with self._turn:
            while receive.request is None:
                begun = self._next_from(receive.source)
                if begun is None:
                    return False
                sender = begun[0]
                first = next(other for other in self.waiting if other.source in (None, sender))
                self.waiting.remove(first)
                first.match(self, *begun)
            return True

    def take_known(self, receive: _Receive, known: _Known, out: np.ndarray) -> bool:
        """Return whether a kernel has taken a message like earlier ones for ``receive``, the first of those that wait.

        ``out`` gets the data when the request of ``receive`` is complete.
        """
        with self._turn:
            if self.waiting[0] is not receive:
                return False
            taken = known.now(out, 0, None)
            if taken is None:
                return False
            self.waiting.popleft()
            receive.source, receive.request = taken
            return True

    def _next_from(self, source: int | None) -> tuple[int, np.ndarray, Request] | None:
        """Return the sender, the message and its request of the next one from ``source`` or any rank, if there is."""
        mailbox = self._mailbox
        if mailbox is not None and (source is None or source in mailbox.local_of):
            if (taken := mailbox.take(self._tag, source)) is not None:
                return *taken, COMPLETE
            if source is not None or mailbox.has_all:
                return None
        if not self._claimed:
            return self._comm.irecv_any(self._numbers[0], source)
        for rank in range(self._comm.size) if source is None else (source,):
            if rank not in self._claimed and (found := self._comm.irecv_any(self._numbers[0], rank)) is not None:
                return found
        return None

    def data_of(self, message: np.ndarray, data: np.ndarray, sender: int, is_offered: bool) -> Request:
        """Receive the data that a message announces."""
        if not is_offered:
            return self.data_by_mpi(data, sender)
        assert self._mailbox is not None
        return self._mailbox.fetch(int(_words(message)[-1]), data, partial(self.data_by_mpi, data, sender))

    def data_by_mpi(self, data: np.ndarray, sender: int) -> Request:
        """Receive data that follow in a message of MPI."""
        return self._comm.irecv(data, sender, self._numbers[1])


def _words(message: np.ndarray) -> np.ndarray:
    return message[: message.size // _WORD * _WORD].view(np.int64)


def _tag(comm: Communicator, tag: int, is_data: int) -> int:
    number, lane = divmod(tag << 1 | is_data, 1 << _TAG_BITS + 1 - OPERATION_BITS)
    return make_tag(comm.signatures, number, lane)


def _checked_tag(operation: str, tag: int) -> int:
    return whole_number(operation, "tag", tag, 0, _MOST_TAG)
