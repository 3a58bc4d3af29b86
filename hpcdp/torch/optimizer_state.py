"""An optimizer's state, given from one rank to all."""

from __future__ import annotations

from typing import Any

import torch

from ..comm import World, init
from ..comm.agreement import on_every_rank, require_same
from ..errors import ConfigError, UnsupportedError
from . import parameter_order
from .sharded_optimizer import ShardedOptimizer


def broadcast_optimizer_state(optimizer: Any, root: int = 0, world: World | None = None) -> None:
    """Give ``optimizer`` on every rank the state and settings that it has on rank ``root``; every rank must call.

    For optimizers of torch's own, and for what else has a ``state_dict``, such as a gradient scaler or a scheduler:
    after one rank has loaded a checkpoint, or after `DistributedDataParallel.join`.

    Args:
        optimizer: over the same parameters on every rank; changed in place.
        root: a rank.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        ConfigError: there is no such rank, or each rank holds a part of the state.
        MismatchError: the ranks' groups differ in shapes or names; on every rank.
        UnsupportedError: the state holds something that is no tensor, number, text, list, tuple or dict; on every rank.
    """
    world = init() if world is None else world
    if not 0 <= root < world.size:
        raise ConfigError("broadcast_optimizer_state", where="root", expected=f"0 to {world.size - 1}", got=root)
    if isinstance(optimizer, ShardedOptimizer):
        raise ConfigError(
            "broadcast_optimizer_state", expected="an optimizer whose whole state is on each rank",
            got="a ShardedOptimizer", remedy="call its load_state_dict() on all ranks",
        )  # fmt: skip
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = optimizer.param_groups
        names = parameter_order.plain([group.get("param_names", ()) for group in groups])
        shapes = [[tuple(each.shape) for each in group["params"]] for group in groups]
        items = [f"group {number}: {each}" for number, each in enumerate(zip(shapes, names, strict=True))]
        require_same(world.comm, "broadcast_optimizer_state", items, "make the optimizer alike on all ranks")
    is_root = world.rank == root
    tensors: list[torch.Tensor] = []
    mine = on_every_rank(world.comm, lambda: _form(optimizer.state_dict(), tensors) if is_root else None)
    form = world.comm.allgather_json(mine)[root]
    received: list[torch.Tensor] = []
    state = _filled(form, received)
    for number, into in enumerate(received):
        if is_root:
            into.copy_(tensors[number])
        if into.numel():
            in_order = into.as_strided((into.numel(),), (1,))  # of memory
            world.comm.native_broadcast(in_order.view(torch.uint8).numpy(), root)
    if not is_root:
        optimizer.load_state_dict(state)


def _form(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` as JSON, its tensors by shape, strides and dtype, and in the order of ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        strides = torch.empty_like(value, device="meta").stride()
        return {"tensor": list(value.shape), "strides": strides, "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": [[key, _form(each, tensors)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_form(each, tensors) for each in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError("broadcast_optimizer_state", expected="tensors and numbers", got=type(value).__name__)


def _filled(form: Any, tensors: list[torch.Tensor]) -> Any:
    """What `_form` was made of, with new tensors, which are added to ``tensors``."""
    if not isinstance(form, dict):
        return form
    if "tensor" in form:
        tensors.append(torch.empty_strided(form["tensor"], form["strides"], dtype=getattr(torch, form["dtype"])))
        return tensors[-1]
    if "dict" in form:
        return {key: _filled(each, tensors) for key, each in form["dict"]}
    ((kind, items),) = form.items()
    return {"list": list, "tuple": tuple}[kind](_filled(each, tensors) for each in items)
