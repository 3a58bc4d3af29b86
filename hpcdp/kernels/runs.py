"""Short runs of elements moved as vectors, inside Numba functions.

From a loop the compiler makes vectors of 32 elements at once and leaves what is over to single ones, which is most of a
row of a small image.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .lanes import WORD, Lanes


def _moves_eight(adds: bool) -> Any:
    """An intrinsic that copies, or ``adds``, eight elements of one flat array, from an index on, to another's."""

    @intrinsic
    def move(context: Any, source: Any, first: Any, target: Any, start: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            read = Lanes(context, builder, (signature.args[0], args[0]), args[1], 8).load()
            into = Lanes(context, builder, (signature.args[2], args[2]), args[3], 8)
            into.store(builder.fadd(into.load(), read) if adds else read)
            return context.get_dummy_value()

        return types.none(source, types.intp, target, types.intp), generate

    return move


_copy_eight, _add_eight = _moves_eight(False), _moves_eight(True)


@intrinsic
def _copy_every_other(context: Any, source: Any, first: Any, target: Any, start: Any) -> Any:
    """As ``_copy_eight``, of fifteen elements every second."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = partial(Lanes, context, builder)
        last = builder.add(args[1], args[1].type(7))
        one, two = (lanes((signature.args[0], args[0]), index, 8).load() for index in (args[1], last))
        chosen = ir.Constant(ir.VectorType(WORD, 8), [0, 2, 4, 6, 9, 11, 13, 15])
        lanes((signature.args[2], args[2]), args[3], 8).store(builder.shuffle_vector(one, two, chosen))
        return context.get_dummy_value()

    return types.none(source, types.intp, target, types.intp), generate


@intrinsic
def _add_in_turn(context: Any, source: Any, first: Any, other: Any, target: Any, start: Any) -> Any:
    """Add sixteen elements, in turn one of the eight from ``first`` on and one of those from ``other`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = partial(Lanes, context, builder)
        one, two = (lanes((signature.args[0], args[0]), args[k], 8).load() for k in (1, 2))
        into = lanes((signature.args[3], args[3]), args[4], 16)
        in_turn = [lane // 2 + lane % 2 * 8 for lane in range(16)]
        both = builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(WORD, 16), in_turn))
        into.store(builder.fadd(into.load(), both))
        return context.get_dummy_value()

    return types.none(source, types.intp, types.intp, target, types.intp), generate


@intrinsic
def _copy_in_turn(context: Any, source: Any, first: Any, other: Any, target: Any, start: Any) -> Any:
    """Write sixteen elements, in turn one of the eight from ``first`` on and one of those from ``other`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = partial(Lanes, context, builder)
        one, two = (lanes((signature.args[0], args[0]), args[k], 8).load() for k in (1, 2))
        in_turn = [lane // 2 + lane % 2 * 8 for lane in range(16)]
        both = builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(WORD, 16), in_turn))
        lanes((signature.args[3], args[3]), args[4], 16).store(both)
        return context.get_dummy_value()

    return types.none(source, types.intp, types.intp, target, types.intp), generate


@numba.njit(inline="always")
def copy_run(source, first, target, start, size):  # type: ignore[no-untyped-def]
    """Copy ``size`` elements of one flat array, from an index on, to another's."""
    if size < 8:
        for k in range(size):
            target[start + k] = source[first + k]
        return
    for k in range(0, size - 8, 8):
        _copy_eight(source, first + k, target, start + k)
    _copy_eight(source, first + size - 8, target, start + size - 8)  # of which some were copied before


@numba.njit(inline="always")
def add_run(source, first, target, start, size):  # type: ignore[no-untyped-def]
    """As `copy_run`, but add them."""
    whole = size - size % 8
    for k in range(0, whole, 8):
        _add_eight(source, first + k, target, start + k)
    for k in range(whole, size):
        target[start + k] += source[first + k]


@numba.njit(inline="always")
def copy_strided(source, first, stride, target, start, size):  # type: ignore[no-untyped-def]
    """As `copy_run`, of elements ``stride`` apart."""
    if stride == 1:
        copy_run(source, first, target, start, size)
        return
    whole = size - size % 8 if stride == 2 else 0
    for k in range(0, whole, 8):
        _copy_every_other(source, first + 2 * k, target, start + k)
    for k in range(whole, size):
        target[start + k] = source[first + stride * k]


@numba.njit(inline="always")
def add_both(source, even, odd, wide, target, line, width, padding):  # type: ignore[no-untyped-def]
    """Add rows of both components to a line of the plane, whose first sample is one of the even's or of the odd's."""
    first, other = (odd, even) if padding % 2 else (even, odd)
    first += (padding + 1) // 2 - padding % 2
    other += (padding + 1) // 2
    seen = min(width, 2 * wide - padding)
    whole = seen - seen % 16
    for x in range(0, whole, 16):
        _add_in_turn(source, first + x // 2, other + x // 2, target, line + x)
    for x in range(whole, seen):
        target[line + x] += source[(other if x % 2 else first) + x // 2]


@numba.njit(inline="always")
def weave_run(source, even, odd, target, start, size):  # type: ignore[no-untyped-def]
    """Write ``size`` elements, in turn one of two runs."""
    whole = size - size % 16
    for k in range(0, whole, 16):
        _copy_in_turn(source, even + k // 2, odd + k // 2, target, start + k)
    for k in range(whole, size):
        target[start + k] = source[(odd if k % 2 else even) + k // 2]
