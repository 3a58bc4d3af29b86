"""Launches of CUDA kernels for CuPy arrays; CUDA graphs, which capture launches once and replay them; cuBLAS for them.

`kernels` has the functions that launch kernels, named as those of `reference`. The kernels are in sources ``*.cu`` in
the folder ``kernels`` of `hpcdp.core.files`. Beside it is `cudnn_conv`. CuPy is imported with its first array. It
compiles a file for the present GPU (NVRTC) once per user, and caches it in ``~/.cupy/kernel_cache``.

A launch uses the current stream and does not wait.

Rules of a capture (CUDA's programming guide, "CUDA Graphs"; CuPy's ``cuda/stream.pyx`` and ``cuda/memory.pyx``):

- Nothing runs: a launch is recorded with its addresses and numbers. Waiting for a result, or copying from or to the
  host, raises an error of CUDA or CuPy and ends the capture.
- The stream must not be the default one, and must not wait for it: hence ``non_blocking``.
- CuPy captures in the relaxed mode, which allows allocations. Memory freed in the capture returns to the pool and is
  reused, also by others, although every launch of the graph writes there. So graphs have a pool of their own, as in
  PyTorch, which lives as long as they do. Graphs share a pool only if none is launched between forward and backward of
  another. A CuPy pool that is out of memory returns free memory to CUDA; a graph's pool must not (`_pool`).
- Kernels that are not yet compiled and loaded would be part of the capture, which may fail: run them before
  (`warmed_up`).
- Numbers from the host are frozen. `fill` updates those that differ between launches.
- A graph calls nothing on the host while it runs. `between` splits it where that is needed.

Matrix products: CuPy refuses to call cuBLAS while a stream is captured (``setStream`` in
``cupy_backends/cuda/libs/cublas.pyx``; CuPy's issue 6290). cuBLAS allows it if scalars are read from the host and the
workspace is the caller's (its manual, "CUDA Graphs Support" and "cublasSetWorkspace"). During a capture its routines
are therefore called here by ctypes, with the handle, the layout and the settings of CuPy
(``cupy/_core/_routines_linalg.pyx``); otherwise CuPy is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

from ...core.arrays import Array, array_namespace, dtype_name, from_host, is_bfloat16, is_cupy
from ...core.checks import choices
from ...core.files import data_folder
from ...errors import DeviceError, UnsupportedError

OPTIONS = ("-std=c++17", "--fmad=false")
"""Options of NVRTC and nvcc; the specification rounds each product before adding, so no contraction."""

THREADS, WARP = 256, 32
"""Threads of a block, and of a warp; also defined in `common.cuh`."""

MAX_BLOCKS = 8448
"""Largest number of blocks of a launch; threads stride over the rest.

An H100 then has 64 blocks for each of its 132 multiprocessors, which run four to eight at once, depending on the
kernel's registers. With several waves a partial last wave costs little.
"""

MAX_PARTS = 1056
"""Largest number of partial sums or counts of blocks.

Few enough to combine quickly, and independent of the GPU, because the order of additions depends on it.
"""

NOWHERE = np.uintp(0)
"""Address passed to a kernel for a missing array."""

_CHANNEL_BLOCKS, _PER_BLOCK = 2112, 16 * THREADS
"""Approximate number of blocks that sum all channels, and least elements of each."""

_CHANNELS = np.dtype([("at", np.int64, 3)])

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Dtypes of the network kernels."""

_TYPES = {
    "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "uint16": "f16", "int16": "bf16",
    "int32": "i32", "int64": "i64",
}  # fmt: skip
"""Suffix of a kernel's name for each dtype, also those of `hpcdp.core.arrays.words`."""


def source(file: str) -> str:
    """Return ``kernels/<file>.cu`` with its headers included, because CuPy's cache is keyed by the text alone."""
    folder = data_folder("kernels")
    text = (folder / f"{file}.cu").read_text()
    return re.sub(r'#include "(\w+\.cuh)"', lambda header: (folder / header[1]).read_text(), text)


@cache
def _kernel(file: str, name: str) -> Any:
    return _module(file).get_function(name)


