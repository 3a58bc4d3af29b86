"""The windows of a convolution or of pooling, as kernels take them (`windows.cuh`). Imports: arrays."""

from __future__ import annotations

import functools

import numpy as np

from ..arrays import Array
from .reference import Pair

_WINDOWS = np.dtype([("planes", np.int64), ("at", np.int32, 10)])


def windows(x: Array, size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    """The structure ``Windows`` of `windows.cuh`: planes like those of ``x``, and ``size`` positions of a window."""
    return _made(x.shape[0] * x.shape[1], *x.shape[2:], *size, *kernel, *stride, *padding)


@functools.lru_cache(maxsize=1024)
def _made(planes: int, *at: int) -> np.ndarray:
    """Made once, since that takes as long as the launch; without fields, which CuPy has NumPy describe, for 6 us."""
    made = np.zeros(1, _WINDOWS)
    made["planes"][0], made["at"][0] = planes, at
    made.flags.writeable = False
    return made.view(f"V{made.nbytes}")
