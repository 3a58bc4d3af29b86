"""Learning-rate schedules, and dataclasses that are configured by a name and arguments.

Steps count from 1, as in ``Optimizer.update``. A schedule has no state, so a resumed run needs only its step.

Optimizers and schedules are registered by name. Their ``config()`` is plain JSON, so it can be sent to another rank or
saved in a checkpoint without pickling.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from ..core.checks import instance, number, one_of
from ..errors import ConfigError, is_number, whole_number

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


_kinds: dict[str, type[Schedule]] = {}


@dataclasses.dataclass
class Schedule(Configurable, abc.ABC):
    """A learning rate that depends on the step."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):  # a subclass without a name does not replace its base
            _kinds[cls.name] = cls

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
    return build(_kinds, "schedule", *split_config("schedule", config))


@dataclasses.dataclass
class ConstantSchedule(Schedule):
    """The rate ``lr`` at every step."""

    lr: float
    name = "constant"

    def __post_init__(self) -> None:
        self.lr = number("argument", "constant lr", self.lr, least=0)

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
        self.lr = number("argument", "step lr", self.lr, least=0)
        self.every = whole_number("argument", "step every", self.every, 1)
        self.factor = number("argument", "step factor", self.factor, least=0)

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
        self.lr = number("argument", "multistep lr", self.lr, least=0)
        where, steps = "multistep milestones", self.milestones
        instance("argument", where, steps, Sequence, "a list of steps")
        self.milestones = tuple(whole_number("argument", where, step, 1) for step in steps)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ConfigError("argument", where=where, expected="increasing steps", got=repr(steps))
        self.factor = number("argument", "multistep factor", self.factor, least=0)

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
        self.lr = number("argument", "exponential lr", self.lr, least=0)
        self.factor = number("argument", "exponential factor", self.factor, least=0)
        self.every = whole_number("argument", "exponential every", self.every, 1)

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
        self.lr = number("argument", "cosine lr", self.lr, least=0)
        self.steps = whole_number("argument", "cosine steps", self.steps, 1)
        self.final_lr = number("argument", "cosine final_lr", self.final_lr, least=0)

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
        self.steps = whole_number("argument", "warmup steps", self.steps, 1)
        self.start = number("argument", "warmup start", self.start, least=0, most=1)

    def learning_rate(self, step: int) -> float:
        """See `Schedule.learning_rate`."""
        grown = self.start + (1.0 - self.start) * min((_updates_before(step) + 1) / self.steps, 1.0)
        return grown * self.schedule.learning_rate(step)
