"""Matrix products of CuPy arrays that a CUDA graph can capture.

CuPy refuses to call cuBLAS while a stream is captured (``setStream`` in ``cupy_backends/cuda/libs/cublas.pyx``; CuPy's
issue 6290). cuBLAS allows it if scalars are read from the host and the workspace is the caller's (its manual, "CUDA
Graphs Support" and "cublasSetWorkspace"). During a capture its routines are therefore called here by ctypes, with the
handle, the layout and the settings of CuPy (``cupy/_core/_routines_linalg.pyx``); otherwise CuPy is called.
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
from ...core.checks import choices
from ...errors import DeviceError, UnsupportedError

_AS_IT_IS, _TURNED = 0, 1
_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
"""cuBLAS's numbers of dtypes."""
_IN_FLOAT32, _IN_FLOAT64 = 68, 70
_COMPUTE_TYPES = {
    ("float32", 2): 69, ("float16", 2): 69, ("bfloat16", 2): 69, ("float64", 2): 71, ("float32", 7): 77
}  # fmt: skip
"""cuBLAS's numbers of compute types, by dtype and CuPy's setting, for pedantic and TF32."""
_DEFAULT, _TENSOR_CORES = -1, 99
_WORKSPACE_NBYTES, _OF_HOPPER_NBYTES = 4 << 20, 32 << 20
"""Workspace sizes recommended by the manual."""

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
    """Return ``a @ b`` as `numpy.matmul` does, in ``out`` if given, which must not overlap with the operands."""
    if _here.cublas is not None:
        return _here.cublas.matmul(a, b, out)
    if a.ndim == b.ndim == 2 and (out is None or (out.flags.c_contiguous and out.dtype == a.dtype == b.dtype)):
        return a.dot(b, out)  # as CuPy's matmul does after a third more host time
    xp = array_namespace(a, b)
    if max(a.ndim, b.ndim) > 2 and is_bfloat16(a) and is_bfloat16(b):  # CuPy 14.2 multiplies no stacks
        product = xp.matmul(a.astype(xp.float32), b.astype(xp.float32)).astype(a.dtype)
        if out is None:
            return product
        out[...] = product
        return out
    return xp.matmul(a, b, out=out)


def matmul_of(xp: Any) -> Callable[..., Array]:
    """Return the ``matmul`` of a namespace; for CuPy `matmul`."""
    return matmul if xp.__name__ == "cupy" else xp.matmul  # type: ignore[no-any-return]


def dot_of(x: Array) -> Callable[..., Array]:
    """Return ``x.dot``, a function of the other matrix and the result's array, which a graph can capture."""
    return partial(matmul, x) if is_cupy(x) else x.dot  # type: ignore[no-any-return]


class Cublas:
    """cuBLAS for the graphs that this thread captures and one stream launches; they share a workspace.

    Raises:
        UnsupportedError: the library is not found.
    """

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._handle = cupy.cuda.get_cublas_handle()  # also loads the library, so that it is found by name
        self._set_stream = importlib.import_module("cupy_backends.cuda.libs.cublas").setStream
        self._library = _library(f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}")
        self._capability = int(cupy.cuda.Device().compute_capability)
        nbytes = _OF_HOPPER_NBYTES if self._capability >= 90 else _WORKSPACE_NBYTES
        self._workspace = cupy.empty(nbytes, dtype=np.uint8)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Compute this thread's products here, on ``stream``, whose capture may begin inside the block."""
        self._set_stream(self._handle, stream.ptr)  # resets the workspace, as CuPy does before its next product
        workspace = self._workspace
        self._call("cublasSetWorkspace_v2", workspace.data.ptr, workspace.nbytes)
        before, _here.cublas = _here.cublas, self
        try:
            yield
        finally:
            _here.cublas = before

    def matmul(self, a: Array, b: Array, out: Array | None) -> Array:
        """See the function `matmul`."""
        xp, dtype = self._cupy, np.promote_types(a.dtype, b.dtype)
        if str(dtype) not in _TYPES:
            raise UnsupportedError("matmul", where="dtype", expected=choices(_TYPES), got=dtype)
        if dtype.itemsize == 2 and max(a.ndim, b.ndim) > 2:  # as above, and as CuPy does with float16
            product: Array = self.matmul(a.astype(np.float32), b.astype(np.float32), None).astype(dtype)
        else:
            x, y = (operand.astype(dtype, copy=False) for operand in (a, b))
            x, y = x if x.ndim > 1 else x[None, :], y if y.ndim > 1 else y[:, None]
            if x.shape[-1] != y.shape[-2]:
                expected = "shapes (.., n, k) and (.., k, m)"
                raise UnsupportedError("matmul", expected=expected, got=f"{a.shape}, {b.shape}")
            lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
            whole = (*lead, x.shape[-2], y.shape[-1])
            shape = (*lead, *x.shape[-2:-1] * (a.ndim > 1), *y.shape[-1:] * (b.ndim > 1))
            fits = out is not None and out.flags.c_contiguous and out.dtype == dtype
            product = out if fits else xp.empty(shape, dtype=dtype)
            self._multiply(x, y, product.reshape(whole))
        if out is None or out is product:
            return product
        out[...] = product
        return out

    def _multiply(self, a: Array, b: Array, c: Array) -> None:
        """Write ``a @ b`` to ``c``, which is C-contiguous.

        cuBLAS uses column-major matrices, so it is asked for the product of its view of ``b.T`` and ``a.T``.
        """
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
    """The cuBLAS of the graph that this thread captures."""


_here = _Here()
