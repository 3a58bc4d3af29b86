"""Calls of the file system, of which one fails: as if the process had ended there, or with an error."""

import builtins
import contextlib
import errno
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

WRITING = ("rename", "unlink", "rmdir", "mkdir", "fsync", "pwrite", "ftruncate")
READING = ("open", "stat", "listdir", "scandir", "pread", "preadv")


class Crashed(BaseException):
    """The process has ended here."""


class Calls:
    """Counts calls, of a thread, and lets fail that of a number.

    Args:
        patch: what replaces functions of `os`.
        names: which.
        fails: the number of the call that fails, from 0; None: none does.
        crash: no call is done any more from then on; else this one alone fails, with EIO.
        thread: the name of the thread whose calls count; None: any.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, names: tuple[str, ...], fails: int | None, *,
        crash: bool = True, thread: str | None = None, rename: Callable[[Any, Any], None] | None = None,
    ) -> None:  # fmt: skip
        self.count, self.failed = 0, ""
        self._fails, self._crash, self._thread = fails, crash, thread
        for name in names:
            patch.setattr(os, name, self._counting(name, getattr(os, name)))
        if rename is not None:  # which is made of calls that are counted
            patch.setattr(os, "rename", rename)
        if "open" in names:
            patch.setattr(builtins, "open", self._counting("open", io.open))
            patch.setattr(io, "open", self._counting("open", io.open))

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._thread not in (None, threading.current_thread().name):
                return call(*args, **kwargs)
            self.count += 1
            if self._crash and self.failed:
                raise Crashed
            if self.count - 1 == self._fails:
                self.failed = f"{name} {str(args)[:100]}"
                raise Crashed if self._crash else OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*args, **kwargs)

        return counted


def renaming_file_by_file(backwards: bool) -> Callable[[Any, Any], None]:
    """Renames folders by copying and removing each of their files, one after the other."""

    def rename(source: Any, target: Any) -> None:
        if os.path.exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        names = sorted(os.listdir(source), reverse=backwards)
        os.mkdir(target)
        for name in names:
            shutil.copyfile(os.path.join(source, name), os.path.join(target, name))
        for name in names:
            os.unlink(os.path.join(source, name))
        os.rmdir(source)

    return rename


@contextlib.contextmanager
def calls(names: tuple[str, ...], fails: int | None, **options: Any) -> Iterator[Calls]:
    """`Calls`, within."""
    with pytest.MonkeyPatch.context() as patch:
        yield Calls(patch, names, fails, **options)
