"""Arrays on the host and on GPUs: where a value is kept, what is pushed is brought, and what is pulled is carried.

On a GPU all is given to the stream that is current there in the thread that calls, and nobody waits; a copy to the host
waits until the array is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np

from ..arrays import Array, array_namespace, from_host, is_cupy, is_host, to_host, words
from ..comm.node_rows import SUMMED_KINDS
from ..devices import Device
from ..kernels import kernels_for, reference_reduce
from ..streams import Streams
from .arguments import merged

_MOST_ROWS = 32
"""Arrays that a kernel adds up in one pass."""


def computing(x: Array) -> AbstractContextManager[None]:
    """Within it operations go to the GPU of ``x``, if it is on one, whatever this thread's current one is."""
    return Streams(Device.of(x)).on_device() if is_cupy(x) else contextlib.nullcontext()


def lie_together(x: Array, y: Array) -> bool:
    """Whether both are on the host, or on the same GPU."""
    if is_host(x) or is_host(y):
        return is_host(x) and is_host(y)
    return array_namespace(x) is array_namespace(y) and Device.of(x) == Device.of(y)


def brought(x: Array, like: Array) -> Array:
    """``x`` where ``like`` is: itself, if it is there, else a copy."""
    if lie_together(x, like):
        return x
    if is_host(like):
        return to_host(x)
    if is_cupy(x) and is_cupy(like):
        return moved(x, Device.of(like))
    with computing(like):
        return from_host(to_host(x), like)


def moved(x: Array, device: Device) -> Array:
    """A copy of ``x``, which is on a GPU, on another one."""
    source, target = Streams(Device.of(x)), Streams(device)
    ready, come = source.event(), target.event()
    with source.on_device():
        x = array_namespace(x).ascontiguousarray(x)
    there = target.current()
    source.record(ready, source.current())
    target.wait_event(there, ready)
    made = target.empty(x.shape, x.dtype, there)
    target.copy_async(made, x, there)
    target.record(come, there)
    source.wait_event(source.current(), come)  # which may give the memory of `x` to others then
    return made


def like(x: Array) -> Array:
    """A new array of the same shape and dtype, where ``x`` is."""
    with computing(x):
        return array_namespace(x).empty(x.shape, dtype=x.dtype)


def carry(value: Array, target: Array) -> None:
    """Write ``value`` to ``target``, wherever both are."""
    with computing(target):
        target[...] = brought(value, target)


def fill(place: Array, value: Array, rows: np.ndarray | None) -> None:
    """Write ``value`` to ``place``, or some ``rows`` of it and else zeros; both lie together."""
    if rows is None:
        place[...] = value
    else:
        at = from_host(rows, value)
        place[...] = 0
        place[at] = value[at]


def sum_into(out: Array, arrays: Sequence[Array]) -> None:
    """The sum of ``arrays``, on whatever devices, in their order; half precision is added in single.

    Args:
        out: on a device, contiguous; apart from them.
    """
    here = [brought(x, out) for x in arrays]
    with computing(out):
        if len(here) == 1 or np.dtype(out.dtype).name not in SUMMED_KINDS:
            out[...] = here[0] if len(here) == 1 else merged(here)
            return
        rows, total = [_flat(x) for x in here], _flat(out)
        kernels = kernels_for("reduce", out, reference_reduce)
        kernels.combine(rows[:_MOST_ROWS], 0, total.size, total, reference_reduce.SUM)
        for first in range(_MOST_ROWS, len(rows), _MOST_ROWS - 1):
            more = [total, *rows[first : first + _MOST_ROWS - 1]]
            kernels.combine_into(more, 0, total.size, 0, reference_reduce.SUM)


def _flat(x: Array) -> Array:
    """``x`` as the kernels take it."""
    return words(array_namespace(x).ascontiguousarray(x).reshape(-1))
