"""Grids of parameters of which ordinary runs have what makes each pair of values meet, and `make test-thorough` all."""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

THOROUGH = os.environ.get("HPCDP_TEST_THOROUGH", "") not in ("", "0")


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """Combinations of a value of each axis, as arguments of `parametrize`.

    Those in which no two values meet that have not met in an earlier one are ``thorough``: ordinary runs do not even
    collect them, which takes as long as running short tests.
    """
    grids = [list(axis) for axis in axes]
    places = list(itertools.product(*(range(len(grid)) for grid in grids)))
    left = {place: _meetings(place) for place in places}
    chosen = set()
    while True:
        best = max(places, key=lambda place: len(left[place]))  # the first of the best
        met = set(left[best])
        if not met:
            break
        chosen.add(best)
        for meetings in left.values():
            meetings -= met
    values = {place: [grid[at] for grid, at in zip(grids, place, strict=True)] for place in places}
    return _of_this_run([(values[place], place in chosen) for place in places])


def in_turn(turns: Sequence[Any], *axes: Iterable[Any]) -> list[Any]:
    """Each of ``turns`` with combinations of a value of each axis, as arguments of `parametrize`.

    Ordinary runs have each combination with one of them, the next with the next; thorough ones with all.
    """
    return _of_this_run(
        [
            ([turn, *case], at == number % len(turns))
            for number, case in enumerate(itertools.product(*axes))
            for at, turn in enumerate(turns)
        ]
    )


def _of_this_run(cases: list[tuple[list[Any], bool]]) -> list[Any]:
    return [
        pytest.param(*values, marks=() if is_ordinary else pytest.mark.thorough)
        for values, is_ordinary in cases
        if is_ordinary or THOROUGH
    ]


def _meetings(place: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, place[a], b, place[b]) for a, b in itertools.combinations(range(len(place)), 2)}
