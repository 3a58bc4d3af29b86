"""CUDA's additions to rows of a table against their specification, to the bit, on this processor (`cupy_module`)."""

import os
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from raises import raises

from hpcdp import autograd
from hpcdp.autograd import Tensor
from hpcdp.core.arrays import dtype_of
from hpcdp.errors import UnsupportedError
from hpcdp.kernels import cuda, reference
from hpcdp.kernels.cuda import kernels

DTYPES = [np.float16, dtype_of("bfloat16").type, np.float32, np.float64]
ON_GPU = os.environ.get("HPCDP_TEST_GPU", "") not in ("", "0")
RNG = np.random.default_rng(7)


def normal(dtype: Any, *shape: int) -> np.ndarray:
    return (100 * RNG.standard_normal(shape)).astype(dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("number", "features", "count"),
    [(1, 1, 1), (1, 3, 40), (5, 7, 1000), (255, 2, 300), (256, 2, 3000), (70_000, 1, 2500), (3, 0, 5), (4, 3, 0)],
)
def test_rows_are_added_in_their_order(cupy: ModuleType, dtype: type, number: int, features: int, count: int) -> None:
    table, values = normal(dtype, number, features), normal(dtype, count, features)
    rows = RNG.integers(0, number, count) // RNG.integers(1, 9, count)  # some far more often
    on_device = cupy.asarray(table)
    kernels.add_rows(on_device, cupy.asarray(rows), cupy.asarray(values))
    reference.add_rows(table, rows, values)
    np.testing.assert_array_equal(on_device.to_host(), table)


def test_more_places_than_blocks_at_once(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CHUNK", 64)
    monkeypatch.setattr(cuda, "MAX_BLOCKS", 3)
    table, values, rows = normal("f4", 300, 2), normal("f4", 2000, 2), RNG.integers(0, 300, 2000)
    on_device = cupy.asarray(table)
    kernels.add_rows(on_device, cupy.asarray(rows), cupy.asarray(values))
    reference.add_rows(table, rows, values)
    np.testing.assert_array_equal(on_device.to_host(), table)


def test_rows_that_are_not_in_the_table_are_left_out(cupy: ModuleType) -> None:
    table, rows = np.zeros((256, 2), "f4"), np.array([5, 261, -1, 5, 256, -251, 2**40 + 5, 5])
    on_device = cupy.asarray(table)
    kernels.add_rows(on_device, cupy.asarray(rows), cupy.asarray(np.ones((8, 2), "f4")))
    table[5] = 3
    np.testing.assert_array_equal(on_device.to_host(), table)


def test_a_table_without_rows_has_none_to_add_to(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "launch", lambda *_: pytest.fail("a kernel reads an order that nobody has written"))
    table, rows, values = (
        cupy.asarray(x) for x in (np.zeros((0, 2), "f4"), np.array([0, 3, -1]), np.ones((3, 2), "f4"))
    )
    kernels.add_rows(table, rows, values)


def test_what_the_kernels_do_not_take_is_refused(cupy: ModuleType) -> None:
    table, rows, values = (
        cupy.asarray(np.zeros(shape, kind)) for shape, kind in (((3, 2), "f4"), (4, "i8"), ((4, 2), "f4"))
    )
    for wrong in ((table, rows[:3], values), (table, rows, values[:, :1]), (table, rows.astype("i4"), values)):
        with raises(UnsupportedError, operation="add_rows"):
            kernels.add_rows(*wrong)


KEYS = {
    "rows": (np.array([2, -1, 2, 0, 2]),),
    "rows of two axes": (np.array([[2, 1], [2, -2]]),),
    "pairs": (np.array([0, 3, 3]), np.array([1, 1, 1])),
    "behind a slice": (slice(1, None), np.array([0, 0, 2])),
    "apart": (np.array([1, 1]), slice(None), np.array([3, 3])),
    "a new axis": (None, np.array([1, 1]), None),
    "an ellipsis": (Ellipsis, np.array([1, 0, 1])),
    "a mask": (np.arange(4) % 2 == 0,),
    "a mask of two axes": (np.arange(12).reshape(4, 3) % 5 == 0,),
    "a number and rows": (1, np.array([2, 2])),
    "nothing": (np.array([], np.int64),),
}


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_gradients_of_elements_that_are_taken_more_than_once(cupy: ModuleType, monkeypatch: Any, key: Any) -> None:
    x = normal("f4", 4, 3, 5)
    found = []
    for to in (np.asarray, cupy.asarray):
        leaf = Tensor(to(x))
        leaf.attach_grad()
        with autograd.record():
            y = leaf[tuple(to(each) if isinstance(each, np.ndarray) else each for each in key)]
            y = y * to(np.linspace(0.1, 1, y.size, dtype="f4").reshape(y.shape))
        if not ON_GPU:  # CuPy's own cannot be replaced
            monkeypatch.setattr(cupy.add, "at", None)  # whose order of additions is another one in each run
        y.backward()
        found.append(leaf.grad)
    assert type(found[1]).__module__.startswith("cupy")
    np.testing.assert_array_equal(found[1].to_host(), found[0])
