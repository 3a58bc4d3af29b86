"""How far predictions are from what they should be, for each sample of a batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays import Array, has_namespace, is_half, is_host
from ..autograd import Gradient, Tensor, as_tensor, on_tape, operators
from ..autograd.registry import operator
from ..errors import ConfigError, DataError, UnsupportedError, type_named
from ..kernels.cuda.capture import fill
from .half import in_float32
from .operands import alike, contiguous, kernels_for, refreshed


def softmax_cross_entropy(logits: Any, labels: Any) -> Tensor:
    """``-log(softmax(logits)[label])`` of each sample; of one with several labels their mean.

    Args:
        logits: shape ``(batch, ..., classes)``.
        labels: integers in ``0 .. classes - 1``, shape ``(batch, ...)``, in the namespace of ``logits`` or NumPy's.
            On a GPU they are read there by backward, too, and must not change before it.

    Returns:
        Shape ``(batch,)``.

    Raises:
        UnsupportedError: other shapes, logits that are no floats, or labels that are no integers.
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
    """That of each label, in the shape of ``labels``."""
    given, y = as_tensor(logits).data, labels.data if isinstance(labels, Tensor) else labels
    a = contiguous(given)
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
    functions = kernels_for("cross_entropy", a)

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

    return on_tape(losses, (logits,), pullback, lambda out: [*refreshed(a, given), (compute, (out,))])


def l2_loss(predictions: Any, targets: Any) -> Tensor:
    """Half the squared error, averaged over all axes but the first, as Gluon's L2Loss; shape ``(batch,)``.

    Args:
        predictions: shape ``(batch, ...)``.
        targets: as many elements of one sample; those of another shape are taken in the order of ``predictions``.

    Raises:
        UnsupportedError: another number of elements, or of samples.
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
    """Raises `ConfigError` unless ``losses`` are those of ``count`` samples, a tensor of shape ``(count,)``.

    Their gradients are summed and divided by the number of samples, so that others would train at another rate.
    """
    if not isinstance(losses, Tensor):
        got, remedy = type_named(losses), "return what operators of nn.functional or autograd give"
        raise ConfigError(operation, where="loss", expected="a Tensor", got=got, remedy=remedy)
    shape = tuple(losses.shape)
    if shape != (count,):
        remedy = "take the mean of each sample" if shape else "leave out .mean() or .sum()"
        expected = f"one a sample, shape ({count},)"
        raise ConfigError(operation, where="loss", expected=expected, got=f"shape {shape}", remedy=remedy)
