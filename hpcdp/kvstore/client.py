"""The client of servers: transfers of values and of states.

How pushes and pulls reach the parts of a key: in memory that this rank shares, or by asking their servers.

How what an asynchronous store keeps is read and written as a whole, by workers that have met for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..comm import Request
from ..comm.communicator import PolledRequest, Steps
from ..comm.tasks import run_until_complete
from ..compression import Compression, ErrorFeedback
from ..core.arrays import Array
from ..core.state import Part, Sharded
from ..data_parallel.overlap import SendPriority
from ..errors import HpcdpError, MismatchError, to_stderr
from ..optim import Schedule
from .handlers import Delay, Item, Table, take
from .protocol import AWAY, NO_STATE, VALUE, Change, Message, MessageKind, ShmValue
from .server import PendingRequest, Server
from .updaters import Rate, state_dtype


@dataclass
class TransferStatistics:
    """What a worker's pushes have met."""

    pushes: int = 0
    staleness_sum: int = 0
    """Pushes of others that had come between this worker's last pull of the key and its push."""
    staleness_max: int = 0
    waited_s: float = 0.0
    """Held back by slower workers."""


@dataclass
class Own:
    """What a worker remembers of a key."""

    item: Item
    seen: int = 0
    """The version that it has pulled last, and its own pushes since."""
    feedback: list[ErrorFeedback] = field(default_factory=list)
    """Of every part, with compression."""

    def compress(self, made: Compression | None) -> None:
        """From now on encode what is pushed so."""
        counts = [part.last - part.first for part in self.item.parts]
        self.feedback = [] if made is None else [made.for_array(count, self.item.dtype) for count in counts]

    @property
    def codes_nbytes(self) -> int | None:
        """Of a push; None without compression."""
        return sum(each.nbytes(each.residual.size) for each in self.feedback) if self.feedback else None

    def encoded(self, number: int, value: np.ndarray) -> np.ndarray:
        """What is sent of part ``number`` of a flat value."""
        part = self.item.parts[number]
        piece = value[part.first : part.last]
        if not self.feedback:
            return piece
        codes = np.empty(self.feedback[number].nbytes(piece.size), np.uint8)
        self.feedback[number].encode(piece, slice(0, piece.size), codes)
        return codes


