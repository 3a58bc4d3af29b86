"""Operations on a batch of which others have the other parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..arrays import Array
from ..autograd import Gradient, Tensor, as_tensor, on_tape
from ..kernels.buffers import empty
from .half import in_float32
from .normalisation import require_channels
from .operands import alike, contiguous, kernels_for


@in_float32(has_kernels=True, first_alone=True)
def joint_batch_norm(
    x: Any, scale: Any, shift: Any, eps: float, add_up: Callable[[Array], object]
) -> tuple[Tensor, Array, Array, int]:
    """`batch_norm` with the statistics of a batch of which others have the other parts, that may be empty.

    Gradients of ``scale`` and ``shift`` are those of this part.

    Args:
        add_up: adds to a flat float64 array, in place, what the others have in its place; called here and in backward.

    Returns:
        The result, mean and biased variance of each channel, and how many values of a channel all have together.
    """
    a, gamma, beta = (contiguous(as_tensor(each).data) for each in (x, scale, shift))
    xp = alike("batch_norm", a, gamma, beta, wide=True)
    require_channels(a, gamma, beta)
    channels = a.shape[1]
    planes = a.reshape(a.shape[0], channels, math.prod(a.shape[2:]))
    compute = kernels_for("batch_norm", a)
    flat = xp.empty(2 * channels + 1, dtype=xp.float64)
    sums = flat[:-1].reshape(2, channels)
    compute.channel_sums(planes, sums)
    flat[-1] = planes.shape[0] * planes.shape[2]
    add_up(flat)
    count = int(flat[-1])
    sums /= max(1, count)
    variance = xp.maximum(sums[1] - sums[0] * sums[0], 0).astype(gamma.dtype)
    saved = sums[0].astype(gamma.dtype), variance
    out = empty(planes.shape, a.dtype, xp)
    compute.normalise(planes, gamma, beta, saved, out, eps)

    def pullback(gy: Array, dx: Gradient | None, *gradients: Gradient | None) -> None:
        g = contiguous(gy).reshape(planes.shape)
        sums = xp.empty((2, channels), dtype=xp.float64)
        compute.gradient_sums(g, planes, saved, sums, eps)
        for gradient, own in zip(gradients, sums[::-1], strict=True):
            if gradient is not None:
                gradient.add(own.astype(gamma.dtype))
        add_up(sums.reshape(-1))
        if dx is not None:
            place = empty(planes.shape, planes.dtype, xp)
            compute.gradient_of_input(g, planes, gamma, saved, sums / max(1, count), place, eps)
            dx.add(place.reshape(a.shape))

    return on_tape(out.reshape(a.shape), (x, scale, shift), pullback), *saved, count
