"""Floor 0: compute kernels. Imports: arrays, errors.

``reference`` is the specification, in the functions that NumPy and CuPy share; the other modules are Numba versions for
NumPy arrays. Those are compiled when they are imported, so they are reached through `load`, which lets one process of
a node compile while the others wait and then read the cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from ..errors import ConfigError

_loaded: dict[str, ModuleType] = {}
_loading = threading.Lock()


def cache_dir() -> Path:
    """The folder of compiled kernels: ``HPCDP_CACHE_DIR``, else ``$XDG_CACHE_HOME/hpcdp``, else ``~/.cache/hpcdp``.

    A folder that cannot be written is replaced by a private temporary one of this user.
    """
    chosen = os.environ.get("HPCDP_CACHE_DIR")
    folder = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcdp"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    fallback = Path(tempfile.gettempdir()) / f"hpcdp-{os.getuid()}"
    fallback.mkdir(exist_ok=True, mode=0o700)
    if fallback.stat().st_uid != os.getuid():  # somebody else's folder could feed us their machine code
        raise ConfigError(
            "kernel cache", where=fallback, expected="a folder of this user", remedy="set HPCDP_CACHE_DIR to one"
        )
    return fallback


def any_compiled() -> bool:
    """Whether the cache of this machine holds compiled kernels already; the first compilation takes half a minute."""
    return next(_compiled_dir().rglob("*.nbc"), None) is not None


def _compiled_dir() -> Path:
    """Where machine code of just these sources is: Numba looks at a kernel's own file only, not at those it imports."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    stamps = [(source.name, source.stat().st_size, source.stat().st_mtime_ns) for source in sources]
    return cache_dir() / "numba" / hashlib.blake2b(repr(stamps).encode(), digest_size=6).hexdigest()


@contextlib.contextmanager
def _one_process_compiles(folder: Path) -> Iterator[None]:
    with open(folder / "compile.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def loading() -> bool:
    """Whether a thread of this process is loading kernels, which may mean to wait for another that compiles them."""
    return _loading.locked()


def load(name: str) -> ModuleType:
    """The Numba kernels of ``hpcdp/kernels/<name>.py``, compiled at most once a node.

    May be called by any thread of any rank, alone. The first call in a process takes 0.3 s (Numba's import), the first
    on a machine also the compilation.

    Raises:
        ConfigError: machine code cannot be written where it is kept.
    """
    module = _loaded.get(name)
    if module is None:
        with _loading:
            if name not in _loaded:
                try:
                    _loaded[name] = _imported(name)
                except OSError as error:
                    raise ConfigError(
                        "kernel cache", where=cache_dir(), expected="a folder with room that can be written",
                        got=error.strerror, remedy="set HPCDP_CACHE_DIR to one",
                    ) from error  # fmt: skip
            module = _loaded[name]
    return module


def _imported(name: str) -> ModuleType:
    from numba.core import config

    folder = _compiled_dir()
    compiled = folder / f"{name}.compiled"
    user_cache_dir = config.CACHE_DIR
    config.CACHE_DIR = user_cache_dir or str(folder)
    try:
        if compiled.exists():  # ranks that only read need not wait for each other
            return importlib.import_module(f"{__name__}.{name}")
        with _one_process_compiles(cache_dir()):
            module = importlib.import_module(f"{__name__}.{name}")
            folder.mkdir(parents=True, exist_ok=True)
            compiled.touch()
            return module
    finally:
        config.CACHE_DIR = user_cache_dir


def compile_once(call: Callable[[], object]) -> None:
    """Let one process of the machine after another make ``call``: the first compiles, the others read what it has kept.

    For kernels that are compiled for a dtype when it is first met.
    """
    with _loading, _one_process_compiles(cache_dir()):
        call()
