"""Elementwise operations of CuPy arrays (`elementwise.cu`, `epilogue.cu`, `cast.cu`).

Functions have the names and arguments of `reference.elementwise`, and its bits where gradients are finite, but for a
NaN in float16; of 16 bits those of float32, rounded once. Sums of gradients of a bias are in float64, up to rounding
the same. GELU is the reference's.
"""

from __future__ import annotations

import math

import numpy as np

from ...core.arrays import Array, array_namespace, dtype_name
from .. import cuda
from ..reference import elementwise
from ..reference.elementwise import gelu as gelu
from ..reference.elementwise import gelu_gradient as gelu_gradient


def add(a: Array, b: Array, out: Array) -> None:
    """See `reference.elementwise.add`."""
    if not _launched("add", a, b, out):
        elementwise.add(a, b, out)


def relu(x: Array, out: Array) -> None:
    """See `reference.elementwise.relu`."""
    if not _launched("relu", x, out):
        elementwise.relu(x, out)


def _launched(name: str, *arrays: Array) -> bool:
    dtype, size = arrays[-1].dtype, arrays[-1].size
    if dtype_name(dtype) not in cuda.FLOATS:
        return False
    if any(x.dtype != dtype or x.size != size or not x.flags.c_contiguous for x in arrays):
        return False
    if any(x.device.id != arrays[-1].device.id for x in arrays):  # which CuPy lets GPUs see each other for
        return False
    cuda.launch_elementwise("elementwise", f"{name}_{cuda.type_name(name, cuda.FLOATS, size, *arrays)}", arrays)
    return True


_COLUMNS = 16
"""Of rows that a block sums; `epilogue.cu` says so, too."""


def add_bias(y: Array, bias: Array, relu: bool) -> None:
    """See `reference.elementwise.add_bias`."""
    of_type = cuda.type_name("add_bias", cuda.FLOATS, y.size, y)
    cuda.check("add_bias", (dtype_name(y.dtype),), y.shape[1], bias)
    blocks = cuda.blocks(-(-y.nbytes // 16))
    scalars = (np.int64(y.size), np.int64(y.shape[1]), np.int64(math.prod(y.shape[2:])), np.bool_(relu))
    cuda.launch("epilogue", f"add_bias_{of_type}", blocks, y, bias, *scalars)


def relu_gradient(gy: Array, y: Array, dx: Array) -> None:
    """See `reference.elementwise.relu_gradient`; the arrays must be C-contiguous."""
    of_type = cuda.type_name("relu_gradient", cuda.FLOATS, gy.size, gy, y, dx)
    cuda.launch_elementwise("epilogue", f"relu_gradient_{of_type}", (gy, y, dx))


def bias_gradient(gy: Array, y: Array | None, dx: Array | None, dbias: Array) -> None:
    """See `reference.elementwise.bias_gradient`."""
    result, masked = (gy, gy) if y is None else (y, dx)
    of_type = cuda.type_name("bias_gradient", cuda.FLOATS, gy.size, gy, result, masked)
    channels = gy.shape[1]
    cuda.check("bias_gradient", (dtype_name(gy.dtype),), channels, dbias)
    of_channel = gy.size // max(channels, 1)
    kind, parts, size = "images", channels, of_channel
    if of_channel == gy.shape[0]:
        kind, parts, size = "rows", -(-channels // _COLUMNS), of_channel * _COLUMNS
    pieces = cuda.pieces_of(parts, size)
    partial = dbias if pieces == 1 else array_namespace(gy).empty((channels, pieces), dtype=np.float64)
    args = (gy, result, masked, cuda.shape_of_channels(gy), np.bool_(y is not None), partial, dbias)
    cuda.launch("epilogue", f"bias_gradient_of_{kind}_{of_type}", parts * pieces, *args)
    if pieces > 1:
        cuda.launch("norms", f"add_partials_{of_type}", channels, partial, np.int64(pieces), dbias)


def to_float16(x: Array, out: Array) -> None:
    """See `reference.elementwise.to_float16`."""
    of_type = cuda.type_name("to_float16", ("float32", "float64"), x.size, x)
    _cast(f"to_float16_{of_type}", x, out, str(x.dtype), "uint16")


def from_float16(x: Array, out: Array) -> None:
    """See `reference.elementwise.from_float16`."""
    _cast("from_float16", x, out, "uint16", "float32")


def to_bfloat16(x: Array, out: Array) -> None:
    """See `reference.elementwise.to_bfloat16`."""
    _cast("to_bfloat16", x, out, "float32", "uint16")


def from_bfloat16(x: Array, out: Array) -> None:
    """See `reference.elementwise.from_bfloat16`."""
    _cast("from_bfloat16", x, out, "uint16", "float32")


def _cast(name: str, x: Array, out: Array, from_dtype: str, to_dtype: str) -> None:
    cuda.check(name, (from_dtype,), x.size, x)
    cuda.check(name, (to_dtype,), x.size, out)
    cuda.launch_elementwise("cast", name, (x, out))


def follow(wide: Array, x: Array) -> None:
    """See `reference.elementwise.follow`."""
    of_type = cuda.type_name("follow", ("uint16", "int16"), x.size, x)
    cuda.check("follow", ("float32",), x.size, wide)
    cuda.launch_elementwise("cast", f"follow_{of_type}", (wide, x))


def scale(x: Array, factor: float) -> None:
    """See `reference.elementwise.scale`."""
    scale_into(x, factor, x)


def scale_into(x: Array, factor: float, out: Array) -> None:
    """See `reference.elementwise.scale_into`."""
    of_type = cuda.type_name("scale", ("uint16", "int16", "float32", "float64"), x.size, x, out)
    by = np.float32(factor) if x.itemsize == 2 else x.dtype.type(factor)
    cuda.launch_elementwise("cast", f"scale_{of_type}", (x, out), by)
