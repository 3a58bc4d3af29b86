"""Convolution by 3 x 3 with stride 1 in a quarter of the multiplications (Winograd).

Winograd's F(4 x 4, 3 x 3), as in Lavin and Gray ("Fast algorithms for convolutional neural networks", 2016, sections
4.1 and 4.3): a tile of 4 x 4 results needs 6 x 6 samples ``d``, and is ``A' ((G g G') * (B' d B)) A`` for the weights
``g``, where ``*`` multiplies elementwise; over channels, 36 matrix products. The gradient of the input is such a
convolution with the rotated weights; that of the weights is ``G' ((A gy A') * (B' d B)) G``.

Tiles have channels last, of which `_LANES` at a time are transformed as vectors. A block is the number of tiles whose
36 planes stay in the L2 cache between transform and product.

Accuracy: because the transforms subtract, float32 results differ from those in float64 by up to 2e-5 of the largest (by
single products: 1e-6), and samples above 1e36 overflow. An infinite or NaN sample makes the whole tiles that contain it
NaN, so its presence is detected, but not its position.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from .. import empty
from ..jit import Lanes, kernel
from ..matmul import multiply

_LANES = 16
_BLOCK_TILES = 64
_FLOAT = numba.float32
_PAIR = numba.types.UniTuple(numba.int64, 2)
_BT = (
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
_G = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
_AT = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))

Pair = tuple[int, int]
Matrix = tuple[tuple[float, ...], ...]


def _combination(builder: Any, coefficients: tuple[float, ...], vectors: list[Any], constant: Any) -> Any:
    """Return the sum of ``vectors`` times ``coefficients``."""
    total = None
    for number, vector in zip(coefficients, vectors, strict=True):
        if total is not None and number in (1, -1):
            total = (builder.fadd if number == 1 else builder.fsub)(total, vector, flags=("contract",))
        elif number:
            term = vector if number == 1 else builder.fmul(vector, constant(number), flags=("contract",))
            total = term if total is None else builder.fadd(total, term, flags=("contract",))
    return total


def _on_both_sides(matrix: Matrix) -> Any:
    """Make an intrinsic that writes ``matrix @ square @ matrix.T`` of a square of vectors of `_LANES` elements.

    Its arguments are, for the source and then the target: array, index of the first element, and elements from one row
    of the square to the next and from one column to the next.
    """

    @intrinsic
    def transform(context: Any, source: Any, first: Any, steps: Any, target: Any, start: Any, leaps: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def at(array: int, row: int, column: int) -> Lanes:
                first, (down, right) = args[array + 1], (builder.extract_value(args[array + 2], i) for i in (0, 1))
                index = builder.add(first, builder.mul(down, down.type(row)))
                index = builder.add(index, builder.mul(right, right.type(column)))
                return Lanes(context, builder, (signature.args[array], args[array]), index, _LANES)

            constant = at(0, 0, 0).constant
            half = []  # matrix @ square, by columns
            for column in range(len(matrix[0])):
                loaded = [at(0, row, column).load() for row in range(len(matrix[0]))]
                half.append([_combination(builder, line, loaded, constant) for line in matrix])
            for row, of_row in enumerate(zip(*half, strict=True)):
                for column, line in enumerate(matrix):
                    at(3, row, column).store(_combination(builder, line, list(of_row), constant))
            return context.get_dummy_value()

        return types.none(source, types.intp, _PAIR, target, types.intp, _PAIR), generate

    return transform


_of_samples, _to_results, _of_weights = _on_both_sides(_BT), _on_both_sides(_AT), _on_both_sides(_G)
_of_gradients = _on_both_sides(tuple(zip(*_AT, strict=True)))
_to_weights = _on_both_sides(tuple(zip(*_G, strict=True)))


@kernel(numba.void(_FLOAT[:, :, :, ::1], _FLOAT[:, ::1], _PAIR, _PAIR, _PAIR, numba.boolean))
def _spread(images, planes, rows, grid, padding, gradients):  # type: ignore[no-untyped-def]
    """Write the 36 planes of ``rows`` (first, end) of tiles; an image has ``grid`` (vertical, horizontal) tiles.

    Tiles of samples are 6 x 6, the first starting ``padding`` before the image; tiles of ``gradients`` of results are 4
    x 4.
    """
    size = 4 if gradients else 6
    lines = np.zeros((size, 4 * grid[1] + size - 4, _LANES), images.dtype)
    flat, steps = lines.reshape(-1), (lines.shape[1] * _LANES, _LANES)
    lanes = (images.shape[1] + _LANES - 1) // _LANES * _LANES
    target, leaps = planes.reshape(-1), (6 * planes.shape[1], planes.shape[1])
    for row in range(rows[0], rows[1]):
        image, top = images[row // grid[0]], 4 * (row % grid[0]) - padding[0]
        start = (row - rows[0]) * grid[1] * lanes
        for channel in range(0, images.shape[1], _LANES):
            for c in range(channel, min(channel + _LANES, images.shape[1])):
                for i in range(size):
                    inside = lines[i, padding[1] : padding[1] + images.shape[3], c - channel]
                    if 0 <= top + i < images.shape[2]:
                        source = image[c, top + i]
                        for z in range(inside.size):
                            inside[z] = source[z]
                    else:
                        inside[:] = 0
            for tile in range(grid[1]):
                first, to = 4 * tile * _LANES, start + tile * lanes + channel
                if gradients:
                    _of_gradients(flat, first, steps, target, to, leaps)
                else:
                    _of_samples(flat, first, steps, target, to, leaps)


@kernel(numba.void(_FLOAT[:, ::1], _FLOAT[::1], numba.boolean, _FLOAT[:, :, :, ::1], _PAIR, _PAIR))
def _collect(planes, bias, relu, images, rows, grid):  # type: ignore[no-untyped-def]
    """Write ``rows`` of tiles of ``images`` from 36 planes, with bias and ReLU; arguments as `_spread`."""
    zero = images.dtype.type(0)
    lines = np.empty((4, 4 * grid[1], _LANES), images.dtype)
    flat, steps = lines.reshape(-1), (lines.shape[1] * _LANES, _LANES)
    lanes = (images.shape[1] + _LANES - 1) // _LANES * _LANES
    source, leaps = planes.reshape(-1), (6 * planes.shape[1], planes.shape[1])
    for row in range(rows[0], rows[1]):
        image, top = images[row // grid[0]], 4 * (row % grid[0])
        start = (row - rows[0]) * grid[1] * lanes
        for channel in range(0, images.shape[1], _LANES):
            for tile in range(grid[1]):
                _to_results(source, start + tile * lanes + channel, leaps, flat, 4 * tile * _LANES, steps)
            for c in range(channel, min(channel + _LANES, images.shape[1])):
                b = bias[c]
                for i in range(min(4, images.shape[2] - top)):
                    target, results = image[c, top + i], lines[i, : images.shape[3], c - channel]
                    if relu:
                        for z in range(results.size):
                            value = results[z] + b
                            target[z] = value if value > zero or np.isnan(value) else zero
                    else:
                        for z in range(results.size):
                            target[z] = results[z] + b


@kernel(numba.void(_FLOAT[:, :, :], numba.boolean, _FLOAT[:, ::1], numba.int64))
def _spread_weights(weight, rotated, planes, lanes):  # type: ignore[no-untyped-def]
    """Write the 36 planes, with rows of ``lanes``, of the weights, shape ``(rows, columns, 9)``."""
    taps = np.zeros(9 * _LANES, weight.dtype)
    target, plane = planes.reshape(-1), planes.shape[1]
    for first in range(0, weight.shape[1], _LANES):
        used = min(_LANES, weight.shape[1] - first)
        for row in range(weight.shape[0]):
            for lane in range(used):
                for k in range(9):
                    taps[(8 - k if rotated else k) * _LANES + lane] = weight[row, first + lane, k]
            _of_weights(taps, 0, (3 * _LANES, _LANES), target, row * lanes + first, (6 * plane, plane))


@kernel(numba.void(_FLOAT[:, ::1], _FLOAT[:, :, ::1], numba.int64))
def _collect_weights(planes, dweight, lanes):  # type: ignore[no-untyped-def]
    """Write ``dweight`` from 36 planes, the transpose of `_spread_weights`."""
    taps = np.empty(9 * _LANES, dweight.dtype)
    source, plane = planes.reshape(-1), planes.shape[1]
    for row in range(dweight.shape[0]):
        for first in range(0, dweight.shape[1], _LANES):
            _to_weights(source, row * lanes + first, (6 * plane, plane), taps, 0, (3 * _LANES, _LANES))
            for lane in range(min(_LANES, dweight.shape[1] - first)):
                for k in range(9):
                    dweight[row, first + lane, k] = taps[k * _LANES + lane]


def _padded(channels: int) -> int:
    """Return ``channels`` rounded up to whole vectors."""
    return -(-channels // _LANES) * _LANES


def _planes(rows: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return 36 planes of ``rows``, flat for the kernels, and as matrices of shape ``(36, rows, channels)``.

    A plane has one more vector than needed; else all planes would start in the same cache set.
    """
    lanes = _padded(channels)
    flat = empty((36, rows * lanes + _LANES), np.float32)
    return flat, flat[:, : rows * lanes].reshape(36, rows, lanes)[:, :, :channels]


