"""PyTorch objects in checkpoints, and checkpoints as files for `torch.load`.

Importing the module registers tensors, generators, schedules, optimizers and modules with `hpcdp.checkpoint.flatten`.
Gradient scalers need no adapter, because their states have only tensors and numbers.

`write` exports a checkpoint as a file for `torch.load`, nested as it was saved, so that a part of it is the state dict
of a module.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoint import flatten
from ..checkpoint.flatten import (
    MAKERS,
    STATISTICS,
    Adapter,
    HostView,
    NamedTensor,
    RandomState,
    as_array,
    as_stateful,
    averages,
    named_parameters,
    of_ranks,
    overlaps,
)
from ..checkpoint.inspect import ExportSelection, Tell, read_tensors
from ..comm import World
from ..core.arrays import BFLOAT16, bits, of_bits
from ..core.state import Saved, Stateful, unquoted
from ..data_parallel.base_trainer import members_of
from ..data_parallel.trainer_state import residuals, warn_of_lost_residuals
from ..errors import ConfigError, UnsupportedError
from . import tensors
from .distributed import DistributedDataParallel

_KIND = "torch"


@as_array.register
def view(value: torch.Tensor) -> HostView:
    """Return a tensor as a NumPy array: a view if it is contiguous and on the host, otherwise a copy.

    Raises:
        UnsupportedError: the tensor is not dense, or NumPy does not have its dtype.
    """
    if value.layout is not torch.strided or value.is_quantized:
        layout = "quantized" if value.is_quantized else value.layout
        raise UnsupportedError("checkpoint", expected="dense tensors", got=f"a {layout} tensor")
    host = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    is_bfloat16 = host.dtype is torch.bfloat16
    try:
        array = host.view(torch.uint16).numpy() if is_bfloat16 else host.numpy()
    except TypeError:
        raise UnsupportedError("checkpoint", expected="a dtype of NumPy, or bfloat16", got=value.dtype) from None
    shares = host.device == value.device and host.data_ptr() == value.data_ptr()

    def write_back(_: np.ndarray) -> None:
        with torch.no_grad():
            value.copy_(host)

    name = BFLOAT16 if is_bfloat16 else array.dtype.name
    return HostView(array, name, _KIND, None if shares else write_back, overlaps(value.shape, value.stride(), 1))


def tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Return a tensor over the memory of a NumPy array, whose uint16 elements may be the bits of bfloat16.

    Raises:
        TypeError: torch does not have the dtype.
    """
    made = torch.from_numpy(array)
    return made.view(torch.bfloat16) if dtype == BFLOAT16 else made


MAKERS[_KIND] = tensor


@as_stateful.register
def _(value: torch.Generator, world: World) -> Stateful:
    return RandomState(value.get_state, value.set_state)


class _Schedule(Adapter):
    """State of a torch schedule, whose counters would be restored as dicts."""

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


