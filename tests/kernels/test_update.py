"""The fused updates against their specification, to the bit."""

from itertools import pairwise

import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.kernels import reference

RULES = {
    "sgd": (0, (0.1, 0.01, 0.3)),
    "sgd_momentum": (1, (0.1, 0.01, 0.3, 0.9)),
    "sgd_nesterov": (1, (0.1, 0.01, 0.3, 0.9)),
    "adam": (2, (0.02, 0.01, 0.3, 0.999, 0.1, 0.999, 0.001, 22.4, 1e-8)),
}


def arrays(rule: str, dtype: type, size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(size)
    made = [rng.standard_normal(size).astype(dtype) for _ in range(2 + RULES[rule][0])]
    if rule == "adam":
        made[3] = np.abs(made[3])
    return made


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 31, 1037])
def test_same_bits_as_the_reference(rule: str, dtype: type, size: int) -> None:
    fused, plain = arrays(rule, dtype, size), arrays(rule, dtype, size)
    for _ in range(3):
        getattr(kernels.load("gradients"), rule)(*fused, RULES[rule][1])
        getattr(reference, rule)(*plain, RULES[rule][1])
    for ours, theirs in zip(fused, plain, strict=True):
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))
    if size:
        assert not np.array_equal(fused[0], arrays(rule, dtype, size)[0])
    np.testing.assert_array_equal(fused[1], arrays(rule, dtype, size)[1], err_msg="the gradient is left as it is")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", RULES)
def test_same_bits_however_the_arrays_are_cut(rule: str, dtype: type) -> None:
    """Pieces of odd sizes at odd offsets run through the vector loop and the scalar tail at other places."""
    size = 1037
    whole, cut = arrays(rule, dtype, size), arrays(rule, dtype, size)
    update = getattr(kernels.load("gradients"), rule)
    bounds = [0, 1, 4, 11, 28, 61, 126, 127, 511, 1030, size]
    for _ in range(4):
        update(*whole, RULES[rule][1])
        for start, stop in pairwise(bounds):
            update(*(x[start:stop] for x in cut), RULES[rule][1])
    for ours, theirs in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))


def test_other_dtypes_have_no_kernel() -> None:
    half = np.ones(4, np.float16)
    with pytest.raises(TypeError):
        kernels.load("gradients").sgd(half, half.copy(), (0.1, 0.0, 1.0))


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
    getattr(reference, rule)(expected[0], grad, *expected[1:], COEFFICIENTS[rule])
    kernels.load("gradients").REDUCING_RULES[rule](rows, lo, lo + count, *flats, COEFFICIENTS[rule])
    for flat, wanted in zip(flats, expected, strict=True):
        np.testing.assert_array_equal(flat, wanted)
    np.testing.assert_array_equal(rows, before)


def test_every_rule_that_can_be_updated_by_can_be_fused():
    fused = update = kernels.load("gradients")
    assert all(hasattr(update, name) for name in fused.REDUCING_RULES)
    assert set(fused.REDUCING_RULES) == set(STATES)
