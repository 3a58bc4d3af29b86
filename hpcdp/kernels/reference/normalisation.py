"""Reference normalisation, in the operations that NumPy and CuPy share: over a batch, and over each row.

Results are written into the arrays given for them, all of one float dtype; those must not overlap with the operands.
"""

from __future__ import annotations

from ...core.arrays import Array, array_namespace


def batch_norm(x: Array, scale: Array, shift: Array, out: Array, saved: tuple[Array, Array], eps: float) -> None:
    """Batch normalisation (Ioffe and Szegedy 2015, algorithm 1) over all axes but the second.

    Args:
        x: shape ``(batch, channels, positions)``.
        scale: gamma, shape ``(channels,)``.
        shift: beta, shape ``(channels,)``.
        out: like ``x``; changed.
        saved: mean and variance (biased) of each channel, shape ``(channels,)``; changed.
    """
    xp = array_namespace(x, scale)
    mean, variance = saved
    mean[...] = x.mean(axis=(0, 2))
    centred = x - mean[:, None]
    variance[...] = (centred * centred).mean(axis=(0, 2))
    out[...] = centred * (scale / xp.sqrt(variance + eps))[:, None] + shift[:, None]


def batch_norm_gradients(
    gy: Array,
    x: Array,
    scale: Array,
    saved: tuple[Array, Array],
    into: tuple[Array, Array, Array],
    eps: float,
) -> None:
    """The gradients of `batch_norm`; ``into`` is where those of ``x``, ``scale`` and ``shift`` go, all changed."""
    xp = array_namespace(gy, x)
    dx, dscale, dshift = into
    mean, variance = saved
    inverse = 1.0 / xp.sqrt(variance + eps)
    normal = (x - mean[:, None]) * inverse[:, None]
    dshift[...] = gy.sum(axis=(0, 2))
    dscale[...] = (gy * normal).sum(axis=(0, 2))
    count = x.shape[0] * x.shape[2]
    rest = dshift[:, None] + normal * dscale[:, None]
    dx[...] = (gy - rest * (1.0 / count)) * (scale * inverse)[:, None]


def channel_sums(x: Array, sums: Array) -> None:
    """Of each channel of ``x``, shape ``(batch, channels, positions)``, the sum and that of the squares.

    Args:
        sums: shape ``(2, channels)``, float64, in which squares cancel harmlessly; changed.
    """
    xp = array_namespace(x, sums)
    doubles = x.astype(xp.float64)
    sums[0] = doubles.sum(axis=(0, 2))
    sums[1] = (doubles * doubles).sum(axis=(0, 2))


def normalise(x: Array, scale: Array, shift: Array, saved: tuple[Array, Array], out: Array, eps: float) -> None:
    """`batch_norm` by the mean and variance ``saved``; changes ``out``."""
    xp = array_namespace(x, scale)
    mean, variance = saved
    out[...] = (x - mean[:, None]) * (scale / xp.sqrt(variance + eps))[:, None] + shift[:, None]


def gradient_sums(gy: Array, x: Array, saved: tuple[Array, Array], sums: Array, eps: float) -> None:
    """What this batch adds to the gradients of shift and scale: rows 0 and 1 of ``sums``, ``(2, channels)`` float64."""
    xp = array_namespace(gy, x)
    mean, variance = saved
    normal = (x - mean[:, None]) / xp.sqrt(variance + eps)[:, None]
    sums[0] = gy.sum(axis=(0, 2))
    sums[1] = (gy * normal).sum(axis=(0, 2))


def gradient_of_input(
    gy: Array, x: Array, scale: Array, saved: tuple[Array, Array], means: Array, dx: Array, eps: float
) -> None:
    """The gradient of ``x`` where ``means`` are `gradient_sums` over the count of the whole batch; changes ``dx``."""
    xp = array_namespace(gy, x)
    mean, variance = saved
    inverse = 1.0 / xp.sqrt(variance + eps)
    constant, slope = means.astype(x.dtype)
    normal = (x - mean[:, None]) * inverse[:, None]
    dx[...] = (gy - constant[:, None] - normal * slope[:, None]) * (scale * inverse)[:, None]


def layer_norm(x: Array, scale: Array, shift: Array, out: Array, saved: tuple[Array, Array], eps: float) -> None:
    """Each row normalised by its own mean and variance (Ba, Kiros and Hinton 2016), times ``scale``, plus ``shift``.

    Args:
        x: ``(rows, features)``; ``out`` likewise, written.
        saved: where each row's mean and inverse deviation go, ``(rows,)``; written.
    """
    xp = array_namespace(x, scale)
    mean = x.mean(axis=1)
    centred = x - mean[:, None]
    inverse = 1.0 / xp.sqrt((centred * centred).mean(axis=1) + eps)
    out[...] = centred * inverse[:, None] * scale + shift
    saved[0][...], saved[1][...] = mean, inverse


def layer_norm_gradients(
    gy: Array, x: Array, scale: Array, saved: tuple[Array, Array], into: tuple[Array, Array, Array]
) -> None:
    """The gradients of `layer_norm`; ``into`` is where those of ``x``, ``scale`` and ``shift`` go, all written."""
    dx, dscale, dshift = into
    mean, inverse = saved
    normal = (x - mean[:, None]) * inverse[:, None]
    dscale[...] = (gy * normal).sum(axis=0)
    dshift[...] = gy.sum(axis=0)
    scaled = gy * scale
    along = (scaled * normal).mean(axis=1)[:, None]
    dx[...] = (scaled - scaled.mean(axis=1)[:, None] - normal * along) * inverse[:, None]
