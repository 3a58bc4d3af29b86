"""Memory that the ranks of a node share, waits through it, locks, and Open MPI's backing files.

Memory comes from ``os.memfd_create``, opened by the other ranks through ``/proc/PID/fd``. It is not limited by
/dev/shm, leaves no file behind when a job is killed, and lives as long as an array views it. Where /proc is out of
reach (containers with separate process namespaces) it comes from an MPI window.

Locks are open file description locks (fcntl(2)) of bytes of an unnamed file. They cost two system calls, waiters sleep,
and the kernel frees them when their holder dies, which also shows which ranks live. Ranks that are threads have a
description each.

Open MPI leaves the removal of its shared-memory files to the launcher. mpirun removes them; srun does not for a world
of one, nor if its daemon on a host is killed. `remove` therefore unlinks them once they are mapped, except under
mpirun, where a program may start further processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import re
import secrets
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .. import kernels
from ..core.environment import is_launched, started_by_srun
from ..errors import HpcdpError, MismatchError
from .communicator import Communicator

if TYPE_CHECKING:
    from .mpi_communicator import MpiCommunicator


_FLOCK = "hhqqi4x"
"""The layout of struct flock: type, whence, start, length, process."""
_TRIES = 50
"""Attempts to take a lock before sleeping, because waking up takes as long as some updates."""


def lock_request(kind: int, byte: int) -> bytes:
    """Return the argument of fcntl(2) for the lock of a byte; ``kind`` is F_RDLCK, F_WRLCK or F_UNLCK."""
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)


def is_free(answer: bytes) -> bool:
    """Return whether F_OFD_GETLK reports no conflicting lock."""
    return bool(struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK)


class NodeLocks:
    """Locks by number, from 0, of the ranks ``comm``; None is this rank alone.

    All ranks of the node must make it together.
    """

    def __init__(self, comm: Communicator | None) -> None:
        self.rank, self.size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._file = _open_alone() if comm is None else _open_together(comm)
        self._own: dict[int, threading.Lock] = {}
        """Locks between the threads of a rank, which share its file description."""
        self._adding = threading.Lock()
        _open_here.add(self)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock_request(fcntl.F_WRLCK, self.rank))
        if comm is not None:
            comm.barrier()

    @contextlib.contextmanager
    def hold(self, number: int, shared: bool = False) -> Iterator[None]:
        """Hold lock ``number`` exclusively, or ``shared`` with other shared holders.

        An exclusive waiter also holds a gate, so that a sequence of shared holders cannot starve it.
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
        """Return the local ranks whose processes have ended."""
        ended = []
        for rank in range(self.size):
            answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, lock_request(fcntl.F_WRLCK, rank))
            if rank != self.rank and is_free(answer):
                ended.append(rank)
        return ended

    def forget(self) -> None:
        """Close the file in a child made by fork, which would keep the locks of a dead rank."""
        file, self._file = self._file, -1
        with contextlib.suppress(OSError):  # already closed, in a child of such a child
            os.close(file)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._file)


_open_here: weakref.WeakSet[NodeLocks] = weakref.WeakSet()


def _forget_all() -> None:
    for locks in _open_here:
        locks.forget()


os.register_at_fork(after_in_child=_forget_all)


def _open_alone() -> int:
    file, path = tempfile.mkstemp(prefix="hpcdp-locks-")
    os.unlink(path)
    return file


def _open_together(comm: Communicator) -> int:
    """Open one unnamed empty file on all ranks, with a separate file description each."""
    first, path = tempfile.mkstemp(prefix="hpcdp-locks-") if comm.rank == 0 else (-1, "")
    own = os.open(comm.allgather_json(path)[0], os.O_RDWR | os.O_CLOEXEC)
    comm.barrier()
    if comm.rank == 0:
        os.close(first)
        os.unlink(path)
    return own


_MAPPED = re.compile(r" (/\S*/(?:sm|vader)_segment\.[^/\s]+)$", re.MULTILINE)


def remove(machine: MpiCommunicator, environ: Mapping[str, str] = os.environ) -> None:
    """Remove the shared-memory files that all ranks of a machine have mapped; each of these ranks must call."""
    if is_launched(environ) and not started_by_srun(environ):
        return
    mapped = _mapped()
    if machine.size > 1 and not all(machine.allgather_json(len(mapped) == machine.size)):
        return  # a rank has yet to open one by its name
    for path in mapped:
        with contextlib.suppress(OSError):  # another rank has removed it
            path.unlink()


def _mapped() -> set[Path]:
    """Return the segment files that this process has mapped, its own and those of other ranks."""
    with contextlib.suppress(OSError):
        return set(map(Path, _MAPPED.findall(Path("/proc/self/maps").read_text(errors="surrogateescape"))))
    return set()


