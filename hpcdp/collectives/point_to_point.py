"""Messages between two ranks, of arrays whose shape and dtype the receiver need not know.

A message says the shape and dtype of its array. Up to `SHORT_NBYTES` it carries the data as well; longer data follow in
a message of their own, which is received in place. Messages from one rank with one tag arrive in the order in which
they were sent, whichever of them is waited for first.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from ..comm import World
from ..comm.communicator import OPERATION_BITS, Communicator, PolledRequest, StepsTo, make_tag
from ..comm.tasks import Operation, ProgressEngine
from ..core.arrays import Array, dtype_of_char
from ..core.checks import whole_number
from ..errors import MismatchError
from .staging import (
    accepts_tensors,
    bring_back,
    bytes_of,
    check_array,
    check_writeable,
    checked_root,
    movable,
    ranks_of,
)

SHORT_NBYTES = 64 << 10
"""The longest data that the message with the shape carries: they are copied, but need no second message."""

_TAG_BITS = OPERATION_BITS + 5
_MOST_TAG = (1 << _TAG_BITS) - 1
_KIND, _AXES, _FOLLOWS, _SHAPE = range(4)  # words of a message: dtype, axes, whether data follow, then the shape
_WORD, _MOST_AXES = 8, 64


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
    isend(x, dest, tag, world).wait()


@accepts_tensors
def isend(x: Array, dest: int, tag: int = 0, world: World | None = None) -> Operation[None]:
    """Start a `send`, whose arguments and errors it has; ``x`` may not change before the end."""
    world = ranks_of(world)
    dest, tag = checked_root("send", dest, world, "dest"), _checked_tag("send", tag)
    host = movable("send", x)
    follows = host.nbytes > SHORT_NBYTES
    words = np.array([ord(host.dtype.char), host.ndim, follows, *host.shape], np.int64)
    message = np.concatenate([bytes_of(words), bytes_of(host)]) if not follows else bytes_of(words)

    def steps() -> StepsTo[None]:
        comm = world.comm
        data = [comm.isend(bytes_of(host), dest, _tag(comm, tag, 1))] if follows else []
        yield [*data, comm.isend_whole(message, dest, _tag(comm, tag, 0))]

    return ProgressEngine.of(world).start(f"send to rank {dest}", steps(), x, dest)


@accepts_tensors
def recv(out: Array | None = None, source: int = 0, tag: int = 0, world: World | None = None) -> Array:
    """Receive an array that rank ``source`` sends.

    Args:
        out: receives the values, and has the shape and dtype of the sent array. Default a new array in host memory.
        source: the sender.
        tag: the tag of `send`.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        ``out``, or the new array.

    Raises:
        MismatchError: the sent array has another shape or dtype than ``out``, which is unchanged.
        UnsupportedError: ``out`` is no writeable array, or ``source`` no rank.
        ConfigError: the tag is not valid.
    """
    return irecv(out, source, tag, world).wait()


@accepts_tensors
def irecv(out: Array | None = None, source: int = 0, tag: int = 0, world: World | None = None) -> Operation[Array]:
    """Start a `recv`, whose arguments and errors it has; ``wait()`` returns its result."""
    world = ranks_of(world)
    source, tag = checked_root("recv", source, world, "source"), _checked_tag("recv", tag)
    if out is not None:
        check_array("recv", "out", out)
        check_writeable("recv", "out", out)
    turns = world.keep(_Turns, _Turns)

    def steps() -> StepsTo[Array]:
        number = turns.begin(source, tag)  # in the first step, during which no other thread starts an operation
        try:
            if not turns.is_next(source, tag, number):
                yield [PolledRequest(lambda: turns.is_next(source, tag, number))]
            return (yield from _received(world.comm, out, source, tag))
        finally:
            turns.end(source, tag)

    return ProgressEngine.of(world).start(f"recv from rank {source}", steps(), out, source)


@accepts_tensors
def sendrecv(
    x: Array, dest: int, source: int, out: Array | None = None, tag: int = 0, world: World | None = None
) -> Array:
    """Send ``x`` to rank ``dest`` and receive an array from rank ``source`` at the same time.

    Args:
        x: as for `send`.
        dest: the receiver of ``x``.
        source: the sender of the result; calls `sendrecv`, or `send`.
        out: as for `recv`; may not share memory with ``x``.
        tag: the tag of both messages.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        ``out``, or a new array.

    Raises:
        HpcdpError: as `send` and `recv`.
    """
    sent = isend(x, dest, tag, world)
    received = recv(out, source, tag, world)
    sent.wait()
    return received


class _Turns:
    """The order of the receives from one rank with one tag: the data of each follow its own first message."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, int], int] = defaultdict(int)
        self._ended: dict[tuple[int, int], int] = defaultdict(int)

    def begin(self, source: int, tag: int) -> int:
        self._begun[source, tag] += 1
        return self._begun[source, tag] - 1

    def is_next(self, source: int, tag: int, number: int) -> bool:
        return self._ended[source, tag] == number

    def end(self, source: int, tag: int) -> None:
        self._ended[source, tag] += 1


def _received(comm: Communicator, out: Array | None, source: int, tag: int) -> StepsTo[Any]:
    message = np.empty(_WORD * (_SHAPE + _MOST_AXES) + SHORT_NBYTES, np.uint8)
    yield [comm.irecv_up_to(message, source, _tag(comm, tag, 0))]
    words = message[: _WORD * (_SHAPE + _MOST_AXES)].view(np.int64)
    axes = int(words[_AXES])
    dtype, shape = dtype_of_char(chr(words[_KIND])), tuple(words[_SHAPE : _SHAPE + axes].tolist())
    fits = out is None or (tuple(out.shape), out.dtype) == (shape, dtype)
    in_place = fits and type(out) is np.ndarray and out.flags.carray
    host: Any = out if in_place else np.empty(shape, dtype)
    if words[_FOLLOWS]:
        yield [comm.irecv(bytes_of(host), source, _tag(comm, tag, 1))]
    else:
        first = _WORD * (_SHAPE + axes)
        bytes_of(host)[...] = message[first : first + host.nbytes]
    if out is not None and not fits:
        raise MismatchError(
            "recv", where="out", expected=f"{shape} {dtype.name}, as rank {source} sent", got=f"{out.shape} {out.dtype}"
        )
    if out is None or in_place:
        return host
    bring_back(host, out)
    return out


def _tag(comm: Communicator, tag: int, is_data: int) -> int:
    number, lane = divmod(tag << 1 | is_data, 1 << _TAG_BITS + 1 - OPERATION_BITS)
    return make_tag(comm.signatures, number, lane)


def _checked_tag(operation: str, tag: int) -> int:
    return whole_number(operation, "tag", tag, 0, _MOST_TAG)
