"""Sums of products that stay in registers, and transposition, by vectors of eight.

What `direct` makes convolutions of; its tables say where factors lie.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .lanes import WORD, Lanes

LANES = 8
ROWS = 6
"""With two vectors each, and these two and a sample's beside them, sums take 15 of 16 registers."""


def _tile(vectors: int) -> Any:
    """An intrinsic that adds products to `ROWS` sums of ``vectors``.

    Sum ``r`` is, of the steps ``k``, ``x[places[first + r] + steps[k]]`` times the vectors at ``panel[start]`` and on,
    ``vectors * LANES`` for each step. It begins with what lies at ``initial[origin + r * leap]``, and ends in
    ``sums[at]`` and on.
    """

    @intrinsic
    def add(
        context: Any, x: Any, places: Any, first: Any, steps: Any, panel: Any, start: Any, sums: Any, at: Any,
        initial: Any, origin: Any, leap: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            fuse = ("contract",)
            word = args[2].type
            each = [(row, vector) for row in range(ROWS) for vector in range(vectors)]

            def array(number: int) -> Any:
                return context.make_array(signature.args[number])(context, builder, args[number])

            def lanes(number: int, index: Any) -> Lanes:
                return Lanes(context, builder, (signature.args[number], args[number]), index, LANES)

            samples, at_row, step = array(0).data, array(1).data, array(3)
            count = builder.extract_value(step.shape, 0)
            patches = [
                builder.gep(samples, [builder.load(builder.gep(at_row, [builder.add(args[2], word(row))]))])
                for row in range(ROWS)
            ]
            begin = {
                (row, v): lanes(
                    8, builder.add(args[9], builder.add(builder.mul(args[10], word(row)), word(v * LANES)))
                ).load()
                for row, v in each
            }  # fmt: skip
            kind = begin[0, 0].type
            before = builder.block
            loop, after = builder.append_basic_block("steps"), builder.append_basic_block("done")
            builder.cbranch(builder.icmp_signed(">", count, word(0)), loop, after)

            builder.position_at_end(loop)
            k = builder.phi(word)
            totals = {key: builder.phi(kind) for key in each}
            offset = builder.load(builder.gep(step.data, [k]))
            line = builder.add(args[5], builder.mul(k, word(vectors * LANES)))
            factors = [lanes(4, builder.add(line, word(v * LANES))).load() for v in range(vectors)]
            ends = {}
            for row in range(ROWS):
                sample = builder.load(builder.gep(patches[row], [offset]))
                one = builder.insert_element(ir.Constant(kind, ir.Undefined), sample, WORD(0))
                spread = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(WORD, LANES), None))
                for v in range(vectors):
                    product = builder.fmul(spread, factors[v], flags=fuse)
                    ends[row, v] = builder.fadd(totals[row, v], product, flags=fuse)
            following = builder.add(k, word(1))
            k.add_incoming(word(0), before)
            k.add_incoming(following, loop)
            for key in each:
                totals[key].add_incoming(begin[key], before)
                totals[key].add_incoming(ends[key], loop)
            builder.cbranch(builder.icmp_signed("<", following, count), loop, after)

            builder.position_at_end(after)
            found = {key: builder.phi(kind) for key in each}
            for key in each:
                found[key].add_incoming(begin[key], before)
                found[key].add_incoming(ends[key], loop)
            for row, v in each:
                lanes(6, builder.add(args[7], word((row * vectors + v) * LANES))).store(found[row, v])
            return context.get_dummy_value()

        return types.none(
            x, places, types.intp, steps, panel, types.intp, sums, types.intp, initial, types.intp, types.intp
        ), generate  # fmt: skip

    return add


_narrow_tile, _wide_tile = _tile(1), _tile(2)


@intrinsic
def _turn_eight(context: Any, source: Any, first: Any, down: Any, target: Any, start: Any, across: Any) -> Any:
    """Transpose eight rows of eight: ``down`` and ``across`` are the elements from one row to the next."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def lanes(number: int, row: int) -> Lanes:
            index = builder.add(args[number + 1], builder.mul(args[number + 2], args[number + 2].type(row)))
            return Lanes(context, builder, (signature.args[number], args[number]), index, LANES)

        def exchanged(distance: int, is_second: bool) -> Any:
            """Which lanes of two rows stand in one of them when blocks of ``distance`` have changed places."""
            chosen = [
                lane + distance * is_second if not lane & distance else 8 + lane - distance * (not is_second)
                for lane in range(8)
            ]
            return ir.Constant(ir.VectorType(WORD, 8), chosen)

        rows = [lanes(0, row).load() for row in range(8)]
        for distance in (4, 2, 1):
            for row in (row for row in range(8) if not row & distance):
                pair = rows[row], rows[row + distance]
                rows[row] = builder.shuffle_vector(*pair, exchanged(distance, False))
                rows[row + distance] = builder.shuffle_vector(*pair, exchanged(distance, True))
        for row in range(8):
            lanes(3, row).store(rows[row])
        return context.get_dummy_value()

    return types.none(source, types.intp, types.intp, target, types.intp, types.intp), generate


@numba.njit(inline="always")
def turn(source, first, down, size, target, start, across):  # type: ignore[no-untyped-def]
    """``target[start + c * across + r]`` becomes ``source[first + r * down + c]`` for all of ``size`` (r, c)."""
    high, wide = size[0] - size[0] % 8, size[1] - size[1] % 8
    for c in range(0, wide, 8):
        for r in range(0, high, 8):
            _turn_eight(source, first + r * down + c, down, target, start + c * across + r, across)
        for r in range(high, size[0]):
            for k in range(c, c + 8):
                target[start + k * across + r] = source[first + r * down + k]
    for c in range(wide, size[1]):
        for r in range(size[0]):
            target[start + c * across + r] = source[first + r * down + c]


@numba.njit(inline="always")
def add_products(x, places, steps, panel, start, width, sums, at, initial, origin, leap):  # type: ignore[no-untyped-def]
    """As `_tile`, of all ``places``, whose number is a multiple of `ROWS`, and a panel of ``width``."""
    for row in range(0, places.size, ROWS):
        to, begin = at + row * width, origin + row * leap
        if width == 2 * LANES:
            _wide_tile(x, places, row, steps, panel, start, sums, to, initial, begin, leap)
        else:
            _narrow_tile(x, places, row, steps, panel, start, sums, to, initial, begin, leap)
