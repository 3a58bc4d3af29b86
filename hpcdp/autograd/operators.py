"""Operators on tensors: elementwise operations, products, reductions, indexing and changes of shape.

Operands are tensors, arrays of one namespace or numbers; shapes broadcast as in NumPy. Each function computes its value
and passes `on_tape` the vector-Jacobian product of each input and the recomputation of the value.
"""

from __future__ import annotations

import builtins
import copy
import math
import operator as op
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from ..core.arrays import Array, array_namespace, dtype_of, is_bfloat16, is_cupy, is_half
from ..errors import UnsupportedError
from ..kernels import empty, kernels_for
from ..kernels.cuda import matmul_of
from ..kernels.reference import ROWS_AT_ONCE, add_up_rows
from . import tensor
from .tape import Again, Call, Gradient, Pullback, modes, operator
from .tensor import Tensor, as_tensor, value_of

Derivative = Callable[[Array], Array]
_NUMBERS = (float, int)
_RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "equal": op.eq, "not_equal": op.ne, "less": op.lt, "less_equal": op.le, "greater": op.gt, "greater_equal": op.ge
}  # fmt: skip


def add_up(x: Array, axis: int | tuple[int, ...] | None, keepdims: bool = False) -> Array:
    """Return the sum over ``axis``, over all axes for None; 16-bit floats are summed in float32 and rounded once."""
    axes = _long_axes(x, axis)
    if is_half(x):
        if not axes:
            return x.sum(axis=axis, dtype="float32", keepdims=keepdims).astype(x.dtype)
        total = _by_runs(x.astype(np.float32), axes).astype(x.dtype)
    elif not axes:
        return x.sum(axis=axis, keepdims=keepdims)
    else:
        total = _by_runs(x, axes)
    return np.expand_dims(total, axes) if keepdims else total


def _long_axes(x: Array, axis: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return ``axis`` sorted if NumPy would add its many elements one by one (not along the last axis), else ()."""
    if axis is None or type(x) is not np.ndarray or x.size <= ROWS_AT_ONCE:
        return ()
    axes = tuple(sorted(normalize_axis_tuple(axis, x.ndim)))
    return axes if math.prod(x.shape[at] for at in axes) > ROWS_AT_ONCE else ()


def _by_runs(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Return the sum over ``axes``, adjacent axes together, the last ones first."""
    left = [at - x.shape[:at].count(1) for at in axes if x.shape[at] != 1]
    remaining = [n for at, n in enumerate(x.shape) if at not in axes]
    x = x.reshape([n for n in x.shape if n != 1])
    while left:
        first = last = left.pop()
        while left and left[-1] == first - 1:
            first = left.pop()
        together = x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :])
        ends = last == x.ndim - 1
        x = together.sum(axis=-1) if ends else add_up_rows(np.moveaxis(together, first, 0))
    return x.reshape(remaining)


def sum_to(gy: Array, shape: tuple[int, ...]) -> Array:
    """Return ``gy`` summed over the axes along which an input of ``shape`` was broadcast."""
    if gy.shape == shape:
        return gy
    lead = gy.ndim - len(shape)
    axes = tuple(range(lead)) + tuple(lead + i for i, n in enumerate(shape) if n == 1 and gy.shape[lead + i] != 1)
    return add_up(gy, axes).reshape(shape)