@cache
def _module(file: str) -> Any:
    import cupy

    return cupy.RawModule(code=source(file), options=OPTIONS)


def check(operation: str, dtypes: tuple[str, ...], count: int, *arrays: Array) -> None:
    """Check that a kernel, which knows neither strides nor sizes, can be given ``arrays``.

    Raises:
        UnsupportedError: they are not contiguous or aligned, not all of one of ``dtypes``, or not all of ``count``
            elements.
    """
    dtype = arrays[0].dtype
    name = dtype_name(dtype)
    if name not in dtypes:
        raise UnsupportedError(operation, where="dtype", expected=choices(dtypes), got=name)
    for x in arrays:
        if x.dtype != dtype or x.size != count or not x.flags.c_contiguous:
            layout = "contiguous" if x.flags.c_contiguous else f"strides {x.strides}"
            expected = f"contiguous arrays of {count} {name}"
            raise UnsupportedError(operation, expected=expected, got=f"{x.size} {x.dtype}, {layout}")
        if x.data.ptr % x.itemsize:
            expected = f"an address divisible by {x.itemsize}"
            raise UnsupportedError(operation, where="alignment", expected=expected, got=hex(x.data.ptr))


def type_name(operation: str, dtypes: tuple[str, ...], count: int, *arrays: Array) -> str:
    """Return the suffix of the name of a kernel for ``arrays``, after `check`."""
    check(operation, dtypes, count, *arrays)
    return _TYPES[dtype_name(arrays[0].dtype)]


def wide_type(x: Array) -> str:
    """Return the dtype of computations with ``x``: float32 for 16 bits, else its own."""
    return "float32" if x.itemsize == 2 else dtype_name(x.dtype)


