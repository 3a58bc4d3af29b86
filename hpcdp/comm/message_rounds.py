"""Exchanges of all ranks in rounds, in each of which pairs of ranks swap messages at a distance of 1, 2, 4 and so on.

Each message begins with the signature of the sender's call, so the same messages compare the calls of all ranks: if
signatures differ, all ranks know it after the last round, and tell each other their calls. The messages of short calls
carry data as well: a sum over all ranks (`Sum`), or blocks on their way to other ranks (`Routed`)::

    rank             0          1          2          3        knows after the round
    distance 1       0 <------> 1          2 <------> 3        the calls and the sum of two ranks
    distance 2       0 <-----------------> 2                   those of all
                                1 <-----------------> 3

Let p be the largest power of two up to n. Ranks beyond p send to a partner first, and get the result from it last. A
block travels to each of its receivers by the rounds in which their numbers differ from its sender's.

Messages per rank and call: log2 p of 16 bytes and the data. A rank with a partner beyond p sends 1 more, and its
partner 1 in total. A message above `WHOLE_NBYTES` is sent as two: TCP's and other transports of the MPI libraries send
up to 64 KB at once, and longer messages after an answer of the receiver.

A call that is repeated may send its data in another form than a first one, which `repeated.RepeatedRounds` does where
the ranks know each other's counts from it. If a rank makes a first call meanwhile, all ranks know that, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from .communicator import OPERATION_BITS, Communicator, PolledRequest, Reduction, Steps, Swapping, make_tag, split

if TYPE_CHECKING:
    from .consistency import Call

MOST_NBYTES = 64 << 10
"""The most data that a message carries."""
WHOLE_NBYTES = 60 << 10
"""The longest message that is sent as one."""

HEADER_NBYTES = 16
"""Two int64: the signature of the call with flags, and the form of the data."""
_FOLLOWS, _DIFFERS = 1 << 32, 1 << 33
"""Flags beside a signature of 32 bits: the rest follows in a second message; some ranks have made other calls."""
COMPARED = (1 << 34) - 1 - _FOLLOWS
"""The bits that are equal in messages of equal calls."""
USUAL, _MIXED = 0, -1
"""Forms of the data: that of a first call, and of ranks that know of several forms. Others are hashes."""
_FOLD, _RESULT = 0, 1
"""The lanes of messages from ranks beyond a power of two to their partner, and back."""


class Round(NamedTuple):
    """A round of one rank."""

    lane: int
    peer: int
    sends: bool
    receives: bool


def rounds_of(rank: int, n: int) -> list[Round]:
    """Return the rounds of ``rank`` in their order."""
    p = power_of_two(n)
    if rank >= p:
        return [Round(_FOLD, rank - p, True, False), Round(_RESULT, rank - p, False, True)]
    rounds = [Round(_RESULT + 1 + bit, rank ^ 1 << bit, True, True) for bit in range(p.bit_length() - 1)]
    if rank + p < n:
        return [Round(_FOLD, rank + p, False, True), *rounds, Round(_RESULT, rank + p, True, False)]
    return rounds


class Differs(Exception):
    """Ranks have made different calls."""


class OtherForm(Exception):
    """Ranks have made the same call, but sent its data in different forms: the exchange is to be made again."""


class Carried(Protocol):
    """The data of an exchange."""

    def write(self, number: int, body: np.ndarray) -> int:
        """Write the data to send in a round to ``body``, shape ``(MOST_NBYTES,)``, uint8; return how many bytes."""
        ...

    def read(self, number: int, body: np.ndarray) -> None:
        """Take the data received in a round."""
        ...


class Nothing:
    """No data."""

    def write(self, number: int, body: np.ndarray) -> int:
        """See `Carried.write`."""
        return 0

    def read(self, number: int, body: np.ndarray) -> None:
        """See `Carried.read`."""


NOTHING = Nothing()


class SummedPart(NamedTuple):
    """A part of an array that ranks reduce."""

    first: int
    last: int
    receiver: int | None
    """The rank that receives its sum; None if all do."""


class Sum:
    """An array that all ranks reduce, in place; the lower rank's operand is first, so all get the same bits.

    A mean is not divided. A message has only the parts that it brings nearer to their receivers, and only there are
    the sums of these parts complete.

    Args:
        total: shape ``(count,)``, at most `MOST_NBYTES` bytes.
        op: the reduction.
        rank: this rank.
        n: the number of ranks.
        parts: the parts of ``total``; default all of it, for all ranks.
    """

    def __init__(
        self, total: np.ndarray, op: Reduction, rank: int, n: int, parts: Sequence[SummedPart] | None = None
    ) -> None:
        self._op, self._rank = op, rank
        self._rounds = rounds_of(rank, n)
        self._total, self._parts = total, parts or [SummedPart(0, total.size, None)]
        self._p = power_of_two(n)

    def _on_the_way(self, number: int, sends: bool) -> Iterator[tuple[np.ndarray, int]]:
        """Return the parts that the message of a round has, and where each begins in it, in bytes."""
        at = 0
        for part in parts_on_the_way(self._parts, self._rounds[number], self._rank, self._p, sends):
            values = self._total[part.first : part.last]
            yield values, at
            at += values.nbytes

    def write(self, number: int, body: np.ndarray) -> int:
        """See `Carried.write`."""
        nbytes = 0
        for values, at in self._on_the_way(number, sends=True):
            nbytes = at + values.nbytes
            body[at:nbytes].view(values.dtype)[...] = values
        return nbytes

    def read(self, number: int, body: np.ndarray) -> None:
        """See `Carried.read`."""
        lane, peer, *_ = self._rounds[number]
        for values, at in self._on_the_way(number, sends=False):
            other = body[at : at + values.nbytes].view(values.dtype)
            if lane == _RESULT:
                values[...] = other
            # Do not write to the sent buffer: the other core has just read it, and would fetch each line again.
            elif peer > self._rank:
                self._op.into(values, other)
            else:
                self._op.into(other, values)
                values[...] = other


def parts_on_the_way(parts: Sequence[SummedPart], round_: Round, rank: int, p: int, sends: bool) -> list[SummedPart]:
    """Return the parts that the message has which ``rank`` sends, or receives, in a round."""
    if not (round_.sends if sends else round_.receives):
        return []
    to = round_.peer if sends else rank
    return [part for part in parts if part.receiver is None or _leads(round_.lane, to, part.receiver, p)]


def power_of_two(n: int) -> int:
    """Return the largest power of two up to ``n``."""
    return 1 << n.bit_length() - 1


def _leads(lane: int, peer: int, receiver: int, p: int) -> bool:
    """Return whether a message to ``peer`` is on the way to ``receiver``, given what the rounds before have done."""
    if lane in (_FOLD, _RESULT):
        return lane == _FOLD or peer == receiver
    low = (1 << lane - _RESULT) - 1  # earlier rounds have gone through all lower bits
    return receiver % p & low == peer & low


class RoutedBlock(NamedTuple):
    """Data that one rank sends to others."""

    source: int
    nbytes: int
    receivers: int
    """Bit r is set if rank r receives it; never that of the sender."""


class Copy(NamedTuple):
    """A copy of bytes of a received message, or of this rank's data."""

    round: int | None
    """The round of the message; None for this rank's data."""
    at: int
    to: int
    nbytes: int


