"""What every optimizer is."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from .. import kernels
from ..core.arrays import Array, array_namespace, dtype_name, is_cupy, is_host
from ..core.checks import instance, number
from ..errors import ConfigError, UnsupportedError
from ..kernels import buffers
from .config import Configurable, build, split_config
from .schedules import Schedule, schedule_from_config

_kinds: dict[str, type[Optimizer]] = {}


@dataclasses.dataclass
class Optimizer(Configurable, abc.ABC):
    """An update rule for flat parameters.

    It holds settings only; the state belongs to the caller, one dict for each flat array that is updated. Rules are
    elementwise (but `by_layer`), so an array updated whole or in any pieces (shards, segments) gets the same bits.

    Args:
        lr: the learning rate, a number or a `Schedule`; may be assigned between steps.
    """

    lr: float | Schedule

    by_layer = False
    """Whether it is no rule by elements, but needs norms of whole layers: see `LARS`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):  # else a variant, which does not replace what it varies
            _kinds[cls.name] = cls

    def __post_init__(self) -> None:
        if isinstance(self.lr, dict):
            self.lr = schedule_from_config(self.lr)
        if isinstance(self.lr, Schedule):
            self.learning_rate(1)
        else:
            self.lr = number("argument", f"{self.name} lr", self.lr, least=0)

    def learning_rate(self, step: int) -> float:
        """The rate of update number ``step``, counted from 1.

        Raises:
            ConfigError: the rate is negative or not finite.
        """
        lr = self.lr.learning_rate(step) if isinstance(self.lr, Schedule) else self.lr
        if type(lr) is float and 0 <= lr < math.inf:  # without a call, as each update asks
            return lr
        return number("argument", f"{self.name} lr", lr, least=0)

    def take_config(self, config: dict[str, Any]) -> None:
        """Take over the settings of a ``config()``, in place: those of the same rule, that keeps the same state.

        Raises:
            ConfigError: it is of another rule, or one of another state; nothing is changed.
        """
        name, args = split_config("optimizer", config)
        fields = {field.name for field in dataclasses.fields(self)}
        if name != self.name or set(args) != fields:
            got = f"{name} with {', '.join(args)}"
            raise ConfigError("load_state_dict", where="optimizer", expected=self.name, got=got)
        if isinstance(self.lr, Schedule) and self.lr.config() == args["lr"]:
            args["lr"] = self.lr  # which may be a variant
        other = dataclasses.replace(self, **args)
        if other.state_names() != self.state_names():
            raise ConfigError(
                "load_state_dict", where="optimizer", expected=f"{name} that keeps {self.state_names()}",
                got=f"one that keeps {other.state_names()}", remedy="make it with the settings that it had then",
            )  # fmt: skip
        for field in fields:
            setattr(self, field, getattr(other, field))

    def init_state(self, param: Array) -> dict[str, Array]:
        """The state before step 1: zeros like the flat array ``param``, by name ('momentum', 'm', 'v')."""
        xp = array_namespace(param)
        state = {name: buffers.empty(param.shape, param.dtype, xp) for name in self.state_names()}
        for array in state.values():  # one that began within a cache line would cost a tenth of the update
            array[...] = 0
        return state

    @abc.abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """The names of the arrays in the state."""

    def arrays_of(self, state: Mapping[str, Array]) -> tuple[Array, ...]:
        """The arrays of a state in the order in which kernels take them.

        Raises:
            ConfigError: the state is of another rule, or of this one with settings that need less of it.
        """
        names = self.state_names()
        try:
            return tuple([state[name] for name in names])
        except KeyError:
            raise ConfigError(
                f"{self.name}.update", where="state", expected=", ".join(names), got=", ".join(state) or "nothing",
                remedy="make the state, or the Trainer, with the settings that the optimizer has now",
            ) from None  # fmt: skip

    @abc.abstractmethod
    def kernel(self, step: int, scale: float) -> tuple[str, tuple[float, ...]]:
        """The name of the fused kernel and its coefficients at ``step``."""

    def of_layer(self, step: int, scale: float, squares: tuple[float, float] | Array | None) -> tuple[Optimizer, float]:
        """The rule by elements for a layer at ``step``, and its ``scale``: this one, but for a rule that is `by_layer`.

        Args:
            squares: of the norms of the layer's weights and of its summed gradient, before ``scale``, as numbers or as
                an array of shape ``(2,)`` on the device of both; None of what is no layer.
        """
        return self, scale

    @property
    def update_is_its_kernel(self) -> bool:
        """Whether `update` does what its `kernel` says and no more, so that fused kernels may stand in for it."""
        return "update" not in vars(self) and type(self).update is Optimizer.update

    def update(
        self, param: Array, grad: Array, state: dict[str, Array], *, step: int, scale: float | Array = 1.0
    ) -> None:
        """One step of the rule; changes ``param`` and the arrays of ``state`` in place, leaves ``grad`` as it is.

        Args:
            param: shape ``(size,)``, float32 or float64, contiguous; may be empty.
            grad: like ``param``; multiplied by ``scale`` before momentum and weight decay see it. Must not overlap with
                ``param`` or the state.
            state: what `init_state` made for this array, changed by all steps before.
            step: the number of this update, counted from 1.
            scale: usually one over the global number of samples; of arrays on a GPU it may lie there, too, in float64,
                shape ``(1,)``, so that nobody waits for it.

        Raises:
            UnsupportedError: shape, dtype or layout differ from the above.
            ArrayMixError: not all arrays are of one namespace.
            ConfigError: the learning rate is negative or not finite, the step is below 1, the state is of another rule.
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
            getattr(kernels.load("update"), name)(*arrays, coefficients)
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
        """`update` on a device, by what `kernel` has said; the coefficients may lie there, too, in float64, and the
        scale that counts in the place of theirs.

        Raises:
            UnsupportedError, ArrayMixError: as `update`.
        """
        arrays = (param, grad, *self.arrays_of(state))
        require_alike(f"{self.name}.update", arrays)
        places = () if scale is None else (scale,)
        getattr(kernels.kernels_for("update", param), name)(*arrays, coefficients, *places)


def require_alike(operation: str, arrays: tuple[Array, ...]) -> None:
    """Raises `UnsupportedError` unless all are flat, contiguous, and of one shape and dtype, float32 or float64."""
    array_namespace(*arrays)
    param = arrays[0]
    dtype = dtype_name(param.dtype)
    if dtype not in ("float32", "float64"):
        raise UnsupportedError(operation, where="dtype", expected="float32 or float64", got=dtype)
    for x in arrays:
        if x.ndim != 1 or x.shape != param.shape or x.dtype != param.dtype:
            raise UnsupportedError(
                operation,
                expected=f"arrays of shape ({param.size},) and dtype {dtype}",
                got=f"{tuple(x.shape)} {x.dtype}",
            )
        if is_host(x) and not (x.flags.c_contiguous and x.flags.aligned and x.flags.writeable):
            raise UnsupportedError(
                operation, expected="contiguous, aligned, writeable arrays", got=f"strides {x.strides}"
            )


def create(name: str, **args: Any) -> Optimizer:
    """The optimizer called ``name`` ("sgd", "adam", "adamw", "lars"), e.g. ``create("sgd", lr=0.1, momentum=0.9)``.

    Raises:
        ConfigError: unknown name or argument (the valid ones are listed), a wrong value.
    """
    return build(_kinds, "optimizer", name, args)


def from_config(config: dict[str, Any]) -> Optimizer:
    """The optimizer of a ``config()``, as it comes from another rank, a checkpoint or a TOML file.

    Raises:
        ConfigError: as `create`.
    """
    name, args = split_config("optimizer", config)
    return build(_kinds, "optimizer", name, args)


def require_optimizer(operation: str, given: object) -> None:
    """Raises `ConfigError` unless it is an `Optimizer`."""
    instance(operation, None, given, Optimizer, "an optimizer, e.g. hpcdp.optim.SGD(lr=0.1)")


def require_by_elements(operation: str, optimizer: Optimizer) -> None:
    """Raises `ConfigError` for a rule that needs norms of whole layers, where there are parts of them."""
    if optimizer.by_layer:
        raise ConfigError(
            operation, expected="a rule that goes by elements", got=f"{optimizer.name}, which needs whole layers",
            remedy="train without a kvstore",
        )  # fmt: skip