def blocks(threads: int) -> int:
    """Return the number of blocks to launch for ``threads`` threads."""
    return min(-(-threads // THREADS), MAX_BLOCKS)


@lru_cache(maxsize=2048)
def structure(dtype: np.dtype, *fields: Any) -> np.ndarray:
    """Return a structure for `launch`, of ``dtype``, with numbers or tuples of them as ``fields``.

    It is cached, because making it takes as long as the launch. It has no named fields, which CuPy would describe
    through NumPy for 6 us.
    """
    made = np.array([fields], dtype)
    made.flags.writeable = False
    return made.view(f"V{made.nbytes}")


def pieces_of(parts: int, size: int) -> int:
    """Return the number of blocks that sum each of ``parts`` of ``size`` elements; fixes the order of additions."""
    return max(1, min(-(-_CHANNEL_BLOCKS // max(parts, 1)), size // _PER_BLOCK))


def shape_of_channels(x: Array) -> np.ndarray:
    """Return the structure ``Shape`` of `channels.cuh`: batch, channels and positions."""
    return structure(_CHANNELS, (*x.shape[:2], math.prod(x.shape[2:])))


def launch(file: str, name: str, grid: int, *args: Array | np.generic | np.ndarray) -> None:
    """Launch a kernel of ``kernels/<file>.cu`` on the current stream, with ``grid`` blocks; with 0, none.

    Args:
        file: the source.
        name: the kernel.
        grid: number of blocks.
        *args: CuPy arrays or `NOWHERE`, NumPy scalars of the size that the kernel expects, and structures as arrays of
            one element.
    """
    if grid:
        _kernel(file, name)((grid,), (THREADS,), args)


def launch_elementwise(file: str, name: str, arrays: tuple[Array, ...], *others: np.generic | Array) -> None:
    """Launch a kernel of ``(*arrays, count, *others)`` with a thread for each 16 bytes of the largest array."""
    nbytes = max(x.nbytes for x in arrays)
    launch(file, name, blocks(-(-nbytes // 16)), *arrays, np.int64(arrays[0].size), *others)


_AS_IT_IS, _TURNED = 0, 1
_CUBLAS_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
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
    if _here.multiplies is not None:
        return _here.multiplies.matmul(a, b, out)
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
        before, _here.multiplies = _here.multiplies, self
        try:
            yield
        finally:
            _here.multiplies = before

    def matmul(self, a: Array, b: Array, out: Array | None) -> Array:
        """See the function `matmul`."""
        xp, dtype = self._cupy, np.promote_types(a.dtype, b.dtype)
        if str(dtype) not in _CUBLAS_TYPES:
            raise UnsupportedError("matmul", where="dtype", expected=choices(_CUBLAS_TYPES), got=dtype)
        if dtype.itemsize == 2 and max(a.ndim, b.ndim) > 2:  # as above, and as CuPy does with float16
            product: Array = self.matmul(a.astype(np.float32), b.astype(np.float32), None).astype(dtype)
        else:
            x, y = (operand.astype(dtype, copy=False) for operand in (a, b))
            x, y = x if x.ndim > 1 else x[None, :], y if y.ndim > 1 else y[:, None]
            if x.shape[-1] != y.shape[-2]:
                expected = "shapes (.., n, k) and (.., k, m)"
                raise UnsupportedError("matmul", expected=expected, got=f"{a.shape}, {b.shape}")
            lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
            stacked_shape = (*lead, x.shape[-2], y.shape[-1])
            shape = (*lead, *x.shape[-2:-1] * (a.ndim > 1), *y.shape[-1:] * (b.ndim > 1))
            fits = out is not None and out.flags.c_contiguous and out.dtype == dtype
            product = out if fits else xp.empty(shape, dtype=dtype)
            self._multiply(x, y, product.reshape(stacked_shape))
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
        kind, number = _CUBLAS_TYPES[name], ctypes.c_double if name == "float64" else ctypes.c_float
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


def fill(place: Array, make: Callable[[], np.ndarray]) -> None:
    """Write the host array ``make()`` to ``place``, on any device.

    In a captured graph ``make`` is called by each launch, and its result copied before the first kernel.
    """
    graph = _here.graph
    if graph is None:
        place[...] = from_host(make(), place)
        return
    staged = graph.place_like(place)
    graph.before_launch.append(lambda: staged.__setitem__(..., from_host(make(), staged)))
    place[...] = staged


def numbers(make: Callable[[], tuple[float, ...]]) -> Array:
    """Return a float64 array on the current GPU that each launch of the captured graph fills with ``make()``.

    The numbers are copied only if they have changed.
    """
    graph = _here.graph
    assert graph is not None
    import cupy

    place = graph.place_like(cupy.empty(len(make())))
    copied: tuple[float, ...] = ()
    in_flight: deque[tuple[Any, np.ndarray]] = deque()

    def update() -> None:
        nonlocal copied
        values = make()
        if values != copied:
            on_host = np.array(values)
            place.set(on_host)  # takes a sixth of the time of a copy through a new array
            copied = values
            # GPUs that read host memory through its page tables (Grace) read it late, so keep it until they have.
            in_flight.append((cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True)), on_host))
            while len(in_flight) > 1 and in_flight[0][0].done:
                in_flight.popleft()

    graph.before_launch.append(update)
    return place


def between(function: Callable[[], object]) -> None:
    """Make each launch of the captured graph call ``function()`` on the host at this point.

    The current stream then has all work from before this point, and none from after it.
    """
    graph = _here.graph
    assert graph is not None
    graph.cut(function)


class CudaGraph:
    """The captured launches of a function; see `Capturer.capture`."""

    def __init__(self, pool: Any, inputs: Any, stream: Any) -> None:
        self._pool, self._inputs, self._stream = pool, inputs, stream  # keeps their memory alive
        self._parts: list[tuple[Any, Callable[[], object] | None]] = []
        """CuPy's graphs, each with the function to call after it; None after the last."""
        self.before_launch: list[Callable[[], None]] = []
        """Functions that each launch calls first."""

    def place_like(self, x: Array) -> Array:
        """Return an array like ``x`` in memory that nothing in the graph shares, to be filled before a launch."""
        import cupy

        with cupy.cuda.using_allocator(self._inputs.malloc):
            return cupy.empty(x.shape, dtype=x.dtype)

    def begin(self) -> None:
        """Start to capture the stream."""
        self._stream.begin_capture()

    def cut(self, function: Callable[[], object]) -> None:
        """See `between`."""
        self.end(function)
        self.begin()

    def end(self, behind: Callable[[], object] | None = None) -> None:
        """End a part of the capture, after which ``behind`` is called."""
        self._parts.append((self._stream.end_capture(), behind))

    def launch(self) -> None:
        """Launch on the current stream, without waiting; stops where a function of `between` raises."""
        for function in self.before_launch:
            function()
        for part, behind in self._parts:
            part.launch()
            if behind is not None:
                behind()


class Capturer:
    """Captures graphs that the current stream of the current GPU launches one after another.

    They share working memory. Each may be overwritten by the next, except arrays that are still alive.

    Raises:
        UnsupportedError: no cuBLAS to capture products with.
    """

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._launched_by = self._cuda.get_current_stream()
        self._device = self._cuda.Device().id
        self._stream = self._cuda.Stream(non_blocking=True)
        self._allocations: list[Any] = []
        """Allocations of both pools."""
        self._pool, self._inputs = _pool(self._allocations), _pool(self._allocations)
        self._cublas = _cublas()

    def is_current(self) -> bool:
        """Return whether GPU and stream are those that launch its graphs; others would not be ordered with them."""
        return self._cuda.Device().id == self._device and self._cuda.get_current_stream() == self._launched_by

    @property
    def nbytes(self) -> int:
        """Bytes of memory that its graphs hold."""
        return sum(int(memory.size) for memory in self._allocations)

    def capture(self, function: Callable[[], object]) -> CudaGraph:
        """Capture the launches of ``function``, which do not run before `CudaGraph.launch`.

        Raises:
            Exception: raised by ``function``, or by CuPy for an operation that a graph cannot have; nothing is captured
                then.
        """
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()  # used by the run without a graph
        graph = CudaGraph(self._pool, self._inputs, self._stream)
        with self._cuda.using_allocator(self._pool.malloc), self._cublas.on(self._stream), self._stream:
            graph.begin()
            _here.graph = graph
            try:
                function()
            except BaseException:
                with contextlib.suppress(Exception):  # raise the first error
                    graph.end()
                raise
            finally:
                _here.graph = None
            graph.end()
        return graph


def _pool(allocations: list[Any]) -> Any:
    """Return a pool that appends its allocations to ``allocations`` and keeps them as long as it lives.

    That includes memory that CuPy believes to have freed; at most ``CUPY_GPU_MEMORY_LIMIT``.
    """
    import cupy

    limit = int(cupy.cuda.MemoryPool().get_limit())

    def take(nbytes: int) -> Any:
        held = sum(int(memory.size) for memory in allocations)
        if 0 < limit < held + nbytes:
            raise MemoryError(f"{nbytes} bytes beside {held} exceed CUPY_GPU_MEMORY_LIMIT={limit}")
        allocations.append(cupy.cuda.Memory(nbytes))
        return cupy.cuda.MemoryPointer(allocations[-1], 0)

    return cupy.cuda.MemoryPool(take)


def warmed_up() -> contextlib.AbstractContextManager[None]:
    """Load the kernels of the block for a later capture, including those of cuBLAS, which depend on the workspace."""
    import cupy

    try:
        return _cublas().on(cupy.cuda.get_current_stream())
    except UnsupportedError:  # the capture raises it
        return contextlib.nullcontext()


def _cublas() -> Cublas:
    """Return the `Cublas` of the current GPU and stream."""
    import cupy

    key = cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr
    if key not in _here.cublas:
        _here.cublas[key] = Cublas()
    return _here.cublas[key]


class _ThreadCapture(threading.local):
    graph: CudaGraph | None = None
    """The graph that this thread captures."""
    multiplies: Cublas | None = None
    """The cuBLAS that computes this thread's products, instead of CuPy."""

    def __init__(self) -> None:
        self.cublas: dict[tuple[int, int], Cublas] = {}
        """By GPU and launching stream."""


_here = _ThreadCapture()