class Routes(NamedTuple):
    """The way of all blocks through one rank."""

    sent: list[list[Copy]]
    """The pieces of each round's message."""
    received: list[int]
    """The bytes that are received in each round."""
    places: list[Copy | None]
    """The place of each block after the last round, as a copy to 0; None if it has not come here."""
    longest: int
    """The bytes of the longest message of any rank."""


def routes_of(blocks: Sequence[RoutedBlock], firsts: Sequence[int], rank: int, n: int) -> Routes:
    """Return the routes of ``blocks`` through ``rank``.

    Args:
        blocks: all blocks, in the same order on all ranks.
        firsts: for each block of this rank, where it begins in this rank's data; others are ignored.
        rank: this rank.
        n: the number of ranks.
    """
    p = power_of_two(n)
    rounds = [rounds_of(r, n) for r in range(n)]
    held = [[number for number, block in enumerate(blocks) if block.source == r] for r in range(n)]
    places = [
        Copy(None, first, 0, block.nbytes) if block.source == rank else None
        for block, first in zip(blocks, firsts, strict=True)
    ]
    sent: list[list[Copy]] = [[] for _ in rounds[rank]]
    received, longest = [0 for _ in rounds[rank]], 0
    for lane in (_FOLD, *range(_RESULT + 1, _RESULT + p.bit_length()), _RESULT):
        messages: list[tuple[int, int, list[int]]] = []
        for r in range(n):
            for round_ in rounds[r]:
                if round_.lane == lane and round_.sends:
                    wanted = sum(1 << other for other in range(n) if _leads(lane, round_.peer, other, p))
                    numbers = [number for number in held[r] if blocks[number].receivers & wanted]
                    messages.append((r, round_.peer, numbers))
        own = next((i for i, round_ in enumerate(rounds[rank]) if round_.lane == lane), 0)
        for source, _, numbers in messages:
            ends = list(accumulate((blocks[number].nbytes for number in numbers), initial=0))
            longest = max(longest, ends[-1])
            if source == rank:
                sent[own] = [
                    place._replace(to=end)
                    for number, end in zip(numbers, ends, strict=False)
                    if (place := places[number]) is not None and place.nbytes
                ]
        for _, dest, numbers in messages:
            held[dest] = sorted({*held[dest], *numbers})
            if dest == rank:
                ends = list(accumulate((blocks[number].nbytes for number in numbers), initial=0))
                received[own] = ends[-1]
                for number, end in zip(numbers, ends, strict=False):
                    places[number] = places[number] or Copy(own, end, 0, blocks[number].nbytes)
    return Routes(sent, received, places, longest)


