"""Operations of neural networks on tensors. Operands are tensors or arrays; images are ``(batch, channels, h, w)``.

Arrays in host memory go to the Numba kernels, CuPy's to those in CUDA, others to `kernels.reference`; all write into
memory that is used again (`kernels.buffers`) or straight into a leaf's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import index
from typing import Any

import numpy as np

from ..arrays import Array, array_namespace
from ..autograd import Gradient, Tensor, as_tensor, on_tape, operators
from ..autograd.registry import Call, operator
from ..errors import UnsupportedError
from ..kernels.buffers import empty
from ..kernels.cuda.capture import fill
from ..kernels.cuda.cublas import matmul_of
from ..kernels.reference.windows import output_size
from .half import in_float32
from .losses import l2_loss, softmax_cross_entropy
from .normalisation import batch_norm, batch_norm_by_running
from .operands import alike, called, contiguous, kernels_for, refreshed
from .products import product

__all__ = [
    "avg_pool2d",
    "batch_norm",
    "batch_norm_by_running",
    "conv2d",
    "dense",
    "dropout",
    "l2_loss",
    "max_pool2d",
    "relu",
    "sigmoid",
    "softmax",
    "softmax_cross_entropy",
    "tanh",
]

Pair = tuple[int, int]
Size = int | tuple[int, int]


def pair(size: Size) -> Pair:
    """(vertical, horizontal) of a size given as one number or two; `UnsupportedError` for what is none."""
    try:
        first, last = size if isinstance(size, (tuple, Sequence)) else (size, size)  # a tuple is soon known
        return index(first), index(last)
    except (TypeError, ValueError) as error:
        raise UnsupportedError("size of a window", expected="an integer, or two of them", got=repr(size)) from error


def _images(operation: str, x: Any) -> Array:
    value = as_tensor(x).data
    if value.ndim != 4:
        raise UnsupportedError(operation, expected="images (batch, channels, height, width)", got=tuple(value.shape))
    return contiguous(value)


def _windows(operation: str, x: Array, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """The output's height and width."""
    geometry = zip(x.shape[2:], kernel, stride, padding, strict=True)
    size = tuple(output_size(*each) for each in geometry) if min(*kernel, *stride) > 0 else (0, 0)
    if min(size) < 1 or min(padding) < 0:
        raise UnsupportedError(
            operation,
            expected=f"images that a window of {kernel} fits into with stride {stride} and padding {padding}, "
            "of which only padding may be 0",
            got=f"height and width {tuple(x.shape[2:])}",
        )
    return size[0], size[1]


@operator("dense", ("x", "weight", "bias"))
@in_float32(is_product=True)
def dense(x: Any, weight: Any, bias: Any = None, activation: str | None = None) -> Tensor:
    """``activation(x @ weight + bias)``.

    Args:
        x: shape ``(..., in)``.
        weight: shape ``(in, out)``.
        bias: shape ``(out,)`` or None.
        activation: "relu", computed in the same pass over memory, or None.
    """
    a, w = as_tensor(x).data, as_tensor(weight).data
    b = None if bias is None else as_tensor(bias).data
    relu = is_relu(activation)
    xp = alike("dense", a, w, b)
    if a.ndim < 1 or w.ndim != 2 or a.shape[-1] != w.shape[0] or (b is not None and b.shape != w.shape[1:]):
        raise UnsupportedError(
            "dense",
            expected="shapes (..., in), (in, out) and (out,)",
            got=", ".join(str(tuple(each.shape)) for each in (a, w, b) if each is not None),
        )
    whole = contiguous(a)
    rows = whole if whole.ndim == 2 else whole.reshape(math.prod(a.shape[:-1]), w.shape[0])
    out = empty((rows.shape[0], w.shape[1]), a.dtype, xp)
    called([product(rows, w, out)])
    added = None
    if b is not None or relu:
        added = xp.zeros(w.shape[1:], dtype=w.dtype) if b is None else contiguous(b)
        kernels_for("epilogue", a).add_bias(out, added, relu)

    def again(place: Array) -> list[Call]:
        into = place.reshape(out.shape)
        calls = [*refreshed(whole, a), product(rows, w, into)]
        if added is not None:
            calls += [] if b is None else refreshed(added, b)
            calls += [(kernels_for("epilogue", a).add_bias, (into, added, relu))]
        return calls

    def pullback(gy: Array, dx: Gradient | None, dweight: Gradient | None, dbias: Gradient | None) -> None:
        g = contiguous(gy).reshape(out.shape)
        masked = empty(out.shape, out.dtype, xp) if relu else g
        if dbias is not None:
            place = dbias.empty()
            kernels_for("epilogue", g).bias_gradient(g, out if relu else None, masked, place)
            dbias.add(place)
        elif relu:
            kernels_for("epilogue", g).relu_gradient(g, out, masked)
        g = masked
        if dweight is not None:
            place = dweight.empty()
            if rows.shape[0] == 1:  # NumPy gives this not to BLAS but to a loop that takes five times as long
                xp.multiply(rows.T, g, out=place)
            else:
                called([product(rows.T, g, place)])
            dweight.add(place)
        if dx is not None:
            place = dx.empty()
            called([product(g, w.T, place.reshape(rows.shape))])
            dx.add(place)

    value = out if a.ndim == 2 else out.reshape(*a.shape[:-1], w.shape[1])
    return on_tape(value, (x, weight, bias), pullback, again)


