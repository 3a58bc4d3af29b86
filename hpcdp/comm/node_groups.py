"""Rows for the GPUs of a node's ranks, in the way that all nodes of a job can go."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..devices import Device
from ..streams import Streams
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
        DeviceError: as `Nccl` and `CudaIpc`.
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
    if way is Way.ALONE:
        return Lone(streams, sizes), way
    group = Nccl(comm, memory, streams, found, sizes) if way is Way.NCCL else CudaIpc(comm, memory, streams, sizes)
    world.endings.append(group.close)
    return group, way
