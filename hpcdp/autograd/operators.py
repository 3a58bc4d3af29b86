"""The operations of tensors. Each computes at once, and records how its gradients are found if that is asked for."""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays import Array, array_namespace
from ..errors import ArrayMixError
from .tape import NEW, SKIP, Backward, Into, Node, needs_record
from .tensor import Tensor

Operand = Any
"""A tensor, an array of its namespace, or a number."""


def result(name: str, data: Array, inputs: Sequence[Tensor], backward: Backward) -> Tensor:
    """A tensor of ``data``, recorded if any of ``inputs`` is tracked. Layers with kernels of their own use it too."""
    out = Tensor(data)
    if needs_record(inputs):
        out.node = Node(name, tuple(inputs), backward)
    return out


def as_tensor(x: Operand, like: Tensor | None = None) -> Tensor:
    """``x`` itself if it is a tensor, else a tensor that is not tracked, of the namespace and dtype of ``like``."""
    if isinstance(x, Tensor):
        return x
    if like is not None and isinstance(x, (int, float)):
        return Tensor(array_namespace(like.data).asarray(x, dtype=like.dtype))
    return Tensor(x)


def unbroadcast(gradient: Array, shape: tuple[int, ...], into: Into = NEW) -> Array:
    """Sum ``gradient`` over the axes along which an operand of ``shape`` was repeated."""
    if tuple(gradient.shape) == shape:
        return gradient
    xp = array_namespace(gradient)
    extra = gradient.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        axis + extra for axis, length in enumerate(shape) if length == 1 and gradient.shape[axis + extra] != 1
    )
    return xp.sum(gradient, axis=axes, keepdims=True).reshape(shape)


