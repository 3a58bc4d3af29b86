"""Functional operators on tensors: products, convolutions, pooling, activations, losses and batch normalization.

Operands are tensors or arrays; images are ``(batch, channels, height, width)``. Arrays in host memory use the Numba
kernels, CuPy arrays the CUDA kernels, and other namespaces `kernels.reference`. Results are written to reused memory
(`kernels.empty`) or directly into a leaf's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import index
from typing import Any

import numpy as np

from .. import kernels
from ..autograd import Gradient, Tensor, as_tensor, on_tape, operators
from ..autograd.tape import Call, operator
from ..core.arrays import Array, array_namespace, has_namespace, is_cupy, is_half, is_host
from ..errors import ConfigError, DataError, UnsupportedError, type_named
from ..kernels import empty
from ..kernels.cuda import dot_of, fill, matmul_of
from ..kernels.matmul import multiply
from ..kernels.reference import output_size
from .module import in_float32
from .virtual_shards import move

__all__ = [
    "avg_pool2d", "batch_norm", "batch_norm_by_running", "conv2d", "dense", "dropout", "l2_loss", "max_pool2d", "relu",
    "sigmoid", "softmax", "softmax_cross_entropy", "tanh",
]  # fmt: skip


def kernels_for(family: str, x: Array, plain_on_host: bool = False) -> Any:
    """Return `kernels.kernels_for`; for 16-bit arrays only CUDA has kernels of its own."""
    if is_half(x) and not is_cupy(x):
        return kernels.reference
    return kernels.kernels_for(family, x, plain_on_host)


def alike(operation: str, x: Array, *others: Array | None, wide: bool = False) -> Any:
    """Return the namespace of all operands; `UnsupportedError` unless they have one native float dtype.

    With ``wide`` the others must be float32 if ``x`` has 16 bits.
    """
    operands = [x]
    are_alike = (x.dtype.char in "fd" and x.dtype.isnative) or is_half(x)
    dtype_of_others = np.float32 if wide and is_half(x) else x.dtype
    for other in others:
        if other is not None:
            operands.append(other)
            are_alike = are_alike and other.dtype == dtype_of_others
    if not are_alike:
        raise UnsupportedError(
            operation,
            where="dtype",
            expected="float32 or float64 in native byte order, the same for all operands",
            got=f"operands of {', '.join(str(operand.dtype) for operand in operands)}",
            remedy="convert the operands with astype",
        )
    return array_namespace(*operands)


def contiguous(gy: Array) -> Array:
    """Return ``gy`` or a copy that is C-contiguous and writeable, as kernels require; mapped files are read-only."""
    if gy.flags.carray if type(gy) is np.ndarray else is_cupy(gy) and gy.flags.c_contiguous:
        return gy
    xp = array_namespace(gy)
    return np.require(gy, requirements=("C", "A", "W")) if xp is np else xp.ascontiguousarray(gy)


def refreshed(copy: Array, x: Array) -> list[Call]:
    """Return the call that copies ``x`` to ``copy`` again, or none if they are the same array."""
    return [] if copy is x else [(copy.__setitem__, (..., x))]


def called(calls: Iterable[Call]) -> None:
    """Execute ``calls``."""
    for function, args in calls:
        function(*args)


_SMALL = 1_000_000
"""Multiplications up to which call overhead dominates the time of a product."""


def product(a: Array, b: Array, out: Array) -> Call:
    """Return the call that writes ``out = a @ b``, shapes ``(m, k)`` and ``(k, n)``; ``out`` is C-contiguous."""
    if a.size * out.shape[1] <= _SMALL:
        return dot_of(a), (b, out)  # half of matmul's overhead
    return multiply, (a, b, out)


def softmax_cross_entropy(logits: Any, labels: Any) -> Tensor:
    """Compute the cross-entropy loss of each sample: ``-log(softmax(logits)[label])``, averaged over its labels.

    Args:
        logits: shape ``(batch, ..., classes)``, a float dtype.
        labels: integers in ``0 .. classes - 1``, shape ``(batch, ...)``, in the namespace of ``logits`` or NumPy's. On
            a GPU backward reads them again, so they must not change before it.

    Returns:
        Shape ``(batch,)``, in the dtype of ``logits``; float32 for 16-bit logits.

    Raises:
        UnsupportedError: other shapes, logits that are not floats, or labels that are not integers.
        DataError: a label is out of range.
    """
    is_array = isinstance(labels, Tensor) or has_namespace(labels)
    losses = _cross_entropy(logits, labels if is_array else np.asarray(labels))
    if losses.ndim < 2:
        return losses
    return losses.reshape(losses.shape[0], math.prod(losses.shape[1:])).mean(axis=1)


@operator("softmax_cross_entropy", ("logits", "labels"))
@in_float32(has_kernels=True, first_alone=True, rounds=False)
def _cross_entropy(logits: Any, labels: Any) -> Tensor:
    """Compute the loss of each label, in the shape of ``labels``."""
    logits_data, y = as_tensor(logits).data, labels.data if isinstance(labels, Tensor) else labels
    a = contiguous(logits_data)
    xp = alike("softmax_cross_entropy", a)
    if a.ndim < 2 or not a.shape[-1] or y.shape != a.shape[:-1] or y.dtype.kind not in "iu":
        raise UnsupportedError(
            "softmax_cross_entropy",
            expected="logits (batch, ..., classes) and integer labels (batch, ...)",
            got=f"{tuple(a.shape)} and {tuple(y.shape)} {y.dtype}",
        )
    numbers = contiguous(y) if y.dtype == np.int64 and not is_host(y) else xp.empty(y.shape, dtype=xp.int64)
    wide = np.dtype(np.float32) if is_half(a) else a.dtype
    chances, losses = xp.empty(a.shape, dtype=wide), xp.empty(y.shape, dtype=wide)
    functions = kernels_for("networks", a, plain_on_host=True)

    def flat(x: Array) -> Array:
        return x if y.ndim == 1 else x.reshape(math.prod(y.shape), *x.shape[y.ndim :])

    rows = flat(a), flat(numbers), flat(chances)

    def checked() -> Array:
        if y.size and not 0 <= int(y.min()) <= int(y.max()) < a.shape[-1]:
            raise DataError(
                "softmax_cross_entropy",
                where="labels",
                expected=f"0 to {a.shape[-1] - 1}",
                got=f"{int(y.min())} to {int(y.max())}",
            )
        return y

    def compute(losses: Array) -> None:
        if is_host(y):
            fill(numbers, checked)
        elif numbers is not y:
            numbers[...] = y
        functions.softmax_cross_entropy(*rows, flat(losses))

    compute(losses)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            place = dx.empty()
            functions.softmax_cross_entropy_gradient(flat(contiguous(gy)), *rows[1:], flat(place))
            dx.add(place)

    return on_tape(losses, (logits,), pullback, lambda out: [*refreshed(a, logits_data), (compute, (out,))])


def l2_loss(predictions: Any, targets: Any) -> Tensor:
    """Compute half the squared error of each sample, averaged over its elements, like Gluon's ``L2Loss``.

    Args:
        predictions: shape ``(batch, ...)``, a float dtype.
        targets: as many elements a sample; another shape is reshaped to that of ``predictions``.

    Returns:
        Shape ``(batch,)``.

    Raises:
        UnsupportedError: the number of samples or of elements differs.
    """
    x, y = as_tensor(predictions), as_tensor(targets)
    if x.shape != y.shape:
        if x.size != y.size or x.shape[:1] != y.shape[:1]:
            raise UnsupportedError(
                "l2_loss", expected=f"targets of {tuple(x.shape)}, as predictions", got=tuple(y.shape)
            )
        y = y.reshape(x.shape)
    error = operators.subtract(x, y)
    halves = error * error * 0.5
    return halves if halves.ndim < 2 else halves.mean(axis=tuple(range(1, halves.ndim)))


def require_per_sample(operation: str, losses: object, count: int) -> None:
    """Raise `ConfigError` unless ``losses`` is a tensor of shape ``(count,)``: others change the learning rate."""
    if not isinstance(losses, Tensor):
        got, remedy = type_named(losses), "return the result of an nn.functional or autograd operator"
        raise ConfigError(operation, where="loss", expected="a Tensor", got=got, remedy=remedy)
    shape = tuple(losses.shape)
    if shape != (count,):
        remedy = "average over the axes of each sample" if shape else "remove .mean() or .sum()"
        expected = f"one loss a sample, shape ({count},)"
        raise ConfigError(operation, where="loss", expected=expected, got=f"shape {shape}", remedy=remedy)


def misshapen(operation: str, expected: str, *arrays: Array | Tensor | None) -> UnsupportedError:
    """Return the error for arrays whose shapes do not match."""
    got = ", ".join(str(tuple(array.shape)) for array in arrays if array is not None)
    return UnsupportedError(operation, expected=f"shapes {expected}", got=got)


def require_channels(x: Array, *others: Array | Tensor | None) -> None:
    """Raise `UnsupportedError` unless ``others`` have one element for each channel of ``x``: kernels do not check."""
    shape = x.shape[1:2]
    for other in others:
        if other is not None and (other.shape != shape or not shape):
            raise misshapen("batch_norm", "(batch, channels, ...), and (channels,) of all others", x, *others)


@operator("batch_norm", ("x", "scale", "shift", "running_mean", "running_var"), has_effect=True)
@in_float32(has_kernels=True, first_alone=True)
def batch_norm(
    x: Any, scale: Any, shift: Any, eps: float,
    running_mean: Tensor | None = None, running_var: Tensor | None = None, momentum: float = 0.0,
) -> tuple[Tensor, Array, Array]:  # fmt: skip
    """Compute ``scale * (x - mean) / sqrt(variance + eps) + shift`` for each channel, with batch statistics.

    Args:
        x: shape ``(batch, channels, ...)``.
        scale: shape ``(channels,)``.
        shift: shape ``(channels,)``.
        eps: number added to the variance.
        running_mean: updated in place to ``momentum * running_mean + (1 - momentum) * mean``, or None.
        running_var: updated likewise by the biased variance, or None.
        momentum: weight of the old running statistics.

    Returns:
        The result, and mean and biased variance of each channel, zeros for an empty batch.

    Raises:
        UnsupportedError: other shapes, or dtypes that differ.
    """
    operands = [as_tensor(operand).data for operand in (x, scale, shift)]
    a, gamma, beta = map(contiguous, operands)
    xp = alike("batch_norm", a, gamma, beta, wide=True)
    require_channels(a, gamma, beta, running_mean, running_var)
    planes = a.reshape(*a.shape[:2], math.prod(a.shape[2:]))
    mean, variance = xp.empty(gamma.shape, dtype=gamma.dtype), xp.empty(gamma.shape, dtype=gamma.dtype)
    out = empty(planes.shape, a.dtype, xp)
    compute = kernels_for("networks", a).batch_norm
    compute(planes, gamma, beta, out, (mean, variance), eps)
    if not a.size:  # 0 / 0 would propagate into the gradients of scale and shift
        mean[...], variance[...] = 0, 0
    moves: list[Call] = [
        (move, (running, momentum, batch))
        for running, batch in ((running_mean, mean), (running_var, variance))
        if running is not None
    ]
    called(moves)

    def again(place: Array) -> list[Call]:
        copies = [call for pair in zip((a, gamma, beta), operands, strict=True) for call in refreshed(*pair)]
        return [*copies, (compute, (planes, gamma, beta, place.reshape(planes.shape), (mean, variance), eps)), *moves]

    def pullback(gy: Array, *gradients: Gradient | None) -> None:
        places = [xp.empty(gamma.shape, dtype=gamma.dtype) if g is None else g.empty() for g in gradients[1:]]
        dx = empty(planes.shape, planes.dtype, xp)
        g = contiguous(gy).reshape(planes.shape)
        kernels_for("networks", g).batch_norm_gradients(g, planes, gamma, (mean, variance), (dx, *places), eps)
        for gradient, place in zip(gradients, (dx.reshape(a.shape), *places), strict=True):
            if gradient is not None:
                gradient.add(place)

    return on_tape(out.reshape(a.shape), (x, scale, shift), pullback, again), mean, variance


@operator("batch_norm_by_running", ("x", "scale", "shift", "running_mean", "running_var"))
@in_float32()
def batch_norm_by_running(x: Any, scale: Any, shift: Any, running_mean: Any, running_var: Any, eps: float) -> Tensor:
    """Compute ``scale * (x - running_mean) / sqrt(running_var + eps) + shift`` for each channel.

    It is computed as one factor and one offset for each channel.

    Args:
        x: shape ``(batch, channels, ...)``.
        scale: shape ``(channels,)``.
        shift: shape ``(channels,)``.
        running_mean: shape ``(channels,)``.
        running_var: shape ``(channels,)``.
        eps: number added to the variance.

    Returns:
        The shape of ``x``.

    Raises:
        UnsupportedError: other shapes, or dtypes that differ.
    """
    a, gamma, beta, mean, variance = [
        as_tensor(operand).data for operand in (x, scale, shift, running_mean, running_var)
    ]
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
    other_axes = (0, *range(2, a.ndim))

    def pullback(gy: Array, dx: Gradient | None, dscale: Gradient | None, dshift: Gradient | None) -> None:
        if dx is not None:
            dx.add(xp.multiply(gy, factor.reshape(shape), out=dx.empty()))
        if dshift is not None:
            dshift.add(gy.sum(axis=other_axes))
        if dscale is not None:
            # Center first: sum(gy * x) and mean * sum(gy) may both be large while their difference is small.
            product = (gy * (a - mean.reshape(shape))).sum(axis=other_axes)
            dscale.add(product * inverse if a.size else product)  # 0 for an empty batch, though inverse may be NaN

    return on_tape(out, (x, scale, shift), pullback, lambda out: [(compute, (out,))])


@in_float32(has_kernels=True, first_alone=True)
def joint_batch_norm(
    x: Any, scale: Any, shift: Any, eps: float, add_up: Callable[[Array], object]
) -> tuple[Tensor, Array, Array, int]:
    """Compute `batch_norm` with the statistics of a batch that is distributed over several processes.

    ``add_up`` sums a flat float64 array over the processes, in place, here and in backward. The local part ``x`` may be
    empty; gradients of ``scale`` and ``shift`` are those of this part.

    Returns:
        The result, mean and biased variance of each channel, and the number of values a channel, over all processes.
    """
    a, gamma, beta = (contiguous(as_tensor(operand).data) for operand in (x, scale, shift))
    xp = alike("batch_norm", a, gamma, beta, wide=True)
    require_channels(a, gamma, beta)
    channels = a.shape[1]
    planes = a.reshape(a.shape[0], channels, math.prod(a.shape[2:]))
    compute = kernels_for("networks", a)
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
    compute.normalize(planes, gamma, beta, saved, out, eps)

    def pullback(gy: Array, dx: Gradient | None, *gradients: Gradient | None) -> None:
        g = contiguous(gy).reshape(planes.shape)
        sums = xp.empty((2, channels), dtype=xp.float64)
        compute.gradient_sums(g, planes, saved, sums, eps)
        for gradient, total in zip(gradients, sums[::-1], strict=True):
            if gradient is not None:
                gradient.add(total.astype(gamma.dtype))
        add_up(sums.reshape(-1))
        if dx is not None:
            place = empty(planes.shape, planes.dtype, xp)
            compute.gradient_of_input(g, planes, gamma, saved, sums / max(1, count), place, eps)
            dx.add(place.reshape(a.shape))

    return on_tape(out.reshape(a.shape), (x, scale, shift), pullback), *saved, count


Pair = tuple[int, int]
Size = int | tuple[int, int]


def pair(size: Size) -> Pair:
    """Return (vertical, horizontal) of a size given as one integer or two; `UnsupportedError` for anything else."""
    try:
        first, last = size if isinstance(size, (tuple, Sequence)) else (size, size)  # tuple first: a fast check
        return index(first), index(last)
    except (TypeError, ValueError) as error:
        raise UnsupportedError("size of a window", expected="an integer, or two of them", got=repr(size)) from error


def _images(operation: str, x: Any) -> Array:
    value = as_tensor(x).data
    if value.ndim != 4:
        raise UnsupportedError(operation, expected="images (batch, channels, height, width)", got=tuple(value.shape))
    return contiguous(value)


def _windows(operation: str, x: Array, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """Return the output's height and width."""
    geometry = zip(x.shape[2:], kernel, stride, padding, strict=True)
    size = tuple(output_size(*axis) for axis in geometry) if min(*kernel, *stride) > 0 else (0, 0)
    if min(size) < 1 or min(padding) < 0:
        raise UnsupportedError(
            operation,
            expected=f"images that hold a window of {kernel} with stride {stride} >= 1 and padding {padding} >= 0",
            got=f"height and width {tuple(x.shape[2:])}",
        )
    return size[0], size[1]


