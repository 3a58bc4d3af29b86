"""Messages between ranks that share a node's memory, see `kernels.shm_messages`.

Every rank has a queue that the others fill. It empties its queue when it receives, while another one is full, every 50
ms of other waits for the node's ranks, and when its watchdog looks. Long data are read from the memory of the sender's
process, or follow as a message of MPI where the kernel refuses that.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .. import kernels
from .communicator import COMPLETE, PolledRequest, Request
from .shared_memory import NodeMemory
from .world import weakly

_QUEUE_WORDS = 64 + (256 << 10) // 4
"""``int32`` words of a queue: those before its ring (`shm_messages.RING`), and a ring of 256 KB."""
_TAIL, _HEAD = 0, 32
"""The words `shm_messages.TAIL` and `HEAD` of a queue, which is empty while they are equal."""
_SLOTS = 256
"""Long arrays that a rank may offer at a time, with a word for the answer each."""
OFFER_WORDS = 3
"""Numbers at the end of a message whose data stay with their sender: its process, their address, the answer's place."""
MOST_NBYTES = 66 << 10
"""The longest message, header and data together; several fit into a queue."""
_READ, _SEND_IT = 1, 2
"""Answers to an offer: the receiver has read the data, or waits for a message of MPI with them."""
SPINS, YIELDS = 300, 2000
"""Tests before a wait yields its core, if each rank has one, and before it naps: some 0.1 ms and a millisecond."""


def words_for(n: int) -> int:
    """Return the number of ``int32`` words that the mailboxes of ``n`` ranks share."""
    return n * (_QUEUE_WORDS + _SLOTS)


