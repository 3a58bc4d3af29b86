"""The state of an optimizer by shards, from and to the form of torch's state dicts."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..arrays import from_host, to_host
from ..collectives import allreduce
from ..comm import World
from ..errors import ConfigError
from ..gradients import ShardOwner
from ..gradients.bucket import Bucket
from ..gradients.buckets import Slot
from .backward import Backward

_NAMES = {"momentum": "momentum_buffer", "m": "exp_avg", "v": "exp_avg_sq"}
"""Torch's names of what our rules keep."""


def give(whole: torch.optim.Optimizer, backward: Backward, owner: ShardOwner, steps: int) -> dict[str, Any]:
    """What ``whole``, torch's optimizer of all parameters, would give after ``steps``; every rank must call."""
    reducer = backward.reducer
    flat = [_gathered(bucket, backward, owner) for bucket in reducer.buckets] if steps else []
    updated = {id(each) for group in whole.param_groups for each in group["params"]}
    for slot in reducer.layout.slots:
        param = backward.params[slot.name]
        tensor = param.tensor
        made = steps - owner.passed_over.get(slot.name, 0)
        if not made or id(tensor) not in updated:
            continue
        state: dict[str, Any] = {
            _NAMES[name]: param.shaped(torch.from_numpy(_part(array, slot).copy())).to(tensor.device)
            for name, array in flat[slot.bucket].items()
        }
        if "exp_avg" in state:
            state["step"] = torch.tensor(float(made))
        whole.state[tensor] = state
    found: dict[str, Any] = whole.state_dict()
    whole.state.clear()
    return found


def check(state_dict: Any, whole: torch.optim.Optimizer, names: Mapping[int, str], state_names: Sequence[str]) -> None:
    """Raise unless ``state_dict`` is of an optimizer such as ``whole``, that keeps ``state_names`` of ours.

    Args:
        names: those of the parameters, by `id`.

    Raises:
        ConfigError: says what is another.
    """
    if not is_well_formed(state_dict):
        raise ConfigError(
            "load_state_dict", expected="what state_dict() gives, a dict with state and param_groups",
            got=f"a dict with {[*state_dict]}" if isinstance(state_dict, dict) else type(state_dict).__name__,
        )  # fmt: skip
    expected = {_NAMES[name] for name in state_names}
    for state in state_dict["state"].values():
        if set(state) - {"step"} != expected and any(state.get(name) is not None for name in (*state, *expected)):
            raise ConfigError(
                "load_state_dict", expected=f"states of {', '.join(sorted(expected)) or 'nothing'}",
                got=", ".join(state), remedy="load what an optimizer of the same class and settings gave",
            )  # fmt: skip
    lacking = {name for name in whole.defaults for group in state_dict["param_groups"] if name not in group}
    if lacking:
        raise ConfigError(
            "load_state_dict", expected=f"groups with {', '.join(sorted(lacking))}", got="some without",
            remedy="load what an optimizer of the same class gave",
        )  # fmt: skip
    theirs, ours = ([[*group["params"]] for group in each] for each in (state_dict["param_groups"], whole.param_groups))
    if [len(each) for each in theirs] != [len(each) for each in ours]:
        raise ConfigError(
            "load_state_dict", where="param_groups", expected=f"groups of {[len(each) for each in ours]} parameters",
            got=[len(each) for each in theirs],
        )  # fmt: skip
    for number, tensor in zip(itertools.chain(*theirs), itertools.chain(*ours), strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            if name != "step" and value is not None and tuple(value.shape) != tuple(tensor.shape):
                raise ConfigError(
                    "load_state_dict", where=f"{name} of {names[id(tensor)]}", expected=f"shape {tuple(tensor.shape)}",
                    got=tuple(value.shape),
                )  # fmt: skip


def is_well_formed(state_dict: Any) -> bool:
    """Whether states are dicts of tensors by number, and groups dicts with numbers."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        return False
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    are_groups = all(isinstance(each, dict) and isinstance(each.get("params"), list) for each in groups)
    are_tensors = (
        isinstance(each, dict)
        and all(name == "step" or value is None or isinstance(value, torch.Tensor) for name, value in each.items())
        for each in state.values()
    )
    return are_groups and all(are_tensors)


def described(state_dict: dict[str, Any]) -> list[str]:
    """A line for each group and each parameter's state, which are the same where those are."""
    lines = [f"group {number}: {group}" for number, group in enumerate(state_dict["param_groups"])]
    for number, state in state_dict["state"].items():
        lines.append(f"state of parameter {number}: { {name: _digest(value) for name, value in state.items()} }")
    return lines


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or not value.dim():
        return str(value)
    return f"crc32 {zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()):08x}"


def take(whole: torch.optim.Optimizer, backward: Backward, owner: ShardOwner) -> int:
    """Take this rank's shard of the state that ``whole`` has loaded, and clear it there. Returns the steps made."""
    steps = dict.fromkeys(backward.params, 0)
    for bucket in backward.reducer.buckets:
        first, last = owner.span(bucket)
        for name, mine in owner.states[bucket.number].items():
            full = np.zeros(bucket.mine.shape, bucket.mine.dtype)
            for slot in bucket.slots:
                param = backward.params[slot.name]
                state = whole.state.get(param.tensor, {})
                if state.get(_NAMES[name]) is not None:
                    values = param.flat(state[_NAMES[name]]).cpu().numpy()
                    _part(full, slot)[...] = values.reshape(slot.shape)
                    steps[slot.name] = int(state.get("step", 1))
            mine[...] = from_host(full[first:last], mine)
    most = max(steps.values())
    owner.passed_over = {name: most - each for name, each in steps.items() if each < most}
    whole.state.clear()
    return most


def _gathered(bucket: Bucket, backward: Backward, owner: ShardOwner) -> dict[str, np.ndarray]:
    """The state of a whole bucket, by name."""
    world: World = backward.reducer.world
    first, last = owner.span(bucket)
    found = {}
    for name, mine in owner.states[bucket.number].items():
        full = np.zeros(bucket.mine.shape, bucket.mine.dtype)
        if backward.reducer.is_counted:
            full[first:last] = to_host(mine)
        found[name] = allreduce(full, "sum", world)
    return found


def _part(flat: np.ndarray, slot: Slot) -> np.ndarray:
    return flat[slot.offset : slot.offset + slot.count].reshape(slot.shape)
