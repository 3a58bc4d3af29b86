"""Every operation's gradient against central differences, and its value against NumPy."""

import numpy as np
import pytest
from finite_differences import assert_gradients
from raises import raises

from hpcdp import autograd, nn
from hpcdp.autograd import Tensor, concatenate, maximum, minimum, operators, stack, where
from hpcdp.core.arrays import dtype_of
from hpcdp.errors import UnsupportedError

RNG = np.random.default_rng(0)
A = RNG.uniform(0.5, 2.0, (3, 4))
B = RNG.uniform(0.5, 2.0, (3, 4))
ROW = RNG.uniform(0.5, 2.0, 4)
COLUMN = RNG.uniform(0.5, 2.0, (3, 1))
CUBE = RNG.uniform(-1.0, 1.0, (2, 3, 4))
PICK = np.array([[0, 2], [2, 2]])

BINARY = {
    "add": (lambda a, b: a + b, np.add),
    "subtract": (lambda a, b: a - b, np.subtract),
    "multiply": (lambda a, b: a * b, np.multiply),
    "divide": (lambda a, b: a / b, np.divide),
    "power": (lambda a, b: a**b, np.power),
    "maximum": (maximum, np.maximum),
    "minimum": (minimum, np.minimum),
    "where": (lambda a, b: where(PATTERN[: a.shape[0]], a, b), lambda a, b: np.where(PATTERN[: a.shape[0]], a, b)),
}
PATTERN = np.array([[True, False, True, True], [False] * 4, [True] * 4])


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize(
    "operands", [(A, B), (A, ROW), (COLUMN, ROW), (A, COLUMN)], ids=["same", "row", "outer", "col"]
)
def test_elementwise_operations_of_two(name, operands):
    ours, numpys = BINARY[name]
    np.testing.assert_allclose(ours(*map(Tensor, operands)).data, numpys(*operands))
    assert_gradients(ours, *operands)
    assert_gradients(lambda b, a: ours(a, b), *operands[::-1])


UNARY = {
    "negative": (lambda x: -x, np.negative, CUBE),
    "abs": (abs, np.abs, CUBE),
    "exp": (Tensor.exp, np.exp, CUBE),
    "log": (Tensor.log, np.log, A),
    "sqrt": (Tensor.sqrt, np.sqrt, A),
    "tanh": (Tensor.tanh, np.tanh, CUBE),
    "sigmoid": (Tensor.sigmoid, lambda x: 1 / (1 + np.exp(-x)), CUBE),
    "number ** x": (lambda x: 2.0**x, lambda x: 2.0**x, A),
    "x ** 3": (lambda x: x**3, lambda x: x**3, CUBE),
    "1 / x": (lambda x: 1 / x, lambda x: 1 / x, A),
    "2 - x": (lambda x: 2 - x, lambda x: 2 - x, A),
    "array - x": (lambda x: B - x, lambda x: B - x, A),
    "sum": (Tensor.sum, np.sum, CUBE),
    "sum axis": (lambda x: x.sum(axis=1), lambda x: x.sum(axis=1), CUBE),
    "sum axes": (lambda x: x.sum(axis=(0, -1)), lambda x: x.sum(axis=(0, -1)), CUBE),
    "sum keepdims": (lambda x: x.sum(axis=-1, keepdims=True), lambda x: x.sum(axis=-1, keepdims=True), CUBE),
    "mean": (Tensor.mean, np.mean, CUBE),
    "mean axis": (lambda x: x.mean(axis=(0, 2)), lambda x: x.mean(axis=(0, 2)), CUBE),
    "max": (Tensor.max, np.max, CUBE),
    "sum axis of NumPy's": (lambda x: x.sum(axis=np.int64(1)), lambda x: x.sum(axis=1), CUBE),
    "max axis": (lambda x: x.max(axis=1), lambda x: x.max(axis=1), CUBE),
    "min axis": (lambda x: x.min(axis=2, keepdims=True), lambda x: x.min(axis=2, keepdims=True), CUBE),
    "reshape": (lambda x: x.reshape(4, -1), lambda x: x.reshape(4, -1), CUBE),
    "reshape tuple": (lambda x: x.reshape((6, 4)), lambda x: x.reshape(6, 4), CUBE),
    "transpose": (Tensor.transpose, np.transpose, CUBE),
    "transpose axes": (lambda x: x.transpose(1, -1, 0), lambda x: x.transpose(1, 2, 0), CUBE),
    "T": (lambda x: x.T, lambda x: x.T, A),
    "x[1]": (lambda x: x[1], lambda x: x[1], CUBE),
    "slices": (lambda x: x[..., 1:4:2], lambda x: x[..., 1:4:2], CUBE),
    "new axis": (lambda x: x[:, None, -1], lambda x: x[:, None, -1], CUBE),
    "rows twice": (lambda x: x[PICK], lambda x: x[PICK], A),
    "pairs": (lambda x: x[np.arange(3), [0, 3, 3]], lambda x: x[np.arange(3), [0, 3, 3]], A),
    "mask": (lambda x: x[PATTERN], lambda x: x[PATTERN], A),
    "tensor index": (lambda x: x[Tensor(np.array([2, 2, 0]))], lambda x: x[[2, 2, 0]], A),
    "itself twice": (lambda x: x * x + x, lambda x: x * x + x, A),
}


