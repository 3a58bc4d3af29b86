"""Groups of ranks whose GPUs exchange arrays.

Sums over ranks of which several share a GPU, on several GPUs: CUDA IPC on each of them, NCCL between.

::

    each GPU            the first of its ranks sums the rows of all into its own
    the first ranks     sum over the GPUs, each what ranks of its GPU own
    each GPU            the first rank brings the sums to the rows of the others

NCCL refuses two ranks on a GPU, and CUDA IPC sums on one; so the first rank of each is NCCL's.

Rows for the GPUs of a node's ranks, in the way that all nodes of a job can go, and when they are given back.

NCCL's communicator is ended, and mapped memory (CUDA IPC) given back, by all ranks of a node together, while Python
forgets what nobody has any more at another moment on each. So ranks compare what they still have when they make rows
again: what nobody has any more is given back then, and the rest when the world ends.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.devices import Event, Streams
from ..errors import DeviceError
from .communicator import Communicator, Steps, StepsTo
from .consistency import on_every_rank
from .cuda_memory import CudaIpc, IpcRows
from .gpu_transports import (
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
from .nccl import Nccl, NcclGroup, NcclRows, require_rows
from .world import World


class GpuGroups:
    """The rows of a node's ranks. All ranks of the node must make it together.

    Args:
        shared: the ranks of this rank's GPU, as a world.
        groups: the local ranks of each GPU, see `ways.by_gpu`.
        node: all ranks of the node.
        streams: of its GPU.
        sizes: of the rows, alike on all ranks.
        between: makes rows of NCCL in these arrays, between the GPUs; called by the first rank of each.

    Raises:
        DeviceError: as `CudaIpc`, on all ranks, and `Nccl`.
        UnsupportedError: as well.
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
        try:  # or the first ranks of other GPUs would wait for one whose GPU has no room
            on_every_rank(node, lambda: made.append(CudaIpc(shared.node_comm, shared.node_memory, streams, sizes)))
        except DeviceError:
            for each in made:
                each.close()
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
        self._rows = [GroupRows(streams, *each, own, places) for each in zip(on_gpus, over_gpus, strict=True)]

    @property
    def firsts(self) -> NcclGroup | None:
        """Of the first ranks, between the GPUs; None where another rank of this one is part of it."""
        return self._firsts

    def hand_out(self) -> list[GroupRows]:
        """The rows, by number; once. They live as long as somebody has them or a view of one, which `users` tells."""
        rows, self._rows = self._rows, []
        return rows

    def close(self) -> None:
        """Give all back, when all that was given to the streams is done; every rank of the node must call."""
        if self._firsts is not None:
            self._streams.synchronize(self._firsts.node.stream)
            self._firsts.close()
        self._ipc.close()


