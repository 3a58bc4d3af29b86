"""What elementwise operators compute, forward and backward, as arithmetic on terms.

It is the arithmetic of `autograd.operators` and of the layers' own, operation by operation, so that a chain that is
made of these terms has the same bits; the tests compare every one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ...arrays import Array

Number = int | float
_numbers = itertools.count()


class Moving:
    """Where an input, or a result, lies in this call; in the next one it may be elsewhere."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array


class Term:
    """An operand of a chain, or the result of an operation on terms.

    Args:
        operation: one of `kernels.reference.chain.OPERATIONS` or of `BY_NUMPY`; "" where it is an operand.
        value: an operand's array, `Moving` or number; None where it is told later.
    """

    __slots__ = ("number", "operands", "operation", "value")

    def __init__(self, operation: str = "", operands: tuple[Term, ...] = (), value: Any = None) -> None:
        self.operation, self.operands, self.value = operation, operands, value
        self.number = next(_numbers)

    def __add__(self, other: Term | Number) -> Term:
        return _made("add", self, other)

    def __sub__(self, other: Term | Number) -> Term:
        return _made("subtract", self, other)

    def __rsub__(self, other: Number) -> Term:
        return _made("subtract", other, self)

    def __mul__(self, other: Term | Number) -> Term:
        return _made("multiply", self, other)

    def __rmul__(self, other: Number) -> Term:
        return _made("multiply", other, self)

    def __truediv__(self, other: Term | Number) -> Term:
        return _made("divide", self, other)

    def __rtruediv__(self, other: Number) -> Term:
        return _made("divide", other, self)

    def __neg__(self) -> Term:
        return _made("negative", self)


def quiet_exp(x: Array, out: Array | None = None) -> Array:
    """`numpy.exp` without a warning that it is too large, where an infinity is as good."""
    with np.errstate(over="ignore"):
        return np.exp(x, out=out)


BY_NUMPY: dict[str, Callable[..., Any]] = {"tanh": np.tanh, "exp": np.exp, "quiet_exp": quiet_exp, "log": np.log}
"""Operations whose results are NumPy's own choice of roundings: it computes them, block by block."""


def _made(operation: str, *operands: Term | Number) -> Term:
    return Term(operation, tuple(each if isinstance(each, Term) else Term(value=each) for each in operands))


def _operation(name: str) -> Callable[..., Term]:
    return lambda *operands: _made(name, *operands)


_where_positive, _greater, _equal = _operation("where_positive"), _operation("greater"), _operation("equal")
_maximum, _sign, _gelu_gradient, _quiet_exp = map(_operation, ("maximum", "sign", "gelu_gradient", "quiet_exp"))


def _of_extreme(loses: Callable[[Term, Term], Term]) -> tuple[Callable[..., Term], Callable[..., Term]]:
    def gradient(g: Term, a: Term, b: Term) -> Term:
        share = 1 - loses(a, b) - 0.5 * _equal(a, b)
        return _where_positive(share, g * share)

    return lambda g, y, a, b: gradient(g, a, b), lambda g, y, a, b: gradient(g, b, a)


FORWARD: dict[str, Callable[..., Term]] = {
    **{name: _operation(name) for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum")},
    **{name: _operation(name) for name in ("negative", "abs", "sqrt", "exp", "log", "tanh", "gelu")},
    "sigmoid": lambda x: 1 / (_quiet_exp(-x) + 1),
    "relu": lambda x: _maximum(x, 0),
}
"""For each operator its result, of its operands."""

BACKWARD: dict[str, tuple[Callable[..., Term], ...]] = {
    "add": (lambda g, y, a, b: g, lambda g, y, a, b: g),
    "subtract": (lambda g, y, a, b: g, lambda g, y, a, b: -g),
    "multiply": (lambda g, y, a, b: g * b, lambda g, y, a, b: g * a),
    "divide": (lambda g, y, a, b: g / b, lambda g, y, a, b: -g * y / b),
    "maximum": _of_extreme(lambda a, b: _greater(b, a)),
    "minimum": _of_extreme(_greater),
    "negative": (lambda g, y, x: -g,),
    "abs": (lambda g, y, x: g * _sign(x),),
    "sqrt": (lambda g, y, x: g / (2 * y),),
    "exp": (lambda g, y, x: g * y,),
    "log": (lambda g, y, x: g / x,),
    "tanh": (lambda g, y, x: (1 - y * y) * g,),
    "gelu": (lambda g, y, x: _gelu_gradient(g, x),),
    "sigmoid": (lambda g, y, x: (1 - y) * y * g,),
    "relu": (lambda g, y, x: _where_positive(y, g),),
}
"""For each operator the gradients of its operands, of that of its result, its result, and its operands."""


def in_order(results: Iterable[Term]) -> list[Term]:
    """The operations that ``results`` need, each once, in the order in which they were written down."""
    found: dict[int, Term] = {}
    waiting = list(results)
    while waiting:
        term = waiting.pop()
        if term.operation and term.number not in found:
            found[term.number] = term
            waiting += term.operands
    return [found[number] for number in sorted(found)]
