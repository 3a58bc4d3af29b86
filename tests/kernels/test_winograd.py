"""Convolution by Winograd's transforms against the plain one in float64."""

import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.kernels import reference
from hpcdp.kernels.reference import output_size

CASES = [  # batch, in channels, (height, width), out channels, padding
    (1, 1, (3, 3), 1, (0, 0)),
    (2, 5, (9, 6), 7, (1, 1)),
    (1, 20, (7, 5), 33, (0, 1)),
    (3, 16, (4, 4), 32, (2, 2)),
    (1, 3, (1, 2), 2, (2, 1)),
    (5, 17, (14, 21), 16, (1, 1)),  # more than one block
    (1, 2, (5, 300), 2, (1, 1)),  # a row of tiles is more than a block
]
ACCURACY = 2e-5
"""Of the largest element, as the kernels promise."""


def arrays(case):
    batch, channels, size, out, padding = case
    rng = np.random.default_rng(sum(size) + batch)
    height, width = (output_size(*each) for each in zip(size, (3, 3), (1, 1), padding, strict=True))
    shapes = [(batch, channels, *size), (out, channels, 3, 3), (out,), (batch, out, height, width)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def in_doubles(x, weight, bias, gy, padding, relu=False):
    """The result and the gradients of x, weights and bias by the plain convolution."""
    x, weight, bias, gy = (each.astype(np.float64) for each in (x, weight, bias, gy))
    out, into = np.empty_like(gy), tuple(np.empty_like(each) for each in (x, weight, bias))
    reference.conv2d(x, weight, bias, out, (1, 1), padding, relu)
    reference.conv2d_gradients(x, weight, gy, out if relu else None, into, (1, 1), padding)
    return out, *into


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=ACCURACY * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_pass_is_that_of_the_plain_convolution(case):
    winograd, padding = kernels.load("convolution.winograd"), case[-1]
    x, weight, bias, gy = arrays(case)
    found = [np.full_like(each, np.nan) for each in (gy, x, weight)]
    winograd.conv2d(x, weight, bias, found[0], padding, False)
    winograd.gradient_of_input(gy, weight, found[1], padding)
    winograd.gradient_of_weight(x, gy, found[2], padding)
    for ours, plain in zip(found, in_doubles(x, weight, bias, gy, padding), strict=False):
        assert_close(ours, plain)


CHOSEN = (2, 16, (16, 15), 18, (1, 1))
"""Just enough tiles and channels to be worth it."""


@pytest.mark.parametrize("relu", [False, True])
def test_a_convolution_of_many_channels_goes_this_way(relu):
    conv, winograd, padding = kernels.load("convolution"), kernels.load("convolution.winograd"), CHOSEN[-1]
    x, weight, bias, gy = arrays(CHOSEN)
    out, same, without = (np.full_like(gy, np.nan) for _ in range(3))
    conv.conv2d(x, weight, bias, out, (1, 1), padding, relu)
    winograd.conv2d(x, weight, bias, same, padding, relu)
    assert out.tobytes() == same.tobytes()
    conv.conv2d(x, weight, None, without, (1, 1), padding, False)
    expected = in_doubles(x, weight, bias, gy, padding, relu)
    assert_close(out, expected[0])
    assert_close(without + bias[:, None, None] if not relu else np.maximum(without + bias[:, None, None], 0), out)

    into = [np.full_like(each, np.nan) for each in (x, weight, bias)]
    mask = expected[0].astype(np.float32) if relu else None
    conv.conv2d_gradients(x, weight, gy, mask, tuple(into), (1, 1), padding)
    for ours, plain in zip(into, expected[1:], strict=True):
        assert_close(ours, plain)
    for alone in range(3):
        again = [np.full_like(each, np.nan) if number == alone else None for number, each in enumerate(into)]
        conv.conv2d_gradients(x, weight, gy, mask, tuple(again), (1, 1), padding)
        assert again[alone].tobytes() == into[alone].tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": np.float64},
        {"kernel": (3, 1)},
        {"stride": (1, 2)},
        {"padding": (3, 1)},
        {"inputs": 15},
        {"outputs": 15},
        {"batch": 1},
        {"batch": 32, "size": (5, 5)},  # most of the tiles of 4 x 4 would lie outside
    ],
    ids=str,
)
def test_other_convolutions_do_not(change):
    given = {"dtype": np.float32, "kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "inputs": 16, "outputs": 16,
             "batch": 2, "size": (16, 16)}  # fmt: skip
    conv = kernels.load("convolution")

    def goes(dtype, kernel, stride, padding, inputs, outputs, batch, size):
        x = np.empty((batch, inputs, *size), dtype)
        return conv._by_winograd(x, np.empty((outputs, inputs, *kernel)), np.empty((batch, outputs, *size)), stride,
                                 padding)  # fmt: skip

    assert goes(**given)
    assert not goes(**given | change)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_the_tiles_that_see_it(value):
    x, weight, bias, gy = arrays((2, 16, (16, 16), 16, (1, 1)))
    x[1, 3, 0, 0] = value
    for relu in (False, True):
        out = np.zeros_like(gy)
        kernels.load("convolution.winograd").conv2d(x, weight, bias, out, (1, 1), relu)
        assert np.isnan(out[1, :, :4, :4]).all()
        assert np.isfinite(out[1, :, 4:]).all()
        assert np.isfinite(out[0]).all()
