"""Arrays of NumPy, CuPy and test stand-ins, and the devices, streams and events on which they are computed.

An array names its own namespace through ``__array_namespace__`` (the array API standard, 2022.12, section
"Mechanism to get the array namespace"), so code asks the arrays and never a flag.

Packages that know nothing of PyTorch compute on arrays of NumPy and CuPy. A package that knows another kind, such as
tensors, registers its conversion here. It is imported by name where the first object of that kind comes.

Work on one stream runs in the order in which it was enqueued; only events order work of different streams. No operation
here blocks the host, except `Streams.synchronize`. A host that reads a copied result polls the event behind the copy,
as it polls a message. Memory must live, and must not change, until the event behind its last use has passed.
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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import ArrayMixError, ConfigError, DeviceError, UnsupportedError
from .checks import described, instances
from .files import make_private_folder, require_private

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
                "array_namespace", expected=f"only {common.__name__} arrays", got=f"a {namespace.__name__} array too",
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
        """Return an array over the memory of ``x``, or of its values; `UnsupportedError` if that is impossible."""
        ...

    def as_values(self, x: Any) -> np.ndarray:
        """Return the values of ``x`` in host memory, for an operation that neither changes nor differentiates it."""
        ...

    def of_array(self, x: Array) -> Any:
        """Return an object of this kind over the memory of ``x``."""
        ...

    def written(self, x: Any, array: Array) -> None:
        """Let ``x`` have the values that an operation has written to ``array``, which `as_array` has returned."""
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
        kind = None
        for base in of.__mro__:
            module = _MODULES.get((base.__module__, base.__name__))
            if module is not None:
                importlib.import_module(module)
                kind = _registered[base]
        self[of] = kind
        return kind


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


MEMORY_LIMIT = "CUPY_GPU_MEMORY_LIMIT"
"""CuPy's environment variable for the maximum size of its memory pool."""


@dataclass(frozen=True)
class Device:
    """A place for arrays: ``cpu(i)`` or ``gpu(i)``. Methods raise `DeviceError` if the machine does not have it.

    Every ``cpu(i)`` is a virtual device with memory of its own within host memory: arrays put there are copies.
    Programs for several devices thus run, and are tested, on machines without GPUs.
    """

    kind: str
    index: int

    def __repr__(self) -> str:
        return f"{self.kind}({self.index})"

    @classmethod
    def of(cls, x: Array) -> Device:
        """Return the device of ``x``: the GPU of a CuPy array, else ``cpu(0)``."""
        return cls("gpu", int(x.device.id)) if is_cupy(x) else cls("cpu", 0)

    def put(self, x: Array) -> Array:
        """Copy ``x`` to this device, on the streams that are current there and where ``x`` is."""
        if self.kind == "cpu":
            return np.array(to_host(x))
        cupy = _cupy(self)
        if is_cupy(x) and Device.of(x) != self:
            return _copied_between_gpus(cupy, x, self.index)
        with self.current():
            return cupy.array(x)

    def check(self) -> None:
        """Raise `DeviceError` if the machine does not have the device."""
        if self.kind == "gpu":
            _cupy(self)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this the thread's current device within a context; a virtual device does nothing."""
        with contextlib.nullcontext() if self.kind == "cpu" else _cupy(self).cuda.Device(self.index):
            yield

    def use(self) -> None:
        """Make this the thread's current device, on which CuPy computes; a virtual device does nothing."""
        if self.kind == "gpu":
            _cupy(self).cuda.Device(self.index).use()

    def limit_memory(self, share: float) -> None:
        """Limit this process's arrays to ``share`` of the GPU's memory; a virtual device does nothing.

        This sets the limit of CuPy's pool, which frees unused memory before it exceeds it. Graphs of hybridized
        networks, gradient sums and CUDA itself use memory beside the pool.

        Raises:
            DeviceError: ``share`` is not above 0 and up to 1.
        """
        if not 0 < share <= 1:
            raise DeviceError("limit_memory", where=self, expected="a share above 0 and up to 1", got=share)
        if self.kind == "gpu":
            with self.current():
                _cupy(self).get_default_memory_pool().set_limit(fraction=share)


