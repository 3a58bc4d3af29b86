"""Convolution of NumPy arrays by blocked im2col and BLAS.

`reference.conv` is the specification. A block is as many images, or rows of an image, as keep their patches in the L2
cache: unfolding the whole batch at once was measured at a quarter of the speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numba
import numpy as np

from .buffers import empty
from .machine_code import kernel
from .patches import ChannelsLast
from .planes import Planes, Room, Shape
from .products import multiply

_BLOCK_NBYTES = 512 * 1024
_BLOCK_POSITIONS = 512
"""A block has so many output positions at least: with fewer, passing over a deep layer's weights costs too much."""
_OWN_PRODUCT_POSITIONS = 256
"""From so many positions on, each image has a product of its own; smaller products pass over the weights too often."""
_SHALLOW, _FEWEST_CHANNELS = range(16, 65), 16
"""Depths, and from how many channels out on, for which the product with patches as columns is slow."""
_FLOATS = (numba.float32, numba.float64)
_PAIR, _TRIPLE = numba.types.UniTuple(numba.int64, 2), numba.types.UniTuple(numba.int64, 3)

Pair = tuple[int, int]


@kernel(
    [numba.void(f[::1], _TRIPLE, f[::1], numba.boolean, f[:, :, ::1], _PAIR) for f in _FLOATS],
)
def _finish(product, steps, bias, relu, out, span):  # type: ignore[no-untyped-def]
    """Bias and ReLU on the way from ``product`` to ``out``.

    ``product`` has ``steps`` between images, between channels and between positions, ``out`` is (images, channels,
    positions), of which the block covers the positions ``span`` (first, end).
    """
    zero = out.dtype.type(0)
    size = span[1] - span[0]
    line = np.empty(size, out.dtype)  # of one plane, where its positions do not lie side by side: then loops vectorise
    for n in range(out.shape[0]):
        for c in range(out.shape[1]):
            b = bias[c]
            at = n * steps[0] + c * steps[1]
            source, target = product[at : at + size], out[n, c, span[0] : span[1]]
            if steps[2] > 1:
                source = line
                for i in range(size):
                    line[i] = product[at + i * steps[2]]
            if relu:
                for i in range(size):
                    value = source[i] + b
                    target[i] = value if value > zero or np.isnan(value) else zero
            else:
                for i in range(size):
                    target[i] = source[i] + b


@kernel([f(f[::1]) for f in _FLOATS], fastmath={"reassoc"})
def _total(x):  # type: ignore[no-untyped-def]
    # Reassociated, so it may store nothing: a loop that also stores is vectorised only where its arrays lie far enough
    # apart, which changes the order of the sum, and so its last bits, from one call to the next.
    total = x.dtype.type(0)
    for i in range(x.size):
        total += x[i]
    return total


@kernel(
    [numba.void(f[:, :, ::1], f[:, :, ::1], f[::1], _PAIR, f[::1], _PAIR) for f in _FLOATS],
)
def _gather_through_relu(gy, out, g, steps, dbias, span):  # type: ignore[no-untyped-def]
    """``g``, a product with ``steps``, becomes the gradient before ReLU over ``span``; its sums go onto ``dbias``."""
    zero = gy.dtype.type(0)
    size = span[1] - span[0]
    for n in range(gy.shape[0]):
        for c in range(gy.shape[1]):
            source, result = gy[n, c, span[0] : span[1]], out[n, c, span[0] : span[1]]
            at = n * steps[0] + c * steps[1]
            target = g[at : at + size]
            for i in range(size):
                target[i] = source[i] if result[i] > zero else zero
            dbias[c] += _total(target)


@kernel(
    [numba.void(f[:, :, ::1], f[::1], _PAIR, f[::1], _PAIR) for f in _FLOATS],
)
def _gather(gy, g, steps, dbias, span):  # type: ignore[no-untyped-def]
    """As `_gather_through_relu` where there was none."""
    size = span[1] - span[0]
    for n in range(gy.shape[0]):
        for c in range(gy.shape[1]):
            at = n * steps[0] + c * steps[1]
            source, target = gy[n, c, span[0] : span[1]], g[at : at + size]
            for i in range(size):
                target[i] = source[i]
            dbias[c] += _total(target)


class _Block(NamedTuple):
    """Images and output rows that are unfolded together."""

    images: slice
    rows: Pair
    span: Pair
    """The positions of ``rows`` in a plane."""
    extent: Pair
    """How many images and positions of each."""


