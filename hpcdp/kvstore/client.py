"""The client of servers: pushes and pulls of values, and transfers of whole states.

A worker accesses the parts of a key in shared memory, or sends requests to their servers.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..comm import Request
from ..comm.communicator import PolledRequest, Steps
from ..comm.progress import run_until_complete
from ..compression import Compression
from ..core.arrays import Array
from ..core.state import Part, Sharded
from ..data_parallel.overlap import SendPriority
from ..errors import HpcdpError, MismatchError, to_stderr
from ..optim import Schedule
from .server_keys import AWAY, Change, Delay, Item, ShmValue, Table, take
from .server_loop import NO_STATE, VALUE, Message, MessageKind, PendingRequest, Server
from .updaters import Codes, Rate, state_dtype


@dataclass
class TransferStatistics:
    """Statistics of a worker's pushes."""

    pushes: int = 0
    staleness_sum: int = 0
    """Number of other workers' pushes between this worker's last pull of the key and its push, summed over pushes."""
    staleness_max: int = 0
    """Greatest staleness of one push."""
    waited_s: float = 0.0
    """Seconds of waiting for slower workers."""


@dataclass
class WorkerKeyState:
    """A worker's own state of a key."""

    item: Item
    seen: int = 0
    """Version of the last pull, plus own pushes since."""
    codes: Codes | None = None
    """Encoder, with compression."""

    def compress(self, compression: Compression | None) -> None:
        """Set the compression of later pushes."""
        ends = [0, *(part.last for part in self.item.parts)]
        self.codes = None if compression is None else Codes(compression, ends, self.item.dtype)

    def encoded(self, value: np.ndarray) -> list[np.ndarray]:
        """Return the parts of a flat value, encoded with compression."""
        if self.codes is None:
            return [value[part.first : part.last] for part in self.item.parts]
        wire = np.empty(self.codes.nbytes, np.uint8)
        self.codes.encode(value, wire)
        return [wire[place] for place in self.codes.places]


