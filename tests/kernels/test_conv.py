"""The blocked convolution of NumPy arrays against the plain one, and that against a loop over single products."""

import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.kernels import reference
from hpcdp.kernels.reference import output_size

CASES = [  # batch, in channels, (height, width), out channels, kernel, stride, padding
    (3, 1, (7, 7), 2, (3, 3), (1, 1), (0, 0)),
    (2, 3, (8, 5), 4, (3, 2), (2, 1), (1, 0)),
    (4, 2, (9, 11), 3, (5, 4), (3, 2), (2, 3)),
    (1, 4, (6, 6), 5, (1, 1), (1, 1), (0, 0)),
    (2, 5, (6, 6), 2, (1, 1), (2, 2), (0, 0)),
    (3, 2, (4, 4), 3, (4, 4), (1, 1), (0, 0)),
    (5, 3, (4, 3), 7, (3, 3), (1, 1), (1, 1)),
    (0, 3, (4, 3), 7, (3, 3), (1, 1), (1, 1)),
    (300, 2, (6, 6), 3, (3, 3), (1, 1), (1, 1)),  # more than one block
    (2, 40, (20, 20), 6, (5, 5), (1, 1), (2, 2)),  # an image is more than a block
    (3, 2, (40, 33), 3, (2, 3), (2, 1), (0, 2)),  # each image has its own product
    (2, 5, (40, 37), 3, (1, 1), (2, 2), (0, 0)),
    (2, 2, (3, 4), 30, (3, 3), (1, 2), (1, 1)),  # fewer positions than channels
    (2, 1, (0, 2), 2, (2, 2), (1, 1), (2, 0)),  # nothing but padding
    (0, 1, (20, 20), 2, (3, 3), (1, 1), (1, 1)),
    (3, 7, (0, 9), 24, (3, 3), (1, 1), (5, 3)),  # the same, of so many channels that nothing is unfolded
]


def arrays(case, dtype=np.float64):
    batch, channels, (height, width), out, kernel, stride, padding = case
    rng = np.random.default_rng(len(str(case)))
    size = tuple(map(output_size, (height, width), kernel, stride, padding))
    x = rng.standard_normal((batch, channels, height, width)).astype(dtype)
    weight = rng.standard_normal((out, channels, *kernel)).astype(dtype)
    bias = rng.standard_normal(out).astype(dtype)
    return x, weight, bias, rng.standard_normal((batch, out, *size)).astype(dtype)


def by_single_products(x, weight, bias, shape, stride, padding):
    wide = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    out = np.empty(shape)
    for n, o, y, z in np.ndindex(*shape):
        top, left = y * stride[0], z * stride[1]
        patch = wide[n, :, top : top + weight.shape[2], left : left + weight.shape[3]]
        out[n, o, y, z] = (patch * weight[o]).sum() + bias[o]
    return out


@pytest.mark.parametrize("case", CASES[:8], ids=str)
def test_the_plain_convolution_is_the_sum_of_products(case):
    x, weight, bias, gy = arrays(case)
    out = np.empty_like(gy)
    reference.conv2d(x, weight, bias, out, *case[-2:], False)
    np.testing.assert_allclose(out, by_single_products(x, weight, bias, gy.shape, *case[-2:]), atol=1e-12)
    relu = np.empty_like(gy)
    reference.conv2d(x, weight, bias, relu, *case[-2:], True)
    np.testing.assert_array_equal(relu, np.maximum(out, 0))


@pytest.mark.parametrize("case", CASES[:8], ids=str)
def test_the_plain_gradients_are_the_adjoint(case):
    """Convolution is linear in each operand: <gy, conv(v)> is <gradient, v> for every v."""
    x, weight, bias, gy = arrays(case)
    dx, dweight, dbias = np.empty_like(x), np.empty_like(weight), np.empty_like(bias)
    reference.conv2d_gradients(x, weight, gy, None, (dx, dweight, dbias), *case[-2:])
    rng = np.random.default_rng(1)
    for gradient, operand in ((dx, 0), (dweight, 1), (dbias, 2)):
        operands = [x, weight, np.zeros_like(bias)]
        operands[operand] = v = rng.standard_normal(gradient.shape)
        if operand == 2:
            operands[0] = np.zeros_like(x)
        out = np.empty_like(gy)
        reference.conv2d(*operands, out, *case[-2:], False)
        np.testing.assert_allclose((gradient * v).sum(), (gy * out).sum(), atol=1e-9)


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 2e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_blocked_convolution_equals_the_plain_one(case, relu, dtype, rtol):
    conv = kernels.load("convolution")
    x, weight, bias, gy = arrays(case, dtype)
    expected, out = np.empty_like(gy), np.full_like(gy, np.nan)
    for given in (bias, None):
        reference.conv2d(x, weight, given, expected, *case[-2:], relu)
        conv.conv2d(x, weight, given, out, *case[-2:], relu)
        np.testing.assert_allclose(out, expected, rtol=rtol, atol=rtol * 20)
    mask = expected if relu else None
    wanted = [np.empty_like(each) for each in (x, weight, bias)]
    found = [np.full_like(each, np.nan) for each in wanted]
    reference.conv2d_gradients(x, weight, gy, mask, tuple(wanted), *case[-2:])
    conv.conv2d_gradients(x, weight, gy, mask, tuple(found), *case[-2:])
    for name, ours, plain in zip(("x", "weight", "bias"), found, wanted, strict=True):
        scale = rtol * 20 * max(1.0, float(np.abs(plain).max(initial=0)))
        np.testing.assert_allclose(ours, plain, rtol=rtol, atol=scale, err_msg=name)


@pytest.mark.parametrize("module", ["reference", "conv"])
def test_what_does_not_go_through_relu_is_no_part_of_gradients(module):
    module = reference if module == "reference" else kernels.load("convolution")
    case = CASES[2]
    x, weight, bias, gy = arrays(case)
    out = np.empty_like(gy)
    reference.conv2d(x, weight, bias, out, *case[-2:], True)
    into = [[np.full_like(each, np.nan) for each in (x, weight, bias)] for _ in range(2)]
    for value, places in zip((0, np.nan), into, strict=True):
        gy[out == 0] = value
        module.conv2d_gradients(x, weight, gy, out, tuple(places), *case[-2:])
    for zeros, nans in zip(*into, strict=True):
        np.testing.assert_array_equal(nans, zeros)


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_each_gradient_comes_alone(asked):
    conv = kernels.load("convolution")
    case = CASES[2]
    x, weight, bias, gy = arrays(case)
    wanted = [np.empty_like(each) for each in (x, weight, bias)]
    reference.conv2d_gradients(x, weight, gy, None, tuple(wanted), *case[-2:])
    into = [None, None, None]
    into[asked] = np.full_like(wanted[asked], np.nan)
    conv.conv2d_gradients(x, weight, gy, None, tuple(into), *case[-2:])
    np.testing.assert_allclose(into[asked], wanted[asked], atol=1e-11)


def test_nan_goes_through_relu():
    x, weight, bias, gy = arrays(CASES[0])
    x[0, 0, 0, 0] = np.nan
    out = np.empty_like(gy)
    kernels.load("convolution").conv2d(x, weight, bias, out, *CASES[0][-2:], True)
    assert np.isnan(out[0, :, 0, 0]).all()
    assert np.isnan(out).sum() == 2
