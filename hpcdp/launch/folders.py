"""Folders of a job's own, removed with it: by the next job where the process that made one was killed.

What is in it is executed, or says what is, so a folder that other users could change or exchange is refused.

A folder is locked as long as a process lives that needs it (flock(2)), so one that nobody has locked was left behind.
Where a file system of the network knows no such locks, what was left behind stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..permissions import who_else_may_write

_OPENED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def new(base: Path, prefix: str) -> Iterator[Path]:
    """A folder of a new name in ``base``, for this user alone; `OSError` where none can be made, or others may write to
    ``base`` and exchange it."""
    _remove_left_behind(base, prefix)
    with _kept(lambda: Path(tempfile.mkdtemp(prefix=prefix, dir=base))) as folder:
        yield folder


def of_this_host(prefix: str) -> str:
    """How names begin where there may be folders of other hosts, whose locks are not seen: ``hpcdp-hosts-node1-``."""
    return f"{prefix}-{socket.gethostname().partition('.')[0]}-"


@contextlib.contextmanager
def named(folder: Path, prefix: str) -> Iterator[None]:
    """``folder``, whose name begins with ``prefix``, for this user alone; it may be there already. `OSError` where it
    cannot be made, or others may change it."""

    def make() -> Path:
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    _remove_left_behind(folder.parent, prefix)
    with _kept(make):
        yield


@contextlib.contextmanager
def _kept(make: Callable[[], Path]) -> Iterator[Path]:
    """What ``make`` makes, made anew where another process takes it for left behind before it is locked."""
    while True:
        folder = make()
        try:
            lock = os.open(folder, _OPENED)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):  # no locks there
            fcntl.flock(lock, fcntl.LOCK_SH)
        if folder.exists():
            break
        os.close(lock)
    try:
        writer = who_else_may_write(folder)
        if writer is not None:
            raise PermissionError(errno.EACCES, f"a folder that others may change: {writer}")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_left_behind(base: Path, prefix: str) -> None:
    for folder in base.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, or one that is removed at this moment
            lock = os.open(folder, _OPENED)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
