"""Reference implementations of all kernels, in operations that NumPy and CuPy share.

They are the specification for tests of the compiled kernels, and compute for arrays without a kernel. The Numba kernels
in `networks`, `convolution` and `gradients` and the CUDA kernels in `cuda.kernels` have the same names and arguments.
Results are written into the given arrays, which must not overlap with the operands unless stated.

Networks: elementwise operations, normalization, sequences, convolution and pooling. Arrays have one float dtype. Casts
and scaling take 1-D contiguous arrays; 16-bit numbers are passed as their bits in uint16. Casts to 16 bits round to
nearest, ties to even (IEEE 754, section 4.3.1). Too large values become infinite, subnormals are kept, and a NaN stays
NaN. Sequences are contiguous, ``(batch, time, features)``. Additions to one row of a table are made in the given order,
so the same run gives the same bits. Images are ``(batch, channels, height, width)``, weights ``(out, in, kernel height,
kernel width)``. Pairs ``kernel``, ``stride`` and ``padding`` are (vertical, horizontal). Padding is on both sides; that
of a convolution is zeros.

Gradients: reductions, updates and encodings. Arrays are 1-D and contiguous, and may be empty. Floats of 16 bits are
`hpcdp.core.arrays.words`.

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

from ..core.arrays import Array, array_namespace, is_half
from .cuda import matmul_of

_SLOPE, _CUBE = math.sqrt(2 / math.pi), 0.044715


def add(a: Array, b: Array, out: Array) -> None:
    """Compute ``out = a + b``, of one shape; ``out`` may be either operand."""
    array_namespace(a).add(a, b, out=out)


def relu(x: Array, out: Array) -> None:
    """Compute ``out = max(x, 0)``, which keeps NaN; ``out`` may be ``x``."""
    array_namespace(x).maximum(x, 0, out=out)


def add_bias(y: Array, bias: Array, relu: bool) -> None:
    """Compute ``y += bias``, then ``max(y, 0)`` if ``relu``; changes ``y``, of shape ``(rows, features)`` or images."""
    xp = array_namespace(y, bias)
    y += bias.reshape(-1, *[1] * (y.ndim - 2))
    if relu:
        xp.maximum(y, 0, out=y)


def relu_gradient(gy: Array, y: Array, dx: Array) -> None:
    """Set ``dx`` to ``gy`` where the result ``y`` of ReLU is positive, else to 0, for any ``gy``; any shape."""
    dx[...] = array_namespace(gy, y).where(y > 0, gy, 0)


def bias_gradient(gy: Array, y: Array | None, dx: Array | None, dbias: Array) -> None:
    """Set ``dbias`` to the sum of ``gy``, shaped as in `add_bias`, over all axes but the second.

    If ``y``, the result of ReLU, is given, `relu_gradient` is written to ``dx`` and summed instead.
    """
    if y is not None:
        relu_gradient(gy, y, dx)
        gy = dx
    dbias[...] = gy.sum(axis=(0, *range(2, gy.ndim)), dtype="float32" if is_half(gy) else None)


def gelu(x: Array, out: Array) -> None:
    """Compute GELU with the tanh approximation (Hendrycks and Gimpel 2016, section 2)."""
    xp = array_namespace(x)
    out[...] = 0.5 * x * (1 + xp.tanh(_SLOPE * (x + _CUBE * x * x * x)))


def gelu_gradient(gy: Array, x: Array, dx: Array) -> None:
    """Compute the gradient of `gelu`; changes ``dx``."""
    xp = array_namespace(gy, x)
    y = xp.tanh(_SLOPE * (x + _CUBE * x * x * x))
    dx[...] = gy * (0.5 * (1 + y) + 0.5 * x * (1 - y * y) * _SLOPE * (1 + 3 * _CUBE * x * x))


def _of_namespace(name: str) -> Callable[..., Array]:
    return lambda *operands: getattr(array_namespace(*operands), name)(*operands)


def _as_number(relation: str) -> Callable[[Array, Array], Array]:
    def compare(a: Array, b: Array) -> Array:
        xp = array_namespace(a, b)
        return getattr(xp, relation)(a, b).astype(xp.result_type(a, b))

    return compare


def _where_positive(a: Array, b: Array) -> Array:
    return array_namespace(a, b).where(a > 0, b, 0)


def _gelu(a: Array) -> Array:
    out = array_namespace(a).empty(a.shape, dtype=a.dtype)
    gelu(a, out)
    return out


def _gelu_gradient(gy: Array, a: Array) -> Array:
    out = array_namespace(gy, a).empty(a.shape, dtype=a.dtype)
    gelu_gradient(gy, a, out)
    return out


OPERATIONS: dict[str, Callable[..., Array]] = {
    **{name: _of_namespace(name) for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum")},
    **{name: _of_namespace(name) for name in ("negative", "abs", "sqrt", "sign")},
    "greater": _as_number("greater"),
    "equal": _as_number("equal"),
    "where_positive": _where_positive,
    "gelu": _gelu,
    "gelu_gradient": _gelu_gradient,
    "copy": lambda a: a.copy(),
}
"""Operations of a chain by name; `run_chain` knows them by their position.

