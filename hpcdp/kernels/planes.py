"""Patches as columns, of images in the order they have.

A place of the kernel sees runs of samples side by side once a plane is parted by the stride (its polyphase
components). Where such runs are short, single samples are picked by a table, the same for all channels and images.
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
from .machine_code import kernel
from .runs import add_both, add_run, copy_run, copy_strided

_FLOATS = (numba.float32, numba.float64)
_PAIR = numba.types.UniTuple(numba.int64, 2)
_NARROW = 8
"""Results a row below which their samples are picked one by one."""

Pair = tuple[int, int]


@kernel(numba.types.Tuple((_PAIR, _PAIR))(_PAIR, _PAIR, numba.int64, _PAIR))
def _phases_of(kernel, stride, width, rows):  # type: ignore[no-untyped-def]
    """How many polyphase components of a plane a kernel sees, and what size they have, for some output ``rows``.

    The component (a, b) has the samples (stride[0] u + a, stride[1] v + b) of the padded plane, from the first one
    that the rows see, so that each place of the kernel sees runs of ``width`` samples side by side.
    """
    count = min(kernel[0], stride[0]), min(kernel[1], stride[1])
    high = (kernel[0] - 1) // stride[0] + rows[1] - rows[0]
    return count, (high, (kernel[1] - 1) // stride[1] + width)


@numba.njit(inline="always")
def _inside(b, stride, padding, width, wide):  # type: ignore[no-untyped-def]
    """Of a row ``wide`` of the component ``b`` what lies in a line of ``width``: (first, end), and where first lies."""
    first = max(0, (padding - b + stride - 1) // stride)
    end = max(first, min(wide, (width - 1 - b + padding) // stride + 1))
    return first, end, first * stride + b - padding


@kernel([numba.void(f[:, ::1], f[:, :, :, ::1], numba.int64, _PAIR, _PAIR) for f in _FLOATS])
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
                copy_strided(source, y * width + at, stride[1], target, row + u * wide + left, right - left)
                y += stride[0]


@kernel([numba.void(f[:, :, :, ::1], f[:, ::1], numba.int64, _PAIR, _PAIR) for f in _FLOATS])
def _join_plane(phases, plane, top, stride, padding):  # type: ignore[no-untyped-def]
    """The transpose of `_part_plane`: add the ``phases`` to the ``plane``."""
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


@kernel(
    [numba.void(f[:, :, :, ::1], f[::1], _PAIR, _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
)
def _unfold_wide(x, patches, steps, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """Write the patches of some output ``rows`` (first, end) of the images ``x``.

    They lie by (channel, kernel row, kernel column), a run of all positions for each image; ``steps`` are the elements
    from one image's run to the next's, and from one row of the matrix to the next.
    """
    count, size = _phases_of(kernel, stride, width, rows)
    phases = np.zeros((count[0], count[1], size[0], size[1]), patches.dtype)
    flat = phases.reshape(-1)
    for n in range(x.shape[0]):
        start = n * steps[0]
        for c in range(x.shape[1]):
            if kernel == (1, 1) and padding == (0, 0):  # all that is seen of the plane is the patch
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


@kernel(
    [numba.void(f[::1], _PAIR, f[:, :, :, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
)
def _fold_wide(patches, steps, dx, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """The transpose of `_unfold_wide`: add the patches to ``dx``, which starts from zero with row 0."""
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
                        add_run(patches, start + row * width, flat, first + row * size[1] + j // stride[1], width)
                    start += steps[1]
            _join_plane(phases, dx[n, c], rows[0], stride, padding)


@intrinsic
def _single(typingctx: Any, array: Any, index: Any) -> Any:
    """An element, by a load of its own: what gathers a vector at once took a fifth longer on AMD's Zen 4."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0]).data
        index = builder.zext(args[1], ir.IntType(64))
        return builder.load_atomic(builder.gep(data, [index]), "monotonic", signature.return_type.bitwidth // 8)

    return array.dtype(array, types.uint32), generate


@kernel(types.Tuple((_PAIR, numba.uint32[:, ::1]))(_PAIR, _PAIR, _PAIR, _PAIR, _PAIR, numba.int64))
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


@kernel(
    [numba.void(f[:, :, :, ::1], f[::1], _PAIR, _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
)
def _unfold_narrow(x, patches, steps, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """As `_unfold_wide`."""
    (first, end), seen = _seen(x.shape[2:], rows, kernel, stride, padding, width)
    samples = np.zeros(end - first + 1, patches.dtype)  # the last one being padding
    for n in range(x.shape[0]):
        start = n * steps[0]
        for c in range(x.shape[1]):
            copy_run(x[n, c].reshape(-1), first, samples, 0, end - first)
            for place in range(seen.shape[0]):
                at, target = seen[place], patches[start : start + seen.shape[1]]
                for k in range(at.size):
                    target[k] = _single(samples, at[k])
                start += steps[1]


@kernel(types.Tuple((numba.uint32[::1], numba.uint32[::1]))(numba.uint32[:, ::1], numba.int64, numba.int64))
def _seeing(seen, samples, step):  # type: ignore[no-untyped-def]
    """What of the patches sees each of so many samples, by `_seen`: where the lists of them begin, and all of them.

    They lie ``step`` elements apart from one place of the kernel to the next, by which each list is in order.
    """
    begins = np.zeros(samples + 2, np.uint32)  # counted one further on, until each has come to where its list ends
    for at in seen.reshape(-1):
        begins[at + 2] += 1
    for k in range(2, begins.size):
        begins[k] += begins[k - 1]
    lists = np.empty(begins[samples + 1], np.uint32)
    for place in range(seen.shape[0]):
        for position in range(seen.shape[1]):
            at = seen[place, position] + 1
            lists[begins[at]] = place * step + position
            begins[at] += 1
    return begins, lists


@kernel(
    [numba.void(f[::1], _PAIR, f[:, :, :, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
)
def _fold_narrow(patches, steps, dx, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """The transpose of `_unfold_narrow`: add the patches to ``dx``, which starts from zero with row 0.

    Each sample's are added up in a register: what is added to memory is read again before it is there.
    """
    (first, end), seen = _seen(dx.shape[2:], rows, kernel, stride, padding, width)
    begins, lists = _seeing(seen, end - first + 1, steps[1])
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
            start += seen.shape[0] * steps[1]


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


class Planes:
    """Patches as columns, in the order (channel, kernel row, kernel column), which is that of the weights.

    The methods are those of `patches.ChannelsLast`.
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
        unfold = _unfold_narrow if s.width < _NARROW else _unfold_wide
        unfold(x, self._room.flat(*extent), self._room.steps(*extent), rows, s.kernel, s.stride, s.padding, s.width)
        return self._room.matrices(*extent)

    def fold(self, dx: np.ndarray, rows: Pair) -> None:
        s, extent = self._shape, (len(dx), (rows[1] - rows[0]) * self._shape.width)
        fold = _fold_narrow if s.width < _NARROW else _fold_wide
        fold(self._room.flat(*extent), self._room.steps(*extent), dx, rows, s.kernel, s.stride, s.padding, s.width)
