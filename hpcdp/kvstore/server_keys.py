"""The keys of an asynchronous store and their values, the bound on staleness, and handlers of requests for them.

- `Placement` depends only on the order in which keys are made. A small key is kept by the server with the fewest bytes.
  A large key is split into equal parts, one for each server, to balance their load (Li et al., "Scaling distributed
  machine learning with the parameter server", 2014, section 4.2, which places by hashes, less evenly).
- `ShmValue`: a part of a key in a node's memory, which every rank there changes under a lock. A counter is odd during a
  change: the kernel frees the lock of a rank that dies, and the next rank sees that the value is incomplete.
- `Table`: the keys, which workers and servers all hold. A rank accesses the parts in its node's memory directly, and
  sends requests for the others to their server. Workers call its collective methods, and servers by command.
- `Delay`: bounded staleness. A push that leads by too much waits. Source: Ho et al., "More effective distributed ML via
  a stale synchronous parallel parameter server", 2013.
- `Requests`: handlers of requests from other nodes, which check a request before they change anything.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..comm import Communicator, World
from ..comm.communicator import bounds, short_name_of
from ..comm.consistency import on_every_rank
from ..comm.shared_memory import NodeLocks, NodeMemory
from ..compression import Compression
from ..errors import ConfigError, HpcdpError, MismatchError
from ..optim import Optimizer, Schedule, from_config, schedule_from_config
from .arguments import Key
from .server_loop import MOST_NBYTES, NO_STATE, VALUE, Attempt, Message, MessageKind
from .sync import Pool
from .updaters import ByFunction, ByOptimizer, Function, Rate, Updater, apply_rule, name_of, new_state, summary

SPLIT_NBYTES = 4 << 20
"""Least bytes of a key that is split: for smaller ones, ordering operations among servers costs more than it saves."""


class ValuePart(NamedTuple):
    """The elements ``first`` (included) to ``last`` (excluded) of a flat key, and their server."""

    server: int
    first: int
    last: int


class Placement:
    """The assignment of keys to servers, in the order in which keys are made.

    Args:
        servers: ranks of the servers.
        splits: whether large keys are split; on one node they are not, because all ranks share their memory.
    """

    def __init__(self, servers: Sequence[int], splits: bool) -> None:
        self._servers, self._splits = list(servers), splits
        self.nbytes = dict.fromkeys(servers, 0)
        """Bytes that each server keeps."""

    def place(self, count: int, itemsize: int, width: int = 1) -> list[ValuePart]:
        """Return the parts of the next key in order, at least one, split between rows of ``width`` elements."""
        num_parts = -(-count * itemsize // MOST_NBYTES) or 1
        if self._splits and count * itemsize >= SPLIT_NBYTES:
            num_parts = -(-num_parts // len(self._servers)) * len(self._servers)
        num_rows = count // width
        ends = [width * end for end in bounds(num_rows, min(num_parts, max(num_rows, 1)))]
        parts = []
        for first, last in itertools.pairwise(ends):
            server = min(self._servers, key=self.nbytes.__getitem__)
            self.nbytes[server] += (last - first) * itemsize
            parts.append(ValuePart(server, first, last))
        return parts


_COUNT, _HOLDER, _STEPS, _TICKETS, _TURN, _NUMBERS = 0, 1, 2, 3, 4, 8


AWAY = np.iinfo(np.int64).max
"""Clock of a worker that is excluded from the staleness bound."""


BACK = -1
"""Clock number that restores the clock before `AWAY`."""


Change = Callable[[np.ndarray], object]
"""A function that changes a flat value in place."""


class ShmValue:
    """A part of a key in a node's shared memory; every rank of the node must make it, in the same order.

    Args:
        name: name of the key in errors.
        memory: shared memory of the node.
        locks: locks of the node.
        lock: number of this part's lock.
        count: number of elements.
        dtype: dtype of the key.
        num_workers: number of clocks.
    """

    def __init__(
        self, name: str, memory: NodeMemory, locks: NodeLocks, lock: int, count: int, dtype: np.dtype, num_workers: int
    ) -> None:
        self.name = name
        self.flat = memory.alloc((count,), dtype)
        """The value, shape ``(count,)``."""
        self.states: dict[str, np.ndarray] = {}
        """Optimizer states by name, shape ``(count,)``."""
        self.clocks = memory.alloc((num_workers,), np.int64)
        """Number of pushes of each worker, or `AWAY`."""
        self._clocks_before = memory.alloc((num_workers,), np.int64)
        self._numbers = memory.alloc((_NUMBERS,), np.int64)
        self.steps = self._numbers[_STEPS : _STEPS + 1]
        """Number of updates by the optimizer, shape ``(1,)``."""
        self._memory, self._locks, self._lock = memory, locks, lock

    @property
    def turn(self) -> int:
        """Ticket of the next operation."""
        return int(self._numbers[_TURN])

    def ticket(self) -> int:
        """Draw the next ticket, which orders the operations on a key of several parts in the same way on all parts."""
        with self._locks.hold(self._lock):
            self._numbers[_TICKETS] += 1
            return int(self._numbers[_TICKETS]) - 1

    def may_push(self, worker: int, staleness: int) -> bool:
        """Return whether a worker leads by at most ``staleness`` pushes, or was excluded."""
        clock = int(self.clocks[worker])
        return clock == AWAY or clock - int(self.clocks.min()) <= staleness

    def behind(self, worker: int, staleness: int) -> list[int]:
        """Return the workers that are more than ``staleness`` pushes behind a worker."""
        return np.flatnonzero(self.clocks < self.clocks[worker] - staleness).tolist()

    def tick(self, worker: int) -> None:
        """Count a push of a worker."""
        if self.clocks[worker] == AWAY:  # back again: continue from the slowest worker's clock
            clocks = self.clocks[self.clocks != AWAY]
            self.clocks[worker] = clocks.min() if clocks.size else 0
        self.clocks[worker] += 1

    def set_clock(self, worker: int, number: int) -> None:
        """Set a worker's clock to 0 or `AWAY`, or with `BACK` to its value before `AWAY`."""
        if number == BACK and self.clocks[worker] == AWAY:
            self.clocks[worker] = self._clocks_before[worker]
        elif number != BACK:
            if self.clocks[worker] != AWAY:
                self._clocks_before[worker] = self.clocks[worker]
            self.clocks[worker] = number

    def change(self, change: Change, rank: int, ticketed: bool = False) -> int:
        """Apply a push under the lock, and return the new version.

        Raises:
            HpcdpError: a rank died during an earlier change.
        """
        numbers = self._numbers
        with self._locks.hold(self._lock):
            try:
                self._check()
                numbers[_HOLDER] = rank
                numbers[_COUNT] += 1
                try:
                    change(self.flat)
                except BaseException:
                    numbers[_COUNT] -= 1
                    raise
                numbers[_COUNT] += 1
            finally:
                numbers[_TURN] += ticketed
            return int(numbers[_COUNT]) // 2

    def update(self, rule: Optimizer, received: np.ndarray, flat: np.ndarray) -> None:
        """Apply an optimizer's rule; to be called within `change`."""
        self.steps += 1
        try:
            apply_rule(rule, flat, received, self.states, int(self.steps[0]))
        except BaseException:
            self.steps -= 1
            raise

    def read(self, take: Change, ticketed: bool = False) -> int:
        """Call ``take(flat)``, which only reads, under the shared lock, and return the version that it sees.

        Raises:
            HpcdpError: as `change`.
        """
        with self._locks.hold(self._lock, shared=not ticketed):
            try:
                self._check()
                take(self.flat)
                return int(self._numbers[_COUNT]) // 2
            finally:
                self._numbers[_TURN] += ticketed

    def write(self, place: np.ndarray, values: Any) -> None:
        """Set `flat`, without a new version, or one of `states` or `steps`."""
        with self._locks.hold(self._lock):
            place[...] = values

    def keep_states_of(self, rule: Optimizer) -> None:
        """Allocate a rule's state, which is initially zero; every rank of the node must call."""
        self.steps[:] = 0
        like = new_state(rule, self.flat[:0])
        self.states = {name: self._memory.alloc((self.flat.size,), like[name].dtype) for name in rule.state_names()}

    def _check(self) -> None:
        if self._numbers[_COUNT] % 2:
            raise HpcdpError(
                "key-value store", where=self.name, expected="a complete value",
                got=f"a partly changed value: rank {self._numbers[_HOLDER]} died during its push",
                remedy="start again from the last checkpoint",
            )  # fmt: skip


