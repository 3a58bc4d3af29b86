"""Vectors of an array's elements inside a Numba intrinsic, for what LLVM does not find in a loop. Imports: numba.

LLVM turns operations on these vectors into what the processor has, whatever its own vectors' width.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

WORD = ir.IntType(32)


@functools.cache
def are_eight() -> bool:
    """Whether the processor's vectors are of eight floats, which it multiplies and adds at once: not of sixteen."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx2") and features.get("fma") and not features.get("avx512f"))


class Lanes:
    """``width`` elements of an array from ``index`` on as one vector; uint16 holds the bits of float16."""

    def __init__(self, context: Any, builder: Any, array: tuple[Any, Any], index: Any, width: int) -> None:
        array_type, value = array
        stored = {types.uint16: ir.HalfType(), types.float32: ir.FloatType()}.get(array_type.dtype, ir.DoubleType())
        computed = ir.FloatType() if stored == ir.HalfType() else stored
        self._builder, self._width = builder, width
        self._stored, self._computed = ir.VectorType(stored, width), ir.VectorType(computed, width)
        self._alignment = array_type.dtype.bitwidth // 8
        data = cgutils.create_struct_proxy(array_type)(context, builder, value).data
        self._pointer = builder.bitcast(builder.gep(data, [index]), self._stored.as_pointer())

    def load(self) -> Any:
        return self._widened(self._builder.load(self._pointer, align=self._alignment))

    def store(self, value: Any) -> None:
        self._builder.store(self._narrowed(value), self._pointer, align=self._alignment)

    def store_bits(self, value: Any) -> None:
        """Store a vector of integers of the elements' size."""
        self._builder.store(self._builder.bitcast(value, self._stored), self._pointer, align=self._alignment)

    def rounded(self, value: Any) -> Any:
        """``value`` as it would be read after it was stored."""
        return self._widened(self._narrowed(value))

    def _widened(self, value: Any) -> Any:
        return value if self._stored == self._computed else self._builder.fpext(value, self._computed)

    def _narrowed(self, value: Any) -> Any:
        return value if self._stored == self._computed else self._builder.fptrunc(value, self._stored)

    def repeat(self, number: Any) -> Any:
        """A float64 in all lanes, rounded as an element."""
        builder = self._builder
        kind = self._computed.element
        number = number if kind == ir.DoubleType() else builder.fptrunc(number, kind)
        one = builder.insert_element(ir.Constant(self._computed, ir.Undefined), number, WORD(0))
        zeros = ir.Constant(ir.VectorType(WORD, self._width), None)
        return self.rounded(builder.shuffle_vector(one, one, zeros))

    def constant(self, number: float) -> Any:
        return ir.Constant(self._computed, [number] * self._width)

    def bits(self, flags: Any) -> Any:
        """A vector of truth values as a 32-bit number, the first one lowest."""
        number = self._builder.bitcast(flags, ir.IntType(self._width))
        return number if self._width == 32 else self._builder.zext(number, WORD)

    def flags(self, number: Any, lowest: int) -> Any:
        """The bits of a 32-bit number from ``lowest`` on as a vector of truth values: each shifted to be a sign."""
        kind = ir.VectorType(WORD, self._width)
        one = self._builder.insert_element(ir.Constant(kind, ir.Undefined), number, WORD(0))
        numbers = self._builder.shuffle_vector(one, one, ir.Constant(kind, None))
        shifts = ir.Constant(kind, [31 - lowest - lane for lane in range(self._width)])
        return self._builder.icmp_signed("<", self._builder.shl(numbers, shifts), ir.Constant(kind, None))