@operator("dense", ("x", "weight", "bias"))
@in_float32(is_product=True)
def dense(x: Any, weight: Any, bias: Any = None, activation: str | None = None) -> Tensor:
    """Compute ``activation(x @ weight + bias)``.

    Args:
        x: shape ``(..., in)``.
        weight: shape ``(in, out)``.
        bias: shape ``(out,)``, or None.
        activation: "relu", computed in the same pass over memory, or None.

    Returns:
        Shape ``(..., out)``.

    Raises:
        UnsupportedError: other shapes, dtypes that differ, or another activation.
    """
    a, w = as_tensor(x).data, as_tensor(weight).data
    b = None if bias is None else as_tensor(bias).data
    relu = is_relu(activation)
    xp = alike("dense", a, w, b)
    if a.ndim < 1 or w.ndim != 2 or a.shape[-1] != w.shape[0] or (b is not None and b.shape != w.shape[1:]):
        raise misshapen("dense", "(..., in), (in, out) and (out,)", a, w, b)
    operand = contiguous(a)
    rows = operand if operand.ndim == 2 else operand.reshape(math.prod(a.shape[:-1]), w.shape[0])
    out = empty((rows.shape[0], w.shape[1]), a.dtype, xp)
    called([product(rows, w, out)])
    added = None
    if b is not None or relu:
        added = xp.zeros(w.shape[1:], dtype=w.dtype) if b is None else contiguous(b)
        kernels_for("networks", a).add_bias(out, added, relu)

    def again(place: Array) -> list[Call]:
        into = place.reshape(out.shape)
        calls = [*refreshed(operand, a), product(rows, w, into)]
        if added is not None:
            calls += [] if b is None else refreshed(added, b)
            calls += [(kernels_for("networks", a).add_bias, (into, added, relu))]
        return calls

    def pullback(gy: Array, dx: Gradient | None, dweight: Gradient | None, dbias: Gradient | None) -> None:
        g = contiguous(gy).reshape(out.shape)
        masked = empty(out.shape, out.dtype, xp) if relu else g
        if dbias is not None:
            place = dbias.empty()
            kernels_for("networks", g).bias_gradient(g, out if relu else None, masked, place)
            dbias.add(place)
        elif relu:
            kernels_for("networks", g).relu_gradient(g, out, masked)
        g = masked
        if dweight is not None:
            place = dweight.empty()
            if rows.shape[0] == 1:  # NumPy's matmul uses a loop here instead of BLAS, five times slower
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
    """Compute ``activation(a @ b + bias)``, rounded like the separate operations, in one pass after the product.

    Plans of hybridized networks use it; programs call `dense`. The bias has the product's last length and dtype,
    float32 or float64.
    """
    x, y, row = (as_tensor(operand).data for operand in (a, b, bias))
    vector, relu = contiguous(row), is_relu(activation)
    xp = array_namespace(x, y, row)
    out = matmul_of(xp)(x, y)
    add_bias = kernels_for("networks", out).add_bias
    flat = math.prod(out.shape[:-1]), row.size
    add_bias(out.reshape(flat), vector, relu)
    of_product = operators.gradients_of_product(x, y)

    def pullback(gy: Array, dbias: Gradient | None, da: Gradient | None, db: Gradient | None) -> None:
        g = gy
        if relu:
            g = empty(out.shape, out.dtype, xp)
            kernels_for("networks", gy).relu_gradient(contiguous(gy), out, g)
        if dbias is not None:
            dbias.add(operators.sum_to(g, row.shape))
        of_product(g, da, db)

    def again(place: Array) -> list[Call]:
        product = (partial(matmul_of(xp), out=place), (x, y))
        return [*refreshed(vector, row), product, (add_bias, (place.reshape(flat), vector, relu))]

    return on_tape(out, (bias, a, b), pullback, again)


