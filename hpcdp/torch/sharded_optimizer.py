"""`ShardedOptimizer`, its state, and the gradient scaler.

- `ShardedOptimizer`: each rank updates its shard of parameters that exist once per node. `give`, `check` and `take`
  convert its state to and from the state dicts of torch's optimizers.
- `broadcast_optimizer_state`: copies the state of any optimizer from one rank to all.
- `GradScaler`: loss scaling against underflow, also for a `ShardedOptimizer`.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from ..collectives import allreduce
from ..comm import World, init
from ..comm.consistency import on_every_rank, require_same
from ..core.arrays import from_host, to_host
from ..core.checks import choices, not_copied, whole_number
from ..data_parallel import ShardedUpdate, sharded_update
from ..data_parallel.bucket_layout import Bucket, Slot
from ..errors import ConfigError, MismatchError, NonFiniteGradientError, UnsupportedError
from ..optim import SGD, Adam, AdamW, Optimizer
from . import tensors
from .backward import Backward
from .distributed import DistributedDataParallel

_NAMES = {"momentum": "momentum_buffer", "m": "exp_avg", "v": "exp_avg_sq"}
"""Torch's names of the states of our rules."""


def give(whole: torch.optim.Optimizer, backward: Backward, owner: ShardedUpdate, steps: int) -> dict[str, Any]:
    """Return the state dict of torch's optimizer ``whole`` of all parameters after ``steps``; every rank must call."""
    reducer = backward.reducer
    flat = [_gathered(bucket, backward, owner) for bucket in reducer.buckets] if steps else []
    updated = {id(tensor) for group in whole.param_groups for tensor in group["params"]}
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
    state_dict: dict[str, Any] = whole.state_dict()
    whole.state.clear()
    return state_dict


