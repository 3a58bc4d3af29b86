"""Operators on 16-bit floats: computed in float32 and rounded once, as Micikevicius et al., "Mixed precision
training", 2018, section 3.3, do with sums and products.

NumPy has no arithmetic for them that is worth the name, so on the host all operators of networks go this way. On
devices products do not: theirs multiply 16-bit factors and add up in float32 by themselves. Nor does what CUDA has
kernels of 16 bits for, which compute in float32 and round once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ..arrays import Array, array_namespace, is_cupy, is_float, is_half, is_host
from ..autograd import Gradient, Tensor, as_tensor, on_tape
from ..autograd.registry import Again, Call, calls_of, captured
from ..autograd.tensor import value_of

P = ParamSpec("P")
R = TypeVar("R")
_SINGLE = np.dtype(np.float32)


def in_float32(
    *, is_product: bool = False, has_kernels: bool = False, first_alone: bool = False, rounds: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have an operator that meets a 16-bit operand compute in float32; others are called as they are.

    Operands of 16 bits are widened. The first one, what a layer is called with, is rounded to them if it has more bits,
    so that a network of 16 bits takes images of float32; the others stay as they are.

    Args:
        is_product: whether devices compute it in 16 bits.
        has_kernels: whether CUDA does.
        first_alone: whether these kernels take the first operand alone in 16 bits, and others in float32.
        rounds: whether the result, the first one of several, is rounded to 16 bits; a loss stays float32.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # By far the most calls are of float32, and looking at all operands takes as long as a small product.
            if (
                args
                and getattr(args[0], "dtype", None) is _SINGLE
                and (getattr(args[1], "dtype", _SINGLE) is _SINGLE if len(args) > 1 else not kwargs)
            ):
                return function(*args, **kwargs)
            given = [value_of(x) for x in (*args, *kwargs.values())]
            x = next((each for each in given if is_half(each)), None)
            if x is None:
                return function(*args, **kwargs)
            stays = not is_host(x) and (is_product or (has_kernels and is_cupy(x)))
            to = x.dtype if stays and not first_alone else _SINGLE
            if stays and (x is given[0] or not first_alone) and _are_all(to, given[first_alone:]):
                return function(*args, **kwargs)
            return _Call(x.dtype, to, rounds).of(function, args, kwargs)

        return call

    return register


def _are_all(dtype: np.dtype, operands: Sequence[Any]) -> bool:
    return all(x.dtype == dtype for x in operands if hasattr(x, "dtype") and is_float(x.dtype))


class _Call:
    """One call of an operator on operands of which some have the dtype ``half``, computed in the dtype ``to``."""

    def __init__(self, half: np.dtype, to: np.dtype, rounds: bool) -> None:
        self._half, self._to, self._rounds = half, to, rounds and to != half
        self._given: dict[int, tuple[Any, Tensor]] = {}
        """By the id of what an operand was converted to the operand itself, and that."""
        self._refresh: list[Call] = []

    def of(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What ``function`` gives, on the tape."""
        with captured() as told:
            operands = [self._converted(x, is_first=not i) for i, x in enumerate((*args, *kwargs.values()))]
            found = function(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))
        result, *others = found if isinstance(found, tuple) else (found,)
        inputs, pullback, again = told[0]
        own = self._on_tape(result.data, inputs, pullback, again)
        return (own, *others) if isinstance(found, tuple) else own

    def _converted(self, x: Any, is_first: bool) -> Any:
        a = value_of(x)
        if not (hasattr(a, "dtype") and is_float(a.dtype)):
            return x
        if a.dtype == self._to and (not is_first or self._to == self._half):
            return x
        copied = partial(_copied, a, self._half, self._to)  # not of this call: a ring keeps arrays until it is found
        copy = copied()
        self._refresh.append((lambda: copy.__setitem__(..., copied()), ()))
        tensor = Tensor(copy)
        self._given[id(tensor)] = (as_tensor(x), tensor)
        return tensor

    def _on_tape(self, wide: Array, inputs: Sequence[Any], pullback: Any, again: Again | None) -> Tensor:
        given = [self._given.get(id(each), (each, None)) for each in inputs]

        def back(gy: Array, *gradients: Gradient | None) -> None:
            xp = array_namespace(gy)
            of_call = [
                gradient if gradient is None or tensor is None else Gradient(tensor, xp)
                for gradient, (_, tensor) in zip(gradients, given, strict=True)
            ]
            with np.errstate(over="ignore"):  # to an infinity, for which the sums of gradients are searched
                pullback(gy.astype(self._to, copy=False), *of_call)
                for gradient, each in zip(gradients, of_call, strict=True):
                    if gradient is not None and each is not None and each is not gradient:
                        gradient.add(each.finish())

        def once_more(place: Array) -> list[Call]:
            assert again is not None
            calls = calls_of(again, wide if self._rounds else place)
            return [*self._refresh, *calls, *([(partial(_round, wide, place), ())] if self._rounds else [])]

        value = wide
        if self._rounds:
            value = array_namespace(wide).empty(wide.shape, dtype=self._half)
            _round(wide, value)
        return on_tape(value, tuple(each for each, _ in given), back, None if again is None else once_more)


def _copied(a: Array, half: np.dtype, to: np.dtype) -> Array:
    with np.errstate(over="ignore"):  # to an infinity, which is no surprise
        return a.astype(half, copy=False).astype(to)


def _round(wide: Array, place: Array) -> None:
    with np.errstate(over="ignore"):
        place[...] = wide
