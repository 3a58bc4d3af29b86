"""Reference reductions, optimizer updates and gradient encodings.

Arrays are 1-D, contiguous, do not overlap and may be empty. Floats of 16 bits are `hpcdp.core.arrays.words`.

Reductions: rows are reduced in order, so the result has the same bits on every rank and in every run. Floats of 16 bits
are accumulated in float32 and rounded once. A NaN wins in minimum and maximum.

Updates: arrays have one float dtype and one size. Coefficients are Python floats, rounded to the arrays' dtype before
use. Every operation is elementwise, in the order of the code. LARS also takes ``squares``, float64, shape ``(2,)``: the
squared norms of the layer's weights and of its gradient before ``scale``, as from `segment_squares`; the trust is the
last coefficient. The resulting rates are computed in float64, and then rounded.

``pack_*`` encodes an array with one threshold. Gradients, residuals and results are float32, float64, or the bits of
float16 in uint16; threshold and magnitude are first rounded to their dtype. A residual, in the gradient's dtype, is
what was not sent yet; a sum is rounded to that dtype before the comparison. The formulas are those of MXNet's kvstore
(``gradient_compression-inl.h``), which sends the threshold in 2 bits, and 1 in 1 bit; the bits are arranged for
vectors, not bytes. In 2 bits a NaN is never sent and stays in the residual; in 1 bit it is sent as a negative number
and stays.

``encode_*`` are the codecs of `hpcdp.compression`, with a scale for each block in 1 and 2 bits. Arrays are as above; 1
and 2 bits take float16 only, not bfloat16. Every encoder begins with ``residual += grad``, and leaves the unsent part
in ``residual``. A NaN or an infinity is sent and not kept: it arrives as a non-finite number, in 1 and 2 bits as a
whole block of NaN, and the residual is zero there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...core.arrays import Array, array_namespace
from .networks import from_bfloat16, from_float16, narrowed, to_bfloat16, to_float16, widened

SUM, PROD, MIN, MAX, MEAN = 0, 1, 2, 3, 4

EVERY_ROW = -1
"""Value of ``row`` in `combine_into` for all rows."""

Rows = Array | Sequence[Array]
"""An array of shape ``(n, m)``, or n arrays of shape ``(m,)``."""


def combine(rows: Rows, lo: int, hi: int, out: Array, op: int) -> None:
    """Reduce columns ``lo`` to ``hi`` of ``rows`` into ``out``, shape ``(hi - lo,)``, which must not overlap them."""
    out[...] = _combined(rows, lo, hi, op)


def combine_into(rows: Rows, lo: int, hi: int, row: int, op: int) -> None:
    """Reduce columns ``lo`` to ``hi`` of ``rows`` in place: into ``row``, or all if that is `EVERY_ROW`."""
    result = _combined(rows, lo, hi, op)
    for target in range(len(rows)) if row == EVERY_ROW else (row,):
        rows[target][lo:hi] = result


def _combined(rows: Rows, lo: int, hi: int, op: int) -> Array:
    xp = array_namespace(rows[0])
    total = widened(rows[0][lo:hi])
    reduced = {SUM: xp.add, MEAN: xp.add, PROD: xp.multiply, MIN: xp.minimum, MAX: xp.maximum}[op]
    for row in range(1, len(rows)):
        total = reduced(total, widened(rows[row][lo:hi]))
    if op == MEAN:
        total = (total / len(rows)).astype(total.dtype)
    return narrowed(total, rows[0])


ROWS_AT_ONCE = 256


def add_up_rows(x: Array, out: Array | None = None) -> Array:
    """Return the sum over the first axis, in ``out`` if given.

    NumPy adds one row after the other, with an error that grows with their number: 1e-4 for 10,000 rows of 0.1, 1% for
    a million. So rows are added in blocks, and then the sums of blocks.
    """
    if type(x) is not np.ndarray or x.dtype.kind != "f":
        return x.sum(axis=0, out=out)
    while len(x) > ROWS_AT_ONCE:
        starts = range(0, len(x), ROWS_AT_ONCE)
        sums = np.empty((len(starts), *x.shape[1:]), x.dtype)
        for total, start in zip(sums, starts, strict=True):
            np.add.reduce(x[start : start + ROWS_AT_ONCE], axis=0, out=total)
        x = sums
    return np.add.reduce(x, axis=0, out=out)


def all_finite(x: Array) -> bool:
    """Return whether no element of ``x`` is infinite or NaN."""
    return bool(array_namespace(x).isfinite(widened(x)).all())


def sum_of_squares(x: Array) -> float:
    """Return the sum of the squares of ``x``, in float64.

    Except for float64, it is finite exactly if all elements are, because no other square overflows.
    """
    xp = array_namespace(x)
    wide = widened(x).astype(xp.float64)
    return float((wide * wide).sum())


def sums_of_squares(xs: Iterable[Array]) -> list[float]:
    """Return the `sum_of_squares` of each array."""
    return [float(sum_of_squares(x)) for x in xs]


def clipped_scale(squares: Iterable[float], scale: float, most: float) -> float:
    """Return the scale that limits the norm of a gradient to ``most``, given the squared norms of its parts.

    That is ``scale`` if the norm is within the limit, or not finite.

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013, algorithm 1.
    """
    norm = math.sqrt(sum(squares))
    return most / norm if norm < math.inf and norm * scale > most else scale


def segment_squares(params: Array, grads: Array, bounds: Array, out: Array) -> None:
    """Compute the squared norms for LARS (You, Gitman and Ginsburg 2017, algorithm 1) of every layer.

    Squared, so that the segments of a layer on different ranks add up. Changes ``out``.

    Args:
        params: the weights of all layers, flat, shape ``(count,)``.
        grads: their gradients, likewise.
        bounds: int64, shape ``(layers + 1,)``, ascending: layer k is elements ``bounds[k]`` to ``bounds[k + 1]``.
        out: float64, shape ``(layers, 2)``: the sums of squares of a layer's weights and of its gradients.
    """
    for segment in range(bounds.size - 1):
        first, last = int(bounds[segment]), int(bounds[segment + 1])
        out[segment, 0] = sum_of_squares(params[first:last])
        out[segment, 1] = sum_of_squares(grads[first:last])


def sgd(param: Array, grad: Array, coefficients: tuple[float, float, float]) -> None:
    """Update ``param`` by ``p -= lr * (scale * g + weight_decay * p)``, in place.

    ``coefficients`` are ``(lr, weight_decay, scale)``.
    """
    lr, weight_decay, scale = coefficients
    g = grad * scale + param * weight_decay
    param[...] = param - g * lr


def sgd_momentum(param: Array, grad: Array, velocity: Array, coefficients: tuple[float, float, float, float]) -> None:
    """Update ``param`` and ``velocity`` by ``v = momentum * v + g``, ``p -= lr * v``, in place.

    ``coefficients`` are ``(lr, weight_decay, scale, momentum)`` (Polyak 1964, in the form of Sutskever et al. 2013,
    without dampening).
    """
    lr, weight_decay, scale, momentum = coefficients
    g = grad * scale + param * weight_decay
    velocity[...] = velocity * momentum + g
    param[...] = param - velocity * lr


def sgd_nesterov(param: Array, grad: Array, velocity: Array, coefficients: tuple[float, float, float, float]) -> None:
    """Update ``param`` and ``velocity`` by ``v = momentum * v + g``, ``p -= lr * (g + momentum * v)``, in place.

    ``coefficients`` are ``(lr, weight_decay, scale, momentum)`` (Sutskever et al. 2013, section 2).
    """
    lr, weight_decay, scale, momentum = coefficients
    g = grad * scale + param * weight_decay
    velocity[...] = velocity * momentum + g
    param[...] = param - (g + velocity * momentum) * lr


def adam(param: Array, grad: Array, m: Array, v: Array, coefficients: tuple[float, ...]) -> None:
    """Update by Adam (Kingma and Ba 2015, algorithm 1) or AdamW (Loshchilov and Hutter 2019, algorithm 2).

    ``p = shrink * p - step_size * m / (sqrt(v) * root_scale + eps)``; changes ``param``, ``m`` and ``v``.
    ``coefficients`` are ``(step_size, weight_decay, scale, shrink, 1 - beta1, beta2, 1 - beta2, root_scale, eps)``,
    where ``step_size`` is ``lr / (1 - beta1**step)`` and ``root_scale`` is ``1 / sqrt(1 - beta2**step)``. Adam has
    ``shrink`` 1, AdamW has ``weight_decay`` 0 and ``shrink`` ``1 - lr * weight_decay``.
    """
    step_size, weight_decay, scale, shrink, one_minus_beta1, beta2, one_minus_beta2, root_scale, eps = coefficients
    xp = array_namespace(param, grad, m, v)
    g = grad * scale + param * weight_decay
    m[...] = m + (g - m) * one_minus_beta1
    v[...] = v * beta2 + (g * g) * one_minus_beta2
    param[...] = param * shrink - (m / (xp.sqrt(v) * root_scale + eps)) * step_size


def _rates(squares: Array, weight_decay: float, scale: float, trust: float) -> tuple[Array, Array]:
    """Return weight decay and scale of the layer (You, Gitman and Ginsburg 2017, algorithm 1).

    Both are multiplied by ``trust * |w| / (scale * |g| + weight_decay * |w|)``, unless a norm is zero.
    """
    xp = array_namespace(squares)
    weights, gradient = xp.sqrt(squares[0]), xp.sqrt(squares[1])
    is_defined = (weights != 0) & (gradient != 0)
    length = xp.where(is_defined, gradient * scale + weight_decay * weights, 1.0)
    factor = xp.where(is_defined, trust * weights / length, 1.0)
    return weight_decay * factor, scale * factor


def _of_layer(squares: Array, like: Array, coefficients: tuple[float, ...]) -> tuple[float, ...]:
    lr, weight_decay, scale, *momentum, trust = coefficients
    rates = (rate.astype(like.dtype) for rate in _rates(squares, weight_decay, scale, trust))
    return (lr, *rates, *momentum)  # type: ignore[return-value]


def lars_sgd(param: Array, grad: Array, squares: Array, coefficients: tuple[float, float, float, float]) -> None:
    """Update one layer as `sgd`; ``coefficients`` are ``(lr, weight_decay, scale, trust)``."""
    sgd(param, grad, _of_layer(squares, param, coefficients))  # type: ignore[arg-type]


def lars_sgd_momentum(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """Update one layer as `sgd_momentum`; ``coefficients``: ``(lr, weight_decay, scale, momentum, trust)``."""
    sgd_momentum(param, grad, velocity, _of_layer(squares, param, coefficients))  # type: ignore[arg-type]


def lars_sgd_nesterov(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """Update one layer as `sgd_nesterov`; ``coefficients`` as in `lars_sgd_momentum`."""
    sgd_nesterov(param, grad, velocity, _of_layer(squares, param, coefficients))  # type: ignore[arg-type]


def _floats(x: Array) -> Array:
    xp = array_namespace(x)
    return x.view(xp.float16) if x.dtype == xp.uint16 else x


def _packed(flags: Array, width: int) -> Array:
    """Pack truth values into uint32 words of ``width`` bits, the first value lowest."""
    xp = array_namespace(flags)
    lanes = xp.zeros(-(-flags.size // width) * width, dtype=xp.uint32)
    lanes[: flags.size] = flags
    return (lanes.reshape(-1, width) << xp.arange(width, dtype=xp.uint32)).sum(axis=1, dtype=xp.uint32)


def _unpacked(words: Array, width: int, count: int) -> Any:
    """Return the first ``count`` truth values in words of ``width`` bits."""
    xp = array_namespace(words)
    bits = (words[:, None] >> xp.arange(width, dtype=xp.uint32)) & 1
    return bits.reshape(-1)[:count] != 0


def pack_two_bit(grad: Array, residual: Array, threshold: float, magnitude: float, words: Array) -> None:
    """Encode ``residual + grad`` in 2 bits per element; changes ``residual`` and ``words``.

    Elements of at least ``threshold`` are sent as ``magnitude``, those of at most ``-threshold`` as ``-magnitude``,
    others as nothing. What was sent is subtracted from ``residual``.

    ``threshold`` is at least 0. ``words`` is uint32, shape ``((count + 15) // 16,)``: bit i marks element i of 16 as
    positive, bit 16 + i as negative; bits of missing elements are 0.
    """
    xp = array_namespace(grad, residual, words)
    added, kept = _floats(grad), _floats(residual)
    kept += added
    limit = kept.dtype.type(threshold)
    plus, minus = kept >= limit, kept <= -limit
    sent = kept.dtype.type(magnitude)
    kept -= xp.where(plus, sent, xp.where(minus, -sent, kept.dtype.type(0)))
    words[...] = _packed(plus, 16) | (_packed(minus, 16) << 16)


def unpack_two_bit(words: Array, magnitude: float, out: Array) -> None:
    """Decode the words of `pack_two_bit` into ``out``, shape ``(count,)``."""
    xp = array_namespace(words, out)
    into = _floats(out)
    sent = into.dtype.type(magnitude)
    minus = xp.where(_unpacked(words >> 16, 16, out.size), -sent, into.dtype.type(0))
    into[...] = xp.where(_unpacked(words, 16, out.size), sent, minus)


def pack_one_bit(grad: Array, residual: Array, threshold: float, magnitude: float, words: Array) -> None:
    """Encode ``residual + grad`` in 1 bit per element; changes ``residual`` and ``words``.

    Elements above ``threshold`` are sent as ``magnitude``, others as ``-magnitude``. What was sent is subtracted from
    ``residual``. ``words`` is uint32, shape ``((count + 31) // 32,)``: bit i is that of element i of 32; bits of
    missing elements are 0.
    """
    xp = array_namespace(grad, residual, words)
    added, kept = _floats(grad), _floats(residual)
    kept += added
    plus = kept > kept.dtype.type(threshold)
    sent = kept.dtype.type(magnitude)
    kept -= xp.where(plus, sent, -sent)
    words[...] = _packed(plus, 32)


def unpack_one_bit(words: Array, magnitude: float, out: Array) -> None:
    """Decode the words of `pack_one_bit` into ``out``, shape ``(count,)``."""
    xp = array_namespace(words, out)
    into = _floats(out)
    sent = into.dtype.type(magnitude)
    into[...] = xp.where(_unpacked(words, 32, out.size), sent, -sent)


BLOCK = 256
"""Number of elements with one scale; in longer blocks few large elements delay many small ones."""

SHARE = 0.6
"""Threshold of 2 bits relative to a block's root mean square; about the least residual for normal data."""

_LARGEST = 3.4028234e38  # float32


def num_blocks(count: int) -> int:
    """Return the number of scales of ``count`` elements."""
    return -(-count // BLOCK)


def _blocks(count: int) -> Iterator[tuple[int, slice]]:
    for block in range(num_blocks(count)):
        yield block, slice(block * BLOCK, min((block + 1) * BLOCK, count))


def encode_two_bit(grad: Array, residual: Array, threshold: float, scales: Array, words: Array) -> None:
    """Encode block by block with `pack_two_bit`; changes ``residual``, ``scales`` and ``words``.

    ``threshold`` is both the threshold and the magnitude that is sent. With 0 the threshold is `SHARE` of the block's
    root mean square, and the mean of the elements that reach it is sent. ``scales`` is float32, shape
    ``(num_blocks(count),)``, the magnitudes; ``words`` is uint32, shape ``((count + 15) // 16,)``.
    """
    xp = array_namespace(grad, residual)
    for block, part in _blocks(grad.size):
        total = (_floats(grad[part]) + _floats(residual[part])).astype(xp.float64)
        squares, packed = float(xp.sum(total * total)), words[part.start // 16 : -(-part.stop // 16)]
        limit = sent = threshold
        if threshold == 0 and squares < float("inf"):
            limit = SHARE * (squares / total.size) ** 0.5
            sent = float(xp.mean(abs(total)[abs(total) >= limit]))
        if squares < float("inf") and sent <= _LARGEST:
            scales[block] = sent
            pack_two_bit(grad[part], residual[part], limit, float(scales[block]), packed)
        else:
            scales[block], packed[...], residual[part] = float("nan"), 0xFFFF, 0


def decode_two_bit(scales: Array, words: Array, out: Array) -> None:
    """Decode the result of `encode_two_bit` into ``out``, shape ``(count,)``."""
    for block, part in _blocks(out.size):
        unpack_two_bit(words[part.start // 16 : -(-part.stop // 16)], float(scales[block]), out[part])


def encode_one_bit(
    grad: Array, residual: Array, threshold: float, magnitude: float, scales: Array, words: Array
) -> None:
    """Encode block by block with `pack_one_bit`; changes ``residual``, ``scales`` and ``words``.

    ``magnitude`` is that of all blocks, or 0 for each block's mean magnitude. ``scales`` is float32, shape
    ``(num_blocks(count),)``, the magnitudes; ``words`` is uint32, shape ``((count + 31) // 32,)``.
    """
    xp = array_namespace(grad, residual)
    for block, part in _blocks(grad.size):
        total = float(xp.sum(abs(_floats(grad[part]) + _floats(residual[part])), dtype=xp.float64))
        packed = words[part.start // 32 : -(-part.stop // 32)]
        sent = magnitude if magnitude > 0 else total / (part.stop - part.start)
        if total < float("inf") and sent <= _LARGEST:
            scales[block] = sent
            pack_one_bit(grad[part], residual[part], threshold, float(scales[block]), packed)
        else:
            scales[block], packed[...], residual[part] = float("nan"), 0xFFFFFFFF, 0


def decode_one_bit(scales: Array, words: Array, out: Array) -> None:
    """Decode the result of `encode_one_bit` into ``out``, shape ``(count,)``."""
    for block, part in _blocks(out.size):
        unpack_one_bit(words[part.start // 32 : -(-part.stop // 32)], float(scales[block]), out[part])


def encode_float16(grad: Array, residual: Array, halves: Array) -> None:
    """Send the nearest float16, as its bits; changes ``residual`` and ``halves``, uint16, shape ``(count,)``.

    From 65520 on that is an infinity.
    """
    residual += grad
    to_float16(residual, halves)
    _keep_rest(residual, halves, from_float16)


def encode_bfloat16(grad: Array, residual: Array, halves: Array) -> None:
    """Send the nearest bfloat16, as its bits; changes ``residual`` and ``halves``, uint16, shape ``(count,)``.

    A float64 is rounded to float32 first.
    """
    residual += grad
    to_bfloat16(residual.astype(array_namespace(residual).float32), halves)
    _keep_rest(residual, halves, from_bfloat16)


def _keep_rest(residual: Array, halves: Array, back: Callable[[Array, Array], None]) -> None:
    xp = array_namespace(residual)
    sent = xp.empty(residual.shape, dtype=xp.float32)
    back(halves, sent)
    arrives = xp.isfinite(sent)
    residual[...] = xp.where(arrives, residual - xp.where(arrives, sent, 0), 0)


def encode_top_k(grad: Array, residual: Array, indices: Array, values: Array) -> None:
    """Send the elements of largest magnitude, NaNs first, then the first of equal ones; changes all but ``grad``.

    ``indices`` is uint32, shape ``(k,)``, and ascending on return; k is at most the number of elements. ``values`` has
    the dtype of ``grad`` and shape ``(k,)``.
    """
    xp = array_namespace(grad, residual)
    residual += grad
    is_number = ~xp.isnan(residual)
    order = xp.lexsort(xp.stack([xp.where(is_number, -abs(residual), 0), is_number]))
    chosen = xp.sort(order[: indices.size])
    indices[...], values[...] = chosen, residual[chosen]
    residual[chosen] = 0
    residual[~xp.isfinite(residual)] = 0  # there may be more than are sent


def decode_top_k(indices: Array, values: Array, out: Array) -> None:
    """Decode the result of `encode_top_k` into ``out``, shape ``(count,)``, with zeros elsewhere."""
    out[...] = 0
    out[indices] = values