def check(state_dict: Any, whole: torch.optim.Optimizer, names: Mapping[int, str], state_names: Sequence[str]) -> None:
    """Check that ``state_dict`` fits an optimizer such as ``whole``, whose rules keep ``state_names``.

    Args:
        state_dict: the state dict.
        whole: torch's optimizer of all parameters.
        names: the names of the parameters, by `id`.
        state_names: our names of the states.

    Raises:
        ConfigError: it does not fit; the error has the first difference.
    """
    if not is_well_formed(state_dict):
        raise ConfigError(
            "load_state_dict", expected="a result of state_dict(), a dict with state and param_groups",
            got=f"a dict with {[*state_dict]}" if isinstance(state_dict, dict) else type(state_dict).__name__,
        )  # fmt: skip
    expected = {_NAMES[name] for name in state_names}
    for state in state_dict["state"].values():
        if set(state) - {"step"} != expected and any(state.get(name) is not None for name in (*state, *expected)):
            raise ConfigError(
                "load_state_dict", expected=f"states of {', '.join(sorted(expected)) or 'nothing'}",
                got=", ".join(state), remedy="load the state_dict() of an optimizer of the same class and settings",
            )  # fmt: skip
    lacking = {name for name in whole.defaults for group in state_dict["param_groups"] if name not in group}
    if lacking:
        raise ConfigError(
            "load_state_dict", expected=f"groups with {', '.join(sorted(lacking))}", got="groups without",
            remedy="load the state_dict() of an optimizer of the same class",
        )  # fmt: skip
    saved, own = ([[*group["params"]] for group in of] for of in (state_dict["param_groups"], whole.param_groups))
    if list(map(len, saved)) != list(map(len, own)):
        raise ConfigError(
            "load_state_dict", where="param_groups", expected=f"groups of {list(map(len, own))} parameters",
            got=list(map(len, saved)), remedy="make the optimizer with the same groups",
        )  # fmt: skip
    for number, tensor in zip(itertools.chain(*saved), itertools.chain(*own), strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            if name != "step" and value is not None and tuple(value.shape) != tuple(tensor.shape):
                raise ConfigError(
                    "load_state_dict", where=f"{name} of {names[id(tensor)]}", expected=f"shape {tuple(tensor.shape)}",
                    got=tuple(value.shape),
                )  # fmt: skip


def is_well_formed(state_dict: Any) -> bool:
    """Return whether states are dicts of tensors by number, and groups are dicts with numbers."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        return False
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    are_groups = all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
    are_tensors = (
        isinstance(of_param, dict)
        and all(name == "step" or value is None or isinstance(value, torch.Tensor) for name, value in of_param.items())
        for of_param in state.values()
    )
    return are_groups and all(are_tensors)


def described(state_dict: dict[str, Any]) -> list[str]:
    """Return a line for each group and each parameter's state, which identifies its contents."""
    lines = [f"group {number}: {group}" for number, group in enumerate(state_dict["param_groups"])]
    for number, state in state_dict["state"].items():
        lines.append(f"state of parameter {number}: { {name: _digest(value) for name, value in state.items()} }")
    return lines


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or not value.dim():
        return str(value)
    return f"crc32 {zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()):08x}"


def take(whole: torch.optim.Optimizer, backward: Backward, owner: ShardedUpdate) -> int:
    """Move this rank's shard of the state that ``whole`` has loaded to ``owner``; return the number of steps."""
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
    owner.passed_over = {name: most - count for name, count in steps.items() if count < most}
    whole.state.clear()
    return most


def _gathered(bucket: Bucket, backward: Backward, owner: ShardedUpdate) -> dict[str, np.ndarray]:
    """Return the state of a whole bucket, by name; every rank must call."""
    world: World = backward.reducer.world
    first, last = owner.span(bucket)
    states = {}
    for name, mine in owner.states[bucket.number].items():
        full = np.zeros(bucket.mine.shape, bucket.mine.dtype)
        if backward.reducer.is_counted:
            full[first:last] = to_host(mine)
        states[name] = allreduce(full, "sum", world)
    return states


def _part(flat: np.ndarray, slot: Slot) -> np.ndarray:
    return flat[slot.offset : slot.offset + slot.count].reshape(slot.shape)


P = ParamSpec("P")
T = TypeVar("T")

_UNSUPPORTED = ("dampening", "maximize", "amsgrad", "differentiable")


def _on_torchs_stream(
    method: Callable[Concatenate[ShardedOptimizer, P], T],
) -> Callable[Concatenate[ShardedOptimizer, P], T]:
    """Wrap ``method`` to launch its GPU work on torch's stream, which writes gradients and reads parameters."""

    @wraps(method)
    def call(self: ShardedOptimizer, *args: P.args, **kwargs: P.kwargs) -> T:
        with tensors.on_torchs_stream(self._device):
            return method(self, *args, **kwargs)

    return call


class ShardedOptimizer(torch.optim.Optimizer):
    """SGD, Adam or AdamW in which each rank updates its shard of the parameters, with the results of ``torch.optim``.

    Parameters exist once per node, in memory that its ranks share (see `changing_parameters`). Each rank updates its
    shard by a fused kernel, in the same pass that sums the gradients, and holds 1/n of the optimizer's state. On GPUs
    each rank has all parameters, and updated shards are gathered in the node. Parameters keep their strides, such as
    those of ``channels_last``, and gradients and states have the same. Every rank must make it, and must call `step`,
    `clip_grad_norm_`, `state_dict` and `load_state_dict`. Settings such as learning rates may be changed in
    ``param_groups`` between steps, also by torch's schedulers.

    Args:
        model: a module wrapped with ``owner="shard"``. Its parameters become views of shared memory, or of flat arrays
            on a GPU.
        optimizer_class: ``torch.optim.SGD``, ``torch.optim.Adam`` or ``torch.optim.AdamW``.
        params: parameters, or dicts of parameters and settings, as for torch's optimizers; None: all.
        settings: arguments of ``optimizer_class``.

    Raises:
        ConfigError: another class; a model that is not wrapped so, or already has such an optimizer; a parameter that
            is not the model's.
        MismatchError: the ranks' classes, groups or settings differ, or later their states or calls; on every rank.
        UnsupportedError: settings that the kernels do not support (amsgrad, dampening, maximize), or that need states
            of different kinds; parameters that are summed in another dtype than their own, or that share memory with a
            buffer or with each other.

    Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, stage 1.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        params: Iterable[Any] | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(optimizer_class, torch.optim.Optimizer):
            name = type(optimizer_class).__name__
            raise ConfigError(
                "ShardedOptimizer", where="optimizer_class", expected="a class, e.g. torch.optim.AdamW",
                got=f"an instance of {name}", remedy=f"ShardedOptimizer(model, torch.optim.{name}, lr=...) makes it",
            )  # fmt: skip
        if optimizer_class not in _RULES:
            raise ConfigError(
                "ShardedOptimizer", where="optimizer_class",
                expected=choices(f"torch.optim.{kind.__name__}" for kind in _RULES), got=repr(optimizer_class),
                remedy="wrap the model with owner='rank' to use another class",
            )  # fmt: skip
        if not isinstance(model, DistributedDataParallel) or model.owner != "shard" or model.backward_pass.awaits_step:
            got = type(model).__name__
            if isinstance(model, DistributedDataParallel):
                got = "one with owner='rank'" if model.owner != "shard" else "one that has a ShardedOptimizer"
            expected = "a DistributedDataParallel(module, owner='shard') without a ShardedOptimizer"
            raise ConfigError("ShardedOptimizer", where="model", expected=expected, got=got)
        self._backward = model.backward_pass
        self._world = model.world
        for param in self._backward.params.values():
            if param.tensor.dtype not in (torch.float32, torch.float64):
                raise UnsupportedError(
                    "ShardedOptimizer", where=param.name, expected="a parameter of float32 or float64",
                    got=param.tensor.dtype, remedy="use torch.autocast, or owner='rank'",
                )  # fmt: skip
        model.refuse_shared_memory("ShardedOptimizer")
        self._names = {id(tensor): name for name, tensor in model.module.named_parameters()}
        self._whole = optimizer_class(model.parameters() if params is None else params, **settings)
        """Torch's optimizer, which checks settings and makes state dicts; it holds no state between calls."""
        self._owner: ShardedUpdate | None = None
        super().__init__(self._whole.param_groups, self._whole.defaults)
        self.param_groups = self._whole.param_groups
        rules = self._rules_by_name()
        self._require_same_groups("ShardedOptimizer")
        self._device = model.gpu
        with tensors.on_torchs_stream(self._device):
            self._owner = ShardedUpdate(self._backward.reducer, self._rules[0], rules)
        self._places = {name: param.tensor.data_ptr() for name, param in self._backward.params.items()}
        self._backward.awaits_step = True
        self._steps = 0
        self._scale: float | None = None  # factor of the sums; None until gradients are summed
        self.knows_scaler = False
        """True if a `GradScaler` of this package is in use."""
        events = self._backward.turns.events
        events["step"] = self._step
        events["clip"] = self._clip
        events["unscale"] = self._unscale
        events["skip"] = lambda _: self._drop()

    __reduce__ = not_copied("ShardedOptimizer", "the optimizer", "call state_dict() on all ranks")

    @property
    def num_steps(self) -> int:
        """Number of updates so far."""
        return self._steps

    @property
    def _shards(self) -> ShardedUpdate:
        assert self._owner is not None
        return self._owner

    @property
    def parameter_names(self) -> Mapping[int, str]:
        """The names of the module's parameters, by `id`."""
        return self._names

    def _names_by_group(self) -> list[list[str]]:
        return [[self._names[id(tensor)] for tensor in group["params"]] for group in self.param_groups]

    def _require_same_groups(self, operation: str) -> None:
        """Raise `MismatchError` if groups or rules differ between ranks; every rank must call."""
        items = [f"group {number}: {', '.join(names)}" for number, names in enumerate(self._names_by_group())]
        rules = [f"group {number}: {rule.config()}" for number, rule in enumerate(self._rules)]
        require_same(self._world.comm, operation, [f"torch.optim.{type(self._whole).__name__}", *items, *rules])

    def _rules_by_name(self) -> dict[str, Optimizer | None]:
        for number, group in enumerate(self.param_groups):
            if any(id(tensor) not in self._names for tensor in group["params"]):
                raise ConfigError(
                    "ShardedOptimizer", where=f"group {number}", expected="parameters of the wrapped model",
                    got="another parameter", remedy="wrap one module with all, or use another optimizer for the others",
                )  # fmt: skip
        self._rules = [_rule(type(self._whole), group) for group in self.param_groups]
        if len({rule.state_names() for rule in self._rules}) > 1:
            raise UnsupportedError("ShardedOptimizer", where="params", expected="momentum in all groups, or in none")
        rules = zip(self._rules, self.param_groups, strict=True)
        rule_of = {id(tensor): rule for rule, group in rules for tensor in group["params"]}
        return {name: rule_of.get(id(param.tensor)) for name, param in self._backward.params.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch's optimizers; every rank must call, with the same group."""
        if self._owner is None:  # called by torch's constructor, with the groups that `_whole` has checked
            super().add_param_group(param_group)
        else:
            self._whole.add_param_group(param_group)
            try:
                rules = self._rules_by_name()
            except ConfigError:
                del self.param_groups[-1]
                self._rules_by_name()
                raise
            self._require_same_groups("add_param_group")
            self._owner.set_rules(rules)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step, also if `clip_grad_norm_` has summed them."""
        self._scale = None
        self._backward.drop()
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum the gradients over all ranks and update by their mean; every rank must call.

        Changes parameters in place and sets their gradients to None.
        """
        if self._shards.is_changing:
            raise ConfigError(
                "step", expected="a call outside of changing_parameters()", got="a call within the context"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rules = [_rule(type(self._whole), group) for group in self.param_groups]
        if any(rule.state_names() != self._rules[0].state_names() for rule in rules):
            raise UnsupportedError(
                "ShardedOptimizer", where="momentum", expected="momentum in all groups, or in none, at construction",
                got="another momentum since", remedy="make the optimizer with a momentum above 0",
            )  # fmt: skip
        settings = [vars(rule) for rule in rules]
        self._backward.turns.announce("step", settings)
        self._step(settings)
        return loss

    @_on_torchs_stream
    def _step(self, settings: list[dict[str, float]]) -> None:
        for rule, values in zip(self._rules, settings, strict=True):
            vars(rule).update(values)
        moved = self._moved()
        numbers = (self._steps, *(number for values in settings for number in values.values()), moved is not None)
        try:
            if self._scale is None:
                self._close(numbers)
            else:
                _, alike = self._backward.reducer.tally_alike(numbers)
                if not alike:
                    self._backward.refuse(numbers)
            if moved is not None:
                if self._scale is None:
                    self._backward.reducer.drop()  # wait for the reductions that were launched
                raise moved
            self._steps += 1
            if self._scale is None:
                self._shards.reduce_and_update(self._steps, 1.0 / self._backward.turns.divisor)
            else:
                self._shards.update(self._steps, self._scale)
            self._shards.pass_over()
            self._backward.at_close()
        except MismatchError as error:
            if moved is None:
                raise
            raise moved from error
        finally:
            self._drop()

    def _moved(self) -> ConfigError | None:
        """Return the error if this rank has replaced a parameter's memory; other ranks raise that steps differ."""
        for name, place in self._places.items():
            tensor = self._backward.params[name].tensor
            if tensor.data_ptr() != place:
                return ConfigError(
                    "step", where=name, expected="a parameter in the memory that the ranks share",
                    got=f"a parameter of {tensor.dtype} with its own memory",
                    remedy="change values within `with optimizer.changing_parameters():`, dtypes before wrapping",
                )  # fmt: skip
        return None

    def _drop(self) -> None:
        self._scale = None
        self._backward.reducer.reset()
        for param in self._backward.params.values():
            param.tensor.grad = None

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Let the next `step` scale the mean gradient down to ``max_norm`` if it is longer; every rank must call.

        As ``torch.nn.utils.clip_grad_norm_`` (of the 2-norm), which would only use this rank's gradients.

        Args:
            max_norm: the largest norm.
            error_if_nonfinite: whether a norm that is not finite is an error.

        Returns:
            The norm before, the same on all ranks.

        Raises:
            NonFiniteGradientError: the norm is not finite, and ``error_if_nonfinite``; on every rank.
        """
        self._backward.turns.announce("clip", float(max_norm))
        norm = self._clip(float(max_norm))
        if error_if_nonfinite and not math.isfinite(norm):
            raise NonFiniteGradientError("clip_grad_norm_", expected="a finite norm of the mean gradient", got=norm)
        return torch.tensor(norm)

    @_on_torchs_stream
    def _clip(self, max_norm: float) -> float:
        scale = self._sum()
        norm = self._norm("clip_grad_norm_", max_norm) * scale
        coefficient = max_norm / (norm + 1e-6)
        self._scale = scale * (1.0 if coefficient >= 1 else coefficient)  # NaN for a norm of NaN, as in torch
        return norm

    def unscale(self, factor: float) -> bool:
        """Let the next `step` multiply gradients by ``factor``; called by `GradScaler`, on every rank.

        Returns:
            Whether the mean gradient is finite. If not, `skip` must follow, and no step.
        """
        self._backward.turns.announce("unscale", factor)
        return self._unscale(factor)

    @_on_torchs_stream
    def _unscale(self, factor: float) -> bool:
        scale = self._sum()
        finite = math.isfinite(self._norm("unscale", factor))
        self._scale = scale * factor
        return finite

    def skip(self) -> None:
        """Drop gradients that are not finite, after `unscale`; every rank must call."""
        self._backward.turns.announce("skip")
        self._drop()

    def _norm(self, operation: str, setting: float) -> float:
        """Return the norm of the summed gradients; `MismatchError` unless all ranks pass the same ``setting``."""
        reducer = self._backward.reducer
        own = sharded_update.of_shards(reducer)
        (squares,), alike = reducer.tally_alike((setting,), own)
        if not alike:
            require_same(self._world.comm, operation, [f"{operation} by {setting!r}"], "pass the same on all ranks")
        return math.sqrt(squares)

    def _sum(self) -> float:
        """Sum the gradients over all ranks, unless they are summed; return the factor of the sums."""
        if self._scale is None:
            self._close(())
            self._shards.reduce()
            self._scale = 1.0 / self._backward.turns.divisor
        return self._scale

    def _close(self, settings: tuple[float, ...]) -> None:
        # Torch's optimizers also leave out a parameter whose gradient is None.
        self._shards.leave_out(self._backward.close(settings))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Torch's scaler reads this before a step; it would unscale and check this rank's gradients alone.
        if not self.knows_scaler:
            raise ConfigError(
                "GradScaler", expected="hpcdp.torch.GradScaler with a ShardedOptimizer", got="torch.amp.GradScaler",
                remedy="make the scaler by hpcdp.torch.GradScaler()",
            )  # fmt: skip
        return False

    @contextmanager
    def changing_parameters(self) -> Iterator[None]:
        """Let the program change parameters within this context; every rank must enter and leave it.

        See `hpcdp.Trainer.changing_parameters`; here, changes outside of it raise no error.
        """
        with tensors.on_torchs_stream(self._device), self._shards.changing():
            yield

    @_on_torchs_stream
    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks as a state dict of torch's optimizer; every rank must call.

        Groups have ``param_names``, by which `load_state_dict` matches parameters in any order.
        """
        state = give(self._whole, self._backward, self._shards, self._steps)
        for group, names in zip(state["param_groups"], self._names_by_group(), strict=True):
            group["param_names"] = names
        return state

    @_on_torchs_stream
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of torch's optimizer, or of another `ShardedOptimizer`; every rank must call.

        Parameters are matched by ``param_names`` of the groups, or by their order if the groups have none, because
        torch's optimizer was made of parameters without names.

        Raises:
            ConfigError: the state is of another optimizer or other parameters; nothing is changed then.
            MismatchError: the ranks' states differ; on every rank.
        """
        names = self._rules[0].state_names()

        def checked() -> dict[str, Any]:
            ordered = state_dict
            if is_well_formed(ordered):
                ordered = tensors.ordered("load_state_dict", ordered, self._names_by_group())
            check(ordered, self._whole, self._names, names)
            return ordered

        state_dict = on_every_rank(self._world.comm, checked)
        description = described(state_dict)
        require_same(self._world.comm, "load_state_dict", description, "load the same on all ranks")
        self._whole.load_state_dict(state_dict)
        self.param_groups = self._whole.param_groups
        self._steps = take(self._whole, self._backward, self._shards)
        self._shards.set_rules(self._rules_by_name())


def _sgd(group: dict[str, Any]) -> Optimizer:
    return SGD(
        lr=float(group["lr"]),
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        weight_decay=group["weight_decay"],
    )


def _adam(kind: type[Adam], group: dict[str, Any]) -> Optimizer:
    beta1, beta2 = group["betas"]
    return kind(lr=float(group["lr"]), beta1=float(beta1), beta2=float(beta2), eps=group["eps"],
                weight_decay=group["weight_decay"])  # fmt: skip


_RULES: dict[type[torch.optim.Optimizer], Callable[[dict[str, Any]], Optimizer]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: partial(_adam, Adam),
    torch.optim.AdamW: partial(_adam, AdamW),
}
"""Constructors of our rules from the settings of a parameter group."""


def _rule(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> Optimizer:
    unsupported = _UNSUPPORTED if kind is torch.optim.AdamW else (*_UNSUPPORTED, "decoupled_weight_decay")
    wrong = next((name for name in unsupported if group.get(name)), None)
    if wrong is not None:
        raise UnsupportedError("ShardedOptimizer", where=wrong, expected="the default", got=repr(group[wrong]),
                               remedy="wrap the model with owner='rank' and use torch's optimizer")  # fmt: skip
    return _RULES[kind](group)


def broadcast_optimizer_state(optimizer: Any, root: int = 0, world: World | None = None) -> None:
    """Copy the state and settings of ``optimizer`` from rank ``root`` to every rank; every rank must call.

    For torch's optimizers, and other objects with a ``state_dict``, such as a gradient scaler or a scheduler: after one
    rank has loaded a checkpoint, or after `DistributedDataParallel.join`.

    Args:
        optimizer: over the same parameters on every rank; changed in place.
        root: the rank whose state is copied.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        ConfigError: an invalid rank, or each rank holds a part of the state.
        MismatchError: the ranks' groups differ in shapes or names; on every rank.
        UnsupportedError: the state has a value other than tensors, numbers, texts, lists, tuples and dicts; on every
            rank.
    """
    world = init() if world is None else world
    whole_number("broadcast_optimizer_state", "root", root, 0, world.size - 1)
    if isinstance(optimizer, ShardedOptimizer):
        raise ConfigError(
            "broadcast_optimizer_state", expected="an optimizer with its whole state on each rank",
            got="a ShardedOptimizer", remedy="call its load_state_dict() on all ranks",
        )  # fmt: skip
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = optimizer.param_groups
        names = tensors.plain([group.get("param_names", ()) for group in groups])
        shapes = [[tuple(tensor.shape) for tensor in group["params"]] for group in groups]
        items = [f"group {number}: {group}" for number, group in enumerate(zip(shapes, names, strict=True))]
        require_same(world.comm, "broadcast_optimizer_state", items, "make the same optimizer on all ranks")
    is_root = world.rank == root
    sent: list[torch.Tensor] = []
    mine = on_every_rank(world.comm, lambda: _form(optimizer.state_dict(), sent) if is_root else None)
    form = world.comm.allgather_json(mine)[root]
    received: list[torch.Tensor] = []
    state = _filled(form, received)
    for number, into in enumerate(received):
        if is_root:
            into.copy_(sent[number])
        if into.numel():
            in_order = into.as_strided((into.numel(),), (1,))  # elements in the order of memory
            world.comm.native_broadcast(in_order.view(torch.uint8).numpy(), root)
    if not is_root:
        optimizer.load_state_dict(state)


def _form(value: Any, sent: list[torch.Tensor]) -> Any:
    """Return ``value`` as JSON, with tensors as shape, strides and dtype; append the tensors to ``sent``."""
    if isinstance(value, torch.Tensor):
        sent.append(value.detach())
        strides = torch.empty_like(value, device="meta").stride()
        return {"tensor": list(value.shape), "strides": strides, "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": [[key, _form(member, sent)] for key, member in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_form(member, sent) for member in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError("broadcast_optimizer_state", expected="tensors and numbers", got=type(value).__name__)


def _filled(form: Any, received: list[torch.Tensor]) -> Any:
    """Return the value of a `_form`, with new tensors, which are appended to ``received``."""
    if not isinstance(form, dict):
        return form
    if "tensor" in form:
        received.append(torch.empty_strided(form["tensor"], form["strides"], dtype=getattr(torch, form["dtype"])))
        return received[-1]
    if "dict" in form:
        return {key: _filled(node, received) for key, node in form["dict"]}
    ((kind, items),) = form.items()
    return {"list": list, "tuple": tuple}[kind](_filled(node, received) for node in items)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that also works with a `ShardedOptimizer`: a step is skipped on all ranks or on none.

    With ``owner="rank"`` torch's own scaler works as well, because all ranks have the same averages. Every rank must
    make it, with the same settings, and call `unscale_`, `step` and `update`. After `DistributedDataParallel.join`,
    `broadcast_optimizer_state` copies the scale of the ranks with the most batches to all.

    Args:
        device: the device type of the gradients, ``"cuda"`` for GPUs.
        settings: arguments of torch's scaler: init_scale, growth_factor, backoff_factor, growth_interval, enabled.
    """

    def __init__(self, device: str = "cpu", **settings: Any) -> None:
        super().__init__(device, **settings)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Update, unless a gradient of any rank is not finite; every rank must call."""
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.knows_scaler = True
            steps = optimizer.num_steps
            result = super().step(optimizer, *args, **kwargs)
            if self.is_enabled() and optimizer.num_steps == steps:
                optimizer.skip()
            return result
        return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # Torch's FSDP overrides the same method for the same purpose.
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        finite = optimizer.unscale(float(inv_scale))
        return {found_inf.device: found_inf.fill_(0.0 if finite else 1.0)}
