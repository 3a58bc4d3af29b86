"""CuPy without a GPU: the stand-in namespace under its name, and a RawModule that compiles CUDA for this processor.

``instead()`` puts it in `sys.modules`; kernels then run as `cuda_on_host.h` says, with CuPy's rules for arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcdp.kernels import cuda
from hpcdp.kernels.cuda import cudnn_conv

HERE = Path(__file__).parent
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(([^)]*)\)')
_ONE_AT_A_TIME = threading.Lock()
"""Ranks may be threads, and a kernel's fibers are those of the process."""
_NBYTES = {"Index": 8, "float": 4, "double": 8, "int": 4, "bool": 1, "Word": 4, "long long": 8}


def give(run: Callable[[], None], args: tuple[Any, ...] = ()) -> None:
    """Give a kernel to the current stream; its arrays are among ``args``."""
    run()


class OnlyDevice(contextlib.nullcontext[None]):
    """The GPU of all arrays."""

    id = 0


class RawModule:
    """CUDA C++ compiled for the host; ``options`` are those of NVRTC."""

    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        assert "--fmad=false" in options, "a host compiler must not contract either"
        with _ONE_AT_A_TIME:
            self._library, self._parameters = _compiled(code)

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(name, getattr(self._library, f"launch_{name}"), self._parameters[name])


class RawKernel:
    """Called as CuPy's: ``kernel(grid, block, args)``."""

    def __init__(self, name: str, launch: Any, parameters: list[str]) -> None:
        self._name, self._launch, self._parameters = name, launch, parameters
        launch.restype = ctypes.c_char_p

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        assert len(args) == len(self._parameters), f"{self._name}: {len(args)} arguments for {self._parameters}"
        kept = [_as_passed(arg, parameter) for arg, parameter in zip(args, self._parameters, strict=True)]
        addresses = (ctypes.c_void_p * len(kept))(*(each.ctypes.data for each in kept))

        def run() -> None:
            with _ONE_AT_A_TIME:
                wrong = self._launch(addresses, len(kept), grid[0], block[0])
            if wrong:
                raise RuntimeError(f"{self._name}: {wrong.decode()}")

        give(run, args)


def _as_passed(arg: Any, parameter: str) -> np.ndarray:
    """The bytes that a launch takes of an argument. CUDA does not look whether they are those that a kernel expects;
    here a pointer for a number, or a number of another size, is an error."""
    if "*" in parameter:
        if isinstance(arg, np.uintp) and not arg:
            return np.array([arg])
        assert type(arg).__module__ == "cupy", f"{parameter} is given {arg!r}"
        return np.array([arg._held.ctypes.data], np.uint64)
    if isinstance(arg, np.ndarray):
        assert arg.size == 1, "CuPy takes a structure as an array of one element"
        return arg
    assert isinstance(arg, np.generic), f"{parameter} is given {arg!r}, whose size nobody has said"
    kind = parameter.removeprefix("const ").rpartition(" ")[0]
    assert arg.nbytes == _NBYTES[kind], f"{parameter} is given {arg.nbytes} bytes"
    assert (arg.dtype.kind == "f") == (kind in ("float", "double")), f"{parameter} is given {arg.dtype}"
    return np.array([arg])


@functools.cache
def _folder() -> Path:
    """The folder of libraries for all processes and later runs; `make clean` removes it."""
    folder = HERE.parents[1] / "build" / "cuda-on-host"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _compiler() -> str:
    """Other inputs of the compilation, beside the source."""
    return _run(["g++", "-dumpfullversion", "-dumpmachine"], "") + (HERE / "cuda_on_host.h").read_text()


@functools.cache
def _compiled(code: str) -> tuple[ctypes.CDLL, dict[str, list[str]]]:
    """The library of a source, and its kernels' parameters."""
    preprocessed = _run(["g++", "-E", "-P", "-x", "c++", "-"], code)
    parameters = {
        name: [each.strip() for each in given.split(",")] for name, given in _KERNEL.findall(_one_line(preprocessed))
    }
    launchers = "".join(
        f'extern "C" const char* launch_{name}(void** args, unsigned count, unsigned grid, unsigned block)'
        f" {{ return launch_on_host({name}, args, count, grid, block); }}\n"
        for name in parameters
    )
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fPIC", "-shared"]
    options += ["-U_FORTIFY_SOURCE"]  # which takes a jump to another stack for a fault
    options += ["-fsanitize=alignment", "-fno-sanitize-recover=alignment", "-include", str(HERE / "cuda_on_host.h")]
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        options += ["-fsanitize=address", "--param=asan-stack=0"]  # fibers have stacks that it does not know
    name = hashlib.blake2b("\n".join((_compiler(), *options, code)).encode(), digest_size=8).hexdigest()
    library = _folder() / f"{name}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = library.with_suffix(".part")  # nobody takes what a killed process has left half written
            _run(["g++", *options, "-x", "c++", "-", "-o", made], code + "\n" + launchers)
            made.rename(library)
    return ctypes.CDLL(str(library)), parameters


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("( ", "(").replace(" )", ")")


def _run(command: list[Any], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def instead() -> Iterator[ModuleType]:
    """Takes the place of CuPy in `sys.modules`, where what was there comes back; tests skip where nothing compiles.

    There is no cuDNN, which would be given addresses of the host.
    """
    if not shutil.which("g++"):
        pytest.skip("needs g++, which compiles CUDA kernels for this processor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        patch.setitem(sys.modules, "cudnn", None)
        _forget_what_is_there()
        yield _install()
    _forget_what_is_there()


def _forget_what_is_there() -> None:
    for cached in (cuda._kernel, cuda._module, cudnn_conv.is_there):
        cached.cache_clear()


def _install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cupy", HERE.parent / "standin.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["cupy"] = module
    spec.loader.exec_module(module)
    del module.Array.__array_namespace__  # type: ignore[attr-defined]  # CuPy's arrays do not name theirs
    module.RawModule = RawModule  # type: ignore[attr-defined]
    module.Array.device = OnlyDevice()  # type: ignore[attr-defined]
    module.Array.set = lambda x, host: x.__setitem__(..., module.asarray(host))  # type: ignore[attr-defined]
    module.Array.data = property(lambda x: SimpleNamespace(ptr=x._held.ctypes.data))  # type: ignore[attr-defined]
    return module
