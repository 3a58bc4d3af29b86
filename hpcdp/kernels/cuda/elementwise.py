"""Sums and ReLU of whole CuPy arrays. Imports: arrays, cuda, reference.elementwise.

`reference.elementwise` is the specification: same names, same arguments, same bits, and what computes arrays that the
kernels do not take.
"""

from __future__ import annotations

from ...core.arrays import Array, dtype_name
from .. import cuda
from ..reference import elementwise


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