class Mailbox:
    """The messages of a rank with the others of its node; all of these ranks make theirs together.

    Args:
        memory: the node's memory.
        shared: shape ``(words_for(memory.size),)``, int32, zeros; shared by the node's ranks.
        ranks: their ranks in the world, in order.
        has_all: whether these are all ranks of the world.
    """

    def __init__(self, memory: NodeMemory, shared: np.ndarray, ranks: Sequence[int], has_all: bool) -> None:
        self.local_of = {rank: local for local, rank in enumerate(ranks)}
        """The number in the node of each rank of the world that has one there."""
        self.has_all = has_all
        """True if all ranks of the world are in the node."""
        n = memory.size
        self._memory, self._rank, self._ranks = memory, memory.rank, list(ranks)
        self._queues, self._answers = shared[: n * _QUEUE_WORDS].reshape(n, -1), shared[n * _QUEUE_WORDS :]
        self._mine = self._queues[self._rank]
        self._sending, self._taking = threading.Lock(), threading.Lock()
        self._unsent: list[deque[_Unsent]] = [deque() for _ in range(n)]
        """Messages that wait because the queue of their receiver is full, by receiver."""
        self._can_offer = True
        """False once a receiver could not read this rank's memory."""
        self._free_slots = deque(range(_SLOTS))
        self._offers: dict[int, OfferedData] = {}
        """Offers that their receivers have not answered, by slot: they may still read the data."""
        self._arrived: dict[int, deque[tuple[int, np.ndarray]]] = {}
        """By tag, messages that no receive has taken yet: the sender, as its number in the node, and the message."""
        memory.meanwhile = weakly(self.empty)

    @cached_property
    def _kernels(self) -> Any:
        return kernels.load("shm_messages")

    def sender(self, dest: int, tag: int) -> Callable[[np.ndarray, np.ndarray], Request | None]:
        """Return a function ``send(header, data)`` that sends messages to a rank of the node.

        ``header``, shape ``(k,)``, int64, and ``data``, shape ``(nbytes,)``, dtype uint8, are the message, of at most
        `MOST_NBYTES` bytes. It is copied; the function returns None, or a request if the queue is full.

        Args:
            dest: the receiver, a rank of the world.
            tag: the tag, from 0 to 2^31 - 1.
        """
        local, push, done = self.local_of[dest], self._kernels.push, self._kernels.DONE
        queue, unsent, me, lock = self._queues[local], self._unsent[local], self._rank, self._sending

        def send(header: np.ndarray, data: np.ndarray) -> Request | None:
            with lock:
                if not unsent and push(queue, me, tag, header, data) == done:
                    return None
                message = _Unsent(self, local, tag, header, data.copy())
                unsent.append(message)
            return message

        return send

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

    def offer(self, data: np.ndarray, instead: Callable[[], Request]) -> OfferedData | None:
        """Offer long data, which a receiver reads in this process; return None if that is not possible.

        Args:
            data: shape ``(nbytes,)``, dtype uint8; may not change before the offer ends.
            instead: starts a message of MPI with the data, if the receiver cannot read them; returns its request.
        """
        if not self._can_offer:
            return None
        try:
            slot = self._free_slots.popleft()
        except IndexError:
            return None
        place = self._rank * _SLOTS + slot
        offer = self._offers[slot] = OfferedData(self, slot, self._answers[place : place + 1], data, instead)
        offer.words[:] = os.getpid(), data.ctypes.data, place
        return offer

    def answered(self, slot: int, is_read: bool) -> None:
        """Note the answer to an offer."""
        del self._offers[slot]
        self._free_slots.append(slot)
        self._can_offer &= is_read

    def receiver(
        self, source: int | None, tag: int, header: np.ndarray, is_offered: bool
    ) -> Callable[[np.ndarray, int], int | None]:
        """Return a function ``receive(data, spins)`` for messages with one header.

        It polls ``spins`` times, each 15 to 50 ns, and returns the sender, a rank of the world, or None if no message
        has arrived, or another one first, for `take`. ``data``, shape ``(nbytes,)``, dtype uint8, get the rest of the
        message.

        Args:
            source: the sender, a rank of the world in the node, or None for any.
            tag: as for `sender`.
            header: shape ``(k,)``, int64; -1 stands for any number.
            is_offered: whether the data are an `offer`.
        """
        local, receive = -1 if source is None else self.local_of[source], self._kernels.receive
        queue, answers, lock, ranks, arrived = self._mine, self._answers, self._taking, self._ranks, self._arrived
        offer_words = OFFER_WORDS if is_offered else 0

        def receive_now(data: np.ndarray, spins: int) -> int | None:
            if not lock.acquire(blocking=False):
                return None
            try:
                if tag in arrived:
                    return None
                sender = receive(queue, answers, local, tag, header, offer_words, data, spins)
            finally:
                lock.release()
            return ranks[sender] if sender >= 0 else None

        return receive_now

    def take(self, tag: int, source: int | None) -> tuple[int, np.ndarray] | None:
        """Return the next message with a tag, from rank ``source`` of the world or any of the node; never block.

        Returns:
            The sender, a rank of the world, and the message, shape ``(nbytes,)``, dtype uint8; None without one.
        """
        self._memory.check()  # empties the queue, too, see `NodeMemory.meanwhile`
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
        return bool(self._kernels.await_message(self._mine, int(self._memory.patience[0])))

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

    def fetch(self, offered: np.ndarray, data: np.ndarray, instead: Callable[[], Request]) -> Request:
        """Read offered data from the memory of their sender.

        Args:
            offered: shape ``(OFFER_WORDS,)``, int64; the end of the message.
            data: shape ``(nbytes,)``, dtype uint8; gets the data.
            instead: starts to receive a message of MPI with the data, and returns its request.
        """
        module, (pid, address, place) = self._kernels, offered.tolist()
        is_read = module.read_memory(pid, address, data)
        module.answer(self._answers, place, _READ if is_read else _SEND_IT)
        return COMPLETE if is_read else instead()


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
    """Long data that their receiver reads in this process; a request."""

    def __init__(
        self, mailbox: Mailbox, slot: int, answer: np.ndarray, data: np.ndarray, instead: Callable[[], Request]
    ) -> None:
        self.words = np.empty(OFFER_WORDS, np.int64)
        """The end of the message to the receiver."""
        self._mailbox, self._slot, self._answer, self._data, self._instead = mailbox, slot, answer, data, instead
        self._sent: Request | None = None
        self._answering = threading.Lock()
        answer[0] = 0

    def test(self) -> bool:
        """Return whether the receiver has the data."""
        if self._sent is None:
            answer = int(self._answer[0])
            if answer == 0:
                return False
            with self._answering:  # the progress lane may test it, too
                if self._sent is None:
                    is_read = answer == _READ
                    self._mailbox.answered(self._slot, is_read)
                    self._sent = COMPLETE if is_read else self._instead()
        return self._sent.test()

    def wait(self) -> None:
        """Block until the receiver has the data; poll at first, as it may read them now."""
        PolledRequest(self.test, YIELDS, SPINS).wait()
