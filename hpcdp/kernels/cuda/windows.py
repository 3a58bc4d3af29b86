"""The windows of a convolution or of pooling, as kernels take them (`windows.cuh`). Imports: arrays, cuda."""

from __future__ import annotations

import numpy as np

from ...core.arrays import Array
from .. import cuda
from ..reference.windows import Pair

_WINDOWS = np.dtype([("planes", np.int64), ("at", np.int32, 10)])


def windows(x: Array, size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    """The structure ``Windows`` of `windows.cuh`: planes like those of ``x``, and ``size`` positions of a window."""
    return cuda.structure(_WINDOWS, x.shape[0] * x.shape[1], (*x.shape[2:], *size, *kernel, *stride, *padding))
