"""What happens to gradients that are not as they should be."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from ...comm import Communicator
from ...errors import ConfigError, StaleGradientError, listed

_MOST_NAMES = 3

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


def checked_policy(policy: object) -> Policy:
    """``policy``, or that of a Trainer which is given none; `ConfigError` for what is neither."""
    if policy is None:
        return Policy()
    if not isinstance(policy, Policy):
        expected = "a Policy, e.g. Policy(unused='zero')"
        raise ConfigError("Trainer", where="policy", expected=expected, got=repr(policy))
    return policy


class Unwritten:
    """Gradients that backward has not written: what the policy of one trainer says of them.

    Args:
        policy: the trainer's.
        rank: this one.
    """

    def __init__(self, policy: Policy, rank: int) -> None:
        self._policy, self._rank = policy, rank
        self._warned: set[str] = set()

    def refused(self, names: Sequence[str]) -> list[str]:
        """Those of the parameters ``names`` that may not count as zero; warns of others, once each, where it should."""
        if self._policy.unused == "warn" and not self._warned.issuperset(names):
            self._warned.update(names)
            warnings.warn(f"rank {self._rank}: no gradient for {listed(names)}: counted as zero", stacklevel=4)
        return list(names) if self._policy.unused == "error" else []


def stale(rank: int, names: Sequence[str]) -> StaleGradientError:
    """The error of a step to which parameters ``names`` have no gradient on ``rank``."""
    return StaleGradientError(
        "step",
        where=f"rank {rank}",
        expected="a gradient for every parameter since the last step",
        got="none for " + ", ".join(names[:_MOST_NAMES]),
        remedy="call backward() before step(), give unused parameters grad_req='null' before the Trainer is made, or "
        "count them as zero: Policy(unused='zero')",
    )


def stale_anywhere(comm: Communicator, names: Sequence[str]) -> StaleGradientError:
    """The same error on all ranks, where some have parameters ``names`` without a gradient; every rank must call."""
    by_rank = comm.allgather_json(list(names[:_MOST_NAMES]))
    rank = next(rank for rank, names in enumerate(by_rank) if names)
    return stale(rank, by_rank[rank])
