"""`ShardedOptimizer`, its state, and the gradient scaler.

Every rank updates its part of parameters that a node holds once.

The state of an optimizer by shards, from and to the form of torch's state dicts.

An optimizer's state, given from one rank to all.

Losses scaled up against underflow, with an optimizer of which every rank does its part.
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
from ..core.checks import not_copied, whole_number
from ..data_parallel import ShardedUpdate, sharded_update
from ..data_parallel.buckets import Bucket, Slot
from ..errors import ConfigError, MismatchError, NonFiniteGradientError, UnsupportedError
from ..optim import SGD, Adam, AdamW, Optimizer
from . import tensors as torch_tensors
from .distributed import Backward, DistributedDataParallel

_NAMES = {"momentum": "momentum_buffer", "m": "exp_avg", "v": "exp_avg_sq"}
"""Torch's names of what our rules keep."""


def give(whole: torch.optim.Optimizer, backward: Backward, owner: ShardedUpdate, steps: int) -> dict[str, Any]:
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


def take(whole: torch.optim.Optimizer, backward: Backward, owner: ShardedUpdate) -> int:
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


def _gathered(bucket: Bucket, backward: Backward, owner: ShardedUpdate) -> dict[str, np.ndarray]:
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


P = ParamSpec("P")
T = TypeVar("T")

_UNSUPPORTED = ("dampening", "maximize", "amsgrad", "differentiable")


def _on_torchs_stream(
    method: Callable[Concatenate[ShardedOptimizer, P], T],
) -> Callable[Concatenate[ShardedOptimizer, P], T]:
    """``method`` with all that it gives a GPU on torch's stream, where gradients are written and parameters read."""

    @wraps(method)
    def call(self: ShardedOptimizer, *args: P.args, **kwargs: P.kwargs) -> T:
        with torch_tensors.on_torchs_stream(self._device):
            return method(self, *args, **kwargs)

    return call


