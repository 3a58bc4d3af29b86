"""Matrix products of layers: into memory that is given, by whatever is fastest for arrays of their kind and size."""

from __future__ import annotations

from ..arrays import Array
from ..autograd.registry import Call
from ..kernels.cuda.cublas import dot_of
from .operands import kernels_for

_SMALL = 1_000_000
"""Multiplications up to which the way of a product matters less than what its call costs."""


def product(a: Array, b: Array, out: Array) -> Call:
    """The call that writes ``out = a @ b``, shapes ``(m, k)`` and ``(k, n)``; ``out`` is C-contiguous."""
    if a.size * out.shape[1] <= _SMALL:
        return dot_of(a), (b, out)  # half of matmul's overhead
    return kernels_for("products", a).multiply, (a, b, out)