def cpu(index: int = 0) -> Device:
    """Return the virtual device ``index``, from 0 on."""
    return _device("cpu", index)


def gpu(index: int = 0) -> Device:
    """Return the GPU ``index``; whether it exists is checked when it is used."""
    return _device("gpu", index)


def _device(kind: str, index: int) -> Device:
    number = operator.index(index) if isinstance(index, int | np.integer) and not isinstance(index, bool) else -1
    if number < 0:
        raise DeviceError("device", expected="a number from 0 on", got=f"{kind}({index!r})")
    return Device(kind, number)


def require_devices(operation: str, devices: object) -> tuple[Device, ...]:
    """Return ``devices`` as a tuple; `ConfigError` unless they are a sequence of at least one."""
    expected = "a list of devices, such as [cpu(0), cpu(1)]"
    if not isinstance(devices, Sequence) or not devices:
        raise ConfigError(operation, where="devices", expected=expected, got=described(devices))
    return instances(operation, "devices", devices, Device, expected)


def lie_together(x: Array, y: Array) -> bool:
    """Return whether both arrays are on the host, or on the same GPU."""
    if is_host(x) or is_host(y):
        return is_host(x) and is_host(y)
    return array_namespace(x) is array_namespace(y) and Device.of(x) == Device.of(y)


def to_device_of(x: Array, like: Array) -> Array:
    """Return ``x`` on the device of ``like``: ``x`` itself if it is there, else a copy."""
    if lie_together(x, like):
        return x
    if is_host(like):
        return to_host(x)
    if is_cupy(x) and is_cupy(like):
        return Device.of(like).put(x)
    return from_host(to_host(x), like)


def values_on_device_of(x: Any, like: Array) -> Any:
    """Return ``x`` for assignment to ``like``: arrays on its device, numbers unchanged.

    If ``like`` is on a GPU, anything else that NumPy converts is copied there as an array.
    """
    if has_namespace(x):
        return to_device_of(x, like)
    if is_host(like) or isinstance(x, int | float | np.generic):
        return x
    return to_device_of(np.asarray(x), like)


def _copied_between_gpus(cupy: Any, x: Array, index: int) -> Array:
    """Copy ``x`` to another GPU, with events between the two streams.

    Streams of two GPUs do not wait for each other, not even default ones. One event says when the copy is complete, the
    other when the memory of ``x`` may be reused.
    """
    with x.device as source:
        x, sender = cupy.ascontiguousarray(x), cupy.cuda.get_current_stream()
        computed = sender.record(cupy.cuda.Event(disable_timing=True))
    with cupy.cuda.Device(index):
        receiver = cupy.cuda.get_current_stream()
        receiver.wait_event(computed)
        result = cupy.empty(x.shape, dtype=x.dtype)
        result.data.copy_from_device_async(
            x.data, x.nbytes, receiver
        )  # enables peer access; else it stages on the host
        copied = receiver.record(cupy.cuda.Event(disable_timing=True))
    with source:
        sender.wait_event(copied)
    return result


def _cupy(device: Device) -> Any:
    check_memory_limit()
    try:
        cupy = importlib.import_module("cupy")
        count = cupy.cuda.runtime.getDeviceCount()
    except ModuleNotFoundError as error:
        raise DeviceError("device", where=device, expected="CuPy and a GPU", got="no CuPy",
                          remedy="pip install 'hpcdp[cuda13]', for a driver of CUDA 12 'hpcdp[cuda12]'; or take "
                          "hpcdp.cpu(0), hpcdp.cpu(1), ...") from error  # fmt: skip
    except Exception as error:  # CuPy raises errors of its own without a driver
        _refuse_driver(device)
        raise DeviceError("device", where=device, expected="CuPy and a GPU", got=f"{type(error).__name__}: {error}",
                          remedy="take hpcdp.cpu(0), hpcdp.cpu(1), ...") from error  # fmt: skip
    _check_kernel_cache(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))
    if device.index >= count:
        raise DeviceError("device", where=device, expected=f"a number below {count}, the GPUs here", got=device.index)
    return cupy


