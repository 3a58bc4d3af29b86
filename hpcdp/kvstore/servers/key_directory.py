"""The keys of a server, their versions and their staleness.

The keys of an asynchronous store as all its processes know them.

Workers and servers hold the same table. What lies in memory that a rank shares it reads and changes itself; for the
rest it asks the server that keeps the part.

Bounded delay: a push that leads by too much waits, wherever its key lies, and its worker is told for whom.

Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...comm import Communicator, World
from ...comm.shared_memory import NodeLocks
from ...compression import Compression
from ...errors import ConfigError, MismatchError
from ...optim import Schedule, from_config
from ..arguments import Key
from ..sync_rounds import Pool
from ..updaters import ByFunction, ByOptimizer, Function, Rate, Updater, name_of, summary
from .protocol import AWAY, NO_STATE, VALUE, Message, Placement, ShmValue, ValuePart

MOST_STEPS = 1 << 53
_INT64 = np.iinfo(np.int64)
_LOOK_S = 0.5
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
        if now - self._looked > _LOOK_S:
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
