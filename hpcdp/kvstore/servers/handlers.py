"""Handlers of requests, replay after a lost server, and collective requests.

A seeded schedule: what asynchronous workers do takes effect in an order that can be had again.

Every worker waits before each of its operations until all others wait, too, or have ended; then the seed decides who is
next. So the order depends on nothing but the seed and what the workers do: a run that went wrong can be looked at.

What ranks of other nodes ask for, and how it is met: nothing is done before it is known to fit.

What all processes of an asynchronous store do together: workers call it, servers are told to.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...comm import World
from ...comm.communicator import short_name_of
from ...comm.consistency import on_every_rank
from ...comm.thread_comm import ThreadCommunicator
from ...compression import Compression
from ...errors import ConfigError, MismatchError
from ...optim import Schedule
from ...optim.schedules import schedule_from_config
from ..arguments import Key
from ..updaters import Updater
from .key_directory import Delay, Described, Item, Table, no_updater, take, updater_of
from .protocol import AWAY, BACK, NO_STATE, Change, Message, MessageKind, ShmValue
from .server import Attempt, Server

_LOOK_S = 0.2
"""Between looks whether another worker has failed."""


class Replay:
    """Who may act, decided by a seed; workers are threads. Use `of`.

    Args:
        world: the workers, as one of them sees it.
    """

    def __init__(self, world: World) -> None:
        self._random = np.random.default_rng()
        self._check = world.node_memory.check
        self._stores = [0] * world.size
        """That each worker has."""
        self._away: set[int] = set()
        self._asking: dict[int, Callable[[], bool]] = {}
        self._chosen: int | None = None
        self._changed = threading.Condition()

    @classmethod
    def of(cls, world: World, seed: int | None) -> Replay | None:
        """One for all workers and asynchronous stores of ``world``, from the first on that has a seed; all ranks call.

        Raises:
            ConfigError: they are processes, or there are servers.
        """
        kept: Replay | None = world.kept.get(cls)
        if seed is None:
            return kept
        if not isinstance(world.comm, ThreadCommunicator) or world.whole is not None:
            got = f"{world.library} ranks" if world.whole is None else "servers, too"
            raise ConfigError(
                "kvstore", where="replay", expected="thread ranks alone, hpcdp.comm.thread_comm.run", got=got
            )
        if kept is None:
            made: list[Replay | None] = world.comm.meet(cls(world) if world.rank == 0 else None)
            kept = world.kept[cls] = made[0]
            assert kept is not None
        if world.rank == 0:
            kept._random = np.random.default_rng(seed)
        return kept

    def share(self, world: World, table: Table) -> list[Table]:
        """A store more of each worker; all workers' tables of it, which see the clocks of keys that lie elsewhere."""
        assert isinstance(world.comm, ThreadCommunicator)
        with self._changed:
            self._stores[world.rank] += 1
        return world.comm.meet(table)

    @contextlib.contextmanager
    def turn(self, worker: int, may_act: Callable[[], bool]) -> Iterator[None]:
        """Within it nobody else acts; waits for this worker's turn, which does not come before ``may_act()``."""
        with self._changed:
            self._asking[worker] = may_act
            self._choose()
            while self._chosen != worker:
                self._changed.wait(_LOOK_S)
                self._check()
        try:
            yield
        finally:
            with self._changed:
                self._chosen = None
                self._choose()

    @contextlib.contextmanager
    def meeting(self, worker: int) -> Iterator[None]:
        """Within it this worker, which waits for all others, is not waited for; all workers come here."""
        with self._changed:
            self._away.add(worker)
            self._choose()
        try:
            yield
        finally:
            with self._changed:
                self._away.discard(worker)

    def end(self, worker: int) -> None:
        """A store less of this worker; after the last one it does nothing any more."""
        with self._changed:
            self._stores[worker] -= 1
            self._choose()

    def _choose(self) -> None:
        active = {worker for worker, stores in enumerate(self._stores) if stores} - self._away
        if self._chosen is None and active and active <= self._asking.keys():
            able = [worker for worker in sorted(self._asking) if self._asking[worker]()]
            if able:
                self._chosen = able[int(self._random.integers(len(able)))]
                del self._asking[self._chosen]
                self._changed.notify_all()


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
        if kind is MessageKind.GONE:
            return lambda: Message(MessageKind.DONE, payload=np.array(self.table.gone(), np.int64))
        if source >= self.table.num_workers:
            raise MismatchError("key-value store message", expected="a worker's", got=f"one of rank {source}")
        if kind is MessageKind.CLOCK:
            return lambda: self._set_clocks(source, message.number)
        if kind is MessageKind.SCHEDULE:  # now: pushes that follow may not be tried in their order
            self.table.schedules[source] = _schedule(message.text())
            return lambda: Message(MessageKind.DONE)
        item, cell = self._addressed(message)
        if kind is MessageKind.TICKET:
            delay = Delay(self.table, cell, source)
            return lambda: self._ticket(cell, source, bool(message.number), delay)
        if kind is MessageKind.PASS:
            return lambda: self._pass(cell, source)
        if kind is MessageKind.TAKE:
            return lambda: Message(MessageKind.DONE, number=take(item, cell, self.table.group.rank, message.number))
        if kind in (MessageKind.READ_STATE, MessageKind.WRITE_STATE):
            return lambda: self._state(cell, message)
        if kind is MessageKind.PULL:
            rows = self._rows(item, message)
            return lambda: self._pull(item, cell, rows, message)
        if kind in (MessageKind.PUSH, MessageKind.PUSHPULL):
            received = self._received(item, message)
            if self.table.updater is None:
                raise no_updater("push")
            change = self.table.change(item, message.part, received, self.table.rate(source, message.rate))
            delay = Delay(self.table, cell, source)
            return lambda: self._push(item, cell, change, message, delay)
        raise MismatchError("key-value store message", expected="a request", got=kind.name)

    def _addressed(self, message: Message) -> tuple[Item, ShmValue]:
        if message.key < len(self.table.by_number):
            item = self.table.by_number[message.key]
            cell = item.cells[message.part] if message.part < len(item.parts) else None
            needs_ticket = item.in_order and message.kind in (MessageKind.PUSH, MessageKind.PULL, MessageKind.PUSHPULL)
            draws = message.kind is MessageKind.TICKET
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

    def _ticket(self, cell: ShmValue, source: int, pushes: bool, delay: Delay) -> Message | None:
        if pushes and not delay.may_go_on():
            return _held(delay)
        return Message(MessageKind.DONE, ticket=self.table.draw(cell, source, pushes), rate=delay.held_s)

    def _pass(self, cell: ShmValue, source: int) -> Message:
        if self.table.staleness is not None:
            cell.tick(source)
        return Message(MessageKind.DONE)

    def _push(self, item: Item, cell: ShmValue, change: Change, message: Message, delay: Delay) -> Message | None:
        in_order, source = item.in_order, delay.worker
        if in_order and cell.turn != message.ticket:
            return None
        if not in_order and self.table.staleness is not None:
            if not delay.may_go_on():
                return _held(delay)
            cell.tick(source)
        answer = Message(MessageKind.DONE, rate=delay.held_s)

        def change_and_look(flat: np.ndarray) -> None:
            change(flat)
            if message.kind is MessageKind.PUSHPULL:
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

    def _pull(self, item: Item, cell: ShmValue, rows: np.ndarray | None, message: Message) -> Message | None:
        in_order = message.ticket >= 0
        if in_order and cell.turn != message.ticket:
            return None
        answer = Message(MessageKind.DONE)

        def take_copy(flat: np.ndarray) -> None:
            answer.payload = flat.copy() if rows is None else flat.reshape(-1, item.width)[rows]

        answer.number = cell.read(take_copy, in_order)
        return answer

    def _state(self, cell: ShmValue, message: Message) -> Message:
        if message.kind is MessageKind.WRITE_STATE:
            self.table.write_state(cell, message)
            return Message(MessageKind.DONE)
        payload = None if message.which == NO_STATE else cell.states[self.table.state_name(cell, message)].copy()
        return Message(MessageKind.DONE, number=cell.steps, payload=payload)

    def _set_clocks(self, source: int, number: int) -> Message:
        if number not in (0, AWAY, BACK):
            expected = "a clock that begins, is away or comes back"
            raise MismatchError("key-value store message", expected=expected, got=number)
        self.table.set_clocks(source, number)
        return Message(MessageKind.DONE)


