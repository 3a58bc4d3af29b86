"""Bias and activation after a product or a convolution, in one pass over memory, for CuPy arrays.

Imports: cuda, channels.

`reference.epilogue` is the specification: same names, same arguments, and the same bits where the gradient is finite;
of 16 bits those of float32, rounded once. Sums are in float64, up to rounding the same.
"""

from __future__ import annotations

import math

import numpy as np

from ...core.arrays import Array, array_namespace, dtype_name
from .. import cuda
from .channels import pieces_of, shape

_COLUMNS = 16
"""Of rows that a block sums; `epilogue.cu` says so, too."""


def add_bias(y: Array, bias: Array, relu: bool) -> None:
    """See `reference.epilogue.add_bias`."""
    of_type = cuda.type_name("add_bias", cuda.FLOATS, y.size, y)
    cuda.check("add_bias", (dtype_name(y.dtype),), y.shape[1], bias)
    blocks = cuda.blocks(-(-y.nbytes // 16))
    scalars = (np.int64(y.size), np.int64(y.shape[1]), np.int64(math.prod(y.shape[2:])), np.bool_(relu))
    cuda.launch("epilogue", f"add_bias_{of_type}", blocks, y, bias, *scalars)


def relu_gradient(gy: Array, y: Array, dx: Array) -> None:
    """See `reference.epilogue.relu_gradient`; the arrays must be C-contiguous."""
    of_type = cuda.type_name("relu_gradient", cuda.FLOATS, gy.size, gy, y, dx)
    cuda.launch_elementwise("epilogue", f"relu_gradient_{of_type}", (gy, y, dx))


def bias_gradient(gy: Array, y: Array | None, dx: Array | None, dbias: Array) -> None:
    """See `reference.epilogue.bias_gradient`."""
    result, masked = (gy, gy) if y is None else (y, dx)
    of_type = cuda.type_name("bias_gradient", cuda.FLOATS, gy.size, gy, result, masked)
    channels = gy.shape[1]
    cuda.check("bias_gradient", (dtype_name(gy.dtype),), channels, dbias)
    of_channel = gy.size // max(channels, 1)
    kind, parts, size = "images", channels, of_channel
    if of_channel == gy.shape[0]:
        kind, parts, size = "rows", -(-channels // _COLUMNS), of_channel * _COLUMNS
    pieces = pieces_of(parts, size)
    partial = dbias if pieces == 1 else array_namespace(gy).empty((channels, pieces), dtype=np.float64)
    args = (gy, result, masked, shape(gy), np.bool_(y is not None), partial, dbias)
    cuda.launch("epilogue", f"bias_gradient_of_{kind}_{of_type}", parts * pieces, *args)
    if pieces > 1:
        cuda.launch("norms", f"add_partials_{of_type}", channels, partial, np.int64(pieces), dbias)