@pytest.mark.parametrize("name", UNARY)
def test_operations_of_one(name):
    ours, numpys, x = UNARY[name]
    np.testing.assert_allclose(ours(Tensor(x)).data, numpys(x))
    assert_gradients(ours, x)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 4), (4, 2)),
        ((4,), (4, 2)),
        ((3, 4), (4,)),
        ((4,), (4,)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((2, 3, 4), (4,)),
        ((4,), (2, 4, 3)),
    ],
)
def test_matrix_products(left, right):
    a, b = RNG.standard_normal(left), RNG.standard_normal(right)
    np.testing.assert_allclose((Tensor(a) @ Tensor(b)).data, a @ b)
    assert_gradients(lambda x, y: x @ y, a, b)


@pytest.mark.parametrize(
    ("shapes", "axis", "fields"),
    [
        ([(2, 3), (2, 4)], 0, {"expected": 0, "got": [(2, 3), (2, 4)]}),
        ([(2,), (2, 1)], 0, {"expected": 0, "got": [(2,), (2, 1)]}),
        ([(2, 3)], 2, {"expected": 2}),
        ([], 0, {"expected": 0}),
    ],
)
def test_what_cannot_be_joined(shapes, axis, fields):
    with raises(UnsupportedError, operation="concatenate", **fields):
        concatenate([Tensor(np.zeros(shape)) for shape in shapes], axis)


MISFITS = {
    "add": (lambda x: x + np.ones(4), [(2, 3), (4,)]),
    "multiply": (lambda x: np.ones((3, 3)) * x, [(3, 3), (2, 3)]),
    "maximum": (lambda x: operators.maximum(x, np.ones(2)), [(2, 3), (2,)]),
    "matmul": (lambda x: x @ np.ones((2, 4)), [(2, 3), (2, 4)]),
    "reshape": (lambda x: x.reshape(4, 2), "(4,2)"),
    "sum": (lambda x: x.sum(axis=2), "axis 2"),
}


class Applied(nn.Module):
    def __init__(self, function):
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("name", MISFITS)
def test_operands_that_do_not_fit_are_told_with_the_operator(name):
    call, got = MISFITS[name]
    x = Tensor(np.ones((2, 3)))
    with raises(UnsupportedError, operation=name, got=got):
        call(x)
    with raises(UnsupportedError, operation=name, got=got), autograd.asynchronous():
        call(x).asnumpy()


@pytest.mark.parametrize("name", ["reshape", "sum"])
def test_they_are_told_in_a_hybridized_network_too(name):
    call, got = MISFITS[name]
    net = Applied(call)
    net.hybridize()
    with raises(UnsupportedError, operation=name, expected=(2, 3), got=got):
        net(np.ones((2, 3)))


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("axes", [[1], [0, 1], [0, -1], []])
def test_axes_may_be_in_a_list(name, axes):
    x = RNG.standard_normal((2, 3, 4))
    found, expected = (getattr(Tensor(x), name)(axis) for axis in (axes, tuple(axes)))
    np.testing.assert_array_equal(found.data, expected.data)
    assert_gradients(lambda x: getattr(x, name)(axes, keepdims=True), x)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concatenate_and_stack(axis):
    more = RNG.standard_normal((3, 4))
    np.testing.assert_array_equal(concatenate([Tensor(A), B], axis).data, np.concatenate([A, B], axis))
    np.testing.assert_array_equal(stack([Tensor(A), B], axis).data, np.stack([A, B], axis))
    assert_gradients(lambda x, y: concatenate([x, B, y], axis), A, more)
    assert_gradients(lambda x, y: stack([x, y, x], axis), A, more)


