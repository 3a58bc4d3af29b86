"""Floor 0: the patches of images that a convolution sees (im2col), unfolded and folded. Imports: numba, buffers.

Two layouts, as Georganas et al. ("Anatomy of high-performance deep learning convolutions", 2018) discuss them.
`ChannelsLast` moves runs of ``kernel width * channels`` elements, but has to bring images and weights into that order.
`Planes` leaves all in the order it has and picks single samples by a table, the same for all channels and images.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .buffers import empty

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}
_FLOATS = (numba.float32, numba.float64)
_PAIR = numba.types.UniTuple(numba.int64, 2)

Pair = tuple[int, int]


@numba.njit(
    [numba.void(f[:, :, :, ::1], f[:, :, ::1], f[:, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
    **_OPTIONS,
)
def _unfold_channels_last(x, image, patches, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """Write the patches of some output ``rows`` (first, end), each ``width`` positions, of the images ``x``.

    ``image`` is room for one padded image with channels last, of which only the lines that the rows see are written.
    """
    run = kernel[1] * x.shape[1]
    flat = image.reshape(image.shape[0], -1)
    above, below = rows[0] * stride[0], (rows[1] - 1) * stride[0] + kernel[0]
    row = 0
    for n in range(x.shape[0]):
        image[above:below] = 0
        for y in range(max(0, above - padding[0]), min(x.shape[2], below - padding[0])):
            line = image[y + padding[0], padding[1] : padding[1] + x.shape[3]]
            for c in range(x.shape[1]):
                for z in range(x.shape[3]):
                    line[z, c] = x[n, c, y, z]
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
def _fold_channels_last(patches, image, dx, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """The transpose of `_unfold_channels_last`: add the patches to ``dx``, which starts from zero with row 0."""
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
        for y in range(max(0, above - padding[0]), min(dx.shape[2], below - padding[0])):
            line = image[y + padding[0], padding[1] : padding[1] + dx.shape[3]]
            for c in range(dx.shape[1]):
                for z in range(dx.shape[3]):
                    dx[n, c, y, z] += line[z, c]


@intrinsic
def _single(typingctx: Any, array: Any, index: Any) -> Any:
    """An element, by a load of its own: what gathers a vector at once took a fifth longer on AMD's Zen 4."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0]).data
        index = builder.zext(args[1], ir.IntType(64))
        return builder.load_atomic(builder.gep(data, [index]), "monotonic", signature.return_type.bitwidth // 8)

    return array.dtype(array, types.uint32), generate


@numba.njit(types.Tuple((_PAIR, numba.uint32[:, ::1]))(_PAIR, _PAIR, _PAIR, _PAIR, _PAIR, numba.int64), **_OPTIONS)
def _seen(size, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """What samples the output ``rows`` see of a plane of ``size``, as (first, end), and which each position sees.

    The latter has the shape ``(places in the kernel, positions)`` and counts from the first one on; padding is the end.
    Unsigned, so that no index may be negative: only then the loops need not look.
    """
    top = min(size[0], max(0, rows[0] * stride[0] - padding[0]))
    bottom = max(top, min(size[0], (rows[1] - 1) * stride[0] - padding[0] + kernel[0]))
    seen = np.empty((kernel[0] * kernel[1], (rows[1] - rows[0]) * width), np.uint32)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            for y in range(rows[0], rows[1]):
                down = y * stride[0] + i - padding[0]
                for z in range(width):
                    right = z * stride[1] + j - padding[1]
                    inside = 0 <= down < size[0] and 0 <= right < size[1]
                    at = (down if inside else bottom) - top
                    seen[i * kernel[1] + j, (y - rows[0]) * width + z] = at * size[1] + (right if inside else 0)
    return (top * size[1], bottom * size[1]), seen


@numba.njit(
    [numba.void(f[:, :, :, ::1], f[::1], _PAIR, _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
    **_OPTIONS,
)
def _unfold_planes(x, patches, steps, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """As `_unfold_channels_last`, by (channel, kernel row, kernel column), a run of all positions for each image.

    ``steps`` are the elements from one image's run to the next's, and from one row of the matrix to the next.
    """
    (first, end), seen = _seen(x.shape[2:], rows, kernel, stride, padding, width)
    samples = np.zeros(end - first + 1, patches.dtype)  # the last one being padding
    for n in range(x.shape[0]):
        start = n * steps[0]
        for c in range(x.shape[1]):
            samples[: end - first] = x[n, c].reshape(-1)[first:end]
            for place in range(seen.shape[0]):
                at, target = seen[place], patches[start : start + seen.shape[1]]
                for k in range(at.size):
                    target[k] = _single(samples, at[k])
                start += steps[1]


@numba.njit(
    [numba.void(f[::1], _PAIR, f[:, :, :, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
    **_OPTIONS,
)
def _fold_planes(patches, steps, dx, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """The transpose of `_unfold_planes`: add the patches to ``dx``, which starts from zero with row 0."""
    (first, end), seen = _seen(dx.shape[2:], rows, kernel, stride, padding, width)
    sums = np.empty(end - first + 1, patches.dtype)
    if rows[0] == 0:
        dx[:] = 0
    for n in range(dx.shape[0]):
        start = n * steps[0]
        for c in range(dx.shape[1]):
            sums[:] = 0
            for place in range(seen.shape[0]):
                at, source = seen[place], patches[start : start + seen.shape[1]]
                for k in range(at.size):
                    sums[at[k]] += source[k]
                start += steps[1]
            target = dx[n, c].reshape(-1)[first:end]
            for k in range(target.size):
                target[k] += sums[k]


class Room:
    """Scratch memory for matrices with a column for each position of some images.

    Those of all images lie side by side, ``joined``, as one matrix ``(rows, images * positions)``, or each image has
    a matrix of its own, ``(images, rows, positions)``.
    """

    def __init__(self, rows: int, columns: int, dtype: np.dtype, joined: bool) -> None:
        self._rows, self._joined = rows, joined
        self._flat = empty((rows * columns,), dtype)

    def matrices(self, images: int, positions: int) -> np.ndarray:
        """Shape ``(rows, images * positions)`` or ``(images, rows, positions)``."""
        shape = (self._rows, images * positions) if self._joined else (images, self._rows, positions)
        return self.flat(images, positions).reshape(shape)

    def flat(self, images: int, positions: int) -> np.ndarray:
        """The same memory along one axis."""
        return self._flat[: self._rows * images * positions]

    def steps(self, images: int, positions: int) -> Pair:
        """Elements from one image to the next, and from one row to the next."""
        return (positions, images * positions) if self._joined else (self._rows * positions, positions)


class Shape:
    """What a convolution's ``kernel``, ``stride`` and ``padding`` are, and the ``width`` of its results."""

    def __init__(self, weight: np.ndarray, stride: Pair, padding: Pair, width: int) -> None:
        self.kernel: Pair = weight.shape[2:]
        self.stride, self.padding, self.width = stride, padding, width


class ChannelsLast:
    """Patches as rows, in the order (kernel row, kernel column, channel).

    Args:
        columns: how many patches there is room for.
    """

    def __init__(self, x: np.ndarray, weight: np.ndarray, shape: Shape, columns: int) -> None:
        self._weight, self._shape = weight, shape
        self._patches = empty((columns, weight[0].size), x.dtype)
        top, left = shape.padding
        self._image = empty((x.shape[2] + 2 * top, x.shape[3] + 2 * left, x.shape[1]), x.dtype)

    def matrix(self) -> np.ndarray:
        """The weights as a matrix of shape ``(out, depth)``."""
        return np.ascontiguousarray(self._weight.transpose(0, 2, 3, 1)).reshape(len(self._weight), -1)

    def sums(self, dweight: np.ndarray) -> np.ndarray:
        """Where to sum up the gradient of `matrix` for `finish`."""
        return empty((len(dweight), self._patches.shape[1]), dweight.dtype)

    def finish(self, dweight: np.ndarray, sums: np.ndarray) -> None:
        """Bring ``sums`` into the order of the weights."""
        outputs, inputs = dweight.shape[:2]
        dweight[...] = sums.reshape(outputs, *self._shape.kernel, inputs).transpose(0, 3, 1, 2)

    def room(self, images: int, rows: Pair) -> np.ndarray:
        """Of the output ``rows`` (first, end) of so many images, shape ``(depth, columns)``; `fold` adds it."""
        return self._patches[: images * (rows[1] - rows[0]) * self._shape.width].T

    def unfold(self, x: np.ndarray, rows: Pair) -> np.ndarray:
        """The patches of the images ``x``, in `room`."""
        s, patches = self._shape, self.room(len(x), rows)
        _unfold_channels_last(x, self._image, patches.T, rows, s.kernel, s.stride, s.padding, s.width)
        return patches

    def fold(self, dx: np.ndarray, rows: Pair) -> None:
        """Add what stands in `room` to ``dx``, which starts from zero with row 0."""
        s, patches = self._shape, self.room(len(dx), rows)
        _fold_channels_last(patches.T, self._image, dx, rows, s.kernel, s.stride, s.padding, s.width)


class Planes:
    """Patches as columns, in the order (channel, kernel row, kernel column), which is that of the weights.

    The methods are those of `ChannelsLast`, but that matrices are those of `Room`.
    """

    def __init__(self, x: np.ndarray, weight: np.ndarray, shape: Shape, columns: int, joined: bool) -> None:
        self._weight, self._shape = weight, shape
        self._room = Room(weight[0].size, columns, x.dtype, joined)

    def matrix(self) -> np.ndarray:
        return self._weight.reshape(len(self._weight), -1)

    def sums(self, dweight: np.ndarray) -> np.ndarray:
        return dweight.reshape(len(dweight), -1)

    def finish(self, dweight: np.ndarray, sums: np.ndarray) -> None:
        """They are ``dweight`` itself."""

    def room(self, images: int, rows: Pair) -> np.ndarray:
        return self._room.matrices(images, (rows[1] - rows[0]) * self._shape.width)

    def unfold(self, x: np.ndarray, rows: Pair) -> np.ndarray:
        s, extent = self._shape, (len(x), (rows[1] - rows[0]) * self._shape.width)
        _unfold_planes(
            x, self._room.flat(*extent), self._room.steps(*extent), rows, s.kernel, s.stride, s.padding, s.width
        )
        return self._room.matrices(*extent)

    def fold(self, dx: np.ndarray, rows: Pair) -> None:
        s, extent = self._shape, (len(dx), (rows[1] - rows[0]) * self._shape.width)
        _fold_planes(
            self._room.flat(*extent), self._room.steps(*extent), dx, rows, s.kernel, s.stride, s.padding, s.width
        )