class Routed:
    """Blocks on their way.

    Args:
        routes: their routes.
        sent: shape ``(nbytes,)``, uint8: this rank's data.
        out: shape ``(nbytes,)``, uint8: receives blocks in `finish`.
        kept: the copies from `Routes.places` to ``out``.
    """

    def __init__(self, routes: Routes, sent: np.ndarray, out: np.ndarray, kept: Sequence[Copy]) -> None:
        self._routes, self._sent, self._out, self._kept = routes, sent, out, kept
        self._received: dict[int | None, np.ndarray] = {None: sent}

    def write(self, number: int, body: np.ndarray) -> int:
        """See `Carried.write`."""
        nbytes = 0
        for source, at, to, size in self._routes.sent[number]:
            body[to : to + size] = self._received[source][at : at + size]
            nbytes += size
        return nbytes

    def read(self, number: int, body: np.ndarray) -> None:
        """See `Carried.read`."""
        self._received[number] = body[: self._routes.received[number]].copy()

    def finish(self) -> None:
        """Write the received blocks to ``out``."""
        for source, at, to, size in self._kept:
            self._out[to : to + size] = self._received[source][at : at + size]


class ByMessages:
    """Exchanges of all ranks of ``comm``, which nothing else may use."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rounds = rounds_of(comm.rank, comm.size)
        self.number = 0
        """The number of the latest exchange."""
        self._tickets = self._served = 0
        self._buffers: list[np.ndarray] = []

    def sums(self, total: np.ndarray, op: Reduction, parts: Sequence[SummedPart] | None = None) -> list[Sum]:
        """Return what reduces ``total``, shape ``(count,)``, in place; a long array in pieces, each for all ranks."""
        rank, n = self.comm.rank, self.comm.size
        if total.nbytes <= MOST_NBYTES:
            return [Sum(total, op, rank, n, parts)]
        return [Sum(piece, op, rank, n) for piece in split(total, -(-total.nbytes // MOST_NBYTES))]

    def agree(self, call: Call, carried: Sequence[Carried] = (NOTHING,)) -> None:
        """Block until every rank has made ``call``, and exchange what is ``carried``, one after another.

        Raises:
            MismatchError: ranks have made different calls; the same on every rank. The data are undefined then.
            OtherForm: see there; on every rank.
        """
        tag = self.next_tag()
        for data in carried:
            self.run_rounds(call, tag, data)

    def run_rounds(
        self, call: Call, tag: int, carried: Carried = NOTHING, first: int = 0, met: Exception | None = None
    ) -> None:
        """Run the rounds from the ``first`` one on, blocking, after an exception of an earlier one; see `agree`."""
        state = _Agreement(call.signature, met)
        for number, (lane, peer, sends, receives) in enumerate(self.rounds[first:], first):
            buffers = self.buffers(number)
            pieces = state.written(buffers[0], number, carried) if sends else []
            swap = self.comm.swapper(pieces, buffers[1][:WHOLE_NBYTES] if receives else None, peer)
            swapping = swap(tag + lane) or Swapping((), ())
            for request in swapping.incoming:
                request.wait()
            if receives:
                self.receive_rest(buffers[1], peer, tag + lane)
                state.read(buffers[1], number, carried)
            for request in swapping.outgoing:
                request.wait()
        try:
            state.check()
        except Differs:
            self._raise_difference(call)

    def receive_rest(self, message: np.ndarray, peer: int, tag: int) -> None:
        """Receive the second part of a message if there is one."""
        if message[:8].data.cast("q")[0] & _FOLLOWS:
            self.comm.irecv_up_to(message[WHOLE_NBYTES:], peer, tag).wait()

    def is_result(self, lane: int) -> bool:
        """Return whether a round's message replaces what its receiver has."""
        return lane == _RESULT

    def buffers(self, number: int) -> np.ndarray:
        """Return the memory of a round's messages in blocking exchanges, shape ``(2, nbytes)``: sent and received."""
        while len(self._buffers) <= number:
            self._buffers.append(new_buffers())
        return self._buffers[number]

    def steps(self, call: Call, carried: Sequence[Carried] = (NOTHING,)) -> Steps:
        """Return `agree` as resumable steps. Steps that follow it in an algorithm run in the order of the calls."""
        exchange = self._exchange(call, self.next_tag(), carried)
        self._tickets += 1
        return self._in_order(exchange, call, self._tickets - 1)

    def _in_order(self, exchange: Steps, call: Call, ticket: int) -> Steps:
        try:
            yield from exchange
        except Differs:  # ranks compare the calls of one exchange after another: they exchange texts without a tag
            if self._served != ticket:
                yield [PolledRequest(lambda: self._served == ticket)]
            self._raise_difference(call)
        finally:  # if this exchange fails, later ones fail as well
            if self._served != ticket:
                yield [PolledRequest(lambda: self._served == ticket)]
            self._served += 1

    def _exchange(self, call: Call, tag: int, carried: Sequence[Carried]) -> Steps:
        comm, (mine, other) = self.comm, new_buffers()
        for data in carried:
            state = _Agreement(call.signature)
            for number, (lane, peer, sends, receives) in enumerate(self.rounds):
                pieces = state.written(mine, number, data) if sends else []
                incoming = [comm.irecv_up_to(other[:WHOLE_NBYTES], peer, tag + lane)] if receives else []
                outgoing = [comm.isend_whole(piece, peer, tag + lane) for piece in pieces]
                if receives:
                    yield incoming
                    if other[:8].view(np.int64)[0] & _FOLLOWS:
                        yield [comm.irecv_up_to(other[WHOLE_NBYTES:], peer, tag + lane)]
                    state.read(other, number, data)
                yield outgoing
            state.check()

    def next_tag(self) -> int:
        """Return the tag of the next exchange."""
        self.number = (self.number + 1) % (1 << OPERATION_BITS)
        return make_tag(0, self.number)

    def _raise_difference(self, call: Call) -> None:
        """Raise the error for ranks that have made different calls; all ranks call it, blocking."""
        signatures = self.comm.allgather_json(call.signature)
        odd = next((rank for rank, other in enumerate(signatures) if other != signatures[0]), 0)
        texts = self.comm.allgather_json(str(call) if self.comm.rank in (0, odd) else None)
        known = {signatures[0]: texts[0], signatures[odd]: texts[odd]}
        raise call.differs_from([known.get(signature, "") for signature in signatures]) from None


