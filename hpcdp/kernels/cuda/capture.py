"""CUDA graphs: the launches of a function are captured once and replayed.

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
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ...core.arrays import Array, from_host
from ...errors import UnsupportedError
from .cublas import Cublas


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
        self._taken: list[Any] = []
        """Allocations of both pools."""
        self._pool, self._inputs = _pool(self._taken), _pool(self._taken)
        self._cublas = _cublas()

    def is_current(self) -> bool:
        """Return whether GPU and stream are those that launch its graphs; others would not be ordered with them."""
        return self._cuda.Device().id == self._device and self._cuda.get_current_stream() == self._launched_by

    @property
    def nbytes(self) -> int:
        """Bytes of memory that its graphs hold."""
        return sum(int(memory.size) for memory in self._taken)

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


def _pool(taken: list[Any]) -> Any:
    """Return a pool that appends its allocations to ``taken`` and keeps them as long as it lives.

    That includes memory that CuPy believes to have freed; at most ``CUPY_GPU_MEMORY_LIMIT``.
    """
    import cupy

    limit = int(cupy.cuda.MemoryPool().get_limit())

    def take(nbytes: int) -> Any:
        held = sum(int(memory.size) for memory in taken)
        if 0 < limit < held + nbytes:
            raise MemoryError(f"{nbytes} bytes beside {held} exceed CUPY_GPU_MEMORY_LIMIT={limit}")
        taken.append(cupy.cuda.Memory(nbytes))
        return cupy.cuda.MemoryPointer(taken[-1], 0)

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


class _Here(threading.local):
    graph: CudaGraph | None = None
    """The graph that this thread captures."""

    def __init__(self) -> None:
        self.cublas: dict[tuple[int, int], Cublas] = {}
        """By GPU and launching stream."""


_here = _Here()
