"""Rows that are added to those of a table, against the specification."""

import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.kernels.reference import rows as reference_rows


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_that_come_more_than_once_are_added_in_their_order(dtype):
    rng, rows = np.random.default_rng(3), np.array([3, 0, 3, 3, 1])
    table, values = rng.standard_normal((4, 7)).astype(dtype), rng.standard_normal((5, 7)).astype(dtype)
    expected = table.copy()
    reference_rows.add_rows(expected, rows, values)
    kernels.load("rows").add_rows(table, rows, values)
    np.testing.assert_array_equal(table, expected)
