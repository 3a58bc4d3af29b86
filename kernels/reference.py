"""Floor 0: the kernels of neural networks in plain array operations, the specification. Imports: arrays, cublas.

Images are ``(batch, channels, height, width)``, convolution weights ``(out, in, kernel height, kernel width)``. Pairs
``kernel``, ``stride`` and ``padding`` are (vertical, horizontal); padding is zeros, on both sides. Results are written
into the arrays given for them, all of one float dtype; those must not overlap with the operands.
"""

from __future__ import annotations

from ..arrays import Array, array_namespace, is_half
from .cublas import matmul_of

Pair = tuple[int, int]


def output_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """How many positions a window of ``kernel`` has along an axis of ``size``."""
    return (size + 2 * padding - kernel) // stride + 1


def _padded(x: Array, padding: Pair, value: float = 0.0) -> Array:
    if padding == (0, 0):
        return x
    (batch, channels, height, width), (top, left) = x.shape, padding
    xp = array_namespace(x)
    wide = xp.full((batch, channels, height + 2 * top, width + 2 * left), value, dtype=x.dtype)
    wide[:, :, top : top + height, left : left + width] = x
    return wide


def _window(wide: Array, at: Pair, size: Pair, stride: Pair) -> Array:
    """The view of ``wide`` that element ``at`` of the window sees over all positions."""
    (i, j), (height, width), (down, right) = at, size, stride
    return wide[:, :, i : i + (height - 1) * down + 1 : down, j : j + (width - 1) * right + 1 : right]


def _offsets(kernel: Pair) -> list[Pair]:
    return [(i, j) for i in range(kernel[0]) for j in range(kernel[1])]


def _unfolded(x: Array, kernel: Pair, stride: Pair, padding: Pair, size: Pair) -> Array:
    """Patches (im2col): shape ``(channels * kernel positions, batch * output positions)``."""
    xp = array_namespace(x)
    wide = _padded(x, padding)
    patches = xp.stack([_window(wide, at, size, stride) for at in _offsets(kernel)], axis=0)
    rows = x.shape[1] * kernel[0] * kernel[1]
    return patches.transpose(2, 0, 1, 3, 4).reshape(rows, x.shape[0] * size[0] * size[1])


def conv2d(x: Array, weight: Array, bias: Array | None, out: Array, stride: Pair, padding: Pair, relu: bool) -> None:
    """``out = weight * x + bias``, cross-correlation, followed by ``max(out, 0)`` if ``relu``; changes ``out``.

    Args:
        bias: shape ``(out channels,)``.
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
    """The gradients of `conv2d` from the gradient ``gy`` of its result.

    Args:
        out: the result, if it went through ReLU.
        into: where the gradients of ``x``, ``weight`` and bias go; changes those that are not None.
    """
    xp = array_namespace(x, weight)
    dx, dweight, dbias = into
    if out is not None:
        gy = gy * (out > 0)
    channels, kernel, size = gy.shape[1], weight.shape[2:], gy.shape[2:]
    flat = gy.transpose(1, 0, 2, 3).reshape(channels, x.shape[0] * size[0] * size[1])
    if dbias is not None:
        dbias[...] = flat.sum(axis=1)
    if dweight is not None:
        columns = _unfolded(x, kernel, stride, padding, size)
        dweight[...] = matmul_of(xp)(flat, columns.T).reshape(weight.shape)
    if dx is not None:
        columns = matmul_of(xp)(weight.reshape(channels, -1).T, flat)
        columns = columns.reshape(x.shape[1], len(_offsets(kernel)), x.shape[0], *size)
        wide = xp.zeros_like(_padded(x, padding))
        for number, at in enumerate(_offsets(kernel)):
            part = _window(wide, at, size, stride)
            part += columns[:, number].transpose(1, 0, 2, 3)
        dx[...] = _window(wide, padding, x.shape[2:], (1, 1))


def average_pool(x: Array, out: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """``out`` becomes the mean of each window, padding counted; changes ``out``."""
    wide = _padded(x, padding)
    total = sum(_window(wide, at, out.shape[2:], stride) for at in _offsets(kernel))
    out[...] = total * (1.0 / (kernel[0] * kernel[1]))


def average_pool_gradient(gy: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """The gradient of `average_pool`; changes ``dx``."""
    xp = array_namespace(gy)
    wide = xp.zeros_like(_padded(dx, padding))
    share = gy * (1.0 / (kernel[0] * kernel[1]))
    for at in _offsets(kernel):
        part = _window(wide, at, gy.shape[2:], stride)
        part += share
    dx[...] = _window(wide, padding, dx.shape[2:], (1, 1))


def max_pool(x: Array, out: Array, chosen: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """``out`` becomes the largest element of each window, padding never being it; changes ``out`` and ``chosen``.

    Args:
        chosen: int32, like ``out``: which element of the window it is, counted along its rows; the first of equal ones,
            but the last NaN, which counts as larger than all.
    """
    xp = array_namespace(x)
    wide = _padded(x, padding, -xp.inf)
    is_inside = _padded(xp.ones((1, 1, *x.shape[2:]), dtype=bool), padding, False)
    out[...] = -xp.inf
    chosen[...] = -1
    for number, at in enumerate(_offsets(kernel)):
        part = _window(wide, at, out.shape[2:], stride)
        larger = (part > out) | (part != part) | ((chosen < 0) & _window(is_inside, at, out.shape[2:], stride))
        chosen[...] = xp.where(larger, xp.asarray(number, dtype=chosen.dtype), chosen)
        out[...] = xp.where(larger, part, out)


def max_pool_gradient(gy: Array, chosen: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """The gradient of `max_pool`; changes ``dx``."""
    xp = array_namespace(gy)
    wide = xp.zeros_like(_padded(dx, padding))
    for number, at in enumerate(_offsets(kernel)):
        part = _window(wide, at, gy.shape[2:], stride)
        part += gy * (chosen == number)
    dx[...] = _window(wide, padding, dx.shape[2:], (1, 1))


def add_bias(y: Array, bias: Array, relu: bool) -> None:
    """``y += bias``, then ``max(y, 0)`` if ``relu``; changes ``y``, of shape ``(rows, features)`` or images."""
    xp = array_namespace(y, bias)
    y += bias.reshape(-1, *[1] * (y.ndim - 2))
    if relu:
        xp.maximum(y, 0, out=y)


def relu_gradient(gy: Array, y: Array, dx: Array) -> None:
    """``dx = gy`` where the result ``y`` of ReLU is positive, else 0; changes ``dx``; any shape."""
    dx[...] = gy * (y > 0)


def bias_gradient(gy: Array, y: Array | None, dx: Array | None, dbias: Array) -> None:
    """``dbias`` becomes the sum of ``gy``, like what `add_bias` takes, over all axes but the second.

    Args:
        y: None, or the result of ReLU: then `relu_gradient` is written to ``dx``, and summed.
    """
    if y is not None:
        relu_gradient(gy, y, dx)
        gy = dx
    dbias[...] = gy.sum(axis=(0, *range(2, gy.ndim)), dtype="float32" if is_half(gy) else None)


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
