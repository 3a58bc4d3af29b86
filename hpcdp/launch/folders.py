"""Folders of a job's own, removed with it: by the next job where the process that made one was killed.

A folder is locked as long as a process lives that needs it (flock(2)), so one that nobody has locked was left behind.
Where a file system of the network knows no such locks, what was left behind stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_OPENED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def new(base: Path, prefix: str) -> Iterator[Path]:
    """A folder of a new name in ``base``, for this user alone; `OSError` where none can be made."""
    _remove_left_behind(base, prefix)
    with _kept(lambda: Path(tempfile.mkdtemp(prefix=prefix, dir=base))) as folder:
        yield folder


def of_this_host(prefix: str) -> str:
    """How names begin where there may be folders of other hosts, whose locks are not seen: ``hpcdp-hosts-node1-``."""
    return f"{prefix}-{socket.gethostname().partition('.')[0]}-"


@contextlib.contextmanager
def named(folder: Path, prefix: str) -> Iterator[None]:
    """``folder``, whose name begins with ``prefix``, for this user alone; it may be there already."""

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
