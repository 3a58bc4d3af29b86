"""CUDA kernels of networks against their specification, on this processor (`cupy_on_host`)."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hpcdp import nn
from hpcdp.kernels import cuda_batch_norm, cuda_conv, cuda_epilogue, cuda_pool, reference

DTYPES = [np.float32, np.float64]
WINDOWS = [((2, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((3, 2), (1, 3), (1, 0)), ((2, 2), (3, 3), (0, 0))]
"""Plain, overlapping with padding, of two sizes, and with elements that no window sees."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
def test_add_bias_and_relu_gradient(dtype: type, relu: bool, cupy: ModuleType) -> None:
    for rows, features in ((0, 5), (1, 1), (3, 7), (5, 8), (33, 36)):
        rng = np.random.default_rng(features)
        y, bias, gy = (
            rng.standard_normal(size).astype(dtype) for size in ((rows, features), features, (rows, features))
        )
        y[:1, 0] = np.nan
        on_device = [cupy.asarray(x) for x in (y, bias, gy, np.empty_like(y))]
        cuda_epilogue.add_bias(on_device[0], on_device[1], relu)
        reference.add_bias(y, bias, relu)
        np.testing.assert_array_equal(on_device[0].to_host(), y)
        expected = np.empty_like(y)
        cuda_epilogue.relu_gradient(on_device[2], on_device[0], on_device[3])
        reference.relu_gradient(gy, y, expected)
        np.testing.assert_array_equal(on_device[3].to_host(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
def test_pooling(
    dtype: type, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], cupy: ModuleType
) -> None:
    rng = np.random.default_rng(8)
    x = rng.integers(-9, 9, (2, 3, 9, 11)).astype(dtype) / 8  # some are equal
    x[0, 0, :3, :4], x[0, 2, 4] = -np.inf, np.inf
    nans = x.copy()
    nans[1, :, 3, 4:6], nans[0, 1] = np.nan, np.nan
    size = [reference.output_size(*each) for each in zip(x.shape[2:], kernel, stride, padding, strict=True)]
    gy = rng.standard_normal((2, 3, *size)).astype(dtype)
    out, dx, chosen = np.empty_like(gy), np.empty_like(x), np.empty(gy.shape, np.int32)
    steps = (kernel, stride, padding)

    def same(name: str, *arrays: np.ndarray) -> None:
        on_device = [cupy.asarray(each) for each in arrays]
        getattr(cuda_pool, name)(*on_device, *steps)
        getattr(reference, name)(*arrays, *steps)
        for ours, theirs in zip(on_device, arrays, strict=True):
            np.testing.assert_array_equal(ours.to_host(), theirs, err_msg=name)

    same("average_pool", x, out)
    same("average_pool_gradient", gy, dx)
    for values in (x, nans):
        same("max_pool", values, out, chosen)
        same("max_pool_gradient", gy, chosen, dx)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
@pytest.mark.parametrize(("batch", "channels", "filters"), [(1, 1, 1), (2, 3, 5), (0, 2, 3)])
def test_convolution(
    dtype: type,
    relu: bool,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    batch: int,
    channels: int,
    filters: int,
    cupy: ModuleType,
    product_error: float,
) -> None:
    def same(ours: Any, theirs: np.ndarray) -> None:
        largest = np.nan_to_num(abs(theirs)).max(initial=0)
        np.testing.assert_allclose(ours.to_host(), theirs, rtol=0, atol=product_error * largest)

    rng = np.random.default_rng(6)
    x, weight, bias = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((batch, channels, 9, 11), (filters, channels, *kernel), (filters,))
    )
    if batch > 1:
        x[1, 0, 3, 4] = np.nan
    size = [reference.output_size(*each) for each in zip(x.shape[2:], kernel, stride, padding, strict=True)]
    gy = rng.standard_normal((batch, filters, *size)).astype(dtype)
    for added in (bias, None):
        out = np.full_like(gy, 7)
        ours = [None if each is None else cupy.asarray(each) for each in (x, weight, added, out)]
        cuda_conv.conv2d(*ours, stride, padding, relu)
        reference.conv2d(x, weight, added, out, stride, padding, relu)
        same(ours[3], out)
    wanted = [np.full_like(each, 7) for each in (x, weight, bias)]
    x = np.nan_to_num(x)
    into = [cupy.asarray(each) for each in wanted]
    arrays = (x, weight, gy, out) if relu else (x, weight, gy)
    on_device = [cupy.asarray(each) for each in arrays] + [None] * (4 - len(arrays))
    cuda_conv.conv2d_gradients(*on_device, tuple(into), stride, padding)
    reference.conv2d_gradients(x, weight, gy, out if relu else None, tuple(wanted), stride, padding)
    for ours, theirs in zip(into, wanted, strict=True):
        same(ours, theirs)
    alone = [None, cupy.asarray(np.zeros_like(weight)), None]
    cuda_conv.conv2d_gradients(*on_device, tuple(alone), stride, padding)
    same(alone[1], wanted[1])


