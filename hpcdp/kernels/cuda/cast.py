"""Casts between float32 and the 16-bit formats, and scaling, for CuPy arrays. Imports: cuda.

`reference.cast` is the specification: same names, same arguments, same bits, but for those of a NaN in float16.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Array
from .. import cuda


def to_float16(x: Array, out: Array) -> None:
    """See `reference.cast.to_float16`."""
    of_type = cuda.type_name("to_float16", ("float32", "float64"), x.size, x)
    _cast(f"to_float16_{of_type}", x, out, str(x.dtype), "uint16")


def from_float16(x: Array, out: Array) -> None:
    """See `reference.cast.from_float16`."""
    _cast("from_float16", x, out, "uint16", "float32")


def to_bfloat16(x: Array, out: Array) -> None:
    """See `reference.cast.to_bfloat16`."""
    _cast("to_bfloat16", x, out, "float32", "uint16")


def from_bfloat16(x: Array, out: Array) -> None:
    """See `reference.cast.from_bfloat16`."""
    _cast("from_bfloat16", x, out, "uint16", "float32")


def _cast(name: str, x: Array, out: Array, from_dtype: str, to_dtype: str) -> None:
    cuda.check(name, (from_dtype,), x.size, x)
    cuda.check(name, (to_dtype,), x.size, out)
    cuda.launch_elementwise("cast", name, (x, out))


def follow(wide: Array, x: Array) -> None:
    """See `reference.cast.follow`."""
    of_type = cuda.type_name("follow", ("uint16", "int16"), x.size, x)
    cuda.check("follow", ("float32",), x.size, wide)
    cuda.launch_elementwise("cast", f"follow_{of_type}", (wide, x))


def scale(x: Array, factor: float) -> None:
    """See `reference.cast.scale`."""
    scale_into(x, factor, x)


def scale_into(x: Array, factor: float, out: Array) -> None:
    """See `reference.cast.scale_into`."""
    of_type = cuda.type_name("scale", ("uint16", "int16", "float32", "float64"), x.size, x, out)
    by = np.float32(factor) if x.itemsize == 2 else x.dtype.type(factor)
    cuda.launch_elementwise("cast", f"scale_{of_type}", (x, out), by)