MOST_STEPS = 1 << 53
_INT64 = np.iinfo(np.int64)
_DEATH_CHECK_S = 0.5
"""Seconds between two checks for dead workers by a worker that waits."""

Described = tuple[Key, tuple[int, ...], str]
"""Key, shape and dtype."""


@dataclass
class Item:
    """A key of an asynchronous store."""

    number: int
    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype
    width: int
    """Elements of a row; rows are not split between parts."""
    parts: list[ValuePart]
    cells: list[ShmValue | None]
    """Shared values of the parts; None for a part on another node."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def in_order(self) -> bool:
        """True if operations draw tickets, so that they take effect in one order on all parts."""
        return len(self.parts) > 1


class Table:
    """All keys of a store; every process makes it, and calls `make`, `overwrite`, `find_updater` and `compress`.

    Args:
        group: workers, then servers.
        num_workers: number of workers.
        staleness: number of pushes of a key by which a worker may lead; None: unbounded.
    """

    def __init__(self, group: World, num_workers: int, staleness: int | None) -> None:
        self.group, self.num_workers, self.staleness = group, num_workers, staleness
        memory = Pool(group.node_memory)
        shares = memory.size > 1
        everyone = group.comm.allgather_json(group.node if shares else -1 - group.rank)
        self.homes: list[int] = everyone
        """Home of each rank: ranks with the same home share memory."""
        self.own_home = everyone[group.rank]
        servers = range(num_workers, group.size) if group.size > num_workers else range(num_workers)
        self.servers = list(servers)
        self.placement = Placement(self.servers, splits=len({everyone[rank] for rank in servers}) > 1)
        self.items: dict[Key, Item] = {}
        self.by_number: list[Item] = []
        self.updater: Updater | None = None
        self.schedule: Schedule | None = None
        """Learning rate schedule of the updater as it was set; None for a number."""
        self.schedules: dict[int, Schedule] = {}
        """Schedules that workers of other nodes have assigned since, by rank."""
        self.compression: Compression | None = None
        self._memory = memory
        self._locks = NodeLocks(group.node_comm if shares else None)
        self._num_locks = 0
        self.neighbors: list[int] = group.node_comm.allgather_json(group.rank) if shares else [group.rank]
        self.strangers: Communicator | None = None
        """Communicator with other nodes, which records dead ranks; None on one node."""
        self._last_check = 0.0
        self._left = memory.alloc((memory.size,), np.int64)

    def make(self, described: Sequence[Described], values: Sequence[np.ndarray]) -> None:
        """Make keys with rank 0's ``values``; the arrays of other ranks are overwritten."""
        self._broadcast(values)
        for (key, shape, dtype), value in zip(described, values, strict=True):
            kind = np.dtype(dtype)
            width = max(1, math.prod(shape[1:]))
            parts = self.placement.place(math.prod(shape), kind.itemsize, width)
            cells = [self._cell(key, part, kind) if self._is_near(part) else None for part in parts]
            item = Item(len(self.by_number), key, tuple(shape), kind, width, parts, cells)
            self._assign(item, value)
            self.items[key] = item
            self.by_number.append(item)
            self._keep_states(item)
        self.group.comm.barrier()

    def overwrite(self, keys: Sequence[Key], values: Sequence[np.ndarray]) -> None:
        """Overwrite keys by rank 0's ``values``; the arrays of other ranks are overwritten."""
        self._broadcast(values)
        for key, value in zip(keys, values, strict=True):
            self._assign(self.items[key], value)
        self.group.comm.barrier()

    def _broadcast(self, values: Sequence[np.ndarray]) -> None:
        for value in values:
            self.group.comm.native_broadcast(value.reshape(-1).view(np.uint8), 0)

    def _assign(self, item: Item, value: np.ndarray) -> None:
        for part, cell in zip(item.parts, item.cells, strict=True):
            if cell is not None and self._memory.rank == 0:
                cell.write(cell.flat, value.reshape(-1)[part.first : part.last])

    def _is_near(self, part: ValuePart) -> bool:
        return self.homes[part.server] == self.own_home

    def _cell(self, key: Key, part: ValuePart, dtype: np.dtype) -> ShmValue:
        self._num_locks += 1
        count = part.last - part.first
        return ShmValue(f"key {key!r}", self._memory, self._locks, self._num_locks, count, dtype, self.num_workers)

    def find_updater(self, find: Callable[[], Updater]) -> None:
        """Set the updater that ``find()`` returns, and reset optimizer states; every process must call.

        Raises:
            ConfigError: ``find()`` raised on a process; on all of them.
        """
        comm = self.group.comm
        try:
            updater = on_every_rank(comm, find)
        except ConfigError as error:
            if error.rank is not None:  # a rank of the group of workers and servers
                error.operation, error.rank = f"{short_name_of(error.rank, self.num_workers)}: {error.operation}", None
            raise
        self._set_updater(updater)
        comm.barrier()

    def compress(self, compression: Compression | None) -> None:
        """Set the compression of later pushes; every process must call."""
        self.compression = compression
        self.group.comm.barrier()

    def _set_updater(self, updater: Updater) -> None:
        self.updater, self.schedules, self.schedule = updater, {}, None
        if isinstance(updater, ByOptimizer):
            flat, rule = np.zeros(1, np.float32), updater.optimizer
            if isinstance(rule.lr, Schedule):
                self.schedule = copy.deepcopy(rule.lr)
            # Compile the rule here, instead of in the first push under a key's lock.
            rule.update(flat, np.zeros_like(flat), rule.init_state(flat), step=1)
        for item in self.by_number:
            self._keep_states(item)

    def _keep_states(self, item: Item) -> None:
        if isinstance(self.updater, ByOptimizer):
            for cell in item.cells:
                if cell is not None:
                    cell.keep_states_of(self.updater.optimizer)

    def change(self, item: Item, part: int, received: np.ndarray, rate: Rate) -> Callable[[np.ndarray], object]:
        """Return the function that applies a push to the flat value of a part on this node."""
        updater, cell = self.updater, item.cells[part]
        assert cell is not None
        if isinstance(updater, ByOptimizer):
            rule = copy.copy(updater.optimizer)  # a copy, because this rank's program may assign another rate
            rule.lr = rate
            return lambda flat: cell.update(rule, received, flat)
        assert isinstance(updater, ByFunction)
        shape = (-1,) if item.in_order else item.shape
        return lambda flat: updater.update(item.key, received.reshape(shape), flat.reshape(shape))

    def rate(self, worker: int, sent: float) -> Rate:
        """Return the learning rate of a push from another node: ``sent``, or the worker's schedule where that is NaN.

        Raises:
            MismatchError: the worker has sent neither.
        """
        if not math.isnan(sent) or not isinstance(self.updater, ByOptimizer):
            return sent
        schedule = self.schedules.get(worker, self.schedule)
        if schedule is None:
            raise MismatchError("push", where=f"rank {worker}", expected="a learning rate", got="none")
        return schedule

    def decoded(self, item: Item, part: int, codes: np.ndarray) -> np.ndarray:
        """Return the decoded array of a part's codes."""
        first, last = item.parts[part][1:]
        out = np.empty(last - first, item.dtype)
        assert self.compression is not None
        self.compression.codec.decode(codes, out)
        return out

    def may_go_on(self, cell: ShmValue, worker: int) -> bool:
        """Return whether the staleness bound lets a worker push now."""
        if self.staleness is None or cell.may_push(worker, self.staleness):
            return True
        self._exclude_dead()
        return cell.may_push(worker, self.staleness)

    def _exclude_dead(self) -> None:
        """Exclude dead workers from the staleness bound; checks at most every `_DEATH_CHECK_S`."""
        now = time.monotonic()
        if now - self._last_check > _DEATH_CHECK_S:
            self._last_check = now
            lost = set() if self.strangers is None else self.strangers.lost
            for rank in lost.union(self.gone()):
                if rank < self.num_workers:
                    self.set_clocks(rank, AWAY)

    def draw(self, cell: ShmValue, worker: int, pushes: bool) -> int:
        """Return a ticket, and count a push; to be called when `may_go_on`."""
        if pushes and self.staleness is not None:
            cell.tick(worker)
        return cell.ticket()

    def state_name(self, cell: ShmValue, message: Message) -> str:
        """Return the name of the optimizer state that a message addresses."""
        if message.which >= len(cell.states):
            got = f"number {message.which}"
            raise MismatchError("key-value store message", expected=f"one of {len(cell.states)} states", got=got)
        return sorted(cell.states)[message.which]

    def write_state(self, cell: ShmValue, message: Message) -> None:
        """Execute a message of kind WRITE_STATE."""
        payload, flat = message.payload, cell.flat
        if message.which == NO_STATE:
            if not 0 <= message.number < MOST_STEPS:
                raise MismatchError("write a state", expected=f"0 to {MOST_STEPS} updates", got=message.number)
            cell.write(cell.steps, message.number)
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
            cell.write(cell.states[name], values)

    def set_clocks(self, worker: int, number: int) -> None:
        """Set a worker's clock of all keys whose first part is on this node: see `ShmValue.set_clock`."""
        for item in self.by_number:
            cell = item.cells[0]
            if cell is not None:
                cell.set_clock(worker, number)

    def leave(self) -> None:
        """Record that this process ends regularly."""
        self._left[self._memory.rank] = 1

    def gone(self) -> list[int]:
        """Return the ranks of this node that have died."""
        return [self.neighbors[local] for local in self._locks.gone() if not self._left[local]]


