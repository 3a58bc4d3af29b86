"""Floor 0: devices, real ones and virtual ones in host memory. Imports: arrays, errors, permissions."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import Array, array_namespace, from_host, has_namespace, is_cupy, is_host, to_host
from .errors import ConfigError, DeviceError
from .permissions import make_private_folder, who_else_may_write

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
    found = tuple(devices) if isinstance(devices, Sequence) else ()
    if not found or not all(isinstance(each, Device) for each in found):
        expected = "a list of devices, such as [cpu(0), cpu(1)]"
        raise ConfigError(operation, where="devices", expected=expected, got=repr(devices))
    return found


def lie_together(x: Array, y: Array) -> bool:
    """Whether both are on the host, or on the same GPU."""
    if is_host(x) or is_host(y):
        return is_host(x) and is_host(y)
    return array_namespace(x) is array_namespace(y) and Device.of(x) == Device.of(y)


def brought(x: Array, like: Array) -> Array:
    """``x`` where ``like`` is: itself, if it is there, else a copy."""
    if lie_together(x, like):
        return x
    if is_host(like):
        return to_host(x)
    if is_cupy(x) and is_cupy(like):
        return Device.of(like).put(x)
    return from_host(to_host(x), like)


def brought_values(x: Any, like: Array) -> Any:
    """``x`` for ``like`` to be given: arrays are `brought`, to a GPU also what NumPy takes for one; numbers stay."""
    if has_namespace(x):
        return brought(x, like)
    if is_host(like) or isinstance(x, int | float | np.generic):
        return x
    return brought(np.asarray(x), like)


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
    writer = None
    with contextlib.suppress(OSError):  # CuPy itself says what it cannot write
        make_private_folder(Path(folder))
        writer = who_else_may_write(folder)
    if writer is not None:
        raise DeviceError(
            "device", where=f"CuPy's kernel cache {folder}", expected="a folder that this user alone may write",
            got=writer, remedy="set CUPY_CACHE_DIR to a folder of yours, or CUPY_CACHE_IN_MEMORY=1",
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
