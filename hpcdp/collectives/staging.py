"""The arrays of collectives: checks of arguments, and staging in host memory.

The algorithms work on flat host arrays. GPU arrays are staged in pinned host memory, which a GPU reads and writes
several times as fast as pageable memory. CuPy caches it; ``cupy.get_default_pinned_memory_pool().free_all_blocks()``
frees it.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ..comm import World, init
from ..core.arrays import Array, copied_to_host, from_host, is_cupy, is_float, on_device_of, to_host
from ..core.devices import Device, Streams, to_device_of
from ..core.state import refuse_change
from ..errors import UnsupportedError


def to_host_memory(x: Array) -> np.ndarray:
    """Return a contiguous copy of ``x`` in host memory, pinned if ``x`` is contiguous on a GPU."""
    if not _is_quick(x):
        return np.asarray(copied_to_host(x), order="C")
    streams = Streams(Device.of(x))
    host = streams.pinned(x.nbytes).view(np.dtype(x.dtype)).reshape(x.shape)
    _copy(streams, host, x)
    return host


def on_host(x: Array) -> np.ndarray:
    """Return ``x`` in host memory, see `arrays.to_host`; a GPU array is copied to pinned memory."""
    return to_host_memory(x) if is_cupy(x) else to_host(x)


def bring_back(host: np.ndarray, target: Array) -> None:
    """Copy ``host`` to ``target``, an array on any device."""
    if _is_quick(target):
        _copy(Streams(Device.of(target)), target, host)
    else:
        with on_device_of(target):
            target[...] = from_host(host, target)


def _is_quick(x: Array) -> bool:
    return is_cupy(x) and x.size > 0 and x.flags.c_contiguous


def _copy(streams: Streams, target: Array, source: Array) -> None:
    """Copy and wait, because CuPy reuses pinned memory without regard to streams once an array is freed."""
    stream = streams.current()
    streams.copy_async(target, source, stream)
    streams.synchronize(stream)


def ranks_of(world: World | None) -> World:
    """Return ``world``, or the world of `init` for None."""
    if world is None:
        return init()
    if not isinstance(world, World):
        raise UnsupportedError("collective", where="world", expected="a World, see hpcdp.init()", got=repr(world))
    return world


def checked_root(operation: str, root: int, world: World, where: str = "root") -> int:
    """Return the rank ``root`` as an int; raise `UnsupportedError` unless it is a rank of ``world``."""
    if type(root) is int and 0 <= root < world.size:
        return root
    try:
        rank = -1 if isinstance(root, bool) else operator.index(root)
    except TypeError:
        rank = -1
    if not 0 <= rank < world.size:
        raise UnsupportedError(operation, where=where, expected=f"a rank, 0 to {world.size - 1}", got=repr(root))
    return rank


def movable(operation: str, x: Array, where: str = "x") -> np.ndarray:
    """Return ``x`` on the host, contiguous and writeable, for an operation that moves data without reducing it.

    Raises:
        UnsupportedError: it is no array, or of a dtype that has no fixed number of bytes in native byte order.
    """
    if type(x) is np.ndarray:
        host = x
    else:
        check_array(operation, where, x)
        host = on_host(x)
    if not (host.dtype.kind in "iufbc" or is_float(host.dtype)) or not host.dtype.isnative:
        expected = "a native integer, float, complex or bool"
        raise UnsupportedError(operation, where="dtype", expected=expected, got=host.dtype.str)
    return host if host.flags.carray else np.array(host, order="C")


def bytes_of(x: np.ndarray) -> np.ndarray:
    """Return ``x``, contiguous, as bytes, shape ``(nbytes,)``; no copy."""
    return x.reshape(-1).view(np.uint8)


def check_like(operation: str, out: Array, shape: tuple[int, ...], dtype: Any) -> None:
    """Check that ``out`` is a writeable array of this shape and dtype."""
    check_array(operation, "out", out)
    if tuple(out.shape) != shape or out.dtype != dtype:
        got = f"{tuple(out.shape)} {out.dtype}"
        raise UnsupportedError(operation, where="out", expected=f"{shape} {dtype} as x", got=got)
    check_writeable(operation, "out", out)


def check_array(operation: str, where: str, x: Array) -> None:
    """Check that ``x`` is an array without a mask."""
    if not hasattr(x, "dtype"):
        raise UnsupportedError(operation, where=where, expected="an array", got=type(x).__name__)
    refuse_mask(operation, where, x)


def refuse_mask(operation: str, where: str, x: Array) -> None:
    """Raise `UnsupportedError` for a masked array, whose mask would be lost."""
    if isinstance(x, np.ma.MaskedArray):
        raise UnsupportedError(operation, where=where, expected="an array without a mask", got="a masked array")


def is_writeable(x: Array) -> bool:
    """Return whether ``x`` may be written to."""
    return bool(getattr(getattr(x, "flags", None), "writeable", True))


def check_writeable(operation: str, where: str, x: Array) -> None:
    """Check that ``x`` may be written to."""
    if not is_writeable(x):
        got = "a number" if isinstance(x, np.generic) else "a read-only array"
        raise UnsupportedError(operation, where=where, expected="a writeable array", got=got)
    refuse_change(x, where, operation)


def receiver(operation: str, x: Array, out: Array) -> Array:
    """Return ``out``, which must be like ``x``, after copying ``x`` to it."""
    check_like(operation, out, tuple(x.shape), x.dtype)
    with on_device_of(out):
        out[...] = to_device_of(x, out)
    return out


def flat(x: np.ndarray) -> np.ndarray:
    """Return ``x``, contiguous, as one axis; no copy."""
    return x if x.ndim == 1 else x.reshape(-1)


def source_of(x: Array) -> np.ndarray:
    """Return ``x`` as a contiguous, writeable host array, which MPI requires even for sending."""
    host = on_host(x)
    return host if host.flags.carray else np.array(host, order="C")


def staged_of(operation: str, target: Array, where: str = "x") -> np.ndarray:
    """Return ``target`` itself if it is a contiguous, aligned and writeable host array, else a copy in one."""
    if type(target) is np.ndarray and target.flags.carray:
        refuse_change(target, where, operation)
        return target
    check_array(operation, where, target)
    check_writeable(operation, where, target)
    return to_host_memory(target)