def _pair(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    first = a if isinstance(a, Tensor) else b
    x, y = as_tensor(a, first), as_tensor(b, first)
    array_namespace(x.data, y.data)
    return x, y


def _binary(
    name: str, a: Tensor, b: Tensor, data: Array, da: Callable[[Array], Array], db: Callable[[Array], Array]
) -> Tensor:
    def backward(g: Array, into: Sequence[Into]) -> list[Array | None]:
        return [
            None if place is SKIP else unbroadcast(part(g), x.shape)
            for x, place, part in zip((a, b), into, (da, db), strict=True)
        ]

    return result(name, data, (a, b), backward)


def add(a: Operand, b: Operand) -> Tensor:
    """a + b, broadcast."""
    x, y = _pair(a, b)
    return _binary("add", x, y, x.data + y.data, lambda g: g, lambda g: g)


def subtract(a: Operand, b: Operand) -> Tensor:
    """a - b, broadcast."""
    x, y = _pair(a, b)
    return _binary("subtract", x, y, x.data - y.data, lambda g: g, lambda g: -g)


def multiply(a: Operand, b: Operand) -> Tensor:
    """a * b, broadcast."""
    x, y = _pair(a, b)
    return _binary("multiply", x, y, x.data * y.data, lambda g: g * y.data, lambda g: g * x.data)


def divide(a: Operand, b: Operand) -> Tensor:
    """a / b, broadcast."""
    x, y = _pair(a, b)
    data = x.data / y.data
    return _binary("divide", x, y, data, lambda g: g / y.data, lambda g: -g * data / y.data)


def maximum(a: Operand, b: Operand) -> Tensor:
    """The larger of a and b, broadcast; among equals the gradient goes to a."""
    x, y = _pair(a, b)
    first = x.data >= y.data
    xp = array_namespace(x.data)
    return _binary("maximum", x, y, xp.where(first, x.data, y.data), lambda g: g * first, lambda g: g * ~first)


def minimum(a: Operand, b: Operand) -> Tensor:
    """The smaller of a and b, broadcast; among equals the gradient goes to a."""
    x, y = _pair(a, b)
    first = x.data <= y.data
    xp = array_namespace(x.data)
    return _binary("minimum", x, y, xp.where(first, x.data, y.data), lambda g: g * first, lambda g: g * ~first)


def where(condition: Array, a: Operand, b: Operand) -> Tensor:
    """a where the boolean array ``condition`` holds, else b; broadcast."""
    x, y = _pair(a, b)
    mask = getattr(condition, "data", condition) if isinstance(condition, Tensor) else condition
    xp = array_namespace(x.data, mask)
    return _binary("where", x, y, xp.where(mask, x.data, y.data), lambda g: g * mask, lambda g: g * ~mask)


def power(x: Tensor, exponent: float) -> Tensor:
    """x to a constant power."""
    return _unary("power", x, x.data**exponent, lambda g, out: g * (exponent * x.data ** (exponent - 1)))


def _unary(name: str, x: Tensor, data: Array, derive: Callable[[Array, Array], Array]) -> Tensor:
    return result(name, data, (x,), lambda g, into: [None if into[0] is SKIP else derive(g, data)])


def exp(x: Operand) -> Tensor:
    """e to the power x."""
    x = as_tensor(x)
    return _unary("exp", x, array_namespace(x.data).exp(x.data), lambda g, out: g * out)


def log(x: Operand) -> Tensor:
    """The natural logarithm."""
    x = as_tensor(x)
    return _unary("log", x, array_namespace(x.data).log(x.data), lambda g, out: g / x.data)


def sqrt(x: Operand) -> Tensor:
    """The square root."""
    x = as_tensor(x)
    return _unary("sqrt", x, array_namespace(x.data).sqrt(x.data), lambda g, out: g * 0.5 / out)


def tanh(x: Operand) -> Tensor:
    """The hyperbolic tangent."""
    x = as_tensor(x)
    return _unary("tanh", x, array_namespace(x.data).tanh(x.data), lambda g, out: g * (1 - out * out))


def sigmoid(x: Operand) -> Tensor:
    """1 / (1 + e^-x), by tanh, which does not overflow."""
    x = as_tensor(x)
    data = 0.5 * array_namespace(x.data).tanh(0.5 * x.data) + 0.5
    return _unary("sigmoid", x, data, lambda g, out: g * out * (1 - out))


def absolute(x: Operand) -> Tensor:
    """The absolute value; the gradient at 0 is 0."""
    x = as_tensor(x)
    xp = array_namespace(x.data)
    return _unary("absolute", x, xp.abs(x.data), lambda g, out: g * xp.sign(x.data))


def relu(x: Operand) -> Tensor:
    """The larger of x and 0; the gradient at 0 is 0."""
    x = as_tensor(x)
    data = array_namespace(x.data).maximum(x.data, 0)
    return _unary("relu", x, data, lambda g, out: g * (out > 0))


def matmul(a: Operand, b: Operand) -> Tensor:
    """The matrix product of (..., m, k) and (..., k, n); leading axes broadcast. Vectors are not taken."""
    x, y = _pair(a, b)
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-2]:
        raise ArrayMixError("matmul", expected="shapes (..., m, k) and (..., k, n)", got=f"{x.shape} and {y.shape}")
    xp = array_namespace(x.data)

    def backward(g: Array, into: Sequence[Into]) -> list[Array | None]:
        return [
            None if into[0] is SKIP else _product(xp, g, _swapped(y.data), x.shape, into[0]),
            None if into[1] is SKIP else _product(xp, _swapped(x.data), g, y.shape, into[1]),
        ]

    return result("matmul", xp.matmul(x.data, y.data), (x, y), backward)


def _product(xp: Any, a: Array, b: Array, shape: tuple[int, ...], into: Into) -> Array:
    if into is not NEW and a.ndim == b.ndim == len(shape):
        return xp.matmul(a, b, out=into)
    return unbroadcast(xp.matmul(a, b), shape)


def _swapped(x: Array) -> Array:
    return array_namespace(x).swapaxes(x, -1, -2)


