"""What ordinary runs take of a grid: each pair of values, and what thorough ones add: all combinations."""

import itertools

import pairs as module
import pytest
from pairs import in_turn, pairs

AXES = [[1, 2, 3], ["a", "b"], [None, 0.5], [(1, 2), (3, 4), (5, 6), (7, 8)]]


def test_each_pair_of_values_meets_and_no_combination_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THOROUGH", True)
    grid = pairs(*AXES)
    assert [each.values for each in grid] == list(itertools.product(*AXES))
    monkeypatch.setattr(module, "THOROUGH", False)
    ordinary = [each.values for each in pairs(*AXES)]
    assert ordinary == [each.values for each in grid if not each.marks]
    for (i, one), (j, other) in itertools.combinations(enumerate(AXES), 2):
        assert {(values[i], values[j]) for values in ordinary} == set(itertools.product(one, other))
    assert len(ordinary) == 12  # the two longest axes, and no more


def test_of_two_axes_all_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THOROUGH", True)
    assert not any(each.marks for each in pairs(*AXES[:2]))


def test_combinations_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THOROUGH", False)
    assert [each.values for each in in_turn([0, 1], "abc")] == [(0, "a"), (1, "b"), (0, "c")]
    monkeypatch.setattr(module, "THOROUGH", True)
    assert len(in_turn([0, 1], "abc")) == 6
