"""The keys of a server, their versions and their staleness.

The keys of an asynchronous store as all its processes know them.

Workers and servers hold the same table. What lies in memory that a rank shares it reads and changes itself; for the
rest it asks the server that keeps the part.

Bounded delay: a push that leads by too much waits, wherever its key lies, and its worker is told for whom.

Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.

Handlers of requests, replay after a lost server, and collective requests.

A seeded schedule: what asynchronous workers do takes effect in an order that can be had again.

Every worker waits before each of its operations until all others wait, too, or have ended; then the seed decides who is
next. So the order depends on nothing but the seed and what the workers do: a run that went wrong can be looked at.

What ranks of other nodes ask for, and how it is met: nothing is done before it is known to fit.

What all processes of an asynchronous store do together: workers call it, servers are told to.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..comm import Communicator, World
from ..comm.communicator import short_name_of
from ..comm.consistency import on_every_rank
from ..comm.shared_memory import NodeLocks
from ..comm.thread_comm import ThreadCommunicator
from ..compression import Compression
from ..errors import ConfigError, MismatchError
from ..optim import Schedule, from_config
from ..optim.schedules import schedule_from_config
from .arguments import Key
from .protocol import AWAY, BACK, NO_STATE, VALUE, Change, Message, MessageKind, Placement, ShmValue, ValuePart
from .server import Attempt, Server
from .sync_rounds import Pool
from .updaters import ByFunction, ByOptimizer, Function, Rate, Updater, name_of, summary

MOST_STEPS = 1 << 53
_INT64 = np.iinfo(np.int64)
_DEATH_CHECK_S = 0.5
"""Between looks who has died, of those who are held back."""

Described = tuple[Key, tuple[int, ...], str]
"""A key, its shape and dtype."""


@dataclass
class Item:
    """One key."""

    number: int
    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype
    width: int
    """Elements of a row, of which every part holds whole ones."""
    parts: list[ValuePart]
    cells: list[ShmValue | None]
    """Those of the parts that lie in this rank's node."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def in_order(self) -> bool:
        """Whether operations draw tickets, so that all parts see them in one order."""
        return len(self.parts) > 1


