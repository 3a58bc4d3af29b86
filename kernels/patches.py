"""Floor 0: the patches of images that a convolution sees (im2col), unfolded and folded. Imports: numba, buffers,
lanes.

Two layouts, as Georganas et al. ("Anatomy of high-performance deep learning convolutions", 2018) discuss them.
`ChannelsLast` moves runs of ``kernel width * channels`` elements, but has to bring images and weights into that order.
`Planes` leaves all in the order it has and moves runs of a row's results, of planes that are parted by the stride.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .buffers import empty
from .lanes import WORD, Lanes

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}
_FLOATS = (numba.float32, numba.float64)
_PAIR = numba.types.UniTuple(numba.int64, 2)
_EIGHT = 8

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
def _copy_eight(context: Any, source: Any, first: Any, target: Any, start: Any) -> Any:
    """Copy eight elements of one flat array, from an index on, to another's."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        read, write = _lanes(context, builder, signature, args)
        write(0).store(read(0).load())
        return context.get_dummy_value()

    return types.none(source, types.intp, target, types.intp), generate


@intrinsic
def _add_eight(context: Any, source: Any, first: Any, target: Any, start: Any) -> Any:
    """As `_copy_eight`, but add them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        read, write = _lanes(context, builder, signature, args)
        write(0).store(builder.fadd(write(0).load(), read(0).load()))
        return context.get_dummy_value()

    return types.none(source, types.intp, target, types.intp), generate


@intrinsic
def _copy_every_other(context: Any, source: Any, first: Any, target: Any, start: Any) -> Any:
    """As `_copy_eight`, of fifteen elements every second."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        read, write = _lanes(context, builder, signature, args)
        chosen = ir.Constant(ir.VectorType(WORD, _EIGHT), [0, 2, 4, 6, 9, 11, 13, 15])
        write(0).store(builder.shuffle_vector(read(0).load(), read(_EIGHT - 1).load(), chosen))
        return context.get_dummy_value()

    return types.none(source, types.intp, target, types.intp), generate


@intrinsic
def _add_in_turn(context: Any, source: Any, first: Any, other: Any, target: Any, start: Any) -> Any:
    """Add sixteen elements, in turn one of the eight from ``first`` on and one of those from ``other`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = partial(Lanes, context, builder)
        one, two = (lanes((signature.args[0], args[0]), args[k], _EIGHT).load() for k in (1, 2))
        into = lanes((signature.args[3], args[3]), args[4], 2 * _EIGHT)
        in_turn = [lane // 2 + lane % 2 * _EIGHT for lane in range(2 * _EIGHT)]
        both = builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(WORD, 2 * _EIGHT), in_turn))
        into.store(builder.fadd(into.load(), both))
        return context.get_dummy_value()

    return types.none(source, types.intp, types.intp, target, types.intp), generate


def _lanes(context: Any, builder: Any, signature: Any, args: Any) -> tuple[Any, Any]:
    """Eight elements of the source and the target, from so many after the given index on."""

    def of(array: int) -> Any:
        def at(offset: int) -> Lanes:
            index = builder.add(args[array + 1], args[array + 1].type(offset))
            return Lanes(context, builder, (signature.args[array], args[array]), index, _EIGHT)

        return at

    return of(0), of(2)


@numba.njit(inline="always", **_OPTIONS)
def _copy_run(source, first, target, start, size):  # type: ignore[no-untyped-def]
    """Runs are short, so a loop's compiler would leave most of them to single elements."""
    if size < _EIGHT:
        for k in range(size):
            target[start + k] = source[first + k]
        return
    for k in range(0, size - _EIGHT, _EIGHT):
        _copy_eight(source, first + k, target, start + k)
    _copy_eight(source, first + size - _EIGHT, target, start + size - _EIGHT)  # of which some were copied before


@numba.njit(inline="always", **_OPTIONS)
def _add_run(source, first, target, start, size):  # type: ignore[no-untyped-def]
    whole = size - size % _EIGHT
    for k in range(0, whole, _EIGHT):
        _add_eight(source, first + k, target, start + k)
    for k in range(whole, size):
        target[start + k] += source[first + k]


@numba.njit(inline="always", **_OPTIONS)
def _copy_strided(source, first, stride, target, start, size):  # type: ignore[no-untyped-def]
    if stride == 1:
        _copy_run(source, first, target, start, size)
        return
    whole = size - size % _EIGHT if stride == 2 else 0
    for k in range(0, whole, _EIGHT):
        _copy_every_other(source, first + 2 * k, target, start + k)
    for k in range(whole, size):
        target[start + k] = source[first + stride * k]


