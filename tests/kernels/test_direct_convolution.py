"""Convolution without unfolding against the plain one in float64."""

import itertools

import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.kernels import jit, reference
from hpcdp.kernels.reference import output_size

CASES = [  # batch, in channels, (height, width), out channels, kernel, stride, padding
    (1, 1, (1, 1), 1, (1, 1), (1, 1), (0, 0)),
    (2, 3, (8, 5), 4, (3, 2), (2, 1), (1, 0)),
    (3, 9, (9, 11), 17, (5, 4), (3, 2), (2, 3)),
    (2, 5, (6, 7), 8, (1, 1), (2, 2), (0, 0)),
    (2, 20, (9, 9), 50, (5, 5), (1, 1), (0, 0)),  # more samples in a patch than at once
    (2, 16, (16, 16), 24, (3, 3), (2, 2), (1, 1)),  # padding behind the gradient, none before it
    (2, 4, (11, 8), 9, (2, 2), (3, 3), (1, 0)),  # places that no patch sees
    (1, 2, (40, 33), 33, (3, 3), (1, 1), (1, 1)),  # more positions than at once
    (2, 7, (4, 17), 12, (3, 1), (1, 3), (4, 1)),  # more padding than kernel
    (1, 40, (12, 34), 16, (3, 3), (1, 2), (0, 1)),
    (2, 16, (19, 21), 24, (2, 2), (2, 2), (0, 0)),  # a line and a column at the end that no patch sees
]
ACCURACY = 3e-6
"""Of the largest element."""


def arrays(case):
    batch, channels, size, out, kernel, stride, padding = case
    rng = np.random.default_rng(len(str(case)))
    results = tuple(map(output_size, size, kernel, stride, padding))
    shapes = [(batch, channels, *size), (out, channels, *kernel), (out,), (batch, out, *results)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def in_doubles(x, weight, bias, gy, stride, padding, relu):
    """The result and the gradients of x, weights and bias by the plain convolution."""
    x, weight, bias, gy = (each.astype(np.float64) for each in (x, weight, bias, gy))
    out, into = np.empty_like(gy), tuple(np.empty_like(each) for each in (x, weight, bias))
    reference.conv2d(x, weight, bias, out, stride, padding, relu)
    reference.conv2d_gradients(x, weight, gy, out if relu else None, into, stride, padding)
    return out, *into


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=ACCURACY * np.abs(expected).max())


@pytest.fixture
def stale_memory(monkeypatch):
    """What a kernel gets to write in is full of what was there before."""
    direct = kernels.load("convolution.direct")
    real = direct._aligned

    def full(size):
        memory = real(size)
        memory[:] = np.nan
        return memory

    monkeypatch.setattr(direct, "_aligned", full)


def check(case, relu):
    direct, steps = kernels.load("convolution.direct"), case[-2:]
    x, weight, bias, gy = arrays(case)
    found = [np.full_like(each, np.nan) for each in (gy, x, weight)]
    direct.conv2d(x, weight, bias, found[0], *steps, relu)
    direct.gradient_of_input(gy, weight, found[1], *steps)
    direct.gradient_of_weight(x, gy, found[2], *steps)
    out = in_doubles(x, weight, bias, gy, *steps, relu)[0]
    _, dx, dweight, _ = in_doubles(x, weight, bias, gy, *steps, False)
    for ours, plain in zip(found, (out, dx, dweight), strict=True):
        assert_close(ours, plain)


@pytest.mark.usefixtures("stale_memory")
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_pass_is_that_of_the_plain_convolution(case, relu):
    check(case, relu)


@pytest.mark.usefixtures("stale_memory")
@pytest.mark.parametrize("kernel", range(1, 5))
@pytest.mark.parametrize("stride", range(1, 4))
def test_no_pass_reads_what_was_in_its_memory_before(kernel, stride):
    for size, padding in itertools.product(range(4, 9), range(3)):
        check((1, 2, (size, 5), 3, (kernel, 1), (stride, 1), (padding, 0)), relu=False)
        check((1, 2, (5, size), 3, (1, kernel), (1, stride), (0, padding)), relu=False)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_the_patches_that_see_it(value):
    case = (2, 4, (12, 12), 9, (3, 3), (1, 1), (1, 1))
    x, weight, _, gy = arrays(case)
    x[1, 3, 0, 0] = value
    for relu in (False, True):
        out = np.zeros_like(gy)
        kernels.load("convolution.direct").conv2d(x, weight, None, out, (1, 1), (1, 1), relu)
        assert not np.isfinite(out[1, :, :2, :2]).any() or relu
        assert np.isnan(out[1, :, :2, :2]).all() or not np.isnan(value)
        assert np.isfinite(out[1, :, 2:]).all()
        assert np.isfinite(out[1, :, :, 2:]).all()
        assert np.isfinite(out[0]).all()


