"""A module's buffers on a GPU, given to all ranks: by the rows of the node's GPUs, or between nodes through the host.

On one node NCCL brings the row of one rank to all others, and nobody waits for a GPU; with CUDA IPC hosts wait until it
is there. Between nodes the host waits for what that rank's GPU was given until then, and sends one message of pinned
memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..collectives.progress import drive
from ..comm import World, node_groups
from ..comm.node_rows import NodeRows, RowSize, lone_rows
from ..comm.ways import Way
from ..devices import Device
from ..streams import Streams
from . import exchange

_ALIGNED = 16
"""Bytes: each buffer begins at a multiple, as the widest dtype wants."""
_WORD = np.dtype(np.int32)


class GpuBuffers:
    """Memory for all buffers of a module on one GPU, one after another.

    Args:
        world: the ranks.
        device: the GPU, this thread's current device.
        way: how the gradients are summed in the node; None: on the host.
    """

    def __init__(self, world: World, device: Device, way: Way | None) -> None:
        self._world, self.device = world, device
        self._by_row = world.num_nodes == 1 and way in (Way.NCCL, Way.CUDA_IPC, Way.GROUPS)
        self._streams = streams = Streams(device)
        self._filled, self._come = streams.event(), streams.event()
        self._room = 0
        self._row: NodeRows
        self._memory: torch.Tensor
        self._host = np.empty(0, np.uint8)

    def broadcast(self, buffers: Sequence[torch.Tensor], root: int) -> None:
        """Give every rank the values of rank ``root``; every rank must call. Changes ``buffers`` in place.

        Args:
            buffers: on the GPU, of the same shapes and dtypes on all ranks.
        """
        with exchange.on_torchs_stream(self.device):
            places = self._places(buffers)
            if self._world.rank == root:
                _copy(places, buffers)
            if self._by_row:
                self._bring_row(root)
            else:
                self._send(root)
            if self._world.rank != root:
                _copy(buffers, places)

    def _bring_row(self, root: int) -> None:
        streams, row = self._streams, self._row
        ends = [row.size.count if rank >= root else 0 for rank in range(self._world.size)]
        streams.record(self._filled, streams.current())
        drive(row.allgather(list(zip([0, *ends], ends, strict=False)), (self._filled,)))
        streams.record(self._come, row.stream)
        streams.wait_event(streams.current(), self._come)

    def _send(self, root: int) -> None:
        streams, is_root = self._streams, self._world.rank == root
        if is_root:
            streams.copy_async(self._host, self._row.mine.view(np.uint8), streams.current())
            streams.record(self._come, streams.current())
        streams.synchronize(self._come)  # of another rank: what came before has long left the host's memory
        self._world.comm.native_broadcast(self._host, root)
        if not is_root:
            streams.copy_async(self._row.mine.view(np.uint8), self._host, streams.current())
            streams.record(self._come, streams.current())

    def _places(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where each of ``buffers`` goes, of its shape and dtype; more memory is taken when more is needed."""
        begins, room = [], 0
        for each in buffers:
            begins.append(room)
            room += -(-each.nbytes // _ALIGNED) * _ALIGNED
        if room > self._room:
            self._room = room
            sizes = [RowSize(room // _WORD.itemsize, _WORD)]
            exchange.give_back_cache(self.device)
            if self._by_row:
                (self._row,), _ = node_groups.make(self._world, self._streams, sizes)
            else:
                (self._row,) = lone_rows(self._streams, sizes)
                self._host = self._streams.pinned(room, self._streams.current())
            self._memory = exchange.as_tensor(self._row.mine).view(torch.uint8)
        return [
            self._memory[begin : begin + each.nbytes].view(each.dtype).view(each.shape)
            for begin, each in zip(begins, buffers, strict=True)
        ]


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Those of a dtype at once."""
    for dtype in dict.fromkeys(each.dtype for each in sources):
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
