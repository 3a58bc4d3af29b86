"""Rows for the GPUs of a node's ranks, in the way that all nodes of a job can go."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..devices import Device
from ..streams import Streams
from .agreement import on_every_rank
from .cuda_ipc import CudaIpc
from .nccl import Nccl
from .node_rows import Lone, NodeGroup, RowSize
from .ways import Way, choose, offers, own_offer
from .world import World


def make(world: World, device: Device, streams: Streams, sizes: Sequence[RowSize]) -> tuple[NodeGroup, Way]:
    """Rows on this rank's GPU, and how they are summed over its node; every rank of the world must call.

    Where some node can go no way, no node does: all ranks are `Lone` then, and rank 0 warns. Rows of several ranks stay
    until the world ends, for NCCL's communicator is ended, and mapped memory (CUDA IPC) given back, by all together.

    Args:
        device: a GPU, that of ``streams``.
        sizes: alike on all ranks.

    Raises:
        DeviceError: as `Nccl` and `CudaIpc`; on all ranks of the world.
        UnsupportedError: as well.
    """
    comm, memory = world.node_comm, world.node_memory
    found = offers(comm, own_offer(device, shares_memory=memory.size == comm.size))
    way, why = choose(found)
    reasons = [reason for name, reason in world.comm.allgather_json([way.name, why]) if name == Way.HOST.name]
    if reasons:
        if world.rank == 0:
            warnings.warn(f"gradients on GPUs are summed {Way.HOST.value}: {reasons[0]}", stacklevel=6)
        return Lone(streams, sizes), Way.HOST

    def make_group() -> Nccl | CudaIpc | None:
        if way is Way.NCCL:
            return Nccl(comm, memory, streams, found, sizes)
        return CudaIpc(comm, memory, streams, sizes) if way is Way.CUDA_IPC else None

    group = on_every_rank(world.comm, make_group)  # or other nodes would wait for one that has failed
    if group is not None:
        world.endings.append(group.close)
        return group, way
    return Lone(streams, sizes), way
