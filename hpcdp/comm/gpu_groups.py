"""Sums over the GPUs of a node: NCCL, and groups of ranks that share a GPU.

If several ranks share each of several GPUs, they sum by CUDA IPC on each GPU and by NCCL between the GPUs::

    each GPU            the first of its ranks sums the rows of all into its own
    the first ranks     sum over the GPUs, each the columns that ranks of its GPU own
    each GPU            the first rank copies the sums to the rows of the others

NCCL refuses two ranks on a GPU, and CUDA IPC sums on one; so only the first rank of each GPU uses NCCL.

NCCL's kernels wait for each other on the GPUs. They are launched only when all ranks are ready, in one order on all of
them (`AgreedOrder`); if a rank fails, the others end theirs (`Nccl.check`). Sums of 16-bit floats are accumulated in
float32, because NCCL would round to 16 bits from rank to rank. That takes a float32 row beside each such row, and twice
the bytes between the GPUs.

NCCL's communicator is destroyed, and mapped memory (CUDA IPC) released, by all ranks of a node together, while Python
drops references at different times on each. So ranks compare what they still use when they make rows again, and release
the rest; all of it is released when the world ends.

Source: NVIDIA, "NCCL User Guide", sections "Creating a Communicator", "Group Calls", "Fault Tolerance" and, on ending a
communicator, "Communicator Creation and Management Functions".
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.devices import Event, Streams
from ..errors import DeviceError, UnsupportedError
from ..kernels.cuda import networks
from .communicator import Communicator, PolledRequest, Steps, StepsTo, wait_for
from .consistency import on_every_rank, on_rank_0
from .cuda_memory import (
    CudaIpc,
    GpuTransport,
    IpcRows,
    NodeRows,
    Offer,
    OwnedPart,
    Part,
    RowSize,
    by_gpu,
    choose,
    lone_rows,
    offers,
    own_offer,
    refuse_shared,
)
from .shared_memory import NodeMemory, ProgressCounters
from .world import World

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
    "float16": (networks.from_float16, networks.to_float16),
    "bfloat16": (networks.from_bfloat16, networks.to_bfloat16),
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
        offers: the offers of all ranks, see `cuda_memory.offers`.
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
        with self._told(), streams.on_device():
            self._comm = self._nccl.NcclCommunicator(comm.size, bytes.fromhex(name), comm.rank)
        self._gone = ""
        self._num_groups = 0
        self._free = list(range(THINGS))
        """Free row numbers, equal on all ranks."""

    def _new_name(self) -> str:
        with self._told():
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
    def _told(self) -> Iterator[None]:
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
        with self._or_give_up(), self._told(), self.streams.on_device():
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
            with self._told(), self.streams.on_device():
                self._comm.check_async_error()
            others = self._given_up[self._given_up > 0]
            if others.size:
                self._given_up[self.rank] = others[0]
                raise DeviceError("NCCL", rank=self._world_rank, got=f"rank {int(others[0]) - 1} has given it up")

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
            with self._told(), self.streams.on_device():
                self._comm.destroy()


def require_rows(sizes: Sequence[RowSize], most: int = THINGS) -> None:
    """Raise `UnsupportedError` if NCCL lacks a dtype, or there are more than ``most`` rows."""
    unknown = next((size.dtype for size in sizes if size.dtype.name not in _KINDS), None)
    if unknown is not None:
        raise UnsupportedError("NCCL", where="dtype", expected=" or ".join(_KINDS), got=unknown)
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
    wanted = [(rank, (start + rank * count, start + (rank + 1) * count)) for rank in range(num_ranks)]
    return count if list(parts) == wanted else 0


def _not_empty(parts: Sequence[OwnedPart]) -> list[OwnedPart]:
    return [(owner, part) for owner, part in parts if part[1] > part[0]]


class GpuGroups:
    """The rows of a node's ranks, several of which share each GPU; all ranks of the node must make it together.

    Args:
        shared: the ranks of this rank's GPU, as a world.
        groups: the local ranks of each GPU, see `cuda_memory.by_gpu`.
        node: all ranks of the node.
        streams: the streams of this rank's GPU.
        sizes: the sizes of the rows, equal on all ranks.
        between: makes NCCL rows in given arrays, between the GPUs; called by the first rank of each.

    Raises:
        DeviceError: as for `CudaIpc`, on all ranks, and for `Nccl`.
        UnsupportedError: as for `CudaIpc` and `Nccl`.
    """

    def __init__(
        self,
        shared: World,
        groups: Sequence[Sequence[int]],
        node: Communicator,
        streams: Streams,
        sizes: Sequence[RowSize],
        between: Callable[[list[Any]], NcclGroup],
    ) -> None:
        self._streams = streams
        made: list[CudaIpc] = []
        try:  # together: the first ranks of other GPUs would wait for one whose GPU has no memory left
            on_every_rank(node, lambda: made.append(CudaIpc(shared.node_comm, shared.node_memory, streams, sizes)))
        except DeviceError:
            for ipc in made:
                ipc.close()
            raise
        (self._ipc,) = made
        self.users = self._ipc.users
        """See `hand_out`."""
        on_gpus = self._ipc.hand_out()
        self._firsts = between([row.mine for row in on_gpus]) if self._ipc.is_leader else None
        over_gpus: Sequence[NcclRows | None] = [None] * len(on_gpus)
        if self._firsts is not None:
            over_gpus = self._firsts.hand_out()
        gpu_of = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
        own = groups[gpu_of[node.rank]]
        places = [gpu_of[rank] for rank in sorted(gpu_of)]
        self._rows = [GroupRows(streams, *rows, own, places) for rows in zip(on_gpus, over_gpus, strict=True)]

    @property
    def firsts(self) -> NcclGroup | None:
        """The NCCL rows of the first ranks; None unless this rank is one."""
        return self._firsts

    def hand_out(self) -> list[GroupRows]:
        """Return the rows, by number; once. `users` shows whether one or a view of one is still referenced."""
        rows, self._rows = self._rows, []
        return rows

    def close(self) -> None:
        """Release all rows once all enqueued work is done; every rank of the node must call."""
        if self._firsts is not None:
            self._streams.synchronize(self._firsts.node.stream)
            self._firsts.close()
        self._ipc.close()


class GroupRows:
    """`NodeRows` of ranks that share GPUs in groups. Its steps end when their work is done.

    ``on_gpu`` are the rows of this rank's GPU, ``over_gpus`` those of the first ranks (None on other ranks). ``own``
    are the local ranks of this GPU; ``places`` has the GPU of each local rank, as the number of its first rank.
    """

    def __init__(
        self, streams: Streams, on_gpu: IpcRows, over_gpus: NcclRows | None, own: Sequence[int], places: Sequence[int]
    ) -> None:
        self._on_gpu, self._over_gpus, self._own, self._places = on_gpu, over_gpus, own, places
        self.mine, self.size, self.stream = on_gpu.mine, on_gpu.size, on_gpu.stream
        self._streams, self._done = streams, streams.event()

    def check(self) -> None:
        """See `NodeRows.check`."""
        self._on_gpu.check()
        if self._over_gpus is not None:
            self._over_gpus.check()

    def _over(self, machine: Callable[[NcclRows], Steps]) -> StepsTo[Sequence[Event]]:
        """Run ``machine`` between the GPUs; return the events behind its work."""
        if self._over_gpus is None:
            return ()
        yield from machine(self._over_gpus)
        self._streams.record(self._done, self._over_gpus.stream)
        return (self._done,)

    def _own_parts(self, parts: Sequence[Part]) -> list[Part]:
        return [parts[rank] for rank in self._own]

    def _of_gpus(self, parts: Sequence[Part]) -> list[OwnedPart]:
        """Return the parts that each GPU's ranks own; adjacent ones are joined."""
        joined: list[OwnedPart] = []
        for place, part in zip(self._places, parts, strict=True):
            if joined and joined[-1][0] == place and joined[-1][1][1] == part[0]:
                joined[-1] = (place, (joined[-1][1][0], part[1]))
            else:
                joined.append((place, part))
        return joined

    def _everything(self) -> list[Part]:
        return [(0, self.size.count)] * len(self._own)

    def reduce_scatter(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """See `NodeRows.reduce_scatter`."""
        yield from self._on_gpu.sum_at_leader(after)
        done = yield from self._over(lambda rows: rows.reduce(self._of_gpus(parts)))
        yield from self._on_gpu.hand_out_parts(self._own_parts(parts), done)

    def allgather(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """See `NodeRows.allgather`."""
        yield from self._on_gpu.collect(self._own_parts(parts), after)
        done = yield from self._over(lambda rows: rows.broadcast(self._of_gpus(parts)))
        yield from self._on_gpu.hand_out_parts(self._everything(), done)

    def allreduce(self, after: Sequence[Event] = ()) -> Steps:
        """See `NodeRows.allreduce`."""
        yield from self._on_gpu.sum_at_leader(after)
        done = yield from self._over(lambda rows: rows.allreduce())
        yield from self._on_gpu.hand_out_parts(self._everything(), done)


@dataclass(frozen=True)
class _Given:
    """Rows that a call of `make` has made for this rank."""

    group: NcclGroup | CudaIpc | GpuGroups | None
    """The owner of the rows; None on a node of one rank."""
    users: weakref.WeakSet[object]
    """Objects that must be gone before ``group`` is ended."""

    def end(self) -> None:
        """Release the rows; every rank of the node must call."""
        if self.group is not None:
            self.group.close()


def make(world: World, streams: Streams, sizes: Sequence[RowSize]) -> tuple[Sequence[NodeRows], GpuTransport]:
    """Make rows on this rank's GPU and choose how its node sums them; every rank of the world must call.

    If some node has no transport, no node uses one: all ranks get a `LoneRow` for each size, and rank 0 warns.

    Args:
        world: the ranks.
        streams: the streams of the rank's GPU.
        sizes: the sizes of the rows, equal on all ranks.

    Raises:
        DeviceError: as for `Nccl` and `CudaIpc`; on all ranks of the world.
        UnsupportedError: as for `Nccl` and `CudaIpc`; on all ranks of the world.
    """
    all_rows = world.keep("rows on GPUs", lambda: _begin(world))
    _give_back(world, all_rows)
    comm, memory = world.node_comm, world.node_memory
    node_offers = offers(comm, own_offer(streams.device, shares_memory=memory.size == comm.size))
    way, why = choose(node_offers)
    own = node_offers[comm.rank].bus_id
    everyone = world.comm.allgather_json([way.name, why, world.node, own])
    reasons = [reason for name, reason, *_ in everyone if name == GpuTransport.HOST.name]
    if reasons:
        if world.rank == 0:
            warnings.warn(f"gradients on GPUs are summed {GpuTransport.HOST.value}: {reasons[0]}", stacklevel=6)
        return lone_rows(streams, sizes), GpuTransport.HOST

    several = any(name == GpuTransport.GROUPS.name for name, *_ in everyone)
    parts = _parts_by_gpu(world, [(node, bus_id) for _, _, node, bus_id in everyone]) if several else None

    def make_group() -> NcclGroup | CudaIpc | GpuGroups | None:
        if way is GpuTransport.GROUPS:
            assert parts is not None
            groups = by_gpu(node_offers)
            firsts = [node_offers[ranks[0]] for ranks in groups]

            def between(arrays: list[Any]) -> NcclGroup:
                require_rows(sizes)
                return _communicator(parts.firsts, streams, firsts, world.rank).group(sizes, arrays)

            return GpuGroups(parts.shared, groups, comm, streams, sizes, between)
        if way is GpuTransport.NCCL:
            require_rows(sizes)
            return _communicator(world, streams, node_offers, world.rank).group(sizes)
        return CudaIpc(comm, memory, streams, sizes) if way is GpuTransport.CUDA_IPC else None

    group = on_every_rank(world.comm, make_group)  # together: other nodes would wait for one that has failed
    if isinstance(group, NcclGroup):
        _communicators(world)[_gpus_of(node_offers)] = group.node
    if isinstance(group, GpuGroups) and parts is not None and group.firsts is not None:
        _communicators(parts.firsts)[_gpus_of([node_offers[ranks[0]] for ranks in by_gpu(node_offers)])] = (
            group.firsts.node
        )
    rows: Sequence[NodeRows] = lone_rows(streams, sizes) if group is None else group.hand_out()
    all_rows.append(_Given(group, weakref.WeakSet() if group is None else group.users))
    return rows, way


def _communicators(world: World) -> dict[tuple[str, ...], Nccl]:
    """Return the NCCL communicators that all ranks of the node have made, by their GPUs."""
    return world.keep("communicators of NCCL", dict)


def _gpus_of(node_offers: Sequence[Offer]) -> tuple[str, ...]:
    return tuple(offer.bus_id for offer in node_offers)


@dataclass(frozen=True)
class _Parts:
    """The worlds within a world of which several ranks share a GPU, with several GPUs on a node."""

    shared: World
    """The ranks of this rank's GPU."""
    firsts: World
    """The first ranks of all GPUs; on other ranks all others."""


def _parts_by_gpu(world: World, places: Sequence[tuple[int, str]]) -> _Parts:
    """Split the world by the node and GPU of each rank; every rank of the world must call."""

    def make() -> _Parts:
        first = places.index(places[world.rank])
        return _Parts(world.split(first), world.split(int(first != world.rank)))

    return world.keep(("ranks by GPU", tuple(places)), make)


def _communicator(world: World, streams: Streams, node_offers: Sequence[Offer], rank: int) -> Nccl:
    """Return the communicator of the node's GPUs, a new one if a rank has lost it; every rank of the node must call.

    ``rank`` is this rank's number in the world of all nodes, for messages.
    """
    kept = _communicators(world).get(_gpus_of(node_offers))
    if kept is not None and kept.is_common():
        return kept
    return Nccl(world.node_comm, world.node_memory, streams, node_offers, rank)


class _AllGiven(list[_Given]):
    """All rows of a world."""

    def end(self) -> None:
        """Release all rows; every rank must call."""
        while self:
            self.pop().end()


def _begin(world: World) -> _AllGiven:
    all_rows = _AllGiven()
    world.endings.add(all_rows.end)
    return all_rows


def _give_back(world: World, all_rows: _AllGiven) -> None:
    """Release rows that no rank of the world uses any more; every rank must call."""
    gc.collect()  # networks and trainers form reference cycles
    everyone = world.comm.allgather_json([bool(rows.users) for rows in all_rows])
    for rows, *used in zip(tuple(all_rows), *everyone, strict=True):
        if not any(used):
            all_rows.remove(rows)
            rows.end()
