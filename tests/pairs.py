"""Grids of parameters of which ordinary runs take what makes each pair of values meet, and `make test-thorough` all."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of a value of each axis, as arguments of `parametrize`.

    Those in which no two values meet that have not met in an earlier one are marked ``thorough``.
    """
    grids = [list(axis) for axis in axes]
    places = list(itertools.product(*(range(len(grid)) for grid in grids)))
    met: set[tuple[int, int, int, int]] = set()
    chosen = set()
    while True:
        gains = {place: len(_meetings(place) - met) for place in places}
        best = max(places, key=lambda place: gains[place])  # the first of the best
        if not gains[best]:
            break
        chosen.add(best)
        met |= _meetings(best)
    return [
        pytest.param(
            *(grid[at] for grid, at in zip(grids, place, strict=True)),
            marks=() if place in chosen else pytest.mark.thorough,
        )
        for place in places
    ]


def in_turn(turns: Sequence[Any], *axes: Iterable[Any]) -> list[Any]:
    """Each of ``turns`` with all combinations of a value of each axis, as arguments of `parametrize`.

    Ordinary runs have each combination with one of them, the next with the next; with others it is ``thorough``.
    """
    return [
        pytest.param(turn, *case, marks=() if at == number % len(turns) else pytest.mark.thorough)
        for number, case in enumerate(itertools.product(*axes))
        for at, turn in enumerate(turns)
    ]


def _meetings(place: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, place[a], b, place[b]) for a, b in itertools.combinations(range(len(place)), 2)}
