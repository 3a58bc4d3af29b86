"""CUDA norms against their specification, on this processor (`cupy_module`)."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hpcdp import optim
from hpcdp.core.arrays import dtype_of, words
from hpcdp.kernels import reference
from hpcdp.kernels.cuda import kernels

DTYPES = [dtype_of(name) for name in ("float16", "bfloat16", "float32", "float64")]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_squares(dtype: np.dtype, cupy: ModuleType) -> None:
    for size in (0, 1, 2, 3, 31, 32, 33, 5003):
        x = words(np.random.default_rng(size).standard_normal(size + 1).astype(dtype))
        on_device = cupy.asarray(x)
        total = kernels.sum_of_squares(on_device[1:])
        assert total == pytest.approx(reference.sum_of_squares(x[1:]), rel=1e-14)
        assert total == kernels.sum_of_squares(cupy.asarray(x[1:])), "the same bits wherever it begins"
        if size:
            on_device[size : size + 1] = words(np.array([np.inf], dtype))[0]
            assert kernels.sum_of_squares(on_device[1:]) == np.inf


def test_squares_of_float32_do_not_overflow(cupy: ModuleType) -> None:
    x = np.array([3e38, 1e-38, -3e38], np.float32)
    assert kernels.sum_of_squares(cupy.asarray(x)) == pytest.approx(2 * float(x[0]) ** 2, rel=1e-14)


@pytest.mark.parametrize("squares", [[4.0], [1.0, 2.0, 0.3], [0.0], [1e-300], [1.0, np.inf], [np.nan], [2.0, -np.nan]])
@pytest.mark.parametrize("scale", [1.0, 1 / 3, 1e-9])
def test_clipped_scale(squares: list[float], scale: float, cupy: ModuleType) -> None:
    for most in (1e-3, 0.7, 2.0, 1e200):
        expected = reference.clipped_scale(squares, scale, most)
        assert expected <= scale
        for given in (scale, cupy.asarray(np.array([scale]))):
            found = kernels.clipped_scale(cupy.asarray(np.array(squares)), given, most)
            assert found.to_host().tolist() == [expected]


@pytest.mark.parametrize("dtype", DTYPES)
def test_segment_squares(dtype: np.dtype, cupy: ModuleType) -> None:
    bounds = np.array([0, 33, 33, 2003], np.int64)  # also a layer of no elements
    params, grads = (words(x) for x in np.random.default_rng(3).standard_normal((2, 2003)).astype(dtype))
    expected, out = np.zeros((2, 3, 2))
    reference.segment_squares(params, grads, bounds, expected)
    on_device = cupy.asarray(out)
    kernels.segment_squares(*(cupy.asarray(x) for x in (params, grads, bounds)), on_device)
    np.testing.assert_allclose(on_device.to_host(), expected, rtol=1e-14)


def test_many_sums_wait_for_the_gpu_once(on_host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    for name in ("__float__", "__int__", "item", "tolist", "to_host"):
        method = getattr(on_host.Array, name)

        def counted(x: Any, name: str = name, method: Any = method) -> Any:
            waits.append(name)
            return method(x)

        monkeypatch.setattr(on_host.Array, name, counted)
    xs = [np.random.default_rng(size).standard_normal(size).astype(np.float32) for size in (0, 1, 33, 5003)]
    found = optim.squares([on_host.asarray(x) for x in xs])
    assert waits == ["to_host"]
    assert found == pytest.approx([reference.sum_of_squares(x) for x in xs], rel=1e-14)
    assert optim.squares([]) == []


def test_lars_takes_its_norms_from_them(cupy: ModuleType) -> None:
    param, grad = np.random.default_rng(4).standard_normal((2, 65), np.float32)
    rule = optim.LARS(lr=0.1)
    plain, state, on_device = param.copy(), rule.init_state(param), cupy.asarray(param)
    rule.update(plain, grad, state, step=1)
    rule.update(on_device, cupy.asarray(grad), rule.init_state(on_device), step=1)
    np.testing.assert_allclose(on_device.to_host(), plain, rtol=1e-6)
