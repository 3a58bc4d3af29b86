"""``dist_sync``, a store over the ranks of a world that merges the pushes of all ranks.

There are no servers. The ranks of a node hold one copy of a key's value in shared memory, and a row for each rank's
push. Each rank owns a part of the columns: it sums this part over the rows, then over nodes with the owners of the same
part (a rail), and updates its part of the value. So the workers are the servers of a parameter server. Buckets, lanes
and rails are those of `data_parallel`. Ranks post their progress with a key in shared memory.

Source: Li et al., "Scaling distributed machine learning with the parameter server", 2014, for what a push means;
Rajbhandari et al., "ZeRO", 2020, for the owners.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import kernels
from ..comm import World
from ..comm.communicator import Steps
from ..comm.consistency import require_same
from ..comm.tasks import ProgressEngine, run_until_complete
from ..compression import Compression
from ..core.arrays import Array, to_host
from ..core.state import Part, Sharded
from ..data_parallel.buckets import Bucket
from ..data_parallel.overlap import UPDATE, CommunicationLane, SendPriority
from ..data_parallel.reductions import InterNodeReduction
from ..engine import Variable
from ..errors import ConfigError
from .arguments import Entry, Key, can_wait, carry, merged
from .store import WorldStore
from .store_state import residuals_of
from .sync_rounds import FILLED, SUMMED, Coded, DirectPushPull, Pool, RowExchange, Rows, in_one_piece
from .updaters import Replace, Updater, check_codable

_LIKE_HALVES = (np.dtype("int16"), np.dtype("uint16"))
"""Dtypes of keys whose elements kernels would treat as 16-bit floats (`hpcdp.core.arrays.words`)."""


@dataclass(slots=True)
class _Push:
    """This rank's push in one round of a key."""

    entry: Entry
    rows: Rows
    updater: Updater
    coded: Coded | None
    """Encoder, with compression."""
    number: int = 0
    """Number of the round, set by `begin`."""
    failure: Exception | None = None
    """Error of this rank's update."""

    def begin(self) -> _Push:
        """Assign the round's number; the caller holds the key's variable, so that rounds are in order."""
        self.rows.rounds += 1
        self.number = self.rows.rounds
        return self


