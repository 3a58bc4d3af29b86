"""Batch normalisation, by the batch's statistics or by running ones."""

from __future__ import annotations

import math
from typing import Any

from ..arrays import Array
from ..autograd import Gradient, Tensor, as_tensor, on_tape
from ..autograd.registry import Call, operator
from ..errors import UnsupportedError
from ..kernels.buffers import empty
from .half import in_float32
from .operands import alike, contiguous, kernels_for, refreshed
from .virtual_shard import move


def require_channels(x: Array, *others: Array | Tensor | None) -> None:
    """Raises `UnsupportedError` unless each of ``others`` has a number for each channel of ``x``.

    The kernels go by the channels of ``x``, beyond the end of what is shorter.
    """
    shape = x.shape[1:2]
    for other in others:
        if other is not None and (other.shape != shape or not shape):
            raise UnsupportedError(
                "batch_norm", expected="shapes (batch, channels, ...), and (channels,) of all others",
                got=", ".join(str(tuple(each.shape)) for each in (x, *others) if each is not None),
            )  # fmt: skip


@operator("batch_norm", ("x", "scale", "shift", "running_mean", "running_var"), has_effect=True)
@in_float32(has_kernels=True, first_alone=True)
def batch_norm(
    x: Any, scale: Any, shift: Any, eps: float,
    running_mean: Tensor | None = None, running_var: Tensor | None = None, momentum: float = 0.0,
) -> tuple[Tensor, Array, Array]:  # fmt: skip
    """``scale * (x - mean) / sqrt(variance + eps) + shift`` with the statistics of the batch, for each channel.

    Args:
        x: shape ``(batch, channels, ...)``.
        scale: shape ``(channels,)``; ``shift`` likewise.
        running_mean: moves, in place, to ``momentum * running_mean + (1 - momentum) * mean``; ``running_var`` likewise.

    Returns:
        The result, and mean and biased variance of each channel, zeros for an empty batch.

    Raises:
        UnsupportedError: other shapes, or dtypes that differ.
    """
    given = [as_tensor(each).data for each in (x, scale, shift)]
    a, gamma, beta = map(contiguous, given)
    xp = alike("batch_norm", a, gamma, beta, wide=True)
    require_channels(a, gamma, beta, running_mean, running_var)
    planes = a.reshape(*a.shape[:2], math.prod(a.shape[2:]))
    mean, variance = xp.empty(gamma.shape, dtype=gamma.dtype), xp.empty(gamma.shape, dtype=gamma.dtype)
    out = empty(planes.shape, a.dtype, xp)
    compute = kernels_for("batch_norm", a).batch_norm
    compute(planes, gamma, beta, out, (mean, variance), eps)
    if not a.size:  # 0 / 0 would go on into the gradients of scale and shift
        mean[...], variance[...] = 0, 0
    moves: list[Call] = [
        (move, (running, momentum, batch))
        for running, batch in ((running_mean, mean), (running_var, variance))
        if running is not None
    ]
    for function, args in moves:
        function(*args)

    def again(place: Array) -> list[Call]:
        copies = [call for pair in zip((a, gamma, beta), given, strict=True) for call in refreshed(*pair)]
        return [*copies, (compute, (planes, gamma, beta, place.reshape(planes.shape), (mean, variance), eps)), *moves]

    def pullback(gy: Array, *gradients: Gradient | None) -> None:
        places = [xp.empty(gamma.shape, dtype=gamma.dtype) if each is None else each.empty() for each in gradients[1:]]
        dx = empty(planes.shape, planes.dtype, xp)
        g = contiguous(gy).reshape(planes.shape)
        kernels_for("batch_norm", g).batch_norm_gradients(g, planes, gamma, (mean, variance), (dx, *places), eps)
        for gradient, place in zip(gradients, (dx.reshape(a.shape), *places), strict=True):
            if gradient is not None:
                gradient.add(place)

    return on_tape(out.reshape(a.shape), (x, scale, shift), pullback, again), mean, variance


@operator("batch_norm_by_running", ("x", "scale", "shift", "running_mean", "running_var"))
@in_float32()
def batch_norm_by_running(x: Any, scale: Any, shift: Any, running_mean: Any, running_var: Any, eps: float) -> Tensor:
    """``scale * (x - running_mean) / sqrt(running_var + eps) + shift`` for each channel, as one factor and one offset.

    Args:
        x: shape ``(batch, channels, ...)``.
        scale: shape ``(channels,)``, as the others.

    Raises:
        UnsupportedError: other shapes, or dtypes that differ.
    """
    a, gamma, beta, mean, variance = (as_tensor(each).data for each in (x, scale, shift, running_mean, running_var))
    xp = alike("batch_norm", a, gamma, beta, mean, variance)
    require_channels(a, gamma, beta, mean, variance)
    shape = (gamma.shape[0],) + (1,) * (a.ndim - 2)
    inverse, factor, offset = (xp.empty(gamma.shape, dtype=gamma.dtype) for _ in range(3))

    def compute(out: Array) -> None:
        xp.add(variance, eps, out=inverse)
        xp.sqrt(inverse, out=inverse)
        xp.divide(1.0, inverse, out=inverse)
        xp.multiply(gamma, inverse, out=factor)
        xp.multiply(factor, mean, out=offset)
        xp.subtract(beta, offset, out=offset)
        xp.multiply(a, factor.reshape(shape), out=out)
        xp.add(out, offset.reshape(shape), out=out)

    out = empty(a.shape, a.dtype, xp)
    compute(out)
    others = (0, *range(2, a.ndim))

    def pullback(gy: Array, dx: Gradient | None, dscale: Gradient | None, dshift: Gradient | None) -> None:
        if dx is not None:
            dx.add(xp.multiply(gy, factor.reshape(shape), out=dx.empty()))
        if dshift is not None:
            dshift.add(gy.sum(axis=others))
        if dscale is not None:
            # Of what is centred: sum(gy * x) and mean * sum(gy) may both be large where their difference is small.
            product = (gy * (a - mean.reshape(shape))).sum(axis=others)
            dscale.add(product * inverse if a.size else product)  # of no samples 0, though inverse may be NaN

    return on_tape(out, (x, scale, shift), pullback, lambda out: [(compute, (out,))])
