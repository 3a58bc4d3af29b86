"""Convolution of NumPy arrays, by whichever of three ways suits its shapes.

`reference.conv` is the specification; all arrays must be C-contiguous.
"""

from __future__ import annotations

import numpy as np

from . import im2col, lanes, load
from .buffers import empty

_CHANNELS, _TILES = 16, 32
"""From so many channels, in and out, and so many tiles, Winograd's transforms cost less than they save."""
_POSITIONS, _DEPTH = 64, 16
"""From so many results a plane, each of so many products, on, what begins and ends a sum costs little beside it."""

Pair = tuple[int, int]


def _by_winograd(x: np.ndarray, weight: np.ndarray, out: np.ndarray, stride: Pair, padding: Pair) -> bool:
    if x.dtype != np.float32 or weight.shape[2:] != (3, 3) or stride != (1, 1) or max(padding) > 2:
        return False
    batch, _, height, width = out.shape
    tiles, positions = batch * -(-height // 4) * -(-width // 4), batch * height * width
    products_saved = 36 * tiles <= 9 * positions / 2
    return min(weight.shape[:2]) >= _CHANNELS and tiles >= _TILES and products_saved


def _directly(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> bool:
    """Whether results and the gradient of the weights come without unfolding.

    It is for processors for which BLAS packs what was unfolded once more; with longer vectors it need not (`products`).
    Sums have lanes for eight channels. The weights are brought into their order in each call, so there must be as many
    positions as channels.
    """
    batch, channels, height, width = out.shape
    if x.dtype != np.float32 or height * width < _POSITIONS or batch * height * width < channels:
        return False
    is_deep = channels > 0 and weight[0].size >= _DEPTH
    return is_deep and _fills_lanes(channels) and lanes.are_eight()


def _directly_to_input(x: np.ndarray, weight: np.ndarray, out: np.ndarray, stride: Pair) -> bool:
    """Whether the input's gradient does, for which sums are of all places of the input."""
    sums = -(-x.shape[2] // stride[0]) * -(-x.shape[3] // stride[1])
    are_wanted = 0 < 3 * sums <= 4 * out.shape[2] * out.shape[3]
    return _directly(x, weight, out) and are_wanted and _fills_lanes(weight.shape[1])


def _fills_lanes(channels: int) -> bool:
    return 4 * channels >= 3 * (-(-channels // 8) * 8)


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
    if _by_winograd(x, weight, out, stride, padding):
        load("winograd").conv2d(x, weight, bias, out, padding, relu)
    elif _directly(x, weight, out):
        load("direct").conv2d(x, weight, bias, out, stride, padding, relu)
    else:
        im2col.conv2d(x, weight, bias, out, stride, padding, relu)


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
    by_winograd = _by_winograd(x, weight, gy, stride, padding)
    if not by_winograd and not _directly(x, weight, gy):
        im2col.conv2d_gradients(x, weight, gy, out, into, stride, padding)
        return
    dx, dweight, dbias = into
    if out is not None:
        before_relu = empty(gy.shape, gy.dtype)
        load("epilogue").relu_gradient(gy, out, before_relu)
        gy = before_relu
    if by_winograd:
        if dx is not None:
            load("winograd").gradient_of_input(gy, weight, dx, padding)
        if dweight is not None:
            load("winograd").gradient_of_weight(x, gy, dweight, padding)
    else:
        if dx is not None and _directly_to_input(x, weight, gy, stride):
            load("direct").gradient_of_input(gy, weight, dx, stride, padding)
        elif dx is not None:
            im2col.conv2d_gradients(x, weight, gy, None, (dx, None, None), stride, padding)
        if dweight is not None:
            load("direct").gradient_of_weight(x, gy, dweight, stride, padding)
    if dbias is not None:
        dbias[...] = gy.sum(axis=(0, 2, 3))
