"""Optimizers and learning-rate schedules.

An optimizer knows nothing of ranks: it updates flat arrays, each a whole bucket or the shard that a rank owns. With the
same arguments the results are those of ``torch.optim``; the arithmetic is in `hpcdp.kernels.reference`.

Schedules count steps from 1, as ``Optimizer.update`` does, and have no state, so a resumed run needs only its step.
Both are registered by name. Their ``config()`` is plain JSON, so it can be sent to another rank or saved in a
checkpoint without pickling.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from . import kernels
from .core.arrays import Array, array_namespace, dtype_name, is_cupy, is_host, words
from .core.checks import instance, is_number, number, one_of, whole_number
from .errors import ConfigError, UnsupportedError
from .kernels import empty

__all__ = [
    "LARS", "SGD", "Adam", "AdamW", "ConstantSchedule", "CosineSchedule", "ExponentialSchedule", "MultiStepSchedule",
    "Optimizer", "Schedule", "StepSchedule", "WarmupSchedule", "create", "from_config", "linear_scaling",
    "require_by_elements", "require_optimizer",
]  # fmt: skip


Kind = TypeVar("Kind", bound="Configurable")


@dataclasses.dataclass
class Configurable:
    """A dataclass whose fields are its configuration; users select it by ``name``."""

    name: ClassVar[str]

    def config(self) -> dict[str, Any]:
        """Return ``{"name": ..., argument: value, ...}`` of JSON types only; the inverse of ``from_config``."""
        config: dict[str, Any] = {"name": self.name}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Configurable):
                value = value.config()
            elif is_number(value):  # NumPy scalars may have been assigned
                value = int(value) if isinstance(value, numbers.Integral) else float(value)
            config[field.name] = list(value) if isinstance(value, tuple) else value
        return config


def build(kinds: dict[str, type[Kind]], family: str, name: object, args: dict[str, Any]) -> Kind:
    """Return the object ``name`` of a family ("optimizer", "schedule"), made with ``args``.

    Raises:
        ConfigError: unknown name (the valid ones are listed), an unknown or missing argument, or an invalid value.
    """
    kind = kinds[one_of(family, None, name, sorted(kinds))]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(args) - set(fields))
    if unknown:
        raise ConfigError(family, where=name, expected=f"arguments {', '.join(fields)}", got=", ".join(unknown))
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in args]
    if missing:
        raise ConfigError(family, where=name, expected=f"an argument {', '.join(missing)}", got="none")
    return kind(**args)


def split_config(family: str, config: object) -> tuple[object, dict[str, Any]]:
    """Return the name and the other entries of a config.

    Raises:
        ConfigError: it is no dict with a "name".
    """
    if not isinstance(config, dict) or "name" not in config:
        raise ConfigError(family, expected='a dict with a "name"', got=repr(config))
    return config["name"], {key: value for key, value in config.items() if key != "name"}


_schedules: dict[str, type[Schedule]] = {}


@dataclasses.dataclass
class Schedule(Configurable, abc.ABC):
    """A learning rate that depends on the step."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):  # a subclass without a name does not replace its base
            _schedules[cls.name] = cls

    @abc.abstractmethod
    def learning_rate(self, step: int) -> float:
        """Return the rate of update ``step``, counted from 1."""


def _updates_before(step: int) -> int:
    """Return the number of updates before update ``step``.

    Raises:
        ConfigError: ``step`` is below 1.
    """
    return whole_number("learning_rate", "step", step, 1) - 1


def _times_power(lr: float, factor: float, exponent: float) -> float:
    """Return ``lr * factor ** exponent``, or infinity on overflow; the optimizer then raises an error with its name."""
    try:
        return lr * factor**exponent
    except OverflowError:
        return math.inf


def schedule_from_config(config: object) -> Schedule:
    """Return the schedule of a ``config()``.

    Raises:
        ConfigError: unknown name or argument; the valid ones are listed.
    """
    return build(_schedules, "schedule", *split_config("schedule", config))


@dataclasses.dataclass
class ConstantSchedule(Schedule):
    """The rate ``lr`` at every step."""

    lr: float
    name = "constant"

    def __post_init__(self) -> None:
        self.lr = number("ConstantSchedule", "lr", self.lr, least=0)

    def learning_rate(self, step: int) -> float:
        """See `Schedule.learning_rate`."""
        return self.lr


