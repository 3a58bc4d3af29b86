"""A decorator for Numba functions whose machine code is compiled, or read from a cache, when it is first needed.

Numba by itself compiles all signatures of a function when it is decorated, of which a job needs a few; it raises out of
a kernel's first call when the disk is full, and where a folder cannot be written it takes one beside the sources, in
which code is not renewed when another module of this package changes. It takes whatever a file holds: one that a power
loss has damaged raises any error, or ends the process within LLVM, and a damaged index is never replaced. What it
reads is unpickled, so files and folders that other users may change are never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import llvmlite.binding
import numba
from numba import types
from numba.core import config, sigutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, UserProvidedCacheLocator
from numba.core.registry import CPUDispatcher
from numba.core.typing import signature

from ..core.files import make_private_folder, who_else_may_write_file
from ..errors import ConfigError
from . import compiled_dir, not_kept, not_taken, one_process_compiles, refuse_what_others_may_write

_OPTIONS = {"nopython": True, "nogil": True, "error_model": "numpy", "boundscheck": None, "no_cfunc_wrapper": True}
"""The wrapper would be for callers in C, and is compiled with each version."""
_SUM_NBYTES = 16
_PACKAGE = Path(__file__).parent
_here = threading.local()
_opening = threading.Lock()


def _refuse_settings() -> None:
    """Those of Numba with which there is no kernel, or one that jumps to nowhere."""
    if config.DISABLE_JIT:
        raise ConfigError(
            "kernels", where="NUMBA_DISABLE_JIT", expected="0: they are nothing but machine code",
            got=config.DISABLE_JIT, remedy="unset it",
        )  # fmt: skip
    features = config.CPU_FEATURES
    if features is not None and platform.machine() == "x86_64" and "+f16c" not in features.split(","):
        raise ConfigError(
            "kernels", where="NUMBA_CPU_FEATURES", expected="+f16c among them, by which float16 is converted",
            got=f"{features!r} for NUMBA_CPU_NAME={config.CPU_NAME}", remedy="add it, or unset both",
        )  # fmt: skip
    if config.CACHE_DIR:
        with contextlib.suppress(OSError):  # it is not made yet
            _refuse_shared(config.CACHE_DIR)


def _refuse_shared(folder: str) -> None:
    """Refuse a folder of ``NUMBA_CACHE_DIR`` that other users may change; `OSError` where it is not there."""
    where, remedy = f"NUMBA_CACHE_DIR={config.CACHE_DIR}", "unset it, or name a folder of yours"
    refuse_what_others_may_write("kernel cache", folder, where, remedy)


_refuse_settings()


def target() -> str:
    """What machine code depends on beside its sources."""
    return f"numba {numba.__version__}, {llvmlite.binding.get_host_cpu_name()}"


class _NotKeptError(Exception):
    """A kernel that was asked for by `_read_only` would have to be compiled."""


@contextlib.contextmanager
def _read_only(reads_only: bool) -> Iterator[None]:
    """Whether this thread meanwhile raises `_NotKeptError` where it would have to compile."""
    before = getattr(_here, "reads_only", False)
    _here.reads_only = reads_only
    try:
        yield
    finally:
        _here.reads_only = before


class _Private(UserProvidedCacheLocator):
    """The folder of ``NUMBA_CACHE_DIR`` for a source, if no other user may change it."""

    def ensure_cache_path(self) -> None:
        make_private_folder(Path(self.get_cache_path()))
        self.refuse_shared()
        super().ensure_cache_path()

    def refuse_shared(self) -> None:
        _refuse_shared(self.get_cache_path())


class _OneFolder(_Private):
    """Of code whose folder is named after its sources: the same for all clones and environments that have those."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        return ""

    def get_source_stamp(self) -> Any:
        """None for a source of this package, which the folder's name covers; else what tells a changed file."""
        return None if Path(self._py_file).is_relative_to(_PACKAGE) else super().get_source_stamp()

    def refuse_shared(self) -> None:
        folder = self.get_cache_path()
        refuse_what_others_may_write("kernel cache", folder, folder, "remove it")


class _BySources(CompileResultCacheImpl):
    _locator_classes: ClassVar[list[Any]] = [_OneFolder]


class _OnlyThere(CompileResultCacheImpl):
    _locator_classes: ClassVar[list[Any]] = [_Private]


