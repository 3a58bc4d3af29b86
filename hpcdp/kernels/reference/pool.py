"""Average and max pooling in plain array operations, the specification of `pool`.

Images and pairs are as in `reference.conv`. Results are written into the arrays given for them, all of one float dtype;
those must not overlap with the operands.
"""

from __future__ import annotations

from ...core.arrays import Array, array_namespace
from .windows import Pair, offsets, padded, window


def average_pool(x: Array, out: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """``out`` becomes the mean of each window, padding counted; changes ``out``."""
    wide = padded(x, padding)
    total = sum(window(wide, at, out.shape[2:], stride) for at in offsets(kernel))
    out[...] = total * (1.0 / (kernel[0] * kernel[1]))


def average_pool_gradient(gy: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """The gradient of `average_pool`; changes ``dx``."""
    xp = array_namespace(gy)
    wide = xp.zeros_like(padded(dx, padding))
    share = gy * (1.0 / (kernel[0] * kernel[1]))
    for at in offsets(kernel):
        part = window(wide, at, gy.shape[2:], stride)
        part += share
    dx[...] = window(wide, padding, dx.shape[2:], (1, 1))


def max_pool(x: Array, out: Array, chosen: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """``out`` becomes the largest element of each window, padding never being it; changes ``out`` and ``chosen``.

    Args:
        chosen: int32, like ``out``: which element of the window it is, counted along its rows; the first of equal ones,
            but the last NaN, which counts as larger than all.
    """
    xp = array_namespace(x)
    wide = padded(x, padding, -xp.inf)
    is_inside = padded(xp.ones((1, 1, *x.shape[2:]), dtype=bool), padding, False)
    out[...] = -xp.inf
    chosen[...] = -1
    for number, at in enumerate(offsets(kernel)):
        part = window(wide, at, out.shape[2:], stride)
        larger = (part > out) | (part != part) | ((chosen < 0) & window(is_inside, at, out.shape[2:], stride))
        chosen[...] = xp.where(larger, xp.asarray(number, dtype=chosen.dtype), chosen)
        out[...] = xp.where(larger, part, out)


def max_pool_gradient(gy: Array, chosen: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """The gradient of `max_pool`; changes ``dx``."""
    xp = array_namespace(gy)
    wide = xp.zeros_like(padded(dx, padding))
    for number, at in enumerate(offsets(kernel)):
        part = window(wide, at, gy.shape[2:], stride)
        part += xp.where(chosen == number, gy, 0)
    dx[...] = window(wide, padding, dx.shape[2:], (1, 1))
