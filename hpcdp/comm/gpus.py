"""The GPUs that a process may see, and which of them a rank computes on.

CUDA's driver is asked itself, so that CuPy, which takes a second, is imported by nobody who has no arrays of it. The
driver numbers the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, and Slurm sets that for each task it binds; so a rank that
sees one GPU has number 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..devices import Device, cpu, cuda_release, gpu
from ..errors import DeviceError

LIBRARY = "libcuda.so.1"
"""Of CUDA's driver."""
MANAGEMENT_LIBRARY = "libnvidia-ml.so.1"
"""NVML, which comes with the driver."""
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
"""Where the kernel says which driver it has."""
_TEXT_NBYTES, _UUID_NBYTES = 256, 16


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may see."""

    index: int
    """Its number in this process."""
    name: str
    bus_id: str
    """Where it is on the PCI bus, e.g. ``0000:3b:00.0``; the same for all processes of a machine."""
    uuid: str
    """Of the GPU, or of the instance where it is divided into some (MIG): those have one place on the bus."""


class Driver:
    """CUDA's driver.

    Raises:
        DeviceError: there is none, or it cannot start; it says why.
    """

    def __init__(self, library: str) -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise DeviceError("CUDA's driver", expected=library, got=str(error)) from error
        self._call("cuInit", 0)

    def _call(self, function: str, *args: Any) -> None:
        status = getattr(self._cuda, function)(*args)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise DeviceError("CUDA's driver", where=function, got=f"error {status}, {(text.value or b'').decode()}")

    def version(self) -> str:
        """The newest CUDA that it can run, e.g. ``12.8``."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return cuda_release(number.value)

    def gpus(self) -> tuple[Gpu, ...]:
        """Those that this process may see, by number."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return tuple(self._gpu(index) for index in range(count.value))

    def _gpu(self, index: int) -> Gpu:
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * _UUID_NBYTES)()
        name, bus_id = (ctypes.create_string_buffer(_TEXT_NBYTES) for _ in range(2))
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDeviceGetName", name, _TEXT_NBYTES, device)
        self._call("cuDeviceGetPCIBusId", bus_id, _TEXT_NBYTES, device)
        # The first version names the GPU, not the instance.
        of_instance = "cuDeviceGetUuid_v2" if hasattr(self._cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        self._call(of_instance, uuid, device)
        return Gpu(index, name.value.decode(), bus_id.value.decode().lower(), bytes(uuid).hex())


def driver_release() -> str:
    """That of NVIDIA's driver, e.g. ``580.65.06``: NVML says it, or the kernel; ``unknown`` where neither does."""
    release = ctypes.create_string_buffer(_TEXT_NBYTES)
    try:
        nvml = ctypes.CDLL(MANAGEMENT_LIBRARY)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(release, _TEXT_NBYTES) == 0:
            return release.value.decode()
    except (OSError, AttributeError):
        pass  # a container may have the driver without it
    with contextlib.suppress(OSError):
        if found := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", KERNEL_MODULE.read_text()):
            return found[1]
    return "unknown"


@cache
def visible() -> tuple[Gpu, ...]:
    """The GPUs that this process may see; none where CUDA's driver cannot be asked."""
    try:
        return Driver(LIBRARY).gpus()
    except DeviceError:
        return ()


def device_of(place: int) -> Device:
    """The device of the rank of this number among those of its machine: a GPU that it sees, each in turn.

    The CPU where there is none, or no CuPy.
    """
    found = visible() if importlib.util.find_spec("cupy") is not None else ()
    return gpu(found[place % len(found)].index) if found else cpu()
