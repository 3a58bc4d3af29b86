"""Operations on tensors that reduce, cut or put together: sums, shapes, parts; written as those of `operators`."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Sequence
from typing import Any

from numpy.lib.array_utils import normalize_axis_tuple

from ..arrays import Array, array_namespace, is_half
from ..errors import UnsupportedError
from ..kernels import kernels_for
from . import tensor
from .operators import Derivative, add_up, astype, divide, unary
from .registry import Call, operator
from .tape import Gradient
from .tensor import Tensor, as_tensor, value_of


def index(key: Any) -> Any:
    """An index with the tensors in it replaced by their arrays."""
    return tuple(value_of(each) for each in key) if isinstance(key, tuple) else value_of(key)


@operator("sum")
def sum(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """The sum over ``axis``, over all axes if it is None."""
    xp, shape = array_namespace(x.data), x.shape
    axis = _axes(axis)
    spread = _spread(shape, axis, keepdims)

    def derivative(gy: Array) -> Array:
        wide = spread(gy)
        if wide.shape == shape:
            return wide
        repeated = xp.broadcast_to(wide, shape)  # which only can be read
        return repeated if repeated.size > 1 else repeated.copy()  # else contiguous, and handed to kernels as it is

    a = x.data

    def again(out: Array) -> list[Call]:
        return [(lambda: out.__setitem__(..., add_up(a, axis, keepdims)), ())]

    return unary(x, add_up(a, axis, keepdims), derivative, again)


def mean(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """The mean over ``axis``, over all axes if it is None."""
    wide = astype(x, "float32") if is_half(x) else x  # whose sum may be larger than 16 bits hold
    total = sum(wide, axis, keepdims)
    found = divide(total, float(builtins.max(x.size, 1) / builtins.max(total.size, 1)))
    return found if wide is x else astype(found, x.dtype)


@operator("max")
def max(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """The largest element over ``axis``; equal ones share the gradient."""
    return _extremum(x, "max", axis, keepdims)


@operator("min")
def min(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """The smallest element over ``axis``; equal ones share the gradient."""
    return _extremum(x, "min", axis, keepdims)


def _extremum(x: Tensor, name: str, axis: Any, keepdims: bool) -> Tensor:
    a = x.data
    xp = array_namespace(a)
    axis = _axes(axis)
    find = getattr(xp, name)
    value = xp.asarray(find(a, axis=axis, keepdims=keepdims))
    spread = _spread(x.shape, axis, keepdims)

    def derivative(gy: Array) -> Array:
        chosen = (a == spread(value)) | (a != a)  # where there is a NaN the result is one
        count = chosen.sum(axis=axis, keepdims=True, dtype="float32" if is_half(gy) else gy.dtype)
        return xp.where(chosen, (spread(gy) / count).astype(gy.dtype, copy=False), gy.dtype.type(0))

    return unary(x, value, derivative, lambda out: [(lambda: find(a, axis=axis, keepdims=keepdims, out=out), ())])


@operator("argmax")
def argmax(x: Tensor, axis: int | None = None) -> Tensor:
    """Where the largest element is along ``axis``, of all elements if it is None; no gradient."""
    a = x.data
    xp = array_namespace(a)
    value = xp.argmax(a, axis=axis)
    return tensor.on_tape(value, (), None, lambda out: [(lambda: xp.argmax(a, axis=axis, out=out), ())])


def _axes(axis: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    """``axis`` as NumPy takes it: several in a tuple, which nobody changes before backward."""
    axes = axis if isinstance(axis, (list, tuple)) else () if axis is None else (axis,)
    if not all(hasattr(each, "__index__") for each in axes):
        raise ValueError(f"axis {axis!r}")
    return tuple(axes) if isinstance(axis, list) else axis  # type: ignore[return-value]


def _spread(shape: tuple[int, ...], axis: Any, keepdims: bool) -> Derivative:
    """What gives a reduced array its axes of length 1 back."""
    if keepdims:
        return lambda y: y
    axes = range(len(shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    reduced = {each % len(shape) for each in axes} if shape else set()
    kept = tuple(1 if i in reduced else n for i, n in enumerate(shape))
    return lambda y: y.reshape(kept)


def reshape(x: Tensor, *shape: Any) -> Tensor:
    """The same elements in another shape, given as numbers or one tuple; one may be -1."""
    wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    return _reshaped(x, tuple(wanted))


@operator("reshape")
def _reshaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    a, old = x.data, x.shape
    value = a.reshape(shape)
    wanted = value.shape
    return unary(
        x, value, lambda gy: gy.reshape(old), lambda out: [(lambda: out.__setitem__(..., a.reshape(wanted)), ())]
    )


def transpose(x: Tensor, *axes: Any) -> Tensor:
    """The axes in another order, given as numbers or one tuple; reversed if none are given."""
    order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
    return _transposed(x, _normalized("transpose", order, x.ndim) if order else tuple(range(x.ndim))[::-1])


def _normalized(operation: str, axes: Any, ndim: int) -> tuple[int, ...]:
    """Axes from 0 on; `UnsupportedError` for one that is not there, or twice."""
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
    """``x[key]``; elements taken more than once sum their gradients."""
    parts = key if isinstance(key, tuple) else (key,)
    tensors = [part for part in parts if _is_array(part)]
    kept = tuple(... if _is_array(part) else part for part in parts) if tensors else parts
    places = tuple(i for i, part in enumerate(parts) if _is_array(part))
    return _taken(x, *tensors, key=kept, places=places)


def _is_array(part: Any) -> bool:
    return not (part is None or part is Ellipsis or isinstance(part, (bool, int, slice)))


@operator("getitem", ("x", "indices"))
def _taken(x: Tensor, *indices: Any, key: tuple[Any, ...], places: tuple[int, ...]) -> Tensor:
    """``x[key]`` where the elements of ``key`` at ``places`` are ``indices``."""
    plain = list(key)
    for place, part in zip(places, indices, strict=True):
        plain[place] = copy.deepcopy(part) if isinstance(part, list) else value_of(part)  # backward reads it, too
    chosen = tuple(plain)
    a, shape = x.data, x.shape
    xp = array_namespace(a)

    def derivative(gy: Array) -> Array:
        dx = xp.zeros(shape, dtype=gy.dtype)
        if indices:
            kernels_for("rows", dx).add_at(dx, chosen, gy)
        else:
            dx[chosen] = gy
        return dx

    value = xp.asarray(a[chosen])
    return unary(x, value, derivative, lambda out: [(lambda: out.__setitem__(..., a[chosen]), ())])


def concatenate(xs: Sequence[Any], axis: int = 0) -> Tensor:
    """The tensors one behind the other along ``axis``."""
    return _joined(*[as_tensor(x) for x in xs], axis=axis)


@operator("concatenate", ("xs",))
def _joined(*xs: Tensor, axis: int) -> Tensor:
    arrays = [x.data for x in xs]
    xp = array_namespace(*arrays)
    if not arrays or len({each.ndim for each in arrays}) > 1 or not -arrays[0].ndim <= axis < arrays[0].ndim:
        raise _not_joined(arrays, axis)
    along = axis % arrays[0].ndim
    if len({(*each.shape[:along], *each.shape[along + 1 :]) for each in arrays}) > 1:
        raise _not_joined(arrays, axis)
    value = xp.concatenate(arrays, axis=axis)

    def pullback(gy: Array, *gradients: Gradient | None) -> None:
        first = 0
        for gradient, x in zip(gradients, shapes, strict=True):
            last = first + x[along]
            if gradient is not None:
                gradient.add(gy[(slice(None),) * along + (slice(first, last),)])
            first = last

    shapes = [x.shape for x in arrays]
    return tensor.on_tape(value, xs, pullback, lambda out: [(lambda: xp.concatenate(arrays, axis=axis, out=out), ())])


def _not_joined(arrays: Sequence[Array], axis: int) -> UnsupportedError:
    return UnsupportedError(
        "concatenate",
        expected=f"tensors that are alike but along axis {axis}",
        got=", ".join(str(tuple(each.shape)) for each in arrays) or "none",
    )


def stack(xs: Sequence[Any], axis: int = 0) -> Tensor:
    """The tensors, all of one shape, along a new ``axis``."""
    tensors = [as_tensor(x) for x in xs]
    (place,) = _normalized("stack", (axis,), tensors[0].ndim + 1) if tensors else (0,)
    return concatenate([x[(slice(None),) * place + (None,)] for x in tensors], axis=place)