class Table:
    """All keys of a store. Every process makes it, and calls `make` and `set_updater`, together.

    Args:
        group: workers, then servers.
        num_workers: how many of its ranks are workers.
        staleness: by how many pushes of a key a worker may lead; None: by any.
    """

    def __init__(self, group: World, num_workers: int, staleness: int | None) -> None:
        self.group, self.num_workers, self.staleness = group, num_workers, staleness
        memory = Pool(group.node_memory)
        shares = memory.size > 1
        everyone = group.comm.allgather_json(group.node if shares else -1 - group.rank)
        self.homes: list[int] = everyone
        """By rank where it is: ranks of the same home share memory."""
        self.own_home = everyone[group.rank]
        servers = range(num_workers, group.size) if group.size > num_workers else range(num_workers)
        self.servers = list(servers)
        self.placement = Placement(self.servers, splits=len({everyone[rank] for rank in servers}) > 1)
        self.items: dict[Key, Item] = {}
        self.by_number: list[Item] = []
        self.updater: Updater | None = None
        self.schedule: Schedule | None = None
        """Of the learning rate, as it was when the updater was set; None: it was a number."""
        self.schedules: dict[int, Schedule] = {}
        """Those that workers of other nodes have assigned since."""
        self.compression: Compression | None = None
        self._memory = memory
        self._locks = NodeLocks(group.node_comm if shares else None)
        self._num_locks = 0
        self.neighbours: list[int] = group.node_comm.allgather_json(group.rank) if shares else [group.rank]
        self.strangers: Communicator | None = None
        """Over which processes of other nodes are asked, where there are some: it knows who of them has died."""
        self._looked = 0.0
        self._left = memory.alloc((memory.size,), np.int64)

    def make(self, described: Sequence[Described], values: Sequence[np.ndarray]) -> None:
        """Make keys, with these values, of any shape."""
        for (key, shape, dtype), value in zip(described, values, strict=True):
            kind = np.dtype(dtype)
            width = max(1, math.prod(shape[1:]))
            parts = self.placement.place(math.prod(shape), kind.itemsize, width)
            cells = [self._cell(key, part, kind) if self._is_near(part) else None for part in parts]
            item = Item(len(self.by_number), key, tuple(shape), kind, width, parts, cells)
            self.assign(item, value)
            self.items[key] = item
            self.by_number.append(item)
            self._keep_states(item)

    def assign(self, item: Item, value: np.ndarray) -> None:
        """Overwrite a key, by one of any shape; every process must call."""
        for part, cell in zip(item.parts, item.cells, strict=True):
            if cell is not None and self._memory.rank == 0:
                cell.assign(value.reshape(-1)[part.first : part.last])

    def _is_near(self, part: ValuePart) -> bool:
        return self.homes[part.server] == self.own_home

    def _cell(self, key: Key, part: ValuePart, dtype: np.dtype) -> ShmValue:
        self._num_locks += 1
        count = part.last - part.first
        return ShmValue(f"key {key!r}", self._memory, self._locks, self._num_locks, count, dtype, self.num_workers)

    def set_updater(self, updater: Updater) -> None:
        """Let pushes be applied by this; states begin anew."""
        self.updater, self.schedules, self.schedule = updater, {}, None
        if isinstance(updater, ByOptimizer) and isinstance(updater.optimizer.lr, Schedule):
            self.schedule = copy.deepcopy(updater.optimizer.lr)
        if isinstance(updater, ByOptimizer):  # compiled now, not in the first push, under a key's lock
            flat, rule = np.zeros(1, np.float32), updater.optimizer
            rule.update(flat, np.zeros_like(flat), rule.init_state(flat), step=1)
        for item in self.by_number:
            self._keep_states(item)

    def _keep_states(self, item: Item) -> None:
        if isinstance(self.updater, ByOptimizer):
            for cell in item.cells:
                if cell is not None:
                    cell.keep_states_of(self.updater.optimizer)

    def change(self, item: Item, part: int, received: np.ndarray, rate: Rate) -> Callable[[np.ndarray], object]:
        """What applies a push to a part that lies here; to be called with its value."""
        updater, cell = self.updater, item.cells[part]
        assert cell is not None
        if isinstance(updater, ByOptimizer):
            rule = copy.copy(updater.optimizer)  # whose rate this rank's program may assign meanwhile
            rule.lr = rate
            return lambda flat: cell.update(rule, received, flat)
        assert isinstance(updater, ByFunction)
        shape = (-1,) if item.in_order else item.shape

        return lambda flat: updater.update(item.key, received.reshape(shape), flat.reshape(shape))

    def rate(self, worker: int, said: float) -> Rate:
        """The learning rate of a push of a worker of another node, which has ``said`` a number, or NaN.

        Raises:
            MismatchError: it has named none, and no schedule before.
        """
        if not math.isnan(said) or not isinstance(self.updater, ByOptimizer):
            return said
        known = self.schedules.get(worker, self.schedule)
        if known is None:
            raise MismatchError("push", where=f"rank {worker}", expected="a learning rate", got="none")
        return known

    def decoded(self, item: Item, part: int, codes: np.ndarray) -> np.ndarray:
        """What a codec made, as an array again."""
        first, last = item.parts[part][1:]
        out = np.empty(last - first, item.dtype)
        assert self.compression is not None
        self.compression.codec.decode(codes, out)
        return out

    def may_go_on(self, cell: ShmValue, worker: int) -> bool:
        """Whether the bound of staleness lets a worker push."""
        if self.staleness is None or cell.may_push(worker, self.staleness):
            return True
        self._pass_over_the_dead()
        return cell.may_push(worker, self.staleness)

    def _pass_over_the_dead(self) -> None:
        """Let workers that have died hold nobody back; looks now and then."""
        now = time.monotonic()
        if now - self._looked > _DEATH_CHECK_S:
            self._looked = now
            lost = set() if self.strangers is None else self.strangers.lost
            for rank in lost.union(self.gone()):
                if rank < self.num_workers:
                    self.set_clocks(rank, AWAY)

    def draw(self, cell: ShmValue, worker: int, pushes: bool) -> int:
        """A ticket, when `may_go_on`; counts a push."""
        if pushes and self.staleness is not None:
            cell.tick(worker)
        return cell.ticket()

    def state_name(self, cell: ShmValue, message: Message) -> str:
        """Which of the optimizer's states a message is about."""
        if message.which >= len(cell.states):
            got = f"number {message.which}"
            raise MismatchError("key-value store message", expected=f"one of {len(cell.states)} states", got=got)
        return sorted(cell.states)[message.which]

    def write_state(self, cell: ShmValue, message: Message) -> None:
        """Do as a message of kind WRITE_STATE says."""
        payload, flat = message.payload, cell.flat
        if message.which == NO_STATE:
            if not 0 <= message.number < MOST_STEPS:
                raise MismatchError("write a state", expected=f"0 to {MOST_STEPS} updates", got=message.number)
            cell.set_steps(message.number)
            return
        is_value = message.which == VALUE
        name = "" if is_value else self.state_name(cell, message)
        dtype = flat.dtype if is_value else cell.states[name].dtype
        if payload is None or payload.dtype != dtype or payload.size != flat.size:
            raise MismatchError("write a state", expected=f"{flat.size} {dtype}", got=repr(payload)[:80])
        values = payload
        if is_value:
            cell.change(lambda place: np.copyto(place, values), self.group.rank)
        else:
            cell.write_state(name, values)

    def set_clocks(self, worker: int, number: int) -> None:
        """Set a worker's clock of all keys whose order is kept here: see `ShmValue.set_clock`."""
        for item in self.by_number:
            cell = item.cells[0]
            if cell is not None:
                cell.set_clock(worker, number)

    def leave(self) -> None:
        """This process ends as it should."""
        self._left[self._memory.rank] = 1

    def gone(self) -> list[int]:
        """The ranks of this node that have died."""
        return [self.neighbours[local] for local in self._locks.gone() if not self._left[local]]


