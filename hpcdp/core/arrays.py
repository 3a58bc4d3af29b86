"""Array namespaces: one code path for NumPy, CuPy and test stand-ins.

An array names its own namespace through ``__array_namespace__`` (the array API standard, 2022.12, section
"Mechanism to get the array namespace"), so code asks the arrays and never a flag.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..errors import ArrayMixError

Array = Any
"""An N-dimensional array of NumPy, CuPy or a namespace that follows the array API standard."""

_NO_DEVICE = contextlib.nullcontext()
BFLOAT16 = "bfloat16"
"""The name of a dtype that NumPy has not; ml_dtypes adds it, with the kind of a void and a character of its own."""

_WORDS = {"e": np.dtype(np.uint16), "E": np.dtype(np.int16)}
"""By the character of a float of 16 bits, float16 or bfloat16, the integers that `words` makes of it."""


def dtype_of(dtype: Any) -> np.dtype:
    """``numpy.dtype(dtype)``, also of ``"bfloat16"``: who names it imports ml_dtypes, which nothing else does.

    Raises:
        TypeError: there is no such dtype.
    """
    if isinstance(dtype, str) and dtype == BFLOAT16:
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    return np.dtype(dtype)


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """``str(dtype)``, which NumPy composes in Python each time, in 6 us: longer than a kernel's launch takes."""
    return str(dtype)


def native(x: np.ndarray) -> np.ndarray:
    """``x`` in one piece and in this machine's byte order, as MPI takes it; a copy only where it is not."""
    return np.asarray(x, x.dtype.newbyteorder("="), order="C")


def is_float(dtype: np.dtype) -> bool:
    """Whether its elements are real floats, bfloat16 among them."""
    return dtype.kind == "f" or dtype.char == "E"


def words(x: Array) -> Array:
    """``x`` as kernels take it: float16 as its bits in uint16, bfloat16 in int16, all else as it is; no copy.

    Neither Numba nor MPI knows floats of 16 bits, and by the integers kernels tell one from the other.
    """
    kind = _WORDS.get(x.dtype.char)
    return x if kind is None else x.view(kind)


def bits(x: np.ndarray) -> np.ndarray:
    """``x`` as files have it, which know no bfloat16: that as its bits in uint16, all else as it is; no copy."""
    return x.view(np.uint16) if is_bfloat16(x) else x


def of_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """What `bits` has made of an array of ``dtype``, in that dtype; no copy."""
    return x.view(dtype_of(BFLOAT16)) if dtype == BFLOAT16 else x


def array_namespace(*xs: Array) -> Any:
    """The module whose functions work on all of ``xs``: ``numpy``, ``cupy`` or a stand-in.

    Args:
        xs: arrays of one namespace; Python's scalars and NumPy's, which fit any, are ignored.

    Raises:
        ArrayMixError: the arrays come from different namespaces.
    """
    found: Any = None
    for x in xs:
        if type(x) is np.ndarray:
            namespace: Any = np
        elif is_cupy(x):
            namespace = sys.modules["cupy"]
        elif isinstance(x, (bool, int, float, np.generic)):
            continue
        else:
            namespace = _namespace_of(x)
        if found is None:
            found = namespace
        elif found is not namespace:
            raise ArrayMixError(
                "array_namespace",
                expected=f"only {found.__name__} arrays",
                got=f"one of {namespace.__name__} too",
                remedy="move the arrays to one device first",
            )
    return np if found is None else found


def _namespace_of(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np
    if has_namespace(x):
        return x.__array_namespace__()
    raise ArrayMixError("array_namespace", expected="an array", got=type(x).__name__)


def has_namespace(x: object) -> bool:
    """Whether ``x`` is an array of a namespace; those of CuPy do not say so themselves."""
    return hasattr(x, "__array_namespace__") or is_cupy(x)


def is_host(x: Array) -> bool:
    """Whether ``x`` is a NumPy array, whose memory this process can read."""
    return isinstance(x, np.ndarray)


def is_half(x: Any) -> bool:
    """Whether ``x`` is an array, or a tensor, of floats of 16 bits: float16 or bfloat16."""
    return getattr(getattr(x, "dtype", None), "char", "") in _WORDS


def is_bfloat16(x: Any) -> bool:
    """Whether ``x`` is an array of bfloat16."""
    return getattr(getattr(x, "dtype", None), "char", "") == "E"


def is_cupy(x: Array) -> bool:
    """Whether ``x`` is a CuPy array, whose memory CUDA kernels can read; does not import CuPy."""
    return type(x).__module__.partition(".")[0] == "cupy"


def to_host(x: Array) -> np.ndarray:
    """``x`` as a NumPy array: itself where it is one (no copy), else a copy in host memory."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "get"):
        with on_device_of(x):  # else CuPy takes the stream that is current on another GPU, which has not computed it
            return x.get()
    if hasattr(x, "to_host"):
        return x.to_host()
    return np.asarray(x)


def copied_to_host(x: Array) -> np.ndarray:
    """``x`` as a NumPy array whose memory nobody else has."""
    comes_as_a_copy = hasattr(x, "get") or hasattr(x, "to_host")
    return to_host(x) if comes_as_a_copy else np.array(to_host(x))


def from_host(x: np.ndarray, like: Array) -> Array:
    """The NumPy array ``x`` in the namespace of ``like``: itself for NumPy (no copy), else a copy on that device."""
    if isinstance(like, np.ndarray):
        return x
    with on_device_of(like):
        return array_namespace(like).asarray(x)


def on_device_of(x: Array) -> AbstractContextManager[object]:
    """Within it this thread's operations go to the GPU of ``x``, if it is on one, whatever its current one is."""
    return x.device if is_cupy(x) else _NO_DEVICE
