"""The windows of convolutions and pooling, in plain array operations.

Images are ``(batch, channels, height, width)``. Pairs ``kernel``, ``stride`` and ``padding`` are (vertical,
horizontal); padding is on both sides.
"""

from __future__ import annotations

from ...core.arrays import Array, array_namespace

Pair = tuple[int, int]


def output_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """How many positions a window of ``kernel`` has along an axis of ``size``."""
    return (size + 2 * padding - kernel) // stride + 1


def padded(x: Array, padding: Pair, value: float = 0.0) -> Array:
    """``x`` with ``value`` around it; itself without padding."""
    if padding == (0, 0):
        return x
    (batch, channels, height, width), (top, left) = x.shape, padding
    xp = array_namespace(x)
    wide = xp.full((batch, channels, height + 2 * top, width + 2 * left), value, dtype=x.dtype)
    wide[:, :, top : top + height, left : left + width] = x
    return wide


def window(wide: Array, at: Pair, size: Pair, stride: Pair) -> Array:
    """The view of ``wide`` that element ``at`` of the window sees over all positions."""
    (i, j), (height, width), (down, right) = at, size, stride
    return wide[:, :, i : i + (height - 1) * down + 1 : down, j : j + (width - 1) * right + 1 : right]


def offsets(kernel: Pair) -> list[Pair]:
    """The elements of a window, along its rows."""
    return [(i, j) for i in range(kernel[0]) for j in range(kernel[1])]