class _Optimizer(Adapter):
    """State of an optimizer, in which names identify parameters; torch's state dicts only number them.

    Names are those of the module if it is in the same state, or those that the optimizer was made with.
    """

    takes_more = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> Any:
        state, names = self._optimizer.state_dict(), self._named()
        if names is None:
            return state
        groups = [{**group, "param_names": own} for group, own in zip(state["param_groups"], names, strict=True)]
        return {**state, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self._optimizer.param_groups
        groups = [{name: value for name, value in group.items() if name != "param_names"}
                  for group in state["param_groups"]]  # fmt: skip
        for group, mine in zip(groups, own, strict=False):
            if "param_names" in mine:
                group["param_names"] = mine["param_names"]
        params = dict(enumerate(param for group in own for param in group["params"]))
        states = {number: _with_strides(own, params.get(number)) for number, own in state["state"].items()}
        self._optimizer.load_state_dict({**state, "state": states, "param_groups": groups})

    def _named(self) -> list[list[str]] | None:
        """Return the names of the optimizer's parameters by group; None if no name is known."""
        by_id: Mapping[int, str] = getattr(self._optimizer, "parameter_names", {})
        groups: list[list[NamedTensor | str | None]] = []
        for group in self._optimizer.param_groups:
            own = group.get("param_names", [by_id.get(id(param)) for param in group["params"]])
            groups.append([self.names.get(id(param), name) for param, name in zip(group["params"], own, strict=True)])
        if not any(name for names in groups for name in names):
            return None
        counts = Counter(name.name for names in groups for name in names if isinstance(name, NamedTensor))
        unnamed = itertools.count()
        # The full name, with the module's, distinguishes parameters of one name in several modules.
        texts = [[(name.name if counts[name.name] == 1 else name.full) if isinstance(name, NamedTensor)
                  else name or f"unnamed {next(unnamed)}" for name in names] for names in groups]  # fmt: skip
        return tensors.plain(texts)

    def fitted(self, form: Any, saved: Saved) -> Any:
        """See `FitsSaved.fitted`: reorder saved parameters to the order of this optimizer."""
        if (groups := _saved_groups(form)) is None:
            return form  # not an optimizer's: an error follows later
        own = self._named()
        saved_names = [_texts(group.get("param_names")) for group in groups]
        numbers = [group["params"]["list"] for group in groups]
        if own is not None and all(names is not None for names in saved_names):
            last = {unquoted(old.split("/")[-1]): unquoted(new.split("/")[-1]) for old, new in saved.renamed.items()}
            called = [[last.get(name, name) for name in names or ()] for names in saved_names]
            order = tensors.match("restore", numbers, called, own)
        else:
            self._require_order(form, groups, saved, own is None and any(saved_names))
            order = tensors.Order({number: number for group in numbers for number in group}, [*range(len(groups))])
        places = {old: new for old, new in order.numbers.items() if old != new}
        if places and isinstance(self._optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "restore", where="param_names", expected="LBFGS's parameters in their saved order",
                got="another order", remedy="register them in that order: LBFGS has one state for all parameters",
            )  # fmt: skip
        return _reordered(form, groups, order, own)

    def _require_order(self, form: Any, groups: list[dict[str, Any]], saved: Saved, is_named: bool) -> None:
        """Raise unless parameters are in the saved order, as far as this can be checked without names on both sides.

        ``is_named`` says whether the checkpoint has names.
        """
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        sizes, own = ([len(group["params"]["list"]) for group in groups],
                      [len(group["params"]) for group in self._optimizer.param_groups])  # fmt: skip
        if sizes != own:
            raise ConfigError("restore", where="param_groups", expected=f"groups of {own} parameters", got=sizes)
        if is_named and not _told_by_shapes(form, params, saved):
            raise ConfigError(
                "restore", where="param_names", expected="an optimizer whose parameters have names, as when saved",
                got="an optimizer whose parameters have none",
                remedy="restore the module in the same call, or make the optimizer of model.named_parameters()",
            )  # fmt: skip
        held = {id(param) for param in params}
        known = [named.full for key, named in self.names.items() if key in held]
        places = {name: place for place, name in enumerate(saved.names)}
        current = [name for name in known if name in places]
        in_order = sorted(current, key=places.__getitem__)
        if current != in_order:
            odd = next(number for number, name in enumerate(current) if in_order[number] != name)
            raise ConfigError(
                "restore", where="param_groups",
                expected="parameters registered in the order of the checkpoint, whose optimizer states have no names",
                got=f"{current[odd]} before {in_order[odd]}",
                remedy="restore into the module as it was, and save again, which adds the names",
            )  # fmt: skip


def _told_by_shapes(form: Any, params: Sequence[torch.Tensor], saved: Saved) -> bool:
    """Return whether shapes identify the saved state of each parameter, and the order is right."""
    shapes = [tuple(param.shape) for param in params]
    if len(set(shapes)) < len(shapes):
        return False
    for number, node in members_of(form)["state"]["dict"]:
        saved_shapes = [saved.shape_of(value["tensor"]) for value in members_of(node).values()
                        if isinstance(value, dict) and "tensor" in value]  # fmt: skip
        if any(saved_shapes) and (number not in range(len(shapes)) or shapes[number] not in saved_shapes):
            return False
    return True


def _with_strides(state: Any, param: torch.Tensor | None) -> Any:
    """Return the state of ``param`` with tensors of its shape in its strides, as torch's optimizers make them."""
    if param is None or not isinstance(state, dict):
        return state
    like = torch.empty_like(param, device="meta")
    return {
        name: torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device).copy_(value)
        if isinstance(value, torch.Tensor) and value.shape == like.shape and value.stride() != like.stride() else value
        for name, value in state.items()
    }  # fmt: skip


def _saved_groups(form: Any) -> list[dict[str, Any]] | None:
    """Return the parameter groups in the form of an optimizer's state dict; None for another form."""
    groups = members_of(form).get("param_groups")
    if not isinstance(groups, dict) or "list" not in groups or "dict" not in (members_of(form).get("state") or ()):
        return None
    members = [members_of(group) for group in groups["list"]]
    are_groups = all("list" in (group.get("params") or ()) for group in members)
    return members if are_groups else None


