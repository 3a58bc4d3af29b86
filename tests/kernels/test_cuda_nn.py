"""CUDA kernels of networks against their specification, on this processor (`cupy_module`)."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from pairs import pairs
from placed import beginning_at
from raises import raises

from hpcdp import nn
from hpcdp.autograd import Tensor, record
from hpcdp.core.arrays import dtype_of, is_half
from hpcdp.errors import UnsupportedError
from hpcdp.kernels import cuda, reference
from hpcdp.kernels.cuda import cudnn_conv, kernels
from hpcdp.kernels.reference import output_size

DTYPES = ["float16", "bfloat16", "float32", "float64"]
WINDOWS = [((2, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((3, 2), (1, 3), (1, 0)), ((2, 2), (3, 3), (0, 0))]
"""Plain, overlapping with padding, of two sizes, and with elements that no window sees."""

ALMOST_PAIRS = [((2, 2), (2, 1), (0, 0)), ((2, 2), (1, 2), (0, 0)), ((2, 2), (2, 2), (0, 1)), ((2, 2), (2, 2), (1, 0))]
"""Windows that lie side by side along one axis alone, or not from the first element on."""

SHAPES = (2, 3, 8, 8), (4, 3, 3, 3), (16, 5)
"""Of images, a kernel and a matrix."""


def wide(x: Any) -> Any:
    """What the specification is given for the kernels' ``x``: of 16 bits in float32, in which the kernels compute."""
    return x.astype(np.float32) if is_half(x) else x


def same_in(kind: np.dtype, ours: Any, theirs: Any, name: str = "", error: float = 0.0) -> None:
    """Whether a result is what the specification computed, rounded once; ``error`` is of the largest element."""
    assert ours.dtype == (theirs.dtype if theirs.dtype.kind == "i" else kind)
    found, wanted = wide(ours.to_host()), wide(theirs.astype(ours.dtype))
    largest = np.nan_to_num(np.abs(wanted), posinf=0).max(initial=0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=error * largest, err_msg=name)


