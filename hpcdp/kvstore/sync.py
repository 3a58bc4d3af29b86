"""A store over the ranks of a world in which every push is merged with those of all others: ``dist_sync``.

There are no servers. The ranks of a node hold a key's value once, in memory that they share, and beside it a row for
each of them to push to. Each owns a part of the columns, sums it over the rows, then with those of other nodes that own
the same part (a rail), and updates its part of the value: a parameter server whose servers are the workers (see
`gradients`, whose buckets, lane and rails these are). How far each has got with a key is posted in that memory, too.

Source: Li et al., "Scaling distributed machine learning with the parameter server", 2014, for what a push means;
Rajbhandari et al., "ZeRO", 2020, for the owners.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .. import kernels
from ..arrays import Array, is_host
from ..collectives.progress import Progress, Steps, Until
from ..comm import World
from ..comm.agreement import on_every_rank, on_rank_0, require_same
from ..comm.communicator import join_parts
from ..comm.shared import Milestones
from ..engine import Variable
from ..errors import ConfigError, HpcdpError, UnsupportedError
from ..gradients.bucket import Bucket
from ..gradients.buckets import Layout, plan
from ..gradients.lane import UPDATE, Lane, Turn
from ..gradients.rail import Rail
from ..gradients.reducer import weakly
from ..optim import Optimizer
from .arguments import Key, merged
from .store import Entry, KVStore
from .updaters import Function, Updater

T = TypeVar("T")
_FILLED, _SUMMED, _DONE, _PHASES = 1, 2, 3, 3  # what is posted for each key in each round of pushes


@dataclass
class _Rows:
    """Beside a key's value in its node: the rows that are pushed to, and how far their ranks are."""

    layout: Layout
    bucket: Bucket
    flat: np.ndarray
    """The value, as long as a row."""
    milestones: Milestones
    failed: np.ndarray
    """For every rank of the node the last round whose update failed there."""
    updates_alone: int
    """Which rank of the node updates where an update needs the whole value."""
    rounds: int = 0
    """Pushes of this rank; that of the same number of every rank makes a round."""


