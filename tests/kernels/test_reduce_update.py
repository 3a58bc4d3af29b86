import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.kernels.reference import update as reference_update

STATES = {"sgd": 0, "sgd_momentum": 1, "sgd_nesterov": 1, "adam": 2}
COEFFICIENTS = {
    "sgd": (0.1, 0.01, 0.25),
    "sgd_momentum": (0.1, 0.01, 0.25, 0.9),
    "sgd_nesterov": (0.1, 0.01, 0.25, 0.9),
    "adam": (0.001, 0.01, 0.25, 0.999, 0.1, 0.999, 0.001, 1.5, 1e-8),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", STATES)
@pytest.mark.parametrize(("n", "lo", "count"), [(1, 0, 5), (2, 0, 1024), (2, 16, 1025), (3, 7, 2500), (5, 1, 0)])
def test_it_is_the_sum_in_the_order_of_the_ranks_and_then_the_rule_to_the_bit(rule, dtype, n, lo, count):
    rng = np.random.default_rng([n, lo, count])
    rows = rng.standard_normal((n, lo + count + 3)).astype(dtype)
    before = rows.copy()
    flats = [np.abs(rng.standard_normal(count)).astype(dtype) for _ in range(1 + STATES[rule])]
    expected = [flat.copy() for flat in flats]
    grad = rows[0, lo : lo + count].copy()
    for row in rows[1:]:
        grad += row[lo : lo + count]
    getattr(reference_update, rule)(expected[0], grad, *expected[1:], COEFFICIENTS[rule])
    kernels.load("reduce_update").RULES[rule](rows, lo, lo + count, *flats, COEFFICIENTS[rule])
    for flat, wanted in zip(flats, expected, strict=True):
        np.testing.assert_array_equal(flat, wanted)
    np.testing.assert_array_equal(rows, before)


def test_every_rule_that_can_be_updated_by_can_be_fused():
    fused, update = kernels.load("reduce_update"), kernels.load("update")
    assert all(hasattr(update, name) for name in fused.RULES)
    assert set(fused.RULES) == set(STATES)
