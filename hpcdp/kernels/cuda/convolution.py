"""Convolution of CuPy arrays by im2col and one product over all images, and pooling (`conv.cu`, `pool.cu`).

Functions have the names and arguments of `reference.convolution`, and the same product; all else has the same bits
where gradients are finite, but the gradient of the bias, which is added up in float64. Of 16 bits a product is added up
in float32 and rounded, and so is what is made of it.
"""

from __future__ import annotations

import math

import numpy as np

from ...core.arrays import Array, array_namespace, dtype_name
from .. import cuda
from ..reference.convolution import Pair
from .cublas import matmul
from .elementwise import bias_gradient

_WINDOWS = np.dtype([("planes", np.int64), ("at", np.int32, 10)])


def _windows(x: Array, size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    """The structure ``Windows`` of `windows.cuh`: planes like those of ``x``, and ``size`` positions of a window."""
    return cuda.structure(_WINDOWS, x.shape[0] * x.shape[1], (*x.shape[2:], *size, *kernel, *stride, *padding))


def conv2d(x: Array, weight: Array, bias: Array | None, out: Array, stride: Pair, padding: Pair, relu: bool) -> None:
    """See `reference.convolution.conv2d`."""
    channels = out.shape[1]
    product = _product(weight.reshape(channels, -1), _unfolded(x, weight, out, stride, padding))
    of_type = cuda.type_name("conv2d", cuda.FLOATS, out.size, product, out)
    if bias is not None:
        cuda.check("conv2d", (dtype_name(out.dtype),), channels, bias)
    scalars = (*_sizes(out), np.bool_(bias is not None), np.bool_(relu))
    arrays = (product, product if bias is None else bias, out)
    cuda.launch("conv", f"to_images_{of_type}", cuda.blocks(-(-out.nbytes // 16)), *arrays, *scalars)


def conv2d_gradients(
    x: Array,
    weight: Array,
    gy: Array,
    out: Array | None,
    into: tuple[Array | None, Array | None, Array | None],
    stride: Pair,
    padding: Pair,
) -> None:
    """See `reference.convolution.conv2d_gradients`."""
    xp, channels = array_namespace(x, weight), gy.shape[1]
    dx, dweight, dbias = into
    flat = xp.empty((channels, gy.size // channels), dtype=gy.dtype)
    through = gy if out is None else out
    of_type = cuda.type_name("conv2d_gradients", cuda.FLOATS, gy.size, gy, through, flat)
    scalars = (*_sizes(gy), np.bool_(out is not None))
    cuda.launch("conv", f"from_images_{of_type}", cuda.blocks(-(-gy.nbytes // 16)), gy, through, flat, *scalars)
    if dbias is not None:
        bias_gradient(flat[None], None, None, dbias)
    if dweight is not None:
        columns = _unfolded(x, weight, gy, stride, padding)
        dweight[...] = matmul(flat, columns.T).reshape(weight.shape)
    if dx is not None:
        columns = _product(weight.reshape(channels, -1).T, flat)
        cuda.check("conv2d_gradients", (dtype_name(columns.dtype),), columns.size, columns)
        cuda.check("conv2d_gradients", (dtype_name(columns.dtype),), x.size, dx)
        of_windows = _windows(dx, gy.shape[2:], weight.shape[2:], stride, padding)
        cuda.launch("conv", f"fold_{of_type}", cuda.blocks(dx.size), columns, dx, of_windows, np.int64(x.shape[1]))


def _product(a: Array, b: Array) -> Array:
    """``a @ b``, in their dtype also where a namespace would give one of more bits."""
    return matmul(a, b, array_namespace(a, b).empty((a.shape[0], b.shape[1]), dtype=a.dtype))


def _unfolded(x: Array, weight: Array, out: Array, stride: Pair, padding: Pair) -> Array:
    """Patches: shape ``(in channels * kernel positions, batch * output positions)``."""
    of_type = cuda.type_name("conv2d", cuda.FLOATS, x.size, x)
    rows, width = math.prod(weight.shape[1:]), out.shape[0] * math.prod(out.shape[2:])
    columns = array_namespace(x).empty((rows, width), dtype=x.dtype)
    of_windows = _windows(x, out.shape[2:], weight.shape[2:], stride, padding)
    positions = width * x.shape[1]
    cuda.launch("conv", f"unfold_{of_type}", cuda.blocks(positions), x, columns, of_windows, np.int64(x.shape[1]))
    return columns


def _sizes(images: Array) -> tuple[np.int64, np.int64, np.int64]:
    """Elements, channels and positions."""
    return np.int64(images.size), np.int64(images.shape[1]), np.int64(math.prod(images.shape[2:]))


def average_pool(x: Array, out: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """See `reference.convolution.average_pool`."""
    _launch_pool(
        "average_pool", (x, out), out.size, _windows_of_pool(x, out, kernel, stride, padding), _share(kernel, x)
    )


def average_pool_gradient(gy: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """See `reference.convolution.average_pool_gradient`."""
    _launch_pool(
        "average_pool_gradient",
        (gy, dx),
        dx.size,
        _windows_of_pool(dx, gy, kernel, stride, padding),
        _share(kernel, dx),
    )


def max_pool(x: Array, out: Array, chosen: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """See `reference.convolution.max_pool`."""
    cuda.check("max_pool", ("int32",), out.size, chosen)
    _launch_pool("max_pool", (x, out, chosen), out.size, _windows_of_pool(x, out, kernel, stride, padding))


def max_pool_gradient(gy: Array, chosen: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """See `reference.convolution.max_pool_gradient`."""
    cuda.check("max_pool_gradient", ("int32",), gy.size, chosen)
    _launch_pool("max_pool_gradient", (gy, chosen, dx), dx.size, _windows_of_pool(dx, gy, kernel, stride, padding))


def _windows_of_pool(x: Array, out: Array, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    cuda.check("pool", cuda.FLOATS, x.size, x)
    cuda.check("pool", (dtype_name(x.dtype),), out.size, out)
    return _windows(x, out.shape[2:], kernel, stride, padding)


def _share(kernel: Pair, x: Array) -> np.generic:
    """Of an element in a mean, in the type that is computed in."""
    return (np.float64 if x.itemsize == 8 else np.float32)(1.0 / (kernel[0] * kernel[1]))


def _launch_pool(name: str, arrays: tuple[Array, ...], threads: int, *args: np.generic | np.ndarray) -> None:
    of_type = cuda.type_name(name, cuda.FLOATS, arrays[0].size, arrays[0])
    cuda.launch("pool", f"{name}_{of_type}", cuda.blocks(threads), *arrays, *args)
