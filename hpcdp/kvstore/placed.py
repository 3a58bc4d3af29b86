"""Arrays on the host and on GPUs: where a value is kept, what is pushed is brought, and what is pulled is carried.

On a GPU all is given to the stream that is current there in the thread that calls, and nobody waits; a copy to the host
waits until the array is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from ..arrays import Array, array_namespace, from_host, on_device_of, words
from ..comm.node_rows import SUMMED_KINDS
from ..devices import brought, lie_together
from ..kernels import kernels_for
from ..kernels.reference.reduce import SUM
from .arguments import merged

_MOST_ROWS = 32
"""Arrays that a kernel adds up in one pass."""


def like(x: Array) -> Array:
    """A new array of the same shape and dtype, where ``x`` is."""
    with on_device_of(x):
        return array_namespace(x).empty(x.shape, dtype=x.dtype)


def lies_as(value: Array, target: Array) -> bool:
    """Whether ``value`` is copied to ``target`` as it is: both lie together, and have one dtype."""
    return value.dtype == target.dtype and lie_together(target, value)


def carry(value: Array, target: Array) -> None:
    """Write ``value`` to ``target``, wherever both are; cast to its dtype, without a word of what becomes infinite."""
    casts = value.dtype != target.dtype
    with on_device_of(target), np.errstate(over="ignore") if casts else contextlib.nullcontext():
        target[...] = brought(value, target)


def fill(place: Array, value: Array, rows: np.ndarray | None) -> None:
    """Write ``value`` to ``place``, or some ``rows`` of it and else zeros; both lie together."""
    if rows is None:
        place[...] = value
    else:
        place[...] = 0
        if rows.size:  # of a number there are none, and it has no axis to name them
            at = from_host(rows, value)
            place[at] = value[at]


def sum_into(out: Array, arrays: Sequence[Array]) -> None:
    """The sum of ``arrays``, on whatever devices, in their order; half precision is added in single.

    Args:
        out: on a device, contiguous; apart from them.
    """
    here = [brought(x, out) for x in arrays]
    with on_device_of(out):
        if len(here) == 1 or np.dtype(out.dtype).name not in SUMMED_KINDS:
            out[...] = here[0] if len(here) == 1 else merged(here)
            return
        rows, total = [_flat(x) for x in here], _flat(out)
        kernels = kernels_for("reduce", out)
        kernels.combine(rows[:_MOST_ROWS], 0, total.size, total, SUM)
        for first in range(_MOST_ROWS, len(rows), _MOST_ROWS - 1):
            more = [total, *rows[first : first + _MOST_ROWS - 1]]
            kernels.combine_into(more, 0, total.size, 0, SUM)


def _flat(x: Array) -> Array:
    """``x`` as the kernels take it."""
    return words(array_namespace(x).ascontiguousarray(x).reshape(-1))
