"""Operations on tensors. Operands are tensors, arrays of the same namespace or numbers; shapes broadcast as NumPy's.

Each function computes its value and hands `on_tape` what backward does: the vector-Jacobian product of each input.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays import Array, array_namespace
from ..kernels.buffers import empty
from . import tensor
from .tape import Gradient
from .tensor import Tensor, as_tensor, value_of

Derivative = Callable[[Array], Array]


def index(key: Any) -> Any:
    """An index with the tensors in it replaced by their arrays."""
    return tuple(value_of(each) for each in key) if isinstance(key, tuple) else value_of(key)


def _sum_to(gy: Array, shape: tuple[int, ...]) -> Array:
    """``gy`` summed over the axes along which an input of ``shape`` was broadcast."""
    if gy.shape == shape:
        return gy
    lead = gy.ndim - len(shape)
    axes = tuple(range(lead)) + tuple(lead + i for i, n in enumerate(shape) if n == 1 and gy.shape[lead + i] != 1)
    return gy.sum(axis=axes).reshape(shape)


def _unary(x: Any, value: Array, derivative: Derivative) -> Tensor:
    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(derivative(gy))

    return tensor.on_tape(value, (x,), pullback)


def _binary(a: Any, b: Any, value: Array, for_a: Derivative, for_b: Derivative) -> Tensor:
    def pullback(gy: Array, da: Gradient | None, db: Gradient | None) -> None:
        if da is not None:
            da.add(_sum_to(for_a(gy), da.shape))
        if db is not None:
            db.add(_sum_to(for_b(gy), db.shape))

    return tensor.on_tape(value, (a, b), pullback)


def add(a: Any, b: Any) -> Tensor:
    """``a + b``."""
    return _binary(a, b, value_of(a) + value_of(b), lambda gy: gy, lambda gy: gy)


def subtract(a: Any, b: Any) -> Tensor:
    """``a - b``."""
    return _binary(a, b, value_of(a) - value_of(b), lambda gy: gy, lambda gy: -gy)


def multiply(a: Any, b: Any) -> Tensor:
    """``a * b``, elementwise."""
    x, y = value_of(a), value_of(b)
    return _binary(a, b, x * y, lambda gy: gy * y, lambda gy: gy * x)


def divide(a: Any, b: Any) -> Tensor:
    """``a / b``, elementwise."""
    x, y = value_of(a), value_of(b)
    value = x / y
    return _binary(a, b, value, lambda gy: gy / y, lambda gy: -gy * value / y)


def power(a: Any, b: Any) -> Tensor:
    """``a ** b``; the gradient with respect to ``b`` needs ``a > 0``, or ``a == 0`` and ``b >= 0``, where it is 0."""
    x, y = value_of(a), value_of(b)
    value = x**y

    def for_a(gy: Array) -> Array:
        return gy * (y * x ** (y - 1 + (y == 0)))  # 0 * x**0 where b is 0: x**-1 would be infinite at 0

    def for_b(gy: Array) -> Array:
        xp = array_namespace(y)
        return gy * value * xp.log(xp.where((x == 0) & (y >= 0), 1, x))  # log 1, as 0 * log 0 tends to 0

    return _binary(a, b, value, for_a, for_b)


def matmul(a: Any, b: Any) -> Tensor:
    """``a @ b``: vectors, matrices, or stacks of matrices in the leading axes, which broadcast."""
    x, y = value_of(a), value_of(b)
    xp = array_namespace(x, y)
    wide_x = x if x.ndim > 1 else x[None, :]
    wide_y = y if y.ndim > 1 else y[:, None]
    wide_x_t, wide_y_t = xp.swapaxes(wide_x, -1, -2), xp.swapaxes(wide_y, -1, -2)

    def pullback(gy: Array, da: Gradient | None, db: Gradient | None) -> None:
        if x.ndim == 1:
            gy = xp.expand_dims(gy, -2 if y.ndim > 1 else -1)
        if y.ndim == 1:
            gy = xp.expand_dims(gy, -1)
        for gradient, left, right in ((da, gy, wide_y_t), (db, wide_x_t, gy)):
            if gradient is None:
                continue
            if len(gradient.shape) == 2 and left.ndim == right.ndim == 2:
                gradient.add(xp.matmul(left, right, out=gradient.empty()))
            else:
                product = xp.matmul(left, right)
                shape = gradient.shape
                if len(shape) == 1:
                    product = product.sum(axis=tuple(range(product.ndim - 2))).reshape(shape)
                gradient.add(_sum_to(product, shape))

    return tensor.on_tape(xp.matmul(x, y), (a, b), pullback)


def maximum(a: Any, b: Any) -> Tensor:
    """The larger of each pair of elements; where they are equal each gets half of the gradient."""
    return _extreme(a, b, "maximum", lambda x, y: x > y)


def minimum(a: Any, b: Any) -> Tensor:
    """The smaller of each pair of elements; where they are equal each gets half of the gradient."""
    return _extreme(a, b, "minimum", lambda x, y: x < y)


def _extreme(a: Any, b: Any, name: str, wins: Callable[[Any, Any], Any]) -> Tensor:
    x, y = value_of(a), value_of(b)
    value = getattr(array_namespace(x, y), name)(x, y)
    return _binary(
        a, b, value,
        lambda gy: gy * wins(x, y) + gy * (0.5 * (x == y)).astype(gy.dtype),
        lambda gy: gy * wins(y, x) + gy * (0.5 * (x == y)).astype(gy.dtype),
    )  # fmt: skip


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """``a`` where ``condition`` is true, else ``b``."""
    chosen = value_of(condition)
    xp = array_namespace(chosen)
    value = xp.where(chosen, value_of(a), value_of(b))
    return _binary(a, b, value, lambda gy: xp.where(chosen, gy, 0), lambda gy: xp.where(chosen, 0, gy))


def negative(x: Any) -> Tensor:
    """``-x``."""
    return _unary(x, -value_of(x), lambda gy: -gy)


def abs(x: Any) -> Tensor:
    """``|x|``; the derivative at 0 is 0."""
    a = value_of(x)
    xp = array_namespace(a)
    return _unary(x, xp.abs(a), lambda gy: gy * xp.sign(a))


def exp(x: Any) -> Tensor:
    """e to the power of ``x``."""
    value = array_namespace(value_of(x)).exp(value_of(x))
    return _unary(x, value, lambda gy: gy * value)


def log(x: Any) -> Tensor:
    """The natural logarithm."""
    a = value_of(x)
    return _unary(x, array_namespace(a).log(a), lambda gy: gy / a)


def sqrt(x: Any) -> Tensor:
    """The square root."""
    value = array_namespace(value_of(x)).sqrt(value_of(x))
    return _unary(x, value, lambda gy: gy / (2 * value))


def tanh(x: Any) -> Tensor:
    """The hyperbolic tangent."""
    a = value_of(x)
    xp = array_namespace(a)
    value = xp.tanh(a, out=empty(a.shape, a.dtype, xp))

    def derivative(gy: Array) -> Array:
        dx = xp.multiply(value, value, out=empty(a.shape, a.dtype, xp))
        xp.subtract(1, dx, out=dx)
        return xp.multiply(dx, gy, out=dx)

    return _unary(x, value, derivative)


def sigmoid(x: Any) -> Tensor:
    """``1 / (1 + exp(-x))``, by the hyperbolic tangent, which does not overflow."""
    a = value_of(x)
    xp = array_namespace(a)
    value = xp.multiply(a, 0.5, out=empty(a.shape, a.dtype, xp))
    xp.tanh(value, out=value)
    value *= 0.5
    value += 0.5

    def derivative(gy: Array) -> Array:
        dx = xp.subtract(1, value, out=empty(a.shape, a.dtype, xp))
        dx *= value
        return xp.multiply(dx, gy, out=dx)

    return _unary(x, value, derivative)


def astype(x: Tensor, dtype: Any) -> Tensor:
    """A copy in another dtype; the gradient comes back in the old one."""
    return _unary(x, x.data.astype(dtype), lambda gy: gy)


def sum(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """The sum over ``axis``, over all axes if it is None."""
    xp, shape = array_namespace(x.data), x.shape
    spread = _spread(shape, axis, keepdims)

    def derivative(gy: Array) -> Array:
        wide = spread(gy)
        return wide if wide.shape == shape else xp.broadcast_to(wide, shape)  # which only can be read

    return _unary(x, xp.sum(x.data, axis=axis, keepdims=keepdims), derivative)


def mean(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """The mean over ``axis``, over all axes if it is None."""
    total = sum(x, axis, keepdims)
    return divide(total, float(builtins.max(x.size, 1) / builtins.max(total.size, 1)))


def max(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """The largest element over ``axis``; equal ones share the gradient."""
    return _extremum(x, "max", axis, keepdims)


def min(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """The smallest element over ``axis``; equal ones share the gradient."""
    return _extremum(x, "min", axis, keepdims)


def _extremum(x: Tensor, name: str, axis: Any, keepdims: bool) -> Tensor:
    a = x.data
    value = getattr(array_namespace(a), name)(a, axis=axis, keepdims=keepdims)
    spread = _spread(x.shape, axis, keepdims)

    def derivative(gy: Array) -> Array:
        chosen = (a == spread(value)).astype(gy.dtype)
        return chosen * (spread(gy) / chosen.sum(axis=axis, keepdims=True))

    return _unary(x, value, derivative)


def _spread(shape: tuple[int, ...], axis: Any, keepdims: bool) -> Derivative:
    """What gives a reduced array its axes of length 1 back."""
    if keepdims:
        return lambda y: y
    axes = range(len(shape)) if axis is None else (axis,) if isinstance(axis, int) else axis
    reduced = {each % len(shape) for each in axes} if shape else set()
    kept = tuple(1 if i in reduced else n for i, n in enumerate(shape))
    return lambda y: y.reshape(kept)


def reshape(x: Tensor, *shape: Any) -> Tensor:
    """The same elements in another shape, given as numbers or one tuple; one may be -1."""
    wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    old = x.shape
    return _unary(x, x.data.reshape(tuple(wanted)), lambda gy: gy.reshape(old))


def transpose(x: Tensor, *axes: Any) -> Tensor:
    """The axes in another order, given as numbers or one tuple; reversed if none are given."""
    order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
    order = tuple(each % x.ndim for each in order) if order else tuple(range(x.ndim))[::-1]
    back = tuple(order.index(i) for i in range(len(order)))
    return _unary(x, x.data.transpose(order), lambda gy: gy.transpose(back))


def getitem(x: Tensor, key: Any) -> Tensor:
    """``x[key]``; elements taken more than once sum their gradients."""
    plain = index(key)
    xp = array_namespace(x.data)
    parts = plain if isinstance(plain, tuple) else (plain,)
    is_view = all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)
    shape = x.shape

    def derivative(gy: Array) -> Array:
        dx = xp.zeros(shape, dtype=gy.dtype)
        if is_view:
            dx[plain] = gy
        else:
            xp.add.at(dx, plain, gy)
        return dx

    return _unary(x, xp.asarray(x.data[plain]), derivative)


def concatenate(xs: Sequence[Any], axis: int = 0) -> Tensor:
    """The tensors one behind the other along ``axis``."""
    tensors = [as_tensor(x) for x in xs]
    xp = array_namespace(*(x.data for x in tensors))
    value = xp.concatenate([x.data for x in tensors], axis=axis)
    along = axis % value.ndim

    def pullback(gy: Array, *gradients: Gradient | None) -> None:
        first = 0
        for gradient, x in zip(gradients, shapes, strict=True):
            last = first + x[along]
            if gradient is not None:
                gradient.add(gy[(slice(None),) * along + (slice(first, last),)])
            first = last

    shapes = [x.shape for x in tensors]
    return tensor.on_tape(value, tuple(tensors), pullback)


def stack(xs: Sequence[Any], axis: int = 0) -> Tensor:
    """The tensors, all of one shape, along a new ``axis``."""
    tensors = [as_tensor(x) for x in xs]
    place = axis % (tensors[0].ndim + 1)
    return concatenate([x[(slice(None),) * place + (None,)] for x in tensors], axis=place)
