"""``dist_sync``, a store over the ranks of a world that merges the pushes of all ranks.

There are no servers. The ranks of a node hold one copy of a key's value in shared memory, and a row for each rank's
push. Each rank owns a part of the columns: it sums this part over the rows, then over nodes with the owners of the same
part (a rail), and updates its part of the value. So the workers are the servers of a parameter server. Buckets, lanes
and rails are those of `data_parallel`. Ranks post their progress with a key in shared memory.

- `Pool` allocates many short arrays from a few blocks of node memory. Each allocation of the system costs messages
  between the node's ranks and a memory mapping, of which a process may have about 65,000 (vm.max_map_count): with four
  or five mappings for each key, 13,000 keys were too many.
- `Rows`: rows of a key that ranks push to, and milestones of a round: arrived (posted first by `RowExchange`), row
  filled, part summed, value new.
- `CompressedPushes`: a round with compression. Each rank encodes its push, part by part. The owner of a part exchanges
  its node's codes with the owners of that part on other nodes, and sums the decoded pushes of all ranks in rank order.
  So all nodes get the same bits, and nothing is encoded twice. Each rank sends (nodes - 1) w bytes for w bytes of one
  rank's codes. Source: MXNet's kvstore, where workers encode, and servers decode and add.
- `DirectPushPull`, `RowExchange`: a push and its pull in one, in the calling thread. As in an allreduce, data moves by
  a staging buffer: a rank stages the n - 1 of n parts that others own, reads their n - 1 contributions to its own part,
  writes the sum to the buffer, its output and its part of the value, and copies the other sums. It waits once for each
  piece of a part, until all ranks have arrived (none reads the last value any more), and until all sums are complete.
  With an updater, owners update their parts first, and stage the new values.

Source: Li et al., "Scaling distributed machine learning with the parameter server", 2014, for what a push means;
Rajbhandari et al., "ZeRO", 2020, for the owners.
"""

from __future__ import annotations

import math
import threading
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
from ..comm.progress import ProgressEngine, run_until_complete
from ..comm.shared_memory import NodeMemory, ProgressCounters
from ..compression import Compression
from ..core.arrays import Array, to_host
from ..core.state import Part, Sharded
from ..data_parallel.bucket_layout import Bucket, plan
from ..data_parallel.cpu_reduction import InterNodeReduction, sum_rows
from ..data_parallel.overlap import UPDATE, CommunicationLane, SendPriority
from ..engine import Variable
from ..errors import ConfigError, HpcdpError, MismatchError
from .arguments import Entry, Key, can_wait, carry, merged
from .store import WorldStore, residuals_of
from .updaters import Codes, Replace, Updater, summary

BLOCK_NBYTES, LONGEST_NBYTES = 1 << 20, 64 << 10
"""Bytes of a block, whose untouched pages take no memory, and most bytes of an array in one."""


_ALIGNED_NBYTES = 128
"""Alignment of two cache lines, which some CPUs fetch together: ranks spin on some of these arrays."""


