"""Messages between ranks that share a node's memory, see `kernels.shm_messages`.

Every rank has a queue that the others fill. It empties its queue when it receives, while another one is full, every 50
ms of other waits for the node's ranks, and when its watchdog looks. Long data are copied from process to process, by
both ranks at once if each has a core, or follow as a message of MPI where the kernel refuses that.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from .. import kernels
from .communicator import COMPLETE, PolledRequest, Request
from .shared_memory import NodeMemory
from .world import weakly

_QUEUE_WORDS = 64 + (1 << 20) // 4
"""``int32`` words of a queue: those before its ring (`shm_messages.RING`), and a ring of 1 MB."""
_TAIL, _HEAD = 0, 32
"""The words `shm_messages.TAIL` and `HEAD` of a queue, which is empty while they are equal."""
_SLOTS = 256
"""Long arrays that a rank may offer at a time."""
_OFFER_WORDS = 32
"""`shm_messages.OFFER_WORDS`."""
_ANSWER, _READ, _SEND_IT, _QUEUE_FULL = 0, 1, 2, -1
"""`shm_messages.ANSWER`, the answers `READ` and `SEND_IT`, and `QUEUE_FULL`."""
_NO_OFFER = np.zeros(_OFFER_WORDS, np.int32)
"""An offer of nothing, which has no receiver."""
MOST_NBYTES = 258 << 10
"""The longest message, header and data together; several fit into a queue."""
KERNEL_SPINS = 10_000
"""Polls in a kernel, some 0.3 ms, in which a sender writes a part of 1 MB, the longest, unless it loses its core."""
SPINS, YIELDS = 300, 2000
"""Tests before a wait yields its core, if each rank has one, and before it naps: some 0.1 ms and a millisecond."""


def words_for(n: int) -> int:
    """Return the number of ``int32`` words that the mailboxes of ``n`` ranks share."""
    return n * (_QUEUE_WORDS + _SLOTS * _OFFER_WORDS)


_BOTH, _SENT, _NEITHER = (True, True), (True, False), (False, False)
_LATER = -3
Before = tuple[Sequence[object], Any]
"""The receives with a tag that wait for a message, and the `progress.TaskGroup` of operations in progress: while there
are any, a message may belong to one of them, and a kernel would hold them up.
"""


class Mailbox:
    """The messages of a rank with the others of its node; all of these ranks make theirs together.

    Args:
        memory: the node's memory.
        shared: shape ``(words_for(memory.size),)``, int32, zeros; shared by the node's ranks.
        ranks: their ranks in the world, in order.
        has_all: whether these are all ranks of the world.
        has_cores: whether each of them has a core.
    """

    def __init__(
        self, memory: NodeMemory, shared: np.ndarray, ranks: Sequence[int], has_all: bool, has_cores: bool
    ) -> None:
        self.local_of = {rank: local for local, rank in enumerate(ranks)}
        """The number in the node of each rank of the world that has one there."""
        self.has_all = has_all
        """True if all ranks of the world are in the node."""
        n = memory.size
        self._has_cores, self._process = has_cores, os.getpid()
        self.memory, self._rank, self._ranks = memory, memory.rank, list(ranks)
        self._queues = shared[: n * _QUEUE_WORDS].reshape(n, -1)
        self._offers = shared[n * _QUEUE_WORDS :].reshape(-1, _OFFER_WORDS)
        self._mine = self._queues[self._rank]
        self._sending, self._taking, self.giving = threading.Lock(), threading.Lock(), threading.Lock()
        self._unsent: list[deque[_Unsent]] = [deque() for _ in range(n)]
        """Messages that wait because the queue of their receiver is full, by receiver."""
        self._can_offer = True
        """False once a receiver could not read this rank's memory."""
        self._free_slots = list(range(_SLOTS))
        self._offered: list[np.ndarray | None] = [None] * _SLOTS
        """Data of the offers in the slots: receivers that have not answered may still read them."""
        self._arrived: dict[int, deque[tuple[int, np.ndarray]]] = {}
        """By tag, messages that no receive has taken yet: the sender, as its number in the node, and the message."""
        memory.meanwhile = weakly(self.empty)

    @cached_property
    def _kernels(self) -> Any:
        return kernels.load("shm_messages")

    @cached_property
    def _bound(self) -> Callable[..., Callable[..., int]]:
        return kernels.load("shm_repeated").bound  # type: ignore[no-any-return]

    @cached_property
    def _places(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The number, shape ``(1,)``, and the words of each offer of this rank, by slot."""
        first = self._rank * _SLOTS
        return [(np.array([number]), self._offers[number]) for number in range(first, first + _SLOTS)]

    def sender(
        self, dest: int, tag: int, header: np.ndarray, like: np.ndarray
    ) -> Callable[[np.ndarray], Request | None]:
        """Return a function ``send(x)`` that sends arrays of the dtype and size of ``like`` to a rank of the node.

        A message is the ``header``, shape ``(k,)``, int64, and the data, together at most `MOST_NBYTES` bytes. It is
        copied; the function returns None, or a request if the queue is full.

        Args:
            dest: the receiver, a rank of the world.
            tag: the tag, from 0 to 2^31 - 1.
            header: the first part of the message.
            like: a contiguous array.
        """
        local, module, me = self.local_of[dest], self._kernels, self._rank
        queue, unsent, push, done = self._queues[local], self._unsent[local], module.push, module.DONE
        push_now = self.pusher(dest, tag, header, like)

        def send(x: np.ndarray) -> Request | None:
            if push_now(x):
                return None
            data = x.reshape(-1).view(np.uint8)
            if not unsent and push(queue, me, tag, header, data) == done:
                return None
            return self._send_later(local, tag, header, data.copy())

        return send

    def pusher(self, dest: int, tag: int, header: np.ndarray, like: np.ndarray) -> Callable[[Any], bool]:
        """Return a function ``push(x)`` that sends an array like ``like``; it returns False if `sender` is needed.

        Arguments as for `sender`. It may be called with any object.
        """
        local, module = self.local_of[dest], self._kernels
        queue, unsent, done = self._queues[local], self._unsent[local], module.DONE
        table = module.message_table(like.dtype, like.size, queue, self._rank, tag, header)
        push_at = self._bound(module.push_at, table)

        def push(x: Any) -> bool:
            return not unsent and push_at(id(x)) == done

        return push

    def taker(
        self, source: int, tag: int, header: np.ndarray, like: np.ndarray, spins: int, before: Before
    ) -> Callable[[Any], bool]:
        """Return a function ``take(out)`` that receives a message with its data; it returns False if it has not.

        Arguments as for `receiver`. It may be called with any object.
        """
        module, arrived, (waiting, active) = self._kernels, self._arrived, before
        table = module.message_table(like.dtype, like.size, self._mine, self.local_of[source], tag, header)
        receive_at, lock = self._bound(module.receive_at, table), self._taking
        acquire, release = lock.acquire, lock.release

        def take(out: Any) -> bool:
            if waiting or active.running or not acquire(False):
                return False
            try:
                return tag not in arrived and receive_at(id(out), spins) >= 0
            finally:
                release()

        return take

    def swapper(
        self,
        dest: int,
        source: int,
        tag: int,
        headers: tuple[np.ndarray, np.ndarray],
        like: tuple[np.ndarray, np.ndarray],
        spins: int,
        before: Before,
    ) -> Callable[[Any, Any], tuple[bool, bool]]:
        """Return a function ``swap(x, out)`` that is a `pusher` and then a `taker`; it returns what both of them do."""
        local, module, arrived, (waiting, active) = self.local_of[dest], self._kernels, self._arrived, before
        unsent, not_yet, lock = self._unsent[local], module.NOT_YET, self._taking
        acquire, release = lock.acquire, lock.release
        (header, expected), (x, out) = headers, like
        sending = module.message_table(x.dtype, x.size, self._queues[local], self._rank, tag, header)
        receiving = module.message_table(out.dtype, out.size, self._mine, self.local_of[source], tag, expected)
        swap_at = self._bound(module.swap_at, sending, receiving)

        def swap(x: Any, out: Any) -> tuple[bool, bool]:
            if unsent or waiting or active.running or not acquire(False):
                return _NEITHER
            try:
                sender = _LATER if tag in arrived else swap_at(id(x), id(out), spins)
            finally:
                release()
            return _BOTH if sender >= 0 else _SENT if sender == not_yet else _NEITHER

        return swap

    def send_rest(self, dest: int) -> None:
        """Send the waiting messages to a rank of the node, by its number there, until its queue is full again."""
        unsent = self._unsent[dest]
        with self._sending:
            while unsent:
                message = unsent[0]
                if self._kernels.push(self._queues[dest], self._rank, *message.parts) != self._kernels.DONE:
                    break
                unsent.popleft().is_sent = True
        if unsent:
            self.empty()  # its receiver may wait because this rank's queue is full

    def offerer(
        self, dest: int, tag: int, header: np.ndarray, instead: Callable[[np.ndarray], Request]
    ) -> Callable[[np.ndarray, bool], list[Request] | None]:
        """Return a function ``offer(data, may_poll)`` that sends messages whose data stay in this process.

        ``data``, shape ``(nbytes,)``, dtype uint8, may not change before the returned requests are complete. If it
        ``may_poll``, for some 0.3 ms, and each rank has a core, all are often complete, and the list is empty. It
        returns None if data cannot be offered.

        Args:
            dest: as for `sender`.
            tag: as for `sender`.
            header: shape ``(k,)``, int64; the message, which the number of the offer follows.
            instead: starts a message of MPI with the data, if the receiver cannot read them; returns its request.
        """
        local, me, process, push_offer = self.local_of[dest], self._rank, self._process, self._kernels.push_offer
        queue, unsent, free, offered = self._queues[local], self._unsent[local], self._free_slots, self._offered
        most_spins = KERNEL_SPINS if self._has_cores else 0

        def offer(data: np.ndarray, may_poll: bool) -> list[Request] | None:
            if not self._can_offer:
                return None
            try:
                slot = free.pop()
            except IndexError:
                return None
            offered[slot] = data
            number, words = self._places[slot]
            spins = most_spins if may_poll else 0
            answer = push_offer(queue, me, tag, header, number, words, process, data, not unsent, spins)
            if answer == _READ:
                offered[slot] = None
                free.append(slot)
                return []
            request = OfferedData(self, slot, words, instead)
            if answer != _QUEUE_FULL:
                return [request]
            return [request, self._send_later(local, tag, header, number.view(np.uint8))]

        return offer

    def answered(self, slot: int, is_read: bool) -> np.ndarray:
        """Note the answer to an offer; return its data."""
        data, self._offered[slot] = self._offered[slot], None
        self._free_slots.append(slot)
        self._can_offer &= is_read
        assert data is not None
        return data

    def _send_later(self, dest: int, *parts: Any) -> _Unsent:
        """Send a message to a rank, by its number in the node, when its queue is no longer full."""
        with self._sending:
            message = _Unsent(self, dest, *parts)
            self._unsent[dest].append(message)
        return message

    def receiver(
        self,
        source: int | None,
        tag: int,
        header: np.ndarray,
        instead: Callable[[np.ndarray, int], Request] | None,
        like: np.ndarray,
    ) -> Callable[[np.ndarray, int, OfferedData | None], tuple[int, Request] | None]:
        """Return a function ``receive(out, spins, own)`` for messages with one header.

        It polls ``spins`` times, each 15 to 50 ns, and returns the sender, a rank of the world, and the request of its
        data; or None if no message has arrived, or another one first, for `take`. ``out``, contiguous, of the dtype and
        size of ``like``, gets the rest of the message. Meanwhile it writes a part of ``own``, an offer that only this
        thread has.

        Args:
            source: the sender, a rank of the world in the node, or None for any.
            tag: as for `sender`.
            header: shape ``(k,)``, int64; -1 stands for any number.
            instead: for data that are an `offer`: starts to receive a message of MPI with them from a rank, and returns
                its request. None if the message has the data.
            like: a contiguous array.
        """
        local, module, process = -1 if source is None else self.local_of[source], self._kernels, self._process
        queue, offers, lock, ranks, arrived = self._mine, self._offers, self._taking, self._ranks, self._arrived
        receive = module.receive
        table = module.message_table(like.dtype, like.size, queue, local, tag, header)
        receive_at = self._bound(module.receive_at, table)

        def receive_data(out: np.ndarray, spins: int, own: OfferedData | None) -> tuple[int, Request] | None:
            if not lock.acquire(blocking=False):
                return None
            try:
                local_sender = -1 if tag in arrived else receive_at(id(out), spins)
            finally:
                lock.release()
            return None if local_sender < 0 else (ranks[local_sender], COMPLETE)

        def receive_offer(out: np.ndarray, spins: int, own: OfferedData | None) -> tuple[int, Request] | None:
            if not lock.acquire(blocking=False):
                return None
            answer, data = np.empty(2, np.int64), out.reshape(-1).view(np.uint8)
            mine = own.words if own is not None and self._has_cores else _NO_OFFER
            try:
                if tag in arrived:
                    return None
                local_sender = receive(queue, local, tag, header, offers, answer, data, process, spins, mine)
            finally:
                lock.release()
            if local_sender < 0:
                return None
            sender = ranks[local_sender]
            if answer[0] == _READ:
                return sender, COMPLETE
            assert instead is not None
            by_mpi = partial(instead, data, sender)
            return sender, by_mpi() if answer[0] == _SEND_IT else _TakenData(self, answer[1], data, by_mpi)

        return receive_data if instead is None else receive_offer

    def take(self, tag: int, source: int | None) -> tuple[int, np.ndarray] | None:
        """Return the next message with a tag, from rank ``source`` of the world or any of the node; never block.

        Returns:
            The sender, a rank of the world, and the message, shape ``(nbytes,)``, dtype uint8; None without one.
        """
        self.memory.check()  # empties the queue, too, see `NodeMemory.meanwhile`
        with self._taking:
            messages = self._arrived.get(tag, ())
            local = None if source is None else self.local_of[source]
            for place, (sender, message) in enumerate(messages):
                if local in (None, sender):
                    del messages[place]  # type: ignore[union-attr]
                    if not messages:
                        del self._arrived[tag]
                    return self._ranks[sender], message
        return None

    def spin(self) -> bool:
        """Poll without the GIL for a message, as long as a blocking receive does; return whether one is here."""
        return bool(self._kernels.await_message(self._mine, int(self.memory.patience[0])))

    def empty(self) -> None:
        """Move the messages of this rank's queue to those that have arrived, unless another thread does."""
        mine = self._mine
        if mine[_TAIL] == mine[_HEAD] or not self._taking.acquire(blocking=False):
            return
        try:
            scratch, facts, module = np.empty(MOST_NBYTES, np.uint8), np.empty(2, np.int64), self._kernels
            while (nbytes := module.pop(mine, scratch, facts)) != module.NOT_YET:
                sender, tag = facts.tolist()
                self._arrived.setdefault(tag, deque()).append((sender, scratch[:nbytes].copy()))
        finally:
            self._taking.release()

    def fetch(self, number: int, data: np.ndarray, instead: Callable[[], Request]) -> Request:
        """Copy offered data from their sender; return the request.

        Args:
            number: the number of the offer, at the end of the message.
            data: shape ``(nbytes,)``, dtype uint8; gets the data.
            instead: starts to receive a message of MPI with the data, and returns its request.
        """
        taken = _TakenData(self, number, data, instead)
        return COMPLETE if taken.test() else taken

    def copy(self, number: int, data: np.ndarray) -> int:
        """Return the answer to an offer of another rank, see `shm_messages.take`."""
        words = self._offers[number]
        return self._kernels.take(words, data, self._process, KERNEL_SPINS, _NO_OFFER)  # type: ignore[no-any-return]

    def give(self, words: np.ndarray, spins: int = 1) -> int:
        """Return the answer to an offer of this rank, after so many polls; write a part if each rank has a core."""
        answer = int(words[_ANSWER])
        if not self._has_cores or answer in (_READ, _SEND_IT):
            return answer
        return self._kernels.give(words, spins)  # type: ignore[no-any-return]


class _Unsent:
    """A message that waits because the queue is full; a request that ends when it is in the receiver's queue."""

    def __init__(self, mailbox: Mailbox, dest: int, *parts: Any) -> None:
        self._mailbox, self._dest, self.parts = mailbox, dest, parts
        self.is_sent = False

    def test(self) -> bool:
        """Return whether it is in the queue by now."""
        if not self.is_sent:
            self._mailbox.send_rest(self._dest)
        return self.is_sent

    def wait(self) -> None:
        """Block until it is in the queue."""
        PolledRequest(self.test, YIELDS).wait()


class OfferedData:
    """Long data that their receiver copies from this process; a request."""

    def __init__(
        self, mailbox: Mailbox, slot: int, words: np.ndarray, instead: Callable[[np.ndarray], Request]
    ) -> None:
        self.words = words
        """Shape ``(OFFER_WORDS,)``, see `shm_messages`."""
        self._mailbox, self._slot, self._instead = mailbox, slot, instead
        self._sent: Request | None = None

    def test(self) -> bool:
        """Return whether the receiver has the data; if it has begun to read them, write a part to its array."""
        if self._sent is None:
            mailbox = self._mailbox
            if self.words[_ANSWER] == 0 or not mailbox.giving.acquire(blocking=False):
                return False
            try:  # the progress lane may test it, too, and a slot that is free may be used again
                if self._sent is None:
                    answer = mailbox.give(self.words)
                    if answer not in (_READ, _SEND_IT):
                        return False
                    data = mailbox.answered(self._slot, answer == _READ)
                    self._sent = COMPLETE if answer == _READ else self._instead(data)
            finally:
                mailbox.giving.release()
        return self._sent.test()

    def spin(self) -> bool:
        """Poll without the GIL for the receiver, as long as `Mailbox.spin` does, and write a part; return True."""
        mailbox = self._mailbox
        if self._sent is None and mailbox.giving.acquire(blocking=False):
            try:
                if self._sent is None:
                    mailbox.give(self.words, int(mailbox.memory.patience[0]))
            finally:
                mailbox.giving.release()
        return True

    def wait(self) -> None:
        """Block until the receiver has the data; poll at first, as it may read them now."""
        PolledRequest(self.test, YIELDS, SPINS).wait()


class _TakenData:
    """Offered data that this rank copies from their sender, which may write a part of them; a request."""

    def __init__(self, mailbox: Mailbox, number: int, data: np.ndarray, instead: Callable[[], Request]) -> None:
        self._mailbox, self._number, self._data, self._instead = mailbox, number, data, instead
        self._received: Request | None = None

    def test(self) -> bool:
        """Return whether the data are here; the first call copies all but what the sender writes."""
        if self._received is None:
            answer = self._mailbox.copy(self._number, self._data)
            if answer not in (_READ, _SEND_IT):
                return False
            self._received = COMPLETE if answer == _READ else self._instead()
        return self._received.test()

    def wait(self) -> None:
        """Block until the data are here."""
        PolledRequest(self.test, YIELDS, SPINS).wait()
