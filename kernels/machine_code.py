"""Floor 0: where Numba keeps the machine code of kernels; a folder that fails costs time only. Imports: numba.

Numba by itself raises out of a kernel's first call when the disk is full, and where a folder cannot be written it takes
one beside the sources, in which code is not renewed when another module of this package changes.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import llvmlite.binding
import numba
from numba.core import config, dispatcher
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache, UserProvidedCacheLocator

_FAILURES = (OSError, EOFError, pickle.UnpicklingError)
Told = Callable[[Exception], None]
_here = threading.local()


def target() -> str:
    """What machine code depends on beside its sources."""
    return f"numba {numba.__version__}, {llvmlite.binding.get_host_cpu_name()}"


class NotKeptError(Exception):
    """A kernel that was called under `read_only` would have to be compiled."""


class _OneFolder(UserProvidedCacheLocator):
    """Of code whose folder is named after its sources: the same for all clones and environments that have those."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        return ""

    def get_source_stamp(self) -> None:
        return None


class _BySources(CompileResultCacheImpl):
    _locator_classes: ClassVar[list[Any]] = [_OneFolder]


class _OnlyThere(CompileResultCacheImpl):
    _locator_classes: ClassVar[list[Any]] = [UserProvidedCacheLocator]


class _Forgiving(FunctionCache):
    """The kept machine code of one function; what cannot be read is compiled, what cannot be written is told."""

    def __init__(self, function: Any, impl: type[CompileResultCacheImpl], told: Told) -> None:
        self._impl_class = impl
        self._told = told
        super().__init__(function)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = None
        with contextlib.suppress(*_FAILURES):
            found = super().load_overload(sig, target_context)
        if found is None and getattr(_here, "reads_only", False):
            raise NotKeptError
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except _FAILURES as error:
            self._told(error)


@contextlib.contextmanager
def read_only() -> Iterator[None]:
    """Calls of this thread meanwhile compile nothing that could be kept: `NotKeptError` is raised before they run."""
    _here.reads_only = True
    try:
        yield
    finally:
        _here.reads_only = False


@contextlib.contextmanager
def kept_in(folder: Path | None, told: Told) -> Iterator[None]:
    """Machine code of functions that are decorated meanwhile is read from and kept in ``folder``; None: nowhere.

    The folder is of just these sources and this `target`. That of types that they meet later, too. ``NUMBA_CACHE_DIR``
    goes before ``folder``. Whenever something cannot be kept ``told(error)`` is called. One thread at a time.
    """

    def cache(function: Any) -> Any:
        if folder is None:
            return NullCache()
        try:
            return _Forgiving(function, _OnlyThere if before[0] else _BySources, told)
        except (OSError, RuntimeError) as error:  # Numba has no place for it
            told(error)
            return NullCache()

    decorating: Any = dispatcher
    before = config.CACHE_DIR, decorating.FunctionCache
    config.CACHE_DIR, decorating.FunctionCache = before[0] or str(folder), cache
    try:
        yield
    finally:
        config.CACHE_DIR, decorating.FunctionCache = before
