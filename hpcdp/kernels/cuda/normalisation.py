"""Batch normalisation of CuPy arrays, and sums over their channels (`batch_norm.cu`, `channels.cuh`).

Functions have the names and arguments of `reference.normalisation`, sums up to rounding in float64, and the same bits
for the same sums, of 16 bits those of float32, rounded once. What has one number a channel is float32 where ``x`` has
16 bits. Forward and backward are three launches each; where a batch has other parts (`nn.functional`), what has one
number a channel is computed by CuPy's own operations. Layer normalisation is the reference's.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Array, array_namespace
from .. import cuda
from ..reference.normalisation import layer_norm as layer_norm
from ..reference.normalisation import layer_norm_gradients as layer_norm_gradients

_FILE = "batch_norm"


def batch_norm(x: Array, scale: Array, shift: Array, out: Array, saved: tuple[Array, Array], eps: float) -> None:
    """See `reference.normalisation.batch_norm`."""
    mean, variance = saved
    of_type = _checked("batch_norm", (x, out), (scale, shift, *saved))
    partial, factor = _partial_sums(f"channel_sums_{of_type}", x, np.bool_(True)), array_namespace(x).empty_like(mean)
    of_channels = (partial, scale, mean.dtype.type(eps), mean, variance, factor)
    cuda.launch(
        _FILE,
        f"statistics_{of_type}",
        x.shape[1],
        x,
        *of_channels,
        cuda.shape_of_channels(x),
        np.int64(partial.shape[2]),
    )
    cuda.launch(_FILE, f"normalise_{of_type}", _blocks(x), x, mean, factor, shift, out, cuda.shape_of_channels(x))


def batch_norm_gradients(
    gy: Array,
    x: Array,
    scale: Array,
    saved: tuple[Array, Array],
    into: tuple[Array, Array, Array],
    eps: float,
) -> None:
    """See `reference.normalisation.batch_norm_gradients`."""
    (mean, variance), (dx, dscale, dshift) = saved, into
    of_type = _checked("batch_norm_gradients", (gy, x, dx), (scale, *saved, dscale, dshift))
    partial = _partial_sums(f"gradient_sums_{of_type}", gy, x, mean)
    of_channels = array_namespace(x).empty((4, x.shape[1]), dtype=mean.dtype)
    counts = np.int64(x.shape[0] * x.shape[2]), np.int64(partial.shape[2])
    arrays = (partial, scale, variance, mean.dtype.type(eps), dscale, dshift, of_channels)
    cuda.launch(_FILE, f"channel_gradients_{of_type}", x.shape[1], *arrays, *counts)
    cuda.launch(
        _FILE, f"gradient_of_input_{of_type}", _blocks(x), gy, x, mean, of_channels, dx, cuda.shape_of_channels(x)
    )


def channel_sums(x: Array, sums: Array) -> None:
    """See `reference.normalisation.channel_sums`."""
    of_type = _checked("channel_sums", (x,))
    _add_partials(_partial_sums(f"channel_sums_{of_type}", x, np.bool_(False)), sums)


def normalise(x: Array, scale: Array, shift: Array, saved: tuple[Array, Array], out: Array, eps: float) -> None:
    """See `reference.normalisation.normalise`."""
    mean, variance = saved
    of_type = _checked("normalise", (x, out), (scale, shift, *saved))
    factor = scale / array_namespace(x).sqrt(variance + eps)
    cuda.launch(_FILE, f"normalise_{of_type}", _blocks(x), x, mean, factor, shift, out, cuda.shape_of_channels(x))


def gradient_sums(gy: Array, x: Array, saved: tuple[Array, Array], sums: Array, eps: float) -> None:
    """See `reference.normalisation.gradient_sums`."""
    mean, variance = saved
    of_type = _checked("gradient_sums", (gy, x), saved)
    _add_partials(_partial_sums(f"gradient_sums_{of_type}", gy, x, mean), sums)
    sums[1] = sums[1] / array_namespace(x).sqrt(variance + eps)


def gradient_of_input(
    gy: Array, x: Array, scale: Array, saved: tuple[Array, Array], means: Array, dx: Array, eps: float
) -> None:
    """See `reference.normalisation.gradient_of_input`."""
    mean, variance = saved
    of_type = _checked("gradient_of_input", (gy, x, dx), (scale, *saved))
    xp = array_namespace(x)
    inverse = 1.0 / xp.sqrt(variance + eps)
    of_channels = xp.stack([inverse, *means.astype(mean.dtype), scale * inverse])
    cuda.launch(
        _FILE, f"gradient_of_input_{of_type}", _blocks(x), gy, x, mean, of_channels, dx, cuda.shape_of_channels(x)
    )


def _partial_sums(name: str, x: Array, *more: Array | np.generic) -> Array:
    """What the kernel ``name`` sums over pieces of each channel, shape ``(2, channels, pieces)``, float64."""
    channels, pieces = x.shape[1], cuda.pieces_of(x.shape[1], x.shape[0] * x.shape[2])
    partial = array_namespace(x).empty((2, channels, pieces), dtype=np.float64)
    cuda.launch(_FILE, name, channels * pieces, x, *more, cuda.shape_of_channels(x), partial)
    return partial


def _add_partials(partial: Array, sums: Array) -> None:
    cuda.check("add_partials", ("float64",), 2 * partial.shape[1], sums)
    cuda.launch("norms", "add_partials_f64", sums.size, partial, np.int64(partial.shape[2]), sums)


def _checked(operation: str, like_x: tuple[Array, ...], of_channels: tuple[Array, ...] = ()) -> str:
    """The last part of the names of its kernels."""
    x = like_x[0]
    of_type = cuda.type_name(operation, cuda.FLOATS, x.size, *like_x)
    if of_channels:
        cuda.check(operation, (cuda.wide_type(x),), x.shape[1], *of_channels)
    return of_type


def _blocks(x: Array) -> int:
    return cuda.blocks(-(-x.nbytes // 16))