class _FirstError:
    """The first error of several parts, raised after all of them have been processed."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Return a context in which errors are stored."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def throw(self) -> None:
        """Raise the stored error, if any."""
        if self._error is not None:
            raise self._error


class _Place:
    """The destination of one part of a pull.

    Args:
        rows: rows of the key to pull, ascending; None: all.
    """

    def __init__(self, item: Item, number: int, rows: np.ndarray | None = None) -> None:
        self._item, self._part = item, item.parts[number]
        first, last = (end // item.width for end in self._part[1:])
        self.rows = None if rows is None else rows[(rows >= first) & (rows < last)] - first
        """Rows in the part, counted from its first row."""

    def copy(self, flat: np.ndarray, value: np.ndarray) -> None:
        """Copy the part's ``value`` to ``flat``, the key's value."""
        place = flat[self._part.first : self._part.last]
        if self.rows is None:
            place[:] = value
        else:
            width = self._item.width
            place.reshape(-1, width)[self.rows] = value.reshape(-1, width)[self.rows]

    def take_answer(self, request: PendingRequest, flat: np.ndarray | None) -> int:
        """Copy an answer's values to ``flat``, if it is given, and return the answer's version."""
        answer, item = request.answer(), self._item
        if flat is not None:
            payload, place = answer.payload, flat[self._part.first : self._part.last]
            count = place.size if self.rows is None else self.rows.size * item.width
            if payload is None or payload.dtype != item.dtype or payload.size != count:
                got = "no values" if payload is None else f"{payload.size} {payload.dtype}"
                raise MismatchError("pull", where=f"key {item.key!r}", expected=f"{count} {item.dtype}", got=got)
            if self.rows is None:
                place[:] = payload
            else:
                place.reshape(-1, item.width)[self.rows] = payload.reshape(-1, item.width)
        return answer.number


class Transfer:
    """The operations of a worker on all parts of all keys of a store.

    Args:
        table: the keys.
        number: number of the store, in messages to servers.
        server: this rank's end of the exchange with other nodes; None on one node.
        worker: number of this worker.
    """

    def __init__(self, table: Table, number: int, server: Server | None, worker: int) -> None:
        self.statistics = TransferStatistics()
        self._table, self._number, self._server, self._worker = table, number, server, worker

    def push(
        self, own: WorkerKeyState, value: np.ndarray, rate: Rate, out: Array | None, turn: SendPriority | None
    ) -> Steps:
        """Push a flat ``value``, and copy the key's new value to ``out``, of the key's shape, if it is given."""
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
        requests: list[tuple[_Place, PendingRequest]] = []
        encoded = own.encoded(value)
        for number, (part, cell) in enumerate(zip(item.parts, item.cells, strict=True)):
            if cell is None:
                message = self._message(kind, item, number, ticket=ticket)
                message.rate = math.nan if isinstance(rate, Schedule) else rate
                message.payload, message.coded = encoded[number], own.codes is not None
                requests.append((_Place(item, number), self._ask(part.server, message, item)))
        version, failure = 0, _FirstError()
        for number, (part, cell) in enumerate(zip(item.parts, item.cells, strict=True)):
            if cell is None:
                continue
            received = encoded[number]
            if own.codes is not None:
                received = table.decoded(item, number, received)
            change = table.change(item, number, received, rate)
            if flat is not None:
                change = _and_copy(change, flat[part.first : part.last])
            if ticket >= 0:
                yield [_turn_of(cell, ticket)]
            with failure.kept():  # every part must see the ticket: a skipped part would wait for it forever
                version = cell.change(change, table.group.rank, ticket >= 0)
        for place, request in requests:
            with failure.kept():
                yield [request]
                version = place.take_answer(request, flat)
                self.statistics.waited_s += request.held_s
        failure.throw()
        self._count(own, version, out is not None)
        if out is not None and flat is not None:
            _put_back(flat, out)

    def pull(
        self, own: WorkerKeyState, out: Array, rows: np.ndarray | None, versions: list[int], turn: SendPriority | None
    ) -> Steps:
        """Copy the key's value to ``out``, of its shape, and append its version to ``versions``.

        With ``rows`` only those are copied, and the others are zero.
        """
        item = own.item
        if turn is not None:
            yield [turn]
        ticket = -1
        if item.in_order:
            ticket = yield from self._draw(item, pushes=False)
        flat = _flat(out)
        if rows is not None:
            flat[:] = 0
        requests: list[tuple[_Place, PendingRequest]] = []
        version, failure = 0, _FirstError()
        places = [_Place(item, number, rows) for number in range(len(item.parts))]
        for number, (place, cell) in enumerate(zip(places, item.cells, strict=True)):
            if cell is None:
                message = self._message(MessageKind.PULL, item, number, ticket=ticket)
                message.number, message.payload = int(rows is not None), place.rows
                requests.append((place, self._ask(item.parts[number].server, message)))
        for place, cell in zip(places, item.cells, strict=True):
            if cell is not None:
                if ticket >= 0:
                    yield [_turn_of(cell, ticket)]
                with failure.kept():  # see `push`
                    version = cell.read(partial(place.copy, flat), ticket >= 0)
        for place, request in requests:
            with failure.kept():
                yield [request]
                version = place.take_answer(request, flat)
        failure.throw()
        own.seen = version
        versions.append(version)
        _put_back(flat, out)

    def _message(self, kind: MessageKind, item: Item, part: int, **fields: Any) -> Message:
        return Message(kind, self._number, item.number, part, **fields)

    def _ask(self, dest: int, message: Message, item: Item | None = None) -> PendingRequest:
        """Send a request to a server; a push of ``item`` that waits long there is reported."""
        assert self._server is not None
        on_held = None if item is None else lambda held: self._report_wait(f"key {item.key!r}", held.payload.tolist())
        return self._server.ask(dest, message, on_held)

    def _ask_and_wait(self, dest: int, message: Message) -> Message:
        request = self._ask(dest, message)
        request.wait()
        return request.answer()

    def _draw(self, item: Item, pushes: bool) -> Generator[Sequence[Request], None, int]:
        """Return a ticket for an operation on a key of several parts, from the server of the first."""
        cell = item.cells[0]
        if cell is not None:
            if pushes:
                yield from self._held_back(cell)
            return self._table.draw(cell, self._worker, pushes)
        request = self._ask(item.parts[0].server, self._message(MessageKind.TICKET, item, 0, number=int(pushes)), item)
        yield [request]
        self.statistics.waited_s += request.held_s
        return request.answer().ticket

    def _held_back(self, cell: ShmValue) -> Steps:
        """Wait while this worker leads by more pushes than the staleness bound, and report the slower workers."""
        delay = Delay(self._table, cell, self._worker)

        def may_go_on() -> bool:
            may = delay.may_go_on()
            if behind := delay.to_report():
                self._report_wait(cell.name, behind)
            return may

        if not may_go_on():
            yield [PolledRequest(may_go_on)]
        self.statistics.waited_s += delay.held_s

    def _report_wait(self, name: str, behind: list[int]) -> None:
        table, ranks = self._table, ", ".join(f"rank {rank}" for rank in behind)
        to_stderr(
            f"rank {self._worker} of {table.num_workers}: {name}: waits for {ranks}, "
            f"more than {table.staleness} pushes behind (staleness={table.staleness})",
        )

    def _count(self, own: WorkerKeyState, version: int, pulled: bool) -> None:
        counted = self.statistics
        stale = max(0, version - 1 - own.seen)
        counted.pushes += 1
        counted.staleness_sum += stale
        counted.staleness_max = max(counted.staleness_max, stale)
        own.seen = version if pulled else own.seen + 1

    def pass_over(self, item: Item) -> None:
        """Advance this worker's clock of a key without a push; does not wait."""
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
        """Set this worker's clock of all keys, on all nodes."""
        if self._table.staleness is None:
            return
        self._table.set_clocks(self._worker, number)
        requests = [
            self._ask(dest, Message(MessageKind.CLOCK, self._number, number=number)) for dest in self._one_a_home()
        ]
        for request in requests:
            request.wait()
            request.answer()

    def send_schedule(self, schedule: Schedule) -> None:
        """Send servers the schedule of this worker's learning rate, for later pushes that carry no number."""
        message = partial(Message.of_text, MessageKind.SCHEDULE, json.dumps(schedule.config()), store=self._number)
        strangers = [rank for rank in self._table.servers if self._table.homes[rank] != self._table.own_home]
        for request in [self._ask(dest, message()) for dest in strangers]:
            request.wait()
            request.answer()

    def leave(self) -> None:
        """Release workers that wait for this one, and count as ended instead of dead; does not wait."""
        self._table.set_clocks(self._worker, AWAY)
        if self._server is not None and self._table.staleness is not None:
            for dest in self._one_a_home():
                self._server.tell(dest, Message(MessageKind.CLOCK, self._number, number=AWAY))
        self._table.leave()
        if self._server is not None:
            self._server.leave(self._number)

    def num_dead(self, timeout_s: float) -> int:
        """Return the number of processes that have died, or whose node has not answered in time."""
        homes, deadline = self._table.homes, time.monotonic() + timeout_s
        requests = {dest: self._ask(dest, Message(MessageKind.GONE, self._number)) for dest in self._one_a_home()}
        dead = set(self._table.gone())
        for dest, request in requests.items():
            with contextlib.suppress(HpcdpError):  # the server has died meanwhile
                while not request.test() and time.monotonic() < deadline:
                    time.sleep(1e-3)
                payload = request.answer().payload if request.test() else None
                silent = [rank for rank, home in enumerate(homes) if home == homes[dest]]
                dead.update(silent if payload is None else payload.tolist())
        return len(dead | self._lost)

    @property
    def _lost(self) -> set[int]:
        return set() if self._server is None else self._server.comm.lost

    def _one_a_home(self) -> list[int]:
        """Return one living server of each other node."""
        table, by_home = self._table, dict[int, int]()
        for rank in table.servers:
            if table.homes[rank] != table.own_home and rank not in self._lost:
                by_home.setdefault(table.homes[rank], rank)
        return list(by_home.values())

    # Whole states, for which the workers meet first

    def read_state(self, item: Item, which: int) -> tuple[np.ndarray, int]:
        """Return an optimizer state of a key, in the key's shape, and the key's number of updates."""
        flat, steps = np.zeros(item.count, state_dtype(item.dtype)), 0
        for number, (part, cell) in enumerate(zip(item.parts, item.cells, strict=True)):
            if cell is None:
                message = self._message(MessageKind.READ_STATE, item, number, which=which)
                answer = self._ask_and_wait(part.server, message)
                steps, state = answer.number, answer.payload
            else:
                steps, state = (
                    int(cell.steps[0]),
                    None if which == NO_STATE else cell.states[sorted(cell.states)[which]],
                )
            if state is not None and which != NO_STATE:
                flat[part.first : part.last] = state
        return flat.reshape(item.shape), steps

    def write_steps(self, item: Item, steps: int) -> None:
        """Set the number of updates of a key."""
        for number in range(len(item.parts)):
            self._write(item, number, NO_STATE, None, steps)

    def write(self, item: Item, which: int, values: Sharded) -> None:
        """Set an optimizer state of a key, or its `VALUE`, in the key's parts that ``values`` contains entirely."""
        for run in values.parts:
            for number, part in enumerate(item.parts):
                first, last = part.first - run.first, part.last - run.first
                if first >= 0 and last <= run.values.size:
                    self._write(item, number, which, np.ascontiguousarray(run.values[first:last]))

    def _write(self, item: Item, part: int, which: int, values: np.ndarray | None, steps: int = 0) -> None:
        message = self._message(MessageKind.WRITE_STATE, item, part, number=steps, which=which)
        message.payload = values
        cell = item.cells[part]
        if cell is None:
            self._ask_and_wait(item.parts[part].server, message)
        else:
            self._table.write_state(cell, message)

    def held(self, own: WorkerKeyState, which: int) -> Sharded:
        """Return copies of the parts that this worker serves; worker 0 returns all where servers keep the key.

        ``which`` is the number of an optimizer state, or `VALUE`.
        """
        item, table = own.item, self._table
        dtype = item.dtype if which == VALUE else state_dtype(item.dtype)
        parts: list[Part] = []
        if table.servers[0] < table.num_workers:
            for part, cell in zip(item.parts, item.cells, strict=True):
                if part.server == self._worker and cell is not None:
                    parts.append(Part(part.first, _copied(cell, which)))
        elif self._worker == 0:
            value = np.empty(item.shape, dtype)
            if which == VALUE:
                run_until_complete(self.pull(own, value, None, [], None))
            else:
                value = self.read_state(item, which)[0]
            parts.append(Part(0, value.reshape(-1)))
        return Sharded(item.shape, dtype, parts)


def _flat(x: Array) -> np.ndarray:
    """Return a flat view of ``x``, or a new array of its size where it is not contiguous."""
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


def _copied(cell: ShmValue, which: int) -> np.ndarray:
    if which != VALUE:
        return cell.states[sorted(cell.states)[which]].copy()
    copied = np.empty_like(cell.flat)
    cell.read(lambda flat: np.copyto(copied, flat))
    return copied
