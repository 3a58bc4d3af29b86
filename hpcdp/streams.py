"""Floor 1: streams. Imports: arrays, devices, errors.

Streams, events and copies of a GPU, none of which blocks the host: what moves data needs no more of a device.

Work on one stream is done in the order in which it was given; between streams there is no order but that of events. A
host that reads what a copy has written waits until the event behind it has passed, by asking again and again, as for a
message. Memory must live, and stay as it is, until the event behind its last use has passed.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .arrays import Array, is_host
from .devices import Device, gpu
from .errors import DeviceError, UnsupportedError

Stream = Any
"""One of CuPy's."""

Event = Any
"""One of CuPy's."""

_forgotten: deque[tuple[Streams, tuple[Stream, ...], Any]] = deque()
"""Pinned memory that nobody has any more, and the streams that may still copy it."""

_DONE, _NOT_READY = 0, 600
_BEFORE_OTHERS = -1


class Streams:
    """Streams of one GPU; for any thread, whatever its current device is.

    The thread that makes it keeps its current device. Others, those of lanes, have the GPU for theirs once they have
    used it: each begins with number 0, and a device that becomes current gets a context (cudaSetDevice), some hundred
    MB; so a thread that went back there would take memory of a GPU that may be another rank's.

    Args:
        device: a GPU.
    """

    def __init__(self, device: Device) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._cuda: Any = self._cupy.cuda
        self._runtime: Any = self._cuda.runtime
        self.device = device
        self._is_maker = threading.local()  # not its ident, which a later thread may have
        self._is_maker.here = True

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """The GPU is this thread's current device."""
        device = self._cuda.Device(self.device.index)
        if hasattr(self._is_maker, "here"):
            with device:
                yield
        else:
            device.use()
            yield

    def current_device(self) -> Device:
        """The GPU on which this thread's operations on arrays run."""
        return gpu(int(self._runtime.getDevice()))

    def stream(self) -> Stream:
        """A new stream, which does not wait for the default one. Blocks of its kernels run before those that wait of
        streams that compute (of priority 0), since other ranks wait for what it sends."""
        with self.on_device():
            return self._cuda.Stream(non_blocking=True, priority=_BEFORE_OTHERS)

    def current(self) -> Stream:
        """The stream to which this thread's operations on arrays go.

        Raises:
            UnsupportedError: it is the default stream that each thread has for itself, which others cannot wait for.
        """
        with self.on_device():
            found = self._cuda.get_current_stream()
        if found.ptr == self._runtime.streamPerThread:
            raise UnsupportedError(
                "stream", where=self.device, expected="one that is the same for all threads",
                got="CUDA's per-thread default stream",
                remedy="unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM, or use a cupy.cuda.Stream(non_blocking=True)",
            )  # fmt: skip
        return found

    def event(self, *, timed: bool = False) -> Event:
        """A new event; until it is recorded, nobody waits for it. If ``timed``, it is for `seconds_between`."""
        with self.on_device():
            return self._cuda.Event(disable_timing=not timed)

    def seconds_between(self, first: Event, last: Event) -> float:
        """From when ``first`` has passed until ``last`` has: two timed events that both have, on this GPU."""
        with self.on_device():
            return float(self._runtime.eventElapsedTime(first.ptr, last.ptr)) / 1e3

    def zeros(self, count: int, dtype: np.dtype) -> Array:
        """A new array on the GPU, shape ``(count,)``; it is zero for what `current` is given from now on."""
        with self.on_device():
            return self._cupy.zeros((count,), dtype=dtype)

    def array(self, x: np.ndarray) -> Array:
        """A copy of ``x`` on the GPU, for what `current` is given from now on."""
        with self.on_device():
            return self._cupy.array(x)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, stream: Stream) -> Array:
        """A new array on the GPU, in memory that ``stream`` alone may still use for what it was given before."""
        with self.on_device(), stream:
            return self._cupy.empty(shape, dtype=dtype)

    def pinned(self, nbytes: int, *copied_by: Stream) -> np.ndarray:
        """Host memory that a GPU copies from and to beside all else, shape ``(nbytes,)``, dtype uint8.

        Args:
            copied_by: streams that may still copy it when nobody has it any more. CuPy, which gives it to the next who
                asks, gets it back when they have done that.
        """
        with self.on_device():
            _give_back_forgotten()
        with self.on_device():  # which another one may be now
            memory = self._cuda.alloc_pinned_memory(nbytes)
        made = np.frombuffer(memory, np.uint8, nbytes)
        if copied_by:
            weakref.finalize(made, _forgotten.append, (self, copied_by, memory)).atexit = False
        return made

    def copy_async(self, target: Array, source: Array, stream: Stream) -> None:
        """Copy ``source`` to ``target``, contiguous arrays of one size on the GPU or in pinned memory, on ``stream``.

        Raises:
            UnsupportedError: other arrays.
        """
        for x in (target, source):
            if not x.flags.c_contiguous or x.nbytes != target.nbytes:
                expected = f"contiguous arrays of {target.nbytes} bytes"
                raise UnsupportedError("copy", expected=expected, got=f"{x.nbytes} bytes with strides {x.strides}")
        if target.nbytes:
            at = _address(target), _address(source)
            with self.on_device():
                self._runtime.memcpyAsync(*at, target.nbytes, self._runtime.memcpyDefault, stream.ptr)

    def record(self, event: Event, stream: Stream) -> None:
        """Let ``event`` pass when all that ``stream`` was given until now is done."""
        with self.on_device():
            self._runtime.eventRecord(event.ptr, stream.ptr)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let what ``stream`` is given from now on wait for the last `record` of ``event`` before this call."""
        with self.on_device():
            self._runtime.streamWaitEvent(stream.ptr, event.ptr)

    def wait_events(self, stream: Stream, events: Iterable[Event]) -> None:
        """`wait_event` for each of ``events``."""
        for each in events:
            self.wait_event(stream, each)

    def query(self, event: Event) -> bool:
        """Whether ``event`` has passed; never blocks.

        Raises:
            DeviceError: something that was done on the GPU before has failed.
        """
        with self.on_device():
            return self._is_done(self._runtime.eventQuery(event.ptr))

    def is_idle(self, stream: Stream) -> bool:
        """Whether all that ``stream`` was given until now is done; never blocks.

        Raises:
            DeviceError: something that was done on the GPU before has failed.
        """
        with self.on_device():
            return self._is_done(self._runtime.streamQuery(stream.ptr))

    def _is_done(self, status: int) -> bool:
        if status in (_DONE, _NOT_READY):
            return status == _DONE
        raise DeviceError("wait for a GPU", where=self.device, got=str(self._runtime.CUDARuntimeError(status)))

    def synchronize(self, awaited: Stream | Event) -> None:
        """Block until ``awaited`` has passed: all that a stream was given until now, or an event."""
        with self.on_device():
            awaited.synchronize()

    def follow(self, stream: Stream, before: Stream | None = None) -> None:
        """Let what ``stream`` is given from now on wait for what ``before``, or `current`, was given until now."""
        event = self.event()
        self.record(event, self.current() if before is None else before)
        self.wait_event(stream, event)


def _give_back_forgotten() -> None:
    """What is copied no more; may leave another GPU current."""
    for _ in range(len(_forgotten)):
        with contextlib.suppress(IndexError):  # another thread looks, too
            streams, copied_by, _memory = each = _forgotten.popleft()
            if not all(map(streams.is_idle, copied_by)):
                _forgotten.append(each)


def _address(x: Array) -> int:
    return int(x.ctypes.data if is_host(x) else x.data.ptr)
