import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.kernels.reference import epilogue


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (0, 3), (4, 0)])
def test_add_bias(shape, dtype, relu):
    rng = np.random.default_rng(1)
    y, bias = rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape[1]).astype(dtype)
    if y.size > 10:
        y[1, 2] = np.nan
    expected = np.maximum(y + bias, 0) if relu else y + bias
    for module in (epilogue, kernels.load("epilogue")):
        found = y.copy()
        module.add_bias(found, bias, relu)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 3, 5, 5), (0, 3)])
def test_relu_gradient(shape, dtype):
    rng = np.random.default_rng(2)
    gy, y = rng.standard_normal(shape).astype(dtype), np.maximum(rng.standard_normal(shape), 0).astype(dtype)
    gy.flat[::5], gy.flat[2::5] = np.nan, -np.inf  # also where none goes through
    expected = np.where(y > 0, gy, 0)
    for module in (epilogue, kernels.load("epilogue")):
        dx = np.full_like(gy, np.nan)
        module.relu_gradient(gy, y, dx)
        np.testing.assert_array_equal(dx, expected)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (600, 5), (0, 3)])
def test_bias_gradient(shape, relu):
    rng = np.random.default_rng(3)
    gy, y = rng.standard_normal((2, *shape), np.float32)
    if relu:
        gy[y <= 0] *= np.inf
    expected = np.where(y > 0, gy, 0) if relu else gy
    for module in (epilogue, kernels.load("epilogue")):
        dx, dbias = np.full_like(gy, np.nan), np.full(shape[1], np.nan, np.float32)
        module.bias_gradient(gy, y if relu else None, dx if relu else None, dbias)
        np.testing.assert_allclose(dbias, expected.sum(axis=0, dtype="f8"), rtol=1e-5, atol=1e-5)
        if relu:
            np.testing.assert_array_equal(dx, expected)
