"""Learning rates as functions of the step.

Steps count from 1, as in ``Optimizer.update``; an object has no state, so a resumed run needs nothing but its step.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

from ..errors import ConfigError
from .config import Configurable, build, count, number, split_config

_kinds: dict[str, type[Schedule]] = {}


@dataclasses.dataclass
class Schedule(Configurable, abc.ABC):
    """A learning rate that depends on the step; subclasses say how."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):  # else a variant, which does not replace what it varies
            _kinds[cls.name] = cls

    @abc.abstractmethod
    def learning_rate(self, step: int) -> float:
        """The rate of update number ``step``, counted from 1."""


def _updates_before(step: int) -> int:
    """How many updates there were before update number ``step``.

    Raises:
        ConfigError: ``step`` is below 1, for which a schedule would say a rate that no update has.
    """
    if step < 1:
        raise ConfigError("learning_rate", where="step", expected="a number of an update, from 1 on", got=step)
    return step - 1


def _times_power(lr: float, factor: float, exponent: float) -> float:
    """``lr * factor ** exponent``, infinite where no float is as large: an optimizer refuses such a rate by name."""
    try:
        return lr * factor**exponent
    except OverflowError:
        return math.inf


def schedule_from_config(config: object) -> Schedule:
    """The schedule of a ``config()``.

    Raises:
        ConfigError: unknown name or argument; the valid ones are listed.
    """
    return build(_kinds, "schedule", *split_config("schedule", config))


@dataclasses.dataclass
class ConstantSchedule(Schedule):
    """``lr`` at every step."""

    lr: float
    name = "constant"

    def __post_init__(self) -> None:
        self.lr = number("constant lr", self.lr)

    def learning_rate(self, step: int) -> float:
        return self.lr


@dataclasses.dataclass
class StepSchedule(Schedule):
    """``lr * factor ** k`` after ``k * every`` steps."""

    lr: float
    every: int
    factor: float = 0.1
    name = "step"

    def __post_init__(self) -> None:
        self.lr = number("step lr", self.lr)
        self.every = count("step every", self.every)
        self.factor = number("step factor", self.factor)

    def learning_rate(self, step: int) -> float:
        return _times_power(self.lr, self.factor, _updates_before(step) // self.every)


@dataclasses.dataclass
class MultiStepSchedule(Schedule):
    """``lr * factor ** k`` after ``k`` of the ``milestones``, which are increasing numbers of steps."""

    lr: float
    milestones: tuple[int, ...]
    factor: float = 0.1
    name = "multistep"

    def __post_init__(self) -> None:
        self.lr = number("multistep lr", self.lr)
        if not isinstance(self.milestones, (tuple, list)):
            raise ConfigError(
                "argument", where="multistep milestones", expected="a list of steps", got=repr(self.milestones)
            )
        self.milestones = tuple(count("multistep milestones", step) for step in self.milestones)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ConfigError(
                "argument", where="multistep milestones", expected="increasing steps", got=repr(self.milestones)
            )
        self.factor = number("multistep factor", self.factor)

    def learning_rate(self, step: int) -> float:
        return _times_power(self.lr, self.factor, sum(step > milestone for milestone in self.milestones))


@dataclasses.dataclass
class ExponentialSchedule(Schedule):
    """``lr * factor ** ((step - 1) / every)``, a smooth decay by ``factor`` in ``every`` steps."""

    lr: float
    factor: float
    every: int = 1
    name = "exponential"

    def __post_init__(self) -> None:
        self.lr = number("exponential lr", self.lr)
        self.factor = number("exponential factor", self.factor)
        self.every = count("exponential every", self.every)

    def learning_rate(self, step: int) -> float:
        return _times_power(self.lr, self.factor, _updates_before(step) / self.every)


@dataclasses.dataclass
class CosineSchedule(Schedule):
    """From ``lr`` along half a cosine to ``final_lr`` after ``steps`` steps (Loshchilov and Hutter 2017, eq. 5)."""

    lr: float
    steps: int
    final_lr: float = 0.0
    name = "cosine"

    def __post_init__(self) -> None:
        self.lr = number("cosine lr", self.lr)
        self.steps = count("cosine steps", self.steps)
        self.final_lr = number("cosine final_lr", self.final_lr)

    def learning_rate(self, step: int) -> float:
        done = min(_updates_before(step) / self.steps, 1.0)
        return self.final_lr + 0.5 * (self.lr - self.final_lr) * (1.0 + math.cos(math.pi * done))


@dataclasses.dataclass
class WarmupSchedule(Schedule):
    """Another schedule, multiplied by a factor that grows linearly to 1 at step ``steps`` (Goyal et al. 2017, 2.2).

    Step 1 has the factor ``start + (1 - start) / steps``. The inner schedule keeps its own count of steps, so its
    milestones stay where they are.
    """

    schedule: Schedule
    steps: int
    start: float = 0.0
    name = "warmup"

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            self.schedule = schedule_from_config(self.schedule)
        self.steps = count("warmup steps", self.steps)
        self.start = number("warmup start", self.start, high=1.0, include_high=True)

    def learning_rate(self, step: int) -> float:
        grown = self.start + (1.0 - self.start) * min((_updates_before(step) + 1) / self.steps, 1.0)
        return grown * self.schedule.learning_rate(step)
