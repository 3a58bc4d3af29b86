"""Average and max pooling of CuPy arrays. Imports: cuda, windows.

`reference.pool` is the specification: same names, same arguments, and the same bits where gradients are finite; of 16
bits those of float32, rounded once.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Array, dtype_name
from .. import cuda
from ..reference.windows import Pair
from .windows import windows


def average_pool(x: Array, out: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """See `reference.pool.average_pool`."""
    _launch("average_pool", (x, out), out.size, _windows(x, out, kernel, stride, padding), _share(kernel, x))


def average_pool_gradient(gy: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """See `reference.pool.average_pool_gradient`."""
    _launch("average_pool_gradient", (gy, dx), dx.size, _windows(dx, gy, kernel, stride, padding), _share(kernel, dx))


def max_pool(x: Array, out: Array, chosen: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """See `reference.pool.max_pool`."""
    cuda.check("max_pool", ("int32",), out.size, chosen)
    _launch("max_pool", (x, out, chosen), out.size, _windows(x, out, kernel, stride, padding))


def max_pool_gradient(gy: Array, chosen: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """See `reference.pool.max_pool_gradient`."""
    cuda.check("max_pool_gradient", ("int32",), gy.size, chosen)
    _launch("max_pool_gradient", (gy, chosen, dx), dx.size, _windows(dx, gy, kernel, stride, padding))


def _windows(x: Array, out: Array, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    cuda.check("pool", cuda.FLOATS, x.size, x)
    cuda.check("pool", (dtype_name(x.dtype),), out.size, out)
    return windows(x, out.shape[2:], kernel, stride, padding)


def _share(kernel: Pair, x: Array) -> np.generic:
    """Of an element in a mean, in the type that is computed in."""
    return (np.float64 if x.itemsize == 8 else np.float32)(1.0 / (kernel[0] * kernel[1]))


def _launch(name: str, arrays: tuple[Array, ...], threads: int, *args: np.generic | np.ndarray) -> None:
    of_type = cuda.type_name(name, cuda.FLOATS, arrays[0].size, arrays[0])
    cuda.launch("pool", f"{name}_{of_type}", cuda.blocks(threads), *arrays, *args)