def sum(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """See `Tensor.sum`."""
    xp = array_namespace(x.data)
    axes = _axes(axis, x.ndim)
    kept = tuple(1 if i in axes else length for i, length in enumerate(x.shape))

    def backward(g: Array, into: Sequence[Into]) -> list[Array | None]:
        return [None if into[0] is SKIP else xp.broadcast_to(g.reshape(kept), x.shape)]

    data = xp.asarray(xp.sum(x.data, axis=axes, keepdims=keepdims))
    return result("sum", data, (x,), backward)


def mean(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """See `Tensor.mean`."""
    count = math.prod(x.shape[i] for i in _axes(axis, x.ndim))
    return sum(x, axis, keepdims) * (1.0 / builtins.max(count, 1))


def _axes(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    chosen = range(ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    return tuple(i % ndim for i in chosen) if ndim else ()


def extremum(x: Tensor, axis: int | None, keepdims: bool, where: str) -> Tensor:
    """See `Tensor.max` and `Tensor.min`; ``where`` is ``"argmax"`` or ``"argmin"``."""
    xp = array_namespace(x.data)
    flat = x.data.reshape(-1) if axis is None else x.data
    along = 0 if axis is None else axis % x.ndim
    at = xp.expand_dims(getattr(xp, where)(flat, axis=along), along)
    kept = xp.take_along_axis(flat, at, along)
    data = kept.reshape((1,) * x.ndim) if axis is None else kept
    if not keepdims:
        data = data.reshape(()) if axis is None else xp.squeeze(data, axis=along)

    def backward(g: Array, into: Sequence[Into]) -> list[Array | None]:
        if into[0] is SKIP:
            return [None]
        gradient = xp.zeros(flat.shape, dtype=x.dtype)
        xp.put_along_axis(gradient, at, g.reshape(at.shape), along)
        return [gradient.reshape(x.shape)]

    return result(where.removeprefix("arg"), data, (x,), backward)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """See `Tensor.reshape`."""
    data = x.data.reshape(tuple(shape))
    return result("reshape", data, (x,), lambda g, into: [None if into[0] is SKIP else g.reshape(x.shape)])


def transpose(x: Tensor, axes: Sequence[int]) -> Tensor:
    """See `Tensor.transpose`."""
    back = tuple(sorted(range(len(axes)), key=lambda i: axes[i] % x.ndim))
    data = x.data.transpose(tuple(axes))
    return result("transpose", data, (x,), lambda g, into: [None if into[0] is SKIP else g.transpose(back)])


def index(x: Tensor, key: Any) -> Tensor:
    """x[key] for integers, slices and arrays of integers or booleans; repeated elements' gradients add up."""
    xp = array_namespace(x.data)
    keys = key if isinstance(key, tuple) else (key,)
    repeats = any(not isinstance(k, (int, slice)) and k is not None and k is not Ellipsis for k in keys)

    def backward(g: Array, into: Sequence[Into]) -> list[Array | None]:
        if into[0] is SKIP:
            return [None]
        gradient = xp.zeros(x.shape, dtype=x.dtype)
        if repeats:
            xp.add.at(gradient, key, g)
        else:
            gradient[key] = g
        return [gradient]

    return result("index", xp.asarray(x.data[key]), (x,), backward)


def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors one after the other along an axis."""
    inputs = [as_tensor(x) for x in tensors]
    xp = array_namespace(*(x.data for x in inputs))
    data = xp.concatenate([x.data for x in inputs], axis=axis)
    ends = [0]
    for x in inputs:
        ends.append(ends[-1] + x.shape[axis])

    def backward(g: Array, into: Sequence[Into]) -> list[Array | None]:
        moved = xp.moveaxis(g, axis, 0)
        pieces = [xp.moveaxis(moved[lo:hi], 0, axis) for lo, hi in itertools.pairwise(ends)]
        return [None if place is SKIP else piece for place, piece in zip(into, pieces, strict=True)]

    return result("concatenate", data, inputs, backward)