def test_operands_of_bfloat16_need_not_be_tensors(tmp_path):
    two = np.memmap(tmp_path / "values", np.uint16, "w+", shape=(1, 3)).view(dtype_of("bfloat16"))
    two[...] = 2
    tensor, one = Tensor(np.array(two)), two.dtype.type(1)
    for found, expected in (
        (one + tensor, 3), (tensor + one, 3), (operators.add(one, tensor), 3), (operators.exp(one), np.exp(1)),
        (nn.functional.relu(two), 2), (nn.functional.dense(two, np.array(two).T), 12),
    ):  # fmt: skip
        assert found.dtype == two.dtype
        np.testing.assert_allclose(found.data.astype("f4"), expected, rtol=0.01)


def test_equal_elements_share_the_gradient():
    x, y = Tensor([1.0, 2.0, 2.0]), Tensor([1.0, 1.0, 5.0])
    for tensor in (x, y):
        tensor.attach_grad()
    with autograd.record():
        z = maximum(x, y).sum() + x.max()
    z.backward()
    np.testing.assert_array_equal(x.grad, [0.5, 1.5, 0.5])
    np.testing.assert_array_equal(y.grad, [0.5, 0.0, 1.0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["max", "min"])
def test_an_extremum_that_is_not_a_number_has_its_gradient(name):
    x = Tensor([[1.0, np.nan, np.nan], [2.0, 2.0, 2.0]])
    x.attach_grad()
    with autograd.record():
        y = getattr(x, name)(axis=1)
    y.backward(np.array([4.0, 6.0], np.float32))
    np.testing.assert_array_equal(x.grad, [[0.0, 2.0, 2.0], [2.0, 2.0, 2.0]])


@pytest.mark.parametrize("base", [np.float16, np.float32])
def test_the_gradient_of_an_exponent_is_as_exact_as_the_exponent(base):
    x, y = np.array([1.37, 3.3], base), Tensor(np.array([2.1, 0.5]))
    y.attach_grad()
    with autograd.record():
        z = x**y
    z.backward()
    wide = x.astype(np.float64)
    np.testing.assert_allclose(y.grad, wide**y.data * np.log(wide), rtol=1e-14)


def test_another_dtype_gets_its_gradient_back_in_its_own():
    x = Tensor(np.array([1.0, 2.0], np.float32))
    x.attach_grad()
    with autograd.record():
        y = operators.astype(x, np.float64) * np.array([3.0, 4.0])
    assert y.dtype == np.float64
    y.backward()
    assert x.grad.dtype == np.float32
    np.testing.assert_array_equal(x.grad, [3.0, 4.0])


@pytest.mark.filterwarnings("error")
def test_powers_at_zero_have_the_gradients_of_their_limits():
    bases, exponents = np.meshgrid([0.0, 1.5], [0.0, 1.0, 2.0])
    weights = np.arange(1.0, 7.0).reshape(bases.shape)
    x, y = Tensor(bases), Tensor(exponents)
    x.attach_grad()
    y.attach_grad()
    with autograd.record():
        z = x**y
    z.backward(weights)
    # d/dx: 0, 1 and 2x for the exponents 0, 1 and 2; d/dy: 0 at the base 0
    np.testing.assert_allclose(x.grad, weights * np.stack([0 * bases[0], 0 * bases[0] + 1, 2 * bases[0]]))
    np.testing.assert_allclose(y.grad[:, 0], 0)
    np.testing.assert_allclose(y.grad[:, 1], weights[:, 1] * 1.5 ** exponents[:, 1] * np.log(1.5))
    for number in (0, 0.0, 1, 2):
        with autograd.record():
            z = x**number
        z.backward()
        np.testing.assert_allclose(x.grad, {0: 0 * bases, 1: 0 * bases + 1, 2: 2 * bases}[number])
    with autograd.record():
        z = 0.0**y
    z.backward()
    np.testing.assert_array_equal(y.grad, np.zeros(y.shape))


def test_a_sum_over_axes_of_length_one_hands_on_a_gradient_that_may_be_written():
    x = autograd.Tensor(np.ones((3, 2, 1, 1), np.float32))
    x.attach_grad()
    seen = []
    with autograd.record():
        y = autograd.on_tape(x.data, (x,), lambda gy, dx: seen.append(gy))
        total = y.sum(axis=(2, 3), keepdims=True)
    total.backward()
    assert seen[0].flags.writeable


@pytest.mark.parametrize("operation", [Tensor.tanh, Tensor.sigmoid, Tensor.exp])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int64"])
def test_functions_of_integers_are_floats(operation, dtype):
    x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    found, expected = operation(Tensor(x)), operation(Tensor(x.astype(np.float64)))
    assert found.dtype == np.exp(x).dtype
    np.testing.assert_allclose(found.data, expected.data, rtol=1e-3)