def take(item: Item, cell: ShmValue, rank: int, count: int) -> int:
    """Return the integer of a key, and add ``count`` to it.

    Raises:
        ConfigError: the key is not one int64, or the sum overflows.
    """
    if item.dtype != np.int64 or item.count != 1:
        got = f"{item.shape} {item.dtype}"
        raise ConfigError("take", where=f"key {item.key!r}", expected="a key of one int64", got=got)
    before = [0]

    def add(flat: np.ndarray) -> None:
        before[0] = int(flat[0])
        following = before[0] + count
        if not _INT64.min <= following <= _INT64.max:
            raise ConfigError("take", where=f"key {item.key!r}", expected="a sum that int64 holds", got=following)
        flat[0] = following

    cell.change(add, rank)
    return before[0]


def no_updater(operation: str) -> ConfigError:
    """Return the error of a push without an updater, with which the last push would win in an undefined order."""
    return ConfigError(
        operation, where="dist_async", expected="a store with an updater", got="none",
        remedy="call set_optimizer(hpcdp.optim.SGD(lr=0.1)) or set_updater(function) first, on all ranks",
    )  # fmt: skip


def updater_of(described: dict[str, Any]) -> Updater:
    """Return the updater that a worker has described: an optimizer by its config, a function by its import path.

    Raises:
        ConfigError: the function cannot be imported.
    """
    if "optimizer" in described:
        return ByOptimizer(from_config(described["optimizer"]))
    module, _, path = described["function"].partition(":")
    try:
        function: Any = importlib.import_module(module)
        for name in path.split("."):
            function = getattr(function, name)
    except (Exception, SystemExit) as error:  # a script that runs when it is imported may raise anything
        reason = str(error) if isinstance(error, ImportError | AttributeError) else summary(error)
        raise ConfigError(
            "set_updater", expected="a function that servers can import", got=f"{module}.{path}: {reason}",
            remedy="move it to a module beside your script",
        ) from None  # fmt: skip
    return ByFunction(function)


