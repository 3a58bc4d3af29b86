"""Sums over each channel of CuPy arrays, as kernels take them (`channels.cuh`). Imports: arrays, cuda."""

from __future__ import annotations

import math

import numpy as np

from ...core.arrays import Array
from .. import cuda

_BLOCKS, _PER_BLOCK = 2112, 16 * cuda.THREADS
"""About so many blocks sum all channels where there is enough to sum, each at least so many elements."""

_SHAPE = np.dtype([("at", np.int64, 3)])


def pieces_of(parts: int, size: int) -> int:
    """How many blocks sum each of ``parts`` of ``size`` elements; the order of additions depends on it."""
    return max(1, min(-(-_BLOCKS // max(parts, 1)), size // _PER_BLOCK))


def shape(x: Array) -> np.ndarray:
    """The structure ``Shape`` of `channels.cuh`: batch, channels and positions."""
    return cuda.structure(_SHAPE, (*x.shape[:2], math.prod(x.shape[2:])))
