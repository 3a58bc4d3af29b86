"""How long the GPU takes for something. Imports: cuda."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from .. import cuda

_TIMES = 3
_NAP_TICKS = 600_000
"""Of the GPU's clock, some 0.3 ms."""


def milliseconds(work: Callable[[], None]) -> float:
    """The median of a few runs of what ``work`` gives the current stream, after a first one; waits for them.

    The stream naps before each, so that the host has given it all of ``work`` when it begins.
    """
    import cupy

    work()
    found = []
    for _ in range(_TIMES):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        cuda.launch("times", "nap", 1, np.int64(_NAP_TICKS))
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(cupy.cuda.get_elapsed_time(begin, end))
    return statistics.median(found)