class GroupRows:
    """See `node_rows.NodeRows`. Its machines end when what they do is done.

    Args:
        on_gpu: the rows of this rank's GPU.
        over_gpus: those of the first ranks; None where this is no first rank.
        own: the local ranks of this GPU.
        places: of each local rank which GPU is its, by their first ranks.
    """

    def __init__(
        self, streams: Streams, on_gpu: IpcRows, over_gpus: NcclRows | None, own: Sequence[int], places: Sequence[int]
    ) -> None:
        self._on_gpu, self._over_gpus, self._own, self._places = on_gpu, over_gpus, own, places
        self.mine, self.size, self.stream = on_gpu.mine, on_gpu.size, on_gpu.stream
        self._streams, self._done = streams, streams.event()

    def check(self) -> None:
        self._on_gpu.check()
        if self._over_gpus is not None:
            self._over_gpus.check()

    def _over(self, machine: Callable[[NcclRows], Steps]) -> StepsTo[Sequence[Event]]:
        """Run it between the GPUs; the events behind which it is done."""
        if self._over_gpus is None:
            return ()
        yield from machine(self._over_gpus)
        self._streams.record(self._done, self._over_gpus.stream)
        return (self._done,)

    def _own_parts(self, parts: Sequence[Part]) -> list[Part]:
        return [parts[rank] for rank in self._own]

    def _of_gpus(self, parts: Sequence[Part]) -> list[OwnedPart]:
        """What each GPU's ranks own; one part where it is side by side."""
        found: list[OwnedPart] = []
        for place, part in zip(self._places, parts, strict=True):
            if found and found[-1][0] == place and found[-1][1][1] == part[0]:
                found[-1] = (place, (found[-1][1][0], part[1]))
            else:
                found.append((place, part))
        return found

    def _everything(self) -> list[Part]:
        return [(0, self.size.count)] * len(self._own)

    def reduce_scatter(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        yield from self._on_gpu.sum_at_leader(after)
        done = yield from self._over(lambda rows: rows.reduce(self._of_gpus(parts)))
        yield from self._on_gpu.hand_out_parts(self._own_parts(parts), done)

    def allgather(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        yield from self._on_gpu.collect(self._own_parts(parts), after)
        done = yield from self._over(lambda rows: rows.broadcast(self._of_gpus(parts)))
        yield from self._on_gpu.hand_out_parts(self._everything(), done)

    def allreduce(self, after: Sequence[Event] = ()) -> Steps:
        yield from self._on_gpu.sum_at_leader(after)
        done = yield from self._over(lambda rows: rows.allreduce())
        yield from self._on_gpu.hand_out_parts(self._everything(), done)


@dataclass(frozen=True)
class _Given:
    """What a call of `make` has given this rank."""

    group: NcclGroup | CudaIpc | GpuGroups | None
    """None on a node of one rank."""
    users: weakref.WeakSet[object]
    """What must be gone before ``group`` is ended."""

    def end(self) -> None:
        """Every rank of the node must call."""
        if self.group is not None:
            self.group.close()


def make(world: World, streams: Streams, sizes: Sequence[RowSize]) -> tuple[Sequence[NodeRows], GpuTransport]:
    """Rows on this rank's GPU, and how they are summed over its node; every rank of the world must call.

    Where some node can go no way, no node does: all ranks have a `LoneRow` for each size then, and rank 0 warns.

    Args:
        streams: of the rank's GPU.
        sizes: alike on all ranks.

    Raises:
        DeviceError: as `Nccl` and `CudaIpc`; on all ranks of the world.
        UnsupportedError: as well.
    """
    given = world.keep("rows on GPUs", lambda: _begin(world))
    _give_back(world, given)
    comm, memory = world.node_comm, world.node_memory
    found = offers(comm, own_offer(streams.device, shares_memory=memory.size == comm.size))
    way, why = choose(found)
    own = found[comm.rank].bus_id
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
            groups = by_gpu(found)
            firsts = [found[ranks[0]] for ranks in groups]

            def between(arrays: list[Any]) -> NcclGroup:
                require_rows(sizes)
                return _communicator(parts.firsts, streams, firsts, world.rank).group(sizes, arrays)

            return GpuGroups(parts.shared, groups, comm, streams, sizes, between)
        if way is GpuTransport.NCCL:
            require_rows(sizes)
            return _communicator(world, streams, found, world.rank).group(sizes)
        return CudaIpc(comm, memory, streams, sizes) if way is GpuTransport.CUDA_IPC else None

    group = on_every_rank(world.comm, make_group)  # or other nodes would wait for one that has failed
    if isinstance(group, NcclGroup):
        _communicators(world)[_gpus_of(found)] = group.node
    if isinstance(group, GpuGroups) and parts is not None and group.firsts is not None:
        _communicators(parts.firsts)[_gpus_of([found[ranks[0]] for ranks in by_gpu(found)])] = group.firsts.node
    rows: Sequence[NodeRows] = lone_rows(streams, sizes) if group is None else group.hand_out()
    given.append(_Given(group, weakref.WeakSet() if group is None else group.users))
    return rows, way


def _communicators(world: World) -> dict[tuple[str, ...], Nccl]:
    """Those that all ranks of the node have made, by the GPUs of these."""
    return world.keep("communicators of NCCL", dict)


def _gpus_of(found: Sequence[Offer]) -> tuple[str, ...]:
    return tuple(each.bus_id for each in found)


@dataclass(frozen=True)
class _Parts:
    """A world in which several ranks share a GPU, on several GPUs of a node."""

    shared: World
    """The ranks of this rank's GPU."""
    firsts: World
    """The first ranks of all GPUs, or all others."""


def _parts_by_gpu(world: World, places: Sequence[tuple[int, str]]) -> _Parts:
    """Every rank of the world must call, with the node and GPU of each rank, by its place on the bus."""

    def make() -> _Parts:
        first = places.index(places[world.rank])
        return _Parts(world.split(first), world.split(int(first != world.rank)))

    return world.keep(("ranks by GPU", tuple(places)), make)


def _communicator(world: World, streams: Streams, found: Sequence[Offer], rank: int) -> Nccl:
    """That of the node's GPUs; another one where a rank has lost it. Every rank of the node must call.

    Args:
        rank: of this one in the whole world, for messages.
    """
    made = _communicators(world).get(_gpus_of(found))
    if made is not None and made.is_common():
        return made
    return Nccl(world.node_comm, world.node_memory, streams, found, rank)


class _AllGiven(list[_Given]):
    """What a world has been given."""

    def end(self) -> None:
        """Every rank must call."""
        while self:
            self.pop().end()


def _begin(world: World) -> _AllGiven:
    given = _AllGiven()
    world.endings.add(given.end)
    return given


def _give_back(world: World, given: _AllGiven) -> None:
    """End what no rank of the world uses any more; every rank must call."""
    gc.collect()  # networks and trainers refer to each other
    everyone = world.comm.allgather_json([bool(each.users) for each in given])
    for each, *used in zip(tuple(given), *everyone, strict=True):
        if not any(used):
            given.remove(each)
            each.end()
