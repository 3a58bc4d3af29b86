"""Array namespaces: one code path for NumPy, CuPy and test stand-ins.

An array names its own namespace through ``__array_namespace__`` (the array API standard, 2022.12, section
"Mechanism to get the array namespace"), so code asks the arrays and never a flag.

Packages that know nothing of PyTorch compute on arrays of NumPy and CuPy. A package that knows another kind, such as
tensors, registers its conversion here. It is imported by name where the first object of that kind comes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from ..errors import ArrayMixError

Array = Any
"""An N-dimensional array of NumPy, CuPy or a namespace that follows the array API standard."""

_NO_DEVICE = contextlib.nullcontext()
BFLOAT16 = "bfloat16"
"""The name of a dtype that NumPy lacks; ml_dtypes adds it with kind "V" and the character "E"."""

_WORDS = {"e": np.dtype(np.uint16), "E": np.dtype(np.int16)}
"""The integer dtype in which `words` passes a 16-bit float, by that float's character: float16 "e" or bfloat16 "E"."""


def dtype_of(dtype: Any) -> np.dtype:
    """Return ``numpy.dtype(dtype)``; for ``"bfloat16"`` import ml_dtypes, which nothing else does.

    Raises:
        TypeError: there is no such dtype.
    """
    if isinstance(dtype, str) and dtype == BFLOAT16:
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    return np.dtype(dtype)


def dtype_of_char(char: str) -> np.dtype:
    """Return the dtype with the character code ``char`` (``dtype.char``), bfloat16 included."""
    return dtype_of(BFLOAT16 if char == "E" else char)


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """Return ``str(dtype)`` from a cache: NumPy composes it in Python in 6 us, longer than a kernel launch."""
    return str(dtype)


def native(x: np.ndarray) -> np.ndarray:
    """Return ``x`` C-contiguous and in native byte order, as MPI takes it; copy only where it is not."""
    return np.asarray(x, x.dtype.newbyteorder("="), order="C")


def is_float(dtype: np.dtype) -> bool:
    """Return whether a dtype is of real floats, bfloat16 included."""
    return dtype.kind == "f" or dtype.char == "E"


def words(x: Array) -> Array:
    """Return ``x`` as kernels take it: float16 viewed as uint16, bfloat16 as int16, other dtypes unchanged; no copy.

    Neither Numba nor MPI has 16-bit floats. The two integer dtypes let kernels distinguish them.
    """
    kind = _WORDS.get(x.dtype.char)
    return x if kind is None else x.view(kind)


def bits(x: np.ndarray) -> np.ndarray:
    """Return ``x`` as files store it: bfloat16 viewed as uint16, other dtypes unchanged; no copy."""
    return x.view(np.uint16) if is_bfloat16(x) else x


def of_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return the array of ``dtype`` from which `bits` made ``x``; no copy."""
    return x.view(dtype_of(BFLOAT16)) if dtype == BFLOAT16 else x


def array_namespace(*xs: Array) -> Any:
    """Return the module whose functions work on all of ``xs``: ``numpy``, ``cupy`` or a stand-in.

    Args:
        xs: arrays of one namespace. Scalars of Python and NumPy fit any and are ignored.

    Raises:
        ArrayMixError: the arrays come from different namespaces.
    """
    common: Any = None
    for x in xs:
        if type(x) is np.ndarray:
            namespace: Any = np
        elif is_cupy(x):
            namespace = sys.modules["cupy"]
        elif isinstance(x, (bool, int, float, np.generic)):
            continue
        else:
            namespace = _namespace_of(x)
        if common is None:
            common = namespace
        elif common is not namespace:
            raise ArrayMixError(
                "array_namespace", expected=f"only {common.__name__} arrays", got=f"one of {namespace.__name__} too",
                remedy="move the arrays to one device first",
            )  # fmt: skip
    return np if common is None else common


def _namespace_of(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np
    if has_namespace(x):
        return x.__array_namespace__()
    raise ArrayMixError("array_namespace", expected="an array", got=type(x).__name__)


def has_namespace(x: object) -> bool:
    """Return whether ``x`` is an array of a namespace; CuPy's arrays do not say so themselves."""
    return hasattr(x, "__array_namespace__") or is_cupy(x)


def is_host(x: Array) -> bool:
    """Return whether ``x`` is a NumPy array, whose memory this process can read."""
    return isinstance(x, np.ndarray)


