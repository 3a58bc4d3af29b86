"""Bias, activation and chains of operations in one pass over memory, against their reference."""

import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.kernels import reference
from hpcdp.kernels.reference import OPERATIONS

NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}
ONE_OPERAND = ("negative", "abs", "sqrt", "sign", "gelu", "copy")
TOLERANCE = {np.float32: 3e-6, np.float64: 1e-14}


def address(array):
    return array.__array_interface__["data"][0]


def values(size, dtype, seed):
    found = np.random.default_rng(seed).standard_normal(size).astype(dtype)
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan], dtype)
    places = np.random.default_rng(seed + 100).integers(0, size, size // 3)
    found[places] = special[places % len(special)]
    return found


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("place", ["apart", "in place"])
def test_each_operation_is_its_specification(name, dtype, size, place):
    chain = kernels.load("networks")
    a, b = values(size, dtype, 1), values(size, dtype, 2)
    operands = (a,) if name in ONE_OPERAND else (a, b)
    with np.errstate(all="ignore"):
        expected = OPERATIONS[name](*operands)
    out = a if place == "in place" else np.full(size, 7, dtype)
    item = out.itemsize
    code = [(size, size, 3, 0), *((address(each), item, 0, 0) for each in (a, b, out))]
    chain.run_chain(np.array([*code, (NUMBERS[name], 0, len(operands) - 1, 2)], np.int64), dtype(0))
    if "gelu" in name:
        np.testing.assert_allclose(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        return
    np.testing.assert_array_equal(out, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(out)[numbers], np.signbit(expected)[numbers])


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (7, 3), (40, 300), (3, 1024), (5, 2500)])
def test_rows_begin_again_after_each_period(rows, columns):
    chain = kernels.load("networks")
    x, row = values(rows * columns, np.float32, 1), values(columns, np.float32, 2)
    out, two = np.empty_like(x), np.full(1, 2, np.float32)
    filled, twos = (
        np.empty(max(columns, 1024 // columns * columns), np.float32),
        np.empty(chain.CHAIN_BLOCK, np.float32),
    )
    fillings = [(address(row), columns, address(filled), filled.size), (address(two), 1, address(twos), twos.size)]
    operands = [(address(x), 4, 0, 0), (address(filled), 0, 4, 0), (address(twos), 0, 0, 0), (address(out), 4, 0, 0)]
    operations = [(NUMBERS["multiply"], 1, 2, 3), (NUMBERS["add"], 0, 3, 3)]
    code = [(x.size, filled.size, len(operands), 2), *operands, *fillings, *operations]
    chain.run_chain(np.array(code, np.int64), np.float32(0))
    with np.errstate(all="ignore"):
        expected = (x.reshape(rows, columns) + row * np.float32(2)).reshape(-1)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (0, 3), (4, 0)])
def test_add_bias(shape, dtype, relu):
    rng = np.random.default_rng(1)
    y, bias = rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape[1]).astype(dtype)
    if y.size > 10:
        y[1, 2] = np.nan
    expected = np.maximum(y + bias, 0) if relu else y + bias
    for module in (reference, kernels.load("networks")):
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
    for module in (reference, kernels.load("networks")):
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
    for module in (reference, kernels.load("networks")):
        dx, dbias = np.full_like(gy, np.nan), np.full(shape[1], np.nan, np.float32)
        module.bias_gradient(gy, y if relu else None, dx if relu else None, dbias)
        np.testing.assert_allclose(dbias, expected.sum(axis=0, dtype="f8"), rtol=1e-5, atol=1e-5)
        if relu:
            np.testing.assert_array_equal(dx, expected)