def _held(delay: Delay) -> Message | None:
    behind = delay.to_report()
    return Message(MessageKind.HELD, payload=np.array(behind, np.int64)) if behind else None


def _schedule(text: str) -> Schedule:
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    return schedule_from_config(config)


def make(table: Table, described: Sequence[Described], values: Sequence[np.ndarray]) -> None:
    """Make keys, with rank 0's ``values``; those of other ranks are overwritten."""
    _broadcast(table, values)
    table.make(described, values)
    table.group.comm.barrier()


def assign(table: Table, keys: Sequence[Key], values: Sequence[np.ndarray]) -> None:
    """Overwrite keys by rank 0's ``values``; those of other ranks are overwritten."""
    _broadcast(table, values)
    for key, value in zip(keys, values, strict=True):
        table.assign(table.items[key], value)
    table.group.comm.barrier()


def _broadcast(table: Table, values: Sequence[np.ndarray]) -> None:
    for value in values:
        table.group.comm.native_broadcast(value.reshape(-1).view(np.uint8), 0)


def set_updater(table: Table, find: Callable[[], Updater]) -> None:
    """Let pushes be applied by what ``find()`` returns.

    Raises:
        ConfigError: some process cannot find it; on all of them.
    """
    comm = table.group.comm
    try:
        updater = on_every_rank(comm, find)
    except ConfigError as error:
        if error.rank is not None:  # among workers and servers
            workers = table.group.size - table.group.num_servers
            error.operation, error.rank = f"{short_name_of(error.rank, workers)}: {error.operation}", None
        raise
    table.set_updater(updater)
    comm.barrier()


