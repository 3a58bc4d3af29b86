"""Sums of squares and the search for infinities and NaNs, for NumPy arrays. Imports: arrays, halves, numba.

`reference.norms` is the specification: same names, same arguments, the same sums up to rounding in float64. A sum may
be reassociated so that it runs in several vectors at once; its order depends on the compiled code and the number of
elements alone, so the same run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba import float64, types
from numba.extending import intrinsic

from ..core.arrays import Array
from .halves import widen
from .machine_code import kernel

_BLOCK = 1 << 14
"""Elements that are looked at before the search may end."""


@intrinsic
def _magnitude(typingctx: Any, value: Any) -> Any:
    """The bits of a float without the sign, as an unsigned integer of its size; of `hpcdp.core.arrays.words` in their
    own type, which tells the format."""
    bits = value.bitwidth
    result = {32: types.uint32, 64: types.uint64}.get(bits, value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(bits)
        return builder.and_(builder.bitcast(args[0], word), word((1 << (bits - 1)) - 1))

    return result(value), generate


@intrinsic
def _larger(typingctx: Any, a: Any, b: Any) -> Any:
    """The larger of two magnitudes; Numba's own would be computed in 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", *args), *args)

    return a(a, a), generate


@intrinsic
def _is_finite(typingctx: Any, magnitude: Any) -> Any:
    infinity = {
        types.uint16: 0x7C00, types.int16: 0x7F80, types.uint32: 0x7F800000, types.uint64: 0x7FF0000000000000,
    }[magnitude]  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.icmp_unsigned("<", args[0], args[0].type(infinity)), ir.IntType(1))

    return types.boolean(magnitude), generate


@kernel()
def all_finite(x):  # type: ignore[no-untyped-def]
    """See `reference.norms.all_finite`."""
    for first in range(0, x.size, _BLOCK):
        block = x[first : min(first + _BLOCK, x.size)]
        largest = _magnitude(block[0])
        for i in range(1, block.size):
            largest = _larger(largest, _magnitude(block[i]))
        if not _is_finite(largest):
            return False
    return True


@kernel(fastmath={"reassoc", "contract"})
def sum_of_squares(x):  # type: ignore[no-untyped-def]
    """See `reference.norms.sum_of_squares`.

    The halves are summed side by side: LLVM makes four sums of one loop, which wait for their additions (0.63 of the
    copy rate in the cache against 1.0).
    """
    half = x.size // 2
    lower, upper = x[:half], x[half : 2 * half]
    total, other = 0.0, 0.0
    for i in range(half):
        a, b = float64(widen(lower[i])), float64(widen(upper[i]))
        total += a * a
        other += b * b
    if x.size % 2:
        last = float64(widen(x[x.size - 1]))
        other += last * last
    return total + other


def sums_of_squares(xs: Iterable[Array]) -> list[float]:
    """See `reference.norms.sums_of_squares`."""
    return [float(sum_of_squares(x)) for x in xs]


@kernel()
def segment_squares(params, grads, bounds, out):  # type: ignore[no-untyped-def]
    """See `reference.norms.segment_squares`."""
    for segment in range(bounds.size - 1):
        first, last = bounds[segment], bounds[segment + 1]
        out[segment, 0] = sum_of_squares(params[first:last])
        out[segment, 1] = sum_of_squares(grads[first:last])
