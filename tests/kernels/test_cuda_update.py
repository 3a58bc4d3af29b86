"""CUDA updates against their specification, to the bit, on this processor (`cupy_module`)."""

from types import ModuleType

import numpy as np
import pytest
from raises import raises

from hpcdp.errors import UnsupportedError
from hpcdp.kernels import reference
from hpcdp.kernels.cuda import kernels

RULES = {
    "sgd": (0, (0.1, 0.01, 0.3)),
    "sgd_momentum": (1, (0.1, 0.01, 0.3, 0.9)),
    "sgd_nesterov": (1, (0.1, 0.01, 0.3, 0.9)),
    "adam": (2, (0.02, 0.01, 0.3, 0.999, 0.1, 0.999, 0.001, 22.4, 1e-8)),
}


def given(rule: str, dtype: type, size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(size)
    arrays = [rng.standard_normal(size).astype(dtype) for _ in range(2 + RULES[rule][0])]
    for x, special in zip(arrays, (np.nan, np.inf, -0.0, 1e-310), strict=False):
        x[-1:] = special
    if rule == "adam":
        arrays[3] = np.abs(arrays[3])
    return arrays


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shifted", [None, 0, 1, 2, 3])
def test_same_bits_as_the_reference(rule: str, dtype: type, shifted: int | None, cupy: ModuleType) -> None:
    """Also where one array, ``shifted``, begins within a pack, and the others do not."""
    for size in (0, 1, 2, 3, 31, 32, 33, 2053):
        plain = given(rule, dtype, size)
        starts = [4 + (k == shifted) for k in range(len(plain))]
        arrays = [cupy.asarray(np.full(size + 8, 7, dtype)) for _ in plain]
        views = [x[start : start + size] for x, start in zip(arrays, starts, strict=True)]
        for view, x in zip(views, plain, strict=True):
            view[...] = cupy.asarray(x)
        for _ in range(2):
            getattr(kernels, rule)(*views, RULES[rule][1])
            getattr(reference, rule)(*plain, RULES[rule][1])
        for k, (whole, expected) in enumerate(zip(arrays, plain, strict=True)):
            surrounded = np.full(size + 8, 7, dtype)
            surrounded[starts[k] : starts[k] + size] = expected
            np.testing.assert_array_equal(whole.to_host(), surrounded, err_msg=f"array {k} of {size}")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", RULES)
def test_coefficients_may_lie_on_the_gpu(rule: str, dtype: type, cupy: ModuleType) -> None:
    plain = given(rule, dtype, 67)[: 2 + RULES[rule][0]]
    arrays = [cupy.asarray(np.nan_to_num(x)) for x in plain]
    others = [cupy.asarray(np.nan_to_num(x)) for x in plain]
    getattr(kernels, rule)(*arrays, RULES[rule][1])
    getattr(kernels, rule)(*others, cupy.asarray(np.array(RULES[rule][1])))
    for one, other in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(one.to_host(), other.to_host())
    for wrong in (np.ones(2), np.array(RULES[rule][1], np.float32)):
        with raises(UnsupportedError, operation=rule, expected="float64"):
            getattr(kernels, rule)(*arrays, cupy.asarray(wrong))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", RULES)
def test_the_scale_may_lie_there_by_itself(rule: str, dtype: type, cupy: ModuleType) -> None:
    plain = [np.nan_to_num(x) for x in given(rule, dtype, 67)]
    lr, decay, scale, *others = RULES[rule][1]
    getattr(reference, rule)(*plain, RULES[rule][1])
    for coefficients in ((lr, decay, 7.0, *others), cupy.asarray(np.array((lr, decay, 7.0, *others)))):
        arrays = [cupy.asarray(np.nan_to_num(x)) for x in given(rule, dtype, 67)]
        getattr(kernels, rule)(*arrays, coefficients, cupy.asarray(np.array([scale])))
        for ours, theirs in zip(arrays, plain, strict=True):
            np.testing.assert_array_equal(ours.to_host(), theirs)
    for wrong in (np.ones(2), np.ones(1, np.float32)):
        with raises(UnsupportedError, operation=rule, expected="float64"):
            getattr(kernels, rule)(*arrays, RULES[rule][1], cupy.asarray(wrong))


def test_more_elements_than_threads(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stride over what a launch of few blocks leaves."""
    monkeypatch.setattr("hpcdp.kernels.cuda.MAX_BLOCKS", 2)
    plain = given("sgd_momentum", np.float32, 5003)
    arrays = [cupy.asarray(x) for x in plain]
    kernels.sgd_momentum(*arrays, RULES["sgd_momentum"][1])
    reference.sgd_momentum(*plain, RULES["sgd_momentum"][1])
    for ours, theirs in zip(arrays, plain, strict=True):
        np.testing.assert_array_equal(ours.to_host(), theirs)
