"""What torch has as checkpoints see it: `hpcdp.checkpoint.leaves` for tensors, generators, schedules, wrapped modules.

Modules, optimizers and gradient scalers have states of their own, which need nothing but their tensors to be seen.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch

from ..arrays import BFLOAT16, bits, of_bits
from ..checkpoint.leaves import (
    MAKERS,
    STATISTICS,
    Adapter,
    HostView,
    as_array,
    as_stateful,
    averages,
    of_ranks,
    overlaps,
)
from ..comm import World
from ..errors import UnsupportedError
from ..gradients.sharded_state import residuals
from ..state import Stateful
from .distributed import DistributedDataParallel

_KIND = "torch"


@as_array.register
def view(value: torch.Tensor) -> HostView:
    """A tensor as a NumPy array: its own memory where that is contiguous and on the host, else a copy.

    Raises:
        UnsupportedError: it is not dense, or NumPy has no such dtype.
    """
    if value.layout is not torch.strided or value.is_quantized:
        layout = "quantized" if value.is_quantized else value.layout
        raise UnsupportedError("checkpoint", expected="dense tensors", got=f"a {layout} tensor")
    host = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    is_bfloat16 = host.dtype is torch.bfloat16
    try:
        array = host.view(torch.uint16).numpy() if is_bfloat16 else host.numpy()
    except TypeError:
        raise UnsupportedError("checkpoint", expected="a dtype that NumPy has, or bfloat16", got=value.dtype) from None
    shares = host.device == value.device and host.data_ptr() == value.data_ptr()

    def write_back(_: np.ndarray) -> None:
        with torch.no_grad():
            value.copy_(host)

    name = BFLOAT16 if is_bfloat16 else array.dtype.name
    return HostView(array, name, _KIND, None if shares else write_back, overlaps(value.shape, value.stride(), 1))


def tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor that shares the memory of a NumPy array, which has the bits of a bfloat16 as uint16.

    Raises:
        TypeError: torch has no such dtype.
    """
    made = torch.from_numpy(array)
    return made.view(torch.bfloat16) if dtype == BFLOAT16 else made


MAKERS[_KIND] = tensor


class _Generator(Adapter):
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> torch.Tensor:
        return self._generator.get_state()

    def load_state_dict(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)


@as_stateful.register
def _(value: torch.Generator, world: World) -> Stateful:
    return _Generator(value)


class _Schedule(Adapter):
    """A schedule of torch's, whose state may have counters, which would come back as dicts."""

    takes_more = True

    def __init__(self, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
        self._schedule = schedule

    def state_dict(self) -> Any:
        return self._schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        counters = {name for name, own in vars(self._schedule).items() if isinstance(own, Counter)}
        self._schedule.load_state_dict(
            {name: Counter(value) if name in counters else value for name, value in state.items()}
        )


@as_stateful.register
def _(value: torch.optim.lr_scheduler.LRScheduler, world: World) -> Stateful:
    return _Schedule(value)


class _Module(Adapter):
    """A module. Of its buffers, such as running statistics, there is the mean of all ranks, and what each rank has.

    Ranks get theirs back where there are as many as before.
    """

    takes_more = True

    def __init__(self, module: torch.nn.Module, world: World) -> None:
        self._module, self._world = module, world

    def state_dict(self) -> dict[str, Any]:
        state = dict(self._module.state_dict())
        own = {name: buffer.detach().clone() for name, buffer in self._module.named_buffers() if name in state}
        seen = {name: view(buffer) for name, buffer in own.items()}
        means = averages({name: of_bits(each.array, each.dtype) for name, each in seen.items()}, self._world)
        state |= {name: tensor(bits(mean), seen[name].dtype) for name, mean in means.items()}
        return state | of_ranks(own)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = state.get(STATISTICS) or {}
        self._module.load_state_dict({name: own.get(name, x) for name, x in state.items() if name != STATISTICS})


@as_stateful.register
def _(value: torch.nn.Module, world: World) -> Stateful:
    return _Module(value, world)


class _Wrapped(_Module):
    """A module, and what compression of its gradients has not sent yet, of which each rank has its part."""

    _RESIDUALS = "compression residuals"  # with a space: no part of a module has such a name

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model, model.world)
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        own = self._residuals()
        return super().state_dict() | ({self._RESIDUALS: own} if own else {})

    def _residuals(self) -> dict[str, Any]:
        return residuals(self._model.backward_pass.reducer, self._model.compression)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._RESIDUALS in state and not self._residuals() and self._model.world.rank == 0:
            warnings.warn("what compression had not sent yet is lost: nothing is compressed here", stacklevel=6)
        super().load_state_dict({name: each for name, each in state.items() if name != self._RESIDUALS})


@as_stateful.register
def _(value: DistributedDataParallel, world: World) -> Stateful:
    return _Wrapped(value)