def require_same_by_name(function: Function) -> None:
    """Raise `ConfigError` where servers, which get only a function's name, would import another function."""
    module, _, path = name_of(function).partition(":")
    imported: Any = sys.modules.get(module)
    for name in path.split("."):
        imported = getattr(imported, name, None)
    if imported is not None and imported is not function:  # servers report a name that cannot be imported
        raise ConfigError(
            "set_updater", expected="a function that servers can import", got=f"a function other than {module}.{path}",
            remedy="pass a module's function under its own name: no method, partial or wrapped function",
        )  # fmt: skip


REPORTED_S = 5.0
"""Seconds after which a worker that waits reports the slower workers, once a push."""


class Delay:
    """The delay of one push by the staleness bound.

    Args:
        cell: the first part of the key.
        worker: the pushing worker.
    """

    def __init__(self, table: Table, cell: ShmValue, worker: int) -> None:
        self._table, self._cell, self.worker = table, cell, worker
        self._began, self._reported = time.monotonic(), False
        self.held_s = 0.0
        """Seconds of waiting so far."""

    def may_go_on(self) -> bool:
        """Return whether the bound lets the push take effect."""
        may = self._table.may_go_on(self._cell, self.worker)
        if not may or self.held_s:
            self.held_s = time.monotonic() - self._began
        return may

    def to_report(self) -> list[int]:
        """Return the slower workers, once, after `REPORTED_S`; otherwise an empty list."""
        if self._reported or self.held_s < REPORTED_S:
            return []
        self._reported = True
        return self._cell.behind(self.worker, self._table.staleness or 0)


