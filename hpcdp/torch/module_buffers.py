"""A module's buffers, such as running statistics: the same on all ranks, which take those of rank 0."""

from __future__ import annotations

import torch

from ..checkpoint.leaves import overlaps
from ..comm import World
from ..errors import UnsupportedError
from . import exchange
from .gpu_buffers import GpuBuffers


class ModuleBuffers:
    """The buffers of a module, of which all of a dtype travel in one message.

    They are copied together and back, and stay where they are: others may hold views of them. Those on the GPU of
    `on_gpu` go its way, once that is there; others on a GPU go through the host, which waits for them.

    Raises:
        UnsupportedError: a buffer that is not dense, or whose elements share memory.
    """

    def __init__(self, module: torch.nn.Module, world: World) -> None:
        self._module = module
        self._world = world
        self.on_gpu: GpuBuffers | None = None
        for name, each in module.named_buffers():
            if each.layout is not torch.strided:
                raise UnsupportedError(
                    "DistributedDataParallel", where=name, expected="a dense buffer", got=f"one of layout {each.layout}"
                )
            if overlaps(each.shape, each.stride(), 1):
                raise UnsupportedError(
                    "DistributedDataParallel", where=name, expected="a buffer whose elements have memory of their own",
                    got=f"one of strides {each.stride()}", remedy="clone() what was expanded",
                )  # fmt: skip

    def broadcast(self, root: int = 0) -> None:
        """Give every rank the values of rank ``root``; every rank must call.

        Changes the buffers in place. As with torch's wrapper autograd takes no notice, so that the backward of an
        earlier forward may follow.
        """
        if self._world.size == 1:
            return
        buffers = [each.data for each in self._module.buffers() if each.numel()]
        if self.on_gpu is not None:
            there = [each for each in buffers if exchange.gpu_of(each) == self.on_gpu.device]
            buffers = [each for each in buffers if exchange.gpu_of(each) != self.on_gpu.device]
            if there:
                self.on_gpu.broadcast(there, root)
        for dtype, device in dict.fromkeys((each.dtype, each.device) for each in buffers):
            members = [each for each in buffers if (each.dtype, each.device) == (dtype, device)]
            flat = torch.cat([each.reshape(-1) for each in members]).cpu()
            self._world.comm.native_broadcast(flat.view(torch.uint8).numpy(), root)
            if self._world.rank != root:
                parts = flat.to(device).split([each.numel() for each in members])
                torch._foreach_copy_(
                    members, [part.view(each.shape) for part, each in zip(parts, members, strict=True)]
                )
