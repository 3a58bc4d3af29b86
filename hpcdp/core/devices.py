"""Devices, and the streams and events of a GPU.

Real ones and virtual ones in host memory.

Streams.

Streams, events and copies of a GPU, none of which blocks the host: what moves data needs no more of a device.

Work on one stream is done in the order in which it was given; between streams there is no order but that of events. A
host that reads what a copy has written waits until the event behind it has passed, by asking again and again, as for a
message. Memory must live, and stay as it is, until the event behind its last use has passed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, DeviceError, UnsupportedError
from .arrays import Array, array_namespace, from_host, has_namespace, is_cupy, is_host, to_host
from .checks import described, instances
from .files import make_private_folder, require_private

MEMORY_LIMIT = "CUPY_GPU_MEMORY_LIMIT"
"""CuPy's own setting, in the environment: what its pool takes at most."""


@dataclass(frozen=True)
class Device:
    """Where arrays are: ``cpu(i)`` or ``gpu(i)``.

    Every ``cpu(i)`` is a virtual device, with memory of its own in that of the host: what is put there is a copy. So
    programs for several devices run, and are tested, where there are none.
    """

    kind: str
    index: int

    def __repr__(self) -> str:
        return f"{self.kind}({self.index})"

    @classmethod
    def of(cls, x: Array) -> Device:
        """Where ``x`` is: the GPU of a CuPy array, else ``cpu(0)``."""
        return cls("gpu", int(x.device.id)) if is_cupy(x) else cls("cpu", 0)

    def put(self, x: Array) -> Array:
        """A copy of ``x`` on this device, by the streams that are current there and where ``x`` is.

        Raises:
            DeviceError: the machine does not have it; a RuntimeError.
        """
        if self.kind == "cpu":
            return np.array(to_host(x))
        cupy = _cupy(self)
        if is_cupy(x) and Device.of(x) != self:
            return _copied_between_gpus(cupy, x, self.index)
        with self.current():
            return cupy.array(x)

    def check(self) -> None:
        """Raise `DeviceError`, a RuntimeError, where the machine does not have it."""
        if self.kind == "gpu":
            _cupy(self)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Within it this is the thread's current device, on which CuPy computes; nothing is done for a virtual one.

        Raises:
            DeviceError: the machine does not have it; a RuntimeError.
        """
        with contextlib.nullcontext() if self.kind == "cpu" else _cupy(self).cuda.Device(self.index):
            yield

    def use(self) -> None:
        """Let it be this thread's current device, on which CuPy computes; nothing is done for a virtual one.

        Raises:
            DeviceError: the machine does not have it; a RuntimeError.
        """
        if self.kind == "gpu":
            _cupy(self).cuda.Device(self.index).use()

    def limit_memory(self, share: float) -> None:
        """Let this process's arrays take at most ``share`` of the GPU's memory; nothing is done for a virtual one.

        It is the limit of CuPy's pool, which gives back what it keeps unused before it exceeds that. Graphs of
        hybridized networks, sums of gradients and CUDA itself take memory beside it.

        Raises:
            DeviceError: ``share`` is no share, or the machine does not have the device; a RuntimeError.
        """
        if not 0 < share <= 1:
            raise DeviceError("limit_memory", where=self, expected="a share above 0 and up to 1", got=share)
        if self.kind == "gpu":
            with self.current():
                _cupy(self).get_default_memory_pool().set_limit(fraction=share)


def cpu(index: int = 0) -> Device:
    """The virtual device of this number, from 0 on."""
    return _device("cpu", index)


def gpu(index: int = 0) -> Device:
    """The GPU of this number, whether it is there or not; that is said where something is put on it."""
    return _device("gpu", index)


def _device(kind: str, index: int) -> Device:
    number = operator.index(index) if isinstance(index, int | np.integer) and not isinstance(index, bool) else -1
    if number < 0:
        raise DeviceError("device", expected="a number from 0 on", got=f"{kind}({index!r})")
    return Device(kind, number)


def require_devices(operation: str, devices: object) -> tuple[Device, ...]:
    """``devices`` as a tuple; `ConfigError` unless they are a sequence of at least one."""
    expected = "a list of devices, such as [cpu(0), cpu(1)]"
    if not isinstance(devices, Sequence) or not devices:
        raise ConfigError(operation, where="devices", expected=expected, got=described(devices))
    return instances(operation, "devices", devices, Device, expected)


def lie_together(x: Array, y: Array) -> bool:
    """Whether both are on the host, or on the same GPU."""
    if is_host(x) or is_host(y):
        return is_host(x) and is_host(y)
    return array_namespace(x) is array_namespace(y) and Device.of(x) == Device.of(y)


def to_device_of(x: Array, like: Array) -> Array:
    """``x`` where ``like`` is: itself, if it is there, else a copy."""
    if lie_together(x, like):
        return x
    if is_host(like):
        return to_host(x)
    if is_cupy(x) and is_cupy(like):
        return Device.of(like).put(x)
    return from_host(to_host(x), like)


def values_on_device_of(x: Any, like: Array) -> Any:
    """``x`` for ``like`` to be given: arrays are `brought`, to a GPU also what NumPy takes for one; numbers stay."""
    if has_namespace(x):
        return to_device_of(x, like)
    if is_host(like) or isinstance(x, int | float | np.generic):
        return x
    return to_device_of(np.asarray(x), like)


def _copied_between_gpus(cupy: Any, x: Array, index: int) -> Array:
    """A copy of ``x`` on another GPU. Streams of two GPUs do not wait for each other, also the default ones: events
    say when ``x`` is there, and when its memory may be given to others."""
    with x.device as source:
        x, giving = cupy.ascontiguousarray(x), cupy.cuda.get_current_stream()
        filled = giving.record(cupy.cuda.Event(disable_timing=True))
    with cupy.cuda.Device(index):
        taking = cupy.cuda.get_current_stream()
        taking.wait_event(filled)
        made = cupy.empty(x.shape, dtype=x.dtype)
        made.data.copy_from_device_async(x.data, x.nbytes, taking)  # lets GPUs see each other: else it goes by the host
        come = taking.record(cupy.cuda.Event(disable_timing=True))
    with source:
        giving.wait_event(come)
    return made


def _cupy(device: Device) -> Any:
    check_memory_limit()
    try:
        cupy = importlib.import_module("cupy")
        count = cupy.cuda.runtime.getDeviceCount()
    except ModuleNotFoundError as error:
        raise DeviceError("device", where=device, expected="CuPy and a GPU", got="no CuPy",
                          remedy="pip install 'hpcdp[cuda13]', for a driver of CUDA 12 'hpcdp[cuda12]'; or take "
                          "hpcdp.cpu(0), hpcdp.cpu(1), ...") from error  # fmt: skip
    except Exception as error:  # CuPy raises its own where there is no driver
        _refuse_driver(device)
        raise DeviceError("device", where=device, expected="CuPy and a GPU", got=f"{type(error).__name__}: {error}",
                          remedy="take hpcdp.cpu(0), hpcdp.cpu(1), ...") from error  # fmt: skip
    _check_kernel_cache(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))
    if device.index >= count:
        raise DeviceError("device", where=device, expected=f"a number below {count}, the GPUs here", got=device.index)
    return cupy


@functools.cache
def _check_kernel_cache(folder: str) -> None:
    """Raise `DeviceError` where others may write what CuPy loads onto the GPU."""
    if os.environ.get("CUPY_CACHE_IN_MEMORY", "0") not in ("", "0"):
        return
    with contextlib.suppress(OSError):  # CuPy itself says what it cannot write
        make_private_folder(Path(folder))
        require_private(
            "device", folder, "a folder that this user alone may write",
            "set CUPY_CACHE_DIR to a folder of yours, or CUPY_CACHE_IN_MEMORY=1",
            where=f"CuPy's kernel cache {folder}", error=DeviceError,
        )  # fmt: skip


def check_memory_limit() -> None:
    """Raise `DeviceError` where CuPy cannot read how much memory it may take; take away blanks, which it cannot."""
    given = os.environ.get(MEMORY_LIMIT)
    limit = (given or "").strip()
    number = re.fullmatch(r"\d+|(\d+(?:\.\d*)?)%", limit)
    if limit and (number is None or float(number[1] or 0) > 100):
        raise DeviceError("device", where=MEMORY_LIMIT, expected="bytes, or percent such as 50%", got=limit)
    if not limit:
        os.environ.pop(MEMORY_LIMIT, None)
    elif limit != given:
        os.environ[MEMORY_LIMIT] = limit


def _refuse_driver(device: Device) -> None:
    """Raise `DeviceError` where there is none, or it is older than the CUDA for which CuPy was built."""
    runtime: Any = getattr(getattr(sys.modules.get("cupy"), "cuda", None), "runtime", None)
    if runtime is None:
        return
    runs, needs = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if runs == 0:
        raise DeviceError("device", where=device, expected="an NVIDIA GPU and its driver", got="no driver",
                          remedy="take hpcdp.cpu(0), hpcdp.cpu(1), ...")  # fmt: skip
    if 0 < runs // 1000 < needs // 1000:
        raise DeviceError(
            "device", where=device, expected=f"a driver for CUDA {cuda_release(needs)}, which this CuPy needs",
            got=f"one for CUDA up to {cuda_release(runs)}",
            remedy="in an environment without this CuPy: pip install 'hpcdp[cuda12]', or make with CUDA=cuda12; or a "
            "newer driver",
        )  # fmt: skip


def cuda_release(number: int) -> str:
    """CUDA's own number of a release, such as 13020, as people write it: ``13.2``."""
    return f"{number // 1000}.{number % 1000 // 10}"


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