def is_half(x: Any) -> bool:
    """Return whether ``x`` is an array or tensor of 16-bit floats: float16 or bfloat16."""
    return getattr(getattr(x, "dtype", None), "char", "") in _WORDS


def is_bfloat16(x: Any) -> bool:
    """Return whether ``x`` is an array of bfloat16."""
    return getattr(getattr(x, "dtype", None), "char", "") == "E"


def is_cupy(x: Array) -> bool:
    """Return whether ``x`` is a CuPy array, in GPU memory; does not import CuPy."""
    return type(x).__module__.partition(".")[0] == "cupy"


def to_host(x: Array) -> np.ndarray:
    """Return ``x`` as a NumPy array: ``x`` itself if it is one, else a copy in host memory."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "get"):
        with on_device_of(x):  # else CuPy copies on a stream of another GPU, before ``x`` is computed
            return x.get()
    if hasattr(x, "to_host"):
        return x.to_host()
    return np.asarray(x)


def copied_to_host(x: Array) -> np.ndarray:
    """Return ``x`` as a NumPy array that shares no memory."""
    comes_as_a_copy = hasattr(x, "get") or hasattr(x, "to_host")
    return to_host(x) if comes_as_a_copy else np.array(to_host(x))


def from_host(x: np.ndarray, like: Array) -> Array:
    """Copy the NumPy array ``x`` to the namespace and device of ``like``; return ``x`` itself for NumPy."""
    if isinstance(like, np.ndarray):
        return x
    with on_device_of(like):
        return array_namespace(like).asarray(x)


def on_device_of(x: Array) -> AbstractContextManager[object]:
    """Return a context in which this thread computes on the GPU of ``x``; it does nothing for host arrays."""
    return x.device if is_cupy(x) else _NO_DEVICE


class ArrayKind(Protocol):
    """Conversion between the arrays of another library and those of NumPy and CuPy."""

    name: str
    """The name of the kind in messages between ranks."""

    def as_array(self, operation: str, where: str, x: Any) -> Array:
        """Return an array over the memory of ``x``; raise `UnsupportedError` if that is impossible."""
        ...

    def as_values(self, x: Any) -> np.ndarray:
        """Return the values of ``x`` in host memory, for an operation that neither changes nor differentiates it."""
        ...

    def of_array(self, x: Array) -> Any:
        """Return an object of this kind over the memory of ``x``."""
        ...

    def written(self, x: Any) -> None:
        """Record that an operation has written to the memory of ``x``."""
        ...

    def ordered_with(self, x: Any) -> AbstractContextManager[object]:
        """Return a context in which work on arrays over the memory of ``x`` follows earlier work on ``x``."""
        ...


_MODULES = {("torch", "Tensor"): "hpcdp.torch"}
"""The module that registers a kind, by the module and name of the class."""

_registered: dict[type, ArrayKind] = {}


def register(array_type: type, kind: ArrayKind) -> None:
    """Register the kind of the objects of ``array_type`` and of its subclasses."""
    _registered[array_type] = kind


class _Kinds(dict[type, ArrayKind | None]):
    """Kind by type, None for types that are of no registered kind; found at the first object of a type."""

    def __missing__(self, of: type) -> ArrayKind | None:
        found = None
        for base in of.__mro__:
            module = _MODULES.get((base.__module__, base.__name__))
            if module is not None:
                importlib.import_module(module)
                found = _registered[base]
        self[of] = found
        return found


kinds = _Kinds()
"""``kinds[type(x)]``: the kind of ``x``, None for arrays of NumPy and CuPy and whatever is no array."""


def _module_of(name: str) -> str:
    return {module.rpartition(".")[2]: module for module in _MODULES.values()}[name]


def kind_named(name: str) -> ArrayKind:
    """Return the kind that a message names; `KeyError` if there is none."""
    importlib.import_module(_module_of(name))
    return next(kind for kind in _registered.values() if kind.name == name)


def kind_number(kind: ArrayKind | None) -> int:
    """Return the number by which messages name a kind; 0 for arrays of NumPy and CuPy."""
    return 0 if kind is None else 1 + list(_MODULES.values()).index(_module_of(kind.name))


def in_kind_of_sender(number: int, x: Any) -> Any:
    """Return ``x`` as the kind of its sender, if this process has imported the library of that kind; else itself."""
    if not number or kinds[type(x)] is not None:
        return x
    (library, _), module = list(_MODULES.items())[number - 1]
    return kind_named(module.rpartition(".")[2]).of_array(x) if library in sys.modules else x
