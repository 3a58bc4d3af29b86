"""Comparison of collective calls: every rank must make the same one, or all of them raise the same error.

A call is compared before any rank enters the MPI library with it, in each call anew, so no rank relies on what it has
seen before. Where all ranks share memory, each posts a signature of its call beside its counter there (`InMemory`).
Between nodes the signature travels at the head of a message that pairs of ranks exchange at growing distances
(`ByMessages`); a short allreduce takes its data along. Where signatures differ, all ranks know it after the same
exchange, and tell each other what they have called.

Sent per rank by messages, for a call: log2 p messages of 16 bytes, p the largest power of two up to n; a rank that has
a partner beyond p 1 more, and its partner 1 in all.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import kernels
from ..errors import MismatchError
from .agreement import first_difference
from .communicator import OPERATION_BITS, Communicator, exchange_of, make_tag, split
from .reductions import Reduction
from .shared import NodeMemory
from .steps import Steps, Until

if TYPE_CHECKING:
    from .world import World

MOST_NBYTES = 64 << 10
"""Of the data that a message takes along with the signature of a call."""

_HEADER_NBYTES = 16
_DIFFERENT = -1
"""In the place of a signature: some ranks have made other calls."""
_FOLD, _RESULT = 0, 1
"""The lanes of messages of ranks beyond a power of two, to their partner and back."""
_TEXT_NBYTES = 1 << 10
_MOST_SIDES = 64
_BY_MESSAGES_FIRST = 16
"""So many calls of a node's ranks are compared by messages: a program that makes few needs no compiled kernels."""
_ALIKE = "call it alike, and in the same order, on all ranks"


class Call:
    """A collective call, as all ranks must make it.

    Args:
        operation: its name.
        facts: one line each, all of which must be the same on all ranks.
    """

    __slots__ = ("facts", "operation", "signature")

    def __init__(self, operation: str, *facts: str) -> None:
        self.operation = operation
        self.facts = facts or (operation,)
        self.signature = zlib.crc32("\n".join(self.facts).encode())

    def differs_from(self, everyone: Sequence[str]) -> MismatchError:
        """Return the error for ranks that have called what ``everyone`` says, a text of each rank."""
        items = [text.split("\n") for text in everyone]
        odd = [rank for rank, own in enumerate(items) if own != items[0]]
        if not odd:  # cut short, or signatures that are damaged
            error = MismatchError(self.operation, expected="the same call on every rank", got="others", remedy=_ALIKE)
            error.is_on_every_rank = True
            return error
        operation = items[0][0].partition(" ")[0]
        alike = [rank for rank in odd if items[rank] == items[odd[0]]]
        return first_difference(operation, items[0], items[odd[0]], alike, _ALIKE)

    def __str__(self) -> str:
        return "\n".join(self.facts)


