"""The rounds of synchronous stores: pushes summed, coded, by rows, or in one pass.

Memory of a node for many short arrays: out of blocks, since each that the system gives costs more than its bytes.

All ranks of the node exchange messages for it, and a process may have some 65,000 (vm.max_map_count): with four or five
for each key 13,000 keys were too many.

What lies beside a key's value in the memory of a node: rows to push to, and how far its ranks are.

A push makes a round with those of the same number of the other ranks. What a rank posts in it says that it has come
(which ranks that push and pull in one post first, see `direct`), that its row is filled, that its part is summed, that
the value is new.

A round of pushes that are encoded: the node's memory holds codes, and codes go from node to node.

Every rank encodes its push by itself, part by part. The owner of a part sends the codes of its node's ranks to the
owners of the same part on the other nodes, receives theirs, and adds up what all ranks' codes say, in the order of the
ranks: all nodes get the same bits, and nothing is encoded twice.

Sent per round, for w bytes of codes of one rank: (nodes - 1) w for every rank.

Source: MXNet's kvstore, where workers encode and servers decode and add; the owners as in `sync`.

A push and its pull in one, in the thread that calls: no lane, no whole row, and as few copies as can be.

What must move from core to core is what an allreduce of as many bytes moves, and it moves in the same way, by a staging
buffer. A rank copies what others own of its array there (n - 1 of n parts), reads what others have pushed of its own
part (n - 1 parts), writes the sum back there, to its output and to its part of the value, and fetches the sums of the
others' parts (n - 1 of n). It waits once for each piece of a part, and twice more: until all have come, who then read
the last value no more, and until all sums are there. Where the sum updates the value, owners update their parts first,
and stage the new values.
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
"""Of a block, and of an array that comes out of one. What nobody writes to takes no memory."""

_ALIGNED_NBYTES = 128
"""Two cache lines, which some CPUs fetch together: ranks spin on some of these arrays."""


class Pool:
    """`NodeMemory` that gives short arrays out of longer ones of ``memory``; no bytes are given out twice."""

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
    """Of one key. Every rank of the node must make it.

    Args:
        memory: the node's.
        store: what pushes to the key's store are counted as, see `Watchdog.count`.
        number: of the key in its store.
        value: what the key begins with.
        num_parts: how many ranks of the node own a part.
        updates_alone: which rank of the node updates where an update needs the whole value.
        width: elements of a part that are exchanged at once, where ranks push and pull in one.
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
        """Where the parts of the node's ranks begin and end: whole cache lines, and no more than there are elements."""
        parts = [layout.shard(0, num_parts, part)[1] for part in range(num_parts)]
        self.ends[:] = [0, *(min(end, value.size) for end in parts), *[value.size] * (memory.size - num_parts)]
        part = int(self.ends[memory.rank]), int(self.ends[memory.rank + 1])
        self.bucket = Bucket(number, [slot], memory.alloc((memory.size, count), value.dtype), memory.rank, part)
        self.flat = memory.alloc((count,), value.dtype)
        """The value, as long as a row."""
        self.stored = self.flat[: value.size].reshape(value.shape)
        if memory.rank == 0:
            self.stored[...] = value
        self.pieces = max(1, -(-int(np.diff(self.ends).max()) // width))
        self.phases = max(_LEAST_PHASES, 2 * self.pieces + 1)
        """How many numbers of the milestones belong to a round; the last says that the value is new."""
        self.milestones = ProgressCounters(memory)
        self.counters = self.milestones.counters()
        self.label = f"pushpull of key {key!r}"
        self.counted = store, number
        self.updates_alone = updates_alone
        self.rounds = 0
        """Pushes of this rank; that of the same number of every rank makes a round."""
        self._memory = memory
        failed = memory.alloc((memory.size,), _FAILED)
        self._failed, self._reasons = failed["round"], failed["why"]
        """For every rank of the node the last round whose update failed there, and why."""
        self._rates = memory.alloc((memory.size,), np.float64)
        """For every rank of the node the learning rate of the round, from its first post on."""

    @property
    def size(self) -> int:
        """Elements of the value."""
        return int(self.ends[-1])

    def behind(self) -> list[int]:
        """The ranks of the node that have not pushed as often as this one."""
        return self.milestones.behind(self.rounds * self.phases + COME)

    def reached(self, number: int, phase: int) -> Reached:
        """That all ranks of the node have got so far in round ``number``."""
        return Reached(self.milestones, number * self.phases + phase)

    def post(self, number: int, phase: int) -> Reached:
        """Say that this rank has got so far, for others to wait for and for itself, too."""
        self.milestones.post(number * self.phases + phase)
        return self.reached(number, phase)

    def say_rate(self, rate: float) -> None:
        """Before the first post of a round: the learning rate that this rank has for it."""
        self._rates[self._memory.rank] = rate

    def check_rates(self, name: str, ranks: list[int]) -> None:
        """When all have posted: raise `MismatchError` on all ranks of the node unless they have the same rate."""
        rates = self._rates.tolist()
        if any(rate != rates[0] for rate in rates):
            at = next(at for at, rate in enumerate(rates) if rate != rates[0])
            got = f"{rates[0]:g} on rank {ranks[0]}, {rates[at]:g} on rank {ranks[at]}"
            raise MismatchError("push", where=name, expected="the same learning rate on all ranks", got=got)

    def fail(self, number: int, error: Exception) -> None:
        """Let the others know, when the value is new, that it is not."""
        self._reasons[self._memory.rank] = summary(error).encode(errors="backslashreplace")
        self._failed[self._memory.rank] = number

    def check(self, number: int, name: str, ranks: list[int]) -> None:
        """When the value is new.

        Args:
            ranks: those of the node, as the world numbers them.

        Raises:
            HpcdpError: the update of another rank has failed in this round.
        """
        failing = np.flatnonzero(self._failed == number)
        if failing.size:
            why = bytes(self._reasons[failing[0]]).decode(errors="ignore")
            raise HpcdpError("push", where=name, expected="an update", got=f"{why} on rank {ranks[failing[0]]}")

    def over(self, value: np.ndarray) -> Bucket:
        """A bucket of ``value`` itself, for a rank that shares with nobody: a sum over nodes needs no row."""
        return Bucket(self.bucket.number, self.bucket.slots, value.reshape(1, -1), 0, self.bucket.shard)

    def whole(self) -> np.ndarray:
        """The sum of a round, from the parts in the rows of the node's ranks, shape ``(size,)``."""
        whole = np.empty(self.size, self.flat.dtype)
        for local, (first, last) in enumerate(zip(self.ends[:-1], self.ends[1:], strict=True)):
            whole[first:last] = self.bucket.rows[local, first:last]
        return whole


class Reached:
    """That all ranks of a node have posted a milestone: a request, so a stage of a machine."""

    def __init__(self, milestones: ProgressCounters, milestone: int) -> None:
        self._milestones, self._milestone = milestones, milestone

    def test(self) -> bool:
        """Whether they have."""
        return self._milestones.reached(self._milestone)

    def wait(self) -> None:
        """Block until they have."""
        self._milestones.wait(self._milestone)


class Coded:
    """Of one key. Every rank of the node must make it.

    Args:
        rail: see `SyncStore`.
        members: for every rank of the rail the ranks of its node, as the world numbers them.
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
        """Encode this rank's push in round ``number``, and sum its part of all ranks' pushes into its own row."""
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
"""So much of a rank's array is exchanged at once: as in an allreduce (see `hpcdp.collectives.intra_node`)."""


def in_one_piece(arrays: list[Array], target: Any) -> tuple[np.ndarray, np.ndarray]:
    """What is pushed, and where to, as the kernels take them: contiguous, and apart or the same; else new arrays."""
    x = arrays[0] if len(arrays) == 1 else merged(arrays)
    if not (type(x) is np.ndarray and x.flags.carray):
        x = np.array(x, order="C")
    if target is x:
        return x, x
    if type(target) is np.ndarray and target.flags.carray and not np.may_share_memory(target, x):
        return x, target
    return x, np.empty_like(x)


class DirectPushPull:
    """The exchanges of one store. Every rank of the node must make it together.

    All keys share one buffer. So one of a rank's threads exchanges at a time; another one meanwhile pushes in the other
    way, which the other ranks see as they meet.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self._memory, self._merge, self._busy = memory, kernels.load("pushpull"), threading.Lock()
        buffer = memory.alloc((self._merge.SLOTS, memory.size, CHUNK_NBYTES), np.uint8)
        self._staging = {dtype: buffer.view(dtype) for dtype in self._merge.DTYPES}

    def width(self, dtype: np.dtype) -> int:
        """Elements of a part that are exchanged at once."""
        return CHUNK_NBYTES // dtype.itemsize // self._memory.size

    def exchange_of(self, rows: Rows) -> RowExchange | None:
        """That of one key; None where ranks share nothing, or there are no kernels for its dtype."""
        staging = self._staging.get(rows.flat.dtype)
        return (
            None if staging is None or self._memory.size == 1 else RowExchange(rows, staging, self._memory, self._busy)
        )


class RowExchange:
    """How ranks push and pull one key in one, piece by piece."""

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
        """Whether they are arrays like the value, contiguous, and apart or the same."""
        if type(x) is not np.ndarray or x.shape != self._shape or x.dtype != self._dtype or not x.flags.carray:
            return False
        if out is x:
            return True
        if type(out) is not np.ndarray or out.shape != self._shape or out.dtype != self._dtype:
            return False
        return out.flags.carray and not np.may_share_memory(out, x)

    def replace(self, x: np.ndarray, out: np.ndarray) -> bool:
        """The sum of all ranks' ``x`` becomes the value and ``out``; false if some rank pushes in another way."""
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
        """``update`` makes this rank's part of the value new, and ``out`` becomes the value; false as `replace`.

        Args:
            update: is called with the sum of all ranks' ``x``, as long as a row, right in this rank's part, and shared;
                it must not raise.
        """
        if not self._acquire(False):
            return False
        try:
            rows = self._rows
            total = rows.bucket.rows[0]  # not the value, which is to be updated; in this round no rank fills a row
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