@functools.cache
def _check_kernel_cache(folder: str) -> None:
    """Raise `DeviceError` if other users may write the code that CuPy loads onto the GPU."""
    if os.environ.get("CUPY_CACHE_IN_MEMORY", "0") not in ("", "0"):
        return
    with contextlib.suppress(OSError):  # CuPy reports itself what it cannot write
        make_private_folder(Path(folder))
        require_private(
            "device", folder, "a folder that this user alone may write",
            "set CUPY_CACHE_DIR to a folder of yours, or CUPY_CACHE_IN_MEMORY=1",
            where=f"CuPy's kernel cache {folder}", error=DeviceError,
        )  # fmt: skip


def check_memory_limit() -> None:
    """Raise `DeviceError` if CuPy cannot parse its memory limit; strip blanks, which it cannot parse either."""
    setting = os.environ.get(MEMORY_LIMIT)
    limit = (setting or "").strip()
    number = re.fullmatch(r"\d+|(\d+(?:\.\d*)?)%", limit)
    if limit and (number is None or float(number[1] or 0) > 100):
        raise DeviceError("device", where=MEMORY_LIMIT, expected="bytes, or percent such as 50%", got=limit)
    if not limit:
        os.environ.pop(MEMORY_LIMIT, None)
    elif limit != setting:
        os.environ[MEMORY_LIMIT] = limit


def _refuse_driver(device: Device) -> None:
    """Raise `DeviceError` if there is no driver, or one that is older than the CUDA of this CuPy."""
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
            got=f"a driver for CUDA up to {cuda_release(runs)}",
            remedy="install a newer driver, or in an environment without this CuPy: pip install 'hpcdp[cuda12]', or "
            "make with CUDA=cuda12",
        )  # fmt: skip


def cuda_release(number: int) -> str:
    """Format CUDA's number of a release, such as 13020, as ``13.2``."""
    return f"{number // 1000}.{number % 1000 // 10}"


Stream = Any
"""A stream of CuPy."""

Event = Any
"""An event of CuPy."""

_forgotten: deque[tuple[Streams, tuple[Stream, ...], Any]] = deque()
"""Released pinned memory, and the streams that may still copy it."""

_DONE, _NOT_READY = 0, 600
_BEFORE_OTHERS = -1


