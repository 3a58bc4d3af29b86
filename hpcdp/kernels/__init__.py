"""Compute kernels.

There are seven families: `elementwise`, `convolution`, `normalisation`, `sequences`, `reduce`, `update` and `compress`.
`reference` has the plain implementations, in the functions that NumPy and CuPy share: what they compute is the
specification. `cuda` is for CuPy arrays, with CUDA sources in the folder ``kernels`` of `hpcdp.core.files`. In both,
`networks` holds the first four families and `gradients` the other three. ``X.py`` here has the Numba kernels of the
family X for NumPy arrays, reached through `load`. They are compiled for the types of their arguments when they are
first called with them, by one process of a node while the others wait and then read the cache (`jit`). `kernels_for`
chooses by the array.

Not of a family: `shm_allreduce` and `pushpull` for memory shared by ranks, `products` by BLAS, `buffers`; `jit` for
all Numba kernels.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import IO

from ..core.arrays import Array, is_cupy, is_host
from ..core.environment import speaks
from ..core.files import cache_dir, make_private_folder, refuse_what_others_may_write, warn_of_cache_once
from ..errors import to_stderr

_GROUPS = {
    **dict.fromkeys(("elementwise", "convolution", "normalisation", "sequences"), "networks"),
    **dict.fromkeys(("reduce", "update", "compress"), "gradients"),
}
"""The module of `reference`, and of `cuda`, that has the functions of each family."""
_loaded: dict[str, ModuleType] = {}
_loading = threading.Lock()
_turn = threading.RLock()
_compiling = 0
_said: set[str] = set()
_all_kept = True
_queues = True
_ROOM_NBYTES = 4 << 20
"""That a disk must have left to be tried: the code of one module takes less."""
_NAP_S, _PATIENCE_S, _LIMIT_S = 0.05, 5.0, 120.0
"""Of a wait for another process that compiles: between two looks, until it is said, and until it is given up."""


def _say_once(text: str) -> None:
    if text not in _said and speaks():
        to_stderr(f"hpcdp: {text}")
    _said.add(text)


def not_taken(writer: str) -> None:
    """Say that kept machine code is compiled anew, because of a ``writer`` who may change the file."""
    _say_once(f"kernel cache: expected files that this user alone may write, got {writer}; compiling anew")


def not_kept(folder: Path, error: Exception) -> None:
    """Machine code could not be written: training goes on, and the next job compiles again."""
    global _all_kept
    _all_kept = False
    reason = getattr(error, "strerror", None) or error
    warn_of_cache_once(f"kernel cache [{folder}]: {reason}; kernels are compiled by every process of every job")


def compiled_dir() -> Path:
    """Where machine code of just these sources is: Numba looks at a kernel's own file only, not at those it imports.

    By what they say and not by where they are: all clones and environments with the same kernels compile them once.
    """
    folder = Path(__file__).parent
    patterns = ("*.py", "convolution/*.py", "reference/*.py")  # kernels have numbers of the last ones
    sources = [source for pattern in patterns for source in sorted(folder.glob(pattern))]
    stamps = [(source, source.stat().st_size, source.stat().st_mtime_ns) for source in sources]
    found = cache_dir() / "numba" / _digest(*stamps)
    with contextlib.suppress(OSError):  # it is not made yet
        refuse_what_others_may_write("kernel cache", found, found, "remove it")
    return found


@lru_cache(maxsize=1)
def _digest(*stamps: tuple[Path, int, int]) -> str:
    """Of the sources and what else machine code depends on; they are read again when a stamp has changed."""
    from .jit import target

    digest = hashlib.blake2b(target().encode(), digest_size=6)
    for source, _, _ in stamps:
        digest.update(f"{source.parent.name}/{source.name}".encode() + source.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def one_process_compiles(is_kept: Callable[[], bool]) -> Iterator[None]:
    """Compile meanwhile: what another process has not, for whose end this one waits. Any thread may call, also again.

    ``is_kept()`` tells whether another process has compiled it, so that there is nothing left to wait for.
    """
    global _compiling
    with _turn, contextlib.ExitStack() as held:
        _compiling += 1
        held.callback(_no_longer_compiles)
        if _compiling == 1:  # not for a kernel that calls another one
            _take_turn(held, is_kept)
        yield


def _no_longer_compiles() -> None:
    global _compiling
    _compiling -= 1


def _take_turn(held: contextlib.ExitStack, is_kept: Callable[[], bool]) -> None:
    folder = compiled_dir()
    if not _all_kept or not _has_room(folder):  # every process compiles, then
        return
    _say_once(
        "compiling kernels that are new on this machine, as they are needed; set HPCDP_CACHE_DIR to keep them elsewhere"
    )
    try:
        lock = held.enter_context((folder / "compile.lock").open("a"))
        if _has_turn(lock, folder, is_kept):  # closed, it stays locked while a process has it that was forked meanwhile
            held.callback(fcntl.flock, lock, fcntl.LOCK_UN)
    except OSError as error:
        not_kept(folder, error)


def _has_turn(lock: IO[str], folder: Path, is_kept: Callable[[], bool]) -> bool:
    """Wait for it, or until another process has compiled what is wanted, or for too long."""
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
            _say_once(f"another process is compiling kernels ({folder}); waiting")
        _queues = waited < _LIMIT_S  # one that is stuck is not waited for again, for each of the other modules
        time.sleep(_NAP_S)
    return False


@lru_cache(maxsize=1)
def _has_room(folder: Path) -> bool:
    """Whether machine code can be kept there; else ranks that wait for each other would compile one by one."""
    try:
        make_private_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_NBYTES))
    except OSError as error:
        not_kept(folder, error)
        return False
    return True


def loading() -> bool:
    """Whether a thread of this process is loading kernels, or compiling them, or waiting for another that does."""
    return _loading.locked() or _compiling > 0


def load(name: str) -> ModuleType:
    """The Numba kernels of ``hpcdp.kernels.<name>``, each compiled at most once a node for its arguments' types.

    May be called by any thread of any rank, alone. The first call in a process takes 0.3 s (Numba's import), that of a
    kernel a few milliseconds, and on a machine where it is new its compilation, by this process or another. Rank 0 says
    on standard error when it first compiles or waits, and after 5 s that it waits for another process; a kernel that
    others have compiled before it asks is read without a word. After 120 s a process that waits compiles for itself.

    Where machine code cannot be kept, every process compiles for itself, after one warning on rank 0.

    Raises:
        ConfigError: see `cache_dir`.
    """
    module = _loaded.get(name)
    if module is None:
        with _loading:
            if name not in _loaded:
                compiled_dir()  # that it cannot be used is said here
                _loaded[name] = importlib.import_module(f"{__name__}.{name}")
            module = _loaded[name]
    return module


def kernels_for(family: str, x: Array, plain_on_host: bool = False) -> ModuleType:
    """Return the module of a family of kernels for arrays like ``x``.

    It is Numba's (`load`) for NumPy arrays and CUDA's for CuPy arrays, with convolutions by cuDNN where that is
    installed (`cuda.cudnn_conv`). For all others it is the reference, which every namespace can do.

    Args:
        family: one of the seven families of kernels.
        x: the array that a function of the module is to be called with.
        plain_on_host: take the reference for NumPy arrays, too. It is for functions that NumPy does as fast by itself,
            which have no Numba kernels: a program that calls no others need not load Numba.

    Raises:
        ConfigError: as `load`.
    """
    if is_host(x):
        return specification(family) if plain_on_host else load(family)
    if not is_cupy(x):
        return specification(family)
    return _for_cuda("cudnn_conv" if family == "convolution" and _for_cuda("cudnn_conv").is_there() else family)


@cache
def specification(family: str) -> ModuleType:
    """Return the reference module of a family of kernels."""
    return importlib.import_module(f"{__name__}.reference.{_GROUPS[family]}")


@cache
def _for_cuda(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.cuda.{_GROUPS.get(name, name)}")
