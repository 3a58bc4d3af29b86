"""Which parameters any rank has used in a step, counted in the numbers of the step's closing exchange."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_EXACT_BITS = 52
"""Whole numbers of so many bits have exact sums in float64."""


class UsageCounts:
    """By how many ranks each parameter was used: several counts share one float64, so that they need no message.

    Args:
        names: of the parameters, alike on all ranks.
        size: how many ranks there are.
    """

    def __init__(self, names: Sequence[str], size: int) -> None:
        bits = size.bit_length()
        per_number = _EXACT_BITS // bits
        self._names, self._size, self._mask = list(names), size, (1 << bits) - 1
        self._places = {
            name: (place // per_number, place % per_number * bits) for place, name in enumerate(self._names)
        }
        used_by_one = [0] * -(-len(self._names) // per_number)
        for number, shift in self._places.values():
            used_by_one[number] |= 1 << shift
        self._all = tuple(map(float, used_by_one))
        self._all_by_all = [size * each for each in self._all]

    @property
    def length(self) -> int:
        """How many numbers a rank adds to the exchange."""
        return len(self._all)

    def numbers(self, missing: Collection[str]) -> Sequence[float]:
        """Return what this rank adds, which has used all parameters but those ``missing``."""
        if not missing:
            return self._all
        found = list(self._all)
        for name in missing:
            number, shift = self._places[name]
            found[number] -= 1 << shift
        return found

    def unused(self, sums: Sequence[float]) -> frozenset[str]:
        """Return the parameters that no rank has used, from the sums of all ranks' `numbers`."""
        if list(sums) == self._all_by_all:
            return frozenset()
        counts = [int(each) for each in sums]
        places = self._places.items()
        return frozenset(name for name, (number, shift) in places if not counts[number] >> shift & self._mask)