def _texts(form: Any) -> list[str] | None:
    return form["list"] if isinstance(form, dict) and "list" in form else None


def _reordered(form: Any, groups: list[dict[str, Any]], order: tensors.Order, own: list[list[str]] | None) -> Any:
    """Return the form of a state dict in another order of parameters, with the names ``own``."""
    made, first = [], 0
    for at, number in enumerate(order.groups):
        group = dict(groups[number])
        if own is not None:
            count = len(own[at])
            group["params"] = {"list": [*range(first, first + count)]}
            group["param_names"] = {"list": own[at]}
            first += count
        made.append({"dict": [[*item] for item in group.items()]})
    members = members_of(form)
    states = [[order.numbers.get(number, number), node] for number, node in members["state"]["dict"]]
    members |= {"state": {"dict": states}, "param_groups": {"list": made}}
    return {"dict": [[*item] for item in members.items()]}


@as_stateful.register
def _(value: torch.optim.Optimizer, world: World) -> Stateful:
    return _Optimizer(value)


@named_parameters.register
def _(value: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    return value.named_parameters()


class _Module(Adapter):
    """State of a module, with the mean of its buffers over all ranks, such as running statistics, and each rank's own.

    Ranks restore their own buffers if their number is unchanged.
    """

    takes_more = True

    def __init__(self, module: torch.nn.Module, world: World) -> None:
        self._module, self._world = module, world

    def state_dict(self) -> dict[str, Any]:
        state = dict(self._module.state_dict())
        own = {name: buffer.detach().clone() for name, buffer in self._module.named_buffers() if name in state}
        views = {name: view(buffer) for name, buffer in own.items()}
        means = averages({name: of_bits(own.array, own.dtype) for name, own in views.items()}, self._world)
        state |= {name: tensor(bits(mean), views[name].dtype) for name, mean in means.items()}
        return state | of_ranks(own)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = state.get(STATISTICS) or {}
        self._module.load_state_dict({name: own.get(name, x) for name, x in state.items() if name != STATISTICS})


@as_stateful.register
def _(value: torch.nn.Module, world: World) -> Stateful:
    return _Module(value, world)


class _Wrapped(_Module):
    """State of a wrapped module, with the gradients that compression has not sent yet, in parts on all ranks."""

    _RESIDUALS = "compression residuals"  # the space keeps it apart from the names of submodules

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model, model.world)
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        own = self._residuals()
        return super().state_dict() | ({self._RESIDUALS: own} if own else {})

    def _residuals(self) -> dict[str, Any]:
        return residuals(self._model.backward_pass.reducer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._RESIDUALS in state and not self._residuals() and self._model.world.rank == 0:
            warn_of_lost_residuals()
        super().load_state_dict({name: value for name, value in state.items() if name != self._RESIDUALS})


@as_stateful.register
def _(value: DistributedDataParallel, world: World) -> Stateful:
    return _Wrapped(value)


def write(chosen: ExportSelection, path: Path, tell: Tell) -> None:
    """Write a file by `torch.save` that `torch.load` reads with ``weights_only``; all elements must fit in memory.

    Args:
        chosen: the checkpoint, or a part of it.
        path: the file.
        tell: see `hpcdp.checkpoint.inspect.read_tensors`.

    Raises:
        ConfigError: PyTorch does not have a saved dtype.
        DataError: a file is missing or damaged.
        OSError: the file cannot be written.
    """
    names = [node["tensor"] for _, node in flatten.leaves(chosen.form) if isinstance(node, dict) and "tensor" in node]
    saved = {name: chosen.manifest.tensors[name] for name in names}
    for name, entry in saved.items():
        _made(name, np.empty(0, entry.stored_dtype), entry.dtype)  # raise before gigabytes are read
    arrays = dict(read_tensors(chosen.folder, saved, tell))
    state = flatten.built(chosen.form, lambda name: _made(name, arrays[name], saved[name].dtype))
    try:
        with open(path, "wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch reports a torn archive; its context has the cause
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _made(name: str, array: np.ndarray, dtype: str) -> torch.Tensor:
    try:
        return tensor(array, dtype)
    except TypeError as error:
        raise ConfigError("export", where=name, expected="a dtype of PyTorch", got=dtype,
                          remedy="pass --format npz") from error  # fmt: skip
