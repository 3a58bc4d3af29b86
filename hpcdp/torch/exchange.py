"""Tensors and arrays over the same memory: NumPy's on the host, CuPy's on a GPU, by DLPack and without a copy.

What is summed on GPUs is given to CuPy's current stream, what torch computes to torch's. `on_torchs_stream` makes them
the same, so that nobody has to wait, and what comes later on either finds what came before on the other.

Source: the Python specification of DLPack, and CUDA's stream protocol, by which CuPy takes a stream of others.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from ..arrays import Array, is_host
from ..devices import Device, gpu
from ..errors import ConfigError
from ..streams import Streams


def gpu_of(tensor: torch.Tensor) -> Device | None:
    """The GPU that ``tensor`` is on, None on the host."""
    return gpu(tensor.device.index) if tensor.device.type == "cuda" else None


def require_cupy(operation: str, where: str, device: Device) -> None:
    """Raises `ConfigError` where there is no CuPy, by which gradients on GPUs are summed."""
    try:
        importlib.import_module("cupy")
    except ImportError as error:
        raise ConfigError(
            operation, where=where, expected=f"CuPy, for what is on {device}", got="no module named cupy",
            remedy="pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]', as the CUDA of your PyTorch",
        ) from error  # fmt: skip


def as_array(tensor: torch.Tensor) -> Array:
    """An array over the memory of ``tensor``, which needs no gradient."""
    device = gpu_of(tensor)
    if device is None:
        return tensor.numpy()
    with on_torchs_stream(device):  # else CuPy would let its own stream wait for torch's
        return importlib.import_module("cupy").from_dlpack(tensor)


def as_tensor(array: Array) -> torch.Tensor:
    """A tensor over the memory of ``array``."""
    if is_host(array):
        return torch.from_numpy(array)
    with on_torchs_stream(Device.of(array)):
        return torch.from_dlpack(array)


def give_back_cache(device: Device | None) -> None:
    """Let CUDA have what torch keeps unused for its next tensors; nobody else would ask torch for it."""
    if device is not None:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def on_torchs_stream(device: Device | None) -> Iterator[None]:
    """Within it CuPy gives its work on ``device`` to the stream that is torch's there, in this thread.

    Args:
        device: None: the host, where there is nothing to do.
    """
    if device is None:
        yield
        return
    stream = _Protocol(torch.cuda.current_stream(device.index))
    from_external = importlib.import_module("cupy.cuda").Stream.from_external
    with torch.cuda.device(device.index), Streams(device).on_device(), from_external(stream):
        yield


class _Protocol:
    """A stream of torch's as CUDA's stream protocol has it, which PyTorch follows only of late."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self._stream.cuda_stream)