def is_relu(activation: str | None) -> bool:
    """Return whether there is an activation; `UnsupportedError` unless it is "relu" or None."""
    if activation not in (None, "relu"):
        raise UnsupportedError("activation", expected="'relu' or None", got=repr(activation))
    return activation == "relu"


@operator("conv2d", ("x", "weight", "bias"))
@in_float32(is_product=True)
def conv2d(
    x: Any, weight: Any, bias: Any = None, stride: Size = 1, padding: Size = 0, activation: str | None = None
) -> Tensor:
    """Compute ``activation(weight * x + bias)``, where ``*`` is cross-correlation over height and width.

    Args:
        x: shape ``(batch, in, height, width)``.
        weight: shape ``(out, in, kernel height, kernel width)``.
        bias: shape ``(out,)``, or None.
        stride: step between windows, one number or (vertical, horizontal).
        padding: zeros added on both sides, likewise.
        activation: "relu", computed in the same pass over memory, or None.

    Returns:
        Shape ``(batch, out, (height + 2 padding - kernel) // stride + 1, ...)``.

    Raises:
        UnsupportedError: other shapes, dtypes that differ, windows that do not fit, or another activation.
    """
    operands = [None if operand is None else as_tensor(operand).data for operand in (x, weight, bias)]
    a, w = _images("conv2d", x), contiguous(operands[1])
    b = None if bias is None else contiguous(operands[2])
    relu, steps, zeros = is_relu(activation), pair(stride), pair(padding)
    xp = alike("conv2d", a, w, b)
    if w.ndim != 4 or a.shape[1] != w.shape[1] or 0 in w.shape[:2] or (b is not None and b.shape != w.shape[:1]):
        raise misshapen(
            "conv2d", "(batch, in, height, width), (out, in, rows, columns) and (out,), in and out >= 1", a, w, b
        )
    size = _windows("conv2d", a, w.shape[2:], steps, zeros)
    out = empty((a.shape[0], w.shape[0], *size), a.dtype, xp)
    compute = kernels_for("convolution", a).conv2d
    compute(a, w, b, out, steps, zeros, relu)

    def again(place: Array) -> list[Call]:
        copies = [call for pair in zip((a, w, b), operands, strict=True) for call in refreshed(*pair)]
        return [*copies, (compute, (a, w, b, place, steps, zeros, relu))]

    def pullback(gy: Array, dx: Gradient | None, dweight: Gradient | None, dbias: Gradient | None) -> None:
        gradients = (dx, dweight, dbias)
        into = tuple(None if gradient is None else gradient.empty() for gradient in gradients)
        kernels_for("convolution", a).conv2d_gradients(a, w, contiguous(gy), out if relu else None, into, steps, zeros)
        for gradient, place in zip(gradients, into, strict=True):
            if gradient is not None:
                gradient.add(place)

    return on_tape(out, (x, weight, bias), pullback, again)


