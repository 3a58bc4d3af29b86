"""What happens to gradients that are not as they should be."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError

UNUSED = ("error", "warn", "zero")
NONFINITE = ("ignore", "count", "skip", "raise")
"""The valid values of a `Policy`."""


@dataclass(frozen=True)
class Policy:
    """What a trainer does with gradients that are not as they should be, alike on all ranks.

    Args:
        unused: parameters whose gradient backward has not written. ``"error"``: a StaleGradientError that names them;
            ``"zero"``: they count as zero, so that ranks may use different parts of a model; ``"warn"``: the same, and
            each rank names new ones in a warning.
        nonfinite: a summed gradient that holds a NaN or an infinity. ``"ignore"``: nobody looks, which costs nothing;
            ``"count"``: counted in ``trainer.num_nonfinite``; ``"skip"``: counted, and the step updates nothing (the
            running statistics of batch normalisation have moved in forward already, but with ``reproducible``);
            ``"raise"``: a NonFiniteGradientError.

    Raises:
        ConfigError: neither of these.
    """

    unused: str = "error"
    nonfinite: str = "ignore"

    def __post_init__(self) -> None:
        for name, valid in (("unused", UNUSED), ("nonfinite", NONFINITE)):
            if getattr(self, name) not in valid:
                raise ConfigError("Policy", where=name, expected=" or ".join(valid), got=repr(getattr(self, name)))
