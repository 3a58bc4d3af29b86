"""How far a loss is scaled up before backward, so that small gradients are not lost in 16 bits.

Source: Micikevicius et al., "Mixed precision training", 2018, section 3.2.
"""

from __future__ import annotations

import math

from ...errors import ConfigError, is_number
from .policy import Policy

DYNAMIC = "dynamic"
_FIRST, _LEAST = 2.0**16, 1.0
GROWTH_INTERVAL = 2000
"""Good steps in a row after which the scale is doubled."""


class DynamicLossScale:
    """As large as it may be: halved by each step whose gradients overflow, but not below 1, doubled by many good ones.

    Every rank has one, and tells it the same, so all scales are alike.
    """

    def __init__(self) -> None:
        self.good_steps = 0
        """Since the scale has last changed."""

    def after_step(self, scale: float, is_finite: bool) -> float:
        """The next step's scale, after one with ``scale`` whose summed gradient was finite, or not."""
        if not is_finite:
            self.good_steps = 0
            return max(_LEAST, scale / 2)
        self.good_steps = (self.good_steps + 1) % GROWTH_INTERVAL
        return scale if self.good_steps else scale * 2


def is_dynamic(loss_scale: object) -> bool:
    """Whether a loss scale follows what gradients do."""
    return isinstance(loss_scale, str) and loss_scale == DYNAMIC  # an array answers for each of its elements


def first_scale(loss_scale: float | str) -> float:
    """The scale of the first step; `ConfigError` for what is neither a positive number nor ``"dynamic"``."""
    if is_dynamic(loss_scale):
        return _FIRST
    if not is_number(loss_scale) or not (0 < float(loss_scale) < math.inf):
        raise ConfigError(
            "Trainer", where="loss_scale", expected=f"a positive number, or {DYNAMIC!r}", got=repr(loss_scale)
        )
    return float(loss_scale)


def skipping(policy: Policy) -> Policy:
    """``policy`` as a dynamic scale needs it: steps that overflow are left out.

    Raises:
        ConfigError: it says that they are not.
    """
    if policy.nonfinite not in ("ignore", "skip"):
        raise ConfigError(
            "Trainer", where="policy", expected=f"nonfinite='skip' with loss_scale={DYNAMIC!r}",
            got=repr(policy.nonfinite), remedy="leave it out: steps that overflow are skipped, and counted",
        )  # fmt: skip
    return Policy(unused=policy.unused, nonfinite="skip")
