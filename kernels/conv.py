"""Floor 0: convolution of NumPy arrays by blocked im2col and BLAS. Imports: numba, buffers.

`reference` is the specification. A block is as many images, or rows of an image, as keep their patches in the L2 cache:
unfolding the whole batch at once was measured at a quarter of the speed. Patches are rows in the order (kernel row,
kernel column, channel) of channels-last copies of the images, so that unfolding and folding move runs of ``kernel width
* channels`` elements (Georganas et al., "Anatomy of high-performance deep learning convolutions", 2018, discuss the
layouts).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numba
import numpy as np

from .buffers import empty

_BLOCK_NBYTES = 512 * 1024
_BLOCK_POSITIONS = 512
"""A block has so many output positions at least: with fewer, passing over a deep layer's weights costs too much."""
_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}
_FLOATS = (numba.float32, numba.float64)
_PAIR = numba.types.UniTuple(numba.int64, 2)

Pair = tuple[int, int]


@numba.njit(
    [numba.void(f[:, :, :, ::1], f[:, :, ::1], f[:, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
    **_OPTIONS,
)
def _unfold(x, image, patches, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """Write the patches of some output ``rows`` (first, end), each ``width`` positions, of the images ``x``.

    ``image`` is room for one padded image with channels last, of which only the lines that the rows see are written.
    """
    run = kernel[1] * x.shape[1]
    flat = image.reshape(image.shape[0], -1)
    above, below = rows[0] * stride[0], (rows[1] - 1) * stride[0] + kernel[0]
    row = 0
    for n in range(x.shape[0]):
        image[above:below] = 0
        for c in range(x.shape[1]):
            for y in range(max(0, above - padding[0]), min(x.shape[2], below - padding[0])):
                for z in range(x.shape[3]):
                    image[y + padding[0], z + padding[1], c] = x[n, c, y, z]
        for y in range(rows[0], rows[1]):
            for z in range(width):
                first = z * stride[1] * x.shape[1]
                for i in range(kernel[0]):
                    # Slices start at 0, so that no index may be negative: only then the copy vectorises.
                    source = flat[y * stride[0] + i, first : first + run]
                    target = patches[row, i * run : (i + 1) * run]
                    for k in range(run):
                        target[k] = source[k]
                row += 1


@numba.njit(
    [numba.void(f[:, ::1], f[:, :, ::1], f[:, :, :, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
    **_OPTIONS,
)
def _fold(patches, image, dx, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """The transpose of `_unfold`: add the patches to the images ``dx``, which start from zero with the first row."""
    run = kernel[1] * dx.shape[1]
    flat = image.reshape(image.shape[0], -1)
    above, below = rows[0] * stride[0], (rows[1] - 1) * stride[0] + kernel[0]
    if rows[0] == 0:
        dx[:] = 0
    row = 0
    for n in range(dx.shape[0]):
        image[above:below] = 0
        for y in range(rows[0], rows[1]):
            for z in range(width):
                first = z * stride[1] * dx.shape[1]
                for i in range(kernel[0]):
                    target = flat[y * stride[0] + i, first : first + run]
                    source = patches[row, i * run : (i + 1) * run]
                    for k in range(run):
                        target[k] += source[k]
                row += 1
        for c in range(dx.shape[1]):
            for y in range(max(0, above - padding[0]), min(dx.shape[2], below - padding[0])):
                for z in range(dx.shape[3]):
                    dx[n, c, y, z] += image[y + padding[0], z + padding[1], c]


@numba.njit(
    [numba.void(f[:, ::1], f[::1], numba.boolean, f[:, :, ::1], _PAIR) for f in _FLOATS],
    **_OPTIONS,
)
def _finish(product, bias, relu, out, span):  # type: ignore[no-untyped-def]
    """Bias and ReLU on the way from ``product`` to ``out``.

    ``product`` is (channels, images * positions of a block), ``out`` is (images, channels, positions), of which the
    block covers the positions ``span`` (first, end).
    """
    zero = out.dtype.type(0)
    size = span[1] - span[0]
    for n in range(out.shape[0]):
        for c in range(out.shape[1]):
            b = bias[c]
            source = product[c, n * size : (n + 1) * size]
            target = out[n, c, span[0] : span[1]]
            if relu:
                for i in range(size):
                    value = source[i] + b
                    target[i] = value if value > zero or np.isnan(value) else zero
            else:
                for i in range(size):
                    target[i] = source[i] + b


@numba.njit([f(f[::1]) for f in _FLOATS], fastmath={"reassoc"}, **_OPTIONS)
def _total(x):  # type: ignore[no-untyped-def]
    # Reassociated, so it may store nothing: a loop that also stores is vectorised only where its arrays lie far enough
    # apart, which changes the order of the sum, and so its last bits, from one call to the next.
    total = x.dtype.type(0)
    for i in range(x.size):
        total += x[i]
    return total


@numba.njit(
    [numba.void(f[:, :, ::1], f[:, :, ::1], f[:, ::1], f[::1], _PAIR) for f in _FLOATS],
    **_OPTIONS,
)
def _gather_through_relu(gy, out, g, dbias, span):  # type: ignore[no-untyped-def]
    """``g``, shaped as a product, becomes the gradient before ReLU over ``span``; its sums go onto ``dbias``."""
    zero = gy.dtype.type(0)
    size = span[1] - span[0]
    for n in range(gy.shape[0]):
        for c in range(gy.shape[1]):
            source, result = gy[n, c, span[0] : span[1]], out[n, c, span[0] : span[1]]
            target = g[c, n * size : (n + 1) * size]
            for i in range(size):
                target[i] = source[i] if result[i] > zero else zero
            dbias[c] += _total(target)


@numba.njit(
    [numba.void(f[:, :, ::1], f[:, ::1], f[::1], _PAIR) for f in _FLOATS],
    **_OPTIONS,
)
def _gather(gy, g, dbias, span):  # type: ignore[no-untyped-def]
    """As `_gather_through_relu` where there was none."""
    size = span[1] - span[0]
    for n in range(gy.shape[0]):
        for c in range(gy.shape[1]):
            source, target = gy[n, c, span[0] : span[1]], g[c, n * size : (n + 1) * size]
            for i in range(size):
                target[i] = source[i]
            dbias[c] += _total(target)


class _Block(NamedTuple):
    """Images and output rows that are unfolded together."""

    images: slice
    rows: Pair
    span: Pair
    """The positions of ``rows`` in a plane."""
    columns: int
    """Positions of the block over all its images."""


class _Geometry:
    """The shapes of one convolution, its blocks, and scratch memory for a block."""

    def __init__(self, x: np.ndarray, weight: np.ndarray, out: np.ndarray, stride: Pair, padding: Pair) -> None:
        self.kernel: Pair = weight.shape[2:]
        self.stride, self.padding = stride, padding
        self.batch, self.channels, self.height, self.width = out.shape
        self.depth = weight[0].size
        dtype = x.dtype
        positions = max(_BLOCK_POSITIONS, _BLOCK_NBYTES // (self.depth * dtype.itemsize))
        self.rows_at_once = max(1, min(self.height, positions // self.width))
        self.images_at_once = max(1, min(self.batch, positions // (self.height * self.width)))
        columns = self.images_at_once * self.rows_at_once * self.width
        self.patches = empty((columns, self.depth), dtype)
        self.product = empty((self.channels * columns,), dtype)
        top, left = padding
        self.image = empty((x.shape[2] + 2 * top, x.shape[3] + 2 * left, x.shape[1]), dtype)

    def blocks(self) -> Iterator[_Block]:
        """All blocks; the rows of an image from the first to the last."""
        for first in range(0, self.batch, self.images_at_once):
            last = min(first + self.images_at_once, self.batch)
            for top in range(0, self.height, self.rows_at_once):
                bottom = min(top + self.rows_at_once, self.height)
                span = top * self.width, bottom * self.width
                yield _Block(slice(first, last), (top, bottom), span, (last - first) * (span[1] - span[0]))

    def planes(self, images: np.ndarray) -> np.ndarray:
        """Results or their gradients with the positions along one axis."""
        return images.reshape(self.batch, self.channels, self.height * self.width)

    def product_of(self, block: _Block) -> np.ndarray:
        """Scratch of shape (channels, columns)."""
        return self.product[: self.channels * block.columns].reshape(self.channels, block.columns)

    def unfold(self, x: np.ndarray, block: _Block) -> np.ndarray:
        """The block's patches, shape (columns, depth)."""
        patches = self.patches[: block.columns]
        _unfold(x[block.images], self.image, patches, block.rows, self.kernel, self.stride, self.padding, self.width)
        return patches

    def fold(self, dx: np.ndarray, block: _Block) -> None:
        """Add what stands in the block's patches to ``dx``."""
        patches = self.patches[: block.columns]
        _fold(patches, self.image, dx[block.images], block.rows, self.kernel, self.stride, self.padding, self.width)


def _in_patch_order(weight: np.ndarray) -> np.ndarray:
    """The weights as a matrix of shape ``(out, kernel height * kernel width * in)``."""
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
    matrix = _in_patch_order(weight)
    if bias is None:
        bias = np.zeros(len(weight), weight.dtype)
    planes = geometry.planes(out)
    for block in geometry.blocks():
        product = np.matmul(matrix, geometry.unfold(x, block).T, out=geometry.product_of(block))
        _finish(product, bias, relu, planes[block.images], block.span)


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
    matrix = _in_patch_order(weight)
    sums, part = empty(matrix.shape, matrix.dtype), empty(matrix.shape, matrix.dtype)
    sums[:] = 0
    bias_sums = np.zeros(len(weight), weight.dtype)
    gy_planes = geometry.planes(gy)
    out_planes = None if out is None else geometry.planes(out)
    for block in geometry.blocks():
        g = geometry.product_of(block)
        if out_planes is None:
            _gather(gy_planes[block.images], g, bias_sums, block.span)
        else:
            _gather_through_relu(gy_planes[block.images], out_planes[block.images], g, bias_sums, block.span)
        if dweight is not None:
            sums += np.matmul(g, geometry.unfold(x, block), out=part)
        if dx is not None:
            np.matmul(g.T, matrix, out=geometry.patches[: block.columns])
            geometry.fold(dx, block)
    if dweight is not None:
        dweight[...] = sums.reshape(len(weight), *geometry.kernel, x.shape[1]).transpose(0, 3, 1, 2)
    if dbias is not None:
        dbias[...] = bias_sums
