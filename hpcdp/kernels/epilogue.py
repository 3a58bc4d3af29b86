"""Bias and activation after a product, in one pass over memory.

`reference.epilogue` is the specification.
"""

from __future__ import annotations

import numba
import numpy as np

from .machine_code import kernel
from .sums import add_up_rows

_FLOATS = (numba.float32, numba.float64)


@kernel([numba.void(f[:, ::1], f[::1], numba.boolean) for f in _FLOATS])
def add_bias(y, bias, relu):  # type: ignore[no-untyped-def]
    """See `reference.epilogue.add_bias`."""
    zero = y.dtype.type(0)
    for row in range(y.shape[0]):
        if relu:
            for i in range(y.shape[1]):
                value = y[row, i] + bias[i]
                y[row, i] = value if value > zero or np.isnan(value) else zero
        else:
            for i in range(y.shape[1]):
                y[row, i] += bias[i]


@kernel([numba.void(f[::1], f[::1], f[::1]) for f in _FLOATS])
def _relu_gradient(gy, y, dx):  # type: ignore[no-untyped-def]
    zero = gy.dtype.type(0)
    for i in range(gy.size):
        dx[i] = gy[i] if y[i] > zero else zero


def relu_gradient(gy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """See `reference.epilogue.relu_gradient`; the arrays must be C-contiguous."""
    _relu_gradient(gy.reshape(-1), y.reshape(-1), dx.reshape(-1))


def bias_gradient(gy: np.ndarray, y: np.ndarray | None, dx: np.ndarray | None, dbias: np.ndarray) -> None:
    """See `reference.epilogue.bias_gradient`; of rows alone."""
    if y is not None and dx is not None:
        relu_gradient(gy, y, dx)
        gy = dx
    add_up_rows(gy, dbias)