class SyncStore(WorldStore):
    """A store of kind ``dist_sync``; every rank of ``world`` must make it and its keys, and push each key as often.

    Raises:
        ConfigError: the world has several nodes, and only the main thread may send messages.
    """

    def __init__(self, kind: str, world: World) -> None:
        if world.num_nodes > 1 and not world.concurrent:
            raise ConfigError("kvstore", where=kind, expected="an MPI library with MPI_THREAD_MULTIPLE", got="less")
        self._of_world = CommunicationLane.of(world)
        super().__init__(kind, world, self._of_world.engine, UPDATE)
        self._memory = Pool(world.node_memory)
        self._watchdog = ProgressEngine.of(world).watchdog
        self._reduce = kernels.load("reduce")
        serial = world.kept["number of stores"] = world.kept.get("number of stores", 0) + 1
        self._name = f"pushes to store {serial}"
        self._watchdog.count(self._name, self._pushes_of)
        self._rail: InterNodeReduction | None = None
        if world.num_nodes > 1 and world.rail_comm is not None:
            self._rail = InterNodeReduction(
                world.rail_comm.duplicate(), zlib.crc32(f"store {serial}".encode()), [], None
            )
        self._rows: dict[Key, Rows] = {}
        self._direct = DirectPushPull(self._memory)
        self._exchanges: dict[Key, RowExchange] = {}
        self._coded: dict[Key, Coded] = {}
        self._held_nbytes = [0] * self._memory.size
        self._neighbours = world.node_comm.allgather_json(world.rank)
        self._members = [self._neighbours] if self._rail is None else self._rail.comm.allgather_json(self._neighbours)
        world.endings.add(self._settle)  # other ranks would wait for a rank that left earlier

    def _let_go(self) -> None:
        super()._let_go()
        self._exchanges = {}

    def _make(self, values: dict[Key, Array]) -> None:
        self._check_new(values)
        for key, value in values.items():
            self._entries[key] = self._new(key, self._of_first(value))
        self._world.barrier()

    def _of_first(self, value: Array) -> np.ndarray:
        """Broadcast rank 0's ``value``, as a new array on the host."""
        first = np.array(to_host(value), order="C")
        self._world.comm.native_broadcast(first, 0)
        return first

    def _assign(self, values: dict[Key, Array]) -> None:
        self._check_assigned(values)
        for key, value in values.items():
            self._overwrite(self._entries[key], self._of_first(value))
        self._world.barrier()

    def _overwrite(self, entry: Entry, value: np.ndarray) -> None:
        if self._memory.rank == 0:
            entry.stored[...] = value

    def _new(self, key: Key, value: np.ndarray) -> Entry:
        alone = min(range(self._memory.size), key=self._held_nbytes.__getitem__)
        self._held_nbytes[alone] += value.nbytes
        width = self._direct.width(value.dtype)
        number = len(self._entries)
        rows = Rows(self._memory, self._name, number, key, value, self._world.num_rails, alone, width)
        exchange = self._direct.exchange_of(rows) if self._world.num_nodes == 1 else None
        if exchange is not None:
            self._exchanges[key] = exchange
        self._rows[key] = rows
        self._code(key)
        return Entry(key, rows.stored, self._engine.variable(f"key {key!r}"), number=number)

    def _pushes_of(self, number: int) -> int:
        """Return the number of this rank's pushes of the key of a number."""
        entry = next((entry for entry in self._entries.values() if entry.number == number), None)
        return 0 if entry is None else entry.pushes

    def _compress(self, compression: Compression | None) -> None:
        pushes = [f"{entry.pushes} pushes of key {key!r}" for key, entry in self._entries.items()]
        remedy = "set the same on all ranks, after as many pushes"
        settings = f"compression {compression}"
        require_same(self._world.comm, "set_gradient_compression", [settings, *pushes], remedy)
        if compression is not None:
            check_codable("set_gradient_compression", ((key, entry.stored) for key, entry in self._entries.items()))
        self._compression = compression
        self._coded = {}
        for key in self._rows:
            self._code(key)

    def _code(self, key: Key) -> None:
        if self._compression is not None:
            self._coded[key] = Coded(self._compression, self._rows[key], self._memory, self._rail, self._members)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """See `KVStore.pushpull`."""
        # A fast path for the most frequent call: for short arrays, general checks take longer than the exchange.
        exchange = self._exchanges.get(key) if type(key) is int or type(key) is str else None
        target = value if out is None else out
        done = False
        if exchange is not None and type(priority) is int and isinstance(self._updater, Replace):
            done = exchange.takes(value, target) and self._at_once(self._entries[key], value, target)
        if not done:
            super().pushpull(key, value, out, priority)

    def _counted(self, entry: Entry, rows: Rows, updater: Updater) -> _Push:
        coded = self._coded.get(entry.key)
        entry.count(None if coded is None else coded.codes.sent_nbytes)
        return _Push(entry, rows, updater, coded)

    def _push(self, entry: Entry, arrays: list[Array], priority: int) -> None:
        value = np.ascontiguousarray(merged(arrays))
        push = self._counted(entry, self._rows[entry.key], self._updater.now())
        name = f"push of {entry.variable.name}"
        self._of_world.launch(lambda turn: self._round(push.begin(), value, turn), [entry.variable], priority, name)

    def _pushpull(self, entry: Entry, arrays: list[Array], targets: list[Any], priority: int) -> None:
        if len(targets) > 1 or can_wait(targets[0]):
            super()._pushpull(entry, arrays, targets, priority)
            return
        x, out = in_one_piece(arrays, targets[0])
        if not self._at_once(entry, x, out):
            super()._pushpull(entry, arrays, targets, priority)
        elif out is not targets[0]:
            targets[0][...] = out

    def _at_once(self, entry: Entry, x: np.ndarray, out: np.ndarray) -> bool:
        """Push and pull in this thread; return False, without an effect, if other work must come first.

        Args:
            entry: the key.
            x: the contiguous array to push.
            out: the contiguous array to pull to: ``x``, or one without overlap.
        """
        watchdog, failure = self._watchdog, None
        rows, updater = self._rows[entry.key], self._updater
        call = rows.label, None, rows.behind, rows.counted
        if (self._rail is not None and self._of_world.turns) or not self._engine.hold(entry.variable):
            return False
        try:
            watchdog.calls += 1
            watchdog.enter(call)
            exchange = self._exchanges.get(entry.key) if self._compression is None else None
            if exchange is None or not isinstance(updater, Replace):
                self._push_and_pull(self._counted(entry, rows, updater).begin(), exchange, x, out)
            else:
                rows.rounds += 1
                entry.pushes += 1
                if not exchange.replace(x, out):
                    self._push_and_pull(_Push(entry, rows, updater, None, rows.rounds), None, x, out)
        except BaseException as error:
            failure = error
            raise
        finally:
            watchdog.leave(call)
            self._engine.release(entry.variable, failure)
        return True

    def _push_and_pull(self, push: _Push, exchange: RowExchange | None, x: np.ndarray, out: np.ndarray) -> None:
        """Push and pull where the exchange alone does not suffice, or other ranks push in a task."""
        entry, updater = push.entry, push.updater
        push.rows.post_rate(updater.rate(entry.key))
        if exchange is not None and updater.by_parts and exchange.update(x, out, partial(self._update_part, push)):
            self._require_updated(push)
            return
        in_place = self._memory.size == 1 and push.coded is None
        if in_place and out is not x:
            out[...] = x
        run_until_complete(self._round(push, out if in_place else x, None))
        if not (in_place and isinstance(updater, Replace)):
            out[...] = entry.stored

    def _round(self, push: _Push, value: np.ndarray, turn: SendPriority | None) -> Steps:
        """Merge the pushes of all ranks, and update; the round ends when the node's value is new.

        Args:
            push: this rank's push, which has begun.
            value: a contiguous array; on a node of one rank the sum overwrites it, unless it is encoded.
            turn: waits for this task's turn to send messages; None: send at once.
        """
        rows = push.rows
        bucket = rows.bucket
        rows.post_rate(push.updater.rate(push.entry.key))
        if push.coded is not None:
            yield from push.coded.sum(value, push.number, turn)
        else:
            if self._memory.size == 1:
                bucket = rows.over(value)
            else:
                bucket.mine[: value.size] = value.reshape(-1)
                yield [rows.post(push.number, FILLED)]
                self._sum_part(bucket)
            if self._rail is not None:
                yield from self._rail.sum(bucket, turn)
        yield from self._update(push, bucket.mine)

    def _sum_part(self, bucket: Bucket) -> None:
        first, last = bucket.shard
        if bucket.rows.dtype in _LIKE_HALVES:
            bucket.mine[first:last] = bucket.rows[:, first:last].sum(axis=0, dtype=bucket.rows.dtype)
        elif last > first:
            self._reduce.combine_into(bucket.words, first, last, self._memory.rank, self._reduce.SUM)

    def _update(self, push: _Push, summed: np.ndarray) -> Steps:
        """Update by the sum of a round: ``summed`` is a row, valid in this rank's part."""
        rows = push.rows
        if push.updater.by_parts:
            self._update_part(push, summed)
        else:
            yield [rows.post(push.number, SUMMED)]
            self._try(push, lambda: self._update_alone(push, summed))
        yield [rows.post(push.number, rows.phases)]
        self._require_updated(push)

    def _update_part(self, push: _Push, summed: np.ndarray) -> None:
        own = slice(*push.rows.bucket.shard)
        self._try(push, lambda: push.updater.update(push.entry.key, summed[own], push.rows.flat[own]))

    def _update_alone(self, push: _Push, summed: np.ndarray) -> None:
        rows, stored = push.rows, push.entry.stored
        if self._memory.rank == rows.updates_alone:
            whole = summed[: rows.size] if self._memory.size == 1 else rows.whole()
            push.updater.update(push.entry.key, whole.reshape(stored.shape), stored)

    def _try(self, push: _Push, update: Callable[[], None]) -> None:
        """Call ``update``, and publish its error, which all ranks raise at the end of the round."""
        try:
            push.rows.check_rates(push.entry.variable.name, self._neighbours)
            update()
        except Exception as error:
            push.failure = error
            push.rows.fail(push.number, error)

    def _require_updated(self, push: _Push) -> None:
        if push.failure is not None:
            raise push.failure
        push.rows.check(push.number, push.entry.variable.name, self._neighbours)

    def _pull_into(self, places: list[tuple[Entry, list[Any]]], priority: int) -> None:
        later = [(entry, [to for to in targets if not self._copied(entry, to)]) for entry, targets in places]
        super()._pull_into(later, priority)

    def _copied(self, entry: Entry, target: Any) -> bool:
        """Copy a value in this thread, and return True, if no push of it is under way."""
        if can_wait(target) or not self._engine.hold(entry.variable, unless_spoilt=True):
            return False
        try:
            carry(entry.stored, target)
        finally:
            self._engine.release(entry.variable)
        return True

    def _wait_for(self, entry: Entry, variable: Variable) -> None:
        counted = self._name, entry.number
        with self._watchdog.watching(f"wait for {variable.name}", None, partial(self._behind, entry), counted):
            self._of_world.wait(variable)

    def _behind(self, entry: Entry) -> list[int]:
        """Return the ranks of the node that have pushed a key less often than this one."""
        return self._rows[entry.key].behind()

    def _held(self, entry: Entry, part: Array) -> Sharded:
        first = self._rows[entry.key].bucket.shard[0]
        copies, copy = (1, 0) if self._rail is None else (self._rail.comm.size, self._rail.comm.rank)
        parts = [Part(first, part)] if part.size else []
        return Sharded(tuple(entry.stored.shape), np.dtype(part.dtype), parts, copies, copy)

    def _values_of(self, entry: Entry) -> Sharded:
        rows = self._rows[entry.key]
        return self._held(entry, rows.flat[slice(*rows.bucket.shard)])

    def _residuals_of(self, entry: Entry) -> list[Part]:
        coded = self._coded.get(entry.key)
        return residuals_of(None if coded is None else coded.codes)

    def _own_part(self, entry: Entry, whole: Array) -> Array:
        rows = self._rows[entry.key]
        padded = np.zeros(rows.flat.size, whole.dtype)
        padded[: whole.size] = whole.reshape(-1)
        return padded[slice(*rows.bucket.shard)]
