"""Bias and activation after a product, in one pass over memory, for CuPy arrays. Imports: cuda.

`reference` is the specification: same names, same arguments, and the same bits where the gradient is finite; of
16 bits those of float32, rounded once.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array, dtype_name
from . import cuda


def add_bias(y: Array, bias: Array, relu: bool) -> None:
    """See `reference.add_bias`."""
    of_type = cuda.type_name("add_bias", cuda.FLOATS, y.size, y)
    cuda.check("add_bias", (dtype_name(y.dtype),), y.shape[1], bias)
    blocks = cuda.blocks(-(-y.nbytes // 16))
    scalars = (np.int64(y.size), np.int64(y.shape[1]), np.bool_(relu))
    cuda.launch("epilogue", f"add_bias_{of_type}", blocks, y, bias, *scalars)


def relu_gradient(gy: Array, y: Array, dx: Array) -> None:
    """See `reference.relu_gradient`; the arrays must be C-contiguous."""
    of_type = cuda.type_name("relu_gradient", cuda.FLOATS, gy.size, gy, y, dx)
    cuda.launch_elementwise("epilogue", f"relu_gradient_{of_type}", (gy, y, dx))