@operator("affine", ("a", "b", "bias"))
def affine(a: Any, b: Any, bias: Any, activation: str | None = None) -> Tensor:
    """``activation(a @ b + bias)`` as these three operations round it, bias and activation in one pass over memory.

    Plans of hybridized networks have it in their place; `dense` is what to call.

    Args:
        bias: as long as the last axis of the product, and of its dtype, float32 or float64.
        activation: "relu" or None.
    """
    x, y, row = (as_tensor(each).data for each in (a, b, bias))
    whole, relu = contiguous(row), is_relu(activation)
    xp = array_namespace(x, y, row)
    out = matmul_of(xp)(x, y)
    add_bias = kernels_for("epilogue", out).add_bias
    flat = math.prod(out.shape[:-1]), row.size
    add_bias(out.reshape(flat), whole, relu)
    of_product = operators.gradients_of_product(x, y)

    def pullback(gy: Array, dbias: Gradient | None, da: Gradient | None, db: Gradient | None) -> None:
        g = gy
        if relu:
            g = empty(out.shape, out.dtype, xp)
            kernels_for("epilogue", gy).relu_gradient(contiguous(gy), out, g)
        if dbias is not None:
            dbias.add(operators.sum_to(g, row.shape))
        of_product(g, da, db)

    def again(place: Array) -> list[Call]:
        product = (partial(matmul_of(xp), out=place), (x, y))
        return [*refreshed(whole, row), product, (add_bias, (place.reshape(flat), whole, relu))]

    return on_tape(out, (bias, a, b), pullback, again)


def is_relu(activation: str | None) -> bool:
    """Whether an activation is there; `UnsupportedError` for what is none."""
    if activation not in (None, "relu"):
        raise UnsupportedError("activation", expected="'relu' or None", got=repr(activation))
    return activation == "relu"


@operator("conv2d", ("x", "weight", "bias"))
@in_float32(is_product=True)
def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Size = 1,
    padding: Size = 0,
    activation: str | None = None,
) -> Tensor:
    """``activation(weight * x + bias)``, where ``*`` is cross-correlation over height and width.

    Args:
        x: shape ``(batch, in, height, width)``.
        weight: shape ``(out, in, kernel height, kernel width)``.
        bias: shape ``(out,)`` or None.
        padding: zeros added on both sides.
        activation: "relu", computed in the same pass over memory, or None.

    Returns:
        Shape ``(batch, out, (height + 2 padding - kernel) // stride + 1, ...)``.
    """
    given = [None if each is None else as_tensor(each).data for each in (x, weight, bias)]
    a, w = _images("conv2d", x), contiguous(given[1])
    b = None if bias is None else contiguous(given[2])
    relu, steps, zeros = is_relu(activation), pair(stride), pair(padding)
    xp = alike("conv2d", a, w, b)
    if w.ndim != 4 or a.shape[1] != w.shape[1] or 0 in w.shape[:2] or (b is not None and b.shape != w.shape[:1]):
        raise UnsupportedError(
            "conv2d",
            expected="shapes (batch, in, height, width), (out, in, rows, columns) and (out,), in and out >= 1",
            got=", ".join(str(tuple(each.shape)) for each in (a, w, b) if each is not None),
        )
    size = _windows("conv2d", a, w.shape[2:], steps, zeros)
    out = empty((a.shape[0], w.shape[0], *size), a.dtype, xp)
    compute = kernels_for("conv", a).conv2d
    compute(a, w, b, out, steps, zeros, relu)

    def again(place: Array) -> list[Call]:
        copies = [call for pair in zip((a, w, b), given, strict=True) for call in refreshed(*pair)]
        return [*copies, (compute, (a, w, b, place, steps, zeros, relu))]

    def pullback(gy: Array, dx: Gradient | None, dweight: Gradient | None, dbias: Gradient | None) -> None:
        wanted = (dx, dweight, dbias)
        into = tuple(None if each is None else each.empty() for each in wanted)
        kernels_for("conv", a).conv2d_gradients(a, w, contiguous(gy), out if relu else None, into, steps, zeros)
        for gradient, place in zip(wanted, into, strict=True):
            if gradient is not None:
                gradient.add(place)

    return on_tape(out, (x, weight, bias), pullback, again)


