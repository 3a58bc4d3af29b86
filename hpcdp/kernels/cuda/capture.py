"""CUDA graphs: what a function launches is captured once, and launched again at once.

What holds in a capture (CUDA's programming guide, "CUDA Graphs"; CuPy's ``cuda/stream.pyx`` and ``cuda/memory.pyx``):

- Nothing runs: a launch is noted, with the addresses and numbers that it is given. Whoever waits for a result, or
  copies from or to the host, gets an error, from CUDA or from CuPy, and the capture is over.
- The stream must be another than the default one, and must not wait for it: hence ``non_blocking``.
- CuPy captures in the relaxed mode, where memory may be allocated. What is freed in the capture goes back to the pool
  and is given out again, also to others, while the graph writes there whenever it is launched. So a graph has a pool of
  its own, as in PyTorch, which lives as long as it does; and graphs share one only where one is not launched between
  another's forward and backward. Where a pool of CuPy's finds no more memory it gives back to CUDA what is free at the
  moment; one of graphs must not (`_pool`).
- Kernels that are not compiled and loaded yet would be in the capture, which may fail: what is captured has run before
  (`warmed_up`).
- Numbers from the host are frozen. What is to be another in each launch is brought by `fill`.
- A graph calls nothing on the host while it runs. Where that is needed it is cut in two (`between`).
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
    """Write what ``make()`` gives, an array on the host, to ``place``, on any device.

    In a graph that is captured it is made and brought anew by each launch, before the first kernel.
    """
    graph = _here.graph
    if graph is None:
        place[...] = from_host(make(), place)
        return
    brought = graph.place_like(place)
    graph.before_launch.append(lambda: brought.__setitem__(..., from_host(make(), brought)))
    place[...] = brought


def numbers(make: Callable[[], tuple[float, ...]]) -> Array:
    """What ``make()`` gives, in float64 on the current GPU, in a graph that is captured: each launch asks anew, and
    brings it where it is other than before."""
    graph = _here.graph
    assert graph is not None
    import cupy

    place = graph.place_like(cupy.empty(len(make())))
    brought: tuple[float, ...] = ()
    under_way: deque[tuple[Any, np.ndarray]] = deque()

    def bring() -> None:
        nonlocal brought
        made = make()
        if made != brought:
            on_host = np.array(made)
            place.set(on_host)  # takes a sixth of the time of a copy through a new array
            brought = made
            # Where GPUs read the host's memory by its page tables (Grace) that is not copied before they come to it.
            under_way.append((cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True)), on_host))
            while len(under_way) > 1 and under_way[0][0].done:
                under_way.popleft()

    graph.before_launch.append(bring)
    return place


def between(function: Callable[[], object]) -> None:
    """Have each launch of the graph that is captured call ``function()`` on the host here, when the current stream has
    been given all that comes before, and nothing of what comes behind."""
    graph = _here.graph
    assert graph is not None
    graph.cut(function)


class CudaGraph:
    """What a function has launched, to be launched again; see `Capturer.capture`."""

    def __init__(self, pool: Any, inputs: Any, stream: Any) -> None:
        self._pool, self._inputs, self._stream = pool, inputs, stream  # whose memory lives as long as the graph
        self._parts: list[tuple[Any, Callable[[], object] | None]] = []
        """CuPy's graphs, and what is to be called behind each; behind the last one, nothing."""
        self.before_launch: list[Callable[[], None]] = []
        """What each launch calls first."""

    def place_like(self, x: Array) -> Array:
        """An array like ``x`` in memory that nothing in the graph shares, to be filled before a launch."""
        import cupy

        with cupy.cuda.using_allocator(self._inputs.malloc):
            return cupy.empty(x.shape, dtype=x.dtype)

    def begin(self) -> None:
        """Capture what the stream is given from now on."""
        self._stream.begin_capture()

    def cut(self, function: Callable[[], object]) -> None:
        """See `between`."""
        self.end(function)
        self.begin()

    def end(self, behind: Callable[[], object] | None = None) -> None:
        """All of a part is captured."""
        self._parts.append((self._stream.end_capture(), behind))

    def launch(self) -> None:
        """Give it to the current stream; waits for nothing. Where what is called `between` raises, the rest is not."""
        for function in self.before_launch:
            function()
        for part, behind in self._parts:
            part.launch()
            if behind is not None:
                behind()


class Capturer:
    """Captures graphs that are launched one after the other by the current stream of the current GPU.

    They share the memory in which they compute; each may be overwritten by the next, but for arrays that still live.

    Raises:
        UnsupportedError: there is no cuBLAS that products could be captured with.
    """

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._launched_by = self._cuda.get_current_stream()
        self._device = self._cuda.Device().id
        self._stream = self._cuda.Stream(non_blocking=True)
        self._taken: list[Any] = []
        """Memory of both pools."""
        self._pool, self._inputs = _pool(self._taken), _pool(self._taken)
        self._cublas = _cublas()

    def is_current(self) -> bool:
        """Whether GPU and stream are those which launch its graphs: others would not wait for each other."""
        return self._cuda.Device().id == self._device and self._cuda.get_current_stream() == self._launched_by

    @property
    def nbytes(self) -> int:
        """Of the memory that its graphs hold."""
        return sum(int(each.size) for each in self._taken)

    def capture(self, function: Callable[[], object]) -> CudaGraph:
        """What ``function`` launches, which does not run before `CudaGraph.launch`.

        Raises:
            Exception: what ``function`` raises, or CuPy where it did what no graph can have; nothing is captured then.
        """
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()  # of a run without a graph, which took as much
        graph = CudaGraph(self._pool, self._inputs, self._stream)
        with self._cuda.using_allocator(self._pool.malloc), self._cublas.on(self._stream), self._stream:
            graph.begin()
            _here.graph = graph
            try:
                function()
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    graph.end()
                raise
            finally:
                _here.graph = None
            graph.end()
        return graph


def _pool(taken: list[Any]) -> Any:
    """A pool that adds what it takes from CUDA to ``taken``, and has all of that as long as it lives, also what CuPy
    believes to have given back; at most ``CUPY_GPU_MEMORY_LIMIT``."""
    import cupy

    limit = int(cupy.cuda.MemoryPool().get_limit())

    def take(nbytes: int) -> Any:
        held = sum(int(each.size) for each in taken)
        if 0 < limit < held + nbytes:
            raise MemoryError(f"{nbytes} bytes beside {held}, where CUPY_GPU_MEMORY_LIMIT is {limit}")
        taken.append(cupy.cuda.Memory(nbytes))
        return cupy.cuda.MemoryPointer(taken[-1], 0)

    return cupy.cuda.MemoryPool(take)


def warmed_up() -> contextlib.AbstractContextManager[None]:
    """What runs inside has its kernels loaded for a capture later: also cuBLAS's, which depend on the workspace."""
    import cupy

    try:
        return _cublas().on(cupy.cuda.get_current_stream())
    except UnsupportedError:  # so says the capture
        return contextlib.nullcontext()


def _cublas() -> Cublas:
    """For the current GPU and stream."""
    import cupy

    key = cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr
    if key not in _here.cublas:
        _here.cublas[key] = Cublas()
    return _here.cublas[key]


class _Here(threading.local):
    graph: CudaGraph | None = None
    """That this thread captures."""

    def __init__(self) -> None:
        self.cublas: dict[tuple[int, int], Cublas] = {}
        """By GPU and stream that launches."""


_here = _Here()
