"""Optimizers and learning-rate schedules.

An optimizer knows nothing of ranks: it updates flat arrays, each a whole bucket or the shard that a rank owns.
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
