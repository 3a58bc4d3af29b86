"""Floor 3: optim, optimizers and learning-rate schedules. Imports: kernels, arrays, errors.

Knows nothing of ranks: an optimizer updates flat arrays, be they a whole bucket or the shard that a rank owns.
"""

from .lars import LARS, linear_scaling
from .optimizer import Optimizer, create, from_config, require_by_elements, require_optimizer
from .rules import SGD, Adam, AdamW
from .schedules import (
    ConstantSchedule,
    CosineSchedule,
    ExponentialSchedule,
    MultiStepSchedule,
    Schedule,
    StepSchedule,
    WarmupSchedule,
)

__all__ = [
    "LARS",
    "SGD",
    "Adam",
    "AdamW",
    "ConstantSchedule",
    "CosineSchedule",
    "ExponentialSchedule",
    "MultiStepSchedule",
    "Optimizer",
    "Schedule",
    "StepSchedule",
    "WarmupSchedule",
    "create",
    "from_config",
    "linear_scaling",
    "require_by_elements",
    "require_optimizer",
]
