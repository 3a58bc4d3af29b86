"""Short messages between two ranks by MPI, repeated with all preparations made.

Each is of arrays of one shape and dtype, and has memory for a message; see `point_to_point` for what that consists of.
A receive is posted at once, not when its message has been found, which saves a copy and a call of MPI.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..comm.communicator import Communicator, Request
from ..comm.message_rounds import WHOLE_NBYTES

_KIND = 1
"""The word of a message that tells the kind of the sender's array; a receiver with an array of its own ignores it."""

Wait = Callable[[Sequence[Request], np.ndarray], object]
"""``wait(requests, x)`` blocks until messages with ``x`` are complete."""


class RepeatedSend:
    """A send of arrays like an earlier one.

    Args:
        comm: the ranks.
        dest: the receiver.
        tags: those of the message, and of its rest if it is longer than `WHOLE_NBYTES`.
        header: shape ``(k,)``, int64: the beginning of the message.
        like: an array like those that are sent, of at most twice `WHOLE_NBYTES` with the header.
        wait: waits for the messages.
    """

    def __init__(
        self, comm: Communicator, dest: int, tags: tuple[int, int], header: np.ndarray, like: np.ndarray, wait: Wait
    ) -> None:
        message = np.empty(header.nbytes + like.nbytes, np.uint8)
        message[: header.nbytes] = header.view(np.uint8)
        self._body = message[header.nbytes :].view(like.dtype).reshape(like.shape)
        parts = [message[:WHOLE_NBYTES], message[WHOLE_NBYTES:]][: 1 + (message.size >= WHOLE_NBYTES)]
        self._swaps = [(comm.swapper([part], None, dest), tag) for part, tag in zip(parts, tags, strict=False)]
        self._wait, self.dtype = wait, like.dtype
        self.turn = threading.Lock()
        """Held while the memory is in use."""

    def __call__(self, x: np.ndarray) -> bool:
        """Send ``x``; return False if it must be sent in the usual way."""
        if not x.flags.carray or not self.turn.acquire(False):
            return False
        try:
            self.finish(self.start(x), x)
        finally:
            self.turn.release()
        return True

    def finish(self, pending: Sequence[Request], x: np.ndarray) -> None:
        """Wait for messages of `start`."""
        if pending:
            self._wait(pending, x)

    def start(self, x: np.ndarray) -> Sequence[Request]:
        """Start to send ``x``, which is copied; return the requests that are not complete. The caller has `turn`."""
        self._body[...] = x
        pending: list[Request] = []
        for swap, tag in self._swaps:
            if (swapping := swap(tag)) is not None:
                pending += swapping.outgoing
        return pending


class RepeatedReceive:
    """A receive of arrays like an earlier one.

    Args:
        comm: the ranks.
        source: the sender.
        tags: as for `RepeatedSend`.
        header: shape ``(k,)``, int64: the beginning of the expected message.
        like: an array like those that are received.
        before: other receives with the tag that wait for a message, and operations in progress: while there are any,
            a message may belong to one of them.
        wait: waits for the messages.
        other: ``other(called, message, out)`` receives what another message than the expected one announces.
    """

    def __init__(
        self,
        comm: Communicator,
        source: int,
        tags: tuple[int, int],
        header: np.ndarray,
        like: np.ndarray,
        before: tuple[Sequence[object], Any],
        wait: Wait,
        other: Callable[[str, np.ndarray, np.ndarray], object],
    ) -> None:
        begin, nbytes = header.nbytes, header.nbytes + like.nbytes
        self._message = np.empty(2 * WHOLE_NBYTES, np.uint8)
        self._words = self._message[:begin].data.cast("q")
        self._expected = header.view(np.uint8).data.cast("q")
        self._body = self._message[begin:nbytes].view(like.dtype).reshape(like.shape)
        self._swap = comm.swapper([], self._message[:WHOLE_NBYTES], source)
        self._swap_rest = None
        if nbytes >= WHOLE_NBYTES:
            self._swap_rest = comm.swapper([], self._message[WHOLE_NBYTES:nbytes], source)
        self._tag, self._rest_tag = tags
        self._waiting, self._active = before
        self._wait, self._other, self._turn, self.dtype = wait, other, threading.Lock(), like.dtype

    def __call__(self, out: np.ndarray, called: str = "recv") -> bool:
        """Receive into ``out`` as the function ``called``; return False if the usual way is needed."""
        if not self.may_receive(out) or not self._turn.acquire(False):
            return False
        try:
            self._receive(self._swap, self._tag, out)
            words, expected = self._words, self._expected
            if words[0] != expected[0] or words[_KIND + 1 :] != expected[_KIND + 1 :]:
                self._other(called, self._message[:WHOLE_NBYTES].copy(), out)
                return True
            if self._swap_rest is not None:
                self._receive(self._swap_rest, self._rest_tag, out)
            out[...] = self._body
        finally:
            self._turn.release()
        return True

    def may_receive(self, out: np.ndarray) -> bool:
        """Return whether the next message may be received here."""
        return not self._waiting and not self._active.running and out.flags.carray

    def _receive(self, swap: Callable[[int], Any], tag: int, out: np.ndarray) -> None:
        swapping = swap(tag)
        if swapping is not None:
            try:
                self._wait(swapping.incoming, out)
            except BaseException:
                swapping.cancel()
                raise


def swapped(push: RepeatedSend, take: RepeatedReceive, x: np.ndarray, out: np.ndarray) -> tuple[bool, bool]:
    """Send ``x`` and receive ``out``; return whether each has been done."""
    if x.dtype != push.dtype or out.dtype != take.dtype or np.may_share_memory(x, out):
        return False, False
    if not take.may_receive(out) or not x.flags.carray or not push.turn.acquire(False):
        return False, False
    try:
        pending = push.start(x)
        try:
            is_received = take(out, "sendrecv")
        finally:
            push.finish(pending, x)
    finally:
        push.turn.release()
    return True, is_received
