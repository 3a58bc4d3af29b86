"""Compute kernels, in three families, and the choice of the module for an array.

The families are `networks` (elementwise operations, normalization, sequences), `convolution` (and pooling) and
`gradients` (sums, norms, updates, compression).

- `reference` has the plain implementations, in operations that NumPy and CuPy share. They are the specification.
- `cuda.kernels` is for CuPy arrays, with CUDA sources in the folder ``kernels`` of `hpcdp.core.files`.
- The module here that is named as a family has the Numba kernels for NumPy arrays, see `load`. They are compiled for
  the types of their arguments at the first call, by one process of a node, while the others wait and then read the
  cache (`jit`).

Outside of the families: `shm_exchange`, `shm_blocks`, `shm_repeated` and `shm_messages` for memory shared by ranks,
`copies`, `matmul` for BLAS, `empty`, which reuses memory for activations, gradients and received data, and `jit`, which
compiles all Numba kernels.

A large array that NumPy allocates anew in every step costs a page fault for every 4 KiB, more than most operations on
it. `empty` reuses a block whose reference count shows that no array uses it. Arrays on a tape, or kept by the caller,
are therefore never overwritten. Each thread has its own blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np

from ..core.arrays import Array, is_cupy, is_host
from ..core.environment import speaks
from ..core.files import cache_dir, make_private_folder, refuse_what_others_may_write, warn_of_cache_once
from ..errors import to_stderr
from . import reference

_loaded: dict[str, ModuleType] = {}
_loading = threading.Lock()
_turn = threading.RLock()
_compiling = 0
_reported: set[str] = set()
_all_kept = True
_queues = True
_ROOM_NBYTES = 4 << 20
"""Free disk space required for the cache; the code of one module is smaller."""
_NAP_S, _PATIENCE_S, _LIMIT_S = 0.05, 5.0, 120.0
"""Seconds of a wait for another compiling process: between two polls, until a message, and until giving up."""


def _say_once(text: str) -> None:
    if text not in _reported and speaks():
        to_stderr(f"hpcdp: {text}")
    _reported.add(text)


def not_taken(got: str) -> None:
    """Report that cached machine code is recompiled, because others may have chosen it; ``got`` names its file."""
    _say_once(f"kernel cache: expected files that this user alone may write, got {got}; compiling anew")


def not_kept(folder: Path, error: Exception) -> None:
    """Report that machine code could not be written, so that every process of every job compiles it."""
    global _all_kept
    _all_kept = False
    reason = getattr(error, "strerror", None) or error
    warn_of_cache_once(f"kernel cache [{folder}]: {reason}; kernels are compiled by every process of every job")


def compiled_dir() -> Path:
    """Return the folder of the machine code of exactly these sources.

    Numba checks only a kernel's own file, not the modules that it imports. The folder's name is a hash of the contents,
    not of the location, so all clones and environments with the same kernels share it.
    """
    folder = Path(__file__).parent
    patterns = ("*.py", "convolution/*.py")  # kernels use constants of the reference
    sources = [source for pattern in patterns for source in sorted(folder.glob(pattern))]
    stamps = [(source, source.stat().st_size, source.stat().st_mtime_ns) for source in sources]
    compiled = cache_dir() / "numba" / _digest(*stamps)
    with contextlib.suppress(OSError):  # it may not exist yet
        refuse_what_others_may_write("kernel cache", compiled, compiled, "remove it")
    return compiled


@lru_cache(maxsize=1)
def _digest(*stamps: tuple[Path, int, int]) -> str:
    """Return the hash of the sources and the target; recomputed when a stamp changes."""
    from .jit import target

    digest = hashlib.blake2b(target().encode(), digest_size=6)
    for source, _, _ in stamps:
        digest.update(f"{source.parent.name}/{source.name}".encode() + source.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def one_process_compiles(is_kept: Callable[[], bool]) -> Iterator[None]:
    """Run the block in one process at a time, while other processes wait; reentrant, for any thread.

    ``is_kept()`` returns whether another process has compiled the kernel, which ends the wait.
    """
    global _compiling
    with _turn, contextlib.ExitStack() as held:
        _compiling += 1
        held.callback(_no_longer_compiles)
        if _compiling == 1:  # not again for a kernel that another one calls
            _take_turn(held, is_kept)
        yield


def _no_longer_compiles() -> None:
    global _compiling
    _compiling -= 1


def _take_turn(held: contextlib.ExitStack, is_kept: Callable[[], bool]) -> None:
    folder = compiled_dir()
    if not _all_kept or not _has_room(folder):  # then every process compiles
        return
    _say_once("compiling kernels that are new on this machine, for up to two minutes")
    try:
        lock = held.enter_context((folder / "compile.lock").open("a"))
        if _has_turn(lock, is_kept):  # unlock explicitly: a process forked meanwhile would keep the lock
            held.callback(fcntl.flock, lock, fcntl.LOCK_UN)
    except OSError as error:
        not_kept(folder, error)


def _has_turn(lock: IO[str], is_kept: Callable[[], bool]) -> bool:
    """Wait for the lock, until another process has compiled the kernel, or until the time limit."""
    global _queues
    began = time.monotonic()
    while _queues:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        if is_kept():
            return False
        waited = time.monotonic() - began
        if waited > _PATIENCE_S:
            _say_once("waiting for another rank or job, which is compiling kernels")
        _queues = waited < _LIMIT_S  # do not wait again, for other modules, for a stuck process
        time.sleep(_NAP_S)
    return False


@lru_cache(maxsize=1)
def _has_room(folder: Path) -> bool:
    """Return whether machine code can be cached there; if not, ranks must not wait for each other's compilations."""
    try:
        make_private_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_NBYTES))
    except OSError as error:
        not_kept(folder, error)
        return False
    return True