class _First:
    """The first error of several parts; it is raised when all of them have had their turn."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within it what is raised is kept."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def throw(self) -> None:
        """Raise it, if there is one."""
        if self._error is not None:
            raise self._error


class _Place:
    """Where what is pulled of one part goes.

    Args:
        rows: those of the key that are wanted, ascending; None: all.
    """

    def __init__(self, item: Item, number: int, rows: np.ndarray | None = None) -> None:
        self._item, self._part = item, item.parts[number]
        first, last = (end // item.width for end in self._part[1:])
        self.rows = None if rows is None else rows[(rows >= first) & (rows < last)] - first
        """Those in the part, counted from its first."""

    def copy(self, flat: np.ndarray, value: np.ndarray) -> None:
        """Copy from the part's value to the key's."""
        place = flat[self._part.first : self._part.last]
        if self.rows is None:
            place[:] = value
        else:
            width = self._item.width
            place.reshape(-1, width)[self.rows] = value.reshape(-1, width)[self.rows]

    def take_answer(self, asked: PendingRequest, flat: np.ndarray | None) -> int:
        """The version that an answer names; what it brings goes to ``flat``, if there is one."""
        answer, item = asked.answer(), self._item
        if flat is not None:
            payload, place = answer.payload, flat[self._part.first : self._part.last]
            count = place.size if self.rows is None else self.rows.size * item.width
            if payload is None or payload.dtype != item.dtype or payload.size != count:
                got = "none" if payload is None else f"{payload.size} {payload.dtype}"
                raise MismatchError("pull", where=f"key {item.key!r}", expected=f"{count} {item.dtype}", got=got)
            if self.rows is None:
                place[:] = payload
            else:
                place.reshape(-1, item.width)[self.rows] = payload.reshape(-1, item.width)
        return answer.number


class Transfer:
    """A worker's way to all parts of all keys of a store.

    Args:
        table: the keys.
        number: the store's, by which servers know it.
        server: this rank's end of the exchange with other nodes; None where there are none.
        worker: this worker's number.
    """

    def __init__(self, table: Table, number: int, server: Server | None, worker: int) -> None:
        self.statistics = TransferStatistics()
        self._table, self._number, self._server, self._worker = table, number, server, worker

    def push(self, own: Own, value: np.ndarray, rate: Rate, out: Array | None, turn: SendPriority | None) -> Steps:
        """Push ``value``, flat; what the key is then goes to ``out``, of the key's shape, if there is one."""
        item, table = own.item, self._table
        if turn is not None:
            yield [turn]
        ticket = -1
        if item.in_order:
            ticket = yield from self._draw(item, pushes=True)
        elif item.cells[0] is not None and table.staleness is not None:
            yield from self._held_back(item.cells[0])
            item.cells[0].tick(self._worker)
        kind = MessageKind.PUSH if out is None else MessageKind.PUSHPULL
        flat = None if out is None else _flat(out)
        asked: list[tuple[_Place, PendingRequest]] = []
        for number, (part, cell) in enumerate(zip(item.parts, item.cells, strict=True)):
            if cell is None:
                message = self._message(kind, item, number, ticket=ticket)
                message.rate = math.nan if isinstance(rate, Schedule) else rate
                message.payload, message.coded = own.encoded(number, value), bool(own.feedback)
                asked.append((_Place(item, number), self._ask(part.server, message, item)))
        version, failure = 0, _First()
        for number, (part, cell) in enumerate(zip(item.parts, item.cells, strict=True)):
            if cell is None:
                continue
            received = own.encoded(number, value)
            if own.feedback:
                received = table.decoded(item, number, received)
            change = table.change(item, number, received, rate)
            if flat is not None:
                change = _and_copy(change, flat[part.first : part.last])
            if ticket >= 0:
                yield [_turn_of(cell, ticket)]
            with failure.kept():  # a part that is passed over would wait for this ticket for ever
                version = cell.change(change, table.group.rank, ticket >= 0)
        for place, each in asked:
            with failure.kept():
                yield [each]
                version = place.take_answer(each, flat)
                self.statistics.waited_s += each.held_s
        failure.throw()
        self._count(own, version, out is not None)
        if out is not None and flat is not None:
            _put_back(flat, out)

    def pull(
        self, own: Own, out: Array, rows: np.ndarray | None, versions: list[int], turn: SendPriority | None
    ) -> Steps:
        """Read the key into ``out``, of its shape, or some ``rows`` and else zero; its version goes to ``versions``."""
        item = own.item
        if turn is not None:
            yield [turn]
        ticket = -1
        if item.in_order:
            ticket = yield from self._draw(item, pushes=False)
        flat = _flat(out)
        if rows is not None:
            flat[:] = 0
        asked: list[tuple[_Place, PendingRequest]] = []
        version, failure = 0, _First()
        places = [_Place(item, number, rows) for number in range(len(item.parts))]
        for number, (place, cell) in enumerate(zip(places, item.cells, strict=True)):
            if cell is None:
                message = self._message(MessageKind.PULL, item, number, ticket=ticket)
                message.number, message.payload = int(rows is not None), place.rows
                asked.append((place, self._ask(item.parts[number].server, message)))
        for place, cell in zip(places, item.cells, strict=True):
            if cell is not None:
                if ticket >= 0:
                    yield [_turn_of(cell, ticket)]
                with failure.kept():  # see `push`
                    version = cell.read(partial(place.copy, flat), ticket >= 0)
        for place, each in asked:
            with failure.kept():
                yield [each]
                version = place.take_answer(each, flat)
        failure.throw()
        own.seen = version
        versions.append(version)
        _put_back(flat, out)

    def _message(self, kind: MessageKind, item: Item, part: int, **fields: Any) -> Message:
        return Message(kind, self._number, item.number, part, **fields)

    def _ask(self, dest: int, message: Message, item: Item | None = None) -> PendingRequest:
        """Ask a server; for a push of ``item`` say for whom it waits there."""
        assert self._server is not None
        say = None if item is None else lambda held: self._say(f"key {item.key!r}", held.payload.tolist())
        return self._server.ask(dest, message, say)

    def _ask_and_wait(self, dest: int, message: Message) -> Message:
        asked = self._ask(dest, message)
        asked.wait()
        return asked.answer()

    def _draw(self, item: Item, pushes: bool) -> Generator[Sequence[Request], None, int]:
        """A ticket from who keeps the order of a key that lies in several parts."""
        cell = item.cells[0]
        if cell is not None:
            if pushes:
                yield from self._held_back(cell)
            return self._table.draw(cell, self._worker, pushes)
        asked = self._ask(item.parts[0].server, self._message(MessageKind.TICKET, item, 0, number=int(pushes)), item)
        yield [asked]
        self.statistics.waited_s += asked.held_s
        return asked.answer().ticket

    def _held_back(self, cell: ShmValue) -> Steps:
        """Wait where this worker leads by too many pushes, and say by whom it is held back."""
        delay = Delay(self._table, cell, self._worker)

        def may_go_on() -> bool:
            may = delay.may_go_on()
            if behind := delay.to_report():
                self._say(cell.name, behind)
            return may

        if not may_go_on():
            yield [PolledRequest(may_go_on)]
        self.statistics.waited_s += delay.held_s

    def _say(self, name: str, behind: list[int]) -> None:
        table, ranks = self._table, ", ".join(f"rank {rank}" for rank in behind)
        to_stderr(
            f"rank {self._worker} of {table.num_workers}: {name}: waits for {ranks}, "
            f"more than {table.staleness} pushes behind (staleness={table.staleness})",
        )

    def _count(self, own: Own, version: int, pulled: bool) -> None:
        counted = self.statistics
        stale = max(0, version - 1 - own.seen)
        counted.pushes += 1
        counted.staleness_sum += stale
        counted.staleness_max = max(counted.staleness_max, stale)
        own.seen = version if pulled else own.seen + 1

    def pass_over(self, item: Item) -> None:
        """Let this worker's clock of a key go on without a push, where there is a bound; waits for nobody."""
        cell = item.cells[0]
        if cell is not None:
            cell.tick(self._worker)
        else:
            assert self._server is not None
            self._server.tell(item.parts[0].server, self._message(MessageKind.PASS, item, 0))

    def take(self, item: Item, count: int) -> int:
        """See `AsyncStore.take`."""
        cell = item.cells[0]
        if cell is not None:
            return take(item, cell, self._table.group.rank, count)
        return self._ask_and_wait(item.parts[0].server, self._message(MessageKind.TAKE, item, 0, number=count)).number

    def set_clocks(self, number: int) -> None:
        """Set this worker's clock of all keys, everywhere."""
        if self._table.staleness is None:
            return
        self._table.set_clocks(self._worker, number)
        asked = [
            self._ask(dest, Message(MessageKind.CLOCK, self._number, number=number)) for dest in self._one_a_home()
        ]
        for each in asked:
            each.wait()
            each.answer()

    def tell_schedule(self, schedule: Schedule) -> None:
        """From the next push on this worker's learning rate is that of ``schedule`` where it names none."""
        message = partial(Message.of_text, MessageKind.SCHEDULE, json.dumps(schedule.config()), store=self._number)
        strangers = [rank for rank in self._table.servers if self._table.homes[rank] != self._table.own_home]
        for asked in [self._ask(dest, message()) for dest in strangers]:
            asked.wait()
            asked.answer()

    def leave(self) -> None:
        """Hold nobody back from now on, and count as ended, not as dead; waits for nobody."""
        self._table.set_clocks(self._worker, AWAY)
        if self._server is not None and self._table.staleness is not None:
            for dest in self._one_a_home():
                self._server.tell(dest, Message(MessageKind.CLOCK, self._number, number=AWAY))
        self._table.leave()
        if self._server is not None:
            self._server.leave(self._number)

    def num_dead(self, timeout_s: float) -> int:
        """How many processes have died, or are of homes that have not answered in time."""
        homes, deadline = self._table.homes, time.monotonic() + timeout_s
        asked = {dest: self._ask(dest, Message(MessageKind.GONE, self._number)) for dest in self._one_a_home()}
        dead = set(self._table.gone())
        for dest, each in asked.items():
            with contextlib.suppress(HpcdpError):  # it has died meanwhile
                while not each.test() and time.monotonic() < deadline:
                    time.sleep(1e-3)
                payload = each.answer().payload if each.test() else None
                silent = [rank for rank, home in enumerate(homes) if home == homes[dest]]
                dead.update(silent if payload is None else payload.tolist())
        return len(dead | self._lost)

    @property
    def _lost(self) -> set[int]:
        return set() if self._server is None else self._server.comm.lost

    def _one_a_home(self) -> list[int]:
        """A server of each other home, one that lives."""
        table, found = self._table, dict[int, int]()
        for rank in table.servers:
            if table.homes[rank] != table.own_home and rank not in self._lost:
                found.setdefault(table.homes[rank], rank)
        return list(found.values())


