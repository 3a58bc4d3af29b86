"""One writer a folder: a lock that the kernel frees when its holder ends, in a file that says who that is."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import json
import os
import socket
import time
from pathlib import Path

from ..comm.locks import is_free, lock_request
from ..errors import DataError
from . import notice

NAME = "writer.lock"
_LOCK, _UNLOCK = lock_request(fcntl.F_WRLCK, 0), lock_request(fcntl.F_UNLCK, 0)
_NOBODY_SAYS = "one that does not say who it is"
_TIMES = 10
"""How often a lock is taken anew, of which others remove the file, at most."""
_HELD = (errno.EAGAIN, errno.EACCES)


class WriterLock:
    """Held by one process at a time, until `release` or its end.

    Args:
        folder: exists.
        operation: what errors say was attempted.

    Raises:
        DataError: another process holds it, which is named; or the file cannot be made.
    """

    def __init__(self, folder: Path, operation: str = "lock the checkpoints") -> None:
        path = self._path = folder / NAME
        self._operation = operation
        self._file = -1
        try:
            for _ in range(_TIMES):
                self.release()
                self._file = self._opened(path)
                self._take(path)
                if self._other_than_locked() is None:  # else its last holder has removed it before it was locked
                    break
            self.require_held()
            self._sign()
        except BaseException:
            self.release()
            raise

    def _opened(self, path: Path) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # as the umask has it
        except OSError as error:
            raise DataError(self._operation, where=path, got=error.strerror) from error

    def _take(self, path: Path) -> None:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK)
        except OSError as error:
            if error.errno not in _HELD:
                notice.warn(f"{path}: {error.strerror}: nothing keeps a second job from writing here")
                return
            raise _held(self._operation, path, owner(path)) from error

    def _sign(self) -> None:
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID") or os.environ.get("JOB_ID")
        who = {"host": socket.gethostname(), "pid": os.getpid(), "user": _user(), "job": job}
        text = json.dumps(who | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n"
        with contextlib.suppress(OSError):  # it is locked all the same; of a full disk who writes more tells
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text.encode(), 0)

    def require_held(self) -> None:
        """Raise `DataError` unless the file is still the one that is locked: of another one others take the lock."""
        got = self._other_than_locked()
        if got is not None:
            raise DataError(
                self._operation, where=self._path, expected="the file that this job has locked", got=got,
                remedy="nothing is saved here any more, where others may; end this job, and never remove the file",
            )  # fmt: skip

    def _other_than_locked(self) -> str | None:
        """What is there instead of the file that is locked; None where it is that."""
        own = os.fstat(self._file)
        try:
            found = os.stat(self._path)
        except OSError as error:
            return error.strerror
        return None if (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino) else "another one"

    def release(self) -> None:
        """Let others write; may be called twice."""
        if self._file >= 0:
            with contextlib.suppress(OSError):  # a child made by fork may have the file open, too
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _UNLOCK)
            os.close(self._file)
            self._file = -1


def holder(path: Path) -> str | None:
    """Who holds the lock of that file now, in words as `owner`; None if nobody does, or none can be had here."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _LOCK)
        finally:
            os.close(file)
        if not is_free(found):
            return owner(path) or _NOBODY_SAYS
    return None


def require_free(folder: Path) -> None:
    """Take no lock, but raise what `WriterLock` does where another process holds it."""
    who = holder(folder / NAME)
    if who is not None:
        raise _held("lock the checkpoints", folder / NAME, who)


def _held(operation: str, path: Path, who: str) -> DataError:
    return DataError(
        operation, where=path, expected="no other job that saves here",
        got=who or _NOBODY_SAYS, remedy="wait for it, or save to another folder",
    )  # fmt: skip


def owner(path: Path) -> str:
    """Who has written a lock's file last, in words; "" where it does not say."""
    try:
        who = json.loads(path.read_bytes())
        job = f", job {who['job']}" if who["job"] else ""
        return f"process {who['pid']} of {who['user']} on {who['host']}{job}, since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