class _Blocks:
    """The blocks of one convolution, and scratch memory for a block."""

    def __init__(
        self, x: np.ndarray, weight: np.ndarray, out: np.ndarray, stride: Pair, padding: Pair, unfolds_alone: bool
    ) -> None:
        self._batch, self._channels, self._height, self._width = out.shape
        depth, plane = weight[0].size, self._height * self._width
        positions = max(_BLOCK_POSITIONS, _BLOCK_NBYTES // (depth * x.itemsize))
        self._rows_at_once = max(1, min(self._height, positions // self._width))
        self._images_at_once = max(1, min(self._batch, positions // (self._rows_at_once * self._width)))
        columns = self._images_at_once * self._rows_at_once * self._width
        shape = Shape(weight, stride, padding, self._width)
        self.joined = plane < _OWN_PRODUCT_POSITIONS
        """Whether one product takes all images of a block, else each has its own, right where the results belong."""
        self.patches: ChannelsLast | Planes
        shallow = unfolds_alone and depth in _SHALLOW and self._channels >= _FEWEST_CHANNELS
        if shape.kernel != (1, 1) and (shallow or (self.joined and self._batch * plane >= self._channels)):
            self.patches = ChannelsLast(x, weight, shape, columns, self.joined)
        else:
            self.patches = Planes(x, weight, shape, columns, self.joined)
        self.product = Room(self._channels, columns, x.dtype, self.joined)

    def __iter__(self) -> Iterator[_Block]:
        """All blocks; the rows of an image from the first to the last."""
        for first in range(0, self._batch, self._images_at_once):
            last = min(first + self._images_at_once, self._batch)
            for top in range(0, self._height, self._rows_at_once):
                bottom = min(top + self._rows_at_once, self._height)
                span = top * self._width, bottom * self._width
                yield _Block(slice(first, last), (top, bottom), span, (last - first, span[1] - span[0]))

    def scratch(self, extent: Pair) -> tuple[np.ndarray, np.ndarray, tuple[int, int, int]]:
        """Room for the product of so many images and positions: as a matrix or matrices, flat, and its steps.

        Patches as rows are multiplied faster where the product, too, has its positions as rows.
        """
        flat = self.product.flat(*extent)
        if isinstance(self.patches, ChannelsLast) and self.joined:
            return flat.reshape(-1, self._channels).T, flat, (extent[1] * self._channels, 1, self._channels)
        return self.product.matrices(*extent), flat, (*self.product.steps(*extent), 1)

    def planes(self, images: np.ndarray) -> np.ndarray:
        """Results or their gradients with the positions along one axis."""
        return images.reshape(self._batch, self._channels, self._height * self._width)


def conv2d(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    out: np.ndarray,
    stride: Pair,
    padding: Pair,
    relu: bool,
) -> None:
    """See `reference.conv.conv2d`."""
    blocks = _Blocks(x, weight, out, stride, padding, unfolds_alone=False)
    matrix = blocks.patches.matrix()
    planes = blocks.planes(out)
    in_place = bias is None and not relu and not blocks.joined
    if bias is None:
        bias = np.zeros(len(weight), weight.dtype)
    for images, rows, span, extent in blocks:
        patches = blocks.patches.unfold(x[images], rows)
        if in_place:
            multiply(matrix, patches, planes[images, :, slice(*span)])
        else:
            product, flat, steps = blocks.scratch(extent)
            multiply(matrix, patches, product)
            _finish(flat, steps, bias, relu, planes[images], span)


def _add_product(g: np.ndarray, patches: np.ndarray, sums: np.ndarray, is_first: bool) -> None:
    """Add ``g @ patches.T``, over all images, to ``sums``, which start with the first such product."""
    if is_first and g.ndim == 2:
        multiply(g, patches.T, sums)
        return
    product = empty((*g.shape[:-1], patches.shape[-2]), g.dtype)
    multiply(g, patches.swapaxes(-1, -2), product)
    if is_first:
        sums[...] = 0
    for each in product if product.ndim == 3 else product[None]:
        sums += each


def conv2d_gradients(
    x: np.ndarray,
    weight: np.ndarray,
    gy: np.ndarray,
    out: np.ndarray | None,
    into: tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None],
    stride: Pair,
    padding: Pair,
) -> None:
    """See `reference.conv.conv2d_gradients`."""
    dx, dweight, dbias = into
    blocks = _Blocks(x, weight, gy, stride, padding, unfolds_alone=dx is None)
    patches, room = blocks.patches, blocks.product
    matrix = patches.matrix()
    sums = None if dweight is None else patches.sums(dweight)
    bias_sums = np.zeros(len(weight), weight.dtype)
    gy_planes = blocks.planes(gy)
    out_planes = None if out is None else blocks.planes(out)
    in_place = out is None and dbias is None and not blocks.joined
    for images, rows, span, extent in blocks:
        if in_place:
            g = gy_planes[images, :, slice(*span)]
        else:
            g, target = room.matrices(*extent), (room.flat(*extent), room.steps(*extent), bias_sums, span)
            if out_planes is None:
                _gather(gy_planes[images], *target)
            else:
                _gather_through_relu(gy_planes[images], out_planes[images], *target)
        if sums is not None:
            _add_product(g, patches.unfold(x[images], rows), sums, is_first=images.start == rows[0] == 0)
        if dx is not None:
            multiply(matrix.T, g, patches.room(len(x[images]), rows))
            patches.fold(dx[images], rows)
    if dweight is not None and sums is not None:
        if not x.size:
            sums[:] = 0
        patches.finish(dweight, sums)
    if dbias is not None:
        dbias[...] = bias_sums