def take(item: Item, cell: ShmValue, rank: int, count: int) -> int:
    """The integer under a key, which is ``count`` greater then.

    Raises:
        ConfigError: it is no single integer, or would be none any more.
    """
    if item.dtype != np.int64 or item.count != 1:
        got = f"{item.shape} {item.dtype}"
        raise ConfigError("take", where=f"key {item.key!r}", expected="a key of one int64", got=got)
    taken = [0]

    def add(flat: np.ndarray) -> None:
        taken[0] = int(flat[0])
        following = taken[0] + count
        if not _INT64.min <= following <= _INT64.max:
            raise ConfigError("take", where=f"key {item.key!r}", expected="a sum that int64 holds", got=following)
        flat[0] = following

    cell.change(add, rank)
    return taken[0]


def no_updater(operation: str) -> ConfigError:
    """Without an updater the last push would win, whichever that is."""
    return ConfigError(
        operation, where="dist_async", expected="a store with an updater", got="none",
        remedy="call set_optimizer(hpcdp.optim.SGD(lr=0.1)) or set_updater(function) first, on all ranks",
    )  # fmt: skip


def updater_of(described: dict[str, Any]) -> Updater:
    """The updater that a worker has described: an optimizer by name and arguments, a function by where it is.

    Raises:
        ConfigError: it cannot be found.
    """
    if "optimizer" in described:
        return ByOptimizer(from_config(described["optimizer"]))
    module, _, name = described["function"].partition(":")
    try:
        found: Any = importlib.import_module(module)
        for each in name.split("."):
            found = getattr(found, each)
    except (Exception, SystemExit) as error:  # a script that runs when it is imported may raise anything
        said = str(error) if isinstance(error, ImportError | AttributeError) else summary(error)
        raise ConfigError(
            "set_updater", expected="a function that servers can import", got=f"{module}.{name}: {said}",
            remedy="put it into a module beside your script, not into the script itself",
        ) from None  # fmt: skip
    return ByFunction(found)


def require_same_by_name(function: Function) -> None:
    """Raises `ConfigError` where servers, who are told only its name, would find another function than this one."""
    name = name_of(function)
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for each in path.split("."):
        found = getattr(found, each, None)
    if found is not None and found is not function:  # what is not found at all, servers say
        raise ConfigError(
            "set_updater", expected="a function that servers can import", got=f"another one than {module}.{path}",
            remedy="pass a function of a module, as it is called there: no method, no partial, none that is wrapped",
        )  # fmt: skip


REPORTED_S = 5.0
"""A worker that is held back so long says by whom, once a push."""


class Delay:
    """Of one push, where its key's order is kept.

    Args:
        cell: the first part of the key.
        worker: who pushes.
    """

    def __init__(self, table: Table, cell: ShmValue, worker: int) -> None:
        self._table, self._cell, self.worker = table, cell, worker
        self._began, self._told = time.monotonic(), False
        self.held_s = 0.0
        """For how long it was held back so far."""

    def may_go_on(self) -> bool:
        """Whether the bound lets the push take effect."""
        may = self._table.may_go_on(self._cell, self.worker)
        if not may or self.held_s:
            self.held_s = time.monotonic() - self._began
        return may

    def to_report(self) -> list[int]:
        """The workers that hold it back, once when that has lasted; else none."""
        if self._told or self.held_s < REPORTED_S:
            return []
        self._told = True
        return self._cell.behind(self.worker, self._table.staleness or 0)


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
