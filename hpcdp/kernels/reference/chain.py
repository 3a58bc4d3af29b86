"""What elementwise operations of chains compute, in plain array operations: the specification of `chain`."""

from __future__ import annotations

from collections.abc import Callable

from ...core.arrays import Array, array_namespace
from .sequences import gelu, gelu_gradient


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
"""By name; `chain` knows them by their places in this order. ``greater`` and ``equal`` give 1 or 0, ``where_positive(a,
b)`` is ``b`` where ``a`` is above 0, else 0."""
