"""States of PyTorch modules and optimizers in checkpoints and exported networks.

What torch has as checkpoints see it: `hpcdp.checkpoint.flatten` for tensors, generators, schedules, wrapped modules.

Gradient scalers have states of their own, which need nothing but their tensors to be seen.

A checkpoint as a file for `torch.load`: nested as it was saved, so a part of it is the state dict of a module.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoint import flatten
from ..checkpoint.export import Chosen, Tell, read
from ..checkpoint.flatten import (
    MAKERS,
    STATISTICS,
    Adapter,
    HostView,
    NamedTensor,
    as_array,
    as_stateful,
    averages,
    named_parameters,
    of_ranks,
    overlaps,
)
from ..comm import World
from ..core.arrays import BFLOAT16, bits, of_bits
from ..core.state import Saved, Stateful, unquoted
from ..data_parallel.trainer_state import residuals
from ..errors import ConfigError, UnsupportedError
from . import tensors as torch_tensors
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


class _Optimizer(Adapter):
    """An optimizer, whose state dict numbers parameters: names say which is which when it is restored.

    Names are those of the module, where it stands in the same state, or those that the optimizer was given.
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
        states = {number: _as_laid_out(each, params.get(number)) for number, each in state["state"].items()}
        self._optimizer.load_state_dict({**state, "state": states, "param_groups": groups})

    def _named(self) -> list[list[str]] | None:
        """The names of the optimizer's parameters by group; None where nothing is known of any of them."""
        given: Mapping[int, str] = getattr(self._optimizer, "parameter_names", {})
        found: list[list[NamedTensor | str | None]] = []
        for group in self._optimizer.param_groups:
            own = group.get("param_names", [given.get(id(param)) for param in group["params"]])
            found.append([self.names.get(id(param), name) for param, name in zip(group["params"], own, strict=True)])
        if not any(found_name for names in found for found_name in names):
            return None
        counts = Counter(each.name for names in found for each in names if isinstance(each, NamedTensor))
        unnamed = itertools.count()
        # Of modules that have parameters of one name, that of the module tells them apart.
        texts = [[(each.name if counts[each.name] == 1 else each.full) if isinstance(each, NamedTensor)
                  else each or f"unnamed {next(unnamed)}" for each in names] for names in found]  # fmt: skip
        return torch_tensors.plain(texts)

    def fitted(self, form: Any, saved: Saved) -> Any:
        if (groups := _saved_groups(form)) is None:
            return form  # which is refused later
        own = self._named()
        theirs = [_texts(group.get("param_names")) for group in groups]
        numbers = [group["params"]["list"] for group in groups]
        if own is not None and all(names is not None for names in theirs):
            last = {unquoted(old.split("/")[-1]): unquoted(new.split("/")[-1]) for old, new in saved.renamed.items()}
            called = [[last.get(name, name) for name in names or ()] for names in theirs]
            order = torch_tensors.match("restore", numbers, called, own)
        else:
            self._require_order(form, groups, saved, own is None and any(theirs))
            order = torch_tensors.Order({number: number for each in numbers for number in each}, [*range(len(groups))])
        places = {old: new for old, new in order.numbers.items() if old != new}
        if places and isinstance(self._optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "restore", where="param_names", expected="LBFGS's parameters in their order then",
                got="another order", remedy="register them in that order: its state is of all together",
            )  # fmt: skip
        return _reordered(form, groups, order, own)

    def _require_order(self, form: Any, groups: list[dict[str, Any]], saved: Saved, is_named: bool) -> None:
        """Raise unless parameters are in the order of saving, as far as one can tell without names on both sides.

        Args:
            is_named: whether the checkpoint has names.
        """
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        sizes, own = ([len(group["params"]["list"]) for group in groups],
                      [len(group["params"]) for group in self._optimizer.param_groups])  # fmt: skip
        if sizes != own:
            raise ConfigError("restore", where="param_groups", expected=f"groups of {own} parameters", got=sizes)
        if is_named and not _told_by_shapes(form, params, saved):
            raise ConfigError(
                "restore", where="param_names", expected="an optimizer whose parameters have names, as then",
                got="one whose parameters have none",
                remedy="restore the module in the same call, or make the optimizer of model.named_parameters()",
            )  # fmt: skip
        held = {id(param) for param in params}
        known = [each.full for key, each in self.names.items() if key in held]
        places = {name: place for place, name in enumerate(saved.names)}
        there = [name for name in known if name in places]
        then = sorted(there, key=places.__getitem__)
        if there != then:
            odd = next(number for number, name in enumerate(there) if then[number] != name)
            raise ConfigError(
                "restore", where="param_groups",
                expected="parameters registered in the order of the checkpoint, whose optimizer states have no names",
                got=f"{there[odd]} before {then[odd]}",
                remedy="restore into the module as it was, and save again: states have names since",
            )  # fmt: skip


