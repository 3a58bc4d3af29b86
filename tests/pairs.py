"""Choice of the cases, and of the numbers of ranks, of ordinary runs; `make test-thorough` runs all."""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from hpcdp.core.environment import launched_ranks

THOROUGH = os.environ.get("HPCDP_TEST_THOROUGH", "") not in ("", "0")


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """Combinations of a value of each axis, as arguments of `parametrize`.

    Those in which no two values meet that have not met in an earlier one are ``thorough``: ordinary runs do not even
    collect them, which takes as long as running short tests.
    """
    grids = [list(axis) for axis in axes]
    places = list(itertools.product(*(range(len(grid)) for grid in grids)))
    chosen = covering(places, range(len(grids)))
    values = {place: [grid[at] for grid, at in zip(grids, place, strict=True)] for place in places}
    return _of_this_run([(values[place], place in chosen) for place in places])


def covering(places: Sequence[tuple[int, ...]], strict: Sequence[int]) -> set[tuple[int, ...]]:
    """Select places of a grid so that each value occurs, and each two values of ``strict`` axes that meet in any."""
    left = {place: _meetings(place, strict) for place in places}
    chosen = set()
    while True:
        best = max(left, key=lambda place: len(left[place]))  # the first of the best
        met = set(left[best])
        if not met:
            return chosen
        chosen.add(best)
        for meetings in left.values():
            meetings -= met


def thorough_of(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that ordinary runs leave out of grids.

    An axis is a `parametrize` decorator, or a fixture with parameters. Ordinary runs keep a test for every two values
    of different decorators, and for every value of a fixture. Of a grid marked `each_value`, whose axes do not
    interact, they keep a test for every value. The grids of `pairs` and `in_turn` are one axis each.
    """
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("thorough"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found = []
    for cases in grids.values():
        axes, num_strict = _axes(cases[0])
        if len(axes) < 2 or any(case.get_closest_marker("mpi") for case in cases):
            continue  # of real ranks, each run has cases of its own
        numbers: list[dict[object, int]] = [{} for _ in axes]
        places = [
            tuple(
                known.setdefault(tuple(id(case.callspec.params[name]) for name in axis), len(known))
                for axis, known in zip(axes, numbers, strict=True)
            )
            for case in cases
        ]
        if len(set(places)) == len(places):
            chosen = covering(places, range(0 if cases[0].get_closest_marker("each_value") else num_strict))
            found += [case for case, place in zip(cases, places, strict=True) if place not in chosen]
    return found


def _axes(item: Any) -> tuple[list[tuple[str, ...]], int]:
    """Return the names of the parameters of each axis, and the number of decorators, which are first."""
    params = item.callspec.params
    axes = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        axes.append(tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names))
    fixtures = [(name,) for name in params if not any(name in axis for axis in axes)]
    return axes + fixtures, len(axes)


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


def only_on(*sizes: int) -> None:
    """Skip a module of real ranks where ordinary runs have another number of them, before it imports much."""
    if launched_ranks() not in (None, *sizes) and not THOROUGH:
        pytest.skip("long: make test-thorough runs it", allow_module_level=True)


def _of_this_run(cases: list[tuple[list[Any], bool]]) -> list[Any]:
    return [
        pytest.param(*values, marks=() if is_ordinary else pytest.mark.thorough)
        for values, is_ordinary in cases
        if is_ordinary or THOROUGH
    ]


def _meetings(place: tuple[int, ...], strict: Sequence[int]) -> set[tuple[int, ...]]:
    met = {(a, place[a], b, place[b]) for a, b in itertools.combinations(strict, 2)}
    return met | {(a, at) for a, at in enumerate(place) if a not in strict or len(strict) == 1}
