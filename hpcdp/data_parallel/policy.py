"""The policy for non-finite, missing and unused gradients, and how a loss is scaled up before backward.

A scaled loss keeps small gradients from being lost in 16 bits.

Source: Micikevicius et al., "Mixed precision training", 2018, section 3.2.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..comm import Communicator
from ..comm.consistency import require_same
from ..core.checks import is_number
from ..errors import ConfigError, StaleGradientError, listed
from .buckets import Parameter, UsageCounts

_MOST_NAMES = 3

UNUSED = ("error", "warn", "zero")
NONFINITE = ("ignore", "count", "skip", "raise")
"""The valid values of a `Policy`."""


@dataclass(frozen=True)
class Policy:
    """What a trainer does with gradients that are not as they should be, alike on all ranks.

    Args:
        unused: parameters whose gradient backward has not written, though they are not frozen by ``grad_req="null"``.
            ``"error"``: a StaleGradientError that names them; ``"zero"``: they count as zero where another rank has
            used them, so that ranks may use different parts of a model, and what no rank has used keeps its value and
            its optimizer's state; ``"warn"``: the same, and each rank names new ones in a warning.
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

    No gradient and a gradient of zero are two things: with a gradient of zero a parameter moves by momentum and weight
    decay. So the ranks agree in the closing exchange of a step which parameters none of them has used. By default each
    rank with samples must use all parameters but the frozen ones, and the ranks compare those by a `mark`; where a
    policy lets ranks use different parameters, `numbers` count by how many ranks each was used.

    Args:
        policy: the trainer's.
        params: all of its parameters, by name.
        rank: this one.
        size: how many ranks step together.
    """

    def __init__(self, policy: Policy, params: Mapping[str, Parameter], rank: int, size: int) -> None:
        self._policy, self._params, self._rank = policy, params, rank
        self._counts = None if policy.unused == "error" else UsageCounts(list(params), size)
        self.length = 0 if self._counts is None else self._counts.length
        """How many `numbers` there are."""
        self._warned: set[str] = set()

    def frozen(self, names: Sequence[str]) -> list[str]:
        """Return those of the parameters ``names`` that are to have no gradient."""
        return [name for name in names if self._params[name].grad_req == "null"]

    def refused(self, missing: Sequence[str]) -> list[str]:
        """Return those of the parameters ``missing`` that should have a gradient on this rank.

        Warns of parameters that count as zero, once each, where the policy says so.
        """
        if self._policy.unused == "zero" or not missing:
            return []
        frozen = set(self.frozen(missing))
        names = [name for name in missing if name not in frozen]
        if self._policy.unused == "error":
            return names
        if not self._warned.issuperset(names):
            self._warned.update(names)
            warnings.warn(
                f"rank {self._rank}: no gradient for {listed(names)}: counted as zero; left alone where no rank has "
                "one",
                stacklevel=4,
            )
        return []

    def mark(self, unused: Sequence[str]) -> int:
        """Return a number that is the same on ranks with the same frozen parameters, where those must be the same."""
        if self._counts is not None or not unused:
            return 0
        frozen = set(self.frozen(unused))
        return sum(1 << place for place, name in enumerate(self._params) if name in frozen)

    def require_same_frozen(self, comm: Communicator, operation: str, unused: Sequence[str]) -> None:
        """Raise `MismatchError` where ranks have frozen other parameters; every rank must call."""
        if self._counts is None:
            frozen = listed(self.frozen(unused)) or "none"
            remedy = (
                "set grad_req alike on all ranks, between step() and the next backward; or let ranks use different "
                "parameters: Policy(unused='zero')"
            )
            require_same(comm, operation, [f"parameters frozen by grad_req='null': {frozen}"], remedy)

    def numbers(self, unused: Sequence[str]) -> Sequence[float]:
        """Return what this rank adds to the closing exchange of a step in which it has not used these parameters."""
        return () if self._counts is None else self._counts.numbers(unused)

    def left_alone(self, unused: Sequence[str], sums: Sequence[float] | None) -> frozenset[str]:
        """Return the parameters that no rank has used, which a step leaves alone.

        Args:
            unused: those of this rank.
            sums: of all ranks' `numbers`; None: this rank steps alone.
        """
        if self._counts is None:
            return frozenset(self.frozen(unused)) if unused else frozenset()
        return frozenset(unused) if sums is None else self._counts.unused(sums)


def stale(rank: int, names: Sequence[str]) -> StaleGradientError:
    """The error of a step to which parameters ``names`` have no gradient on ``rank``."""
    return StaleGradientError(
        "step",
        where=f"rank {rank}",
        expected="a gradient for every parameter since the last step",
        got="none for " + ", ".join(names[:_MOST_NAMES]),
        remedy="call backward() before step(); freeze what is not to be trained by grad_req='null' on all ranks; or "
        "let ranks use different parameters: Policy(unused='zero'), which leaves alone what no rank has used",
    )


def stale_anywhere(comm: Communicator, names: Sequence[str]) -> StaleGradientError:
    """The same error on all ranks, where some have parameters ``names`` without a gradient; every rank must call."""
    by_rank = comm.allgather_json(list(names[:_MOST_NAMES]))
    rank = next(rank for rank, names in enumerate(by_rank) if names)
    return stale(rank, by_rank[rank])


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