class InMemory:
    """Comparison through memory that all ranks share. All ranks must make it together.

    Exchanges of data between the ranks may use its counters, too: see `hpcdp.collectives.shared`. They are served one
    after another, in the order in which they were begun.
    """

    def __init__(self, memory: NodeMemory) -> None:
        sync, self.exchange = kernels.load("sync"), kernels.load("exchange")
        self.memory = memory
        self.counters = memory.alloc((memory.size * sync.STRIDE,), np.int32)
        self.state = self.exchange.state_of(memory.rank, memory.patience)
        self.arrival = _Arrival(memory, self.counters, self.state)
        self._texts = memory.alloc((memory.size, _TEXT_NBYTES), np.uint8)
        self._meet, self._done = self.exchange.meet, self.exchange.DONE
        self._different = self.exchange.DIFFERENT
        self._patient = True
        self._tickets = self._served = 0

    def agree(self, call: Call) -> None:
        """Block until every rank has made ``call``; nothing that was begun by `steps` may be under way."""
        self.be_patient()
        signature, n = call.signature, self.memory.size
        while (met := self._meet(self.counters, n, self.state, signature)) != self._done:
            if met == self._different:
                for stage in self.difference(call):
                    for request in stage:
                        request.wait()
            self.memory.check()

    def steps(self, call: Call) -> Steps:
        """`agree` as a machine. Whatever the machine does next is done in the order of the calls."""
        ticket = self.begin()
        return self._steps(call, ticket)

    def _steps(self, call: Call, ticket: int) -> Steps:
        yield from self.turn(ticket, patient=False)
        try:
            while (met := self._meet(self.counters, self.memory.size, self.state, call.signature)) != self._done:
                if met == self._different:
                    yield from self.difference(call)
                yield [self.arrival]
        finally:
            self.end()

    def begin(self) -> int:
        """Return the number of an exchange, whose turn comes after that of those that were begun before."""
        self._tickets += 1
        return self._tickets - 1

    def turn(self, ticket: int, patient: bool) -> Steps:
        """Wait for the turn of an exchange; a ``patient`` one waits in the kernels. Call `end` after it."""
        if self._served != ticket:
            yield [Until(lambda: self._served == ticket)]
        self.be_patient(patient)

    def end(self) -> None:
        """Let the next exchange have its turn."""
        self._served += 1

    def be_patient(self, patient: bool = True) -> None:
        """Choose whether kernels wait for the other ranks, or return at once where some are not there."""
        if patient != self._patient:
            self._patient = patient
            self.state[[self.exchange.SPINS, self.exchange.SLEEP_NS]] = self.memory.patience if patient else 0

    def difference(self, call: Call) -> Steps:
        """Raise the error for ranks that have made different calls; all ranks come here.

        Raises:
            MismatchError: always; the same on every rank.
        """
        text, mine = str(call).encode()[:_TEXT_NBYTES], self._texts[self.memory.rank]
        mine[:] = 0
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        # The texts stay until all have arrived at another exchange, so every rank has read them.
        while self._meet(self.counters, self.memory.size, self.state, 0) != self._done:
            yield [self.arrival]
        raise call.differs_from([row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in self._texts])


class _Arrival:
    """The arrival of every rank at the exchange in which this one is: a request."""

    def __init__(self, memory: NodeMemory, counters: np.ndarray, state: np.ndarray) -> None:
        self._memory, self._counters, self._state = memory, counters, state
        self._wait_all = kernels.load("sync").wait_all
        self._sequence = kernels.load("exchange").SEQUENCE

    def _arrived(self, spins: int, sleep_ns: int) -> bool:
        number = np.int64(self._state[self._sequence]).astype(np.int32)
        return bool(self._wait_all(self._counters, self._memory.size, number, spins, sleep_ns))

    def test(self) -> bool:
        self._memory.check()
        return self._arrived(0, 0)

    def wait(self) -> None:
        while not self._arrived(*self._memory.patience):
            self._memory.check()


class _Side:
    """A message: the signature of a call, and behind it the data that it takes along."""

    __slots__ = ("body", "header", "sent", "whole")

    def __init__(self, whole: np.ndarray, data: np.ndarray | None) -> None:
        nbytes = _HEADER_NBYTES + (0 if data is None else data.nbytes)
        self.whole, self.sent = whole, whole[:nbytes]
        self.header = whole[:8].data.cast("q")
        self.body: Any = None if data is None else whole[_HEADER_NBYTES:nbytes].view(data.dtype)


class _Blocks:
    """Memory of a message to a partner and of one from it, as calls take it whose data are alike."""

    def __init__(self) -> None:
        # A partner that calls something else may send as much as there can be.
        self._blocks = np.empty((2, _HEADER_NBYTES + MOST_NBYTES), np.uint8)
        self._sides: dict[object, tuple[_Side, _Side]] = {}

    def sides_of(self, data: np.ndarray | None) -> tuple[_Side, _Side]:
        """Return this rank's message and the partner's, for ``data`` of this size and dtype."""
        kind = None if data is None else (data.size, data.dtype)
        sides = self._sides.get(kind)
        if sides is None:
            if len(self._sides) >= _MOST_SIDES:
                self._sides.clear()
            sides = self._sides[kind] = _Side(self._blocks[0], data), _Side(self._blocks[1], data)
        return sides


