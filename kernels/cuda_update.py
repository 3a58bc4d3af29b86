"""Fused optimizer updates for CuPy arrays, one pass over memory. Imports: cuda.

`reference_update` is the specification: same names, same arguments, same bits.
"""

from __future__ import annotations

from ..arrays import Array
from . import cuda


def sgd(param: Array, grad: Array, coefficients: tuple[float, float, float]) -> None:
    """See `reference_update.sgd`."""
    _launch("sgd", (param, grad), coefficients)


def sgd_momentum(param: Array, grad: Array, velocity: Array, coefficients: tuple[float, float, float, float]) -> None:
    """See `reference_update.sgd_momentum`."""
    _launch("sgd_momentum", (param, grad, velocity), coefficients)


def sgd_nesterov(param: Array, grad: Array, velocity: Array, coefficients: tuple[float, float, float, float]) -> None:
    """See `reference_update.sgd_nesterov`."""
    _launch("sgd_nesterov", (param, grad, velocity), coefficients)


def adam(param: Array, grad: Array, m: Array, v: Array, coefficients: tuple[float, ...]) -> None:
    """See `reference_update.adam`."""
    _launch("adam", (param, grad, m, v), coefficients)


def _launch(name: str, arrays: tuple[Array, ...], coefficients: tuple[float, ...]) -> None:
    param = arrays[0]
    of_type = cuda.type_name(name, ("float32", "float64"), param.size, *arrays)
    cuda.launch_elementwise("update", f"{name}_{of_type}", arrays, *(param.dtype.type(each) for each in coefficients))
