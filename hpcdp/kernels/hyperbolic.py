"""A hyperbolic tangent that loops over float32 can hold in vector registers, and GELU."""

from __future__ import annotations

import math

import numba
import numpy as np
from numba.extending import overload

_F = np.float32
_BOUND = _F(7.90531110763549805)
_A1, _A3, _A5, _A7 = map(_F, (4.89352455891786e-03, 6.37261928875436e-04, 1.48572235717979e-05, 5.12229709037114e-08))
_A9, _A11, _A13 = map(_F, (-8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16))
_B0, _B2, _B4, _B6 = map(_F, (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06))

GELU_SLOPE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


def tanh(x):  # type: ignore[no-untyped-def]
    """The hyperbolic tangent, inside of kernels; that of float64 is the machine's own.

    Of float32 it is the quotient of polynomials of degree 13 and 6 that Eigen has (``ptanh_float``), off by at most 6
    units in the last place; the machine's own is a call for each element. NaN stays NaN.
    """
    return np.tanh(x)


@overload(tanh)  # type: ignore[untyped-decorator]
def _tanh(x):  # type: ignore[no-untyped-def]
    if x != numba.float32:
        return lambda x: np.tanh(x)

    def quotient(x):  # type: ignore[no-untyped-def]
        y = _BOUND if x > _BOUND else x  # written so that NaN is kept
        y = -_BOUND if y < -_BOUND else y
        s = y * y
        above = (((((_A13 * s + _A11) * s + _A9) * s + _A7) * s + _A5) * s + _A3) * s + _A1
        return y * above / (((_B6 * s + _B4) * s + _B2) * s + _B0)

    return quotient


@numba.njit(inline="always")
def gelu(x, half, one, slope, cube):  # type: ignore[no-untyped-def]
    """See `reference.sequences.gelu`; constants of the dtype of ``x``: 1/2, 1, `GELU_SLOPE` and `GELU_CUBE`."""
    return half * x * (one + tanh(slope * (x + cube * x * x * x)))


@numba.njit(inline="always")
def gelu_gradient(gy, x, half, one, slope, cube):  # type: ignore[no-untyped-def]
    """See `reference.sequences.gelu_gradient`; constants as of `gelu`."""
    square = x * x
    y = tanh(slope * x * (one + cube * square))
    return gy * (half * (one + y) + half * x * (one - y * y) * slope * (one + (one + one + one) * cube * square))
