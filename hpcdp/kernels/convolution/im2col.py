"""Convolution of NumPy arrays by blocked im2col and BLAS.

A block is the number of images, or rows of an image, whose patches fit in the L2 cache: unfolding the whole batch at
once ran at a quarter of the speed.

Patches have two layouts, as Georganas et al. ("Anatomy of high-performance deep learning convolutions", 2018) discuss
them. `ChannelsLast` copies runs of ``kernel width * channels`` elements, but has to reorder images and weights.
`Planes` keeps the order: after a plane is split by the stride (into its polyphase components), a place of the kernel
reads runs of adjacent samples. If such runs are short, single samples are read by a table, the same for all channels
and images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .. import empty
from ..jit import add_both, add_run, copy_run, copy_strided, float_kernel, kernel
from ..matmul import multiply

_FLOATS = (numba.float32, numba.float64)
_PAIR, _TRIPLE = numba.types.UniTuple(numba.int64, 2), numba.types.UniTuple(numba.int64, 3)

Pair = tuple[int, int]

_NARROW = 8
"""Results per row below which their samples are read one by one."""


@kernel(numba.types.Tuple((_PAIR, _PAIR))(_PAIR, _PAIR, numba.int64, _PAIR))
def _phases_of(kernel, stride, width, rows):  # type: ignore[no-untyped-def]
    """Return the number of polyphase components that a kernel reads for output ``rows``, and their size.

    The component (a, b) has the samples (stride[0] u + a, stride[1] v + b) of the padded plane, from the first one that
    the rows read, so that each place of the kernel reads runs of ``width`` adjacent samples.
    """
    count = min(kernel[0], stride[0]), min(kernel[1], stride[1])
    high = (kernel[0] - 1) // stride[0] + rows[1] - rows[0]
    return count, (high, (kernel[1] - 1) // stride[1] + width)


@numba.njit(inline="always")
def _inside(b, stride, padding, width, wide):  # type: ignore[no-untyped-def]
    """Return the part (first, end) of a row of component ``b`` inside a line of ``width``, and where first is."""
    first = max(0, (padding - b + stride - 1) // stride)
    end = max(first, min(wide, (width - 1 - b + padding) // stride + 1))
    return first, end, first * stride + b - padding


@float_kernel(lambda f: (f[:, ::1], f[:, :, :, ::1], numba.int64, _PAIR, _PAIR))
def _part_plane(plane, phases, top, stride, padding):  # type: ignore[no-untyped-def]
    """Split ``plane`` into its ``phases``, from the output row ``top`` on; other elements do not change."""
    source, target = plane.reshape(-1), phases.reshape(-1)
    width, (high, wide) = plane.shape[1], phases.shape[2:]
    for b in range(phases.shape[1]):
        left, right, at = _inside(b, stride[1], padding[1], width, wide)
        for a in range(phases.shape[0]):
            above, below, y = _inside(a, stride[0], padding[0] - top * stride[0], plane.shape[0], high)
            row = (a * phases.shape[1] + b) * high * wide
            for u in range(above, below):
                copy_strided(source, y * width + at, stride[1], target, row + u * wide + left, right - left)
                y += stride[0]


@float_kernel(lambda f: (f[:, :, :, ::1], f[:, ::1], numba.int64, _PAIR, _PAIR))
def _join_plane(phases, plane, top, stride, padding):  # type: ignore[no-untyped-def]
    """Add the ``phases`` to the ``plane``, the transpose of `_part_plane`."""
    source, target = phases.reshape(-1), plane.reshape(-1)
    width, (high, wide) = plane.shape[1], phases.shape[2:]
    for a in range(phases.shape[0]):
        above, below, y = _inside(a, stride[0], padding[0] - top * stride[0], plane.shape[0], high)
        for u in range(above, below):
            row = (a * phases.shape[1] * high + u) * wide
            if stride[1] == 2:
                add_both(source, row, row + high * wide, wide, target, y * width, width, padding[1])
            else:
                for b in range(phases.shape[1]):
                    left, right, at = _inside(b, stride[1], padding[1], width, wide)
                    for v in range(right - left):
                        target[y * width + at + stride[1] * v] += source[row + b * high * wide + left + v]
            y += stride[0]


@float_kernel(lambda f: (f[:, :, :, ::1], f[::1], _PAIR, _PAIR, _PAIR, _PAIR, _PAIR, numba.int64))
def _unfold_wide(x, patches, steps, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """Write the patches of output ``rows`` (first, end) of the images ``x``.

    They are ordered by (channel, kernel row, kernel column), each a run of all positions of an image. ``steps`` are the
    elements from one image's run to the next, and from one row of the matrix to the next.
    """
    count, size = _phases_of(kernel, stride, width, rows)
    phases = np.zeros((count[0], count[1], size[0], size[1]), patches.dtype)
    flat = phases.reshape(-1)
    for n in range(x.shape[0]):
        start = n * steps[0]
        for c in range(x.shape[1]):
            if kernel == (1, 1) and padding == (0, 0):  # the part of the plane that is read is the patch
                patch = patches[start : start + size[0] * size[1]].reshape((1, 1, size[0], size[1]))
                _part_plane(x[n, c], patch, rows[0], stride, padding)
                start += steps[1]
                continue
            _part_plane(x[n, c], phases, rows[0], stride, padding)
            for i in range(kernel[0]):
                for j in range(kernel[1]):
                    first = ((i % stride[0] * count[1] + j % stride[1]) * size[0] + i // stride[0]) * size[1]
                    for row in range(rows[1] - rows[0]):
                        copy_run(flat, first + row * size[1] + j // stride[1], patches, start + row * width, width)
                    start += steps[1]


@float_kernel(lambda f: (f[::1], _PAIR, f[:, :, :, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64))
def _fold_wide(patches, steps, dx, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """Add the patches to ``dx``, the transpose of `_unfold_wide`; row 0 zeroes ``dx`` first."""
    count, size = _phases_of(kernel, stride, width, rows)
    count = count[0], 2 if stride[1] == 2 else count[1]  # including one that no place of the kernel reads
    phases = np.empty((count[0], count[1], size[0], size[1]), patches.dtype)
    flat = phases.reshape(-1)
    if rows[0] == 0:
        dx[:] = 0
    for n in range(dx.shape[0]):
        start = n * steps[0]
        for c in range(dx.shape[1]):
            flat[:] = 0
            for i in range(kernel[0]):
                for j in range(kernel[1]):
                    first = ((i % stride[0] * count[1] + j % stride[1]) * size[0] + i // stride[0]) * size[1]
                    for row in range(rows[1] - rows[0]):
                        add_run(patches, start + row * width, flat, first + row * size[1] + j // stride[1], width)
                    start += steps[1]
            _join_plane(phases, dx[n, c], rows[0], stride, padding)


@intrinsic
def _single(typingctx: Any, array: Any, index: Any) -> Any:
    """Load one element: the gather of a vector took a fifth longer on AMD's Zen 4."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0]).data
        index = builder.zext(args[1], ir.IntType(64))
        return builder.load_atomic(builder.gep(data, [index]), "monotonic", signature.return_type.bitwidth // 8)

    return array.dtype(array, types.uint32), generate


@kernel(types.Tuple((_PAIR, numba.uint32[:, ::1]))(_PAIR, _PAIR, _PAIR, _PAIR, _PAIR, numba.int64))
def _samples_read(size, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """Return the samples (first, end) of a plane of ``size`` that output ``rows`` read, and those of each position.

    The latter have the shape ``(places in the kernel, positions)`` and count from the first sample; padding is the end.
    They are unsigned, so that loops need no checks for negative indices.
    """
    top = min(size[0], max(0, rows[0] * stride[0] - padding[0]))
    bottom = max(top, min(size[0], (rows[1] - 1) * stride[0] - padding[0] + kernel[0]))
    samples_read = np.empty((kernel[0] * kernel[1], (rows[1] - rows[0]) * width), np.uint32)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            for y in range(rows[0], rows[1]):
                down = y * stride[0] + i - padding[0]
                for z in range(width):
                    right = z * stride[1] + j - padding[1]
                    inside = 0 <= down < size[0] and 0 <= right < size[1]
                    at = (down if inside else bottom) - top
                    samples_read[i * kernel[1] + j, (y - rows[0]) * width + z] = at * size[1] + (right if inside else 0)
    return (top * size[1], bottom * size[1]), samples_read


@float_kernel(lambda f: (f[:, :, :, ::1], f[::1], _PAIR, _PAIR, _PAIR, _PAIR, _PAIR, numba.int64))
def _unfold_narrow(x, patches, steps, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """Write patches as `_unfold_wide`, sample by sample."""
    (first, end), samples_read = _samples_read(x.shape[2:], rows, kernel, stride, padding, width)
    samples = np.zeros(end - first + 1, patches.dtype)  # the last one is padding
    for n in range(x.shape[0]):
        start = n * steps[0]
        for c in range(x.shape[1]):
            copy_run(x[n, c].reshape(-1), first, samples, 0, end - first)
            for place in range(samples_read.shape[0]):
                at, target = samples_read[place], patches[start : start + samples_read.shape[1]]
                for k in range(at.size):
                    target[k] = _single(samples, at[k])
                start += steps[1]


@kernel(types.Tuple((numba.uint32[::1], numba.uint32[::1]))(numba.uint32[:, ::1], numba.int64, numba.int64))
def _readers(samples_read, samples, step):  # type: ignore[no-untyped-def]
    """Invert `_samples_read`: return lists of the positions in the patches that read each sample, after their bounds.

    Places of the kernel are ``step`` elements apart, which orders each list.
    """
    begins = np.zeros(samples + 2, np.uint32)  # shifted by one; filling the lists moves each to its end
    for at in samples_read.reshape(-1):
        begins[at + 2] += 1
    for k in range(2, begins.size):
        begins[k] += begins[k - 1]
    lists = np.empty(begins[samples + 1], np.uint32)
    for place in range(samples_read.shape[0]):
        for position in range(samples_read.shape[1]):
            at = samples_read[place, position] + 1
            lists[begins[at]] = place * step + position
            begins[at] += 1
    return begins, lists


@float_kernel(lambda f: (f[::1], _PAIR, f[:, :, :, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64))
def _fold_narrow(patches, steps, dx, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """Add the patches to ``dx``, the transpose of `_unfold_narrow`; row 0 zeroes ``dx`` first.

    Each sample is summed in a register, because adding in memory would wait for the store before.
    """
    (first, end), samples_read = _samples_read(dx.shape[2:], rows, kernel, stride, padding, width)
    begins, lists = _readers(samples_read, end - first + 1, steps[1])
    if rows[0] == 0:
        dx[:] = 0
    for n in range(dx.shape[0]):
        start = n * steps[0]
        for c in range(dx.shape[1]):
            source, target = patches[start:], dx[n, c].reshape(-1)[first:end]
            for k in range(target.size):
                total = patches.dtype.type(0)
                for at in lists[begins[k] : begins[k + 1]]:
                    total += _single(source, at)
                target[k] += total
            start += samples_read.shape[0] * steps[1]


class Workspace:
    """Scratch memory for matrices with a column for each position of some images.

    With ``joined`` all images form one matrix ``(rows, images * positions)``, else each image has its own, ``(images,
    rows, positions)``.
    """

    def __init__(self, rows: int, columns: int, dtype: np.dtype, joined: bool) -> None:
        self._rows, self._joined = rows, joined
        self._flat = empty((rows * columns,), dtype)

    def matrices(self, images: int, positions: int) -> np.ndarray:
        """Return the memory in the shape ``(rows, images * positions)`` or ``(images, rows, positions)``."""
        shape = (self._rows, images * positions) if self._joined else (images, self._rows, positions)
        return self.flat(images, positions).reshape(shape)

    def flat(self, images: int, positions: int) -> np.ndarray:
        """Return the same memory along one axis."""
        return self._flat[: self._rows * images * positions]

    def steps(self, images: int, positions: int) -> Pair:
        """Return the elements from one image to the next, and from one row to the next."""
        return (positions, images * positions) if self._joined else (self._rows * positions, positions)


class Shape:
    """The ``kernel``, ``stride`` and ``padding`` of a convolution, and the ``width`` of its results."""

    def __init__(self, weight: np.ndarray, stride: Pair, padding: Pair, width: int) -> None:
        self.kernel: Pair = weight.shape[2:]
        self.stride, self.padding, self.width = stride, padding, width


class Planes:
    """Patches as columns, in the order (channel, kernel row, kernel column) of the weights.

    The methods are those of `ChannelsLast`.
    """

    def __init__(self, x: np.ndarray, weight: np.ndarray, shape: Shape, columns: int, joined: bool) -> None:
        self._weight, self._shape = weight, shape
        self._room = Workspace(weight[0].size, columns, x.dtype, joined)

    def matrix(self) -> np.ndarray:
        """See `ChannelsLast.matrix`."""
        return self._weight.reshape(len(self._weight), -1)

    def sums(self, dweight: np.ndarray) -> np.ndarray:
        """See `ChannelsLast.sums`; returns a view of ``dweight``."""
        return dweight.reshape(len(dweight), -1)

    def finish(self, dweight: np.ndarray, sums: np.ndarray) -> None:
        """Do nothing, because ``sums`` is ``dweight`` itself."""

    def room(self, images: int, rows: Pair) -> np.ndarray:
        """See `ChannelsLast.room`."""
        return self._room.matrices(images, (rows[1] - rows[0]) * self._shape.width)

    def unfold(self, x: np.ndarray, rows: Pair) -> np.ndarray:
        """See `ChannelsLast.unfold`."""
        s, extent = self._shape, (len(x), (rows[1] - rows[0]) * self._shape.width)
        unfold = _unfold_narrow if s.width < _NARROW else _unfold_wide
        unfold(x, self._room.flat(*extent), self._room.steps(*extent), rows, s.kernel, s.stride, s.padding, s.width)
        return self._room.matrices(*extent)

    def fold(self, dx: np.ndarray, rows: Pair) -> None:
        """See `ChannelsLast.fold`."""
        s, extent = self._shape, (len(dx), (rows[1] - rows[0]) * self._shape.width)
        fold = _fold_narrow if s.width < _NARROW else _fold_wide
        fold(self._room.flat(*extent), self._room.steps(*extent), dx, rows, s.kernel, s.stride, s.padding, s.width)


@float_kernel(lambda f: (f[:, :, :, ::1], f[:, :, ::1], f[:, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64))
def _unfold_channels_last(x, image, patches, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """Write the patches of output ``rows`` (first, end), each ``width`` positions, of the images ``x``.

    ``image`` is memory for one padded image with channels last; only the lines that the rows read are written.
    """
    run = kernel[1] * x.shape[1]
    flat, wide, target = image.reshape(-1), image.shape[1] * image.shape[2], patches.reshape(-1)
    above, below = rows[0] * stride[0], (rows[1] - 1) * stride[0] + kernel[0]
    start = 0
    for n in range(x.shape[0]):
        image[above:below] = 0
        for y in range(max(0, above - padding[0]), min(x.shape[2], below - padding[0])):
            line = image[y + padding[0], padding[1] : padding[1] + x.shape[3]]
            for c in range(x.shape[1]):
                for z in range(x.shape[3]):
                    line[z, c] = x[n, c, y, z]
        for y in range(rows[0], rows[1]):
            for z in range(width):
                first = y * stride[0] * wide + z * stride[1] * x.shape[1]
                for i in range(kernel[0]):
                    copy_run(flat, first + i * wide, target, start, run)
                    start += run


@float_kernel(lambda f: (f[:, ::1], f[:, :, ::1], f[:, :, :, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64))
def _fold_channels_last(patches, image, dx, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """Add the patches to ``dx``, the transpose of `_unfold_channels_last`; row 0 zeroes ``dx`` first."""
    run = kernel[1] * dx.shape[1]
    flat, wide, source = image.reshape(-1), image.shape[1] * image.shape[2], patches.reshape(-1)
    above, below = rows[0] * stride[0], (rows[1] - 1) * stride[0] + kernel[0]
    if rows[0] == 0:
        dx[:] = 0
    start = 0
    for n in range(dx.shape[0]):
        image[above:below] = 0
        for y in range(rows[0], rows[1]):
            for z in range(width):
                first = y * stride[0] * wide + z * stride[1] * dx.shape[1]
                for i in range(kernel[0]):
                    add_run(source, start, flat, first + i * wide, run)
                    start += run
        for y in range(max(0, above - padding[0]), min(dx.shape[2], below - padding[0])):
            line = image[y + padding[0], padding[1] : padding[1] + dx.shape[3]]
            for c in range(dx.shape[1]):
                for z in range(dx.shape[3]):
                    dx[n, c, y, z] += line[z, c]


class ChannelsLast:
    """Patches as rows, in the order (kernel row, kernel column, channel).

    Args:
        x: the images.
        weight: the weights.
        shape: the convolution.
        columns: capacity in patches.
        joined: as for `Workspace`.
    """

    def __init__(self, x: np.ndarray, weight: np.ndarray, shape: Shape, columns: int, joined: bool) -> None:
        self._weight, self._shape, self._joined = weight, shape, joined
        self._patches = empty((columns, weight[0].size), x.dtype)
        top, left = shape.padding
        self._image = empty((x.shape[2] + 2 * top, x.shape[3] + 2 * left, x.shape[1]), x.dtype)

    def matrix(self) -> np.ndarray:
        """Return the weights as a matrix of shape ``(out, depth)``."""
        return np.ascontiguousarray(self._weight.transpose(0, 2, 3, 1)).reshape(len(self._weight), -1)

    def sums(self, dweight: np.ndarray) -> np.ndarray:
        """Return an array in which to sum the gradient of `matrix` for `finish`."""
        return empty((len(dweight), self._patches.shape[1]), dweight.dtype)

    def finish(self, dweight: np.ndarray, sums: np.ndarray) -> None:
        """Copy ``sums`` to ``dweight`` in the order of the weights."""
        outputs, inputs = dweight.shape[:2]
        dweight[...] = sums.reshape(outputs, *self._shape.kernel, inputs).transpose(0, 3, 1, 2)

    def room(self, images: int, rows: Pair) -> np.ndarray:
        """Return memory for the output ``rows`` (first, end) of ``images`` images, see `Workspace`; `fold` adds it."""
        patches = self._rows(images, rows)
        return patches.T if self._joined else patches.reshape(images, -1, patches.shape[1]).swapaxes(1, 2)

    def _rows(self, images: int, rows: Pair) -> np.ndarray:
        return self._patches[: images * (rows[1] - rows[0]) * self._shape.width]

    def unfold(self, x: np.ndarray, rows: Pair) -> np.ndarray:
        """Return the patches of the images ``x``, in `room`."""
        s, patches = self._shape, self._rows(len(x), rows)
        _unfold_channels_last(x, self._image, patches, rows, s.kernel, s.stride, s.padding, s.width)
        return self.room(len(x), rows)

    def fold(self, dx: np.ndarray, rows: Pair) -> None:
        """Add `room` to ``dx``; row 0 zeroes ``dx`` first."""
        s, patches = self._shape, self._rows(len(dx), rows)
        _fold_channels_last(patches, self._image, dx, rows, s.kernel, s.stride, s.padding, s.width)


_BLOCK_NBYTES = 512 * 1024
_BLOCK_POSITIONS = 512
"""Least output positions of a block: with fewer, reading a deep layer's weights costs too much."""
_OWN_PRODUCT_POSITIONS = 256
"""Positions from which each image has its own product; smaller products would read the weights too often."""
_SHALLOW, _FEWEST_CHANNELS = range(16, 65), 16
"""Depths, and least output channels, for which the product with patches as columns is slow."""


@float_kernel(lambda f: (f[::1], _TRIPLE, f[::1], numba.boolean, f[:, :, ::1], _PAIR))
def _finish(product, steps, bias, relu, out, span):  # type: ignore[no-untyped-def]
    """Apply bias and ReLU on the way from ``product`` to ``out``.

    ``steps`` are the elements of ``product`` between images, channels and positions. ``out`` is (images, channels,
    positions), of which the block covers the positions ``span`` (first, end).
    """
    zero = out.dtype.type(0)
    size = span[1] - span[0]
    line = np.empty(size, out.dtype)  # copy of a strided plane, so that loops vectorize
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
    # A reassociated loop must not store: it would be vectorized only if its arrays are far enough apart, which changes
    # the order of the sum, and so its last bits, from call to call.
    total = x.dtype.type(0)
    for i in range(x.size):
        total += x[i]
    return total


@float_kernel(lambda f: (f[:, :, ::1], f[:, :, ::1], f[::1], _PAIR, f[::1], _PAIR))
def _gather_through_relu(gy, out, g, steps, dbias, span):  # type: ignore[no-untyped-def]
    """Write the gradient before ReLU over ``span`` to ``g``, a product with ``steps``; add its sums to ``dbias``."""
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


@float_kernel(lambda f: (f[:, :, ::1], f[::1], _PAIR, f[::1], _PAIR))
def _gather(gy, g, steps, dbias, span):  # type: ignore[no-untyped-def]
    """Write the gradient as `_gather_through_relu`, without ReLU."""
    size = span[1] - span[0]
    for n in range(gy.shape[0]):
        for c in range(gy.shape[1]):
            at = n * steps[0] + c * steps[1]
            source, target = gy[n, c, span[0] : span[1]], g[at : at + size]
            for i in range(size):
                target[i] = source[i]
            dbias[c] += _total(target)


class _Unfolded(NamedTuple):
    """Images and output rows that are unfolded together."""

    images: slice
    rows: Pair
    span: Pair
    """The positions of ``rows`` in a plane."""
    extent: Pair
    """Number of images, and of positions of each."""


class _UnfoldedBlocks:
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
        """True if one product covers all images of a block, else each image has its own, written in place."""
        self.patches: ChannelsLast | Planes
        shallow = unfolds_alone and depth in _SHALLOW and self._channels >= _FEWEST_CHANNELS
        if shape.kernel != (1, 1) and (shallow or (self.joined and self._batch * plane >= self._channels)):
            self.patches = ChannelsLast(x, weight, shape, columns, self.joined)
        else:
            self.patches = Planes(x, weight, shape, columns, self.joined)
        self.product = Workspace(self._channels, columns, x.dtype, self.joined)

    def __iter__(self) -> Iterator[_Unfolded]:
        """Yield all blocks; the rows of an image from the first to the last."""
        for first in range(0, self._batch, self._images_at_once):
            last = min(first + self._images_at_once, self._batch)
            for top in range(0, self._height, self._rows_at_once):
                bottom = min(top + self._rows_at_once, self._height)
                span = top * self._width, bottom * self._width
                yield _Unfolded(slice(first, last), (top, bottom), span, (last - first, span[1] - span[0]))

    def scratch(self, extent: Pair) -> tuple[np.ndarray, np.ndarray, tuple[int, int, int]]:
        """Return memory for the product of some images and positions: as matrices, flat, and its steps.

        Patches as rows are multiplied faster if the product, too, has its positions as rows.
        """
        flat = self.product.flat(*extent)
        if isinstance(self.patches, ChannelsLast) and self.joined:
            return flat.reshape(-1, self._channels).T, flat, (extent[1] * self._channels, 1, self._channels)
        return self.product.matrices(*extent), flat, (*self.product.steps(*extent), 1)

    def planes(self, images: np.ndarray) -> np.ndarray:
        """Return results or their gradients with the positions along one axis."""
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
    """See `reference.conv2d`."""
    blocks = _UnfoldedBlocks(x, weight, out, stride, padding, unfolds_alone=False)
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
    """Add ``g @ patches.T``, summed over all images, to ``sums``; the first product overwrites them."""
    if is_first and g.ndim == 2:
        multiply(g, patches.T, sums)
        return
    product = empty((*g.shape[:-1], patches.shape[-2]), g.dtype)
    multiply(g, patches.swapaxes(-1, -2), product)
    if is_first:
        sums[...] = 0
    for term in product if product.ndim == 3 else product[None]:
        sums += term


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
    blocks = _UnfoldedBlocks(x, weight, gy, stride, padding, unfolds_alone=dx is None)
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
