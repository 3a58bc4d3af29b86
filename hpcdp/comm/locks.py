"""Locks between the ranks of a node that the kernel frees when their holder dies, and so: which ranks live.

They are locks of bytes of a file that has no name (fcntl(2), "open file description locks"), so they cost two system
calls, nothing is left behind, and who waits for one sleeps. Ranks that are threads have a description each, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import tempfile
import threading
import weakref
from collections.abc import Iterator

from .communicator import Communicator

_FLOCK = "hhqqi4x"
"""struct flock: type, whence, start, length, process."""
_TRIES = 50
"""Of who finds a lock taken, before it sleeps: waking up takes as long as some updates."""


def lock_request(kind: int, byte: int) -> bytes:
    """What fcntl(2) is given for the lock of a byte: ``kind`` is F_RDLCK, F_WRLCK or F_UNLCK."""
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)


def is_free(answer: bytes) -> bool:
    """Whether F_OFD_GETLK says that nobody else holds a lock that would keep the requested one out."""
    return bool(struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK)


class NodeLocks:
    """Locks by number, from 0. Every rank of the node must make it together.

    Args:
        comm: the ranks that share memory; None: this rank alone.
    """

    def __init__(self, comm: Communicator | None) -> None:
        self.rank, self.size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._file = _open_alone() if comm is None else _open_together(comm)
        self._own: dict[int, threading.Lock] = {}
        """The threads of a rank share its description, whose locks would let them all in."""
        self._adding = threading.Lock()
        _open_here.add(self)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock_request(fcntl.F_WRLCK, self.rank))
        if comm is not None:
            comm.barrier()

    @contextlib.contextmanager
    def hold(self, number: int, shared: bool = False) -> Iterator[None]:
        """Hold lock ``number`` alone, or ``shared`` with all others who ask for it so.

        Who waits to be alone keeps a gate shut meanwhile: without it there could always be somebody who shares.
        """
        gate = self.size + 2 * number
        byte, kind = gate + 1, fcntl.F_RDLCK if shared else fcntl.F_WRLCK
        with self._own_lock(byte):
            self._take(gate, fcntl.F_WRLCK)
            try:
                self._take(byte, kind)
            finally:
                self._release(gate)
            try:
                yield
            finally:
                self._release(byte)

    def _own_lock(self, byte: int) -> threading.Lock:
        lock = self._own.get(byte)
        if lock is None:
            with self._adding:
                lock = self._own.setdefault(byte, threading.Lock())
        return lock

    def _release(self, byte: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock_request(fcntl.F_UNLCK, byte))

    def _take(self, byte: int, kind: int) -> None:
        request = lock_request(kind, byte)
        for _ in range(_TRIES):
            try:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, request)
                return
            except (BlockingIOError, PermissionError):
                os.sched_yield()
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, request)

    def gone(self) -> list[int]:
        """The local ranks whose processes have ended."""
        found = []
        for rank in range(self.size):
            answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, lock_request(fcntl.F_WRLCK, rank))
            if rank != self.rank and is_free(answer):
                found.append(rank)
        return found

    def forget(self) -> None:
        """Close the file: in a child made by fork, which would keep the locks of a rank that has died."""
        file, self._file = self._file, -1
        with contextlib.suppress(OSError):  # a child of such a child
            os.close(file)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._file)


_open_here: weakref.WeakSet[NodeLocks] = weakref.WeakSet()


def _forget_all() -> None:
    for each in _open_here:
        each.forget()


os.register_at_fork(after_in_child=_forget_all)


def _open_alone() -> int:
    file, path = tempfile.mkstemp(prefix="hpcdp-locks-")
    os.unlink(path)
    return file


def _open_together(comm: Communicator) -> int:
    """A description of its own, for each rank, of one empty file, which has no name when this returns."""
    first, path = tempfile.mkstemp(prefix="hpcdp-locks-") if comm.rank == 0 else (-1, "")
    own = os.open(comm.allgather_json(path)[0], os.O_RDWR | os.O_CLOEXEC)
    comm.barrier()
    if comm.rank == 0:
        os.close(first)
        os.unlink(path)
    return own