class ShardedOptimizer(torch.optim.Optimizer):
    """SGD, Adam or AdamW of which every rank does its part, with the numbers of ``torch.optim``.

    The node's ranks hold the parameters once, in memory that they share (see `changing_parameters`), and each
    updates its shard of them by a fused kernel, in the same pass that sums the gradients; it holds 1/n of the
    optimizer's state. On GPUs each rank has all parameters, and gets from the others of its node what those have
    updated. Strides of parameters, such as those of ``channels_last``, stay, and gradients and states have the
    same. Every rank must make it, and must call `step`, `clip_grad_norm_`, `state_dict` and `load_state_dict`.
    Learning rates and the like may be changed in ``param_groups`` between steps, by torch's schedulers, too.

    Args:
        model: wrapped with ``owner="shard"``. From now on its parameters are views of shared memory, on
            a GPU of flat arrays.
        optimizer_class: ``torch.optim.SGD``, ``torch.optim.Adam`` or ``torch.optim.AdamW``.
        params: parameters, or dicts of parameters and settings, as torch's optimizers take them; None: all.
        settings: as ``optimizer_class`` takes them.

    Raises:
        ConfigError: another class, a model that is not wrapped so, or has such an optimizer already; a parameter that
            is not the model's.
        MismatchError: the ranks' classes, groups or settings differ, later their states or what they do in a step; on
            every rank.
        UnsupportedError: settings that the kernels cannot do (amsgrad, dampening, maximize), or that need states of
            different kinds; parameters that are summed in another dtype than their own, or share memory with a buffer
            or with each other.

    Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, stage 1.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        params: Iterable[Any] | None = None,
        **settings: Any,
    ) -> None:
        if optimizer_class not in _RULES:
            raise ConfigError(
                "ShardedOptimizer", where="optimizer_class",
                expected=" or ".join(f"torch.optim.{each.__name__}" for each in _RULES), got=repr(optimizer_class),
                remedy="with another one, wrap the model with owner='rank'",
            )  # fmt: skip
        if not isinstance(model, DistributedDataParallel) or model.owner != "shard" or model.backward_pass.awaits_step:
            raise ConfigError(
                "ShardedOptimizer", where="model",
                expected="a module in DistributedDataParallel(module, owner='shard'), without such an optimizer yet",
                got=type(model).__name__,
            )  # fmt: skip
        self._backward = model.backward_pass
        self._world = model.world
        for each in self._backward.params.values():
            if each.tensor.dtype not in (torch.float32, torch.float64):
                raise UnsupportedError(
                    "ShardedOptimizer", where=each.name, expected="a parameter of float32 or float64",
                    got=each.tensor.dtype, remedy="use autocast, or owner='rank'",
                )  # fmt: skip
        model.refuse_shared_memory("ShardedOptimizer")
        self._names = {id(each): name for name, each in model.module.named_parameters()}
        self._whole = optimizer_class(model.parameters() if params is None else params, **settings)
        """Torch's own: checks and completes settings, knows the form of state dicts, and holds no state for long."""
        self._owner: ShardedUpdate | None = None
        super().__init__(self._whole.param_groups, self._whole.defaults)
        self.param_groups = self._whole.param_groups
        rules = self._rules_by_name()
        self._require_same_groups("ShardedOptimizer")
        self._device = model.device
        with torch_tensors.on_torchs_stream(self._device):
            self._owner = ShardedUpdate(self._backward.reducer, self._rules[0], rules)
        self._places = {name: each.tensor.data_ptr() for name, each in self._backward.params.items()}
        self._backward.awaits_step = True
        self._steps = 0
        self._scale: float | None = None  # of the sums, once they are there
        self.knows_scaler = False
        """Whether a `GradScaler` of this package is in use."""
        events = self._backward.turns.events
        events["step"] = self._step
        events["clip"] = self._clip
        events["unscale"] = self._unscale
        events["skip"] = lambda _: self._drop()

    __reduce__ = not_copied("ShardedOptimizer", "the optimizer", "call state_dict() on all ranks")

    @property
    def num_steps(self) -> int:
        """Updates made so far."""
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
        return [[self._names[id(each)] for each in group["params"]] for group in self.param_groups]

    def _require_same_groups(self, operation: str) -> None:
        """Raise on every rank unless all update the same parameters by the same rules; every rank must call."""
        items = [f"group {number}: {', '.join(names)}" for number, names in enumerate(self._names_by_group())]
        rules = [f"group {number}: {rule.config()}" for number, rule in enumerate(self._rules)]
        require_same(self._world.comm, operation, [f"torch.optim.{type(self._whole).__name__}", *items, *rules])

    def _rules_by_name(self) -> dict[str, Optimizer | None]:
        for number, group in enumerate(self.param_groups):
            if any(id(each) not in self._names for each in group["params"]):
                raise ConfigError(
                    "ShardedOptimizer", where=f"group {number}", expected="parameters of the wrapped model",
                    got="another one", remedy="wrap one module that holds all, or give others another optimizer",
                )  # fmt: skip
        self._rules = [_rule(type(self._whole), group) for group in self.param_groups]
        if len({rule.state_names() for rule in self._rules}) > 1:
            raise UnsupportedError("ShardedOptimizer", where="params", expected="momentum in all groups, or in none")
        group_of = {id(each): number for number, group in enumerate(self.param_groups) for each in group["params"]}
        return {
            name: self._rules[group_of[id(each.tensor)]] if id(each.tensor) in group_of else None
            for name, each in self._backward.params.items()
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of torch's optimizers; every rank must call, with the same."""
        if self._owner is None:  # as torch's constructor does with the groups that `_whole` has checked
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
        """Drop the gradients since the last step, also those that `clip_grad_norm_` has summed."""
        self._scale = None
        self._backward.drop()
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum the gradients over all ranks and update by their mean; every rank must call.

        Changes parameters in place and sets their gradients to None.
        """
        if self._shards.is_changing:
            raise ConfigError("step", expected="the end of changing_parameters()", got="a call within it")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rules = [_rule(type(self._whole), group) for group in self.param_groups]
        if any(rule.state_names() != self._rules[0].state_names() for rule in rules):
            raise UnsupportedError(
                "ShardedOptimizer", where="momentum", expected="in all groups, or in none, from the beginning",
                got="another one since", remedy="make the optimizer with a momentum above 0",
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
                    self._backward.reducer.drop()  # nobody leaves before what was launched has ended
                raise moved
            self._steps += 1
            if self._scale is None:
                self._shards.reduce_and_update(self._steps, 1.0 / self._backward.turns.divisor)
            else:
                self._shards.update(self._steps, self._scale)
            self._shards.pass_over()
        except MismatchError as error:
            if moved is None:
                raise
            raise moved from error
        finally:
            self._drop()

    def _moved(self) -> ConfigError | None:
        """What is wrong where this rank has given a parameter other memory; others are told that steps differ."""
        for name, place in self._places.items():
            tensor = self._backward.params[name].tensor
            if tensor.data_ptr() != place:
                return ConfigError(
                    "step", where=name, expected="a parameter in the memory that the ranks share",
                    got=f"one of {tensor.dtype} with memory of its own",
                    remedy="change values within `with optimizer.changing_parameters():`, dtypes before wrapping",
                )  # fmt: skip
        return None

    def _drop(self) -> None:
        self._scale = None
        self._backward.reducer.reset()
        for each in self._backward.params.values():
            each.tensor.grad = None

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Let the next `step` scale the mean gradient down to ``max_norm`` where it is longer; every rank must call.

        As ``torch.nn.utils.clip_grad_norm_`` (of the 2-norm), which would see this rank's gradients only.

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
        self._scale = scale * (1.0 if coefficient >= 1 else coefficient)  # of a norm that is NaN: NaN, as torch's
        return norm

    def unscale(self, factor: float) -> bool:
        """Let the next `step` multiply gradients by ``factor``; `GradScaler` calls it, on every rank.

        Returns:
            Whether the mean gradient is finite. Where it is not, no step is to follow, but `skip`.
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
        """Drop the gradients that `unscale` has found not to be finite; every rank must call."""
        self._backward.turns.announce("skip")
        self._drop()

    def _norm(self, operation: str, setting: float) -> float:
        """The norm of the summed gradients, of which all ranks make use with the same ``setting``."""
        reducer = self._backward.reducer
        own = sharded_update.of_shards(reducer)
        (squares,), alike = reducer.tally_alike((setting,), own)
        if not alike:
            require_same(self._world.comm, operation, [f"{operation} by {setting!r}"], "pass the same on all ranks")
        return math.sqrt(squares)

    def _sum(self) -> float:
        """Sum the gradients over all ranks, unless they are; what the sums are to be multiplied with."""
        if self._scale is None:
            self._close(())
            self._shards.reduce()
            self._scale = 1.0 / self._backward.turns.divisor
        return self._scale

    def _close(self, settings: tuple[float, ...]) -> None:
        # As by torch's optimizers, which pass over a parameter whose gradient is None.
        self._shards.leave_out(self._backward.close(settings))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Torch's scaler asks before it steps; it would unscale this rank's gradients, and look for infinities in them.
        if not self.knows_scaler:
            raise ConfigError(
                "GradScaler", expected="hpcdp.torch.GradScaler with a ShardedOptimizer", got="torch.amp.GradScaler"
            )
        return False

    @contextmanager
    def changing_parameters(self) -> Iterator[None]:
        """Within it a program changes parameters by itself, alike on all ranks; every rank must enter and leave it.

        See `hpcdp.Trainer.changing_parameters`; here, changes elsewhere are not refused.
        """
        with torch_tensors.on_torchs_stream(self._device), self._shards.changing():
            yield

    @_on_torchs_stream
    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks in the form of torch's optimizer, which can load it; every rank must call.

        Groups have ``param_names``, by which `load_state_dict` matches parameters, in whatever order they are.
        """
        found = give(self._whole, self._backward, self._shards, self._steps)
        for group, names in zip(found["param_groups"], self._names_by_group(), strict=True):
            group["param_names"] = names
        return found

    @_on_torchs_stream
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the state of torch's optimizer, or of another `ShardedOptimizer`; every rank must call.

        Parameters are matched by ``param_names`` of the groups; where those have none, as of an optimizer of torch's
        that was made of parameters alone, by their order.

        Raises:
            ConfigError: it is of another optimizer or other parameters; nothing is changed then.
            MismatchError: the ranks' states differ; on every rank.
        """
        names = self._rules[0].state_names()

        def checked() -> dict[str, Any]:
            given = state_dict
            if is_well_formed(given):
                given = torch_tensors.ordered("load_state_dict", given, self._names_by_group())
            check(given, self._whole, self._names, names)
            return given

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
"""Our rule with the settings of a parameter group."""


def _rule(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> Optimizer:
    unsupported = _UNSUPPORTED if kind is torch.optim.AdamW else (*_UNSUPPORTED, "decoupled_weight_decay")
    wrong = next((name for name in unsupported if group.get(name)), None)
    if wrong is not None:
        raise UnsupportedError("ShardedOptimizer", where=wrong, expected="the default", got=repr(group[wrong]),
                               remedy="wrap the model with owner='rank' and use torch's own")  # fmt: skip
    return _RULES[kind](group)


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
    whole_number("broadcast_optimizer_state", "root", root, 0, world.size - 1)
    if isinstance(optimizer, ShardedOptimizer):
        raise ConfigError(
            "broadcast_optimizer_state", expected="an optimizer whose whole state is on each rank",
            got="a ShardedOptimizer", remedy="call its load_state_dict() on all ranks",
        )  # fmt: skip
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = optimizer.param_groups
        names = torch_tensors.plain([group.get("param_names", ()) for group in groups])
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


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, for a `ShardedOptimizer`, too: a step is left out on all ranks or on none.

    With ``owner="rank"`` torch's own does as well, since all ranks see the same averages. Every rank must make it, with
    the same settings, and call `unscale_`, `step` and `update`. After `DistributedDataParallel.join`
    `broadcast_optimizer_state` gives all ranks the scale of those that went on longest.

    Args:
        device: of the gradients, ``"cuda"`` for those on GPUs.
        settings: as torch's takes them: init_scale, growth_factor, backoff_factor, growth_interval, enabled.
    """

    def __init__(self, device: str = "cpu", **settings: Any) -> None:
        super().__init__(device, **settings)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Update, unless a gradient of some rank is not finite; every rank must call."""
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
        # Torch's FSDP overrides the same method for the same end.
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        finite = optimizer.unscale(float(inv_scale))
        return {found_inf.device: found_inf.fill_(0.0 if finite else 1.0)}
