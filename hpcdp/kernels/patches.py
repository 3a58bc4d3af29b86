"""The patches of images that a convolution sees (im2col), unfolded and folded.

Two layouts, as Georganas et al. ("Anatomy of high-performance deep learning convolutions", 2018) discuss them.
`ChannelsLast` moves runs of ``kernel width * channels`` elements, but has to bring images and weights into that order.
`planes.Planes` leaves all in the order it has.
"""

from __future__ import annotations

import numba
import numpy as np

from .buffers import empty
from .machine_code import kernel
from .planes import Shape
from .runs import add_run, copy_run

_FLOATS = (numba.float32, numba.float64)
_PAIR = numba.types.UniTuple(numba.int64, 2)

Pair = tuple[int, int]


@kernel(
    [numba.void(f[:, :, :, ::1], f[:, :, ::1], f[:, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
)
def _unfold_channels_last(x, image, patches, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """Write the patches of some output ``rows`` (first, end), each ``width`` positions, of the images ``x``.

    ``image`` is room for one padded image with channels last, of which only the lines that the rows see are written.
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


@kernel(
    [numba.void(f[:, ::1], f[:, :, ::1], f[:, :, :, ::1], _PAIR, _PAIR, _PAIR, _PAIR, numba.int64) for f in _FLOATS],
)
def _fold_channels_last(patches, image, dx, rows, kernel, stride, padding, width):  # type: ignore[no-untyped-def]
    """The transpose of `_unfold_channels_last`: add the patches to ``dx``, which starts from zero with row 0."""
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
        columns: how many patches there is room for.
        joined: as of `planes.Room`.
    """

    def __init__(self, x: np.ndarray, weight: np.ndarray, shape: Shape, columns: int, joined: bool) -> None:
        self._weight, self._shape, self._joined = weight, shape, joined
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
        """Of the output ``rows`` (first, end) of so many images, as of `planes.Room`; `fold` adds them."""
        patches = self._rows(images, rows)
        return patches.T if self._joined else patches.reshape(images, -1, patches.shape[1]).swapaxes(1, 2)

    def _rows(self, images: int, rows: Pair) -> np.ndarray:
        return self._patches[: images * (rows[1] - rows[0]) * self._shape.width]

    def unfold(self, x: np.ndarray, rows: Pair) -> np.ndarray:
        """The patches of the images ``x``, in `room`."""
        s, patches = self._shape, self._rows(len(x), rows)
        _unfold_channels_last(x, self._image, patches, rows, s.kernel, s.stride, s.padding, s.width)
        return self.room(len(x), rows)

    def fold(self, dx: np.ndarray, rows: Pair) -> None:
        """Add what stands in `room` to ``dx``, which starts from zero with row 0."""
        s, patches = self._shape, self._rows(len(dx), rows)
        _fold_channels_last(patches, self._image, dx, rows, s.kernel, s.stride, s.padding, s.width)