``greater`` and ``equal`` return 1 or 0; ``where_positive(a, b)`` returns ``b`` where ``a`` is above 0, else 0.
"""


def to_float16(x: Array, out: Array) -> None:
    """Convert float32, here also float64, to the bits of IEEE binary16; changes ``out``."""
    xp = array_namespace(x, out)
    with np.errstate(over="ignore"):
        out[...] = x.astype(xp.float16).view(xp.uint16)


def from_float16(x: Array, out: Array) -> None:
    """Convert the bits of IEEE binary16 to float32, exactly; changes ``out``."""
    xp = array_namespace(x, out)
    out[...] = x.view(xp.float16).astype(xp.float32)


def to_bfloat16(x: Array, out: Array) -> None:
    """Convert float32 to the bits of bfloat16, the upper half of a float32; changes ``out``.

    Adding 0x7fff carries into the upper half above a tie; adding one more carries at a tie with an odd upper half. A
    NaN is not rounded, which could make it infinite: it is truncated and made quiet.
    """
    xp = array_namespace(x, out)
    bits = x.view(xp.uint32)
    upper = bits >> 16
    rounded = (bits + ((upper & 1) + 0x7FFF)) >> 16
    out[...] = xp.where(x != x, upper | 0x40, rounded).astype(xp.uint16)


def from_bfloat16(x: Array, out: Array) -> None:
    """Convert the bits of bfloat16 to float32, exactly; changes ``out``."""
    xp = array_namespace(x, out)
    out[...] = (x.astype(xp.uint32) << 16).view(xp.float32)


def widened(x: Array) -> Any:
    """Return ``x``, of any shape, in its computation type: `hpcdp.core.arrays.words` as float32, others unchanged."""
    xp = array_namespace(x)
    if x.dtype not in (xp.uint16, xp.int16):
        return x
    wide, from_words = xp.empty(x.shape, dtype=xp.float32), from_float16 if x.dtype == xp.uint16 else from_bfloat16
    from_words(x.view(xp.uint16), wide)
    return wide


def narrowed(wide: Array, like: Array) -> Any:
    """Return the result of `widened` rounded to words like ``like``; others unchanged."""
    xp = array_namespace(wide, like)
    if like.dtype not in (xp.uint16, xp.int16):
        return wide
    words, to_words = xp.empty(wide.shape, dtype=xp.uint16), to_float16 if like.dtype == xp.uint16 else to_bfloat16
    to_words(wide, words)
    return words.view(like.dtype)


def follow(wide: Array, x: Array) -> None:
    """Overwrite elements of ``wide``, float32, that do not round to those of `hpcdp.core.arrays.words` ``x``."""
    xp = array_namespace(wide, x)
    xp.copyto(wide, widened(x), where=narrowed(wide, x) != x)


def scale(x: Array, factor: float) -> None:
    """Compute ``x *= factor``, in place; ``factor`` is rounded to the dtype first.

    `hpcdp.core.arrays.words` are multiplied in float32 and rounded once.
    """
    scale_into(x, factor, x)


def scale_into(x: Array, factor: float, out: Array) -> None:
    """Compute ``out = x * factor``, as `scale`."""
    wide = widened(x)
    out[...] = narrowed(wide * wide.dtype.type(factor), x)


def batch_norm(x: Array, scale: Array, shift: Array, out: Array, saved: tuple[Array, Array], eps: float) -> None:
    """Apply batch normalization (Ioffe and Szegedy 2015, algorithm 1) over all axes but the second.

    ``x`` and ``out`` have the shape ``(batch, channels, positions)``. All else has the shape ``(channels,)``: ``scale``
    (gamma), ``shift`` (beta), and ``saved``, which receives the mean and the biased variance.
    """
    xp = array_namespace(x, scale)
    mean, variance = saved
    mean[...] = x.mean(axis=(0, 2))
    centered = x - mean[:, None]
    variance[...] = (centered * centered).mean(axis=(0, 2))
    out[...] = centered * (scale / xp.sqrt(variance + eps))[:, None] + shift[:, None]


def batch_norm_gradients(
    gy: Array, x: Array, scale: Array, saved: tuple[Array, Array], into: tuple[Array, Array, Array], eps: float
) -> None:
    """Compute the gradients of `batch_norm`: ``into`` receives those of ``x``, ``scale`` and ``shift``."""
    xp = array_namespace(gy, x)
    dx, dscale, dshift = into
    mean, variance = saved
    inverse = 1.0 / xp.sqrt(variance + eps)
    normal = (x - mean[:, None]) * inverse[:, None]
    dshift[...] = gy.sum(axis=(0, 2))
    dscale[...] = (gy * normal).sum(axis=(0, 2))
    count = x.shape[0] * x.shape[2]
    correction = dshift[:, None] + normal * dscale[:, None]
    dx[...] = (gy - correction * (1.0 / count)) * (scale * inverse)[:, None]


def channel_sums(x: Array, sums: Array) -> None:
    """Compute the sum and the sum of squares of each channel of ``x``, shape ``(batch, channels, positions)``.

    ``sums`` receives them, shape ``(2, channels)``, float64, so that cancellation of squares is harmless.
    """
    xp = array_namespace(x, sums)
    doubles = x.astype(xp.float64)
    sums[0] = doubles.sum(axis=(0, 2))
    sums[1] = (doubles * doubles).sum(axis=(0, 2))


def normalize(x: Array, scale: Array, shift: Array, saved: tuple[Array, Array], out: Array, eps: float) -> None:
    """Apply `batch_norm` with the mean and variance ``saved``; changes ``out``."""
    xp = array_namespace(x, scale)
    mean, variance = saved
    out[...] = (x - mean[:, None]) * (scale / xp.sqrt(variance + eps))[:, None] + shift[:, None]


def gradient_sums(gy: Array, x: Array, saved: tuple[Array, Array], sums: Array, eps: float) -> None:
    """Compute this batch's gradients of shift and scale: rows 0 and 1 of ``sums``, ``(2, channels)`` float64."""
    xp = array_namespace(gy, x)
    mean, variance = saved
    normal = (x - mean[:, None]) / xp.sqrt(variance + eps)[:, None]
    sums[0] = gy.sum(axis=(0, 2))
    sums[1] = (gy * normal).sum(axis=(0, 2))