class _Tiles:
    """The tiles of results of shape ``(batch, channels, height, width)``, in blocks of whole rows."""

    def __init__(self, results: np.ndarray, at_once: int) -> None:
        batch, _, height, width = results.shape
        self.grid: Pair = (-(-height // 4), -(-width // 4))
        """Number of tiles of an image (vertical, horizontal)."""
        rows, rows_at_once = batch * self.grid[0], max(1, at_once // self.grid[1])
        self.blocks = [(first, min(first + rows_at_once, rows)) for first in range(0, rows, rows_at_once)]
        """The rows of tiles (first, end) of each block."""

    def count(self, rows: Pair) -> int:
        """Return the number of tiles in ``rows``; the first block has the most."""
        return (rows[1] - rows[0]) * self.grid[1]

    def planes(self, channels: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `_planes` for a block."""
        return _planes(self.count(self.blocks[0]), channels)


def _weight_planes(weight: np.ndarray, rotated: bool) -> np.ndarray:
    """Return the planes ``(36, rows, columns)`` of the weights, shape ``(rows, columns, 3, 3)``."""
    rows, columns = weight.shape[:2]
    flat, planes = _planes(rows, columns)
    _spread_weights(weight.reshape(rows, columns, 9), rotated, flat, _padded(columns))
    return planes


def _convolve(
    x: np.ndarray, weight_planes: np.ndarray, bias: np.ndarray | None, out: np.ndarray, padding: Pair, relu: bool
) -> None:
    """Convolve with ``weight_planes`` of shape ``(36, channels of x, channels of out)``."""
    tiles = _Tiles(out, _BLOCK_TILES)
    flat, samples = tiles.planes(x.shape[1])
    flat_results, results = tiles.planes(out.shape[1])
    if bias is None:
        bias = np.zeros(out.shape[1], np.float32)
    for rows in tiles.blocks:
        count = tiles.count(rows)
        _spread(x, flat, rows, tiles.grid, padding, False)
        multiply(samples[:, :count], weight_planes, results[:, :count])
        _collect(flat_results, bias, relu, out, rows, tiles.grid)


def conv2d(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, out: np.ndarray, padding: Pair, relu: bool
) -> None:  # fmt: skip
    """See `reference.conv2d`; float32, at least one result."""
    _convolve(x, _weight_planes(weight.transpose(1, 0, 2, 3), False), bias, out, padding, relu)


def gradient_of_input(gy: np.ndarray, weight: np.ndarray, dx: np.ndarray, padding: Pair) -> None:
    """Set ``dx`` to the gradient of the input of `conv2d` without ReLU; ``padding`` is that of `conv2d`, up to 2."""
    _convolve(gy, _weight_planes(weight, True), None, dx, (2 - padding[0], 2 - padding[1]), False)


def gradient_of_weight(x: np.ndarray, gy: np.ndarray, dweight: np.ndarray, padding: Pair) -> None:
    """Set ``dweight`` to the gradient of the weights of `conv2d` without ReLU."""
    outputs, inputs = dweight.shape[:2]
    tiles = _Tiles(gy, _BLOCK_TILES)
    flat, samples = tiles.planes(inputs)
    flat_gradients, gradients = tiles.planes(outputs)
    flat_sums, sums = _planes(outputs, inputs)
    more = empty(sums.shape, np.float32)
    for rows in tiles.blocks:
        count = tiles.count(rows)
        _spread(x, flat, rows, tiles.grid, padding, False)
        _spread(gy, flat_gradients, rows, tiles.grid, (0, 0), True)
        product = gradients[:, :count].transpose(0, 2, 1), samples[:, :count]
        if rows[0] == 0:
            multiply(*product, sums)
        else:
            multiply(*product, more)
            sums += more
    _collect_weights(flat_sums, dweight.reshape(outputs, inputs, 9), _padded(inputs))