def new_buffers() -> np.ndarray:
    """Return memory for a sent message and a received one, which may be as long as any, shape ``(2, nbytes)``."""
    return np.empty((2, HEADER_NBYTES + MOST_NBYTES), np.uint8)


class _Agreement:
    """A rank's knowledge of the others' calls in an exchange.

    Args:
        signature: that of this rank's call.
        met: what it has learned already.
    """

    def __init__(self, signature: int, met: Exception | None = None) -> None:
        self._word = signature | (_DIFFERS if isinstance(met, Differs) else 0)
        self._form = _MIXED if isinstance(met, OtherForm) else USUAL

    def written(self, message: np.ndarray, number: int, carried: Carried) -> list[np.ndarray]:
        """Return the parts of the message of a round, written to ``message``; without data if they are of no use."""
        is_whole = self._word < _DIFFERS and self._form == USUAL
        end = HEADER_NBYTES + (carried.write(number, message[HEADER_NBYTES:]) if is_whole else 0)
        header = message[:HEADER_NBYTES].data.cast("q")
        header[0], header[1] = first_word(self._word, end - HEADER_NBYTES), self._form
        return parts_of(message[:end])

    def read(self, message: np.ndarray, number: int, carried: Carried) -> None:
        """Take the message of a round."""
        header = message[:HEADER_NBYTES].data.cast("q")
        if header[0] & COMPARED != self._word:
            self._word |= _DIFFERS
        elif header[1] != self._form:
            self._form = _MIXED
        elif self._form == USUAL and self._word < _DIFFERS:
            carried.read(number, message[HEADER_NBYTES:])

    def check(self) -> None:
        """Raise `Differs` or `OtherForm` if ranks do not agree."""
        if self._word >= _DIFFERS:
            raise Differs
        if self._form != USUAL:
            raise OtherForm


def first_word(signature: int, nbytes: int) -> int:
    """Return the first word of a message with ``nbytes`` of data."""
    return signature | (_FOLLOWS if HEADER_NBYTES + nbytes > WHOLE_NBYTES else 0)


def parts_of(message: np.ndarray) -> list[np.ndarray]:
    """Return a message as one or two."""
    if message.size <= WHOLE_NBYTES:
        return [message]
    return [message[:WHOLE_NBYTES], message[WHOLE_NBYTES:]]


def form_of(numbers: np.ndarray) -> int:
    """Return the form of data whose layout follows from these ``numbers``, known to all ranks."""
    return zlib.crc32(numbers.tobytes()) | 1 << 32
