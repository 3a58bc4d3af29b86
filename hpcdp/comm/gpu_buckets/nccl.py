"""Rows of ranks that have a GPU each, summed by NCCL.

NCCL's kernels wait for each other on the GPUs. They are launched only when all ranks are ready, in one order on all of
them (`AgreedOrder`); if a rank fails, the others end theirs (`Nccl.check`). Sums of 16-bit floats are accumulated in
float32, because NCCL would round to 16 bits from rank to rank. That takes a float32 row beside each such row, and twice
the bytes between the GPUs.

Source: NVIDIA, "NCCL User Guide", sections "Creating a Communicator", "Group Calls", "Fault Tolerance" and, on ending a
communicator, "Communicator Creation and Management Functions".
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...core.arrays import Event, Streams
from ...core.checks import choices
from ...errors import DeviceError, UnsupportedError
from ...kernels.cuda import kernels
from ..communicator import Communicator, PolledRequest, Steps, wait_for
from ..consistency import on_rank_0
from ..shared_memory import NodeMemory, ProgressCounters
from .transport import Offer, OwnedPart, Part, RowSize, refuse_shared

THINGS = 1024
"""The number of operations that an order distinguishes."""


class AgreedOrder:
    """One order in which a node's ranks start operations; made by all ranks of the node together.

    Ranks become ready in different orders, as their messages arrive. The first rank of the node decides: it starts next
    what all are ready for, and writes that to the node's memory, so that no rank waits. A rank calls `ready`, polls
    `is_turn`, starts the operation and calls `pass_on`; any thread may, because operations of the lane and of waiting
    threads share an order.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self._decides = memory.rank == 0
        self._ready = ProgressCounters(memory, THINGS)
        self._decided = ProgressCounters(memory)
        # No decision is overwritten too early: all ranks start an operation before it is decided again.
        self._decisions = memory.alloc((THINGS,), np.int64)
        self._rounds = np.zeros(THINGS, np.int64)
        """The number of times that this rank has become ready, by operation."""
        self._deciding = threading.Lock()
        self._awaited: set[int] = set()
        """On the deciding rank: operations for which it is ready and that are not decided."""
        self._num_decided = self._num_started = 0

    def rounds(self, thing: int) -> int:
        """Return how often this rank has been `ready` for ``thing``."""
        return int(self._rounds[thing])

    def ready(self, thing: int) -> None:
        """Announce that this rank is ready for ``thing``, below `THINGS`; again only after it has started it."""
        self._rounds[thing] += 1
        self._ready.post(int(self._rounds[thing]), thing)
        if self._decides:
            self._awaited.add(thing)

    def is_turn(self, thing: int) -> bool:
        """Return whether this rank is to start ``thing`` now; never block."""
        if self._decides:
            self._decide()
        decided = self._decided.reached(self._num_started + 1, ranks=1)
        return decided and int(self._decisions[self._num_started % THINGS]) == thing

    def pass_on(self) -> None:
        """Record that this rank has started the operation whose turn it was."""
        self._num_started += 1

    def _decide(self) -> None:
        with self._deciding:
            for thing in sorted(self._awaited):
                if self._ready.reached(int(self._rounds[thing]), thing):
                    self._awaited.remove(thing)
                    self._decisions[self._num_decided % THINGS] = thing
                    self._num_decided += 1
                    self._decided.post(self._num_decided)


_KINDS = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
"""The numbers of ``ncclDataType_t``."""

_SUM = 0
"""A value of ``ncclRedOp_t``."""

_CASTS = {
    "float16": (kernels.from_float16, kernels.to_float16),
    "bfloat16": (kernels.from_bfloat16, kernels.to_bfloat16),
}
"""Kernels that convert to float32 and back."""


