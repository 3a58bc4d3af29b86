"""The kernels of networks on sequences in plain array operations, the specification.

Sequences are ``(batch, time, features)``. Results are written into the arrays given for them, all of one float dtype.
"""

from __future__ import annotations

import math

from ...core.arrays import Array, array_namespace

_SLOPE, _CUBE = math.sqrt(2 / math.pi), 0.044715


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


def gelu(x: Array, out: Array) -> None:
    """``x`` times nearly the chance of a normal number below it (Hendrycks and Gimpel 2016, section 2, by tanh)."""
    xp = array_namespace(x)
    out[...] = 0.5 * x * (1 + xp.tanh(_SLOPE * (x + _CUBE * x * x * x)))


def gelu_gradient(gy: Array, x: Array, dx: Array) -> None:
    """The gradient of `gelu`; ``dx`` is written."""
    xp = array_namespace(gy, x)
    y = xp.tanh(_SLOPE * (x + _CUBE * x * x * x))
    dx[...] = gy * (0.5 * (1 + y) + 0.5 * x * (1 - y * y) * _SLOPE * (1 + 3 * _CUBE * x * x))


def causal_shift(scores: Array, factor: float) -> None:
    """Row i of each matrix times ``factor``, less its largest among the first i + 1, and minus infinity after them.

    Args:
        scores: ``(matrices, time, time)``; changed.
    """
    xp = array_namespace(scores)
    time = scores.shape[-1]
    later = xp.arange(time)[None, :] > xp.arange(time)[:, None]
    scores *= factor
    scores[...] = xp.where(later, -xp.inf, scores)
    scores -= scores.max(axis=-1, keepdims=True)


def normalise_rows(chances: Array) -> None:
    """Each row over its sum; ``chances``, ``(matrices, time, time)``, is changed."""
    chances /= chances.sum(axis=-1, keepdims=True)


def softmax_gradient(chances: Array, gradients: Array, factor: float) -> None:
    """The gradient before a softmax over rows, times ``factor``, of that after it, in place of ``gradients``."""
    along = (gradients * chances).sum(axis=-1, keepdims=True)
    gradients[...] = chances * (gradients - along) * factor
