"""Optimizers and learning-rate schedules.

Knows nothing of ranks: an optimizer updates flat arrays, be they a whole bucket or the shard that a rank owns.
"""

from .optimizer import (
    LARS,
    SGD,
    Adam,
    AdamW,
    Optimizer,
    create,
    from_config,
    linear_scaling,
    require_by_elements,
    require_optimizer,
)
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
