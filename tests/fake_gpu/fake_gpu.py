"""CuPy itself on a machine without a GPU: its calls are tested, the values that it computes are not.

``PYTHONPATH`` with this folder and ``FAKE_GPU`` with the path that `build` gives are all that a process needs, and the
processes that it starts: then ``import cupy`` takes CuPy as it is installed, whose calls of CUDA's runtime, cuBLAS and
NCCL go to `fake_cuda.c`. ``FAKE_GPUS`` is how many GPUs there are, 4 if it is not set.

What it proves: CuPy has what hpcdp calls, and takes the arguments; NVRTC, which is the real one, compiles the kernels
for sm_90, and they have the names by which they are launched; events, streams and kernels are of the right devices;
what cannot be captured or shared is not; hpcdp goes the way that is meant, in an order of calls that ends;
and how often the host waits for the GPU (`waits`).

What it does not: **values**, for kernels, products and collectives do nothing, and what is copied to the host is zeros;
that streams wait for each other, since all is done at once (for which there is ``tests/gpu_on_host/``); what a kernel
is given (``tests/gpu_on_host/cupy_module.py``).

How: CuPy's wheel has CUDA's runtime inside of a module of its own, where no other library can take its place. But its
symbols are still there, and so the first bytes of each ``cuda...`` function become a jump to the function of that name
in `fake_cuda.c`; the same is done with cuBLAS and NCCL when they are loaded. That needs x86-64, memory which may be
written and executed, and structures with the layout that CuPy was compiled for: so all other versions of CuPy than
`WRITTEN_FOR` are refused, in one line.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import os
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

WRITTEN_FOR = "14.2."
"""Versions of CuPy that begin so; the wheels for CUDA 13, of which this has been run with 14.2.0."""
LIBRARY = "libcuda.so.1"
_JUMP = b"\x48\xb8%b\xff\xe0"  # mov rax, target; jmp rax
_READ_WRITE_EXECUTE = 7
_KEPT = {
    "cudaGetErrorName", "cudaGetErrorString", "cudaRuntimeGetVersion", "cublasGetStatusString", "ncclGetVersion",
    "ncclGetErrorString", "ncclGetLastError",
}  # fmt: skip
"""What needs no GPU, and is left as it is."""


class Unsuitable(RuntimeError):
    """This machine, or this CuPy, is not what the fake was written for; it says why in one line."""


def build(folder: Path) -> Path:
    """Compiles the driver into ``folder`` where it is not newer than its source: the file, for ``FAKE_GPU``."""
    source, library = Path(__file__).with_name("fake_cuda.c"), folder / LIBRARY
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        folder.mkdir(parents=True, exist_ok=True)
        own = library.with_suffix(f".{os.getpid()}")
        # Who opens the driver by its bare name gets what is loaded under it already, and need not find this file.
        command = ["gcc", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", own, source, "-lpthread"]
        subprocess.run(command, check=True)
        own.rename(library)
    return library


def waits() -> int:
    """How often the host of this process has waited for its GPU, or given back memory, for which CUDA waits too."""
    return int(ctypes.CDLL(os.environ["FAKE_GPU"]).fake_waits())


def detours() -> int:
    """How often this process has copied something between GPUs that do not see each other, which goes by the host."""
    return int(ctypes.CDLL(os.environ["FAKE_GPU"]).fake_detours())


class OnImport(MetaPathFinder):
    """Puts the fake under a module of CuPy when that is imported; a process without CuPy loses no time."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        put = _UNDER.get(name)
        spec = PathFinder.find_spec(name, path) if put is not None else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_put(module: ModuleType) -> None:
                execute(module)
                put(module)

            spec.loader.exec_module = execute_and_put  # type: ignore[method-assign]
        return spec


def install() -> None:
    """In this process, before CuPy is imported."""
    ctypes.CDLL(os.environ["FAKE_GPU"])  # before hpcdp and others open a driver by its name
    os.environ["CUPY_ACCELERATORS"] = ""  # CUB's module has a runtime of its own, which would look for a GPU
    sys.modules["cudnn"] = None  # type: ignore[assignment]  # it would ask the GPU what it can do
    sys.meta_path.insert(0, OnImport())


def _under_runtime(module: Any) -> None:
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise Unsuitable(f"the fake GPU needs Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    found = [each for each in importlib.metadata.distributions() if each.name.startswith("cupy-cuda")]
    versions = ", ".join(f"{each.name} {each.version}" for each in found)
    if not all(each.version.startswith(WRITTEN_FOR) for each in found):
        raise Unsuitable(f"the fake GPU was written for CuPy {WRITTEN_FOR}*, this is {versions}")
    _redirect(Path(module.__file__).name, "cuda", "fake_not_supported")


def _under_cublas(module: Any) -> None:
    _redirect("libcublas.so", "cublas", "fake_done", "--dynamic")


def _under_nccl(module: Any) -> None:
    module.get_version()  # which loads the library
    _redirect("libnccl.so", "nccl", "fake_done", "--dynamic")


_UNDER: dict[str, Callable[[Any], None]] = {
    "cupy_backends.cuda.api.runtime": _under_runtime,
    "cupy_backends.cuda.libs.cublas": _under_cublas,
    "cupy_backends.cuda.libs.nccl": _under_nccl,
}


def _redirect(name: str, prefix: str, otherwise: str, *symbols: str) -> None:
    """Has all functions that begin with ``prefix``, of the loaded library ``name``, jump to those of the fake that are
    called the same, and to ``otherwise`` where there is none. ``symbols`` tells nm which of its tables to read."""
    fake, (begin, path) = ctypes.CDLL(os.environ["FAKE_GPU"]), _loaded(name)
    table = subprocess.run(["nm", "--defined-only", *symbols, path], capture_output=True, text=True, check=True).stdout
    functions = {
        symbol.partition("@")[0]: int(offset, 16) for offset, symbol in re.findall(r"^(\w+) [tTWi] (\S+)$", table, re.M)
    }
    taken = {each: at for each, at in functions.items() if each.startswith(prefix) and each not in _KEPT}
    if not taken:
        raise Unsuitable(f"the fake GPU finds no function {prefix}... in {path}: its symbols have been removed")
    for each, offset in taken.items():
        _jump(begin + offset, getattr(fake, each, None) or fake[otherwise])


def _loaded(name: str) -> tuple[int, str]:
    """Where the library whose file's name begins so is in this process's memory, and its path."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return int(line.partition("-")[0], 16), f"/{path}"
    raise Unsuitable(f"the fake GPU finds no {name} that CuPy has loaded")


def _jump(at: int, function: Any) -> None:
    """Overwrites the first 12 bytes: functions begin at multiples of 16, so the next one stays as it is."""
    code = _JUMP % struct.pack("<Q", ctypes.cast(function, ctypes.c_void_p).value)
    first = at - at % mmap.PAGESIZE
    size = ctypes.c_size_t(at + len(code) - first)
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(first), size, _READ_WRITE_EXECUTE):
        raise Unsuitable("the fake GPU cannot change code in memory: mprotect refuses it here")
    ctypes.memmove(at, code, len(code))
