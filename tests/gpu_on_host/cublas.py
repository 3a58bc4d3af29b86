"""cuBLAS without a GPU, of `graphs`: matrices by columns, on a stream and with a workspace that it was given.

Stricter than cuBLAS: a product that was not made outside of a capture before is an error in one.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from hpcdp.core.arrays import dtype_of

REFUSED = "calling cuBLAS API during stream capture is currently unsupported"
"""So says CuPy."""


class _Here(threading.local):
    """A thread's handle, of which CuPy makes one for each."""

    def __init__(self) -> None:
        self.stream = 0
        self.has_workspace = False


class Library:
    """cuBLAS, with the C types that its header has."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine
        self._here = _Here()
        i, p, long = ctypes.c_int, ctypes.c_void_p, ctypes.c_longlong
        self.cublasSetWorkspace_v2 = ctypes.CFUNCTYPE(i, p, p, ctypes.c_size_t)(self._set_workspace)
        self.cublasGemmEx = ctypes.CFUNCTYPE(
            i, p, i, i, i, i, i, p, p, i, i, p, i, i, p, p, i, i, i, i
        )(self._gemm)  # fmt: skip
        self.cublasGemmStridedBatchedEx = ctypes.CFUNCTYPE(
            i, p, i, i, i, i, i, p, p, i, i, long, p, i, i, long, p, p, i, i, long, i, i, i
        )(self._batched)  # fmt: skip

    def set_stream(self, handle: int, ptr: int) -> None:
        known = [self._machine.null, *self._machine.captured]
        if any(each.ptr == ptr and each.is_capturing() for each in known):
            raise NotImplementedError(REFUSED)
        self._here.stream, self._here.has_workspace = ptr, False

    def _set_workspace(self, handle: int, ptr: int, nbytes: int) -> int:
        self._here.has_workspace = handle == 7 and ptr % 256 == 0 and nbytes >= 4 << 20
        return 0 if self._here.has_workspace else 7

    def _gemm(self, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, *more: Any) -> int:
        a, kind_a, lda, b, kind_b, ldb, beta, c, kind_c, ldc, compute_type, algo = more
        return self._batched(
            handle, op_a, op_b, m, n, k, alpha, a, kind_a, lda, 0, b, kind_b, ldb, 0, beta, c, kind_c, ldc, 0, 1,
            compute_type, algo,
        )  # fmt: skip

    def _batched(self, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, *more: Any) -> int:
        a, kind, lda, sa, b, kind_b, ldb, sb, beta, c, kind_c, ldc, sc, count, compute_type, algo = more
        wanted = {0: ("f4", 68), 1: ("f8", 70), 2: ("f2", 68), 14: ("bfloat16", 68)}.get(kind)
        if wanted is None or not kind == kind_b == kind_c or compute_type != wanted[1] or algo not in (-1, 99):
            return 15
        number = ctypes.c_double if kind == 1 else ctypes.c_float
        if number.from_address(alpha).value != 1 or number.from_address(beta).value != 0:
            return 7
        rows = (k if op_a else m, n if op_b else k, m)
        if min(m, n, k, count) < 1 or lda < rows[0] or ldb < rows[1] or ldc < rows[2]:
            return 7
        if not self._here.has_workspace or handle != 7:
            return 1
        kernel = op_a, op_b, m, n, k, kind, count
        (stream,) = [each for each in [self._machine.null, *self._machine.captured] if each.ptr == self._here.stream]
        if stream.is_capturing() and kernel not in self._machine.compiled:
            return 13  # cuBLAS loads its kernels when they are first needed
        self._machine.compiled.add(kernel)
        dtype = dtype_of(wanted[0])

        def rows_of(ptr: int, ld: int, height: int, width: int) -> np.ndarray:
            """The transpose of a matrix by columns."""
            nbytes = ((width - 1) * ld + height) * dtype.itemsize
            memory = (ctypes.c_char * nbytes).from_address(ptr)
            return np.ndarray((width, height), dtype, memory, 0, (ld * dtype.itemsize, dtype.itemsize))

        def run() -> None:
            for i in range(count):
                left = rows_of(b + i * sb * dtype.itemsize, ldb, *((n, k) if op_b else (k, n)))
                right = rows_of(a + i * sa * dtype.itemsize, lda, *((k, m) if op_a else (m, k)))
                into = rows_of(c + i * sc * dtype.itemsize, ldc, m, n)
                into[...] = np.matmul(left.T if op_b else left, right.T if op_a else right)

        with stream:
            self._machine.give(run)
        return 0
