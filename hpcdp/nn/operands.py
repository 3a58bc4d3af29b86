"""What operators of networks ask of their operands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import kernels
from ..arrays import Array, array_namespace, is_cupy, is_half
from ..autograd.registry import Call
from ..errors import UnsupportedError


def kernels_for(name: str, x: Array) -> Any:
    """The kernels for arrays like ``x``; of 16 bits there are CUDA's alone, for what `half` leaves in them."""
    return kernels.specification(name) if is_half(x) and not is_cupy(x) else kernels.kernels_for(name, x)


def alike(operation: str, x: Array, *others: Array | None, wide: bool = False) -> Any:
    """The namespace of all operands, which must have one float dtype in this machine's order of bytes, as the kernels
    take them.

    With ``wide`` the others have float32 where ``x`` has 16 bits.
    """
    given = [x]
    are_alike = (x.dtype.char in "fd" and x.dtype.isnative) or is_half(x)
    of_others = np.float32 if wide and is_half(x) else x.dtype
    for other in others:
        if other is not None:
            given.append(other)
            are_alike = are_alike and other.dtype == of_others
    if not are_alike:
        raise UnsupportedError(
            operation,
            where="dtype",
            expected="float32 or float64 in this machine's order of bytes, the same for all operands",
            got=", ".join(str(each.dtype) for each in given),
            remedy="convert with astype",
        )
    return array_namespace(*given)


def contiguous(gy: Array) -> Array:
    """``gy`` itself, or a copy: the kernels take memory in C order that may be written, which a file's may not be."""
    if gy.flags.carray if type(gy) is np.ndarray else is_cupy(gy) and gy.flags.c_contiguous:
        return gy
    xp = array_namespace(gy)
    return np.require(gy, requirements=("C", "A", "W")) if xp is np else xp.ascontiguousarray(gy)


def refreshed(copy: Array, x: Array) -> list[Call]:
    """The call that copies ``x`` to ``copy`` again, or none where that is ``x`` itself."""
    return [] if copy is x else [(copy.__setitem__, (..., x))]


def called(calls: Iterable[Call]) -> None:
    """Make each of ``calls``."""
    for function, args in calls:
        function(*args)
