"""What ranks of other nodes ask for, and how it is met: nothing is done before it is known to fit."""

from __future__ import annotations

import json

import numpy as np

from ...errors import MismatchError
from ...optim import Schedule
from ...optim.schedules import schedule_from_config
from .cell import AWAY, BACK, Cell, Change
from .delay import Delay
from .server import Attempt
from .table import Item, Table, no_updater, take
from .wire import NO_STATE, Kind, Message


class Requests:
    """Answers requests for the keys of ``table`` that lie in this rank's memory."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def answer(self, source: int, message: Message) -> Attempt:
        """How to answer a request of another rank.

        Raises:
            HpcdpError: there is nothing of the kind here, or what has come does not fit.
        """
        kind = message.kind
        if kind is Kind.GONE:
            return lambda: Message(Kind.DONE, payload=np.array(self.table.gone(), np.int64))
        if source >= self.table.num_workers:
            raise MismatchError("key-value store message", expected="a worker's", got=f"one of rank {source}")
        if kind is Kind.CLOCK:
            return lambda: self._set_clocks(source, message.number)
        if kind is Kind.SCHEDULE:  # now: pushes that follow may not be tried in their order
            self.table.schedules[source] = _schedule(message.text())
            return lambda: Message(Kind.DONE)
        item, cell = self._addressed(message)
        if kind is Kind.TICKET:
            delay = Delay(self.table, cell, source)
            return lambda: self._ticket(cell, source, bool(message.number), delay)
        if kind is Kind.PASS:
            return lambda: self._pass(cell, source)
        if kind is Kind.TAKE:
            return lambda: Message(Kind.DONE, number=take(item, cell, self.table.group.rank, message.number))
        if kind in (Kind.READ_STATE, Kind.WRITE_STATE):
            return lambda: self._state(cell, message)
        if kind is Kind.PULL:
            rows = self._rows(item, message)
            return lambda: self._pull(item, cell, rows, message)
        if kind in (Kind.PUSH, Kind.PUSHPULL):
            received = self._received(item, message)
            if self.table.updater is None:
                raise no_updater("push")
            change = self.table.change(item, message.part, received, self.table.rate(source, message.rate))
            delay = Delay(self.table, cell, source)
            return lambda: self._push(item, cell, change, message, delay)
        raise MismatchError("key-value store message", expected="a request", got=kind.name)

    def _addressed(self, message: Message) -> tuple[Item, Cell]:
        if message.key < len(self.table.by_number):
            item = self.table.by_number[message.key]
            cell = item.cells[message.part] if message.part < len(item.parts) else None
            needs_ticket = item.in_order and message.kind in (Kind.PUSH, Kind.PULL, Kind.PUSHPULL)
            draws = message.kind is Kind.TICKET
            if (message.ticket >= 0) != needs_ticket or (draws and not item.in_order):
                got = f"{message.kind.name} with ticket {message.ticket}"
                raise MismatchError("key-value store message", where=f"key {item.key!r}", got=got)
            if cell is not None:
                return item, cell
        got = f"key number {message.key}, part {message.part}"
        raise MismatchError("key-value store message", expected="a part of a key that this server keeps", got=got)

    def _received(self, item: Item, message: Message) -> np.ndarray:
        payload, (_, first, last) = message.payload, item.parts[message.part]
        assert payload is not None
        count = last - first
        if message.coded:
            wanted = -1 if self.table.compression is None else self.table.compression.codec.nbytes(count, item.dtype)
            if payload.nbytes != wanted:
                expected = "no codes" if wanted < 0 else f"{wanted} bytes of codes"
                raise MismatchError(
                    "push", where=f"key {item.key!r}", expected=expected, got=f"{payload.nbytes} bytes of codes"
                )
            return self.table.decoded(item, message.part, payload)
        if payload.dtype != item.dtype or payload.size != count:
            got = f"{payload.size} {payload.dtype}"
            raise MismatchError("push", where=f"key {item.key!r}", expected=f"{count} {item.dtype}", got=got)
        return payload

    def _ticket(self, cell: Cell, source: int, pushes: bool, delay: Delay) -> Message | None:
        if pushes and not delay.may_go_on():
            return _held(delay)
        return Message(Kind.DONE, ticket=self.table.draw(cell, source, pushes), rate=delay.held_s)

    def _pass(self, cell: Cell, source: int) -> Message:
        if self.table.staleness is not None:
            cell.tick(source)
        return Message(Kind.DONE)

    def _push(self, item: Item, cell: Cell, change: Change, message: Message, delay: Delay) -> Message | None:
        in_order, source = item.in_order, delay.worker
        if in_order and cell.turn != message.ticket:
            return None
        if not in_order and self.table.staleness is not None:
            if not delay.may_go_on():
                return _held(delay)
            cell.tick(source)
        answer = Message(Kind.DONE, rate=delay.held_s)

        def change_and_look(flat: np.ndarray) -> None:
            change(flat)
            if message.kind is Kind.PUSHPULL:
                answer.payload = flat.copy()

        answer.number = cell.change(change_and_look, source, in_order)
        return answer

    def _rows(self, item: Item, message: Message) -> np.ndarray | None:
        """Which rows of its part a pull wants; None: all."""
        if message.number == 0:
            return None
        rows, (_, first, last) = message.payload, item.parts[message.part]
        num_rows = (last - first) // item.width
        if rows is None or rows.dtype != np.int64 or (rows.size and not 0 <= rows.min() <= rows.max() < num_rows):
            raise MismatchError("pull", where=f"key {item.key!r}", expected=f"rows of {num_rows}", got=repr(rows)[:80])
        return rows

    def _pull(self, item: Item, cell: Cell, rows: np.ndarray | None, message: Message) -> Message | None:
        in_order = message.ticket >= 0
        if in_order and cell.turn != message.ticket:
            return None
        answer = Message(Kind.DONE)

        def take_copy(flat: np.ndarray) -> None:
            answer.payload = flat.copy() if rows is None else flat.reshape(-1, item.width)[rows]

        answer.number = cell.read(take_copy, in_order)
        return answer

    def _state(self, cell: Cell, message: Message) -> Message:
        if message.kind is Kind.WRITE_STATE:
            self.table.write_state(cell, message)
            return Message(Kind.DONE)
        payload = None if message.which == NO_STATE else cell.states[self.table.state_name(cell, message)].copy()
        return Message(Kind.DONE, number=cell.steps, payload=payload)

    def _set_clocks(self, source: int, number: int) -> Message:
        if number not in (0, AWAY, BACK):
            expected = "a clock that begins, is away or comes back"
            raise MismatchError("key-value store message", expected=expected, got=number)
        self.table.set_clocks(source, number)
        return Message(Kind.DONE)


def _held(delay: Delay) -> Message | None:
    behind = delay.to_report()
    return Message(Kind.HELD, payload=np.array(behind, np.int64)) if behind else None


def _schedule(text: str) -> Schedule:
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    return schedule_from_config(config)
