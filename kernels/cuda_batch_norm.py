"""Batch normalisation of CuPy arrays. Imports: cuda.

`reference` is the specification: same names, same arguments, sums up to rounding in float64, and the same bits for the
same sums, of 16 bits those of float32, rounded once. What has one number a channel is float32 where ``x`` has 16 bits.
Forward and backward are three launches each; where a batch has other parts (`nn.joint`), what has one number a channel
is computed by CuPy's own operations.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array, array_namespace
from . import cuda

_BLOCKS, _PER_BLOCK = 2112, 16 * cuda.THREADS
"""About so many blocks sum all channels where there is enough to sum, each at least so many elements."""

_SHAPE = np.dtype([("at", np.int64, 3)])


def batch_norm(x: Array, scale: Array, shift: Array, out: Array, saved: tuple[Array, Array], eps: float) -> None:
    """See `reference.batch_norm`."""
    mean, variance = saved
    _check("batch_norm", (x, out), (scale, shift, *saved))
    partial, factor = _partial_sums("channel_sums", x, np.bool_(True)), array_namespace(x).empty_like(mean)
    of_channels = (partial, scale, mean.dtype.type(eps), mean, variance, factor)
    _launch("statistics", x, x.shape[1], x, *of_channels, _shape(x), np.int64(partial.shape[2]))
    _launch("normalise", x, _blocks(x), x, mean, factor, shift, out, _shape(x))


def batch_norm_gradients(
    gy: Array,
    x: Array,
    scale: Array,
    saved: tuple[Array, Array],
    into: tuple[Array, Array, Array],
    eps: float,
) -> None:
    """See `reference.batch_norm_gradients`."""
    (mean, variance), (dx, dscale, dshift) = saved, into
    _check("batch_norm_gradients", (gy, x, dx), (scale, *saved, dscale, dshift))
    partial = _partial_sums("gradient_sums", gy, x, mean)
    of_channels = array_namespace(x).empty((4, x.shape[1]), dtype=mean.dtype)
    counts = np.int64(x.shape[0] * x.shape[2]), np.int64(partial.shape[2])
    arrays = (partial, scale, variance, mean.dtype.type(eps), dscale, dshift, of_channels)
    _launch("channel_gradients", x, x.shape[1], *arrays, *counts)
    _launch("gradient_of_input", x, _blocks(x), gy, x, mean, of_channels, dx, _shape(x))


def channel_sums(x: Array, sums: Array) -> None:
    """See `reference.channel_sums`."""
    _check("channel_sums", (x,))
    _add_partials(_partial_sums("channel_sums", x, np.bool_(False)), sums)


def normalise(x: Array, scale: Array, shift: Array, saved: tuple[Array, Array], out: Array, eps: float) -> None:
    """See `reference.normalise`."""
    mean, variance = saved
    _check("normalise", (x, out), (scale, shift, *saved))
    factor = scale / array_namespace(x).sqrt(variance + eps)
    _launch("normalise", x, _blocks(x), x, mean, factor, shift, out, _shape(x))


def gradient_sums(gy: Array, x: Array, saved: tuple[Array, Array], sums: Array, eps: float) -> None:
    """See `reference.gradient_sums`."""
    mean, variance = saved
    _check("gradient_sums", (gy, x), saved)
    _add_partials(_partial_sums("gradient_sums", gy, x, mean), sums)
    sums[1] = sums[1] / array_namespace(x).sqrt(variance + eps)


def gradient_of_input(
    gy: Array, x: Array, scale: Array, saved: tuple[Array, Array], means: Array, dx: Array, eps: float
) -> None:
    """See `reference.gradient_of_input`."""
    mean, variance = saved
    _check("gradient_of_input", (gy, x, dx), (scale, *saved))
    xp = array_namespace(x)
    inverse = 1.0 / xp.sqrt(variance + eps)
    of_channels = xp.stack([inverse, *means.astype(mean.dtype), scale * inverse])
    _launch("gradient_of_input", x, _blocks(x), gy, x, mean, of_channels, dx, _shape(x))


def _partial_sums(name: str, x: Array, *more: Array | np.generic) -> Array:
    """What the kernel ``name`` sums over pieces of each channel, shape ``(2, channels, pieces)``, float64."""
    channels, pieces = x.shape[1], _pieces(*x.shape)
    partial = array_namespace(x).empty((2, channels, pieces), dtype=np.float64)
    _launch(name, x, channels * pieces, x, *more, _shape(x), partial)
    return partial


def _add_partials(partial: Array, sums: Array) -> None:
    cuda.check("add_partials", ("float64",), 2 * partial.shape[1], sums)
    cuda.launch("norms", "add_partials", sums.size, partial, np.int64(partial.shape[2]), sums)


def _launch(name: str, x: Array, grid: int, *args: Array | np.generic | np.ndarray) -> None:
    """A kernel for the type of ``x``."""
    cuda.launch("batch_norm", f"{name}_{cuda.type_name(name, cuda.FLOATS, x.size, x)}", grid, *args)


def _check(operation: str, like_x: tuple[Array, ...], of_channels: tuple[Array, ...] = ()) -> None:
    x = like_x[0]
    cuda.check(operation, cuda.FLOATS, x.size, *like_x)
    if of_channels:
        cuda.check(operation, (cuda.wide_type(x),), x.shape[1], *of_channels)


def _blocks(x: Array) -> int:
    return cuda.blocks(-(-x.nbytes // 16))


def _pieces(batch: int, channels: int, size: int) -> int:
    """How many blocks sum one channel; of the shape alone, for the order of additions depends on it."""
    return max(1, min(-(-_BLOCKS // max(channels, 1)), batch * size // _PER_BLOCK))


def _shape(x: Array) -> np.ndarray:
    made = np.zeros(1, _SHAPE)
    made["at"][0] = x.shape
    return made
