"""Batch normalisation of CuPy arrays. Imports: cuda.

`reference` is the specification: same names, same arguments, sums up to rounding in float64, and the same bits for the
same sums, of 16 bits those of float32, rounded once. What has one number a channel is computed by CuPy's own
operations; where ``x`` has 16 bits it is float32.
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
    count = x.shape[0] * x.shape[2]
    mean[...] = _sums("channel_sums", (x,), ())[0] / count
    variance[...] = _sums("centred_sums", (x,), (mean,))[1] / count
    normalise(x, scale, shift, saved, out, eps)


def batch_norm_gradients(
    gy: Array,
    x: Array,
    scale: Array,
    saved: tuple[Array, Array],
    into: tuple[Array, Array, Array],
    eps: float,
) -> None:
    """See `reference.batch_norm_gradients`."""
    dx, dscale, dshift = into
    sums = array_namespace(gy, x).empty((2, x.shape[1]), dtype=np.float64)
    gradient_sums(gy, x, saved, sums, eps)
    dshift[...], dscale[...] = sums[0], sums[1]
    gradient_of_input(gy, x, scale, saved, sums / (x.shape[0] * x.shape[2]), dx, eps)


def channel_sums(x: Array, sums: Array) -> None:
    """See `reference.channel_sums`."""
    sums[...] = _sums("channel_sums", (x,), ())


def normalise(x: Array, scale: Array, shift: Array, saved: tuple[Array, Array], out: Array, eps: float) -> None:
    """See `reference.normalise`."""
    xp = array_namespace(x, scale)
    mean, variance = saved
    factor = scale / xp.sqrt(variance + eps)
    of_type = cuda.type_name("normalise", cuda.FLOATS, x.size, x, out)
    cuda.check("normalise", (cuda.wide_type(x),), x.shape[1], mean, factor, shift)
    arrays = (x, mean, factor, shift, out)
    cuda.launch("batch_norm", f"normalise_{of_type}", cuda.blocks(-(-x.nbytes // 16)), *arrays, _shape(x))


def gradient_sums(gy: Array, x: Array, saved: tuple[Array, Array], sums: Array, eps: float) -> None:
    """See `reference.gradient_sums`."""
    mean, variance = saved
    sums[...] = _sums("gradient_sums", (gy, x), (mean,))
    sums[1] = sums[1] / array_namespace(x).sqrt(variance + eps)


def gradient_of_input(
    gy: Array, x: Array, scale: Array, saved: tuple[Array, Array], means: Array, dx: Array, eps: float
) -> None:
    """See `reference.gradient_of_input`."""
    mean, variance = saved
    inverse = 1.0 / array_namespace(x).sqrt(variance + eps)
    rounded = means.astype(mean.dtype)
    of_type = cuda.type_name("gradient_of_input", cuda.FLOATS, x.size, gy, x, dx)
    of_channels = (mean, inverse, rounded[0], rounded[1], scale * inverse)
    cuda.check("gradient_of_input", (cuda.wide_type(x),), x.shape[1], *of_channels)
    blocks = cuda.blocks(-(-x.nbytes // 16))
    cuda.launch("batch_norm", f"gradient_of_input_{of_type}", blocks, gy, x, *of_channels, dx, _shape(x))


def _sums(name: str, arrays: tuple[Array, ...], of_channels: tuple[Array, ...]) -> Array:
    """What the kernel ``name`` sums over each channel, shape ``(2, channels)``, float64."""
    x = arrays[-1]
    of_type = cuda.type_name(name, cuda.FLOATS, x.size, *arrays)
    for each in of_channels:
        cuda.check(name, (cuda.wide_type(x),), x.shape[1], each)
    xp, channels = array_namespace(x), x.shape[1]
    pieces = _pieces(*x.shape)
    partial, sums = (xp.empty((2, channels, width), dtype=np.float64) for width in (pieces, 1))
    cuda.launch("batch_norm", f"{name}_{of_type}", channels * pieces, *arrays, *of_channels, _shape(x), partial)
    if pieces == 1:
        return partial.reshape(2, channels)
    cuda.launch("norms", "add_partials", 2 * channels, partial, np.int64(pieces), sums)
    return sums.reshape(2, channels)


def _pieces(batch: int, channels: int, size: int) -> int:
    """How many blocks sum one channel; of the shape alone, for the order of additions depends on it."""
    return max(1, min(-(-_BLOCKS // max(channels, 1)), batch * size // _PER_BLOCK))


def _shape(x: Array) -> np.ndarray:
    made = np.zeros(1, _SHAPE)
    made["at"][0] = x.shape
    return made
