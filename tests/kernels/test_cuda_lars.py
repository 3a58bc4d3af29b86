"""CUDA's SGD of layers at the rate of their norms against its specification, on this processor (`cupy_module`)."""

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hpcdp import optim
from hpcdp.kernels import reference
from hpcdp.kernels.cuda import kernels

NUMBERS = {"sgd": (0.1, 0.01, 0.3, 0.02), "sgd_momentum": (0.1, 0.01, 0.3, 0.9, 0.02)}
NUMBERS["sgd_nesterov"] = NUMBERS["sgd_momentum"]


def given(rule: str, dtype: type, size: int) -> list[np.ndarray]:
    arrays = [np.random.default_rng(each).standard_normal(size).astype(dtype) for each in range(len(NUMBERS[rule]) - 2)]
    for x, special in zip(arrays, (np.nan, np.inf, -0.0), strict=False):
        x[-1:] = special
    return arrays


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", NUMBERS)
def test_same_bits_as_the_reference(rule: str, dtype: type, cupy: ModuleType) -> None:
    """Also where arrays begin within a pack, and for lengths that are zero or no numbers."""
    cases = ((0, (1, 2)), (1, (0, 3)), (33, (3, 0)), (33, (np.inf, 3)), (2053, (7.1, np.nan)), (31, (7, 3)))
    for size, squares in cases:
        for offset in (0, 1):
            plain, of_norms = given(rule, dtype, size), np.array(squares, np.float64)
            arrays = [cupy.asarray(np.append(np.zeros(offset, dtype), x))[offset:] for x in plain]
            for _ in range(2):
                getattr(kernels, f"lars_{rule}")(*arrays, cupy.asarray(of_norms), NUMBERS[rule])
                getattr(reference, f"lars_{rule}")(*plain, of_norms, NUMBERS[rule])
            for ours, theirs in zip(arrays, plain, strict=True):
                np.testing.assert_array_equal(ours.to_host(), theirs)


@pytest.mark.parametrize("momentum", [{"momentum": 0.0}, {}, {"nesterov": True}])
def test_a_rule_gives_the_bits_of_the_host_for_the_same_norms(momentum: dict[str, Any], cupy: ModuleType) -> None:
    rule = optim.LARS(lr=0.3, weight_decay=0.01, trust=0.02, **momentum)
    param, grad = np.random.default_rng(2).standard_normal((2, 101), np.float32)
    on_device = cupy.asarray(param)
    state, there = rule.init_state(param), rule.init_state(on_device)
    for step in (1, 2):
        squares = 3.7, 0.9 * step
        of_host, scale = rule.of_layer(step, 0.25, squares)
        of_host.update(param, grad, state, step=step, scale=scale)
        of_device, scale = rule.of_layer(step, 0.25, cupy.asarray(np.array(squares)))
        assert of_device is not rule and scale == 0.25
        of_device.update(on_device, cupy.asarray(grad), there, step=step, scale=scale)
    np.testing.assert_array_equal(on_device.to_host(), param)
    assert rule == dataclasses.replace(rule)


def test_the_host_waits_for_no_norm(on_host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__float__", "__int__", "item", "tolist", "to_host"):
        monkeypatch.setattr(on_host.Array, name, lambda x: pytest.fail("waits"))
    param, grad = (on_host.asarray(x) for x in np.random.default_rng(4).standard_normal((2, 65), np.float32))
    rule = optim.LARS(lr=0.1)
    rule.update(param, grad, rule.init_state(param), step=1)
