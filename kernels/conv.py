"""Floor 0: convolution of NumPy arrays by blocked im2col and BLAS. Imports: numba, buffers, reference.

`reference` is the specification. A block is as many images as keep their patches in the L2 cache: unfolding the whole
batch at once was measured at a quarter of the speed. Patches are rows in the order (kernel row, kernel column, channel)
of channels-last copies of the images, so that unfolding and folding move runs of ``kernel width * channels`` elements
(Georganas et al., "Anatomy of high-performance deep learning convolutions", 2018, discuss the layouts).
"""

from __future__ import annotations

import numba
import numpy as np

from .buffers import empty

_BLOCK_NBYTES = 512 * 1024
_BLOCK_POSITIONS = 256
"""A block has so many output positions at least: with fewer, going over deep layers' weights costs more than the cache."""
_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}
_FLOATS = (numba.float32, numba.float64)
_PAIR = numba.types.UniTuple(numba.int64, 2)

Pair = tuple[int, int]


@numba.njit(
    [numba.void(f[:, :, :, ::1], f[:, :, ::1], f[:, ::1], _PAIR, _PAIR, _PAIR, _PAIR) for f in _FLOATS], **_OPTIONS
)
def _unfold(x, image, patches, kernel, size, stride, padding):  # type: ignore[no-untyped-def]
    """Write the patches of the images ``x``, by way of ``image``, room for one padded image with channels last."""
    batch, channels, height, width = x.shape
    run = kernel[1] * channels
    flat = image.reshape(image.shape[0], -1)
    image[:] = 0
    row = 0
    for n in range(batch):
        for c in range(channels):
            for y in range(height):
                for z in range(width):
                    image[y + padding[0], z + padding[1], c] = x[n, c, y, z]
        for y in range(size[0]):
            for z in range(size[1]):
                first = z * stride[1] * channels
                for i in range(kernel[0]):
                    # Slices start at 0, so that no index may be negative: only then the copy vectorises.
                    source = flat[y * stride[0] + i, first : first + run]
                    target = patches[row, i * run : (i + 1) * run]
                    for k in range(run):
                        target[k] = source[k]
                row += 1


@numba.njit(
    [numba.void(f[:, ::1], f[:, :, ::1], f[:, :, :, ::1], _PAIR, _PAIR, _PAIR, _PAIR) for f in _FLOATS], **_OPTIONS
)
def _fold(patches, image, dx, kernel, size, stride, padding):  # type: ignore[no-untyped-def]
    """The transpose of `_unfold`: sum the patches into the images ``dx``."""
    batch, channels, height, width = dx.shape
    run = kernel[1] * channels
    flat = image.reshape(image.shape[0], -1)
    row = 0
    for n in range(batch):
        image[:] = 0
        for y in range(size[0]):
            for z in range(size[1]):
                first = z * stride[1] * channels
                for i in range(kernel[0]):
                    target = flat[y * stride[0] + i, first : first + run]
                    source = patches[row, i * run : (i + 1) * run]
                    for k in range(run):
                        target[k] += source[k]
                row += 1
        for c in range(channels):
            for y in range(height):
                for z in range(width):
                    dx[n, c, y, z] = image[y + padding[0], z + padding[1], c]


@numba.njit([numba.void(f[:, ::1], f[::1], numba.boolean, f[:, :, ::1]) for f in _FLOATS], **_OPTIONS)
def _finish(product, bias, relu, out):  # type: ignore[no-untyped-def]
    """``out``, shape (images, channels, positions), from ``product`` (channels, images * positions): bias and ReLU."""
    zero = out.dtype.type(0)
    size = out.shape[2]
    for n in range(out.shape[0]):
        for c in range(out.shape[1]):
            b = bias[c]
            source = product[c, n * size : (n + 1) * size]
            target = out[n, c]
            if relu:
                for i in range(size):
                    value = source[i] + b
                    target[i] = value if value > zero or np.isnan(value) else zero
            else:
                for i in range(size):
                    target[i] = source[i] + b


@numba.njit(
    [numba.void(f[:, :, ::1], f[:, :, ::1], f[:, ::1], f[::1]) for f in _FLOATS],
    fastmath={"reassoc", "contract"},
    **_OPTIONS,
)
def _gather_through_relu(gy, out, g, dbias):  # type: ignore[no-untyped-def]
    """``g``, shape (channels, images * positions), becomes the gradient before ReLU; its sums go onto ``dbias``."""
    size = gy.shape[2]
    zero = gy.dtype.type(0)
    for n in range(gy.shape[0]):
        for c in range(gy.shape[1]):
            total = zero
            for i in range(size):
                value = gy[n, c, i] if out[n, c, i] > zero else zero
                g[c, n * size + i] = value
                total += value
            dbias[c] += total


