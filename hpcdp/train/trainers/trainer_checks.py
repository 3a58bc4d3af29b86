"""What every Trainer refuses: parameters, counts, and ranks that differ."""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ... import holders
from ...arrays import is_host
from ...comm import Communicator, World
from ...comm.agreement import require_same
from ...errors import ConfigError, StaleGradientError, type_named
from ...gradients.bucket import Parameter
from ...gradients.by_hand import being_changed
from ...optim import Optimizer


def no_parameters(given: object) -> ConfigError:
    """The error of a Trainer that is given something else."""
    expected = "parameters, such as those of net.parameters()"
    return ConfigError("Trainer", where="params", expected=expected, got=type_named(given))


_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Of parameters that are trained."""


def trained(params: Sequence[Parameter], world: World | None) -> list[Parameter]:
    """Those that want a gradient; `ConfigError` for what is no parameter, two of one name, or for none, unless
    ``world`` has but one stage of a model. The others get arrays of their own where ranks hold them together, since an
    earlier Trainer had them: no later one would change those for all."""
    params = list(params)
    for param in params:
        if not hasattr(param, "grad_req"):
            raise no_parameters(param)
    if any(id(param) in being_changed for param in params):
        raise ConfigError(
            "Trainer", expected="the end of another one's changing_parameters()", got="a Trainer made within it"
        )
    found = [param for param in params if param.grad_req != "null"]
    for param in params:
        if param.grad_req != "null":
            continue
        if holders.change_of(param.data) is not None:
            param.data = param.data.copy()
        if param.grad_hook is None:  # else an earlier Trainer may train it
            param.grad_hook = _warn_of_unfrozen
    if not found and (world is None or world.model_comm is None):
        raise ConfigError("Trainer", where="params", expected="at least one trainable parameter", got="none")
    for param in found:
        if str(param.data.dtype) not in _DTYPES:
            raise ConfigError("Trainer", where=param.name, expected=" or ".join(_DTYPES), got=param.data.dtype)
    twice = [name for name, number in Counter(param.name for param in found).items() if number > 1]
    if twice:
        raise ConfigError(
            "Trainer", where="params", expected="different names", got=f"{twice[0]!r} twice",
            remedy="make two networks children of one Module, which puts their names before those of their parameters",
        )  # fmt: skip
    return found


def _warn_of_unfrozen(param: Parameter) -> None:
    """What backward calls when it has written the gradient of a parameter that its Trainer has left alone; once."""
    param.grad_hook = None
    warnings.warn(
        f"{param.name} has a gradient, and is not trained: it had grad_req='null' when its Trainer was made. Make a "
        "new Trainer to train it",
        stacklevel=2,
    )


def described(params: Sequence[Parameter]) -> list[tuple[str, tuple[int, ...], np.dtype]]:
    """Name, shape and dtype of each."""
    return [(param.name, tuple(param.data.shape), np.dtype(param.data.dtype)) for param in params]


def _marks(param: Parameter) -> str:
    """What ranks must have alike of it, in the line about it: a difference then stands beside its like."""
    accumulated = " grad_req='add'" if param.grad_req == "add" else ""
    return accumulated + (" of a layer for all ranks together" if getattr(param, "is_joint", False) else "")


def require_alike(world: World, params: Sequence[Parameter], optimizer: Optimizer, settings: Sequence[str]) -> None:
    """Raises `MismatchError` where ranks have given a Trainer other things; every rank must call."""
    places = ["" if is_host(param.data) else " on a GPU" for param in params]  # where gradients are summed follows
    items = [
        f"{name} {shape} {dtype}{place}{_marks(param)}"
        for param, (name, shape, dtype), place in zip(params, described(params), places, strict=True)
    ]
    remedy = (
        "build the same model with the same options on every rank; for the stages of a pipeline, or layers that are "
        "split, pass their replicas as the world"
    )
    require_same(world.comm, "Trainer", [*items, f"optimizer {optimizer.config()}", *settings], remedy)


def require_same_settings(comm: Communicator, operation: str, learning_rate: float, loss_scale: float) -> None:
    """Raises `MismatchError` where ranks would update in different ways; every rank must call."""
    items = [f"learning rate {learning_rate}", f"loss scale {loss_scale}"]
    require_same(comm, operation, items, "change them alike on all ranks")


def require_same_parameters(own: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Raises `ConfigError` where a state that is ``given`` has other parameters than the trainer's ``own``."""
    if set(given) != set(own):
        odd = min(set(given) ^ set(own))
        held, lacks = ("the trainer", "the state") if odd in own else ("the state", "the trainer")
        raise ConfigError("load_state_dict", where=odd, expected=f"it in {lacks}", got=f"it in {held} only")


def checked_count(operation: str, count: int) -> int:
    """``count`` as an int; `ConfigError` unless it is a number of samples."""
    try:
        checked = operator.index(count)
    except TypeError:
        checked = -1
    if checked < 0:
        raise ConfigError(operation, where="count", expected="a number of samples, 0 or more", got=repr(count))
    return checked


def unfinished(operation: str) -> StaleGradientError:
    """There are gradients that a later update would have used."""
    return StaleGradientError(
        operation, expected="the end of a step", got="gradients that no_sync() or allreduce_grads() holds",
        remedy="call it after step(count), or drop them by step(0)",
    )  # fmt: skip