def _flat(x: Array) -> np.ndarray:
    """``x`` as a flat array, itself where that is possible."""
    return x.reshape(-1) if x.flags.c_contiguous else np.empty(x.size, x.dtype)


def _put_back(flat: np.ndarray, x: Array) -> None:
    if not x.flags.c_contiguous:
        x[...] = flat.reshape(x.shape)


def _and_copy(change: Change, place: np.ndarray) -> Change:
    def both(flat: np.ndarray) -> None:
        change(flat)
        place[:] = flat

    return both


def _turn_of(cell: ShmValue, ticket: int) -> PolledRequest:
    return PolledRequest(lambda: cell.turn == ticket)


class StateTransfer(Transfer):
    """See `Transfer`."""

    def read_state(self, item: Item, which: int) -> tuple[np.ndarray, int]:
        """One of the optimizer's states of a key, in its shape, and how often the key was updated."""
        whole, steps = np.zeros(item.count, state_dtype(item.dtype)), 0
        for number, (part, cell) in enumerate(zip(item.parts, item.cells, strict=True)):
            if cell is None:
                message = self._message(MessageKind.READ_STATE, item, number, which=which)
                answer = self._ask_and_wait(part.server, message)
                steps, state = answer.number, answer.payload
            else:
                steps, state = cell.steps, None if which == NO_STATE else cell.states[sorted(cell.states)[which]]
            if state is not None and which != NO_STATE:
                whole[part.first : part.last] = state
        return whole.reshape(item.shape), steps

    def write_steps(self, item: Item, steps: int) -> None:
        """Set how often a key was updated."""
        for number in range(len(item.parts)):
            self._write(item, number, NO_STATE, None, steps)

    def write(self, item: Item, which: int, values: Sharded) -> None:
        """Set one of the optimizer's states of a key, or its `VALUE`, where ``values`` has parts, which are whole ones
        of the key's."""
        for given in values.parts:
            for number, part in enumerate(item.parts):
                first, last = part.first - given.first, part.last - given.first
                if first >= 0 and last <= given.values.size:
                    self._write(item, number, which, np.ascontiguousarray(given.values[first:last]))

    def _write(self, item: Item, part: int, which: int, values: np.ndarray | None, steps: int = 0) -> None:
        message = self._message(MessageKind.WRITE_STATE, item, part, number=steps, which=which)
        message.payload = values
        cell = item.cells[part]
        if cell is None:
            self._ask_and_wait(item.parts[part].server, message)
        else:
            self._table.write_state(cell, message)

    def held(self, own: Own, which: int) -> Sharded:
        """What this worker gives to a state: copies of the parts that it serves; the first one all that servers keep.

        Args:
            which: of the optimizer's states, or `VALUE`.
        """
        item, table = own.item, self._table
        dtype = item.dtype if which == VALUE else state_dtype(item.dtype)
        parts: list[Part] = []
        if table.servers[0] < table.num_workers:
            for part, cell in zip(item.parts, item.cells, strict=True):
                if part.server == self._worker and cell is not None:
                    parts.append(Part(part.first, _copied(cell, which)))
        elif self._worker == 0:
            whole = np.empty(item.shape, dtype)
            if which == VALUE:
                run_until_complete(self.pull(own, whole, None, [], None))
            else:
                whole = self.read_state(item, which)[0]
            parts.append(Part(0, whole.reshape(-1)))
        return Sharded(item.shape, dtype, parts)


def _copied(cell: ShmValue, which: int) -> np.ndarray:
    if which != VALUE:
        return cell.states[sorted(cell.states)[which]].copy()
    found = np.empty_like(cell.flat)
    cell.read(lambda flat: np.copyto(found, flat))
    return found
