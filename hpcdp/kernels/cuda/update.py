"""Optimizer updates of CuPy arrays, one pass over memory (`update.cu`, `lars.cu`).

Functions have the names, arguments and bits of `reference.update`. Coefficients may also be an array of float64 on the
GPU: for CUDA graphs, which freeze numbers that a kernel is given. So may the ``scale`` that counts in the place of
theirs, shape ``(1,)``. LARS reads the norms on the GPU: the host does not wait for them.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Array
from .. import cuda

Coefficients = tuple[float, ...] | Array


def sgd(param: Array, grad: Array, coefficients: Coefficients, scale: Array | None = None) -> None:
    """See `reference.update.sgd`."""
    _launch("sgd", (param, grad), coefficients, 3, scale)


def sgd_momentum(
    param: Array, grad: Array, velocity: Array, coefficients: Coefficients, scale: Array | None = None
) -> None:
    """See `reference.update.sgd_momentum`."""
    _launch("sgd_momentum", (param, grad, velocity), coefficients, 4, scale)


def sgd_nesterov(
    param: Array, grad: Array, velocity: Array, coefficients: Coefficients, scale: Array | None = None
) -> None:
    """See `reference.update.sgd_nesterov`."""
    _launch("sgd_nesterov", (param, grad, velocity), coefficients, 4, scale)


def adam(param: Array, grad: Array, m: Array, v: Array, coefficients: Coefficients, scale: Array | None = None) -> None:
    """See `reference.update.adam`."""
    _launch("adam", (param, grad, m, v), coefficients, 9, scale)


def _launch(name: str, arrays: tuple[Array, ...], coefficients: Coefficients, count: int, scale: Array | None) -> None:
    param = arrays[0]
    of_type = cuda.type_name(name, ("float32", "float64"), param.size, *arrays)
    numbers, place = coefficients, cuda.NOWHERE
    if not isinstance(coefficients, tuple):
        cuda.check(name, ("float64",), count, coefficients)
        numbers, place = (0.0,) * count, coefficients
    if scale is not None:
        cuda.check(name, ("float64",), 1, scale)
    scalars = (param.dtype.type(each) for each in numbers)
    scale_at = cuda.NOWHERE if scale is None else scale
    cuda.launch_elementwise("update", f"{name}_{of_type}", arrays, *scalars, place, scale_at)


def lars_sgd(param: Array, grad: Array, squares: Array, coefficients: tuple[float, float, float, float]) -> None:
    """See `reference.update.lars_sgd`."""
    _launch_lars("sgd", (param, grad), squares, coefficients)


def lars_sgd_momentum(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """See `reference.update.lars_sgd_momentum`."""
    _launch_lars("sgd_momentum", (param, grad, velocity), squares, coefficients)


def lars_sgd_nesterov(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """See `reference.update.lars_sgd_nesterov`."""
    _launch_lars("sgd_nesterov", (param, grad, velocity), squares, coefficients)


def _launch_lars(name: str, arrays: tuple[Array, ...], squares: Array, coefficients: tuple[float, ...]) -> None:
    param = arrays[0]
    of_type = cuda.type_name(name, ("float32", "float64"), param.size, *arrays)
    cuda.check(name, ("float64",), 2, squares)
    lr, weight_decay, scale, *momentum, trust = coefficients
    rounded = (param.dtype.type(each) for each in (lr, *momentum))
    numbers = (np.float64(each) for each in (weight_decay, scale, trust))
    cuda.launch_elementwise("lars", f"lars_{name}_{of_type}", arrays, *rounded, squares, *numbers)