def _told_by_shapes(form: Any, params: Sequence[torch.Tensor], saved: Saved) -> bool:
    """Return whether shapes tell which saved state belongs to which parameter, and the order is right."""
    shapes = [tuple(param.shape) for param in params]
    if len(set(shapes)) < len(shapes):
        return False
    for number, node in _members(form)["state"]["dict"]:
        found = [saved.shape_of(each["tensor"]) for each in _members(node).values()
                 if isinstance(each, dict) and "tensor" in each]  # fmt: skip
        if any(found) and (number not in range(len(shapes)) or shapes[number] not in found):
            return False
    return True


def _as_laid_out(state: Any, param: torch.Tensor | None) -> Any:
    """The state of ``param``, of which tensors of its shape get its strides, as torch's optimizers make them."""
    if param is None or not isinstance(state, dict):
        return state
    like = torch.empty_like(param, device="meta")
    return {
        name: torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device).copy_(value)
        if isinstance(value, torch.Tensor) and value.shape == like.shape and value.stride() != like.stride() else value
        for name, value in state.items()
    }  # fmt: skip


def _members(form: Any) -> dict[Any, Any]:
    """The nodes of a dict's form by key; nothing of another form."""
    return dict(form["dict"]) if isinstance(form, dict) and "dict" in form else {}


def _saved_groups(form: Any) -> list[dict[str, Any]] | None:
    """The parameter groups in the form of an optimizer's state dict; None where it is none."""
    groups = _members(form).get("param_groups")
    if not isinstance(groups, dict) or "list" not in groups or "dict" not in (_members(form).get("state") or ()):
        return None
    found = [_members(group) for group in groups["list"]]
    are_groups = all("list" in (group.get("params") or ()) for group in found)
    return found if are_groups else None


def _texts(form: Any) -> list[str] | None:
    return form["list"] if isinstance(form, dict) and "list" in form else None


def _reordered(form: Any, groups: list[dict[str, Any]], order: torch_tensors.Order, own: list[list[str]] | None) -> Any:
    """The form of a state dict in another order of parameters, with the names ``own``."""
    made, first = [], 0
    for at, number in enumerate(order.groups):
        group = dict(groups[number])
        if own is not None:
            count = len(own[at])
            group["params"] = {"list": [*range(first, first + count)]}
            group["param_names"] = {"list": own[at]}
            first += count
        made.append({"dict": [[*item] for item in group.items()]})
    members = _members(form)
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


def write(chosen: Chosen, path: Path, tell: Tell) -> None:
    """By `torch.save`, of dicts, lists, tuples, numbers and tensors, which `torch.load` takes with ``weights_only``.

    All elements must fit in memory.

    Raises:
        ConfigError: PyTorch has no such dtype.
        DataError: a file is missing or damaged.
        OSError: the file cannot be written.
    """
    wanted = [node["tensor"] for _, node in flatten.leaves(chosen.form) if isinstance(node, dict) and "tensor" in node]
    tensors = {name: chosen.manifest.tensors[name] for name in wanted}
    for name, each in tensors.items():
        _made(name, np.empty(0, each.stored_dtype), each.dtype)  # refused before gigabytes are read
    arrays = dict(read(chosen.folder, tensors, tell))
    state = flatten.built(chosen.form, lambda name: _made(name, arrays[name], tensors[name].dtype))
    try:
        with open(path, "wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # that the archive is torn; it was raised while this was:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _made(name: str, array: np.ndarray, dtype: str) -> torch.Tensor:
    try:
        return tensor(array, dtype)
    except TypeError as error:
        raise ConfigError("export", where=name, expected="a dtype that PyTorch has", got=dtype,
                          remedy="--format npz") from error  # fmt: skip
