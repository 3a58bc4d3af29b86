"""The memory of buckets on GPUs: a row for each rank of the node, summed where they are.

`make` allocates the rows and chooses their transport: `nccl` where each rank has a GPU, `cuda_ipc` where all share
one. If several ranks share each of several GPUs, they sum by CUDA IPC on each GPU and by NCCL between the GPUs
(`GpuGroups`)::

    each GPU            the first of its ranks sums the rows of all into its own
    the first ranks     sum over the GPUs, each the columns that ranks of its GPU own
    each GPU            the first rank copies the sums to the rows of the others

NCCL refuses two ranks on a GPU, and CUDA IPC sums on one; so only the first rank of each GPU uses NCCL.

NCCL's communicator is destroyed, and mapped memory (CUDA IPC) released, by all ranks of a node together, while Python
drops references at different times on each. So ranks compare what they still use when they make rows again, and release
the rest; all of it is released when the world ends.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.arrays import Event, Streams
from ...errors import DeviceError
from ..communicator import Communicator, Steps, StepsTo
from ..consistency import on_every_rank
from ..world import World
from .cuda_ipc import CudaIpc, IpcRows
from .nccl import Nccl, NcclGroup, NcclRows, require_rows
from .transport import (
    GpuTransport,
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
)


class GpuGroups:
    """The rows of a node's ranks, several of which share each GPU; all ranks of the node must make it together.

    Args:
        shared: the ranks of this rank's GPU, as a world.
        groups: the local ranks of each GPU, see `transport.by_gpu`.
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
class _MadeRows:
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
    all_rows.append(_MadeRows(group, weakref.WeakSet() if group is None else group.users))
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
    existing = _communicators(world).get(_gpus_of(node_offers))
    if existing is not None and existing.is_common():
        return existing
    return Nccl(world.node_comm, world.node_memory, streams, node_offers, rank)


class _AllRows(list[_MadeRows]):
    """All rows of a world."""

    def end(self) -> None:
        """Release all rows; every rank must call."""
        while self:
            self.pop().end()


def _begin(world: World) -> _AllRows:
    all_rows = _AllRows()
    world.live_until_closed()  # each rank would drop it, and with it NCCL's communicator, at a different time
    world.endings.add(all_rows.end)
    return all_rows


def _give_back(world: World, all_rows: _AllRows) -> None:
    """Release rows that no rank of the world uses any more; every rank must call."""
    gc.collect()  # networks and trainers form reference cycles
    everyone = world.comm.allgather_json([bool(rows.users) for rows in all_rows])
    for rows, *used in zip(tuple(all_rows), *everyone, strict=True):
        if not any(used):
            all_rows.remove(rows)
            rows.end()
