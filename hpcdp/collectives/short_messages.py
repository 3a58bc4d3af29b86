"""Short messages between two ranks by MPI, repeated with all preparations made.

Each is of arrays of one shape and dtype, and has memory for a message; see `point_to_point` for what that consists of.
A receive is posted at once, not when its message has been found, which saves a copy and a call of MPI.

Both parts of a message follow each other: other threads send and receive none with the tag between them. After an
exception, as at Ctrl-C, the memory is not used again, because a message may still be on its way from it or to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Sized
from typing import Protocol

import numpy as np

from ..comm.communicator import Communicator, Request
from ..comm.message_rounds import WHOLE_NBYTES
from ..comm.progress import TaskGroup

_TESTS = 1000
"""Tests for the second part of a message before its receiver waits in the usual way."""
_abandoned: list[object] = []
"""Memory that messages may still use after an exception."""
_KIND = 1
"""The word of a message that tells the kind of the sender's array; a receiver with an array of its own ignores it."""

Wait = Callable[[Sequence[Request], np.ndarray], object]
"""``wait(requests, x)`` blocks until messages with ``x`` are complete."""


class ReceiveOrder(Protocol):
    """The receives of one tag."""

    @property
    def waiting(self) -> Sized:
        """The receives that wait for a message."""
        ...

    def claim(self, source: int) -> bool:
        """Let nobody else receive from ``source`` until `release`; return False if others wait already."""
        ...

    def release(self, source: int) -> None:
        """Let others receive from ``source`` again."""
        ...


class RepeatedSend:
    """A send of arrays like an earlier one.

    Args:
        comm: the ranks.
        dest: the receiver.
        tags: those of the message, and of its rest if it is longer than `WHOLE_NBYTES`.
        header: shape ``(k,)``, int64: the beginning of the message.
        like: an array like those that are sent, of at most twice `WHOLE_NBYTES` with the header.
        order: held while the parts of a message with these tags are sent.
        wait: waits for the messages.
    """

    def __init__(
        self,
        comm: Communicator,
        dest: int,
        tags: tuple[int, int],
        header: np.ndarray,
        like: np.ndarray,
        order: threading.Lock,
        wait: Wait,
    ) -> None:
        message = np.empty(header.nbytes + like.nbytes, np.uint8)
        message[: header.nbytes] = header.view(np.uint8)
        self._body = message[header.nbytes :].view(like.dtype).reshape(like.shape)
        parts = [message[:WHOLE_NBYTES], message[WHOLE_NBYTES:]][: 1 + (message.size >= WHOLE_NBYTES)]
        self._swaps = [(comm.swapper([part], None, dest), tag) for part, tag in zip(parts, tags, strict=False)]
        self._order, self._wait, self.dtype = order, wait, like.dtype
        self._turn, self._pending = threading.Lock(), list[Request]()

    def __call__(self, x: np.ndarray) -> bool:
        """Send ``x``; return False if it must be sent in the usual way."""
        if not self.start(x):
            return False
        self.finish(x)
        return True

    def start(self, x: np.ndarray) -> bool:
        """Start to send ``x``, which is copied; `finish` must follow. Return False if the usual way is needed."""
        if not x.flags.carray or not self._turn.acquire(False):
            return False
        pending: list[Request] = []
        try:
            self._body[...] = x
            with self._order:
                for swap, tag in self._swaps:
                    if (swapping := swap(tag)) is not None:
                        pending += swapping.outgoing
        except BaseException:
            _abandoned.append(self)  # with its turn
            raise
        self._pending = pending
        return True

    def finish(self, x: np.ndarray) -> None:
        """Wait until ``x`` has been sent."""
        if self._pending:
            try:
                self._wait(self._pending, x)
            except BaseException:
                _abandoned.append(self)
                raise
        self._turn.release()


class RepeatedReceive:
    """A receive of arrays like an earlier one.

    Args:
        comm: the ranks.
        source: the sender.
        tags: as for `RepeatedSend`.
        header: shape ``(k,)``, int64: the beginning of the expected message.
        like: an array like those that are received.
        inbox: the other receives with the tag.
        active: operations in progress, to which a message may belong.
        wait: waits for the messages.
        other: ``other(called, message, out)`` receives what another message than the expected one announces.
        drop: ``drop(message)`` receives what a message announces whose receive has been given up.
    """

    def __init__(
        self,
        comm: Communicator,
        source: int,
        tags: tuple[int, int],
        header: np.ndarray,
        like: np.ndarray,
        inbox: ReceiveOrder,
        active: TaskGroup,
        wait: Wait,
        other: Callable[[str, np.ndarray, np.ndarray], object],
        drop: Callable[[np.ndarray], object],
    ) -> None:
        begin, nbytes = header.nbytes, header.nbytes + like.nbytes
        self._message = np.empty(2 * WHOLE_NBYTES, np.uint8)
        self._words = self._message[:begin].data.cast("q")
        self._expected = header.view(np.uint8).data.cast("q")
        self._body = self._message[begin:nbytes].view(like.dtype).reshape(like.shape)
        first = self._message[:WHOLE_NBYTES]
        self._swap = comm.swapper([], first, source, lambda: drop(first.copy()))
        self._rest = self._message[WHOLE_NBYTES:nbytes] if nbytes >= WHOLE_NBYTES else None
        self._comm, self._source, (self._tag, self._rest_tag) = comm, source, tags
        self._inbox, self._active, self._is_usable = inbox, active, True
        self._wait, self._other, self.dtype = wait, other, like.dtype

    def __call__(self, out: np.ndarray, called: str = "recv") -> bool:
        """Receive into ``out`` as the function ``called``; return False if the usual way is needed."""
        if not self.may_receive(out) or not self._inbox.claim(self._source):
            return False
        try:
            self._receive_first(out)
            words, expected = self._words, self._expected
            if words[0] != expected[0] or words[_KIND + 1 :] != expected[_KIND + 1 :]:
                self._other(called, self._message[:WHOLE_NBYTES].copy(), out)
                return True
            if self._rest is not None:
                self._receive_rest(self._rest, out)
            out[...] = self._body
        finally:
            self._inbox.release(self._source)
        return True

    def may_receive(self, out: np.ndarray) -> bool:
        """Return whether the next message may be received here."""
        return self._is_usable and not self._inbox.waiting and not self._active.running and out.flags.carray

    def _receive_first(self, out: np.ndarray) -> None:
        swapping = self._swap(self._tag)
        if swapping is not None:
            try:
                self._wait(swapping.incoming, out)
            except BaseException:
                swapping.cancel()
                raise

    def _receive_rest(self, rest: np.ndarray, out: np.ndarray) -> None:
        request = self._comm.irecv_up_to(rest, self._source, self._rest_tag)
        try:
            for _ in range(_TESTS):
                if request.test():
                    return
            self._wait([request], out)
        except BaseException:  # it stays posted, or a later receive would take this rest for its own
            self._is_usable = False
            _abandoned.append((self, request))
            raise


def swapped(push: RepeatedSend, take: RepeatedReceive, x: np.ndarray, out: np.ndarray) -> tuple[bool, bool]:
    """Send ``x`` and receive ``out``; return whether each has been done."""
    if x.dtype != push.dtype or out.dtype != take.dtype or np.may_share_memory(x, out) or not take.may_receive(out):
        return False, False
    if not push.start(x):
        return False, False
    try:
        is_received = take(out, "sendrecv")
    finally:
        push.finish(x)
    return True, is_received