def gradient_of_input(
    gy: Array, x: Array, scale: Array, saved: tuple[Array, Array], means: Array, dx: Array, eps: float
) -> None:
    """Compute the gradient of ``x``; ``means`` are `gradient_sums` divided by the count of the whole batch."""
    xp = array_namespace(gy, x)
    mean, variance = saved
    inverse = 1.0 / xp.sqrt(variance + eps)
    constant, slope = means.astype(x.dtype)
    normal = (x - mean[:, None]) * inverse[:, None]
    dx[...] = (gy - constant[:, None] - normal * slope[:, None]) * (scale * inverse)[:, None]


def layer_norm(x: Array, scale: Array, shift: Array, out: Array, saved: tuple[Array, Array], eps: float) -> None:
    """Normalize each row by its own mean and variance (Ba, Kiros and Hinton 2016), times ``scale``, plus ``shift``.

    ``x`` and ``out`` are ``(rows, features)``; ``saved`` receives each row's mean and inverse deviation, ``(rows,)``.
    """
    xp = array_namespace(x, scale)
    mean = x.mean(axis=1)
    centered = x - mean[:, None]
    inverse = 1.0 / xp.sqrt((centered * centered).mean(axis=1) + eps)
    out[...] = centered * inverse[:, None] * scale + shift
    saved[0][...], saved[1][...] = mean, inverse