def normal(shape: Any, dtype: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
def test_add_bias_and_relu_gradient(dtype: str, relu: bool, cupy: ModuleType) -> None:
    for rows, features in ((0, 5), (1, 1), (3, 7), (5, 8), (33, 36), (7, 40)):
        shapes = (rows, features), (features,), (rows, features)
        y, bias, gy = (normal(shape, dtype, seed) for seed, shape in enumerate(shapes))
        y[:1, 0] = np.nan
        on_device = [cupy.asarray(x) for x in (y, bias, gy, np.empty_like(y))]
        kernels.add_bias(on_device[0], on_device[1], relu)
        summed = wide(y)
        reference.add_bias(summed, wide(bias), relu)
        same_in(y.dtype, on_device[0], summed)
        expected = np.empty_like(summed)
        kernels.relu_gradient(on_device[2], on_device[0], on_device[3])
        reference.relu_gradient(wide(gy), summed, expected)
        same_in(y.dtype, on_device[3], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_sums_and_relu_of_whole_arrays(dtype: str, offset: int, cupy: ModuleType) -> None:
    for count in (0, 1, 7, 16, 1003):
        a, b = normal((count,), dtype, 1), normal((count,), dtype, 2)
        a[:1], b[-1:] = np.nan, -np.inf
        expected, x = np.empty_like(wide(a)), np.empty_like(wide(a))
        reference.add(wide(a), wide(b), expected)
        reference.relu(wide(b), x)
        ours, more = beginning_at(offset, cupy.asarray(a)), cupy.asarray(b)
        out = cupy.asarray(np.full_like(a, 7))
        kernels.relu(more, out)
        same_in(a.dtype, out, x)
        kernels.add(ours, more, out)
        same_in(a.dtype, out, expected)
        kernels.add(ours, more, ours)
        same_in(a.dtype, ours, expected)


def test_sums_of_what_no_kernel_takes_are_cupys(cupy: ModuleType) -> None:
    numbers = cupy.asarray(np.arange(6).reshape(2, 3))
    out = cupy.asarray(np.zeros((2, 3), int))
    kernels.add(numbers, numbers, out)
    assert out.to_host().tolist() == [[0, 2, 4], [6, 8, 10]]
    turned = cupy.asarray(np.arange(-3, 3, dtype=np.float32).reshape(3, 2)).T
    out = cupy.asarray(np.zeros((2, 3), np.float32))
    kernels.relu(turned, out)
    assert out.to_host().tolist() == [[0, 0, 1], [0, 0, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
def test_add_bias_to_images(dtype: str, relu: bool, cupy: ModuleType) -> None:
    for shape in ((0, 3, 4), (2, 3, 0), (3, 5, 1), (2, 3, 3), (2, 5, 3, 3), (3, 2, 4, 4), (2, 3, 37)):
        y, bias = normal(shape, dtype, 1), normal(shape[1], dtype, 2)
        expected = wide(y.copy())
        reference.add_bias(expected, wide(bias), relu)
        for offset in (0, 1):
            ours = beginning_at(offset, cupy.asarray(y))
            kernels.add_bias(ours, cupy.asarray(bias), relu)
            same_in(y.dtype, ours, expected, f"{shape}")


ROWS = (0, 5), (1, 1), (33, 36), (300, 20), (1100, 17)
IMAGES = (0, 3, 4), (2, 3, 0), (3, 2, 7), (3, 5, 2, 4), (3, 2, 4100), (5, 2, 2501)
"""By one block a channel, and by several, of packs and of elements."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [*ROWS, *IMAGES], ids=str)
def test_bias_gradient(dtype: str, relu: bool, shape: tuple[int, ...], cupy: ModuleType) -> None:
    gy, y = normal(shape, dtype, 3), np.maximum(normal(shape, dtype, 4), 0)
    y[:1, -1:] = np.nan
    if relu:
        gy[y == 0] = np.nan  # no part of sums
    gy.reshape(-1)[-1:] += 100  # what is added up twice, or not, is no rounding
    masked, expected = wide(gy.copy()), np.empty(shape[1])
    if relu:
        reference.relu_gradient(wide(gy), wide(y), masked)
    reference.bias_gradient(masked.astype("f8"), None, None, expected)
    few = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-12}[dtype]
    found = []
    for offset in (0, 1):
        there = beginning_at(offset, cupy.asarray(gy))
        on_device = (beginning_at(offset, cupy.asarray(y)), beginning_at(offset, cupy.asarray(np.full_like(gy, 7))))
        dbias = cupy.asarray(np.full(shape[1], 7, gy.dtype))
        kernels.bias_gradient(there, *(on_device if relu else (None, None)), dbias)
        same_in(gy.dtype, there, wide(gy))
        if relu:
            same_in(gy.dtype, on_device[1], masked)
        found.append(wide(dbias.to_host()))
        np.testing.assert_allclose(found[-1], expected, rtol=few, atol=few * 10)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS + ALMOST_PAIRS)
@pytest.mark.parametrize(("sides", "offset"), [((9, 11), 0), ((8, 16), 0), ((7, 16), 1), ((7, 48), 0)])
@pytest.mark.parametrize("blocks", [1, 64])
def test_pooling(
    dtype: str, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], sides: tuple[int, int],
    offset: int, blocks: int, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of rows that are whole packs, too, also where they begin within one or the last lies in no window."""
    monkeypatch.setattr("hpcdp.kernels.cuda.MAX_BLOCKS", blocks)
    x = (np.random.default_rng(8).integers(-9, 9, (2, 3, *sides)) / 8).astype(dtype_of(dtype))  # some are equal
    x[0, 0, :3, :4], x[0, 2, 4] = -np.inf, np.inf
    nans = x.copy()
    nans[1, :, 3, 4:6], nans[0, 1] = np.nan, np.nan
    size = [output_size(*each) for each in zip(x.shape[2:], kernel, stride, padding, strict=True)]
    gy = normal((2, 3, *size), dtype, 8)
    out, dx, chosen = np.empty_like(gy), np.empty_like(x), np.empty(gy.shape, np.int32)
    steps = (kernel, stride, padding)

    def same(name: str, *arrays: np.ndarray) -> None:
        on_device, given = [beginning_at(offset, cupy.asarray(each)) for each in arrays], [wide(x) for x in arrays]
        getattr(kernels, name)(*on_device, *steps)
        getattr(reference, name)(*given, *steps)
        for ours, theirs in zip(on_device, given, strict=True):
            same_in(x.dtype, ours, theirs, name)
        if given[-1] is not chosen and name == "max_pool":
            chosen[...] = given[-1]

    same("average_pool", x, out)
    same("average_pool_gradient", gy, dx)
    for values in (x, nans):
        same("max_pool", values, out, chosen)
        same("max_pool_gradient", gy, chosen, dx)


@pytest.mark.parametrize(
    ("dtype", "relu", "steps", "counts"), pairs(DTYPES, [False, True], WINDOWS, [(1, 1, 1), (2, 3, 5), (0, 2, 3)])
)
def test_convolution(
    dtype: str, relu: bool, steps: Any, counts: tuple[int, int, int], cupy: ModuleType, product_error: float
) -> None:
    (kernel, stride, padding), (batch, channels, filters) = steps, counts

    def same(ours: Any, theirs: np.ndarray) -> None:
        rounds_twice = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # products before they are added up, or to a bias
        same_in(x.dtype, ours, theirs, error=max(product_error, rounds_twice.get(dtype, 0.0)))

    shapes = (batch, channels, 9, 11), (filters, channels, *kernel), (filters,)
    x, weight, bias = (normal(shape, dtype, 6 + seed) for seed, shape in enumerate(shapes))
    if batch > 1:
        x[1, 0, 3, 4] = np.nan
    size = [output_size(*each) for each in zip(x.shape[2:], kernel, stride, padding, strict=True)]
    gy = normal((batch, filters, *size), dtype, 9)
    for added in (bias, None):
        out = wide(np.full_like(gy, 7))
        ours = [None if each is None else cupy.asarray(each) for each in (x, weight, added, np.full_like(gy, 7))]
        kernels.conv2d(*ours, stride, padding, relu)
        reference.conv2d(wide(x), wide(weight), None if added is None else wide(added), out, stride, padding, relu)
        same(ours[3], out)
    into = [cupy.asarray(np.full_like(each, 7)) for each in (x, weight, bias)]
    wanted = [wide(np.full_like(each, 7)) for each in (x, weight, bias)]
    x, out = np.where(np.isnan(x), np.zeros_like(x), x), out.astype(gy.dtype)
    arrays = (x, weight, gy, out) if relu else (x, weight, gy)
    on_device = [cupy.asarray(each) for each in arrays] + [None] * (4 - len(arrays))
    kernels.conv2d_gradients(*on_device, tuple(into), stride, padding)
    given = *map(wide, (x, weight, gy)), wide(out) if relu else None
    reference.conv2d_gradients(*given, tuple(wanted), stride, padding)
    for ours, theirs in zip(into[:2], wanted, strict=False):
        same(ours, theirs)
    few = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5, "float64": 1e-13}[dtype]
    same_in(gy.dtype, into[2], wanted[2], error=few)
    alone = [None, cupy.asarray(np.zeros_like(weight)), None]
    kernels.conv2d_gradients(*on_device, tuple(alone), stride, padding)
    same(alone[1], wanted[1])


def flat(arrays: Iterable[Any]) -> list[Any]:
    return [x for each in arrays for x in (each if isinstance(each, tuple) else (each,))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 7), (2, 2, 2500), (3, 2, 4100), (5, 2, 2501)])
def test_batch_norm(dtype: str, shape: tuple[int, int, int], cupy: ModuleType) -> None:
    """What has one number a channel is float32 where elements have 16 bits."""
    rng = np.random.default_rng(9)
    x, gy = (rng.standard_normal((2, *shape)) + 3).astype(dtype_of(dtype))
    scale, shift, mean, variance = rng.uniform(0.5, 2, (4, shape[1])).astype(wide(x).dtype)
    few = 1e-12 if dtype == "float64" else 1e-5
    of_element = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, few)  # the sum may be on the other side of a tie

    def same(name: str, *arrays: Any, eps: tuple[float, ...] = (1e-5,), exact: bool = False) -> None:
        on_device = [tuple(map(cupy.asarray, x)) if isinstance(x, tuple) else cupy.asarray(x) for x in arrays]
        given = [tuple(map(wide, x)) if isinstance(x, tuple) else wide(x) for x in arrays]
        getattr(kernels, name)(*on_device, *eps)
        getattr(reference, name)(*given, *eps)
        for ours, theirs in zip(flat(on_device), flat(given), strict=True):
            error = 0 if exact else of_element if ours.dtype == x.dtype else few
            found, wanted = wide(ours.to_host()), wide(theirs.astype(ours.dtype))
            np.testing.assert_allclose(found, wanted, rtol=error, atol=error * np.abs(wanted).max(), err_msg=name)

    same("normalize", x, scale, shift, (mean, variance), np.empty_like(x), exact=True)
    means = rng.standard_normal((2, shape[1]))
    same("gradient_of_input", gy, x, scale, (mean, variance), means, np.empty_like(x), exact=True)
    same("gradient_sums", gy, x, (mean, variance), np.empty((2, shape[1])), eps=(0.5,))
    same("channel_sums", x, np.empty((2, shape[1])), eps=())
    same("batch_norm", x, scale, shift, np.empty_like(x), (mean, variance))
    into = (np.empty_like(x), np.empty_like(scale), np.empty_like(scale))
    same("batch_norm_gradients", gy, x, scale, (mean, variance + 1), into)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_reading_is_enough_for_a_variance(dtype: str, cupy: ModuleType) -> None:
    """Far from zero, where the first element is far from the others, and where it or another is not finite."""
    x = np.random.default_rng(4).standard_normal((3, 6, 2500)).astype(dtype)
    x[:, :2] += {"float32": 1e4, "float64": 1e9}[dtype]
    x[0, 1:3, 0] += 1e6
    x[0, 3, 0], x[0, 4, 0], x[2, 5, 7] = np.inf, np.nan, np.inf
    wanted = [np.empty(6), np.empty(6)]
    reference.batch_norm(x.astype("f8"), np.ones(6), np.zeros(6), np.empty_like(x, "f8"), tuple(wanted), 1e-5)
    saved = tuple(cupy.asarray(np.empty(6, dtype)) for _ in wanted)
    of_channels = (cupy.asarray(np.full(6, value, dtype)) for value in (1, 0))
    kernels.batch_norm(cupy.asarray(x), *of_channels, cupy.asarray(x), saved, 1e-5)
    for ours, theirs in zip(saved, wanted, strict=True):
        np.testing.assert_allclose(ours.to_host(), theirs, rtol=max(1e-10, 2 * np.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_variances_of_16_bits_do_not_go_by_one_element_that_is_far_from_all_others(
    dtype: str, cupy: ModuleType
) -> None:
    for far in (0, -1):
        x = np.full((1, 1, 1 << 16), 0.3).astype(dtype_of(dtype))
        x[0, 0, far] = 1000
        ones, zeros = (cupy.asarray(np.full(1, each, "f4")) for each in (1, 0))
        saved = cupy.empty(1, dtype="f4"), cupy.empty(1, dtype="f4")
        kernels.batch_norm(cupy.asarray(x), ones, zeros, cupy.asarray(x), saved, 1e-5)
        np.testing.assert_allclose(saved[1].to_host(), x.astype("f8").var(), rtol=1e-6)


@pytest.mark.parametrize("of_type", ["f16", "bf16"])
def test_a_variance_that_rounding_makes_negative_is_zero(of_type: str, cupy: ModuleType) -> None:
    """As of 2^24 elements of 16 bits that are alike but for those that the center is of: their squares and sums are
    rounded in float32, by more than those few add to the variance."""
    x, off = cupy.zeros((1, 1, 1 << 24), dtype="u2"), 1.266357421875
    sums = cupy.asarray(np.array([off, off**2 * (1 - 1.8e-7)]).reshape(2, 1, 1) * x.size)
    mean, variance, factor = (cupy.empty(1, dtype="f4") for _ in range(3))
    of_channels = sums, cupy.asarray(np.ones(1, "f4")), np.float32(1e-8), mean, variance, factor
    cuda.launch("batch_norm", f"statistics_{of_type}", 1, x, *of_channels, cuda.shape_of_channels(x), np.int64(1))
    assert variance.to_host() == 0
    np.testing.assert_allclose(factor.to_host(), 1e4, rtol=1e-6)


def test_batch_norm_refuses_channels_of_16_bits(cupy: ModuleType) -> None:
    x, ones = (cupy.asarray(np.ones(shape, np.float16)) for shape in ((2, 3, 4), 3))
    with raises(UnsupportedError, operation="gradient_sums", where="dtype", expected="float32", got="float16"):
        kernels.gradient_sums(x, x, (ones, ones), cupy.asarray(np.empty((2, 3))), 0.0)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 2, 1608), (5, 2, 1604), (5, 2, 1601), (2, 3, 0)])
