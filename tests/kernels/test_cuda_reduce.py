"""Reductions in plain operations, by Numba and by CUDA (`cupy_module`): the same bits."""

from types import ModuleType

import numpy as np
import pytest
from raises import raises

from hpcdp import kernels
from hpcdp.core.arrays import dtype_of, is_float, words
from hpcdp.errors import UnsupportedError
from hpcdp.kernels import reference
from hpcdp.kernels.cuda import kernels as cuda_kernels
from hpcdp.kernels.reference import EVERY_ROW, MAX, MEAN, MIN, PROD, SUM

OPS = [SUM, PROD, MIN, MAX, MEAN]
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")


def given(dtype: str, n: int, m: int) -> np.ndarray:
    rng = np.random.default_rng(n * 1000 + m)
    rows = rng.integers(-90, 90, (n, m)).astype(dtype_of(dtype))
    if is_float(rows.dtype):
        rows = (rows * rng.standard_normal((n, m))).astype(rows.dtype)
        rows[0, :1], rows[n - 1, -1:] = np.nan, np.inf
    return words(rows)


def bits(x: np.ndarray) -> np.ndarray:
    if x.itemsize == 2:  # a NaN need only stay one
        floats = x.view(np.float16 if x.dtype == np.uint16 else dtype_of("bfloat16"))
        x = np.where(np.isnan(floats), 0x7E00, x.view(np.uint16))
    elif x.dtype.kind == "f":
        x = np.where(np.isnan(x), x.dtype.type(np.nan), x)
    return np.ascontiguousarray(x).view(np.uint8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_combine(dtype: str, n: int, cupy: ModuleType) -> None:
    for op in OPS:
        for m, lo, hi in ((1, 0, 0), (1, 0, 1), (31, 0, 31), (33, 1, 32), (520, 8, 514)):
            rows = given(dtype, n, m)
            expected = np.empty(hi - lo, rows.dtype)
            reference.combine(rows, lo, hi, expected, op)
            on_host = np.empty_like(expected)
            if dtype in ("bfloat16", "float32", "float64", "int64"):  # compiled already
                kernels.load("gradients").combine(rows, lo, hi, on_host, op)
                np.testing.assert_array_equal(bits(on_host), bits(expected))
            for start in (0, 1):  # 1: only the result begins within a pack
                out = cupy.asarray(np.zeros(hi - lo + 2, rows.dtype))[start : start + hi - lo]
                cuda_kernels.combine(cupy.asarray(rows), lo, hi, out, op)
                np.testing.assert_array_equal(bits(out.to_host()), bits(expected))


@pytest.mark.parametrize("row", [0, 2, EVERY_ROW])
def test_combine_in_place_of_rows_in_memory_of_their_own(row: int, cupy: ModuleType) -> None:
    rows = given("float32", 3, 130)
    apart = [cupy.asarray(each) for each in rows]
    cuda_kernels.combine_into(apart, 1, 129, row, SUM)
    reference.combine_into(rows, 1, 129, row, SUM)
    for ours, theirs in zip(apart, rows, strict=True):
        np.testing.assert_array_equal(ours.to_host(), theirs)


def test_a_launch_has_at_most_32_rows(cupy: ModuleType) -> None:
    rows = np.random.default_rng(0).standard_normal((33, 8))
    out, expected = cupy.empty(8, np.float64), np.empty(8)
    cuda_kernels.combine(cupy.asarray(rows[:32]), 0, 8, out, SUM)
    reference.combine(rows[:32], 0, 8, expected, SUM)
    np.testing.assert_array_equal(out.to_host(), expected)
    with raises(UnsupportedError, operation="combine", expected=32, got=33):
        cuda_kernels.combine(cupy.asarray(rows), 0, 8, out, SUM)