class Requests:
    """The handlers of requests for the keys of ``table`` in this rank's memory."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def answer(self, source: int, message: Message) -> Attempt:
        """Return the function that tries to answer a request of another rank.

        Raises:
            HpcdpError: the request addresses a part that is not here, or does not fit it.
        """
        kind = message.kind
        if kind is MessageKind.GONE:
            return lambda: Message(MessageKind.DONE, payload=np.array(self.table.gone(), np.int64))
        if source >= self.table.num_workers:
            raise MismatchError(
                "key-value store message", expected="a worker's request", got=f"a request of rank {source}, a server"
            )
        if kind is MessageKind.CLOCK:
            return lambda: self._set_clocks(source, message.number)
        if kind is MessageKind.SCHEDULE:  # set at once, because attempts at later pushes may precede this one
            self.table.schedules[source] = _schedule(message.text())
            return lambda: Message(MessageKind.DONE)
        item, cell = self._addressed(message)
        if kind is MessageKind.TICKET:
            delay = Delay(self.table, cell, source)
            return lambda: self._ticket(cell, source, bool(message.number), delay)
        if kind is MessageKind.PASS:
            if self.table.staleness is not None:
                cell.tick(source)
            return lambda: Message(MessageKind.DONE)
        if kind is MessageKind.TAKE:
            return lambda: Message(MessageKind.DONE, number=take(item, cell, self.table.group.rank, message.number))
        if kind is MessageKind.WRITE_STATE:
            return lambda: self._write_state(cell, message)
        if kind is MessageKind.READ_STATE:
            state = None if message.which == NO_STATE else cell.states[self.table.state_name(cell, message)].copy()
            return lambda: Message(MessageKind.DONE, number=int(cell.steps[0]), payload=state)
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
            nbytes = -1 if self.table.compression is None else self.table.compression.codec.nbytes(count, item.dtype)
            if payload.nbytes != nbytes:
                expected = "no codes" if nbytes < 0 else f"{nbytes} bytes of codes"
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
        """Return the rows of the part that a pull requests; None: all."""
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

    def _write_state(self, cell: ShmValue, message: Message) -> Message:
        self.table.write_state(cell, message)
        return Message(MessageKind.DONE)

    def _set_clocks(self, source: int, number: int) -> Message:
        if number not in (0, AWAY, BACK):
            expected = f"0, {AWAY} or {BACK}"
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