class Nccl:
    """NCCL's communicator of a node's ranks; all ranks of the node must make it together.

    All sums on the same GPUs share one communicator (`make`) with one order of launches: kernels of two communicators
    on one GPU could wait for each other forever.

    Args:
        comm: the ranks of the node.
        memory: their shared memory.
        streams: the streams of this rank's GPU.
        offers: the offers of all ranks, see `transport.offers`.
        world_rank: this rank's number in the world, for messages.

    Raises:
        DeviceError: two ranks have one GPU, or NCCL does not start; on all ranks.
    """

    def __init__(
        self, comm: Communicator, memory: NodeMemory, streams: Streams, offers: Sequence[Offer], world_rank: int
    ) -> None:
        refuse_shared(offers)
        self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        self._memory, self._ranks, self._world_rank = memory, comm, world_rank
        self.streams = streams
        self.rank, self.num_ranks = comm.rank, comm.size
        self.order = AgreedOrder(memory)
        self.stream = streams.stream()
        self._given_up = memory.alloc((comm.size,), np.int32)
        """For each rank that has given up, the world rank of the first to do so plus 1; else 0."""
        name = on_rank_0(comm, self._new_name)
        with self._as_device_errors(), streams.on_device():
            self._comm = self._nccl.NcclCommunicator(comm.size, bytes.fromhex(name), comm.rank)
        self._gone = ""
        self._num_groups = 0
        self._free = list(range(THINGS))
        """Free row numbers, equal on all ranks."""

    def _new_name(self) -> str:
        with self._as_device_errors():
            return bytes(self._nccl.get_unique_id()).hex()

    def is_common(self) -> bool:
        """Return whether no rank has ended it, and all have the same groups; every rank must call."""
        mine = [not self._gone, self._num_groups, self._free]
        return all(state == mine and state[0] for state in self._ranks.allgather_json(mine))

    def group(self, sizes: Sequence[RowSize], arrays: Sequence[Any] = ()) -> NcclGroup:
        """Make rows; every rank of the node must call.

        Args:
            sizes: the sizes of the rows, equal on all ranks.
            arrays: the memory of the rows; by default new memory.

        Raises:
            UnsupportedError: see `require_rows`; or there are fewer free numbers than rows.
        """
        require_rows(sizes, len(self._free))
        self._num_groups += 1
        numbers, self._free = self._free[: len(sizes)], self._free[len(sizes) :]
        memory = arrays or [self.streams.zeros(size.count, size.dtype) for size in sizes]
        self.streams.follow(self.stream)
        rows = [NcclRows(self, *row) for row in zip(numbers, memory, sizes, strict=True)]
        accumulators = [row.summed for row in rows if row.summed is not row.mine]
        return NcclGroup(self, numbers, rows, accumulators if arrays else [*accumulators, *memory])

    def give_back(self, numbers: Sequence[int]) -> None:
        """Free the row numbers of a group, and end the communicator with the last group; every rank must call."""
        rounds = [self.order.rounds(number) for number in numbers]
        if all(other == rounds for other in self._ranks.allgather_json(rounds)):
            self._free = sorted([*self._free, *numbers])  # otherwise some rank still waits in one of the rounds
        self._num_groups -= 1
        if self._num_groups == 0:
            self.close()

    @contextlib.contextmanager
    def _as_device_errors(self) -> Iterator[None]:
        """Turn NCCL's errors into `DeviceError`."""
        try:
            yield
        except self._nccl.NcclError as error:
            remedy = "set NCCL_DEBUG=INFO for details"
            raise DeviceError("NCCL", rank=self._world_rank, got=str(error), remedy=remedy) from error

    def launch(self, calls: Callable[[Any, int], None]) -> None:
        """Call ``calls(comm, stream)``, whose collectives become one launch.

        Raises:
            DeviceError: NCCL fails, or has been given up.
        """
        self.check()
        with self._or_give_up(), self._as_device_errors(), self.streams.on_device():
            self._nccl.groupStart()
            try:
                calls(self._comm, self.stream.ptr)
            finally:
                self._nccl.groupEnd()

    def check(self) -> None:
        """Raise, and end pending GPU work, if NCCL has failed or another rank is gone or has given up.

        Raises:
            DeviceError: NCCL reports an asynchronous error, or this or another rank has given it up.
        """
        if self._gone:
            raise DeviceError("NCCL", rank=self._world_rank, got=f"its communicator was given up: {self._gone}")
        with self._or_give_up():
            self._memory.check()
            with self._as_device_errors(), self.streams.on_device():
                self._comm.check_async_error()
            given_up = self._given_up[self._given_up > 0]
            if given_up.size:
                self._given_up[self.rank] = given_up[0]
                raise DeviceError("NCCL", rank=self._world_rank, got=f"rank {int(given_up[0]) - 1} has given it up")

    @contextlib.contextmanager
    def _or_give_up(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._abort(str(error))
            raise

    def _abort(self, why: str) -> None:
        """End NCCL's kernels that wait for other ranks; no rank of the node can sum any more."""
        if not self._gone:
            self._gone = why
            self._given_up[self.rank] = self._given_up[self.rank] or 1 + self._world_rank
            self._comm.abort()

    def close(self) -> None:
        """End the communicator once all enqueued work is done; every rank of the node must call.

        NCCL destroys a communicator collectively. If a rank has given up, or does so while it waits here, the others
        abort as well. Without this CuPy would destroy it when its object is collected, at different times on each rank.
        """
        done = self.streams.event()

        def is_done() -> bool:
            self.check()
            return self.streams.query(done)

        if not self._gone:
            self.streams.record(done, self.stream)
            with contextlib.suppress(DeviceError):
                wait_for(is_done)
        self._ranks.barrier()
        if self._given_up.any():
            self._abort("another rank has given up")
        else:
            self._gone = "no rows use it any more"
            with self._as_device_errors(), self.streams.on_device():
                self._comm.destroy()


def require_rows(sizes: Sequence[RowSize], most: int = THINGS) -> None:
    """Raise `UnsupportedError` if NCCL lacks a dtype, or there are more than ``most`` rows."""
    unknown = next((size.dtype for size in sizes if size.dtype.name not in _KINDS), None)
    if unknown is not None:
        raise UnsupportedError("NCCL", where="dtype", expected=choices(_KINDS), got=unknown)
    if len(sizes) > most:
        raise UnsupportedError("NCCL", expected=f"at most {most} rows", got=len(sizes))


class NcclGroup:
    """Rows that are made, and released, together; see `Nccl.group`."""

    def __init__(self, node: Nccl, numbers: Sequence[int], rows: list[NcclRows], memory: list[Any]) -> None:
        self.node, self.rows = node, rows
        self._numbers = numbers
        self._memory = memory
        """Memory of the rows, which kernels may still write when the rows are unreferenced."""
        self._maker = node.streams.current()
        """The stream to which CuPy's pool returns that memory, whatever stream is current then."""
        self.users: weakref.WeakSet[object] = weakref.WeakSet(rows)
        """See `hand_out`."""

    def hand_out(self) -> list[NcclRows]:
        """Return the rows, by number; once. `users` shows which are still referenced."""
        rows, self.rows = self.rows, []
        return rows

    def close(self) -> None:
        """Release all rows; every rank of the node must call, when none uses them any more."""
        self.node.give_back(self._numbers)
        streams, done = self.node.streams, self.node.streams.event()
        streams.record(done, self.node.stream)
        streams.wait_event(self._maker, done)
        self._memory.clear()


class NcclRows:
    """`NodeRows` of ranks that have a GPU each."""

    def __init__(self, node: Nccl, number: int, mine: Any, size: RowSize) -> None:
        self.mine, self.size, self.stream = mine, size, node.stream
        self._node, self._number = node, number
        self._casts = _CASTS.get(size.dtype.name)
        self.summed = (
            mine if self._casts is None else node.streams.empty((size.count,), np.dtype(np.float32), node.stream)
        )
        """The array that NCCL sums: the row itself, or its values in float32."""

    def check(self) -> None:
        """See `NodeRows.check`."""
        self._node.check()

    def _in_turn(self, act: Callable[[], None], after: Sequence[Event]) -> Steps:
        node, order = self._node, self._node.order
        order.ready(self._number)

        def is_turn() -> bool:
            node.check()
            return order.is_turn(self._number)

        yield [PolledRequest(is_turn)]
        node.streams.wait_events(self.stream, after)
        act()
        order.pass_on()

    def _sum(self, calls: Callable[[Any, int], None], first: int, last: int) -> None:
        """Launch ``calls``, which sum `summed`, and write columns ``first`` to ``last`` of the sum to the row."""
        if self._casts is None:
            self._node.launch(calls)
            return
        widen, narrow = self._casts
        with self._node.streams.on_device(), self.stream:
            widen(self.mine.view(np.uint16), self.summed)
        self._node.launch(calls)
        with self._node.streams.on_device(), self.stream:
            narrow(self.summed[first:last], self.mine[first:last].view(np.uint16))

    def reduce_scatter(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """See `NodeRows.reduce_scatter`."""
        yield from self.reduce(list(enumerate(parts)), after)

    def reduce(self, parts: Sequence[OwnedPart], after: Sequence[Event] = ()) -> Steps:
        """Sum like `reduce_scatter`, with any number of parts per rank."""
        node, x, kind = self._node, self.summed, _kind(self.summed)
        alike = _equal_part(parts, node.num_ranks)
        own = [part for owner, part in parts if owner == node.rank] or [(0, 0)]

        def calls(comm: Any, stream: int) -> None:
            if alike:
                comm.reduceScatter(_at(x, parts[0][1][0]), _at(x, own[0][0]), alike, kind, _SUM, stream)
                return
            for owner, (first, last) in _not_empty(parts):
                at = _at(x, first)
                comm.reduce(at, at, last - first, kind, _SUM, owner, stream)

        first, last = min(first for first, _ in own), max(last for _, last in own)  # other parts are undefined here
        yield from self._in_turn(lambda: self._sum(calls, first, last), after)

    def allgather(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """See `NodeRows.allgather`."""
        yield from self.broadcast(list(enumerate(parts)), after)

    def broadcast(self, parts: Sequence[OwnedPart], after: Sequence[Event] = ()) -> Steps:
        """Copy like `allgather`, with any number of parts per rank."""
        node, x, kind = self._node, self.mine, _kind(self.mine)
        alike = _equal_part(parts, node.num_ranks)

        def calls(comm: Any, stream: int) -> None:
            if alike:
                comm.allGather(_at(x, parts[node.rank][1][0]), _at(x, parts[0][1][0]), alike, kind, stream)
                return
            for owner, (first, last) in _not_empty(parts):
                at = _at(x, first)
                comm.broadcast(at, at, last - first, kind, owner, stream)

        yield from self._in_turn(lambda: node.launch(calls), after)

    def allreduce(self, after: Sequence[Event] = ()) -> Steps:
        """See `NodeRows.allreduce`."""
        at, count, kind = _at(self.summed, 0), self.size.count, _kind(self.summed)

        def calls(comm: Any, stream: int) -> None:
            comm.allReduce(at, at, count, kind, _SUM, stream)

        yield from self._in_turn(lambda: self._sum(calls, 0, count), after)


def _at(x: Any, column: int) -> int:
    return int(x.data.ptr) + column * x.dtype.itemsize


def _kind(x: Any) -> int:
    return _KINDS[x.dtype.name]


def _equal_part(parts: Sequence[OwnedPart], num_ranks: int) -> int:
    """Return the length of equal parts in rank order, one per rank, as NCCL's own collectives need; else 0."""
    start, end = parts[0][1]
    count = end - start
    even_parts = [(rank, (start + rank * count, start + (rank + 1) * count)) for rank in range(num_ranks)]
    return count if list(parts) == even_parts else 0


def _not_empty(parts: Sequence[OwnedPart]) -> list[OwnedPart]:
    return [(owner, part) for owner, part in parts if part[1] > part[0]]
