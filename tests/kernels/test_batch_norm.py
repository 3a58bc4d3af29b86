import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.kernels import reference

EPS = 1e-5


def operands(shape, dtype):
    rng = np.random.default_rng(sum(shape))
    x = (3 + 2 * rng.standard_normal(shape)).astype(dtype)
    scale, shift = (rng.uniform(0.5, 2, shape[1]).astype(dtype) for _ in range(2))
    return x, scale, shift, rng.standard_normal(shape).astype(dtype)


def test_the_plain_result_has_the_asked_mean_and_deviation():
    x, scale, shift, _ = operands((6, 3, 50), np.float64)
    out, saved = np.empty_like(x), (np.empty(3), np.empty(3))
    reference.batch_norm(x, scale, shift, out, saved, EPS)
    np.testing.assert_allclose(saved[0], x.mean(axis=(0, 2)))
    np.testing.assert_allclose(saved[1], x.var(axis=(0, 2)))
    np.testing.assert_allclose(out.mean(axis=(0, 2)), shift, atol=1e-10)
    np.testing.assert_allclose(out.std(axis=(0, 2)), scale, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-4), (np.float64, 1e-11)])
@pytest.mark.parametrize("shape", [(4, 3, 25), (7, 2, 1), (1, 5, 17), (16, 8, 64)])
def test_the_compiled_kernels_equal_the_plain_ones(shape, dtype, tolerance):
    x, scale, shift, gy = operands(shape, dtype)
    results = {}
    for module in (reference, kernels.load("networks")):
        out, saved = np.empty_like(x), (np.empty_like(scale), np.empty_like(scale))
        module.batch_norm(x, scale, shift, out, saved, EPS)
        into = np.empty_like(x), np.empty_like(scale), np.empty_like(scale)
        module.batch_norm_gradients(gy, x, scale, saved, into, EPS)
        results[module] = out, *saved, *into
    for plain, ours in zip(*results.values(), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=tolerance, atol=tolerance * (1 + np.abs(plain).max()))


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-4), (np.float64, 1e-11)])
@pytest.mark.parametrize("shape", [(4, 3, 25), (7, 2, 1), (0, 5, 17), (16, 8, 64)])
def test_the_parts_of_a_batch_that_is_normalized_together(shape, dtype, tolerance):
    x, scale, shift, gy = operands(shape, dtype)
    saved = np.full_like(scale, 2.5), np.full_like(scale, 3.5)
    means = np.random.default_rng(0).standard_normal((2, shape[1]))
    results = {}
    for module in (reference, kernels.load("networks")):
        sums, gradients, out, dx = np.empty_like(means), np.empty_like(means), np.empty_like(x), np.empty_like(x)
        module.channel_sums(x, sums)
        module.normalize(x, scale, shift, saved, out, EPS)
        module.gradient_sums(gy, x, saved, gradients, EPS)
        module.gradient_of_input(gy, x, scale, saved, means, dx, EPS)
        results[module] = sums, out, gradients, dx
    for plain, ours in zip(*results.values(), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=tolerance, atol=tolerance * (1 + np.abs(plain).max(initial=0)))
