"""Matrix products of CuPy arrays, which a CUDA graph can capture, too.

CuPy refuses to call cuBLAS while a stream is captured (``setStream`` in ``cupy_backends/cuda/libs/cublas.pyx``; CuPy's
issue 6290), though cuBLAS allows it where numbers are read from the host and the workspace is the caller's (its manual,
"CUDA Graphs Support" and "cublasSetWorkspace"). So while a graph is captured, its routines are called here by ctypes,
with the handle, the layout and the settings that CuPy takes (``cupy/_core/_routines_linalg.pyx``); else CuPy is.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ...core.arrays import Array, array_namespace, is_bfloat16, is_cupy
from ...errors import DeviceError, UnsupportedError

_AS_IT_IS, _TURNED = 0, 1
_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
"""cuBLAS's numbers of what arrays hold."""
_IN_FLOAT32, _IN_FLOAT64 = 68, 70
_COMPUTE_TYPES = {
    ("float32", 2): 69, ("float16", 2): 69, ("bfloat16", 2): 69, ("float64", 2): 71, ("float32", 7): 77
}  # fmt: skip
"""cuBLAS's numbers of how products are computed, by dtype and CuPy's setting, where that is pedantic or TF32."""
_DEFAULT, _TENSOR_CORES = -1, 99
_WORKSPACE_NBYTES, _OF_HOPPER_NBYTES = 4 << 20, 32 << 20
"""As the manual recommends."""

_Int, _Long, _Pointer = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
_ROUTINES = {
    "cublasSetWorkspace_v2": (_Pointer, _Pointer, ctypes.c_size_t),
    "cublasGemmEx": (
        _Pointer, *(_Int,) * 5, _Pointer, *(_Pointer, _Int, _Int) * 2, _Pointer, _Pointer, *(_Int,) * 4
    ),
    "cublasGemmStridedBatchedEx": (
        _Pointer, *(_Int,) * 5, _Pointer, *(_Pointer, _Int, _Int, _Long) * 2, _Pointer,
        _Pointer, _Int, _Int, _Long, *(_Int,) * 3,
    ),
}  # fmt: skip


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """``a @ b`` as `numpy.matmul` has it, in ``out`` where that is given, which must not overlap with the others."""
    if _here.cublas is not None:
        return _here.cublas.matmul(a, b, out)
    if a.ndim == b.ndim == 2 and (out is None or (out.flags.c_contiguous and out.dtype == a.dtype == b.dtype)):
        return a.dot(b, out)  # to which CuPy's matmul comes, too, behind a third more of the host's time
    xp = array_namespace(a, b)
    if max(a.ndim, b.ndim) > 2 and is_bfloat16(a) and is_bfloat16(b):  # of which CuPy 14.2 multiplies no stacks
        found = xp.matmul(a.astype(xp.float32), b.astype(xp.float32)).astype(a.dtype)
        if out is None:
            return found
        out[...] = found
        return out
    return xp.matmul(a, b, out=out)


def matmul_of(xp: Any) -> Callable[..., Array]:
    """The ``matmul`` of a namespace, for CuPy's the one here."""
    return matmul if xp.__name__ == "cupy" else xp.matmul  # type: ignore[no-any-return]


def dot_of(x: Array) -> Callable[..., Array]:
    """``x.dot``, a function of the other matrix and the result's array, which a graph can capture."""
    return partial(matmul, x) if is_cupy(x) else x.dot  # type: ignore[no-any-return]


