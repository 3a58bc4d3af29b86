"""A module's buffers, such as running statistics: the same on all ranks, which take those of rank 0."""

from __future__ import annotations

from collections import Counter

import torch

from ..comm import World


class ModuleBuffers:
    """The buffers of a module, as one flat tensor for each dtype, so that a broadcast is one message.

    A buffer that the module replaces by another tensor is taken in again; those that share memory stay as they are.
    """

    def __init__(self, module: torch.nn.Module, world: World) -> None:
        self._module = module
        self._world = world
        self._flats: dict[torch.dtype, torch.Tensor] = {}
        self._places: list[tuple[torch.Tensor, int]] = []
        self._apart: list[torch.Tensor] = []  # that share memory with others, and must go on to

    def broadcast(self, root: int = 0) -> None:
        """Give every rank the values of rank ``root``; every rank must call. Changes the buffers in place."""
        if self._world.size == 1:
            return
        buffers = [each for each in self._module.buffers() if each.numel()]
        if len(buffers) != len(self._places) or any(
            each is not buffer or each.data_ptr() != at
            for each, (buffer, at) in zip(buffers, self._places, strict=True)
        ):
            self._take_in(buffers)
        for flat in self._flats.values():
            self._world.comm.native_broadcast(flat.view(torch.uint8).numpy(), root)
        for buffer in self._apart:
            values = buffer.detach().clone(memory_format=torch.contiguous_format)
            self._world.comm.native_broadcast(values.reshape(-1).view(torch.uint8).numpy(), root)
            buffer.copy_(values)

    def _take_in(self, buffers: list[torch.Tensor]) -> None:
        memories = Counter(each.untyped_storage().data_ptr() for each in buffers)
        flats = {flat.untyped_storage().data_ptr() for flat in self._flats.values()}
        self._apart = [each for each in buffers if memories[each.untyped_storage().data_ptr()] > 1
                       and each.untyped_storage().data_ptr() not in flats]  # fmt: skip
        apart = set(map(id, self._apart))
        self._flatten([each for each in buffers if id(each) not in apart])
        self._places = [(each, each.data_ptr()) for each in buffers]

    def _flatten(self, buffers: list[torch.Tensor]) -> None:
        self._flats = {}
        for dtype in dict.fromkeys(each.dtype for each in buffers):
            members = [each for each in buffers if each.dtype is dtype]
            flat = torch.cat([each.detach().reshape(-1) for each in members])
            for each, place in zip(members, flat.split([each.numel() for each in members]), strict=True):
                each.data = place.view(each.shape)
            self._flats[dtype] = flat
