"""Reductions: the named ones and a user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import is_float, is_half
from ..errors import UnsupportedError

OPS = ("sum", "mean", "min", "max", "prod")
"""The names of the reductions."""


@dataclass(frozen=True)
class Monoid:
    """A user's own reduction, e.g. ``Monoid(np.logaddexp, -np.inf, "log-sum-exp")``.

    Args:
        function: takes two arrays of one shape and dtype and returns their reduction, element by element, changing
            neither. It must be associative and commutative: algorithms reduce in orders of their own.
        identity: reduces with any x to x: what a rank without data can fill its array with, as reductions do not.
        name: for messages; the same on all ranks.

    Raises:
        UnsupportedError: ``function`` cannot be called.
    """

    function: Callable[[np.ndarray, np.ndarray], np.ndarray]
    identity: float | None = None
    name: str = "monoid"

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UnsupportedError(
                "Monoid", where="function", expected="a function of two arrays", got=repr(self.function)
            )


@dataclass(frozen=True)
class Reduction:
    """What algorithms do with two arrays that meet. Made by `resolve`.

    Floats of 16 bits are accumulated in float32 and rounded once; a mean is a sum, divided when it is complete.
    """

    name: str
    into: Callable[[np.ndarray, np.ndarray], None]
    """``into(total, x)`` reduces ``x`` into ``total``, in place."""
    named: bool = True
    """Whether ``name`` is one of `OPS`."""

    def without_mean(self) -> Reduction:
        """The reduction of parts of which the mean is still to be taken."""
        return _NAMED["sum"] if self.name == "mean" and self.named else self

    def widened(self, x: np.ndarray) -> np.ndarray:
        """``x`` in its accumulator's dtype: itself, or a copy where that is another."""
        return x.astype(np.float32) if x.dtype.itemsize == 2 and is_half(x) else x

    def finish(self, total: np.ndarray, n: int, out: np.ndarray) -> None:
        """Write the reduction over ``n`` ranks from its accumulator ``total`` to ``out``, which may be ``total``."""
        if self.name == "mean" and self.named:
            np.divide(total, total.dtype.type(n), out=total)
        if out is not total:
            narrow(total, out)


_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def _by(ufunc: np.ufunc) -> Callable[[np.ndarray, np.ndarray], None]:
    @np.errstate(over="ignore", invalid="ignore")  # as in memory and by MPI; to raise here would end one rank alone
    def into(total: np.ndarray, x: np.ndarray) -> None:
        ufunc(total, x, out=total)

    return into


def _by_monoid(monoid: Monoid) -> Callable[[np.ndarray, np.ndarray], None]:
    def into(total: np.ndarray, x: np.ndarray) -> None:
        reduced = np.asarray(monoid.function(total, x))
        if reduced.shape != total.shape or not np.can_cast(reduced.dtype, total.dtype, "same_kind"):
            raise UnsupportedError(
                "reduction", where=f"op={monoid.name!r}",
                expected=f"a function that returns shape {total.shape} and {total.dtype}, as its arguments have",
                got=f"{reduced.shape} and {reduced.dtype}",
            )  # fmt: skip
        total[...] = reduced

    return into


_NAMED = {name: Reduction(name, _by(ufunc)) for name, ufunc in _UFUNCS.items()}


def resolve(operation: str, op: str | Monoid, dtype: np.dtype) -> Reduction:
    """The reduction called ``op`` for arrays of ``dtype``.

    Raises:
        UnsupportedError: an unknown one, or a mean of integers, for which see `Quotients`; it names what is valid.
    """
    if isinstance(op, Monoid):
        return Reduction(op.name, _by_monoid(op), named=False)
    if not isinstance(op, str) or op not in OPS:
        raise UnsupportedError(operation, where="op", expected=" or ".join([*OPS, "a Monoid"]), got=repr(op))
    if op == "mean" and not is_float(dtype) and dtype.kind != "c":
        raise UnsupportedError(
            operation, where="op", expected="a float dtype for op='mean'", got=dtype.name, remedy="use op='sum'"
        )
    return _NAMED[op]


class Quotients:
    """Means of integers, rounded towards zero, by sums of other integers that do not overflow.

    Integers of up to 32 bits are summed in 64. Of those of 64 bits the sum may need more, so the quotients by the
    number of ranks and the remainders are summed apart.

    Args:
        x: this rank's, any shape.
        n: the number of ranks.
    """

    def __init__(self, x: np.ndarray, n: int) -> None:
        self._n = n
        self.parts: list[np.ndarray] = [*divmod(x, x.dtype.type(n))] if x.dtype.itemsize == 8 else [x.astype(np.int64)]
        """What is to be summed over the ranks."""

    @staticmethod
    def dtype_for(dtype: np.dtype) -> np.dtype:
        """Return the dtype of the `parts` of arrays of ``dtype``."""
        return dtype if dtype.itemsize == 8 else np.dtype(np.int64)

    def finish(self, sums: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Write the means to ``out``, of which ``sums`` are the summed `parts`, or the same pieces of them."""
        floor, remainder = divmod(sums[-1], sums[-1].dtype.type(self._n))
        if len(sums) == 2:
            floor += sums[0]
        floor += ((floor < 0) & (remainder != 0)).astype(floor.dtype)
        out[...] = floor


def reducible(x: np.ndarray) -> np.ndarray:
    """``x`` in a dtype whose reductions MPI libraries do right: itself, or a copy that is narrowed when it is done.

    MPI has no floats of 16 bits, which are reduced in float32; Open MPI 5's sums of integers of 8 and 16 bits saturate
    where they should wrap around.
    """
    if is_half(x):
        return x.astype(np.float32)
    if x.dtype.kind in "iu" and x.dtype.itemsize < 4:
        return x.astype(np.int32)
    return x


def narrow(wide: np.ndarray, out: np.ndarray) -> None:
    """Write ``wide`` to ``out``, of which it is the accumulator."""
    with np.errstate(over="ignore"):  # of 16 bits: to an infinity, which whoever cares will look for
        out[...] = wide


def reduce_in_order(inputs: Sequence[np.ndarray], op: Reduction) -> np.ndarray:
    """The reduction of one array from every rank, in the order of the ranks; it has the accumulator's dtype."""
    total = op.widened(inputs[0])
    total = total.copy() if total is inputs[0] else total
    for other in inputs[1:]:
        op.into(total, other)
    op.finish(total, len(inputs), total)
    return total
