"""Arrays on GPUs in host memory and back, for collectives that know host memory alone.

That memory is pinned, which a GPU reads and writes several times as fast as what the system may move. CuPy keeps it for
the next array: ``cupy.get_default_pinned_memory_pool().free_all_blocks()`` gives it back.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array, copied_to_host, from_host, is_cupy, on_device_of, to_host
from ..devices import Device
from ..streams import Streams


def brought(x: Array) -> np.ndarray:
    """A copy of ``x`` in host memory, contiguous."""
    if not _is_quick(x):
        return np.asarray(copied_to_host(x), order="C")
    streams = Streams(Device.of(x))
    host = streams.pinned(x.nbytes).view(np.dtype(x.dtype)).reshape(x.shape)
    _copy(streams, host, x)
    return host


def on_host(x: Array) -> np.ndarray:
    """`arrays.to_host`, and quickly."""
    return brought(x) if is_cupy(x) else to_host(x)


def bring_back(host: np.ndarray, target: Array) -> None:
    """Write what has become of `brought` to ``target``, its array, or one like it."""
    if _is_quick(target):
        _copy(Streams(Device.of(target)), target, host)
    else:
        with on_device_of(target):
            target[...] = from_host(host, target)


def _is_quick(x: Array) -> bool:
    return is_cupy(x) and x.size > 0 and x.flags.c_contiguous


def _copy(streams: Streams, target: Array, source: Array) -> None:
    """Wait for it, too: CuPy gives pinned memory to the next when an array is forgotten, whatever a stream still does
    with it."""
    stream = streams.current()
    streams.copy_async(target, source, stream)
    streams.synchronize(stream)