class Streams:
    """A factory of streams, events and copies of one GPU; for any thread, whatever its current device is.

    The thread that makes it keeps its current device. Other threads, those of engine lanes, keep the GPU as their
    current device after the first use. Going back would make device 0 current, which creates a context there
    (cudaSetDevice): some hundred MB on a GPU that may be another rank's.

    `query` and `is_idle` raise `DeviceError` if earlier work on the GPU has failed.
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
        """Make the GPU this thread's current device."""
        device = self._cuda.Device(self.device.index)
        if hasattr(self._is_maker, "here"):
            with device:
                yield
        else:
            device.use()
            yield

    def current_device(self) -> Device:
        """Return the GPU on which this thread's array operations run."""
        return gpu(int(self._runtime.getDevice()))

    def stream(self) -> Stream:
        """Return a new stream that does not wait for the default one.

        Its kernels take precedence over waiting blocks of compute streams (priority 0), because other ranks wait for
        the data that it sends.
        """
        with self.on_device():
            return self._cuda.Stream(non_blocking=True, priority=_BEFORE_OTHERS)

    def current(self) -> Stream:
        """Return the stream of this thread's array operations.

        Raises:
            UnsupportedError: it is CUDA's per-thread default stream, for which other threads cannot wait.
        """
        with self.on_device():
            stream = self._cuda.get_current_stream()
        if stream.ptr == self._runtime.streamPerThread:
            raise UnsupportedError(
                "stream", where=self.device, expected="a stream that is the same for all threads",
                got="CUDA's per-thread default stream",
                remedy="unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM, or use a cupy.cuda.Stream(non_blocking=True)",
            )  # fmt: skip
        return stream

    def event(self, *, timed: bool = False) -> Event:
        """Return a new event, for `seconds_between` if ``timed``; nothing waits for it until it is recorded."""
        with self.on_device():
            return self._cuda.Event(disable_timing=not timed)

    def seconds_between(self, first: Event, last: Event) -> float:
        """Return the seconds between two timed events of this GPU that have passed."""
        with self.on_device():
            return float(self._runtime.eventElapsedTime(first.ptr, last.ptr)) / 1e3

    def zeros(self, count: int, dtype: np.dtype) -> Array:
        """Allocate an array of zeros on the GPU, shape ``(count,)``, for work enqueued on `current` from now on."""
        with self.on_device():
            return self._cupy.zeros((count,), dtype=dtype)

    def array(self, x: np.ndarray) -> Array:
        """Copy ``x`` to the GPU, for work enqueued on `current` from now on."""
        with self.on_device():
            return self._cupy.array(x)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, stream: Stream) -> Array:
        """Allocate an array on the GPU in memory whose pending uses are on ``stream`` alone."""
        with self.on_device(), stream:
            return self._cupy.empty(shape, dtype=dtype)

    def pinned(self, nbytes: int, *copied_by: Stream) -> np.ndarray:
        """Allocate pinned host memory for asynchronous copies, shape ``(nbytes,)``, dtype uint8.

        Args:
            nbytes: the size in bytes.
            copied_by: streams that may still copy the memory after its release. CuPy's pool gets it back when they are
                idle.
        """
        with self.on_device():
            _give_back_forgotten()
        with self.on_device():  # again: the line above may have made another GPU current
            memory = self._cuda.alloc_pinned_memory(nbytes)
        buffer = np.frombuffer(memory, np.uint8, nbytes)
        if copied_by:
            weakref.finalize(buffer, _forgotten.append, (self, copied_by, memory)).atexit = False
        return buffer

    def copy_async(self, target: Array, source: Array, stream: Stream) -> None:
        """Copy ``source`` to ``target`` on ``stream``: contiguous arrays of one size, on the GPU or in pinned memory.

        Raises:
            UnsupportedError: the arrays are not contiguous, or differ in size.
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
        """Record ``event`` behind all work that is on ``stream`` now."""
        with self.on_device():
            self._runtime.eventRecord(event.ptr, stream.ptr)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let later work of ``stream`` wait for the last `record` of ``event`` before this call."""
        with self.on_device():
            self._runtime.streamWaitEvent(stream.ptr, event.ptr)

    def wait_events(self, stream: Stream, events: Iterable[Event]) -> None:
        """Call `wait_event` for each of ``events``."""
        for event in events:
            self.wait_event(stream, event)

    def query(self, event: Event) -> bool:
        """Return whether ``event`` has passed; never block."""
        with self.on_device():
            return self._is_done(self._runtime.eventQuery(event.ptr))

    def is_idle(self, stream: Stream) -> bool:
        """Return whether all work of ``stream`` is complete; never block."""
        with self.on_device():
            return self._is_done(self._runtime.streamQuery(stream.ptr))

    def _is_done(self, status: int) -> bool:
        if status in (_DONE, _NOT_READY):
            return status == _DONE
        raise DeviceError("wait for a GPU", where=self.device, got=str(self._runtime.CUDARuntimeError(status)))

    def synchronize(self, awaited: Stream | Event) -> None:
        """Block until an event has passed, or all work of a stream is complete."""
        with self.on_device():
            awaited.synchronize()

    def follow(self, stream: Stream, before: Stream | None = None) -> None:
        """Let later work of ``stream`` wait for the work that is on ``before``, or on `current`, now."""
        event = self.event()
        self.record(event, self.current() if before is None else before)
        self.wait_event(stream, event)


def _give_back_forgotten() -> None:
    """Free pinned memory that is no longer copied; may leave another GPU current."""
    for _ in range(len(_forgotten)):
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            streams, copied_by, _memory = released = _forgotten.popleft()
            if not all(map(streams.is_idle, copied_by)):
                _forgotten.append(released)


def _address(x: Array) -> int:
    return int(x.ctypes.data if is_host(x) else x.data.ptr)
