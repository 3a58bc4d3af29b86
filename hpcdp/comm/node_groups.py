"""Rows for the GPUs of a node's ranks, in the way that all nodes of a job can go, and when they are given back.

NCCL's communicator is ended, and mapped memory (CUDA IPC) given back, by all ranks of a node together, while Python
forgets what nobody has any more at another moment on each. So ranks compare what they still have when they make rows
again: what nobody has any more is given back then, and the rest when the world ends.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..streams import Streams
from .agreement import on_every_rank
from .cuda_ipc import CudaIpc
from .gpu_groups import GpuGroups
from .nccl import Nccl, NcclGroup, require_rows
from .node_rows import NodeRows, RowSize, lone_rows
from .ways import Offer, Way, by_gpu, choose, offers, own_offer
from .world import World


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


def make(world: World, streams: Streams, sizes: Sequence[RowSize]) -> tuple[Sequence[NodeRows], Way]:
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
    reasons = [reason for name, reason, *_ in everyone if name == Way.HOST.name]
    if reasons:
        if world.rank == 0:
            warnings.warn(f"gradients on GPUs are summed {Way.HOST.value}: {reasons[0]}", stacklevel=6)
        return lone_rows(streams, sizes), Way.HOST

    several = any(name == Way.GROUPS.name for name, *_ in everyone)
    parts = _parts_by_gpu(world, [(node, bus_id) for _, _, node, bus_id in everyone]) if several else None

    def make_group() -> NcclGroup | CudaIpc | GpuGroups | None:
        if way is Way.GROUPS:
            assert parts is not None
            groups = by_gpu(found)
            firsts = [found[ranks[0]] for ranks in groups]

            def between(arrays: list[Any]) -> NcclGroup:
                require_rows(sizes)
                return _communicator(parts.firsts, streams, firsts, world.rank).group(sizes, arrays)

            return GpuGroups(parts.shared, groups, comm, streams, sizes, between)
        if way is Way.NCCL:
            require_rows(sizes)
            return _communicator(world, streams, found, world.rank).group(sizes)
        return CudaIpc(comm, memory, streams, sizes) if way is Way.CUDA_IPC else None

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