class _Summed(IndexDataCacheFile):
    """A file for each signature, which begins with a checksum of what it is for and what it holds.

    One whose checksum is wrong counts as not there: it is compiled again and replaced. Numba's index, which could be
    damaged too, or name a file whose code another process has replaced, is not needed: the file's name has the key.
    """

    def load(self, key: Any) -> Any:
        path = self._path(key)
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            writer = who_else_may_write_file(file.fileno(), path)
            if writer is not None:
                not_taken(writer)
                return None
            kept = file.read()
        data = kept[_SUM_NBYTES:]
        return pickle.loads(data) if kept[:_SUM_NBYTES] == self._sum(path, data) else None

    def save(self, key: Any, data: Any) -> None:
        path, dumped = self._path(key), self._dump(data)
        with self._open_for_write(path) as file:
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o755)
            file.write(self._sum(path, dumped) + dumped)

    def _path(self, key: Any) -> Path:
        number = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        return Path(self._data_path(self._data_name(int.from_bytes(number))))

    def _sum(self, path: Path, data: bytes) -> bytes:
        purpose = repr((path.name, self._version, self._source_stamp))
        return hashlib.blake2b(purpose.encode() + data, digest_size=_SUM_NBYTES).digest()


class _Forgiving(FunctionCache):
    """The kept machine code of one function; what cannot be read is compiled, what cannot be written is told.

    ``NUMBA_CACHE_DIR`` goes before ``folder``, which is of just these sources and this `target`.
    """

    def __init__(self, function: Any, folder: Path) -> None:
        before = config.CACHE_DIR
        self._impl_class = _OnlyThere if before else _BySources
        self._folder, self._is_open = folder, False
        config.CACHE_DIR = before or str(folder)
        try:
            make_private_folder(folder)
            super().__init__(function)
            impl = self._impl
            self._cache_file = _Summed(self._cache_path, impl.filename_base, impl.locator.get_source_stamp())
            self._is_open = True
        except (OSError, RuntimeError) as error:  # Numba has no place for it
            not_kept(folder, error)
        finally:
            config.CACHE_DIR = before

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = None
        if self._is_open:
            with contextlib.suppress(OSError):
                found = super().load_overload(sig, target_context)
        if found is None and getattr(_here, "reads_only", False):
            raise _NotKeptError
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        if not self._is_open:
            return
        try:
            super().save_overload(sig, data)
        except OSError as error:
            not_kept(self._folder, error)


class Kernel(CPUDispatcher):  # type: ignore[misc]
    """What `kernel` makes of a function."""

    def __init__(self, function: Any, options: dict[str, Any], signatures: Sequence[Any]) -> None:
        super().__init__(function, targetoptions=_OPTIONS | options)
        self._declared = [
            signature(returned, *args) for args, returned in map(sigutils.normalize_signature, signatures)
        ]
        self._kept: _Forgiving | None = None
        self._converting: dict[tuple[Any, ...], Any] = {}
        """Of types that are converted: what takes them."""

    def _compilation_chain_init_hook(self) -> None:
        """What other packages may have registered with Numba is not looked for: kernels need none of it."""

    def compile(self, sig: Any) -> Any:
        """Have it for the types ``sig``; returns what takes the arguments themselves, without a choice by their types.

        Raises:
            TypeError: it is declared for others, to which these cannot be converted.
        """
        wanted = tuple(map(types.unliteral, sigutils.normalize_signature(sig)[0]))
        if wanted in self._converting:
            return self._converting[wanted]
        known = self.overloads.get(wanted)
        if known is not None:
            return known.entry_point
        chosen = self._chosen(wanted)
        with _opening:
            if self._kept is None:
                self._cache = self._kept = _Forgiving(self.py_func, compiled_dir())
        if not self._is_kept(chosen):
            with one_process_compiles(lambda: self._is_kept(chosen)), _read_only(False):
                super().compile(chosen)
        args = tuple(sigutils.normalize_signature(chosen)[0])
        found = self.overloads[args].entry_point
        with _opening:  # of two that are alike no call would choose one: each would come here, and add one more
            if args != wanted and wanted not in self._converting:  # the next call finds it without coming here
                self._insert([each._code for each in wanted], found, False)
                self._converting[wanted] = found
        return found

    def _chosen(self, wanted: tuple[Any, ...]) -> Any:
        """Of the declared signatures that for arguments of the types ``wanted``; these themselves if none is."""
        if not self._declared:
            return wanted
        found = self.typingctx.resolve_overload(self.py_func, self._declared, wanted, {})
        if found is None:
            raise TypeError(f"No matching definition for argument type(s) {', '.join(map(str, wanted))}")
        return found

    def _is_kept(self, chosen: Any) -> bool:
        """Whether it could be read; then it is there to be called."""
        with contextlib.suppress(_NotKeptError), _read_only(True):
            super().compile(chosen)
            return True
        return False


def kernel(signatures: Any = (), **options: Any) -> Callable[[Any], Kernel]:
    """A decorator: as ``numba.njit(signatures, cache=True, nogil=True, error_model="numpy", **options)``, but each
    version is read when it is first needed, or compiled, by one process of the machine.

    Args:
        signatures: one, or a list: of the types of arguments to which others are converted where that can be. None:
            whatever types it is called with.
        options: further ones of ``numba.njit``.
    """
    several = signatures if isinstance(signatures, list | tuple) else [signatures]
    return lambda function: Kernel(function, options, several)
