"""What ordinary runs take of a grid: each pair of values, and what thorough ones add: all combinations."""

import itertools

from pairs import pairs

AXES = [[1, 2, 3], ["a", "b"], [None, 0.5], [(1, 2), (3, 4), (5, 6), (7, 8)]]


def test_each_pair_of_values_meets_and_no_combination_is_lost() -> None:
    grid = pairs(*AXES)
    assert [each.values for each in grid] == list(itertools.product(*AXES))
    ordinary = [each.values for each in grid if not each.marks]
    for (i, one), (j, other) in itertools.combinations(enumerate(AXES), 2):
        assert {(values[i], values[j]) for values in ordinary} == set(itertools.product(one, other))
    assert len(ordinary) == 12  # the two longest axes, and no more


def test_of_two_axes_all_is_ordinary() -> None:
    assert not any(each.marks for each in pairs(*AXES[:2]))