@operator("avg_pool2d")
@in_float32(has_kernels=True)
def avg_pool2d(x: Any, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """The mean of each window, padding counted as zeros; ``stride`` is the window's size if it is None."""
    a, kernel, zeros = _images("avg_pool2d", x), pair(kernel_size), pair(padding)
    steps = kernel if stride is None else pair(stride)
    xp = alike("avg_pool2d", a)
    out = empty((*a.shape[:2], *_windows("avg_pool2d", a, kernel, steps, zeros)), a.dtype, xp)
    compute = kernels_for("pool", a).average_pool
    compute(a, out, kernel, steps, zeros)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            place = dx.empty()
            kernels_for("pool", gy).average_pool_gradient(contiguous(gy), place, kernel, steps, zeros)
            dx.add(place)

    given = as_tensor(x).data
    return on_tape(out, (x,), pullback, lambda out: [*refreshed(a, given), (compute, (a, out, kernel, steps, zeros))])


@operator("max_pool2d")
@in_float32(has_kernels=True)
def max_pool2d(x: Any, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """The largest element of each window, never padding; ``stride`` is the window's size if it is None."""
    a, kernel, zeros = _images("max_pool2d", x), pair(kernel_size), pair(padding)
    steps = kernel if stride is None else pair(stride)
    xp = alike("max_pool2d", a)
    if zeros[0] * 2 > kernel[0] or zeros[1] * 2 > kernel[1]:
        raise UnsupportedError("max_pool2d", where="padding", expected=f"at most half of {kernel}", got=zeros)
    out = empty((*a.shape[:2], *_windows("max_pool2d", a, kernel, steps, zeros)), a.dtype, xp)
    chosen = empty(out.shape, xp.int32, xp)
    compute = kernels_for("pool", a).max_pool
    compute(a, out, chosen, kernel, steps, zeros)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            place = dx.empty()
            kernels_for("pool", gy).max_pool_gradient(contiguous(gy), chosen, place, kernel, steps, zeros)
            dx.add(place)

    def again(place: Array) -> list[Call]:
        return [*refreshed(a, as_tensor(x).data), (compute, (a, place, chosen, kernel, steps, zeros))]

    return on_tape(out, (x,), pullback, again)


@operator("relu")
@in_float32(has_kernels=True)
def relu(x: Any) -> Tensor:
    """``max(x, 0)``; the derivative at 0 is 0."""
    a = as_tensor(x).data
    # which refuses it, for the kernel of the gradient; integers, which have none, have a ReLU
    xp = array_namespace(a) if a.dtype.isnative else alike("relu", a)
    out = empty(a.shape, a.dtype, xp)
    kernels_for("elementwise", a).relu(a, out)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            place = dx.empty()
            kernels_for("epilogue", gy).relu_gradient(contiguous(gy), out, place)
            dx.add(place)

    return on_tape(out, (x,), pullback, ("maximum", a, 0))


sigmoid = operators.sigmoid
tanh = operators.tanh


@operator("dropout", has_effect=True)
def dropout(x: Any, p: float, generator: np.random.Generator) -> Tensor:
    """Each element zero with probability ``p``, else divided by ``1 - p`` (Srivastava et al. 2014).

    Args:
        p: in [0, 1).
    """
    a = as_tensor(x).data
    xp = alike("dropout", a)
    if not 0 <= p < 1:
        raise UnsupportedError("dropout", where="p", expected="a probability in [0, 1)", got=p)
    kept = np.asarray(1 / (1 - p), str(a.dtype))
    scale = empty(a.shape, a.dtype, xp)

    def drawn() -> Array:
        return np.multiply(generator.random(a.shape, np.float32) >= p, kept)

    fill(scale, drawn)
    out = xp.multiply(a, scale, out=empty(a.shape, a.dtype, xp))

    def drop_others(place: Array) -> None:
        fill(scale, drawn)
        xp.multiply(a, scale, out=place)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(xp.multiply(gy, scale, out=dx.empty()))

    return on_tape(out, (x,), pullback, lambda out: [(drop_others, (out,))])


@operator("softmax")
@in_float32()
def softmax(x: Any) -> Tensor:
    """``exp(x)`` normalised to sum 1 over the last axis."""
    a = as_tensor(x).data
    xp = alike("softmax", a)
    out = empty(a.shape, a.dtype, xp)

    def compute(out: Array) -> None:
        if not a.size:  # of no numbers there is no largest one
            return
        xp.exp(a - a.max(axis=-1, keepdims=True), out=out)
        out /= out.sum(axis=-1, keepdims=True)

    compute(out)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(out * (gy - (gy * out).sum(axis=-1, keepdims=True)))

    return on_tape(out, (x,), pullback, lambda out: [(compute, (out,))])