class ByMessages:
    """Comparison by messages between pairs of ranks, at distances 1, 2, 4 and so on.

    Ranks beyond the largest power of two send to a partner first, and get the result from it at last.

    Args:
        comm: all ranks; nothing else may use it.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._rounds = _rounds(comm.rank, comm.size)
        all_pairs = all(sends and receives for _, _, sends, receives in self._rounds)
        self._pairs = [(lane, peer) for lane, peer, _, _ in self._rounds] if all_pairs else []
        self._number = 0
        self._tickets = self._served = 0
        self._blocks = _Blocks()

    def agree(self, call: Call, total: np.ndarray | None = None, op: Reduction | None = None) -> None:
        """Block until every rank has made ``call``, and reduce ``total`` meanwhile.

        Args:
            call: this rank's.
            total: shape ``(count,)``; reduced in place over all ranks, without the division of a mean.
            op: the reduction.

        Raises:
            MismatchError: on every rank alike; ``total`` is undefined then.
        """
        tag = self._next_tag()
        if not self._pairs or (total is not None and total.nbytes > MOST_NBYTES):
            for stage in self._exchange(call, tag, self._blocks, total, op):
                for request in stage:
                    request.wait()
            return
        mine, theirs = self._blocks.sides_of(total)
        signature, swap = call.signature, self._comm.swap
        mine.header[0] = signature
        for lane, peer in self._pairs:
            if total is not None:
                mine.body[...] = total
            swap(mine.sent, theirs.whole, peer, tag + lane)
            if theirs.header[0] != signature:
                mine.header[0] = _DIFFERENT
            elif total is not None:
                self._reduce(total, theirs.body, peer, op)
        if mine.header[0] != signature:
            self._raise_difference(call)

    def steps(self, call: Call, total: np.ndarray | None = None, op: Reduction | None = None) -> Steps:
        """`agree` as a machine. Whatever the machine does next is done in the order of the calls."""
        exchange = self._exchange(call, self._next_tag(), _Blocks(), total, op)
        self._tickets += 1
        return self._in_order(exchange, self._tickets - 1)

    def _in_order(self, exchange: Steps, ticket: int) -> Steps:
        try:
            yield from exchange
        finally:  # the others of a failed one fail as well
            if self._served != ticket:
                yield [Until(lambda: self._served == ticket)]
            self._served += 1

    def _next_tag(self) -> int:
        self._number = (self._number + 1) % (1 << OPERATION_BITS)
        return make_tag(0, self._number)

    def _exchange(self, call: Call, tag: int, blocks: _Blocks, total: np.ndarray | None, op: Reduction | None) -> Steps:
        """Send and receive as `_rounds` says; long data in pieces, one after another."""
        if total is None:
            yield from self._compared(call, tag, blocks.sides_of(None))
            return
        for piece in split(total, max(1, -(-total.nbytes // MOST_NBYTES))):
            yield from self._compared(call, tag, blocks.sides_of(piece), piece, op)

    def _compared(
        self,
        call: Call,
        tag: int,
        sides: tuple[_Side, _Side],
        total: np.ndarray | None = None,
        op: Reduction | None = None,
    ) -> Steps:
        mine, theirs = sides
        signature, comm = call.signature, self._comm
        mine.header[0] = signature
        for lane, peer, sends, receives in self._rounds:
            if total is not None and sends:
                mine.body[...] = total
            requests = [comm.irecv_up_to(theirs.whole, peer, tag + lane)] if receives else []
            yield [*requests, *([comm.isend_whole(mine.sent, peer, tag + lane)] if sends else [])]
            if not receives:
                continue
            if theirs.header[0] != signature:
                mine.header[0] = _DIFFERENT
            elif total is not None and lane == _RESULT:
                total[...] = theirs.body
            elif total is not None:
                self._reduce(total, theirs.body, peer, op)
        if mine.header[0] != signature:
            self._raise_difference(call)

    def _reduce(self, total: np.ndarray, other: np.ndarray, peer: int, op: Any) -> None:
        """Reduce ``other`` of rank ``peer`` into ``total``: the lower rank's stands first: the same bits on both."""
        # Nothing is written to what was sent: the other core has just read it, and each of its lines would be fetched.
        if peer > self._comm.rank:
            op.into(total, other)
        else:
            op.into(other, total)
            total[...] = other

    def _raise_difference(self, call: Call) -> None:
        """Raise the error for ranks that have made different calls; all ranks come here, and block."""
        signatures = self._comm.allgather_json(call.signature)
        odd = next((rank for rank, other in enumerate(signatures) if other != signatures[0]), 0)
        texts = self._comm.allgather_json(str(call) if self._comm.rank in (0, odd) else None)
        known = {signatures[0]: texts[0], signatures[odd]: texts[odd]}
        raise call.differs_from([known.get(each, "") for each in signatures])