def _values(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the operands' arrays; a Python number beside bfloat16 becomes bfloat16.

    NumPy and CuPy promote bfloat16, unlike other dtypes, to float32 or float64 beside a Python number.
    """
    x, y = value_of(a), value_of(b)
    if type(y) in _NUMBERS and is_bfloat16(x):
        return x, x.dtype.type(y)
    if type(x) in _NUMBERS and is_bfloat16(y):
        return y.dtype.type(x), y
    return x, y


def unary(x: Any, value: Array, derivative: Derivative, again: Again) -> Tensor:
    """Return the result of an operation on ``x`` alone, whose input gradient ``derivative(gy)`` returns."""
    if not modes.recording:
        return Tensor(value)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(derivative(gy))

    return tensor.on_tape(value, (x,), pullback, again)


def _binary(a: Any, b: Any, value: Array, for_a: Derivative, for_b: Derivative, again: Again) -> Tensor:
    if not modes.recording:
        return Tensor(value)

    def pullback(gy: Array, da: Gradient | None, db: Gradient | None) -> None:
        if da is not None:
            da.add(sum_to(for_a(gy), da.shape))
        if db is not None:
            db.add(sum_to(for_b(gy), db.shape))

    return tensor.on_tape(value, (a, b), pullback, again)


@operator("add", ("a", "b"))
def add(a: Any, b: Any) -> Tensor:
    """Return ``a + b``."""
    x, y = _values(a, b)
    return _binary(a, b, _sum(x, y), lambda gy: gy, lambda gy: gy, ("add", x, y))


def _sum(x: Any, y: Any) -> Array:
    if not (is_cupy(x) and is_cupy(y) and x.shape == y.shape and x.dtype == y.dtype):
        return x + y
    out = array_namespace(x).empty(x.shape, dtype=x.dtype)
    kernels_for("networks", x).add(x, y, out)
    return out


@operator("subtract", ("a", "b"))
def subtract(a: Any, b: Any) -> Tensor:
    """Return ``a - b``."""
    x, y = _values(a, b)
    return _binary(a, b, x - y, lambda gy: gy, lambda gy: -gy, ("subtract", x, y))


@operator("multiply", ("a", "b"))
def multiply(a: Any, b: Any) -> Tensor:
    """Return ``a * b``, elementwise."""
    x, y = _values(a, b)
    return _binary(a, b, x * y, lambda gy: gy * y, lambda gy: gy * x, ("multiply", x, y))


@operator("divide", ("a", "b"))
def divide(a: Any, b: Any) -> Tensor:
    """Return ``a / b``, elementwise."""
    x, y = _values(a, b)
    value = array_namespace(x, y).asarray(x / y)  # no scalar: a plan recomputes it in place
    return _binary(a, b, value, lambda gy: gy / y, lambda gy: -gy * value / y, ("divide", x, y))


@operator("power", ("a", "b"))
def power(a: Any, b: Any) -> Tensor:
    """Return ``a ** b``.

    The gradient with respect to ``b`` needs ``a > 0``, or ``a == 0`` and ``b >= 0``, where it is 0.
    """
    x, y = _values(a, b)
    value = array_namespace(x, y).asarray(x**y)

    def for_a(gy: Array) -> Array:
        return gy * (y * x ** (y - 1 + (y == 0)))  # 0 * x**0 where b is 0: x**-1 would be infinite at 0

    def for_b(gy: Array) -> Array:
        xp = array_namespace(y)
        base = xp.where((x == 0) & (y >= 0), 1, x)  # log 1, as 0 * log 0 tends to 0
        if base.dtype.itemsize < value.dtype.itemsize:  # else the logarithm has only the base's precision
            base = base.astype(value.dtype)
        return gy * value * xp.log(base)

    return _binary(a, b, value, for_a, for_b, ("power", x, y))


@operator("matmul", ("a", "b"))
def matmul(a: Any, b: Any) -> Tensor:
    """Return ``a @ b`` for vectors, matrices, or stacks of matrices whose leading axes broadcast."""
    x, y = value_of(a), value_of(b)
    pullback, value = gradients_of_product(x, y), matmul_of(array_namespace(x, y))(x, y)
    if is_bfloat16(x) and is_bfloat16(y):  # NumPy returns float32
        value = value.astype(x.dtype, copy=False)
    return tensor.on_tape(value, (a, b), pullback, ("matmul", x, y))


def gradients_of_product(x: Array, y: Array) -> Pullback:
    """Return the pullback of ``x @ y``."""
    xp = array_namespace(x, y)
    product = matmul_of(xp)
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
                gradient.add(product(left, right, out=gradient.empty()))
            else:
                full = product(left, right)
                shape = gradient.shape
                if len(shape) == 1:
                    full = add_up(full, tuple(range(full.ndim - 2))).reshape(shape)
                gradient.add(sum_to(full, shape))

    return pullback


@operator("maximum", ("a", "b"))
def maximum(a: Any, b: Any) -> Tensor:
    """Return the larger of each pair of elements; equal elements get half of the gradient each."""
    return _extreme(a, b, "maximum", lambda x, y: x < y)


@operator("minimum", ("a", "b"))
def minimum(a: Any, b: Any) -> Tensor:
    """Return the smaller of each pair of elements; equal elements get half of the gradient each."""
    return _extreme(a, b, "minimum", lambda x, y: x > y)


def _extreme(a: Any, b: Any, name: str, loses: Callable[[Any, Any], Any]) -> Tensor:
    x, y = _values(a, b)
    xp = array_namespace(x, y)

    def of(gy: Array, lost: Array) -> Array:
        zero, half = gy.dtype.type(0), gy.dtype.type(0.5)
        return _either(lost, zero, _either(x == y, gy * half, gy))  # a factor of 0 would turn infinity into NaN

    value = getattr(xp, name)(x, y)
    return _binary(a, b, value, lambda gy: of(gy, loses(x, y)), lambda gy: of(gy, loses(y, x)), (name, x, y))


@operator("where", ("condition", "a", "b"))
def where(condition: Any, a: Any, b: Any) -> Tensor:
    """Return ``a`` where ``condition`` is true, else ``b``."""
    chosen, (x, y) = value_of(condition), _values(a, b)

    def again(out: Array) -> list[Call]:
        return [(lambda: out.__setitem__(..., _either(chosen, x, y)), ())]

    def for_a(gy: Array) -> Array:
        return _either(chosen, gy, gy.dtype.type(0))

    def for_b(gy: Array) -> Array:
        return _either(chosen, gy.dtype.type(0), gy)

    return _binary(a, b, _either(chosen, x, y), for_a, for_b, again)


def _either(chosen: Array, x: Any, y: Any) -> Array:
    """Return ``where``, with bfloat16 kept, which CuPy promotes to float32."""
    value = array_namespace(chosen).where(chosen, x, y)
    return value.astype(x.dtype, copy=False) if is_bfloat16(x) and is_bfloat16(y) else value


@operator("negative")
def negative(x: Any) -> Tensor:
    """Return ``-x``."""
    a = value_of(x)
    return unary(x, -a, lambda gy: -gy, ("negative", a))


@operator("abs")
def abs(x: Any) -> Tensor:
    """Return ``|x|``; the derivative at 0 is 0."""
    a = value_of(x)
    xp = array_namespace(a)
    return unary(x, xp.abs(a), lambda gy: gy * xp.sign(a), ("abs", a))


@operator("exp")
def exp(x: Any) -> Tensor:
    """Return e to the power of ``x``."""
    a = value_of(x)
    xp = array_namespace(a)
    value = xp.asarray(xp.exp(a))
    return unary(x, value, lambda gy: gy * value, ("exp", a))


@operator("log")
def log(x: Any) -> Tensor:
    """Return the natural logarithm."""
    a = value_of(x)
    return unary(x, array_namespace(a).log(a), lambda gy: gy / a, ("log", a))


@operator("sqrt")
def sqrt(x: Any) -> Tensor:
    """Return the square root."""
    a = value_of(x)
    xp = array_namespace(a)
    value = xp.asarray(xp.sqrt(a))
    return unary(x, value, lambda gy: gy / (2 * value), ("sqrt", a))


@operator("tanh")
def tanh(x: Any) -> Tensor:
    """Return the hyperbolic tangent."""
    a = value_of(x)
    xp = array_namespace(a)
    value = xp.tanh(a, out=empty(a.shape, _floats_of(a), xp))

    def derivative(gy: Array) -> Array:
        y = _wide(value)
        dx = xp.multiply(y, y, out=empty(y.shape, y.dtype, xp))
        xp.subtract(1, dx, out=dx)
        return xp.multiply(dx, gy, out=dx)

    return unary(x, value, derivative, ("tanh", a))


@operator("sigmoid")
def sigmoid(x: Any) -> Tensor:
    """Return ``1 / (1 + exp(-x))``."""
    a = value_of(x)
    xp = array_namespace(a)
    value = empty(a.shape, _floats_of(a), xp)

    def compute(value: Array) -> None:
        wide = _wide(a)
        y = value if wide is a else empty(a.shape, wide.dtype, xp)
        xp.negative(wide, out=y, dtype=y.dtype.type)
        with np.errstate(over="ignore"):  # exp overflows to infinity, which gives 0
            xp.exp(y, out=y)
        y += 1
        xp.divide(1, y, out=y)
        if y is not value:
            value[...] = y

    compute(value)

    def derivative(gy: Array) -> Array:
        y = _wide(value)
        dx = xp.subtract(1, y, out=empty(y.shape, y.dtype, xp))
        dx *= y
        return xp.multiply(dx, gy, out=dx)

    return unary(x, value, derivative, lambda out: [(compute, (out,))])


def _floats_of(x: Array) -> np.dtype:
    """Return the float dtype of a function of ``x``, as in NumPy: a wider one for integers."""
    return np.result_type(x.dtype, np.float16) if x.dtype.kind in "biu" else x.dtype


def _wide(x: Array) -> Array:
    """Return ``x``, with 16-bit floats copied to float32, so that a chain of operations rounds once."""
    return x.astype("float32") if is_half(x) else x


@operator("astype")
def astype(x: Tensor, dtype: Any) -> Tensor:
    """Return a copy in another dtype; the gradient is converted back."""
    a = x.data
    return unary(x, a.astype(dtype_of(dtype)), lambda gy: gy, lambda out: [(out.__setitem__, (..., a))])


@operator("detach")
def detach(x: Tensor) -> Tensor:
    """Return a tensor of the same array that is on no tape."""
    return Tensor(x.data)


def compare(name: str, a: Any, b: Any) -> Tensor:
    """Return the elementwise result of the relation ``name`` (such as ``"less"``), which has no gradient."""
    return _compared(a, b, name)


@operator("compare", ("a", "b"))
def _compared(a: Any, b: Any, name: str) -> Tensor:
    x, y = value_of(a), value_of(b)
    return tensor.on_tape(_RELATIONS[name](x, y), (), None, (name, x, y))


def index(key: Any) -> Any:
    """Return an index with its tensors replaced by their arrays."""
    return tuple(map(value_of, key)) if isinstance(key, tuple) else value_of(key)


@operator("sum")
def sum(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return the sum over ``axis``, over all axes for None."""
    xp, shape = array_namespace(x.data), x.shape
    axis = _axes(axis)
    spread = _spread(shape, axis, keepdims)

    def derivative(gy: Array) -> Array:
        wide = spread(gy)
        if wide.shape == shape:
            return wide
        repeated = xp.broadcast_to(wide, shape)  # read-only
        return repeated if repeated.size > 1 else repeated.copy()  # one element is contiguous: kernels take it as it is

    a = x.data

    def again(out: Array) -> list[Call]:
        return [(lambda: out.__setitem__(..., add_up(a, axis, keepdims)), ())]

    return unary(x, add_up(a, axis, keepdims), derivative, again)


def mean(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return the mean over ``axis``, over all axes for None."""
    wide = astype(x, "float32") if is_half(x) else x  # the sum may overflow 16 bits
    total = sum(wide, axis, keepdims)
    result = divide(total, float(builtins.max(x.size, 1) / builtins.max(total.size, 1)))
    return result if wide is x else astype(result, x.dtype)


@operator("max")
def max(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return the largest element over ``axis``; equal elements share the gradient."""
    return _extremum(x, "max", axis, keepdims)


@operator("min")
def min(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return the smallest element over ``axis``; equal elements share the gradient."""
    return _extremum(x, "min", axis, keepdims)


def _extremum(x: Tensor, name: str, axis: Any, keepdims: bool) -> Tensor:
    a = x.data
    xp = array_namespace(a)
    axis = _axes(axis)
    find = getattr(xp, name)
    value = xp.asarray(find(a, axis=axis, keepdims=keepdims))
    spread = _spread(x.shape, axis, keepdims)

    def derivative(gy: Array) -> Array:
        chosen = (a == spread(value)) | (a != a)  # the result of a NaN is NaN
        count = chosen.sum(axis=axis, keepdims=True, dtype="float32" if is_half(gy) else gy.dtype)
        return xp.where(chosen, (spread(gy) / count).astype(gy.dtype, copy=False), gy.dtype.type(0))

    return unary(x, value, derivative, lambda out: [(lambda: find(a, axis=axis, keepdims=keepdims, out=out), ())])


@operator("argmax")
def argmax(x: Tensor, axis: int | None = None) -> Tensor:
    """Return the index of the largest element along ``axis``, of all elements for None; it has no gradient."""
    a = x.data
    xp = array_namespace(a)
    value = xp.argmax(a, axis=axis)
    return tensor.on_tape(value, (), None, lambda out: [(lambda: xp.argmax(a, axis=axis, out=out), ())])


def _axes(axis: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    """Return ``axis`` in NumPy's form; a list becomes a tuple, which cannot change before backward."""
    axes = axis if isinstance(axis, (list, tuple)) else () if axis is None else (axis,)
    if not all(hasattr(number, "__index__") for number in axes):
        raise ValueError(f"axis {axis!r}")
    return tuple(axes) if isinstance(axis, list) else axis  # type: ignore[return-value]


def _spread(shape: tuple[int, ...], axis: Any, keepdims: bool) -> Derivative:
    """Return a function that restores the reduced axes with length 1."""
    if keepdims:
        return lambda y: y
    axes = range(len(shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    reduced = {at % len(shape) for at in axes} if shape else set()
    with_ones = tuple(1 if i in reduced else n for i, n in enumerate(shape))
    return lambda y: y.reshape(with_ones)


def reshape(x: Tensor, *shape: Any) -> Tensor:
    """Return the elements in another shape, given as numbers or one tuple; one may be -1."""
    new_shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    return _reshaped(x, tuple(new_shape))


@operator("reshape")
def _reshaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    a, old = x.data, x.shape
    value = a.reshape(shape)
    new_shape = value.shape
    return unary(
        x, value, lambda gy: gy.reshape(old), lambda out: [(lambda: out.__setitem__(..., a.reshape(new_shape)), ())]
    )


def transpose(x: Tensor, *axes: Any) -> Tensor:
    """Return the tensor with permuted axes, given as numbers or one tuple; reversed by default."""
    order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
    return _transposed(x, _normalized("transpose", order, x.ndim) if order else tuple(range(x.ndim))[::-1])


def _normalized(operation: str, axes: Any, ndim: int) -> tuple[int, ...]:
    """Return axes counted from 0; raise `UnsupportedError` for invalid or repeated axes."""
    try:
        return normalize_axis_tuple(axes, ndim)
    except (TypeError, ValueError) as error:
        expected = f"axes from {-ndim} to {ndim - 1}, each once"
        raise UnsupportedError(operation, where="axes", expected=expected, got=axes) from error


@operator("transpose")
def _transposed(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    a = x.data
    back = tuple(axes.index(i) for i in range(len(axes)))
    return unary(
        x, a.transpose(axes), lambda gy: gy.transpose(back), lambda out: [(out.__setitem__, (..., a.transpose(axes)))]
    )


def getitem(x: Tensor, key: Any) -> Tensor:
    """Return ``x[key]``; elements selected more than once sum their gradients."""
    parts = key if isinstance(key, tuple) else (key,)
    tensors = [part for part in parts if _is_array(part)]
    plain_key = tuple(... if _is_array(part) else part for part in parts) if tensors else parts
    places = tuple(i for i, part in enumerate(parts) if _is_array(part))
    return _selected(x, *tensors, key=plain_key, places=places)


def _is_array(part: Any) -> bool:
    return not (part is None or part is Ellipsis or isinstance(part, (bool, int, slice)))


@operator("getitem", ("x", "indices"))
def _selected(x: Tensor, *indices: Any, key: tuple[Any, ...], places: tuple[int, ...]) -> Tensor:
    """Return ``x[key]`` where the elements of ``key`` at ``places`` are ``indices``."""
    plain = list(key)
    for place, part in zip(places, indices, strict=True):
        plain[place] = (
            copy.deepcopy(part) if isinstance(part, list) else value_of(part)
        )  # backward reads the index, too
    chosen = tuple(plain)
    a, shape = x.data, x.shape
    xp = array_namespace(a)

    def derivative(gy: Array) -> Array:
        dx = xp.zeros(shape, dtype=gy.dtype)
        if indices:
            kernels_for("networks", dx).add_at(dx, chosen, gy)
        else:
            dx[chosen] = gy
        return dx

    value = xp.asarray(a[chosen])
    return unary(x, value, derivative, lambda out: [(lambda: out.__setitem__(..., a[chosen]), ())])


def concatenate(xs: Sequence[Any], axis: int = 0) -> Tensor:
    """Return the tensors concatenated along ``axis``."""
    return _joined(*[as_tensor(x) for x in xs], axis=axis)


@operator("concatenate", ("xs",))
def _joined(*xs: Tensor, axis: int) -> Tensor:
    arrays = [x.data for x in xs]
    xp = array_namespace(*arrays)
    shapes = [x.shape for x in arrays]
    along = axis % len(shapes[0]) if shapes and -len(shapes[0]) <= axis < len(shapes[0]) else None
    if along is None or len({(len(shape), shape[:along], shape[along + 1 :]) for shape in shapes}) > 1:
        expected = f"tensors of equal shapes except along axis {axis}"
        raise UnsupportedError("concatenate", expected=expected, got=", ".join(map(str, map(tuple, shapes))) or "none")
    value = xp.concatenate(arrays, axis=axis)

    def pullback(gy: Array, *gradients: Gradient | None) -> None:
        first = 0
        for gradient, x in zip(gradients, shapes, strict=True):
            last = first + x[along]
            if gradient is not None:
                gradient.add(gy[(slice(None),) * along + (slice(first, last),)])
            first = last

    return tensor.on_tape(value, xs, pullback, lambda out: [(lambda: xp.concatenate(arrays, axis=axis, out=out), ())])


def stack(xs: Sequence[Any], axis: int = 0) -> Tensor:
    """Return the tensors, all of one shape, stacked along a new ``axis``."""
    tensors = [as_tensor(x) for x in xs]
    (place,) = _normalized("stack", (axis,), tensors[0].ndim + 1) if tensors else (0,)
    return concatenate([x[(slice(None),) * place + (None,)] for x in tensors], axis=place)
