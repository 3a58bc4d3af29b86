"""The state of a trainer on a store: for checkpoints, and as a file of the optimizer's state alone.

The file is that of the store, whoever updates: see `kvstore.states`; keys are the numbers of the parameters, with their
names beside. In a checkpoint keys are the names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays import from_host, to_host
from ...comm.agreement import on_every_rank, on_rank_0
from ...errors import ConfigError
from ...kvstore.arguments import Key
from ...kvstore.states import States, read_states, write_states
from ...state import Part, Saved, Sharded, require_state, take
from .trainer_checks import require_same_parameters, unfinished

if TYPE_CHECKING:
    from .store_trainer import StoreTrainer

_BY_KEY = ("values", "states", "updates", "residuals")
"""What a store's state has by key."""


def state_of(trainer: StoreTrainer) -> dict[str, Any]:
    """See `Trainer.state_dict`."""
    _refuse_unfinished(trainer, "state_dict")
    if not trainer.steps_together:
        trainer.synchronize()
    state: dict[str, Any] = {
        "step_count": trainer.step_count,
        "loss_scale": trainer.loss_scale,
        "num_nonfinite": trainer.num_nonfinite,
    }
    if _needs_store(trainer):
        state["store"] = _with_keys(trainer.store.state_dict(), dict(enumerate(trainer.names)))
    if not trainer.update_on_kvstore:
        optimizer = json.dumps(trainer.optimizer.config())
        state |= {"optimizer": optimizer, "states": _states(trainer), "passed_over": dict(trainer.passed_over)}
    return state


def _with_keys(store: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """The state of a store with other keys, where ``keys`` has some: numbers of parameters, or their names."""
    return {
        name: {keys.get(key, key): value for key, value in part.items()} if name in _BY_KEY else part
        for name, part in store.items()
    }


def fitted(trainer: StoreTrainer, form: Any, saved: Saved) -> Any:
    """See `FitsSaved.fitted`: states of version 0.1.0 had the numbers of parameters in the place of their names.

    Raises:
        ConfigError: the network in the same checkpoint has its parameters in another order.
    """
    members = _members(form)
    store = _members(members.get("store"))
    parts = {name: _members(store[name]) for name in _BY_KEY if name in store}
    if not parts or any(type(key) is not int for part in parts.values() for key in part):
        return form
    _require_order(trainer.names, saved)
    names = dict(enumerate(trainer.names))
    renamed = {
        name: {"dict": [[names.get(key, key), node] for key, node in part.items()]} for name, part in parts.items()
    }
    members["store"] = {"dict": [[*item] for item in (store | renamed).items()]}
    return {"dict": [[*item] for item in members.items()]}


def _members(form: Any) -> dict[Any, Any]:
    return dict(form["dict"]) if isinstance(form, dict) and "dict" in form else {}


def _require_order(names: list[str], saved: Saved) -> None:
    from ...checkpoint.names import unquoted  # not before: who does not save needs none of it

    last = [unquoted(name.rpartition("/")[2]) for name in saved.names]
    then = [name for name in last if name in names]
    now = [name for name in names if name in then]
    if len(set(then)) == len(then) and then != now:
        odd = next(number for number, name in enumerate(now) if then[number] != name)
        raise ConfigError(
            "restore", where="store", expected="parameters in the order of the checkpoint, whose store has no names",
            got=f"{now[odd]} before {then[odd]}",
            remedy="restore into the network as it was, and save again: stores of trainers have names since",
        )  # fmt: skip


def _refuse_unfinished(trainer: StoreTrainer, operation: str) -> None:
    def check() -> None:
        if trainer.holds_gradients:
            raise unfinished(operation)

    check() if trainer.world is None else on_every_rank(trainer.world.comm, check)


def _needs_store(trainer: StoreTrainer) -> bool:
    """Whether the store has something that training goes on from: values that it updates, or what it has not sent."""
    return trainer.update_on_kvstore or trainer.compression is not None


def _states(trainer: StoreTrainer) -> dict[str, dict[str, Sharded]]:
    """The optimizer's state by parameter and name, where every rank updates, and so has all of it."""
    copies, copy = (1, 0) if trainer.world is None else (trainer.world.size, trainer.world.rank)
    return {
        trainer.names[number]: {
            name: Sharded(tuple(param.data.shape), np.dtype(array.dtype), [Part(0, array)], copies, copy)
            for name, array in state.items()
        }
        for number, (param, state) in enumerate(zip(trainer.params.values(), trainer.states, strict=True))
        if state
    }


def take_over(trainer: StoreTrainer, state: dict[str, Any]) -> None:
    """See `Trainer.load_state_dict`."""
    _refuse_unfinished(trainer, "load_state_dict")
    require_state("a Trainer", state, "step_count", "loss_scale", "num_nonfinite")
    needed = ["store"] * _needs_store(trainer) + ["states"] * (not trainer.update_on_kvstore)
    if any(name not in state for name in needed):
        raise ConfigError(
            "load_state_dict", where="update_on_kvstore", expected=f"a state with {' and '.join(needed)}",
            got=f"one with {', '.join(state)}", remedy="make the Trainer as it was then",
        )  # fmt: skip
    if not trainer.update_on_kvstore:
        mine = _states(trainer)
        require_same_parameters(mine, state["states"])
        trainer.optimizer.take_config(json.loads(state["optimizer"]))
        for name, states in mine.items():
            for each, own in states.items():
                take(f"{name}/{each}", own, state["states"][name][each])
        trainer.passed_over = dict(state.get("passed_over", {}))
    if _needs_store(trainer):
        numbers = {name: number for number, name in enumerate(trainer.names)}
        trainer.store.load_state_dict(_with_keys(state["store"], numbers))
    trainer.step_count = state["step_count"]
    trainer.loss_scale = state["loss_scale"]
    trainer.num_nonfinite = state["num_nonfinite"]


def save(trainer: StoreTrainer, path: Path) -> None:
    """See `Trainer.save_states`."""
    if trainer.update_on_kvstore:
        trainer.store.save_optimizer_states(str(path))
        return
    steps: dict[Key, int] = {}
    states: States = {}
    if trainer.step_count:
        for (key, param), state in zip(trainer.params.items(), trainer.states, strict=True):
            steps[key] = trainer.step_count - trainer.passed_over.get(trainer.names[key], 0)
            states |= {(key, name): to_host(array).reshape(param.data.shape) for name, array in state.items()}

    def write() -> None:
        write_states(path, trainer.optimizer, steps, states, trainer.store.key_names)

    write() if trainer.world is None else on_rank_0(trainer.world.comm, write)


def load(trainer: StoreTrainer, path: Path) -> None:
    """See `Trainer.load_states`."""
    shapes: dict[Key, tuple[int, ...]] = {key: tuple(param.data.shape) for key, param in trainer.params.items()}

    def read() -> tuple[dict[Key, int], States]:
        return read_states(path, trainer.optimizer, shapes, trainer.store.key_names)

    steps, states = read() if trainer.world is None else on_every_rank(trainer.world.comm, read)
    if trainer.update_on_kvstore:
        trainer.store.load_optimizer_states(str(path))
    else:
        for key, state in enumerate(trainer.states):
            for name, place in state.items():
                place[...] = from_host(states[key, name].reshape(-1), place) if key in steps else 0
    trainer.step_count = max(steps.values(), default=0)
    own = {name: steps.get(key, 0) for key, name in enumerate(trainer.names)}
    trainer.passed_over = {name: trainer.step_count - each for name, each in own.items() if each < trainer.step_count}