class Pool:
    """A `NodeMemory` that allocates short arrays from blocks of ``memory``, and frees none."""

    def __init__(self, memory: NodeMemory) -> None:
        self.rank, self.size, self.patience = memory.rank, memory.size, memory.patience
        self.failure: HpcdpError | None = None
        self.meanwhile: Callable[[], object] = list
        self._memory = memory
        self._block, self._used = np.empty(0, np.uint8), 0

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """See `NodeMemory.alloc`."""
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes > LONGEST_NBYTES:
            return self._memory.alloc(shape, kind)
        if self._used + nbytes > self._block.size:
            self._block, self._used = self._memory.alloc((BLOCK_NBYTES,), np.uint8), 0
        first = self._used
        self._used += -(-nbytes // _ALIGNED_NBYTES) * _ALIGNED_NBYTES
        return self._block[first : first + nbytes].view(kind).reshape(shape)

    def check(self) -> None:
        """See `NodeMemory.check`."""
        self._memory.check()


COME, FILLED, SUMMED = 1, 2, 3


_LEAST_PHASES = 4


_FAILED = np.dtype([("round", np.int64), ("why", "S200")])


class Rows:
    """The rows and milestones of a key; every rank of the node must make it.

    Args:
        memory: shared memory of the node.
        store: name under which `Watchdog.count` counts pushes to the store.
        number: number of the key in its store.
        key: the key.
        value: initial value.
        num_parts: number of ranks of the node that own a part.
        updates_alone: local rank that applies an update of the whole value.
        width: elements of a part in one piece of a `RowExchange`.
    """

    def __init__(
        self,
        memory: NodeMemory,
        store: str,
        number: int,
        key: Key,
        value: np.ndarray,
        num_parts: int,
        updates_alone: int,
        width: int,
    ) -> None:
        layout = plan([(f"key {key!r}", value.shape, value.dtype)])
        (count,), (slot,) = layout.counts, layout.slots
        self.ends = np.empty(memory.size + 1, np.int64)
        """Boundaries of the parts of the node's ranks, at cache lines, at most the number of elements."""
        parts = [layout.shard(0, num_parts, part)[1] for part in range(num_parts)]
        self.ends[:] = [0, *(min(end, value.size) for end in parts), *[value.size] * (memory.size - num_parts)]
        part = int(self.ends[memory.rank]), int(self.ends[memory.rank + 1])
        self.bucket = Bucket(number, [slot], memory.alloc((memory.size, count), value.dtype), memory.rank, part)
        self.flat = memory.alloc((count,), value.dtype)
        """The flat value, padded to the length of a row."""
        self.stored = self.flat[: value.size].reshape(value.shape)
        if memory.rank == 0:
            self.stored[...] = value
        self.pieces = max(1, -(-int(np.diff(self.ends).max()) // width))
        self.phases = max(_LEAST_PHASES, 2 * self.pieces + 1)
        """Milestones of a round; the last one means that the value is new."""
        self.milestones = ProgressCounters(memory)
        self.counters = self.milestones.counters()
        self.label = f"pushpull of key {key!r}"
        self.counted = store, number
        self.updates_alone = updates_alone
        self.rounds = 0
        """Number of pushes of this rank."""
        self._memory = memory
        failed = memory.alloc((memory.size,), _FAILED)
        self._failed, self._reasons = failed["round"], failed["why"]
        """Last round whose update failed on each rank of the node, and the error."""
        self._rates = memory.alloc((memory.size,), np.float64)
        """Learning rate of the round on each rank of the node, valid from the rank's first post."""

    @property
    def size(self) -> int:
        """Number of elements of the value."""
        return int(self.ends[-1])

    def behind(self) -> list[int]:
        """Return the ranks of the node that have pushed less often than this one."""
        return self.milestones.behind(self.rounds * self.phases + COME)

    def post(self, number: int, phase: int) -> MilestoneRequest:
        """Post a milestone of round ``number``, and return the request that waits for all ranks of the node."""
        self.milestones.post(number * self.phases + phase)
        return MilestoneRequest(self.milestones, number * self.phases + phase)

    def post_rate(self, rate: float) -> None:
        """Publish this rank's learning rate of a round, before the round's first post."""
        self._rates[self._memory.rank] = rate

    def check_rates(self, name: str, ranks: list[int]) -> None:
        """Raise `MismatchError` on all ranks of the node unless their rates agree; to be called after all posted."""
        rates = self._rates.tolist()
        if any(rate != rates[0] for rate in rates):
            at = next(at for at, rate in enumerate(rates) if rate != rates[0])
            got = f"{rates[0]:g} on rank {ranks[0]}, {rates[at]:g} on rank {ranks[at]}"
            raise MismatchError("push", where=name, expected="the same learning rate on all ranks", got=got)

    def fail(self, number: int, error: Exception) -> None:
        """Publish a failed update, which `check` raises on other ranks."""
        self._reasons[self._memory.rank] = summary(error).encode(errors="backslashreplace")
        self._failed[self._memory.rank] = number

    def check(self, number: int, name: str, ranks: list[int]) -> None:
        """Raise another rank's error, after the last milestone of a round.

        Args:
            number: number of the round.
            name: name of the key in the error.
            ranks: world ranks of the node.

        Raises:
            HpcdpError: the update of another rank failed in this round.
        """
        failing = np.flatnonzero(self._failed == number)
        if failing.size:
            why = bytes(self._reasons[failing[0]]).decode(errors="ignore")
            raise HpcdpError("push", where=name, expected="an update", got=f"{why} on rank {ranks[failing[0]]}")

    def over(self, value: np.ndarray) -> Bucket:
        """Return a bucket of ``value`` itself, for a node of one rank, whose sum over nodes needs no row."""
        return Bucket(self.bucket.number, self.bucket.slots, value.reshape(1, -1), 0, self.bucket.shard)

    def whole(self) -> np.ndarray:
        """Join the sum of a round from the owners' rows, shape ``(size,)``."""
        total = np.empty(self.size, self.flat.dtype)
        for local, (first, last) in enumerate(zip(self.ends[:-1], self.ends[1:], strict=True)):
            total[first:last] = self.bucket.rows[local, first:last]
        return total


class MilestoneRequest:
    """A request that completes when all ranks of the node have posted a milestone."""

    def __init__(self, milestones: ProgressCounters, milestone: int) -> None:
        self._milestones, self._milestone = milestones, milestone

    def test(self) -> bool:
        """Return whether all ranks have posted it."""
        return self._milestones.reached(self._milestone)

    def wait(self) -> None:
        """Block until all ranks have posted it."""
        self._milestones.wait(self._milestone)


class CompressedPushes:
    """The compressed pushes of a key; every rank of the node must make it.

    Args:
        compression: the codec and its settings.
        rows: rows of the key.
        memory: shared memory of the node.
        rail: the reduction over nodes, see `SyncStore`.
        members: world ranks of the node of each rank of the rail.
    """

    def __init__(
        self,
        compression: Compression,
        rows: Rows,
        memory: NodeMemory,
        rail: InterNodeReduction | None,
        members: list[list[int]],
    ) -> None:
        self.codes = Codes(compression, rows.ends.tolist(), rows.flat.dtype)
        self._rows, self._me, self._rail, self._members = rows, memory.rank, rail, members
        self._wires = memory.alloc((memory.size, self.codes.nbytes), np.uint8)

    def sum(self, value: np.ndarray, number: int, turn: SendPriority | None) -> Steps:
        """Encode this rank's push in round ``number``, and sum its part of all decoded pushes into its row."""
        self.codes.encode(value.reshape(-1), self._wires[self._me])
        yield [self._rows.post(number, FILLED)]
        first, last = self._rows.bucket.shard
        if last == first:
            return
        own = np.ascontiguousarray(self._wires[:, self.codes.places[self._me]])
        of_nodes = [own]
        if self._rail is not None:
            if turn is not None:
                yield [turn]
            comm, tag = self._rail.comm, self._rail.tag(self._rows.bucket)
            of_nodes = [np.empty((len(ranks), own.shape[1]), np.uint8) for ranks in self._members]
            of_nodes[comm.rank] = own
            nodes = [node for node in range(comm.size) if node != comm.rank]
            sends = [comm.isend(own.reshape(-1), node, tag) for node in nodes]
            yield [*sends, *(comm.irecv(of_nodes[node].reshape(-1), node, tag) for node in nodes)]
        ranks = [rank for node in self._members for rank in node]
        everyone = [codes for node in of_nodes for codes in node]
        in_order = (everyone[at] for at in np.argsort(ranks))
        self.codes.add(in_order, self._rows.bucket.mine[first:last])


CHUNK_NBYTES = 256 * 1024
"""Bytes of a rank's array in one piece of the exchange, as in an allreduce (see `hpcdp.collectives.intra_node`)."""


def in_one_piece(arrays: list[Array], target: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return input and output of a push and pull for the kernels: contiguous, and identical or without overlap."""
    x = arrays[0] if len(arrays) == 1 else merged(arrays)
    if not (type(x) is np.ndarray and x.flags.carray):
        x = np.array(x, order="C")
    if target is x:
        return x, x
    if type(target) is np.ndarray and target.flags.carray and not np.may_share_memory(target, x):
        return x, target
    return x, np.empty_like(x)


class DirectPushPull:
    """The exchanges of a store; every rank of the node must make it.

    All keys share one staging buffer, which one thread of a rank uses at a time. Another thread pushes by engine tasks
    meanwhile, which the other ranks see when they meet.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self._memory, self._merge, self._busy = memory, kernels.load("shm_exchange"), threading.Lock()
        buffer = memory.alloc((self._merge.SLOTS, memory.size, CHUNK_NBYTES), np.uint8)
        self._staging = {dtype: buffer.view(dtype) for dtype in self._merge.DTYPES}

    def width(self, dtype: np.dtype) -> int:
        """Return the number of elements of a part in one piece."""
        return CHUNK_NBYTES // dtype.itemsize // self._memory.size

    def exchange_of(self, rows: Rows) -> RowExchange | None:
        """Return the exchange of a key; None on a node of one rank, and without kernels for its dtype."""
        staging = self._staging.get(rows.flat.dtype)
        if staging is None or self._memory.size == 1:
            return None
        return RowExchange(rows, staging, self._memory, self._busy)


class RowExchange:
    """The exchange of a key, which pushes and pulls in one, piece by piece."""

    def __init__(self, rows: Rows, staging: np.ndarray, memory: NodeMemory, busy: threading.Lock) -> None:
        merge = kernels.load("shm_exchange")
        self._rows, self._memory = rows, memory
        self._acquire, self._release = busy.acquire, busy.release
        self._shape, self._dtype = rows.stored.shape, rows.stored.dtype
        self._replace, self._gather, self._spread = merge.replace, merge.gather, merge.spread
        self._not_yet, self._mixed, self._round = merge.NOT_YET, merge.MIXED, merge.ROUND
        self._state = merge.pushpull_state(memory.rank, memory.patience, rows.pieces, rows.phases)
        self._fixed = staging, rows.ends, rows.counters, self._state

    def takes(self, x: Any, out: Any) -> bool:
        """Return whether ``x`` and ``out`` are contiguous arrays like the value, identical or without overlap."""
        if type(x) is not np.ndarray or x.shape != self._shape or x.dtype != self._dtype or not x.flags.carray:
            return False
        if out is x:
            return True
        if type(out) is not np.ndarray or out.shape != self._shape or out.dtype != self._dtype:
            return False
        return out.flags.carray and not np.may_share_memory(out, x)

    def replace(self, x: np.ndarray, out: np.ndarray) -> bool:
        """Write the sum of all ranks' ``x`` to the value and ``out``; return False if a rank pushes by a task."""
        if not self._acquire(False):
            return False
        try:
            rows, in_place = self._rows, out is x
            self._state[self._round] = rows.rounds
            if x.ndim != 1:
                x, out = x.reshape(-1), out.reshape(-1)
            while (met := self._replace(x, out, in_place, rows.flat, *self._fixed)) == self._not_yet:
                self._memory.check()
        finally:
            self._release()
        return bool(met != self._mixed)

    def update(self, x: np.ndarray, out: np.ndarray, update: Callable[[np.ndarray], None]) -> bool:
        """Update this rank's part of the value, and copy the value to ``out``; return False as `replace`.

        Args:
            x: this rank's push.
            out: the array for the new value.
            update: called with a shared row that has the sum of all ranks' ``x`` in this rank's part; must not raise.
        """
        if not self._acquire(False):
            return False
        try:
            rows = self._rows
            total = rows.bucket.rows[0]  # free in this round, in which no rank fills a row
            self._state[self._round] = rows.rounds
            x, out = x.reshape(-1), out.reshape(-1)
            while (met := self._gather(x, total, *self._fixed)) == self._not_yet:
                self._memory.check()
            if met == self._mixed:
                return False
            update(total)
            while self._spread(out, rows.flat, *self._fixed) == self._not_yet:
                self._memory.check()
        finally:
            self._release()
        return True


@dataclass(slots=True)
class _Push:
    """This rank's push in one round of a key."""

    entry: Entry
    rows: Rows
    updater: Updater
    coded: CompressedPushes | None
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
        kernels.load("gradients")  # compiled before the first push
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
        self._coded: dict[Key, CompressedPushes] = {}
        self._held_nbytes = [0] * self._memory.size
        self._neighbors = world.node_comm.allgather_json(world.rank)
        self._members = [self._neighbors] if self._rail is None else self._rail.comm.allgather_json(self._neighbors)
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
        self._check_codable(compression)
        self._compression = compression
        self._coded = {}
        for key in self._rows:
            self._code(key)

    def _code(self, key: Key) -> None:
        if self._compression is not None:
            self._coded[key] = CompressedPushes(
                self._compression, self._rows[key], self._memory, self._rail, self._members
            )

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
                sum_rows(bucket, self._memory.rank)
            if self._rail is not None:
                yield from self._rail.sum(bucket, turn)
        yield from self._update(push, bucket.mine)

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
            total = summed[: rows.size] if self._memory.size == 1 else rows.whole()
            push.updater.update(push.entry.key, total.reshape(stored.shape), stored)

    def _try(self, push: _Push, update: Callable[[], None]) -> None:
        """Call ``update``, and publish its error, which all ranks raise at the end of the round."""
        try:
            push.rows.check_rates(push.entry.variable.name, self._neighbors)
            update()
        except Exception as error:
            push.failure = error
            push.rows.fail(push.number, error)

    def _require_updated(self, push: _Push) -> None:
        if push.failure is not None:
            raise push.failure
        push.rows.check(push.number, push.entry.variable.name, self._neighbors)

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