def compress(table: Table, compression: Compression | None) -> None:
    """Let pushes be encoded so from now on."""
    table.compression = compression
    table.group.comm.barrier()


def serve(whole: World) -> None:
    """What a server does until all workers have ended: answers beside this thread, and does here what it is told.

    Args:
        whole: workers, and this and all other servers behind them.
    """
    server = Server.of(whole, has_servers=True)
    for command in server.next_commands(whole.size - whole.num_servers):
        _obey(command, server, whole)


def _obey(command: dict[str, Any], server: Server, whole: World) -> None:
    """Do a server's part of what all do; keeps nothing of the store, which may be dropped next."""
    number, do = command["store"], command["do"]
    if do == "store":
        table = Table(whole, command["workers"], command["staleness"])
        table.strangers = server.comm
        server.stores[number] = Requests(table)
        whole.comm.barrier()
        return
    requests = server.stores[number]
    assert isinstance(requests, Requests)
    table = requests.table
    if do == "make":
        described = [(key, tuple(shape), dtype) for key, shape, dtype in command["described"]]
        make(table, described, [np.empty(shape, dtype) for _, shape, dtype in described])
    elif do == "assign":
        items = [table.items[key] for key in command["keys"]]
        assign(table, command["keys"], [np.empty(item.shape, item.dtype) for item in items])
    elif do == "update":
        with contextlib.suppress(ConfigError):  # which all workers raise, too
            set_updater(table, partial(updater_of, command["described"]))
    else:
        compress(table, Compression.of(command["said"] or None))
