"""Two checkpoints differ in what they differ in, and in nothing else."""

import numpy as np
import pytest
from saved import Bfloat16, arrays, save, sharded

from hpcdp.checkpoint import PerRank, inspect
from hpcdp.checkpoint.inspect import differences, folded


def state(of):
    return lambda step, world: of(world) if callable(of) else of


def between(tmp_path, a, b, ranks=(1, 1), **options):
    one, other = (
        save(tmp_path / name, ranks=n, state=made)[0]
        for name, n, made in (("a", ranks[0], state(a)), ("b", ranks[1], state(b)))
    )
    return {each.name: each.what for each in differences(one, other, **options)}


def test_the_same_state_saved_by_other_ranks(tmp_path):
    def same(world):
        return {"x": sharded(arrays()["weight"], world), "brain": Bfloat16([1, 2]), "nan": float("nan")}

    assert between(tmp_path, same, same, ranks=(1, 3)) == {}


def test_names_shapes_dtypes_and_values(tmp_path):
    a = {"x": np.ones(3), "y": np.ones((2, 3)), "z": np.ones(2), "n": 1, "s": "a", "gone": None, "same": [1, "x"]}
    b = {"x": np.ones(4), "y": np.ones((3, 2)), "z": np.ones(2, np.float32), "n": 2, "s": "b", "new": np.ones(2),
         "same": [1, "x"]}  # fmt: skip
    assert between(tmp_path, a, b) == {
        "x": "shape (3,) float64 and shape (4,) float64",
        "y": "shape (2, 3) float64 and shape (3, 2) float64",
        "z": "shape (2,) float64 and shape (2,) float32",
        "n": "1 and 2",
        "s": "'a' and 'b'",
        "gone": "only in A: None",
        "new": "only in B: shape (2,) float64",
    }


def test_how_far_elements_are_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "PIECE_NBYTES", 1 << 20)
    x = np.ones((3, 500_000), np.float32)
    y = x.copy()
    y[0, 7], y[2, 499_999], y[1, 5] = 1.5, 0.5, 0.75
    assert between(tmp_path, {"x": x}, {"x": y}) == {
        "x": "3 of 1,500,000 elements differ, by at most 0.5 (relative 0.5)"
    }


@pytest.mark.parametrize(
    ("dtype", "a", "b", "says"),
    [
        ("u1", [3, 250], [3, 5], "1 of 2 elements differ, by at most 245 (relative 0.98)"),
        ("i8", [2**62, 1], [2**62 + 1, 1], "1 of 2 elements differ, by at most 1 (relative 2.17e-19)"),
        ("?", [True, False], [True, True], "1 of 2 elements differ, by at most 1 (relative 1)"),
        ("c8", [1j, 0], [1j, 3 + 4j], "1 of 2 elements differ, by at most 5 (relative 1)"),
        ("f4", [np.nan, 1], [np.nan, 1], None),
        ("f4", [np.nan, 1], [2, 1], "1 of 2 elements differ, by at most inf (relative inf)"),
        ("f4", [np.inf, 1], [np.inf, 1], None),
        ("f4", [0.0, 1], [-0.0, 1], "1 of 2 elements differ, in bits alone (signs of zeros, kinds of NaN)"),
    ],
)
def test_kinds_of_elements(dtype, a, b, says, tmp_path):
    found = between(tmp_path, {"x": np.array(a, dtype)}, {"x": np.array(b, dtype)})
    assert found == ({} if says is None else {"x": says})


@pytest.mark.parametrize("count", [8, 9, 700])
def test_many_values_of_a_list_are_one_line(count, tmp_path):
    def values(step, world):
        return {"a": [7, *range(step, step + count)], "b": step, "c": [np.full(1, step)] * 9}

    found = list(differences(*save(tmp_path, (1, 2), ranks=1, state=values)))
    assert len(found) == count + 10
    told = list(folded(found))
    if count == 8:
        assert told == found
    else:
        assert told[0][:2] == ("a", f"{count} values, the first is number 1: 1 and 2")
        assert told[1:] == found[count:]


def test_tolerances(tmp_path):
    a, b = {"x": np.array([1.0, 0.0]), "n": 1.0}, {"x": np.array([1.001, 1e-6]), "n": 1.001}
    assert set(between(tmp_path / "0", a, b)) == {"x", "n"}
    assert set(between(tmp_path / "1", a, b, rtol=0.01)) == {"x"}
    assert between(tmp_path / "2", a, b, rtol=0.01, atol=1e-5) == {}
    assert set(between(tmp_path / "3", a, b, rtol=1e-5, atol=1e-5)) == {"x", "n"}


def test_bfloat16_is_compared_as_numbers(tmp_path):
    found = between(tmp_path, {"x": Bfloat16([1.0, 2.0])}, {"x": Bfloat16([1.0, 3.0])})
    assert found == {"x": "1 of 2 elements differ, by at most 1 (relative 0.333)"}


def test_what_each_rank_has_for_itself(tmp_path):
    def ranks(seed):
        return lambda world: {"rng": PerRank({"seed": world.rank + seed, "x": np.full(2, world.rank)})}

    assert between(tmp_path / "0", ranks(0), ranks(0), ranks=(2, 2)) == {}
    assert between(tmp_path / "1", ranks(0), ranks(1), ranks=(2, 2)) == {
        "rng/rank-0/seed": "0 and 1",
        "rng/rank-1/seed": "1 and 2",
    }
    assert between(tmp_path / "2", ranks(0), ranks(0), ranks=(1, 2)) == {
        "rng/rank-1/seed": "only in B: 1",
        "rng/rank-1/x": "only in B: shape (2,) int64",
    }
