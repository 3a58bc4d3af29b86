"""Gradients by central differences, to check backward against; in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdp import autograd
from hpcdp.autograd import Tensor


def numeric_gradient(f: Callable[[], float], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """The gradient of ``f()`` with respect to ``x``, which ``f`` reads and this changes and restores."""
    gradient = np.empty_like(x)
    for at in np.ndindex(*x.shape):
        kept = x[at]
        x[at] = kept + step
        above = f()
        x[at] = kept - step
        below = f()
        x[at] = kept
        gradient[at] = (above - below) / (2 * step)
    return gradient


def assert_gradients(operation: Callable[..., Tensor], *arrays: Any, atol: float = 1e-7, rtol: float = 1e-5) -> None:
    """That backward through ``operation(*tensors)`` gives the gradient of a weighted sum of its results."""
    leaves = [Tensor(np.array(x, np.float64)) for x in arrays]
    for leaf in leaves:
        leaf.attach_grad()
    weights = np.random.default_rng(3).uniform(0.5, 1.5, operation(*leaves).shape)

    def total() -> float:
        return float((operation(*leaves).data * weights).sum())

    with autograd.record():
        result = operation(*leaves)
    result.backward(weights)
    for number, leaf in enumerate(leaves):
        expected = numeric_gradient(total, leaf.data)
        np.testing.assert_allclose(leaf.grad, expected, rtol=rtol, atol=atol, err_msg=f"operand {number}")
