"""The windows of a convolution or of pooling, as kernels take them (`windows.cuh`). Imports: arrays."""

from __future__ import annotations

import functools

import numpy as np

from ..arrays import Array
from .reference import Pair

_WINDOWS = np.dtype("V88")
"""Eleven numbers of 8 bytes; of a dtype with fields CuPy's launch has NumPy describe them, for 12 us."""


def windows(x: Array, size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    """The structure ``Windows`` of `windows.cuh`: planes like those of ``x``, and ``size`` positions of a window."""
    return _made(x.shape[0] * x.shape[1], *x.shape[2:], *size, *kernel, *stride, *padding)


@functools.lru_cache(maxsize=1024)
def _made(*numbers: int) -> np.ndarray:
    """Made once, since that takes as long as the launch."""
    made = np.array(numbers, np.int64).view(_WINDOWS)
    made.flags.writeable = False
    return made