def layer_norm_gradients(
    gy: Array, x: Array, scale: Array, saved: tuple[Array, Array], into: tuple[Array, Array, Array]
) -> None:
    """Compute the gradients of `layer_norm`: ``into`` receives those of ``x``, ``scale`` and ``shift``."""
    dx, dscale, dshift = into
    mean, inverse = saved
    normal = (x - mean[:, None]) * inverse[:, None]
    dscale[...] = (gy * normal).sum(axis=0)
    dshift[...] = gy.sum(axis=0)
    scaled = gy * scale
    along = (scaled * normal).mean(axis=1)[:, None]
    dx[...] = (scaled - scaled.mean(axis=1)[:, None] - normal * along) * inverse[:, None]


def causal_shift(scores: Array, factor: float) -> None:
    """Scale ``scores`` by ``factor`` and prepare them for a causal softmax, in place.

    Row i of each matrix, ``(matrices, time, time)``, is shifted by its largest element among the first i + 1, and minus
    infinity after them.
    """
    xp = array_namespace(scores)
    time = scores.shape[-1]
    later = xp.arange(time)[None, :] > xp.arange(time)[:, None]
    scores *= factor
    scores[...] = xp.where(later, -xp.inf, scores)
    scores -= scores.max(axis=-1, keepdims=True)


def normalize_rows(chances: Array) -> None:
    """Divide each row of ``chances``, ``(matrices, time, time)``, by its sum, in place."""
    chances /= chances.sum(axis=-1, keepdims=True)


def softmax_gradient(chances: Array, gradients: Array, factor: float) -> None:
    """Replace ``gradients`` after a softmax over rows by those before it, times ``factor``."""
    along = (gradients * chances).sum(axis=-1, keepdims=True)
    gradients[...] = chances * (gradients - along) * factor


def lstm_step(bias: Array, product: Array, t: int, gates: Array, cells: Array, inputs: Array) -> None:
    """Run one step of an LSTM (Hochreiter and Schmidhuber 1997; with forget gates, Gers, Schmidhuber and Cummins 2000).

    Arrays of all steps have time first, so that the data of a step is contiguous.

    Args:
        bias: ``(4 size,)``, of the input, forget, candidate and output gates.
        product: ``(batch, 4 size)``, ``inputs[t]`` times the weights.
        t: the step.
        gates: ``(time, batch, 4 size)``, of which ``t``, the values of the gates, is written.
        cells: ``(time + 1, batch, size)``; ``t`` is read and ``t + 1`` written.
        inputs: ``(time + 1, batch, features + size)``, for each step its features and the hidden values of the step
            before. The hidden values of this step are written at ``t + 1``.
    """
    xp = array_namespace(gates, bias)
    size = cells.shape[2]
    total = product + bias
    i, f, o = (0.5 * xp.tanh(0.5 * total[:, k * size : (k + 1) * size]) + 0.5 for k in (0, 1, 3))
    g = xp.tanh(total[:, 2 * size : 3 * size])
    gates[t] = xp.concatenate([i, f, g, o], axis=1)
    cells[t + 1] = i * g + f * cells[t]
    inputs[t + 1, :, -size:] = o * xp.tanh(cells[t + 1])


def lstm_step_gradients(
    gy: Array, dinputs: Array, dcell: Array, t: int, gates: Array, cells: Array, dgates: Array, dbias: Array
) -> None:
    """Compute the gradients of `lstm_step`.

    Args:
        gy: ``(batch, time, size)``, gradients of the hidden values from outside of the LSTM.
        dinputs: gradients of ``inputs``; ``gy`` at ``t`` is added to that of the hidden values at ``t + 1``.
        dcell: ``(batch, size)``, gradient of the cells after this step; replaced by that before it.
        t: the step.
        gates: as in `lstm_step`.
        cells: as in `lstm_step`.
        dgates: at ``t`` the gradient of the gates before their activation; written.
        dbias: the same, summed over the batch, is added to it.
    """
    xp = array_namespace(gy, gates)
    size = dcell.shape[1]
    i, f, g, o = (gates[t, :, k * size : (k + 1) * size] for k in range(4))
    dhidden = dinputs[t + 1, :, -size:]
    dhidden += gy[:, t]
    y = xp.tanh(cells[t + 1])
    dcell += dhidden * o * (1 - y * y)
    parts = [
        dcell * g * i * (1 - i),
        dcell * cells[t] * f * (1 - f),
        dcell * i * (1 - g * g),
        dhidden * y * o * (1 - o),
    ]
    dgates[t] = xp.concatenate(parts, axis=1)
    dbias += dgates[t].sum(axis=0)
    dcell *= f