@operator("avg_pool2d")
@in_float32(has_kernels=True)
def avg_pool2d(x: Any, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """Return the mean of each window, padding counted as zeros.

    Args:
        x: shape ``(batch, channels, height, width)``.
        kernel_size: one number or (vertical, horizontal); so are ``stride`` and ``padding``.
        stride: step between windows; None is ``kernel_size``.
        padding: zeros added on both sides.

    Returns:
        Shape ``(batch, channels, (height + 2 padding - kernel) // stride + 1, ...)``.
    """
    return _pooled("avg_pool2d", "average_pool", x, kernel_size, stride, padding, has_choice=False)


@operator("max_pool2d")
@in_float32(has_kernels=True)
def max_pool2d(x: Any, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """Return the maximum of each window, never the padding.

    Args:
        x: shape ``(batch, channels, height, width)``.
        kernel_size: one number or (vertical, horizontal); so are ``stride`` and ``padding``.
        stride: step between windows; None is ``kernel_size``.
        padding: padding on both sides, at most half of the window.

    Returns:
        Shape ``(batch, channels, (height + 2 padding - kernel) // stride + 1, ...)``.
    """
    kernel, zeros = pair(kernel_size), pair(padding)
    if zeros[0] * 2 > kernel[0] or zeros[1] * 2 > kernel[1]:
        raise UnsupportedError("max_pool2d", where="padding", expected=f"at most half of {kernel}", got=zeros)
    return _pooled("max_pool2d", "max_pool", x, kernel, stride, zeros, has_choice=True)


def _pooled(
    operation: str, name: str, x: Any, kernel_size: Size, stride: Size | None, padding: Size, has_choice: bool
) -> Tensor:
    """Pool by the kernel ``name``, which with ``has_choice`` stores which element of each window it has chosen."""
    data, a = as_tensor(x).data, _images(operation, x)
    kernel, zeros = pair(kernel_size), pair(padding)
    steps = kernel if stride is None else pair(stride)
    xp = alike(operation, a)
    out = empty((*a.shape[:2], *_windows(operation, a, kernel, steps, zeros)), a.dtype, xp)
    chosen = (empty(out.shape, xp.int32, xp),) if has_choice else ()
    compute = getattr(kernels_for("convolution", a), name)
    compute(a, out, *chosen, kernel, steps, zeros)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            place = dx.empty()
            backward = getattr(kernels_for("convolution", gy), f"{name}_gradient")
            backward(contiguous(gy), *chosen, place, kernel, steps, zeros)
            dx.add(place)

    def again(place: Array) -> list[Call]:
        return [*refreshed(a, data), (compute, (a, place, *chosen, kernel, steps, zeros))]

    return on_tape(out, (x,), pullback, again)


@operator("relu")
@in_float32(has_kernels=True)
def relu(x: Any) -> Tensor:
    """Compute ``max(x, 0)``, of any shape; the derivative at 0 is 0."""
    a = as_tensor(x).data
    # `alike` refuses foreign byte orders for the gradient kernel; integers have no gradient, but a ReLU.
    xp = array_namespace(a) if a.dtype.isnative else alike("relu", a)
    out = empty(a.shape, a.dtype, xp)
    kernels_for("networks", a, plain_on_host=True).relu(a, out)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            place = dx.empty()
            kernels_for("networks", gy).relu_gradient(contiguous(gy), out, place)
            dx.add(place)

    return on_tape(out, (x,), pullback, ("maximum", a, 0))


sigmoid = operators.sigmoid
tanh = operators.tanh


@operator("dropout", has_effect=True)
def dropout(x: Any, p: float, generator: np.random.Generator) -> Tensor:
    """Set elements to zero with probability ``p``, and divide the others by ``1 - p`` (Srivastava et al. 2014).

    Args:
        x: any shape.
        p: probability in [0, 1).
        generator: the source of a float32 random number for each element.
    """
    a = as_tensor(x).data
    xp = alike("dropout", a)
    if not 0 <= p < 1:
        raise UnsupportedError("dropout", where="p", expected="a probability in [0, 1)", got=p)
    factor = np.asarray(1 / (1 - p), str(a.dtype))
    scale = empty(a.shape, a.dtype, xp)

    def drawn() -> Array:
        return np.multiply(generator.random(a.shape, np.float32) >= p, factor)

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
    """Compute ``exp(x)``, normalized to sum 1 over the last axis; the shape is that of ``x``."""
    a = as_tensor(x).data
    xp = alike("softmax", a)
    out = empty(a.shape, a.dtype, xp)

    def compute(out: Array) -> None:
        if not a.size:  # no maximum
            return
        xp.exp(a - a.max(axis=-1, keepdims=True), out=out)
        out /= out.sum(axis=-1, keepdims=True)

    compute(out)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(out * (gy - (gy * out).sum(axis=-1, keepdims=True)))

    return on_tape(out, (x,), pullback, lambda out: [(compute, (out,))])
