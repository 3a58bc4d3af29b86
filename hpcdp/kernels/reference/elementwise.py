"""The specification of sums and ReLU of whole arrays, in the functions that NumPy and CuPy share. Imports: arrays."""

from __future__ import annotations

from ...core.arrays import Array, array_namespace


def add(a: Array, b: Array, out: Array) -> None:
    """``out = a + b``, of one shape; ``out`` may be either."""
    array_namespace(a).add(a, b, out=out)


def relu(x: Array, out: Array) -> None:
    """``out = max(x, 0)``, in which a NaN stays; ``out`` may be ``x``."""
    array_namespace(x).maximum(x, 0, out=out)
