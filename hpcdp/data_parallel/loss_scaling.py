"""Loss scaling: the scale that keeps small gradients from underflowing in 16 bits, constant or dynamic.

Backward starts from the scaled loss, and updates divide by the scale. Source: Micikevicius et al., "Mixed precision
training", 2018, section 3.2.
"""

from __future__ import annotations

from ..core.checks import number
from ..errors import ConfigError
from .gradient_policy import Policy

DYNAMIC = "dynamic"
_FIRST, _LEAST = 2.0**16, 1.0
GROWTH_INTERVAL = 2000
"""Number of consecutive good steps after which the scale doubles."""


class LossScaling:
    """The rule of a loss scale that never changes. Every rank has one, with the same calls, so all scales are equal."""

    is_dynamic = False
    good_steps = 0
    """Good steps since the last change of a dynamic scale."""

    def after_step(self, scale: float, is_finite: bool) -> float:
        """Return the scale of the next step, after a step with ``scale`` whose summed gradient was finite or not."""
        return scale

    def restore(self, good_steps: int) -> None:
        """Continue from the `good_steps` of a saved state."""


class DynamicLossScaling(LossScaling):
    """The rule of a loss scale that an overflow halves, down to 1, and `GROWTH_INTERVAL` good steps double."""

    is_dynamic = True

    def after_step(self, scale: float, is_finite: bool) -> float:
        """See `LossScaling.after_step`."""
        if not is_finite:
            self.good_steps = 0
            return max(_LEAST, scale / 2)
        self.good_steps = (self.good_steps + 1) % GROWTH_INTERVAL
        return scale if self.good_steps else scale * 2

    def restore(self, good_steps: int) -> None:
        """See `LossScaling.restore`."""
        self.good_steps = good_steps


def is_dynamic(loss_scale: object) -> bool:
    """Return whether a loss scale is dynamic."""
    return isinstance(loss_scale, str) and loss_scale == DYNAMIC  # == of an array compares its elements


def first_scale(loss_scale: float | str) -> float:
    """Return the scale of the first step; `ConfigError` unless it is a positive number or ``"dynamic"``."""
    if is_dynamic(loss_scale):
        return _FIRST
    return number("Trainer", "loss_scale", loss_scale, above=0, expected=f"a positive number, or {DYNAMIC!r}")


def skipping(policy: Policy) -> Policy:
    """Return ``policy`` with steps that overflow skipped, as a dynamic scale needs.

    Raises:
        ConfigError: the policy is to count, or to raise.
    """
    if policy.nonfinite not in ("ignore", "skip"):
        raise ConfigError(
            "Trainer", where="policy", expected=f"nonfinite='skip' with loss_scale={DYNAMIC!r}",
            got=repr(policy.nonfinite), remedy="leave nonfinite out: steps that overflow are skipped and counted",
        )  # fmt: skip
    return Policy(unused=policy.unused, nonfinite="skip")