class Cublas:
    """cuBLAS for graphs that this thread captures, and that one stream launches: they share a workspace.

    Raises:
        UnsupportedError: it is not found.
    """

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._handle = cupy.cuda.get_cublas_handle()  # also loads the library, which is then found by its name
        self._set_stream = importlib.import_module("cupy_backends.cuda.libs.cublas").setStream
        self._library = _library(f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}")
        self._capability = int(cupy.cuda.Device().compute_capability)
        nbytes = _OF_HOPPER_NBYTES if self._capability >= 90 else _WORKSPACE_NBYTES
        self._workspace = cupy.empty(nbytes, dtype=np.uint8)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Products of this thread are made here, and go to ``stream``, whose capture may begin inside."""
        self._set_stream(self._handle, stream.ptr)  # gives the workspace up; so does CuPy before its next product
        workspace = self._workspace
        self._call("cublasSetWorkspace_v2", workspace.data.ptr, workspace.nbytes)
        before, _here.cublas = _here.cublas, self
        try:
            yield
        finally:
            _here.cublas = before

    def matmul(self, a: Array, b: Array, out: Array | None) -> Array:
        """See the function of this name."""
        xp, dtype = self._cupy, np.promote_types(a.dtype, b.dtype)
        if str(dtype) not in _TYPES:
            raise UnsupportedError("matmul", where="dtype", expected=" or ".join(_TYPES), got=dtype)
        if dtype.itemsize == 2 and max(a.ndim, b.ndim) > 2:  # as above, and as CuPy does with float16
            found: Array = self.matmul(a.astype(np.float32), b.astype(np.float32), None).astype(dtype)
        else:
            x, y = (each if each.dtype == dtype else each.astype(dtype) for each in (a, b))
            x, y = x if x.ndim > 1 else x[None, :], y if y.ndim > 1 else y[:, None]
            if x.shape[-1] != y.shape[-2]:
                expected = "shapes (.., n, k) and (.., k, m)"
                raise UnsupportedError("matmul", expected=expected, got=f"{a.shape}, {b.shape}")
            lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
            whole = (*lead, x.shape[-2], y.shape[-1])
            shape = (*lead, *x.shape[-2:-1] * (a.ndim > 1), *y.shape[-1:] * (b.ndim > 1))
            fits = out is not None and out.flags.c_contiguous and out.dtype == dtype
            found = out if fits else xp.empty(shape, dtype=dtype)
            self._multiply(x, y, found.reshape(whole))
        if out is None or out is found:
            return found
        out[...] = found
        return out

    def _multiply(self, a: Array, b: Array, c: Array) -> None:
        """Write ``a @ b`` to ``c``, which is C-contiguous. To cuBLAS, whose matrices lie by columns, rows are columns:
        it is told to compute the product of what it takes for ``b.T`` and ``a.T``."""
        if not a.size or not b.size:
            c[...] = 0
            return
        xp, (n, k), m, name = self._cupy, a.shape[-2:], b.shape[-1], str(c.dtype)
        kind, number = _TYPES[name], ctypes.c_double if name == "float64" else ctypes.c_float
        one, zero = ctypes.byref(number(1)), ctypes.byref(number(0))
        if c.ndim > 2:
            lead = c.shape[:-2]
            a = xp.ascontiguousarray(xp.broadcast_to(a, (*lead, n, k)))
            b = xp.ascontiguousarray(xp.broadcast_to(b, (*lead, k, m)))
            self._call(
                "cublasGemmStridedBatchedEx", _AS_IT_IS, _AS_IT_IS, m, n, k, one, b.data.ptr, kind, m, k * m,
                a.data.ptr, kind, k, n * k, zero, c.data.ptr, kind, m, n * m, math.prod(lead),
                _IN_FLOAT64 if name == "float64" else _IN_FLOAT32, _DEFAULT,
            )  # fmt: skip
            return
        turned_b = b.flags.f_contiguous
        turned_a = a.flags.f_contiguous and not a.flags.c_contiguous
        a, b = a if turned_a else xp.ascontiguousarray(a), b if turned_b else xp.ascontiguousarray(b)
        setting = (name, self._cupy._core.get_compute_type(c.dtype))
        compute_type = _COMPUTE_TYPES.get(setting, _IN_FLOAT64 if name == "float64" else _IN_FLOAT32)
        has_tensor_cores = self._capability >= (70 if name == "float16" else 80)
        self._call(
            "cublasGemmEx", _TURNED if turned_b else _AS_IT_IS, _TURNED if turned_a else _AS_IT_IS, m, n, k,
            one, b.data.ptr, kind, k if turned_b else m, a.data.ptr, kind, n if turned_a else k,
            zero, c.data.ptr, kind, m, compute_type, _TENSOR_CORES if has_tensor_cores else _DEFAULT,
        )  # fmt: skip

    def _call(self, routine: str, *args: Any) -> None:
        status = getattr(self._library, routine)(self._handle, *args)
        if status:
            raise DeviceError("cuBLAS", where=routine, got=f"status {status}")


def _library(name: str) -> Any:
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise UnsupportedError("CUDA graph", where="products", expected="CuPy's cuBLAS", got=str(error)) from error
    for routine, arguments in _ROUTINES.items():
        getattr(library, routine).argtypes = arguments
    return library


class _Here(threading.local):
    cublas: Cublas | None = None
    """Of the graph that this thread captures."""


_here = _Here()