def test_channels_have_the_same_sums_wherever_their_elements_begin(
    dtype: str, shape: tuple[int, int, int], cupy: ModuleType
) -> None:
    """By several blocks, of packs that lie in one plane or of elements; what is not finite stays in its channel."""
    gy, x = np.random.default_rng(6).standard_normal((2, *shape)).astype(dtype_of(dtype))
    mean, ones = np.ones((2, shape[1]), wide(x).dtype)
    for y in x[:1, 1:, :1], gy[1:, 1:, 3:4]:
        y[...] = np.inf
    expected, found = np.empty((2, shape[1])), []
    reference.gradient_sums(wide(gy), wide(x), (mean, ones), expected, 0.0)
    for offset in (0, 1):
        views = [beginning_at(offset, cupy.asarray(y)) for y in (gy, x)]
        sums = cupy.asarray(np.empty_like(expected))
        kernels.gradient_sums(*views, (cupy.asarray(mean), cupy.asarray(ones)), sums, 0.0)
        found.append(sums.to_host())
    np.testing.assert_array_equal(found[0], found[1])
    few = 1e-12 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(found[0], expected, rtol=few, atol=few * 100)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("float16", 4e-3), ("bfloat16", 3e-2)])
def test_a_network_computes_with_them(dtype: str, error: float, cupy: ModuleType, monkeypatch: Any) -> None:
    """Forward and backward, with images of float32 in each; of 16 bits no operator is widened."""
    monkeypatch.setattr(cudnn_conv, "is_there", lambda: False)  # its kernels have other names
    launched: list[str] = []
    launch = cuda.launch
    monkeypatch.setattr(cuda, "launch", lambda file, name, *more: (launched.append(name), launch(file, name, *more)))
    F, (images, kernel, matrix) = nn.functional, (normal(s, "float32", 1) for s in SHAPES)
    results = []
    for asarray in (np.asarray, cupy.asarray):
        weights = [Tensor(asarray(x.astype(dtype_of(dtype)))) for x in (kernel, kernel[:, 0, 0, 0], matrix, matrix[0])]
        for each in weights:
            each.attach_grad()
        of_channels = [asarray(np.linspace(0.5, 2, 4, dtype=np.float32)), asarray(np.zeros(4, np.float32))]
        with record():
            x, mean, _ = F.batch_norm(F.conv2d(asarray(images), *weights[:2], 1, 1, "relu"), *of_channels, 1e-5)
            x = F.max_pool2d(x, 2)
            y = F.dense(F.relu(F.avg_pool2d(x, 2) - 0.25).reshape(2, -1), *weights[2:], "relu")
            loss = F.softmax_cross_entropy(y, np.array([1, 0]))
        assert mean.dtype == loss.dtype == np.float32
        loss.backward()
        results.append([y.data, *(each.grad for each in weights)])
    for theirs, ours in zip(*results, strict=True):
        same_in(dtype_of(dtype), ours, theirs, error=error)
    of_type = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    assert {name.rpartition("_")[2] for name in launched} == {of_type}
    assert {name.rpartition("_")[0] for name in launched} == {
        "unfold", "to_images", "from_images", "relu", "max_pool", "max_pool_gradient", "average_pool",
        "average_pool_gradient",
        "add_bias", "bias_gradient_of_rows", "bias_gradient_of_images", "relu_gradient", "channel_sums", "statistics",
        "gradient_sums", "channel_gradients", "normalize", "gradient_of_input", "softmax_cross_entropy",
        "softmax_cross_entropy_gradient",
    }  # fmt: skip
