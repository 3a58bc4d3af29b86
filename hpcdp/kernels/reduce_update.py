"""Gradients summed over a node's ranks and used for an update in one pass over memory.

A block is summed, in the order of the ranks, into a buffer that stays in the first-level cache, and the rule of
`update` is applied to it: the same operations as `reduce.combine` and the update one after the other, so the same bits.
A shard is one call: summing and updating blocks of 256 KiB by calls of their own took 102 to 149 us for 1 MB on 2
ranks, this takes 62 to 102. One loop for the sum and the rule took some 20 us less, and needs a second copy of each
rule.
"""

from __future__ import annotations

import numpy as np
from numba import types

from . import update
from .machine_code import kernel
from .reduce import combine
from .reference.reduce import SUM

BLOCK = 1024
"""Elements that are summed at a time."""

DTYPES = (np.dtype("float32"), np.dtype("float64"))
"""What these are called for."""

_coefficients = {count: types.UniTuple(types.float64, count) for count in (3, 4, 9)}


def _compile(num_states: int, num_coefficients: int):  # type: ignore[no-untyped-def]
    signatures = []
    for dtype in DTYPES:
        t = getattr(types, dtype.name)
        flats = [types.Array(t, 1, "C")] * (1 + num_states)
        signatures.append(
            types.void(types.Array(t, 2, "C"), types.intp, types.intp, *flats, _coefficients[num_coefficients])
        )
    return kernel(signatures)


# A factory that closes over the rule would be compiled anew by every process: Numba's key of a cached function has the
# identity of kernels in its closure, which no two processes share (measured: no hit in a second run).


@_compile(0, 3)
def sgd(rows, lo, hi, param, coefficients):  # type: ignore[no-untyped-def]
    """Sum columns ``lo`` to ``hi`` of ``rows``, shape ``(n, m)``, and update ``param``, shape ``(hi - lo,)``, by it.

    ``coefficients`` and the rule as in `update`; so in the others, whose state has the shape of ``param``.
    """
    grad = np.empty(BLOCK, param.dtype)
    for first in range(0, param.size, BLOCK):
        last = min(first + BLOCK, param.size)
        combine(rows, lo + first, lo + last, grad[: last - first], SUM)
        update.sgd(param[first:last], grad[: last - first], coefficients)


@_compile(1, 4)
def sgd_momentum(rows, lo, hi, param, velocity, coefficients):  # type: ignore[no-untyped-def]
    """As `sgd`, with momentum."""
    grad = np.empty(BLOCK, param.dtype)
    for first in range(0, param.size, BLOCK):
        last = min(first + BLOCK, param.size)
        combine(rows, lo + first, lo + last, grad[: last - first], SUM)
        update.sgd_momentum(param[first:last], grad[: last - first], velocity[first:last], coefficients)


@_compile(1, 4)
def sgd_nesterov(rows, lo, hi, param, velocity, coefficients):  # type: ignore[no-untyped-def]
    """As `sgd`, with Nesterov's momentum."""
    grad = np.empty(BLOCK, param.dtype)
    for first in range(0, param.size, BLOCK):
        last = min(first + BLOCK, param.size)
        combine(rows, lo + first, lo + last, grad[: last - first], SUM)
        update.sgd_nesterov(param[first:last], grad[: last - first], velocity[first:last], coefficients)


@_compile(2, 9)
def adam(rows, lo, hi, param, m, v, coefficients):  # type: ignore[no-untyped-def]
    """As `sgd`, by Adam and AdamW."""
    grad = np.empty(BLOCK, param.dtype)
    for first in range(0, param.size, BLOCK):
        last = min(first + BLOCK, param.size)
        combine(rows, lo + first, lo + last, grad[: last - first], SUM)
        update.adam(param[first:last], grad[: last - first], m[first:last], v[first:last], coefficients)


RULES = {"sgd": sgd, "sgd_momentum": sgd_momentum, "sgd_nesterov": sgd_nesterov, "adam": adam}
"""By the names that `update` has for them."""