def flat(arrays: Iterable[Any]) -> list[Any]:
    return [x for each in arrays for x in (each if isinstance(each, tuple) else (each,))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 7), (2, 2, 2500), (3, 2, 4100), (5, 2, 2501)])
def test_batch_norm(dtype: type, shape: tuple[int, int, int], cupy: ModuleType) -> None:
    rng = np.random.default_rng(9)
    x, gy = (rng.standard_normal((2, *shape)) + 3).astype(dtype)
    scale, shift, mean, variance = rng.uniform(0.5, 2, (4, shape[1])).astype(dtype)
    error = 1e-5 if dtype == np.float32 else 1e-12

    def same(name: str, *arrays: Any, eps: tuple[float, ...] = (1e-5,), error: float = error) -> None:
        on_device = [tuple(map(cupy.asarray, x)) if isinstance(x, tuple) else cupy.asarray(x) for x in arrays]
        getattr(cuda_batch_norm, name)(*on_device, *eps)
        getattr(reference, name)(*arrays, *eps)
        for ours, theirs in zip(flat(on_device), flat(arrays), strict=True):
            size = np.abs(theirs).max()
            np.testing.assert_allclose(ours.to_host(), theirs, rtol=error, atol=error * size, err_msg=name)

    same("normalise", x, scale, shift, (mean, variance), np.empty_like(x), error=0)
    means = rng.standard_normal((2, shape[1]))
    same("gradient_of_input", gy, x, scale, (mean, variance), means, np.empty_like(x), error=0)
    same("gradient_sums", gy, x, (mean, variance), np.empty((2, shape[1])))
    same("channel_sums", x, np.empty((2, shape[1])), eps=())
    same("batch_norm", x, scale, shift, np.empty_like(x), (mean, variance))
    into = (np.empty_like(x), np.empty_like(scale), np.empty_like(scale))
    same("batch_norm_gradients", gy, x, scale, (mean, variance + 1), into)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 2, 1604), (5, 2, 1601), (2, 3, 0)])
def test_channels_have_the_same_sums_wherever_their_elements_begin(
    dtype: type, shape: tuple[int, int, int], cupy: ModuleType
) -> None:
    """By several blocks, of packs that lie in one plane or of elements; what is not finite stays in its channel."""
    gy, x = np.random.default_rng(6).standard_normal((2, *shape)).astype(dtype)
    mean, ones = np.ones((2, shape[1]), dtype)
    for y in x[:1, 1:, :1], gy[1:, 1:, 3:4]:
        y[...] = np.inf
    expected, found = np.empty((2, shape[1])), []
    reference.gradient_sums(gy, x, (mean, ones), expected, 0.0)
    for offset in (0, 1):
        views = [cupy.asarray(np.append(np.zeros(offset, dtype), y))[offset:].reshape(shape) for y in (gy, x)]
        sums = cupy.asarray(np.empty_like(expected))
        cuda_batch_norm.gradient_sums(*views, (cupy.asarray(mean), cupy.asarray(ones)), sums, 0.0)
        found.append(sums.to_host())
    np.testing.assert_array_equal(found[0], found[1])
    few = 1e-5 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(found[0], expected, rtol=few, atol=few * 100)


def test_a_network_computes_with_them(cupy: ModuleType) -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, 8, 8), np.float32)
    results = []
    for of in (x, cupy.asarray(x)):
        weight = x[:1, :, :3, :3] if of is x else cupy.asarray(x[:1, :, :3, :3].copy())
        out = nn.functional.max_pool2d(nn.functional.conv2d(of, weight, None, 1, 1, "relu"), 2)
        results.append(out.data)
    np.testing.assert_allclose(results[1].to_host(), results[0], rtol=1e-5, atol=1e-6)
