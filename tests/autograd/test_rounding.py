"""How exact operations are where numbers are large, small, many, or of 16 bits; and what has no gradient."""

import warnings

import numpy as np
import pytest
from raises import raises

from hpcdp import nn
from hpcdp.autograd import Tensor, maximum, minimum, record, stack
from hpcdp.core.arrays import dtype_of
from hpcdp.errors import HpcdpError, UnsupportedError

HALVES = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""How far a number that was rounded once may be, as a share of it."""


def gradients(compute, *values, head=None):
    tensors = [Tensor(np.array(each)) for each in values]
    for each in tensors:
        each.attach_grad()
    with record():
        y = compute(*tensors)
    y.backward(head)
    return [each.grad for each in tensors]


class _Sigmoid(nn.Module):
    def forward(self, x):
        return (x * 1.0).sigmoid() * 1.0


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize(("dtype", "least", "error"), [("float32", -80.0, 1e-6), ("float64", -700.0, 1e-14)])
def test_a_sigmoid_is_exact_where_it_is_small(dtype, least, error, is_planned):
    x = np.linspace(least, 30, 201).astype(dtype)
    net = _Sigmoid()
    net.hybridize(is_planned)
    exact = 1 / (1 + np.exp(-x.astype(np.longdouble)))
    np.testing.assert_allclose(net(x).data, exact.astype(dtype), rtol=error)
    (dx,) = gradients(net, x[:100])
    np.testing.assert_allclose(dx, (exact * (1 - exact)).astype(dtype)[:100], rtol=10 * error)


def test_a_sigmoid_of_large_numbers_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = _Sigmoid()
        net.hybridize()
        for call in (Tensor.sigmoid, net, net):
            y = call(Tensor(np.array([-1e30, -np.inf, 1e30, np.inf], np.float32)))
            np.testing.assert_array_equal(y.data, [0, 0, 1, 1])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_of_16_bits_they_are_rounded_once(dtype, name):
    x = np.linspace(-8, 4, 97).astype(dtype_of(dtype))
    y = Tensor(x)
    y.attach_grad()
    with record():
        z = getattr(y, name)()
    z.backward(np.full(x.shape, 0.7, x.dtype))
    exact = getattr(Tensor(x.astype(np.float64)), name)().data
    np.testing.assert_allclose(z.data.astype(float), exact, rtol=HALVES[dtype])
    own = z.data.astype(float)
    derivative = own * (1 - own) if name == "sigmoid" else 1 - own * own
    rounded = float(np.asarray(0.7, x.dtype))
    np.testing.assert_allclose(y.grad.astype(float), derivative * rounded, rtol=HALVES[dtype] * 1.01, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((200000, 3, 1, 1), (0, 2, 3)),
        ((2, 200000, 2, 1), (1, 3)),
        ((200000, 2, 2), (0, 2)),
        ((1, 200000, 3), 1),
        ((4, 1, 300, 2, 300, 3), (-2, 2)),
        ((300, 1, 7), [0]),
    ],
)
@pytest.mark.thorough
def test_sums_over_many_are_exact_whatever_the_axes(dtype, shape, axes):
    x = np.full(shape, 0.1, dtype_of(dtype))
    axes = tuple(axes) if isinstance(axes, list) else axes
    error = HALVES.get(dtype, 1e-5)
    for keepdims in (False, True):
        exact = x.astype(np.float64).sum(axis=axes, keepdims=keepdims)
        found = Tensor(x).sum(axis=axes, keepdims=keepdims).data
        assert found.dtype == x.dtype
        np.testing.assert_allclose(found.astype(np.float64), exact, rtol=error)
    along = axes if isinstance(axes, tuple) else (axes,)
    narrow = tuple(1 if at in {each % x.ndim for each in along} else n for at, n in enumerate(shape))
    (of_narrow,) = gradients(lambda y: Tensor(x) * y, np.ones(narrow, x.dtype))
    np.testing.assert_allclose(of_narrow.astype(np.float64), exact, rtol=2 * error)


@pytest.mark.parametrize("axis", ["a", 1.0, (0, None)])
def test_an_axis_that_is_no_number_is_told(axis):
    with raises(UnsupportedError, operation="sum"):
        Tensor(np.ones((2, 3))).sum(axis=axis)


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_of_16_bits_that_are_larger_than_they_hold(dtype):
    x = np.full((64, 64), 20, dtype_of(dtype))
    found = Tensor(x).mean()
    assert float(found) == 20 and found.dtype == x.dtype
    (dx,) = gradients(lambda x: x.max(axis=0), np.zeros((5000, 2), x.dtype))
    np.testing.assert_allclose(dx.astype(float).sum(axis=0), 1, rtol=HALVES[dtype] * 2)
    stacked, vector = np.ones((3000, 4, 10), x.dtype), np.ones(10, x.dtype)
    np.testing.assert_allclose(gradients(lambda x, w: x @ w, stacked, vector)[1].astype(float), 12000, rtol=1e-2)
    turned = np.ones((3000, 10, 4), x.dtype)
    np.testing.assert_allclose(gradients(lambda w, x: w @ x, vector, turned)[0].astype(float), 12000, rtol=1e-2)


@pytest.mark.parametrize("rows", [1, 256, 257, 10_000, 200_001])
def test_sums_of_many_rows(rows):
    x = np.full((rows, 3), 0.1, np.float32)
    exact = x.astype(np.float64).sum(axis=0)
    for axis in (0, (0,)):
        np.testing.assert_allclose(Tensor(x).sum(axis=axis).data, exact, rtol=5e-6)
        assert Tensor(x).sum(axis=axis, keepdims=True).shape == (1, 3)
    np.testing.assert_allclose(Tensor(x).mean(axis=0).data, exact / rows, rtol=5e-6)
    layer = nn.Dense(1, 3)
    with record():
        y = layer(np.ones((rows, 1), np.float32))
    y.backward(x)
    np.testing.assert_allclose(layer.bias.grad, exact, rtol=5e-6)
    assert Tensor(np.ones((rows, 2), np.int8)).sum(axis=0).dtype == np.int64


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_an_infinite_gradient_stays_with_the_operand_that_was_chosen(dtype):
    x, y = (np.array(each, dtype_of(dtype)) for each in ([1, 2, 3, np.nan], [2, 2, 1, 5]))
    head = np.full(4, np.inf, x.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if dtype == "bfloat16" else "error")  # which warns where a NaN is compared
        dx, dy = gradients(maximum, x, y, head=head)
        np.testing.assert_array_equal(dx.astype(float), [0, np.inf, np.inf, np.inf])
        np.testing.assert_array_equal(dy.astype(float), [np.inf, np.inf, 0, np.inf])
        dx, dy = gradients(minimum, x, y, head=np.ones(4, x.dtype))
        np.testing.assert_array_equal(dx.astype(float), [1, 0.5, 0, 1])
        np.testing.assert_array_equal(dy.astype(float), [0, 0.5, 1, 1])
        (dx,) = gradients(lambda x: x.max(), np.array([1, 3, 2], x.dtype), head=np.asarray(np.inf, x.dtype))
        np.testing.assert_array_equal(dx.astype(float), [0, np.inf, 0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((500, 400, 3), (0, 1)), ((500, 400, 3), (-2, 0)), ((3, 60_000, 2), 1), ((2, 300, 300, 4), (1, 2))],
)
def test_sums_over_other_axes_than_the_last(shape, axis, dtype):
    x = np.full(shape, 1e-3, dtype_of(dtype))
    exact = x.astype(np.float64).sum(axis=axis)
    error = HALVES.get(dtype, 1e-5)
    for keepdims in (False, True):
        found = Tensor(x).sum(axis=axis, keepdims=keepdims)
        assert found.shape == x.astype(np.float32).sum(axis=axis, keepdims=keepdims).shape and found.dtype == x.dtype
        np.testing.assert_allclose(found.data.astype(float).reshape(exact.shape), exact, rtol=error)
    (db,) = gradients(lambda b: Tensor(x) + b, np.zeros(shape[-1:], x.dtype), head=x)
    whole = x.astype(np.float64).sum(axis=tuple(range(x.ndim - 1)))
    np.testing.assert_allclose(db.astype(float), whole, rtol=error)


def test_no_gradient_goes_through_integers():
    def by_integers(x):
        return (x * x.astype("int64") + x.astype("int32").astype("float32") * 2.5 + x.astype("bool") * 3.0).sum()

    x = np.array([1.5, 2.5], np.float32)
    np.testing.assert_array_equal(gradients(by_integers, x)[0], [1, 2])

    class Net(nn.Module):
        def forward(self, x):
            return by_integers(x)

    net = Net()
    net.hybridize()
    for _ in range(2):
        np.testing.assert_array_equal(gradients(net, x)[0], [1, 2])
    with raises(UnsupportedError, operation="attach_grad", where="dtype", expected="floats", got="int64"):
        Tensor(np.arange(3)).attach_grad()
    with record(), raises(HpcdpError, operation="backward", got=(2,)):
        Tensor(x).astype("int32").backward()


def test_axes_that_are_not_there():
    a = Tensor(np.zeros((2, 3)))
    for call in (
        lambda: stack([a, a], axis=3), lambda: stack([a, a], axis=-4), lambda: a.transpose(5, 2),
        lambda: a.transpose(0, 0), lambda: a.transpose(0, 1, 3), lambda: a.transpose("a"), lambda: a.transpose(0.5, 1),
    ):  # fmt: skip
        with raises(UnsupportedError, where="axes"):
            call()
    with raises(UnsupportedError, operation="concatenate", expected=0):
        stack([])
    assert stack([a, a], axis=-3).shape == (2, 2, 3) and a.transpose(-1, 0).shape == (3, 2)
