"""Floor 0: convolution of NumPy arrays, by whichever of two ways suits its shapes. Imports: im2col, winograd, epilogue.

`reference` is the specification; all arrays must be C-contiguous. All passes of a convolution go the same way.
"""

from __future__ import annotations

import numpy as np

from . import im2col, load
from .buffers import empty

_CHANNELS, _TILES = 16, 32
"""From so many channels, in and out, and so many tiles, Winograd's transforms cost less than they save."""

Pair = tuple[int, int]


def _by_winograd(x: np.ndarray, weight: np.ndarray, out: np.ndarray, stride: Pair, padding: Pair) -> bool:
    if x.dtype != np.float32 or weight.shape[2:] != (3, 3) or stride != (1, 1) or max(padding) > 2:
        return False
    batch, _, height, width = out.shape
    tiles, positions = batch * -(-height // 4) * -(-width // 4), batch * height * width
    products_saved = 36 * tiles <= 9 * positions / 2
    return min(weight.shape[:2]) >= _CHANNELS and tiles >= _TILES and products_saved


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
    if _by_winograd(x, weight, out, stride, padding):
        load("winograd").conv2d(x, weight, bias, out, padding, relu)
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
    """See `reference.conv2d_gradients`."""
    if not _by_winograd(x, weight, gy, stride, padding):
        im2col.conv2d_gradients(x, weight, gy, out, into, stride, padding)
        return
    dx, dweight, dbias = into
    if out is not None:
        before_relu = empty(gy.shape, gy.dtype)
        load("epilogue").relu_gradient(gy, out, before_relu)
        gy = before_relu
    if dx is not None:
        load("winograd").gradient_of_input(gy, weight, dx, padding)
    if dweight is not None:
        load("winograd").gradient_of_weight(x, gy, dweight, padding)
    if dbias is not None:
        dbias[...] = gy.sum(axis=(0, 2, 3))