def softmax_cross_entropy(logits: Array, labels: Array, chances: Array, losses: Array) -> None:
    """Compute ``losses = -log(softmax(logits)[label])`` of each row; changes ``chances`` and ``losses``.

    Args:
        logits: shape ``(rows, classes)``.
        labels: int64, shape ``(rows,)``, from 0 to ``classes - 1``.
        chances: like ``logits``: receives the softmax of each row.
        losses: shape ``(rows,)``.
    """
    xp = array_namespace(logits, labels)
    shifted = logits - logits.max(axis=1, keepdims=True)
    xp.exp(shifted, out=chances)
    total = chances.sum(axis=1)
    xp.subtract(xp.log(total), shifted[xp.arange(labels.size), labels], out=losses)
    xp.divide(chances, total[:, None], out=chances)


def softmax_cross_entropy_gradient(gy: Array, labels: Array, chances: Array, dx: Array) -> None:
    """Compute the gradient ``dx`` of the logits from the gradient ``gy`` of the losses, shape ``(rows,)``."""
    xp = array_namespace(gy, chances)
    xp.multiply(chances, gy[:, None], out=dx)
    dx[xp.arange(labels.size), labels] -= gy


def add_rows(table: Array, rows: Array, values: Array) -> None:
    """Add ``values[k]`` to ``table[rows[k]]`` for each k, in that order.

    Args:
        table: ``(number, features)``; changed.
        rows: integers from 0 to ``number - 1``, shape ``(count,)``.
        values: ``(count, features)``.
    """
    add_at(table, rows, values)


def add_at(table: Array, key: Any, values: Array) -> None:
    """Add ``values`` to ``table[key]``; elements that ``key`` selects several times receive all of theirs.

    Args:
        table: the array; changed.
        key: an index with arrays of integers, masks, slices and others.
        values: shape of ``table[key]``.
    """
    array_namespace(table, values).add.at(table, key, values)


Pair = tuple[int, int]


def output_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """Return the number of positions of a window of ``kernel`` along an axis of ``size``."""
    return (size + 2 * padding - kernel) // stride + 1


def padded(x: Array, padding: Pair, value: float = 0.0) -> Array:
    """Return ``x`` surrounded by ``value``; ``x`` itself without padding."""
    if padding == (0, 0):
        return x
    (batch, channels, height, width), (top, left) = x.shape, padding
    xp = array_namespace(x)
    wide = xp.full((batch, channels, height + 2 * top, width + 2 * left), value, dtype=x.dtype)
    wide[:, :, top : top + height, left : left + width] = x
    return wide


def window(wide: Array, at: Pair, size: Pair, stride: Pair) -> Array:
    """Return the view of ``wide`` that element ``at`` of the window covers over all positions."""
    (i, j), (height, width), (down, right) = at, size, stride
    return wide[:, :, i : i + (height - 1) * down + 1 : down, j : j + (width - 1) * right + 1 : right]


def offsets(kernel: Pair) -> list[Pair]:
    """Return the elements of a window, along its rows."""
    return [(i, j) for i in range(kernel[0]) for j in range(kernel[1])]


def _unfolded(x: Array, kernel: Pair, stride: Pair, padding: Pair, size: Pair) -> Array:
    """Return the patches (im2col): shape ``(channels * kernel positions, batch * output positions)``."""
    xp = array_namespace(x)
    wide = padded(x, padding)
    patches = xp.stack([window(wide, at, size, stride) for at in offsets(kernel)], axis=0)
    rows = x.shape[1] * kernel[0] * kernel[1]
    return patches.transpose(2, 0, 1, 3, 4).reshape(rows, x.shape[0] * size[0] * size[1])