_SPINS_WITH_A_CORE_EACH = 4000
_SPINS_WITHOUT = 40
_SLEEP_NS = 50_000_000
_TOKEN_BYTES = 16

LINE_NUMBERS = 8
"""The number of float64 values in a cache line, to which a `NodeBarrier` rounds up its capacity."""


class NodeMemory(Protocol):
    """Memory that the ranks of one node share; of size 1 for a rank without neighbors."""

    rank: int
    size: int

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return a zeroed array in shared memory; every rank of the node must call, in the same order.

        Raises:
            HpcdpError: there is not enough memory; on every rank of the node.
        """
        ...

    def check(self) -> None:
        """Raise if a wait has become pointless; called by waiting ranks from time to time."""
        ...

    failure: HpcdpError | None
    """The error that the next `check` raises, once; set by a watchdog, see `roll_call.DifferentCalls`."""
    meanwhile: Callable[[], object]
    """A function that every `check` calls, see `node_messages.Mailbox.empty`."""
    patience: np.ndarray
    """Shape ``(2,)`` int64, for kernels that wait: polls before sleeping, and nanoseconds of sleep before a `check`."""


def raise_failure(memory: NodeMemory) -> None:
    """Raise the `NodeMemory.failure`, unless another thread has."""
    failure, memory.failure = memory.failure, None
    if failure is not None:
        raise failure


def patience_for(ranks: int, cores: int) -> np.ndarray:
    """Return how ranks that share ``cores`` cores should wait for each other (see `NodeMemory.patience`)."""
    return np.array([_SPINS_WITH_A_CORE_EACH if ranks <= cores else _SPINS_WITHOUT, _SLEEP_NS], np.int64)


class NodeBarrier:
    """A barrier of a node's ranks on one counter each; takes about a microsecond with a core per rank.

    Every rank of the node must make it, and call it in the same order. One `tally` takes up to ``most_numbers`` values.
    """

    def __init__(self, memory: NodeMemory, most_numbers: int = LINE_NUMBERS) -> None:
        self._memory = memory
        self._exchange = exchange = kernels.load("shm_exchange")
        self._counters = memory.alloc((memory.size * exchange.STRIDE,), np.int32)
        capacity = -(-most_numbers // LINE_NUMBERS) * LINE_NUMBERS  # no two ranks write to one cache line
        self._board = memory.alloc((2, memory.size, capacity), np.float64)
        self._numbers = np.zeros(capacity, np.float64)
        self._state = exchange.state_of(memory.rank, memory.patience)
        self._meet, self._sum_by_all, self._done = exchange.meet, exchange.sum_by_all, exchange.DONE
        self._load()

    def _load(self) -> None:
        """Load the kernels with a barrier of one rank, so that the first step does not have to."""
        counters, state = np.zeros(self._exchange.STRIDE, np.int32), self._exchange.state_of(0, self._memory.patience)
        self._meet(counters, 1, state, 0)
        self._sum_by_all(np.zeros((2, 1, 1)), counters, state, 0, 1.0, 1.0, 1.0, np.zeros(1))

    def barrier(self) -> None:
        """Block until every rank has called it as often as this one."""
        counters, state = self._counters, self._state
        while (met := self._meet(counters, self._memory.size, state, 0)) != self._done:
            self._wait_on(met)

    def tally(self, *numbers: float) -> list[float]:
        """Sum some numbers over the ranks, in float64; a barrier.

        Raises:
            MismatchError: the ranks passed different counts, or some called `barrier`; on every rank.
        """
        if self._memory.size == 1:
            return list(numbers)
        mine, kind = self._numbers, len(numbers)
        for place, number in enumerate(numbers):
            mine[place] = number
        board, counters, state = self._board, self._counters, self._state
        while (met := self._sum_by_all(board, counters, state, kind, 1.0, 1.0, 1.0, mine)) != self._done:
            self._wait_on(met)
        return mine[:kind].tolist()

    def _wait_on(self, met: int) -> None:
        if met == self._exchange.DIFFERENT:
            raise MismatchError(
                "barrier", expected="the same call on every rank of this node", got="another call on some rank",
                remedy="call step(), allreduce_grads() and update() in the same order on all ranks",
            )  # fmt: skip
        self._memory.check()


class ProgressCounters:
    """Monotonic progress counters of every rank of a node, visible to all without messages.

    Every rank of the node must make it; each rank has ``things`` counters.
    """

    def __init__(self, memory: NodeMemory, things: int = 1) -> None:
        self._memory = memory
        self._sync = kernels.load("shm_exchange")
        self._counters = memory.alloc((things, memory.size * self._sync.STRIDE), np.int32)

    def post(self, number: int, thing: int = 0) -> None:
        """Publish that this rank has reached ``number``."""
        self._sync.post(self._counters[thing], self._memory.rank, _wrapped(number))

    def reached(self, number: int, thing: int = 0, ranks: int | None = None) -> bool:
        """Return whether the first ``ranks`` ranks, default all, have reached ``number``; never block."""
        self._memory.check()
        ranks = self._memory.size if ranks is None else ranks
        return bool(self._sync.wait_all(self._counters[thing], ranks, _wrapped(number), 0, 0))

    def wait(self, number: int, thing: int = 0) -> None:
        """Block until all ranks have reached ``number``."""
        counters, n, wrapped = self._counters[thing], self._memory.size, _wrapped(number)
        while not self._sync.wait_all(counters, n, wrapped, *self._memory.patience):
            self._memory.check()

    def counters(self) -> np.ndarray:
        """Return the first counters as kernels take them; each is followed by space for 30 more words of its rank."""
        return self._counters[0]

    def behind(self, number: int, thing: int = 0) -> list[int]:
        """Return the local ranks that have not reached ``number``."""
        at = self._counters[thing, :: self._sync.STRIDE].astype(np.int64)
        return [rank for rank, here in enumerate(at) if _wrapped(int(here) - number) < 0]


def _wrapped(number: int) -> int:
    """Return ``number`` wrapped to the 32 bits of a counter; comparisons use differences."""
    return (number + 2**31) % 2**32 - 2**31


class ProcessMemory:
    """`NodeMemory` of ranks that are processes.

    Args:
        comm: the node's ranks.
        allocate: `memfd`, or the allocation of an MPI window; both take ``(comm, nbytes)``.
        cores: the number of cores that these ranks may use together.
    """

    def __init__(
        self, comm: Communicator, allocate: Callable[[Communicator, int], np.ndarray | None], cores: int
    ) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.patience = patience_for(comm.size, cores)
        self.failure: HpcdpError | None = None
        self.meanwhile: Callable[[], object] = list
        self._comm = comm
        self._allocate = allocate

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """See `NodeMemory.alloc`."""
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        block = self._allocate(self._comm, max(nbytes, 1))
        if block is None:
            raise HpcdpError(
                "share memory", where=f"{self.size} ranks of a node", expected=f"{nbytes} bytes", got="none",
                remedy="raise the job's limits (ulimit -v, -f, -n; see `hpcdp doctor`), or set "
                "HPCDP_SHARED_MEMORY=window or none",
            )  # fmt: skip
        return block[:nbytes].view(kind).reshape(shape)

    def check(self) -> None:
        """See `NodeMemory.check`. The return to Python delivers signals, also the launcher's when a rank dies."""
        self.meanwhile()
        if self.failure is not None:
            raise_failure(self)