def _rounds(rank: int, n: int) -> list[tuple[int, int, bool, bool]]:
    """Return the messages of ``rank`` one after another: lane, partner, whether it sends and whether it receives."""
    p = 1 << n.bit_length() - 1
    if rank >= p:
        return [(_FOLD, rank - p, True, False), (_RESULT, rank - p, False, True)]
    rounds = [(_RESULT + 1 + bit, rank ^ 1 << bit, True, True) for bit in range(p.bit_length() - 1)]
    if rank + p < n:
        return [(_FOLD, rank + p, False, True), *rounds, (_RESULT, rank + p, True, False)]
    return rounds


class Calls:
    """The collective calls of a world's ranks, which must all be alike. See `of`."""

    def __init__(self, world: World) -> None:
        self.messages = ByMessages(world.call_comm)
        self.memory: InMemory | None = None
        """None where ranks do not share memory, or have not made many calls yet."""
        self.number = 0
        """The number of the latest call: the same on all ranks, also after calls that differed. Whoever compares a call
        otherwise than by `agree` and `steps` counts it."""
        self._alone = world.size == 1
        self._node = world.node_memory if world.node_memory.size == world.size else None
        self._by_messages = 0

    @classmethod
    def of(cls, world: World) -> Calls:
        """Return those of ``world``."""
        return world.kept.get(cls) or world.keep(cls, lambda: cls(world))

    def agree(self, call: Call) -> None:
        """Block until every rank of the world has made ``call``, which no rank has done before it ends.

        What was started before must have ended (`World.settle`).

        Raises:
            MismatchError: some rank has made another one; the same error on every rank.
        """
        self.number += 1
        if self.memory is not None:
            self.memory.agree(call)
        elif not self._alone:
            self.messages.agree(call)
            self._by_messages += 1
            if self._node is not None and self._by_messages >= _BY_MESSAGES_FIRST:
                self.share_memory(self._node)

    def share_memory(self, memory: NodeMemory) -> InMemory:
        """Return what compares calls in ``memory`` of all ranks from now on; all ranks call it together."""
        if self.memory is None:
            self.memory = InMemory(memory)
        return self.memory

    def steps(self, call: Call) -> Steps:
        """`agree` as a machine. Whatever the machine does next is done in the order of the calls."""
        self.number += 1
        return (self.messages if self.memory is None else self.memory).steps(call)


_NAMELESS = "as in a step of fit or a report"
_exchanges: dict[str, Call] = {}


def compare_exchanges(world: World) -> None:
    """Compare what all ranks of ``world`` tell each other by ``allgather_json`` with collective calls of others."""
    exchange, ours = exchange_of(world.comm), weakref.ref(world)

    def compared(value: Any) -> list[Any]:
        if (alive := ours()) is not None:
            alive.settle()
            name = str(value.get("call", _NAMELESS)) if type(value) is dict else _NAMELESS
            call = _exchanges.get(name)
            if call is None:
                call = _exchanges[name] = Call("exchange", f"exchange of all ranks ({name})")
            Calls.of(alive).agree(call)
        return exchange(value)

    world.comm.allgather_json = compared  # type: ignore[method-assign]