def conv2d(x: Array, weight: Array, bias: Array | None, out: Array, stride: Pair, padding: Pair, relu: bool) -> None:
    """Compute ``out = weight * x + bias``, cross-correlation, followed by ``max(out, 0)`` if ``relu``.

    ``bias`` has the shape ``(out channels,)``.
    """
    xp = array_namespace(x, weight)
    batch, channels, height, width = out.shape
    columns = _unfolded(x, weight.shape[2:], stride, padding, (height, width))
    product = matmul_of(xp)(weight.reshape(channels, -1), columns).reshape(channels, batch, height, width)
    if bias is not None:
        product = product + bias[:, None, None, None]
    if relu:
        product = xp.maximum(product, 0)
    out[...] = product.transpose(1, 0, 2, 3)


def conv2d_gradients(
    x: Array,
    weight: Array,
    gy: Array,
    out: Array | None,
    into: tuple[Array | None, Array | None, Array | None],
    stride: Pair,
    padding: Pair,
) -> None:
    """Compute the gradients of `conv2d` from the gradient ``gy`` of its result.

    ``out`` is the result if it passed through ReLU. ``into`` receives the gradients of ``x``, ``weight`` and bias that
    are not None.
    """
    xp = array_namespace(x, weight)
    dx, dweight, dbias = into
    if out is not None:
        gy = xp.where(out > 0, gy, 0)
    channels, kernel, size = gy.shape[1], weight.shape[2:], gy.shape[2:]
    flat = gy.transpose(1, 0, 2, 3).reshape(channels, x.shape[0] * size[0] * size[1])
    if dbias is not None:
        dbias[...] = flat.sum(axis=1)
    if dweight is not None:
        columns = _unfolded(x, kernel, stride, padding, size)
        dweight[...] = matmul_of(xp)(flat, columns.T).reshape(weight.shape)
    if dx is not None:
        columns = matmul_of(xp)(weight.reshape(channels, -1).T, flat)
        columns = columns.reshape(x.shape[1], len(offsets(kernel)), x.shape[0], *size)
        wide = xp.zeros_like(padded(x, padding))
        for number, at in enumerate(offsets(kernel)):
            part = window(wide, at, size, stride)
            part += columns[:, number].transpose(1, 0, 2, 3)
        dx[...] = window(wide, padding, x.shape[2:], (1, 1))


def average_pool(x: Array, out: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """Set ``out`` to the mean of each window, with padding counted."""
    wide = padded(x, padding)
    total = sum(window(wide, at, out.shape[2:], stride) for at in offsets(kernel))
    out[...] = total * (1.0 / (kernel[0] * kernel[1]))


def average_pool_gradient(gy: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """Compute the gradient ``dx`` of `average_pool`."""
    xp = array_namespace(gy)
    wide = xp.zeros_like(padded(dx, padding))
    share = gy * (1.0 / (kernel[0] * kernel[1]))
    for at in offsets(kernel):
        part = window(wide, at, gy.shape[2:], stride)
        part += share
    dx[...] = window(wide, padding, dx.shape[2:], (1, 1))


def max_pool(x: Array, out: Array, chosen: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """Set ``out`` to the largest element of each window, which is never padding.

    ``chosen``, int32, shaped like ``out``, receives its index in the window, counted along rows: the first of equal
    elements, but the last NaN, which counts as larger than all.
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
    """Compute the gradient ``dx`` of `max_pool`."""
    xp = array_namespace(gy)
    wide = xp.zeros_like(padded(dx, padding))
    for number, at in enumerate(offsets(kernel)):
        part = window(wide, at, gy.shape[2:], stride)
        part += xp.where(chosen == number, gy, 0)
    dx[...] = window(wide, padding, dx.shape[2:], (1, 1))


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
    added, total = _floats(grad), _floats(residual)
    total += added
    limit = total.dtype.type(threshold)
    plus, minus = total >= limit, total <= -limit
    sent = total.dtype.type(magnitude)
    total -= xp.where(plus, sent, xp.where(minus, -sent, total.dtype.type(0)))
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
    added, total = _floats(grad), _floats(residual)
    total += added
    plus = total > total.dtype.type(threshold)
    sent = total.dtype.type(magnitude)
    total -= xp.where(plus, sent, -sent)
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
