"""Pooling of NumPy arrays against the plain version, and that against NumPy over single windows."""

import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.kernels import reference
from hpcdp.kernels.reference import output_size

CASES = [  # shape, kernel, stride, padding
    ((2, 3, 6, 8), (2, 2), (2, 2), (0, 0)),
    ((2, 3, 7, 9), (2, 2), (2, 2), (0, 0)),  # a row and a column are left over
    ((3, 1, 2, 2), (2, 2), (2, 2), (0, 0)),
    ((2, 2, 9, 7), (3, 2), (2, 1), (1, 1)),
    ((1, 4, 8, 8), (3, 3), (1, 1), (1, 1)),
    ((2, 2, 10, 10), (2, 3), (4, 3), (0, 1)),  # windows that skip elements
    ((2, 1, 5, 5), (5, 5), (5, 5), (0, 0)),
    ((0, 2, 4, 4), (2, 2), (2, 2), (0, 0)),
]


def sized(case, dtype=np.float64):
    shape, kernel, stride, padding = case
    rng = np.random.default_rng(sum(shape))
    x = rng.standard_normal(shape).astype(dtype)
    size = tuple(map(output_size, shape[2:], kernel, stride, padding))
    return x, rng.standard_normal((*shape[:2], *size)).astype(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plain_pools_look_at_each_window(case):
    x, gy = sized(case)
    _, kernel, stride, padding = case
    frame = ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2)
    zeros, lowest = np.pad(x, frame), np.pad(x, frame, constant_values=-np.inf)
    mean, largest, chosen = np.empty_like(gy), np.empty_like(gy), np.empty(gy.shape, np.int32)
    reference.average_pool(x, mean, kernel, stride, padding)
    reference.max_pool(x, largest, chosen, kernel, stride, padding)
    for n, c, y, z in np.ndindex(*gy.shape):
        window = (
            n,
            c,
            slice(y * stride[0], y * stride[0] + kernel[0]),
            slice(z * stride[1], z * stride[1] + kernel[1]),
        )
        assert mean[n, c, y, z] == pytest.approx(zeros[window].mean())
        assert largest[n, c, y, z] == lowest[window].max()
        assert chosen[n, c, y, z] == lowest[window].argmax()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plain_gradients_are_the_adjoint(case):
    x, gy = sized(case)
    geometry = case[1:]
    out, chosen, dx = np.empty_like(gy), np.empty(gy.shape, np.int32), np.empty_like(x)
    v = np.random.default_rng(9).standard_normal(x.shape)
    reference.average_pool(v, out, *geometry)
    reference.average_pool_gradient(gy, dx, *geometry)
    np.testing.assert_allclose((gy * out).sum(), (dx * v).sum(), atol=1e-10)
    reference.max_pool(x, out, chosen, *geometry)
    reference.max_pool_gradient(gy, chosen, dx, *geometry)
    if x.size:  # a small change of x does not change which elements are largest
        moved = np.empty_like(gy)
        reference.max_pool(x + 1e-7 * v, moved, np.empty_like(chosen), *geometry)
        np.testing.assert_allclose((gy * (moved - out)).sum() / 1e-7, (dx * v).sum(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_compiled_pools_have_the_bits_of_the_plain_ones(case, dtype):
    pool = kernels.load("convolution")
    x, gy = sized(case, dtype)
    x = np.round(x, 1)  # with equal elements
    x[..., :2, :2], gy[..., :1, :1] = -0.0, -0.0
    results = {}
    for module in (reference, pool):
        mean, largest = np.full_like(gy, np.nan), np.full_like(gy, np.nan)
        chosen = np.full(gy.shape, -1, np.int32)
        of_mean, of_largest = np.full_like(x, np.nan), np.full_like(x, np.nan)
        module.average_pool(x, mean, *case[1:])
        module.average_pool_gradient(gy, of_mean, *case[1:])
        module.max_pool(x, largest, chosen, *case[1:])
        module.max_pool_gradient(gy, chosen, of_largest, *case[1:])
        results[module] = mean, of_mean, largest, of_largest, chosen
    for ours, plain in zip(results[pool], results[reference], strict=True):
        np.testing.assert_array_equal(ours, plain)
        np.testing.assert_array_equal(np.signbit(ours), np.signbit(plain))


@pytest.mark.parametrize("module", ["reference", "pool"])
def test_the_gradient_of_a_largest_element_is_its_own_whatever_it_is(module):
    module = reference if module == "reference" else kernels.load("convolution")
    chosen = np.array([[[[3, 0], [1, 2]]]], np.int32)
    gy, dx = np.array([[[[np.nan, np.inf], [-np.inf, 5]]]], np.float32), np.full((1, 1, 4, 4), 7, np.float32)
    module.max_pool_gradient(gy, chosen, dx, (2, 2), (2, 2), (0, 0))
    expected = [[0, 0, np.inf, 0], [0, np.nan, 0, 0], [0, -np.inf, 0, 0], [0, 0, 5, 0]]
    np.testing.assert_array_equal(dx[0, 0], expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1)])
@pytest.mark.parametrize("module", ["reference", "pool"])
def test_no_nan_is_lost_and_windows_of_nothing_but_minus_infinity_have_a_largest_element(module, padding, dtype):
    module = reference if module == "reference" else kernels.load("convolution")
    x = np.random.default_rng(6).standard_normal((2, 3, 6, 6)).astype(dtype)
    x[0, 0, :3, :3] = -np.inf
    x[1, :, 2, 3] = np.nan
    x[1, 0, 4, 4], x[0, 1] = np.inf, np.nan
    size = (6 + 2 * padding[0] - 3) // 2 + 1
    out, chosen = np.empty((2, 3, size, size), dtype), np.empty((2, 3, size, size), np.int32)
    module.max_pool(x, out, chosen, (3, 3), (2, 2), padding)
    wide = np.pad(x, [(0, 0), (0, 0), *[(each, each) for each in padding]], constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), (2, 3))[:, :, ::2, ::2]
    np.testing.assert_array_equal(out, windows.max(axis=(4, 5)))
    gy, dx = np.ones_like(out), np.empty_like(x)
    module.max_pool_gradient(gy, chosen, dx, (3, 3), (2, 2), padding)
    assert dx.sum() == gy.size
