import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.core.arrays import dtype_of, is_float, is_half, words

UFUNCS = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum, "MEAN": np.add}
DTYPES = [
    "float16", "bfloat16", "float32", "float64", "int64",
    *(pytest.param(each, marks=pytest.mark.thorough) for each in ("int8", "int32", "uint8", "uint32", "uint64")),
]  # fmt: skip
"""Ordinary runs reduce int8 and uint64 by `combine_staged`, which is of the same parts, in
tests/collectives/test_collectives.py by the algorithm `shared`."""


def expected(rows, op):
    """In the order of the rows, of 16 bits accumulated in float32."""
    total = rows[0].astype(np.float32 if is_half(rows) else rows.dtype)
    for row in rows[1:]:
        total = UFUNCS[op](total, row.astype(total.dtype))
    if op == "MEAN":
        total = total / total.dtype.type(len(rows))
    return total.astype(rows.dtype)


def sample(n, count, dtype, seed=0):
    rng = np.random.default_rng(seed)
    if is_float(dtype_of(dtype)):
        return (rng.standard_normal((n, count)) * 3).astype(dtype_of(dtype))
    return rng.integers(0, 100, (n, count)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_combine_and_combine_into_give_the_ordered_reduction(dtype, n):
    reduce = kernels.load("gradients")
    rows = sample(n, 4999, dtype)
    for op in UFUNCS:
        if op == "MEAN" and not is_float(rows.dtype):
            continue
        result = expected(rows, op)
        out = np.zeros(4990, rows.dtype)
        reduce.combine(words(rows), 3, 4993, words(out), getattr(reduce, op))
        np.testing.assert_array_equal(out, result[3:4993])
        everywhere, one_row = rows.copy(), rows.copy()
        reduce.combine_into(words(everywhere), 3, 4993, reduce.EVERY_ROW, getattr(reduce, op))
        assert (everywhere[:, 3:4993] == result[3:4993]).all()
        np.testing.assert_array_equal(everywhere[:, :3], rows[:, :3])
        reduce.combine_into(words(one_row), 3, 4993, n - 1, getattr(reduce, op))
        np.testing.assert_array_equal(one_row[-1, 3:4993], result[3:4993])
        np.testing.assert_array_equal(one_row[:-1], rows[:-1])


def test_any_split_of_the_columns_gives_the_same_bits():
    reduce = kernels.load("gradients")
    rows, whole, pieces = sample(3, 10007, "float32"), np.empty(10007, "f4"), np.empty(10007, "f4")
    reduce.combine(rows, 0, 10007, whole, reduce.SUM)
    for lo, hi in zip([0, 1, 17, 2048, 9001], [1, 17, 2048, 9001, 10007], strict=True):
        reduce.combine(rows, lo, hi, pieces[lo:hi], reduce.SUM)
    np.testing.assert_array_equal(whole, pieces)


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_a_nan_wins_in_any_row(op):
    reduce = kernels.load("gradients")
    rows, out = np.ones((3, 3), "f4"), np.empty(3, "f4")
    rows[np.arange(3), np.arange(3)] = np.nan
    reduce.combine(rows, 0, 3, out, getattr(reduce, op))
    assert np.isnan(out).all()