@numba.njit(
    [numba.void(f[:, :, ::1], f[:, ::1], f[::1]) for f in _FLOATS], fastmath={"reassoc", "contract"}, **_OPTIONS
)
def _gather(gy, g, dbias):  # type: ignore[no-untyped-def]
    """As `_gather_through_relu` where there was none."""
    size = gy.shape[2]
    for n in range(gy.shape[0]):
        for c in range(gy.shape[1]):
            total = gy.dtype.type(0)
            for i in range(size):
                value = gy[n, c, i]
                g[c, n * size + i] = value
                total += value
            dbias[c] += total


class _Geometry:
    """The shapes of one convolution, its blocks, and scratch memory for a block."""

    def __init__(self, x: np.ndarray, weight: np.ndarray, out: np.ndarray, stride: Pair, padding: Pair) -> None:
        self.kernel: Pair = weight.shape[2:]
        self.size: Pair = out.shape[2:]
        self.stride, self.padding = stride, padding
        self.batch, self.channels = out.shape[:2]
        self.positions = self.size[0] * self.size[1]
        self.depth = weight[0].size
        dtype = x.dtype
        fitting = _BLOCK_NBYTES // max(1, self.positions * self.depth * dtype.itemsize)
        enough = -(-_BLOCK_POSITIONS // max(1, self.positions))
        self.images = max(1, min(self.batch, max(fitting, enough)))
        self.patches = empty((self.images * self.positions, self.depth), dtype)
        self.product = empty((self.channels * self.images * self.positions,), dtype)
        top, left = padding
        self.image = empty((x.shape[2] + 2 * top, x.shape[3] + 2 * left, x.shape[1]), dtype)

    def blocks(self) -> list[tuple[int, int]]:
        return [(n, min(n + self.images, self.batch)) for n in range(0, self.batch, self.images)]

    def unfold(self, x: np.ndarray) -> np.ndarray:
        patches = self.patches[: len(x) * self.positions]
        _unfold(x, self.image, patches, self.kernel, self.size, self.stride, self.padding)
        return patches

    def fold(self, patches: np.ndarray, dx: np.ndarray) -> None:
        _fold(patches, self.image, dx, self.kernel, self.size, self.stride, self.padding)


def _rows(weight: np.ndarray) -> np.ndarray:
    """The weights in the order of a patch: shape ``(out, kernel height * kernel width * in)``."""
    return np.ascontiguousarray(weight.transpose(0, 2, 3, 1)).reshape(len(weight), -1)


def conv2d(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    out: np.ndarray,
    stride: Pair,
    padding: Pair,
    relu: bool,
) -> None:
    """See `reference.conv2d`."""
    geometry = _Geometry(x, weight, out, stride, padding)
    rows = _rows(weight)
    if bias is None:
        bias = np.zeros(len(weight), weight.dtype)
    planes = out.reshape(geometry.batch, geometry.channels, geometry.positions)
    for first, last in geometry.blocks():
        product = geometry.product[: geometry.channels * (last - first) * geometry.positions]
        product = product.reshape(geometry.channels, -1)
        np.matmul(rows, geometry.unfold(x[first:last]).T, out=product)
        _finish(product, bias, relu, planes[first:last])


def conv2d_gradients(
    x: np.ndarray,
    weight: np.ndarray,
    gy: np.ndarray,
    out: np.ndarray | None,
    into: tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None],
    stride: Pair,
    padding: Pair,
) -> None:
    """See `reference.conv2d_gradients`."""
    dx, dweight, dbias = into
    geometry = _Geometry(x, weight, gy, stride, padding)
    channels, positions = geometry.channels, geometry.positions
    rows = _rows(weight)
    g_of_block = empty((channels * geometry.images * positions,), gy.dtype)
    sums = np.zeros((channels, geometry.depth), gy.dtype)
    part = np.empty_like(sums)
    bias_sums = np.zeros(channels, gy.dtype)
    gy_planes = gy.reshape(geometry.batch, channels, positions)
    out_planes = None if out is None else out.reshape(gy_planes.shape)
    for first, last in geometry.blocks():
        g = g_of_block[: channels * (last - first) * positions].reshape(channels, -1)
        if out_planes is None:
            _gather(gy_planes[first:last], g, bias_sums)
        else:
            _gather_through_relu(gy_planes[first:last], out_planes[first:last], g, bias_sums)
        if dweight is not None:
            sums += np.matmul(g, geometry.unfold(x[first:last]), out=part)
        if dx is not None:
            patches = geometry.patches[: (last - first) * positions]
            geometry.fold(np.matmul(g.T, rows, out=patches), dx[first:last])
    if dweight is not None:
        shape = (channels, *geometry.kernel, x.shape[1])
        dweight[...] = sums.reshape(shape).transpose(0, 3, 1, 2)
    if dbias is not None:
        dbias[...] = bias_sums
