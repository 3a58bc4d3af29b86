import time
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from raises import raises

from hpcdp.data import split_batch
from hpcdp.data.datasets import piece_bounds
from hpcdp.errors import ConfigError


def test_the_documents_matrix() -> None:
    x = np.arange(20).reshape(4, 5)
    first, second = split_batch(x, 2)
    np.testing.assert_array_equal(first, x[[0, 1]])
    np.testing.assert_array_equal(second, x[[2, 3]])
    assert np.shares_memory(first, x)


def test_uneven_is_an_error_unless_asked_for() -> None:
    x = np.arange(256)
    with raises(ConfigError, operation="split_batch", expected=3, got=256, remedy="even_split=False"):
        split_batch(x, 3)
    parts = split_batch(x, 3, even_split=False)
    assert sorted(len(part) for part in parts) == [85, 85, 86]
    np.testing.assert_array_equal(np.concatenate(parts), x)
    assert [len(part) for part in split_batch(x[:2], 3, even_split=False)].count(1) == 2
    for wrong in (0, 1.5, "a"):
        with raises(ConfigError, operation="split", where="num_parts", expected=1, got=wrong):
            split_batch(x, wrong)
    with raises(ConfigError, operation="split_batch", where="x", expected=0, got="list"):
        split_batch([1, 2], 2)


def test_weights() -> None:
    assert piece_bounds(256, 2, [3, 1]) == [0, 192, 256]
    assert piece_bounds(256, 2, [0.75, 0.25]) == [0, 192, 256]
    for dtype in (int, "f2", "f4", "f8", "g"):
        assert piece_bounds(256, 2, np.array([3, 1], dtype)) == [0, 192, 256]
    for wrong in ("ab", 3, [None, 1], [1], [float("inf"), 1], [10**400, 1], [Fraction(1, 10**400), 1]):
        with raises(ConfigError, operation="split", where="weights", expected=2):
            piece_bounds(256, 2, wrong)


def test_weights_of_many_ranks_do_not_take_the_square_of_their_number() -> None:
    weights = np.random.default_rng(0).uniform(0.5, 2, 3000)
    began = time.perf_counter()
    assert len(piece_bounds(10**6, 3000, weights)) == 3001
    assert time.perf_counter() - began < 5  # 0.1; it was 50


@given(count=st.integers(0, 10**6), weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_pieces_are_off_by_less_than_one(count: int, weights: list[float]) -> None:
    bounds = piece_bounds(count, len(weights), weights)
    assert bounds[0] == 0 and bounds[-1] == count and bounds == sorted(bounds)
    for i, weight in enumerate(weights):
        assert abs(bounds[i + 1] - bounds[i] - count * weight / sum(weights)) < 1 + 1e-6