def loading() -> bool:
    """Return whether a thread of this process is loading or compiling kernels, or waiting for another process to."""
    return _loading.locked() or _compiling > 0


def load(name: str) -> ModuleType:
    """Return the Numba kernels of ``hpcdp.kernels.<name>``, compiled at most once per node and argument types.

    Any thread of any rank may call, alone. The first call in a process takes 0.3 s (Numba's import), that of a kernel a
    few milliseconds, or its compilation if it is new on the machine. Rank 0 reports on standard error when it first
    compiles or waits, and after 5 s of waiting for another process. A cached kernel is read silently. After 120 s a
    waiting process compiles for itself.

    If machine code cannot be cached, every process compiles for itself, after one warning on rank 0.

    Raises:
        ConfigError: see `cache_dir`.
    """
    module = _loaded.get(name)
    if module is None:
        with _loading:
            if name not in _loaded:
                compiled_dir()  # raises here if the folder cannot be used
                _loaded[name] = importlib.import_module(f"{__name__}.{name}")
            module = _loaded[name]
    return module


def kernels_for(family: str, x: Array, plain_on_host: bool = False) -> ModuleType:
    """Return the module of a family of kernels for arrays like ``x``.

    That is Numba's (`load`) for NumPy arrays and CUDA's for CuPy arrays, with convolutions by cuDNN if it is installed
    (`cuda.cudnn_conv`). For other arrays it is the reference.

    Args:
        family: one of the three families of kernels.
        x: an array for which a function of the module will be called.
        plain_on_host: return the reference for NumPy arrays, too. For functions without a Numba kernel because NumPy is
            as fast; a program that calls only these does not load Numba.

    Raises:
        ConfigError: as `load`.
    """
    if is_host(x):
        return reference if plain_on_host else load(family)
    if not is_cupy(x):
        return reference
    return _for_cuda("cudnn_conv" if family == "convolution" and _for_cuda("cudnn_conv").is_there() else "kernels")


@cache
def _for_cuda(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.cuda.{name}")


_KEPT_FROM = 64 * 1024
"""Smaller arrays are allocated by malloc, from its free lists."""
_ALIGNMENT = 64
_IDLE_REQUESTS = 512
"""Blocks unused for this number of requests are freed when a new block is needed."""


class _Block:
    __slots__ = ("memory", "offset", "used_at")

    def __init__(self, nbytes: int, now: int) -> None:
        self.memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        self.offset = -self.memory.ctypes.data % _ALIGNMENT
        self.used_at = now

    def references(self) -> int:
        return sys.getrefcount(self.memory)


_UNUSED = _Block(1, 0).references()


class _ThreadBlocks(threading.local):
    """This thread's blocks by size."""

    def __init__(self) -> None:
        self.of_size: dict[int, list[_Block]] = {}
        self.requests = 0

    def take(self, nbytes: int) -> _Block:
        self.requests = now = self.requests + 1
        for block in self.of_size.get(nbytes, ()):
            if block.references() == _UNUSED:
                block.used_at = now
                return block
        self._give_back_idle(now - _IDLE_REQUESTS)
        block = _Block(nbytes, now)
        self.of_size.setdefault(nbytes, []).append(block)
        return block

    def _give_back_idle(self, before: int) -> None:
        for nbytes, blocks in list(self.of_size.items()):
            in_use = [block for block in blocks if block.used_at > before or block.references() > _UNUSED]
            if in_use:
                self.of_size[nbytes] = in_use
            else:
                del self.of_size[nbytes]


_blocks = _ThreadBlocks()


def empty(shape: tuple[int, ...], dtype: Any, xp: Any = np) -> Array:
    """Return an uninitialized C-contiguous array of namespace ``xp``, on the host in reused memory.

    In other namespaces this is ``xp.empty``, because devices have memory pools of their own.
    """
    if xp is not np:
        return xp.empty(shape, dtype=dtype)
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < _KEPT_FROM:
        return np.empty(shape, dtype)
    block = _blocks.take(nbytes)
    return np.ndarray(shape, dtype, block.memory, block.offset)
