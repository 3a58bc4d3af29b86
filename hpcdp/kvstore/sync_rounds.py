"""The rounds of synchronous stores, each of which merges the pushes of the same number of all ranks.

- `Pool` allocates many short arrays from a few blocks of node memory. Each allocation of the system costs messages
  between the node's ranks and a memory mapping, of which a process may have about 65,000 (vm.max_map_count): with four
  or five mappings for each key, 13,000 keys were too many.
- `Rows`: rows of a key that ranks push to, and milestones of a round: arrived (posted first by `RowExchange`), row
  filled, part summed, value new.
- `Coded`: a round with compression. Each rank encodes its push, part by part. The owner of a part exchanges its node's
  codes with the owners of that part on other nodes, and sums the decoded pushes of all ranks in rank order. So all
  nodes get the same bits, and nothing is encoded twice. Each rank sends (nodes - 1) w bytes for w bytes of one rank's
  codes. Source: MXNet's kvstore, where workers encode, and servers decode and add.
- `DirectPushPull`, `RowExchange`: a push and its pull in one, in the calling thread. As in an allreduce, data moves by
  a staging buffer: a rank stages the n - 1 of n parts that others own, reads their n - 1 contributions to its own part,
  writes the sum to the buffer, its output and its part of the value, and copies the other sums. It waits once for each
  piece of a part, until all ranks have arrived (none reads the last value any more), and until all sums are complete.
  With an updater, owners update their parts first, and stage the new values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import kernels
from ..comm.communicator import Steps
from ..comm.shared_memory import NodeMemory, ProgressCounters
from ..compression import Compression
from ..core.arrays import Array
from ..data_parallel.buckets import Bucket, plan
from ..data_parallel.overlap import SendPriority
from ..data_parallel.reductions import InterNodeReduction
from ..errors import HpcdpError, MismatchError
from .arguments import Key, merged
from .updaters import Codes, summary

BLOCK_NBYTES, LONGEST_NBYTES = 1 << 20, 64 << 10
"""Bytes of a block, whose untouched pages take no memory, and most bytes of an array in one."""

_ALIGNED_NBYTES = 128
"""Alignment of two cache lines, which some CPUs fetch together: ranks spin on some of these arrays."""


class Pool:
    """A `NodeMemory` that allocates short arrays from blocks of ``memory``, and frees none."""

    def __init__(self, memory: NodeMemory) -> None:
        self.rank, self.size, self.patience = memory.rank, memory.size, memory.patience
        self.failure: HpcdpError | None = None
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

    def post(self, number: int, phase: int) -> Reached:
        """Post a milestone of round ``number``, and return the request that waits for all ranks of the node."""
        self.milestones.post(number * self.phases + phase)
        return Reached(self.milestones, number * self.phases + phase)

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
        whole = np.empty(self.size, self.flat.dtype)
        for local, (first, last) in enumerate(zip(self.ends[:-1], self.ends[1:], strict=True)):
            whole[first:last] = self.bucket.rows[local, first:last]
        return whole


class Reached:
    """A request that completes when all ranks of the node have posted a milestone."""

    def __init__(self, milestones: ProgressCounters, milestone: int) -> None:
        self._milestones, self._milestone = milestones, milestone

    def test(self) -> bool:
        """Return whether all ranks have posted it."""
        return self._milestones.reached(self._milestone)

    def wait(self) -> None:
        """Block until all ranks have posted it."""
        self._milestones.wait(self._milestone)


class Coded:
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
            others = [node for node in range(comm.size) if node != comm.rank]
            sends = [comm.isend(own.reshape(-1), node, tag) for node in others]
            yield [*sends, *(comm.irecv(of_nodes[node].reshape(-1), node, tag) for node in others)]
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
        self._memory, self._merge, self._busy = memory, kernels.load("pushpull"), threading.Lock()
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
        merge = kernels.load("pushpull")
        self._rows, self._memory = rows, memory
        self._acquire, self._release = busy.acquire, busy.release
        self._shape, self._dtype = rows.stored.shape, rows.stored.dtype
        self._replace, self._gather, self._spread = merge.replace, merge.gather, merge.spread
        self._not_yet, self._mixed, self._round = merge.NOT_YET, merge.MIXED, merge.ROUND
        self._state = merge.state_of(memory.rank, memory.patience, rows.pieces, rows.phases)
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
