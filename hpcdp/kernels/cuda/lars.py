"""SGD of a layer at a rate that its norms give, for CuPy arrays: the host does not wait for them. Imports: cuda.

`reference.lars` is the specification: same names, same arguments, same bits.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Array
from .. import cuda


def sgd(param: Array, grad: Array, squares: Array, coefficients: tuple[float, float, float, float]) -> None:
    """See `reference.lars.sgd`."""
    _launch("sgd", (param, grad), squares, coefficients)


def sgd_momentum(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """See `reference.lars.sgd_momentum`."""
    _launch("sgd_momentum", (param, grad, velocity), squares, coefficients)


def sgd_nesterov(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """See `reference.lars.sgd_nesterov`."""
    _launch("sgd_nesterov", (param, grad, velocity), squares, coefficients)


def _launch(name: str, arrays: tuple[Array, ...], squares: Array, coefficients: tuple[float, ...]) -> None:
    param = arrays[0]
    of_type = cuda.type_name(name, ("float32", "float64"), param.size, *arrays)
    cuda.check(name, ("float64",), 2, squares)
    lr, weight_decay, scale, *momentum, trust = coefficients
    rounded = (param.dtype.type(each) for each in (lr, *momentum))
    numbers = (np.float64(each) for each in (weight_decay, scale, trust))
    cuda.launch_elementwise("lars", f"lars_{name}_{of_type}", arrays, *rounded, squares, *numbers)