@dataclasses.dataclass
class StepSchedule(Schedule):
    """The rate ``lr * factor ** k`` after ``k * every`` steps."""

    lr: float
    every: int
    factor: float = 0.1
    name = "step"

    def __post_init__(self) -> None:
        self.lr = number("StepSchedule", "lr", self.lr, least=0)
        self.every = whole_number("StepSchedule", "every", self.every, 1)
        self.factor = number("StepSchedule", "factor", self.factor, least=0)

    def learning_rate(self, step: int) -> float:
        """See `Schedule.learning_rate`."""
        return _times_power(self.lr, self.factor, _updates_before(step) // self.every)


@dataclasses.dataclass
class MultiStepSchedule(Schedule):
    """The rate ``lr * factor ** k`` after ``k`` of the ``milestones``, which are increasing numbers of steps."""

    lr: float
    milestones: tuple[int, ...]
    factor: float = 0.1
    name = "multistep"

    def __post_init__(self) -> None:
        self.lr = number("MultiStepSchedule", "lr", self.lr, least=0)
        where, steps = "milestones", self.milestones
        instance("MultiStepSchedule", where, steps, Sequence, "a list of steps")
        self.milestones = tuple(whole_number("MultiStepSchedule", where, step, 1) for step in steps)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ConfigError("MultiStepSchedule", where=where, expected="increasing steps", got=repr(steps))
        self.factor = number("MultiStepSchedule", "factor", self.factor, least=0)

    def learning_rate(self, step: int) -> float:
        """See `Schedule.learning_rate`."""
        return _times_power(self.lr, self.factor, sum(step > milestone for milestone in self.milestones))


@dataclasses.dataclass
class ExponentialSchedule(Schedule):
    """The rate ``lr * factor ** ((step - 1) / every)``, a smooth decay by ``factor`` in ``every`` steps."""

    lr: float
    factor: float
    every: int = 1
    name = "exponential"

    def __post_init__(self) -> None:
        self.lr = number("ExponentialSchedule", "lr", self.lr, least=0)
        self.factor = number("ExponentialSchedule", "factor", self.factor, least=0)
        self.every = whole_number("ExponentialSchedule", "every", self.every, 1)

    def learning_rate(self, step: int) -> float:
        """See `Schedule.learning_rate`."""
        return _times_power(self.lr, self.factor, _updates_before(step) / self.every)


@dataclasses.dataclass
class CosineSchedule(Schedule):
    """Half a cosine from ``lr`` to ``final_lr`` in ``steps`` steps (Loshchilov and Hutter 2017, equation 5)."""

    lr: float
    steps: int
    final_lr: float = 0.0
    name = "cosine"

    def __post_init__(self) -> None:
        self.lr = number("CosineSchedule", "lr", self.lr, least=0)
        self.steps = whole_number("CosineSchedule", "steps", self.steps, 1)
        self.final_lr = number("CosineSchedule", "final_lr", self.final_lr, least=0)

    def learning_rate(self, step: int) -> float:
        """See `Schedule.learning_rate`."""
        done = min(_updates_before(step) / self.steps, 1.0)
        return self.final_lr + 0.5 * (self.lr - self.final_lr) * (1.0 + math.cos(math.pi * done))


@dataclasses.dataclass
class WarmupSchedule(Schedule):
    """Another schedule times a factor that grows linearly to 1 at step ``steps`` (Goyal et al. 2017, 2.2).

    Step 1 has the factor ``start + (1 - start) / steps``. The inner schedule counts the same steps, so its milestones
    do not shift.
    """

    schedule: Schedule
    steps: int
    start: float = 0.0
    name = "warmup"

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            self.schedule = schedule_from_config(self.schedule)
        self.steps = whole_number("WarmupSchedule", "steps", self.steps, 1)
        self.start = number("WarmupSchedule", "start", self.start, least=0, most=1)

    def learning_rate(self, step: int) -> float:
        """See `Schedule.learning_rate`."""
        grown = self.start + (1.0 - self.start) * min((_updates_before(step) + 1) / self.steps, 1.0)
        return grown * self.schedule.learning_rate(step)


_optimizers: dict[str, type[Optimizer]] = {}


@dataclasses.dataclass
class Optimizer(Configurable, abc.ABC):
    """An update rule for flat parameters.

    An object holds settings only. The state belongs to the caller, one dict for each flat array. Rules are elementwise
    (except `by_layer`), so an array updated whole or in any shards or segments gets the same bits.

    Args:
        lr: the learning rate, a number or a `Schedule`; may be assigned between steps.
    """

    lr: float | Schedule

    by_layer = False
    """True for a rule that needs the norms of whole layers, such as `LARS`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):  # a subclass without a name does not replace its base
            _optimizers[cls.name] = cls

    def __post_init__(self) -> None:
        if isinstance(self.lr, dict):
            self.lr = schedule_from_config(self.lr)
        if isinstance(self.lr, Schedule):
            self.learning_rate(1)
        else:
            self._check("lr", least=0)

    def _check(self, field: str, **limits: Any) -> None:
        setattr(self, field, number(type(self).__name__, field, getattr(self, field), **limits))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of update ``step``, counted from 1.

        Raises:
            ConfigError: the rate is negative or not finite.
        """
        lr = self.lr.learning_rate(step) if isinstance(self.lr, Schedule) else self.lr
        if type(lr) is float and 0 <= lr < math.inf:  # avoids a call, because each update asks
            return lr
        return number(type(self).__name__, "lr", lr, least=0)

    def take_config(self, config: dict[str, Any]) -> None:
        """Replace the settings in place by those of a ``config()`` of the same rule with the same state.

        Raises:
            ConfigError: another rule, or settings that need another state; nothing is changed.
        """
        name, args = split_config("optimizer", config)
        fields = {field.name for field in dataclasses.fields(self)}
        if name != self.name or set(args) != fields:
            got = f"{name} with {', '.join(args)}"
            raise ConfigError("load_state_dict", where="optimizer", expected=self.name, got=got)
        if isinstance(self.lr, Schedule) and self.lr.config() == args["lr"]:
            args["lr"] = self.lr  # may be of a subclass without a name of its own
        other = dataclasses.replace(self, **args)
        if other.state_names() != self.state_names():
            raise ConfigError(
                "load_state_dict", where="optimizer", expected=f"{name} with state {self.state_names()}",
                got=f"settings with state {other.state_names()}", remedy="make the optimizer with the saved settings",
            )  # fmt: skip
        for field in fields:
            setattr(self, field, getattr(other, field))

    def init_state(self, param: Array) -> dict[str, Array]:
        """Return the state before step 1: zeros like the flat array ``param``, by name ('momentum', 'm', 'v')."""
        xp = array_namespace(param)
        state = {name: empty(param.shape, param.dtype, xp) for name in self.state_names()}
        for array in state.values():  # `empty` aligns: an unaligned array would cost a tenth of the update
            array[...] = 0
        return state

    @abc.abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """Return the names of the state's arrays."""

    def arrays_of(self, state: Mapping[str, Array]) -> tuple[Array, ...]:
        """Return the arrays of ``state`` in the order of the kernel's arguments.

        Raises:
            ConfigError: the state is of another rule, or of this rule with settings that need less of it.
        """
        names = self.state_names()
        try:
            return tuple([state[name] for name in names])
        except KeyError:
            raise ConfigError(
                f"{self.name}.update", where="state", expected=", ".join(names), got=", ".join(state) or "nothing",
                remedy="make the state, or the Trainer, with the optimizer's current settings",
            ) from None  # fmt: skip

    @abc.abstractmethod
    def kernel(self, step: int, scale: float) -> tuple[str, tuple[float, ...]]:
        """Return the name of the fused kernel and its coefficients at ``step``."""

    def of_layer(self, step: int, scale: float, squares: tuple[float, float] | Array | None) -> tuple[Optimizer, float]:
        """Return the elementwise rule for one layer at ``step``, and its ``scale``.

        That is this rule itself, except for a rule that is `by_layer`.

        Args:
            step: the number of this update, counted from 1.
            scale: as in `update`.
            squares: squared norms of the layer's weights and of its summed gradient, before ``scale``, as numbers or as
                an array of shape ``(2,)`` on the device of both. None for parameters that form no layer.
        """
        return self, scale

    @property
    def update_is_its_kernel(self) -> bool:
        """True if `update` only launches its `kernel`, so that fused kernels can replace it."""
        return "update" not in vars(self) and type(self).update is Optimizer.update

    def update(
        self, param: Array, grad: Array, state: dict[str, Array], *, step: int, scale: float | Array = 1.0
    ) -> None:
        """Apply one step of the rule; changes ``param`` and the arrays of ``state`` in place.

        Args:
            param: shape ``(size,)``, float32 or float64, contiguous; may be empty.
            grad: like ``param``, unchanged; multiplied by ``scale`` before momentum and weight decay. Must not overlap
                with ``param`` or the state.
            state: the dict that `init_state` made for this array, as earlier steps left it.
            step: the number of this update, counted from 1.
            scale: usually one over the global number of samples. For arrays on a GPU it may be a float64 array of shape
                ``(1,)`` there, so that the host does not wait for it.

        Raises:
            UnsupportedError: shape, dtype or layout differ from the above.
            ArrayMixError: the arrays are of different namespaces.
            ConfigError: the learning rate is negative or not finite, the step is below 1, or the state is of another
                rule.
        """
        operation = f"{self.name}.update"
        arrays = (param, grad, *self.arrays_of(state))
        if step < 1:
            raise ConfigError(operation, where="step", expected="an integer >= 1", got=step)
        place = scale if is_cupy(scale) else None
        name, coefficients = self.kernel(step, scale if place is None else 1.0)
        if not is_host(param):
            self.launch(param, grad, state, name, coefficients, place)
            return
        if any(x.shape != param.shape for x in arrays):
            require_alike(operation, arrays)
        try:
            getattr(kernels.load("gradients"), name)(*arrays, coefficients)
        except TypeError:  # Numba has no version for these types; checking them first would cost 10 us a call
            require_alike(operation, arrays)
            raise

    def launch(
        self,
        param: Array,
        grad: Array,
        state: dict[str, Array],
        name: str,
        coefficients: tuple[float, ...] | Array,
        scale: Array | None = None,
    ) -> None:
        """Launch `update` on a device with the ``name`` and ``coefficients`` from `kernel`; raises as `update`.

        The coefficients may be a float64 array on the device. So may ``scale``, shape ``(1,)``, which replaces theirs.
        """
        arrays = (param, grad, *self.arrays_of(state))
        require_alike(f"{self.name}.update", arrays)
        places = () if scale is None else (scale,)
        getattr(kernels.kernels_for("gradients", param), name)(*arrays, coefficients, *places)


def require_alike(operation: str, arrays: tuple[Array, ...]) -> None:
    """Raise `UnsupportedError` unless all arrays are flat, contiguous, of one shape, and float32 or float64."""
    array_namespace(*arrays)
    param = arrays[0]
    dtype = dtype_name(param.dtype)
    if dtype not in ("float32", "float64"):
        raise UnsupportedError(operation, where="dtype", expected="float32 or float64", got=dtype)
    for x in arrays:
        if x.ndim != 1 or x.shape != param.shape or x.dtype != param.dtype:
            expected = f"arrays of shape ({param.size},) and dtype {dtype}"
            raise UnsupportedError(operation, expected=expected, got=f"{tuple(x.shape)} {x.dtype}")
        if is_host(x) and not (x.flags.c_contiguous and x.flags.aligned and x.flags.writeable):
            expected = "contiguous, aligned, writeable arrays"
            raise UnsupportedError(operation, expected=expected, got=f"strides {x.strides}")


def create(name: str, **args: Any) -> Optimizer:
    """Return the optimizer ``name`` ("sgd", "adam", "adamw", "lars"), e.g. ``create("sgd", lr=0.1, momentum=0.9)``.

    Raises:
        ConfigError: unknown name or argument (the valid ones are listed), or an invalid value.
    """
    return build(_optimizers, "optimizer", name, args)


def from_config(config: dict[str, Any]) -> Optimizer:
    """Return the optimizer of a ``config()`` from another rank, a checkpoint or a TOML file.

    Raises:
        ConfigError: as `create`.
    """
    return build(_optimizers, "optimizer", *split_config("optimizer", config))


def require_optimizer(operation: str, optimizer: object) -> None:
    """Raise `ConfigError` unless ``optimizer`` is an `Optimizer`."""
    instance(operation, None, optimizer, Optimizer, "an optimizer, e.g. hpcdp.optim.SGD(lr=0.1)")


def require_by_elements(operation: str, optimizer: Optimizer) -> None:
    """Raise `ConfigError` for a rule that needs norms of whole layers, where only segments of them are available."""
    if optimizer.by_layer:
        raise ConfigError(
            operation, expected="an elementwise rule", got=f"{optimizer.name}, which needs norms of whole layers",
            remedy="train without a kvstore",
        )  # fmt: skip


@dataclasses.dataclass
class SGD(Optimizer):
    """Stochastic gradient descent.

    Args:
        lr: learning rate, a number >= 0 or a `Schedule`.
        momentum: in [0, 1); 0 keeps no state.
        nesterov: use Nesterov's momentum; needs ``momentum`` > 0.
        weight_decay: added to the gradient as ``weight_decay * param`` (L2 penalty).

    Raises:
        ConfigError: a value outside its range.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    name = "sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("momentum", least=0, below=1)
        self._check("weight_decay", least=0)
        if not isinstance(self.nesterov, bool) or (self.nesterov and self.momentum == 0.0):
            expected = "true with momentum > 0, or false"
            raise ConfigError("SGD", where="nesterov", expected=expected, got=repr(self.nesterov))

    def state_names(self) -> tuple[str, ...]:
        """See `Optimizer.state_names`."""
        return ("momentum",) if self.momentum else ()

    def kernel(self, step: int, scale: float) -> tuple[str, tuple[float, ...]]:
        """See `Optimizer.kernel`."""
        settings = (self.learning_rate(step), self.weight_decay, float(scale))
        if not self.momentum:
            return "sgd", settings
        return "sgd_nesterov" if self.nesterov else "sgd_momentum", (*settings, self.momentum)


@dataclasses.dataclass
class Adam(Optimizer):
    """Adam with bias correction (Kingma and Ba 2015, algorithm 1).

    Args:
        lr: learning rate, a number >= 0 or a `Schedule`.
        beta1: decay of the first moment 'm', in [0, 1).
        beta2: decay of the second moment 'v', in [0, 1).
        eps: added to the root of the corrected second moment.
        weight_decay: added to the gradient as ``weight_decay * param`` (L2 penalty).

    Raises:
        ConfigError: a value outside its range.
    """

    lr: float = 1e-3  # type: ignore[assignment]
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    name = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("beta1", least=0, below=1)
        self._check("beta2", least=0, below=1)
        self._check("eps", least=0)
        self._check("weight_decay", least=0)

    def state_names(self) -> tuple[str, ...]:
        """See `Optimizer.state_names`."""
        return ("m", "v")

    def kernel(self, step: int, scale: float) -> tuple[str, tuple[float, ...]]:
        """See `Optimizer.kernel`."""
        return "adam", self._coefficients(step, scale, self.weight_decay, shrink=1.0)

    def _coefficients(self, step: int, scale: float, weight_decay: float, shrink: float) -> tuple[float, ...]:
        step_size = self.learning_rate(step) / (1.0 - self.beta1**step)
        root_scale = 1.0 / math.sqrt(1.0 - self.beta2**step)
        moments = (1.0 - self.beta1, self.beta2, 1.0 - self.beta2)
        return (step_size, weight_decay, float(scale), shrink, *moments, root_scale, self.eps)


@dataclasses.dataclass
class AdamW(Adam):
    """Adam with decoupled weight decay: ``param *= 1 - lr * weight_decay`` (Loshchilov and Hutter 2019, algorithm 2).

    Args:
        weight_decay: the factor above; the other arguments are those of `Adam`.
    """

    weight_decay: float = 1e-2
    name = "adamw"

    def kernel(self, step: int, scale: float) -> tuple[str, tuple[float, ...]]:
        """See `Optimizer.kernel`."""
        shrink = 1.0 - self.learning_rate(step) * self.weight_decay
        return "adam", self._coefficients(step, scale, 0.0, shrink)


@dataclasses.dataclass
class LARS(SGD):
    """`SGD` for large batches: each layer's step is proportional to the norm of its weights.

    Gradient and decay of a layer are multiplied by ``trust * |w| / (|g| + weight_decay * |w|)``, with norms over the
    whole layer and ``g`` the mean gradient. The factor is 1 where either norm is zero. Layers are the parameters of two
    axes or more; biases, scales and shifts are updated as by `SGD`. The rule is therefore not elementwise: a `Trainer`
    exchanges the norms, and key-value stores, which hold segments, refuse it.

    Args:
        lr: the global rate, gamma in the paper.
        trust: the coefficient eta of the paper, above 0.
        momentum: as `SGD`.
        nesterov: as `SGD`.
        weight_decay: as `SGD`.

    Raises:
        ConfigError: a value outside its range.

    Source: You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017, algorithm 1, with the rate
    outside of the momentum, as in ``torch.optim.SGD``.
    """

    momentum: float = 0.9
    trust: float = 0.001
    name = "lars"
    by_layer = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("trust", above=0)

    def of_layer(self, step: int, scale: float, squares: tuple[float, float] | Array | None) -> tuple[SGD, float]:
        """See `Optimizer.of_layer`."""
        if squares is not None and not isinstance(squares, tuple):
            rule = copy.copy(self)
            rule._squares = squares
            return rule, scale
        factor = 1.0
        if squares is not None:
            weights, gradient = (math.sqrt(square) for square in squares)
            length = gradient * scale + self.weight_decay * weights
            factor = self.trust * weights / length if weights and gradient else 1.0
        sgd = SGD(self.learning_rate(step), self.momentum, self.nesterov)
        sgd.weight_decay = self.weight_decay * factor  # not as a setting: settings refuse the NaN of a NaN norm
        return sgd, scale * factor

    _squares = None
    """Squared norms of this rule's layer on a device; None: those of the arrays passed to `update`."""

    def update(self, param: Array, grad: Array, state: dict[str, Array], *, step: int, scale: float = 1.0) -> None:
        """Update ``param`` as one whole layer, see `Optimizer.update`; the host does not wait for norms on a GPU."""
        if param.ndim != 1 or grad.shape != param.shape:  # checked here, because the norms come before the rule
            require_alike("lars update", (param, grad))
        if is_host(param):
            weights, gradient = squares((param, grad))
            rule, scale = self.of_layer(step, scale, (weights, gradient))
            rule.update(param, grad, state, step=step, scale=scale)
            return
        of_layer = self._squares
        if of_layer is None:
            ends = array_namespace(param).asarray(np.array([0, param.size]))
            of_layer = segment_squares(param, grad, ends)[0]
        arrays = (param, grad, *self.arrays_of(state))
        require_alike("lars.update", arrays)
        name, coefficients = self.kernel(step, scale)
        update = kernels.kernels_for("gradients", param, plain_on_host=True)
        getattr(update, f"lars_{name}")(*arrays, of_layer, (*coefficients, self.trust))


def segment_squares(params: Array, grads: Array, bounds: Array) -> Array:
    """Return the result of `reference.segment_squares` on the device of flat ``params``, without waiting."""
    out = array_namespace(params).empty((bounds.size - 1, 2), dtype=np.float64)
    norms = kernels.kernels_for("gradients", params)
    norms.segment_squares(words(params), words(grads), bounds, out)
    return out


def squares(xs: Sequence[Array]) -> list[float]:
    """Return the squared norms of flat arrays on one device, summed in float64; waits once for a GPU."""
    if not xs:
        return []
    return kernels.kernels_for("gradients", xs[0]).sums_of_squares(map(words, xs))  # type: ignore[no-any-return]


def linear_scaling(lr: float, batch_size: int, base_batch_size: int = 256) -> float:
    """Scale the rate ``lr``, tuned for batches of ``base_batch_size``, in proportion to the global ``batch_size``.

    Combine it with a `WarmupSchedule` for the first epochs (Goyal et al., "Accurate, large minibatch SGD", 2017, 2.1
    and 2.2).

    Raises:
        ConfigError: a negative rate, or a size below 1.
    """
    size = whole_number("linear_scaling", "batch_size", batch_size, 1)
    base = whole_number("linear_scaling", "base_batch_size", base_batch_size, 1)
    return number("linear_scaling", "lr", lr, least=0) * size / base