@numba.njit(numba.types.Tuple((_PAIR, _PAIR))(_PAIR, _PAIR, numba.int64, _PAIR), **_OPTIONS)
def _phases_of(kernel, stride, width, rows):  # type: ignore[no-untyped-def]
    """How many polyphase components of a plane a kernel sees, and what size they have, for some output ``rows``.

    The component (a, b) has the samples (stride[0] u + a, stride[1] v + b) of the padded plane, from the first one
    that the rows see, so that each place of the kernel sees runs of ``width`` samples side by side.
    """
    count = min(kernel[0], stride[0]), min(kernel[1], stride[1])
    high = (kernel[0] - 1) // stride[0] + rows[1] - rows[0]
    return count, (high, (kernel[1] - 1) // stride[1] + width)


@numba.njit(inline="always", **_OPTIONS)
def _inside(b, stride, padding, width, wide):  # type: ignore[no-untyped-def]
    """Of a row ``wide`` of the component ``b`` what lies in a line of ``width``: (first, end), and where first lies."""
    first = max(0, (padding - b + stride - 1) // stride)
    end = max(first, min(wide, (width - 1 - b + padding) // stride + 1))
    return first, end, first * stride + b - padding


@numba.njit([numba.void(f[:, ::1], f[:, :, :, ::1], numba.int64, _PAIR, _PAIR) for f in _FLOATS], **_OPTIONS)
def _part_plane(plane, phases, top, stride, padding):  # type: ignore[no-untyped-def]
    """Write what lies in the ``plane`` to its ``phases``, from the output row ``top`` on; the rest stays as it is."""
    source, target = plane.reshape(-1), phases.reshape(-1)
    width, (high, wide) = plane.shape[1], phases.shape[2:]
    for b in range(phases.shape[1]):
        left, right, at = _inside(b, stride[1], padding[1], width, wide)
        for a in range(phases.shape[0]):
            above, below, y = _inside(a, stride[0], padding[0] - top * stride[0], plane.shape[0], high)
            row = (a * phases.shape[1] + b) * high * wide
            for u in range(above, below):
                _copy_strided(source, y * width + at, stride[1], target, row + u * wide + left, right - left)
                y += stride[0]


@numba.njit(inline="always", **_OPTIONS)
def _add_both(source, even, odd, wide, target, line, width, padding):  # type: ignore[no-untyped-def]
    """Add rows of both components to a line of the plane, whose first sample is one of the even's or of the odd's."""
    first, other = (odd, even) if padding % 2 else (even, odd)
    first += (padding + 1) // 2 - padding % 2
    other += (padding + 1) // 2
    seen = min(width, 2 * wide - padding)
    whole = seen - seen % (2 * _EIGHT)
    for x in range(0, whole, 2 * _EIGHT):
        _add_in_turn(source, first + x // 2, other + x // 2, target, line + x)
    for x in range(whole, seen):
        target[line + x] += source[(other if x % 2 else first) + x // 2]


@numba.njit([numba.void(f[:, :, :, ::1], f[:, ::1], numba.int64, _PAIR, _PAIR) for f in _FLOATS], **_OPTIONS)
def _join_plane(phases, plane, top, stride, padding):  # type: ignore[no-untyped-def]
    """The transpose of `_part_plane`: add the ``phases`` to the ``plane``."""
    source, target = phases.reshape(-1), plane.reshape(-1)
    width, (high, wide) = plane.shape[1], phases.shape[2:]
    for a in range(phases.shape[0]):
        above, below, y = _inside(a, stride[0], padding[0] - top * stride[0], plane.shape[0], high)
        for u in range(above, below):
            row = (a * phases.shape[1] * high + u) * wide
            if stride[1] == 2:
                _add_both(source, row, row + high * wide, wide, target, y * width, width, padding[1])
            else:
                for b in range(phases.shape[1]):
                    left, right, at = _inside(b, stride[1], padding[1], width, wide)
                    for v in range(right - left):
                        target[y * width + at + stride[1] * v] += source[row + b * high * wide + left + v]
            y += stride[0]


@numba.njit(
    [numba.void(f[:, :, :, ::1], f[::1], _PAIR, _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
    **_OPTIONS,
)
def _unfold_planes(x, patches, steps, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """As `_unfold_channels_last`, by (channel, kernel row, kernel column), a run of all positions for each image.

    ``steps`` are the elements from one image's run to the next's, and from one row of the matrix to the next.
    """
    count, size = _phases_of(kernel, stride, width, rows)
    phases = np.zeros((count[0], count[1], size[0], size[1]), patches.dtype)
    flat = phases.reshape(-1)
    for n in range(x.shape[0]):
        start = n * steps[0]
        for c in range(x.shape[1]):
            _part_plane(x[n, c], phases, rows[0], stride, padding)
            for i in range(kernel[0]):
                for j in range(kernel[1]):
                    first = ((i % stride[0] * count[1] + j % stride[1]) * size[0] + i // stride[0]) * size[1]
                    for row in range(rows[1] - rows[0]):
                        _copy_run(flat, first + row * size[1] + j // stride[1], patches, start + row * width, width)
                    start += steps[1]


@numba.njit(
    [numba.void(f[::1], _PAIR, f[:, :, :, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
    **_OPTIONS,
)
def _fold_planes(patches, steps, dx, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """The transpose of `_unfold_planes`: add the patches to ``dx``, which starts from zero with row 0."""
    count, size = _phases_of(kernel, stride, width, rows)
    count = count[0], 2 if stride[1] == 2 else count[1]  # also one that no place of the kernel sees
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
                        _add_run(patches, start + row * width, flat, first + row * size[1] + j // stride[1], width)
                    start += steps[1]
            _join_plane(phases, dx[n, c], rows[0], stride, padding)


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