CHOSEN = (2, 24, (16, 16), 32, (3, 3), (2, 2), (1, 1))
"""Just enough positions."""


@pytest.mark.parametrize("relu", [False, True])
def test_where_vectors_are_of_eight_floats_a_convolution_goes_this_way(relu, monkeypatch):
    monkeypatch.setattr(kernels.load("convolution"), "are_eight", lambda: True)
    conv, direct, steps = kernels.load("convolution"), kernels.load("convolution.direct"), CHOSEN[-2:]
    x, weight, bias, gy = arrays(CHOSEN)
    out, same = (np.full_like(gy, np.nan) for _ in range(2))
    conv.conv2d(x, weight, bias, out, *steps, relu)
    direct.conv2d(x, weight, bias, same, *steps, relu)
    assert out.tobytes() == same.tobytes()

    expected = in_doubles(x, weight, bias, gy, *steps, relu)
    into = [np.full_like(each, np.nan) for each in (x, weight, bias)]
    mask = expected[0].astype(np.float32) if relu else None
    conv.conv2d_gradients(x, weight, gy, mask, tuple(into), *steps)
    for ours, plain in zip(into, expected[1:], strict=True):
        assert_close(ours, plain)
    before_relu = gy * (mask > 0) if relu else gy
    gradients = [np.empty_like(x), np.empty_like(weight)]
    direct.gradient_of_input(before_relu, weight, gradients[0], *steps)
    direct.gradient_of_weight(x, before_relu, gradients[1], *steps)
    assert [each.tobytes() for each in gradients] == [each.tobytes() for each in into[:2]]
    for alone in range(3):
        again = [np.full_like(each, np.nan) if number == alone else None for number, each in enumerate(into)]
        conv.conv2d_gradients(x, weight, gy, mask, tuple(again), *steps)
        assert again[alone].tobytes() == into[alone].tobytes()


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ({}, (True, True)),
        ({"dtype": np.float64}, (False, False)),
        ({"eight": False}, (False, False)),
        ({"size": (14, 16)}, (False, False)),  # 56 positions a plane
        ({"batch": 0}, (False, False)),
        ({"batch": 1, "outputs": 72}, (False, False)),  # fewer positions than channels
        ({"outputs": 9}, (False, False)),  # 7 of 16 lanes for nothing
        ({"inputs": 1}, (False, False)),  # 9 products a sum
        ({"inputs": 3}, (True, False)),
        ({"padding": (0, 0), "size": (21, 21)}, (True, True)),  # sums of 11 x 11 for 10 x 10
        ({"padding": (0, 0), "kernel": (5, 5), "size": (21, 21)}, (True, False)),  # for 9 x 9
    ],
    ids=str,
)
def test_which_convolutions_do(change, passes, monkeypatch):
    given = {"dtype": np.float32, "kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "inputs": 24, "outputs": 32,
             "batch": 2, "size": (16, 16), "eight": True} | change  # fmt: skip
    monkeypatch.setattr(kernels.load("convolution"), "are_eight", lambda: given["eight"])
    conv = kernels.load("convolution")
    results = map(output_size, given["size"], given["kernel"], given["stride"], given["padding"])
    x = np.empty((given["batch"], given["inputs"], *given["size"]), given["dtype"])
    weight = np.empty((given["outputs"], given["inputs"], *given["kernel"]), given["dtype"])
    out = np.empty((given["batch"], given["outputs"], *results), given["dtype"])
    assert (conv._directly(x, weight, out), conv._directly_to_input(x, weight, out, given["stride"])) == passes


@pytest.mark.parametrize(
    ("features", "are"),
    [
        ({"avx2": True, "fma": True, "avx512f": False}, True),
        ({"avx2": True, "fma": True, "avx512f": True}, False),
        ({"avx2": True, "fma": False}, False),
        ({"neon": True}, False),
    ],
)
def test_which_processors_have_vectors_of_eight_floats(features, are, monkeypatch):
    monkeypatch.setattr(jit.binding, "get_host_cpu_features", lambda: features)
    assert jit.are_eight.__wrapped__() is are