class PrivateMemory:
    """`NodeMemory` of a rank that shares with no other."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.patience = patience_for(1, 1)
        self.failure: HpcdpError | None = None
        self.meanwhile: Callable[[], object] = list

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array of zeros."""
        return np.zeros(shape, dtype)

    def check(self) -> None:
        """Call `meanwhile` alone: there is no other rank."""
        self.meanwhile()


def memfd(comm: Communicator, nbytes: int) -> np.ndarray | None:
    """Map ``nbytes`` zeroed bytes of an anonymous file on all ranks of ``comm``; None on all if that fails on any."""
    descriptor, offer, block = -1, None, None
    if comm.rank == 0:
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.memfd_create("hpcdp", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes + _TOKEN_BYTES)
            token = secrets.token_bytes(_TOKEN_BYTES)
            os.pwrite(descriptor, token, nbytes)
            offer = [os.getpid(), descriptor, token.hex()]
    offer = comm.allgather_json(offer)[0]
    if offer is not None:
        with contextlib.suppress(OSError, ValueError):
            with _opened(descriptor, f"/proc/{offer[0]}/fd/{offer[1]}") as file:
                mapped = np.asarray(_Mapping(file, nbytes + _TOKEN_BYTES))
            # In another process namespace the same path may be another process's file.
            if mapped[nbytes:].tobytes() == bytes.fromhex(offer[2]):
                block = mapped[:nbytes]
    everyone_has_it = all(comm.allgather_json(block is not None))
    if descriptor >= 0:
        os.close(descriptor)
    return block if everyone_has_it else None


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Mapping:
    """A mapped file as an array interface, unmapped with the last array that views it.

    Python's mmap keeps a descriptor open for each mapping before 3.13 (``trackfd``), and a job may be limited to 1024.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        at = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
        if at == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        weakref.finalize(self, _libc.munmap, at, nbytes).atexit = False
        self.__array_interface__ = {"data": (at, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


@contextlib.contextmanager
def _opened(descriptor: int, path: str) -> Iterator[int]:
    if descriptor >= 0:
        yield descriptor
        return
    opened = os.open(path, os.O_RDWR)
    try:
        yield opened
    finally:
        os.close(opened)
