"""The policy of a trainer for missing and non-finite gradients.

`Policy` is what the user chooses. `Unwritten` applies it to the gradients that backward has not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..comm import Communicator
from ..comm.consistency import require_same
from ..core.checks import instance, one_of
from ..errors import StaleGradientError, listed, warn
from .bucket_layout import ParameterLike

_MOST_NAMES = 3
_EXACT_BITS = 52
"""Bits of integers whose sums are exact in float64."""

UNUSED = ("error", "warn", "zero")
NONFINITE = ("ignore", "count", "skip", "raise")
"""Valid values of the fields of a `Policy`."""


@dataclass(frozen=True)
class Policy:
    """The treatment of missing and non-finite gradients by a trainer, the same on all ranks.

    Args:
        unused: for parameters whose gradient backward has not written, though they are not frozen by
            ``grad_req="null"``. ``"error"``: raise a StaleGradientError that names them. ``"zero"``: count them as zero
            where another rank has used them, so that ranks may use different parts of a model; a parameter that no rank
            has used keeps its value and its optimizer's state. ``"warn"``: as ``"zero"``, and each rank warns of new
            ones.
        nonfinite: for a summed gradient with a NaN or an infinity. ``"ignore"``: no check, at no cost. ``"count"``:
            count it in ``trainer.num_nonfinite``. ``"skip"``: count it, and skip the update; the running statistics of
            batch normalization have moved in forward already, except with ``reproducible``. ``"raise"``: raise a
            NonFiniteGradientError.

    Raises:
        ConfigError: another value.
    """

    unused: str = "error"
    nonfinite: str = "ignore"

    def __post_init__(self) -> None:
        for name, valid in (("unused", UNUSED), ("nonfinite", NONFINITE)):
            one_of("Policy", name, getattr(self, name), valid)


def checked_policy(policy: object) -> Policy:
    """Return ``policy``, or the default for None; `ConfigError` for anything else."""
    policy = Policy() if policy is None else policy
    return instance("Trainer", "policy", policy, Policy, "a Policy, e.g. Policy(unused='zero')")


class Unwritten:
    """The treatment of unwritten gradients in one trainer, by its policy.

    No gradient differs from a gradient of zero, with which momentum and weight decay move a parameter. So the closing
    exchange of a step finds the parameters that no rank has used. By default each rank with samples must use all
    parameters except frozen ones, and the ranks compare those by a `mark`. Where the policy lets ranks use different
    parameters, `numbers` count the ranks that used each parameter, packed into float64 numbers.

    Args:
        policy: the trainer's policy.
        params: all parameters of the trainer, by name.
        rank: the number of this rank.
        size: the number of ranks that step together.
    """

    def __init__(self, policy: Policy, params: Mapping[str, ParameterLike], rank: int, size: int) -> None:
        self._policy, self._params, self._rank = policy, params, rank
        self._may_differ = policy.unused != "error"
        """True if ranks may use different parameters."""
        bits = size.bit_length()
        per_number, self._mask = _EXACT_BITS // bits, (1 << bits) - 1
        names = enumerate(params if self._may_differ else ())
        self._places = {name: (place // per_number, place % per_number * bits) for place, name in names}
        """Number, and shift in it, of the count of each parameter."""
        used_by_one = [0] * -(-len(self._places) // per_number)
        for place, shift in self._places.values():
            used_by_one[place] |= 1 << shift
        self._all = tuple(map(float, used_by_one))
        self._all_by_all = [size * packed for packed in self._all]
        self.length = len(self._all)
        """Number of `numbers`."""
        self._warned: set[str] = set()

    def frozen(self, names: Sequence[str]) -> list[str]:
        """Return those of the parameters ``names`` that are frozen by ``grad_req="null"``."""
        return [name for name in names if self._params[name].grad_req == "null"]

    def refused(self, missing: Sequence[str]) -> list[str]:
        """Return those of the parameters ``missing`` that should have a gradient on this rank.

        Warns once of each parameter that counts as zero, if the policy is to warn.
        """
        if self._policy.unused == "zero" or not missing:
            return []
        frozen = set(self.frozen(missing))
        names = [name for name in missing if name not in frozen]
        if self._policy.unused == "error":
            return names
        if not self._warned.issuperset(names):
            self._warned.update(names)
            warn(
                f"rank {self._rank}: no gradient for {listed(names)}: counted as zero; left alone where no rank has one"
            )
        return []

    def mark(self, unused: Sequence[str]) -> int:
        """Return a number that identifies the frozen ones of ``unused``; 0 if ranks may use different parameters."""
        if self._may_differ or not unused:
            return 0
        frozen = set(self.frozen(unused))
        return sum(1 << place for place, name in enumerate(self._params) if name in frozen)

    def require_same_frozen(self, comm: Communicator, operation: str, unused: Sequence[str]) -> None:
        """Raise `MismatchError` if ranks have frozen different parameters; every rank must call."""
        if not self._may_differ:
            frozen = listed(self.frozen(unused)) or "none"
            remedy = (
                "set the same grad_req on all ranks, between step() and the next backward; or let ranks use different "
                "parameters by Policy(unused='zero')"
            )
            require_same(comm, operation, [f"parameters frozen by grad_req='null': {frozen}"], remedy)

    def numbers(self, unused: Sequence[str]) -> Sequence[float]:
        """Return this rank's numbers in the closing exchange of a step that has not used the parameters ``unused``."""
        packed = list(self._all)
        for name in unused if self._may_differ else ():
            place, shift = self._places[name]
            packed[place] -= 1 << shift
        return packed

    def left_alone(self, unused: Sequence[str], sums: Sequence[float] | None) -> frozenset[str]:
        """Return the parameters that no rank has used, which the step leaves out.

        Args:
            unused: the parameters that this rank has not used.
            sums: the sums of all ranks' `numbers`; None: this rank steps alone.
        """
        if not self._may_differ:
            return frozenset(self.frozen(unused)) if unused else frozenset()
        if sums is None or list(sums) == self._all_by_all:
            return frozenset(unused if sums is None else ())
        counts = [int(packed) for packed in sums]
        places = self._places.items()
        return frozenset(name for name, (place, shift) in places if not counts[place] >> shift & self._mask)


def stale(rank: int, names: Sequence[str]) -> StaleGradientError:
    """Return the error of a step for which the parameters ``names`` have no gradient on ``rank``."""
    return StaleGradientError(
        "step",
        where=f"rank {rank}",
        expected="a gradient for every parameter since the last step",
        got="none for " + ", ".join(names[:_MOST_NAMES]),
        remedy="call backward() before step(); freeze untrained parameters by grad_req='null' on all ranks; or pass "
        "Policy(unused='zero'), which leaves alone parameters that no rank has used",
    )


def stale_anywhere(comm: Communicator, names: Sequence[str]) -> StaleGradientError:
    """Return the error of `stale` for the first rank that has such ``names``; every rank must call."""
    by_rank = comm.allgather_json(list(names[:_MOST_NAMES]))
    rank = next(rank for rank, names in enumerate(by_rank) if names)
    return stale(rank, by_rank[rank])
