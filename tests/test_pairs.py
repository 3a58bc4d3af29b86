"""What ordinary runs take of a grid: each pair of values, and what thorough ones add: all combinations."""

import itertools
from pathlib import Path

import pairs as module
import pytest
from pairs import in_turn, pairs, thorough_of

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


NAMES = ("test_grid", "test_two_axes", "test_each_value")
GRID = """
import pytest
@pytest.fixture(params=[0, 1])
def fixed(request): return request.param
@pytest.mark.parametrize("a", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("b", "c"), [(0, 1), (0, 2), (1, 1)])
def test_grid(a, b, c, fixed): pass
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_two_axes(a, b): pass
@pytest.mark.each_value
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_each_value(a, b, fixed): pass
"""


def test_each_pair_of_values_of_decorators_meets_and_each_value_of_others_occurs(tmp_path: Path) -> None:
    (tmp_path / "test_grid.py").write_text(GRID)

    class Collected:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self.items = session.items

    collected = Collected()
    pytest.main(["--collect-only", f"--rootdir={tmp_path}", "-pno:terminal", str(tmp_path)], plugins=[collected])
    left_out = set(thorough_of(collected.items))
    kept = [item for item in collected.items if item not in left_out]
    cases = {name: [item for item in kept if f"::{name}[" in item.nodeid] for name in NAMES}
    assert len(collected.items) == 18 + 9 + 18
    assert len(cases["test_two_axes"]) == 9 and len(cases["test_each_value"]) == 3
    grid = cases["test_grid"]
    assert sum(item.get_closest_marker("thorough") is not None for item in grid) == 6  # are skipped
    found = [item.callspec.params for item in grid if not item.get_closest_marker("thorough")]
    assert len(found) == 6 and {params["fixed"] for params in found} == {0, 1}
    assert len({(params["a"], params["b"], params["c"]) for params in found}) == 6
