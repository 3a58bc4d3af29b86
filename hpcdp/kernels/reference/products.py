"""What a matrix product is, in the functions that NumPy and CuPy share."""

from __future__ import annotations

from ...core.arrays import Array, array_namespace
from ..cuda.cublas import matmul_of


def multiply(a: Array, b: Array, out: Array) -> None:
    """``out = a @ b``; writes ``out``, which shares no memory with the others.

    Args:
        a: shape ``(..., m, k)``, the axes before broadcast against those of ``b``.
        b: shape ``(..., k, n)``.
        out: shape ``(..., m, n)``; all of one floating dtype, in any order in memory.
    """
    matmul_of(array_namespace(a, b))(a, b, out=out)