class SyncStore(KVStore):
    """See `KVStore`; every rank of ``world`` must make it, and its keys, and as many pushes of each key.

    Raises:
        ConfigError: several nodes, where no thread beside the main one may send messages.
    """

    def __init__(self, kind: str, world: World) -> None:
        if world.num_nodes > 1 and not world.concurrent:
            raise ConfigError("kvstore", where=kind, expected="an MPI library with MPI_THREAD_MULTIPLE", got="less")
        self._of_world = Lane.of(world)
        super().__init__(kind, self._of_world.engine, UPDATE)
        self._world, self._memory = world, world.node_memory
        self._watchdog = Progress.of(world).watchdog
        self._reduce = kernels.load("reduce")
        serial = world.kept["number of stores"] = world.kept.get("number of stores", 0) + 1
        self._rail: Rail | None = None
        if world.num_nodes > 1 and world.rail_comm is not None:
            self._rail = Rail(world.rail_comm.duplicate(), zlib.crc32(f"store {serial}".encode()), [], None)
        self._rows: dict[Key, _Rows] = {}
        self._held_nbytes = [0] * self._memory.size
        self._neighbours = world.node_comm.allgather_json(world.rank)
        world.endings.append(weakly(self.wait))  # a rank that left earlier would leave others waiting

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def num_workers(self) -> int:
        return self._world.size

    def barrier(self) -> None:
        self.wait()
        self._world.barrier()

    def set_updater(self, updater: Function) -> None:
        named = f"{getattr(updater, '__module__', '')}.{getattr(updater, '__qualname__', updater)}"
        require_same(self._world.comm, "set_updater", [named], "pass the same function on all ranks")
        super().set_updater(updater)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        config = optimizer.config() if isinstance(optimizer, Optimizer) else repr(optimizer)
        require_same(self._world.comm, "set_optimizer", [f"optimizer {config}"], "pass the same on all ranks")
        super().set_optimizer(optimizer)

    def _agreed(self, check: Callable[[], T]) -> T:
        return on_every_rank(self._world.comm, check)

    def _make(self, values: dict[Key, Array]) -> None:
        items = [f"key {key!r} {tuple(value.shape)} {value.dtype}" for key, value in values.items()]
        require_same(self._world.comm, "init", items, "make the same keys in the same order on all ranks")
        for key, value in values.items():
            if not is_host(value):
                raise UnsupportedError("init", where=f"key {key!r}", expected="a NumPy array", got="one on a device")
            first = np.array(value, order="C")
            self._world.comm.native_broadcast(first, 0)
            self._entries[key] = self._new(key, first)
        self._world.barrier()

    def _new(self, key: Key, value: np.ndarray) -> Entry:
        memory, number = self._memory, len(self._entries)
        name = f"key {key!r}"
        layout = plan([(name, value.shape, value.dtype)])
        (count,), (slot,) = layout.counts, layout.slots
        rows = memory.alloc((memory.size, count), value.dtype)
        flat = memory.alloc((count,), value.dtype)
        if memory.rank == 0:
            flat[: value.size] = value.reshape(-1)
        num_parts = self._world.num_rails
        part = layout.shard(0, num_parts, memory.rank) if memory.rank < num_parts else (0, 0)
        alone = min(range(memory.size), key=self._held_nbytes.__getitem__)
        self._held_nbytes[alone] += value.nbytes
        failed = memory.alloc((memory.size,), np.int64)
        bucket = Bucket(number, [slot], rows, memory.rank, part)
        self._rows[key] = _Rows(layout, bucket, flat, Milestones(memory), failed, alone)
        return Entry(key, flat[: value.size].reshape(value.shape), self._engine.variable(name))

    def _push(self, entry: Entry, arrays: list[Array], priority: int) -> None:
        rows, value = self._rows[entry.key], merged(arrays)
        rows.rounds += 1
        updater, number = self._updater.now(), rows.rounds

        def round_of(turn: Turn) -> Steps:
            return self._round(entry, rows, value, updater, number, turn)

        self._of_world.launch(round_of, [entry.variable], priority, f"push of {entry.variable.name}")

    def _round(self, entry: Entry, rows: _Rows, value: Array, updater: Updater, number: int, turn: Turn) -> Steps:
        """Merge this rank's push with those of all others, and update; it has ended when the node's value is new."""
        bucket, milestones, me = rows.bucket, rows.milestones, self._memory.rank
        first, last = bucket.shard
        bucket.mine[: value.size] = value.reshape(-1)
        yield self._everyone(milestones, _PHASES * number + _FILLED)
        if last > first and self._memory.size > 1:
            self._reduce.combine_into(bucket.words, first, last, me, self._reduce.SUM)
        if self._rail is not None:
            yield from self._rail.sum(bucket, turn)
        failure: Exception | None = None
        try:
            if updater.by_parts:
                updater.update(entry.key, bucket.mine[first:last], rows.flat[first:last])
            else:
                yield self._everyone(milestones, _PHASES * number + _SUMMED)
                if me == rows.updates_alone:
                    updater.update(entry.key, self._whole(entry, bucket), entry.stored)
        except Exception as error:
            failure, rows.failed[me] = error, number
        yield self._everyone(milestones, _PHASES * number + _DONE)
        if failure is not None:
            raise failure
        failing = [self._neighbours[local] for local in np.flatnonzero(rows.failed == number)]
        if failing:
            raise HpcdpError(
                "push", where=entry.variable.name, expected="an update", got=f"an error on rank {failing[0]}"
            )

    def _everyone(self, milestones: Milestones, milestone: int) -> list[Until]:
        """Post that this rank has got so far; a stage that ends when all of the node's have."""
        milestones.post(milestone)
        return [Until(lambda: milestones.reached(milestone))]

    def _whole(self, entry: Entry, bucket: Bucket) -> np.ndarray:
        """The sum of a round, from the parts in the rows of the node's ranks."""
        whole = np.empty(bucket.mine.size, bucket.mine.dtype)
        for local in range(self._world.num_rails):
            part = slice(*self._rows[entry.key].layout.shard(0, self._world.num_rails, local))
            whole[part] = bucket.rows[local, part]
        return whole[: entry.stored.size].reshape(entry.stored.shape)

    def _wait_for(self, entry: Entry, variable: Variable) -> None:
        rows = self._rows[entry.key]

        def behind() -> list[int]:
            return rows.milestones.behind(_PHASES * rows.rounds + _FILLED)

        with self._watchdog.watching(f"wait for {variable.name}", behind=behind):
            self._of_world.wait(variable)

    def _own_part(self, entry: Entry, whole: Array) -> Array:
        rows = self._rows[entry.key]
        padded = np.zeros(rows.flat.size, whole.dtype)
        padded[: whole.size] = whole.reshape(-1)
        return padded[slice(*rows.bucket.shard)]

    def _joined(self, entry: Entry, part: Array) -> Array:
        rows = self._rows[entry.key]
        padded = np.zeros(rows.flat.size, part.dtype)
        if self._rail is None or self._rail.comm.rank == 0:
            padded[slice(*rows.bucket.shard)] = part
        join_parts(padded, self._world.comm)
        return padded[: entry.stored.size].reshape(entry.stored.shape)

    def _by_first(self, write: Callable[[], None]) -> None:
        on_rank_0(self._world.comm, write)
