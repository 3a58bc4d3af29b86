import math
from itertools import pairwise

import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.core.arrays import dtype_of, words
from hpcdp.kernels import reference

SIZES = [0, 1, 2, 3, 31, 16384, 16385, 50_001]
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def modules():
    return [reference, kernels.load("gradients")]


def sample(size, dtype, seed=0):
    return np.random.default_rng(seed + size).standard_normal(size).astype(dtype_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_sum_of_squares_is_that_of_float64(size, dtype):
    x = sample(size, dtype)
    exact = math.fsum(float(value) ** 2 for value in x)
    for module in modules():
        assert module.sum_of_squares(words(x)) == pytest.approx(exact, rel=1e-13)


def test_sum_of_squares_neither_overflows_nor_vanishes():
    for module in modules():
        assert module.sum_of_squares(np.full(1001, 3e38, np.float32)) == pytest.approx(
            1001 * float(np.float32(3e38)) ** 2
        )
        assert module.sum_of_squares(np.full(1001, 1e-40, np.float32)) == pytest.approx(1001e-80, rel=1e-4)
        assert module.sum_of_squares(np.full(3, 60000, np.float16).view(np.uint16)) == pytest.approx(3 * 60000.0**2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1, 500, 1000])
def test_sum_of_squares_tells_of_what_is_not_finite(bad, at):
    for module in modules():
        x = sample(1001, "float32")
        x[at] = bad
        assert not np.isfinite(module.sum_of_squares(x))


def test_the_same_sum_has_the_same_bits():
    x = sample(50_001, "float32")
    elsewhere = np.empty(50_010, np.float32)[5:-4]
    elsewhere[:] = x
    assert kernels.load("gradients").sum_of_squares(x) == kernels.load("gradients").sum_of_squares(elsewhere)


@pytest.mark.parametrize("bounds", [[0], [0, 10], [0, 0, 1, 1, 500, 1000], [3, 900, 1000]])
def test_segments_are_the_layers(bounds):
    params, grads = sample(1000, "float32"), sample(1000, "float32", seed=1)
    cuts = np.array(bounds, np.int64)
    expected = [[float((x[a:b].astype(np.float64) ** 2).sum()) for x in (params, grads)] for a, b in pairwise(bounds)]
    for module in modules():
        out = np.full((len(bounds) - 1, 2), np.nan)
        module.segment_squares(params, grads, cuts, out)
        np.testing.assert_allclose(out, np.array(expected).reshape(-1, 2), rtol=1e-13)


def test_the_parts_of_a_layer_add_up():
    params, grads = sample(1000, "float32"), sample(1000, "float32", seed=1)
    whole, parts = np.empty((1, 2)), np.empty((2, 2))
    norms = kernels.load("gradients")
    norms.segment_squares(params, grads, np.array([0, 1000]), whole)
    norms.segment_squares(params, grads, np.array([0, 333, 1000]), parts)
    np.testing.assert_allclose(parts.sum(axis=0), whole[0], rtol=1e-13)


def test_a_gradient_is_scaled_to_the_length_that_it_may_have():
    assert reference.clipped_scale([9.0, 16.0], 0.5, 1.0) == 0.2
    assert reference.clipped_scale([9.0, 16.0], 0.5, 2.5) == 0.5
    assert reference.clipped_scale([0.0], 0.5, 1.0) == 0.5
    for squares in (math.inf, math.nan):
        assert reference.clipped_scale([squares], 0.5, 1.0) == 0.5
