"""Memory that the ranks of a node share, its locks and its backing files.

Locks between the ranks of a node that the kernel frees when their holder dies, and so: which ranks live.

They are locks of bytes of a file that has no name (fcntl(2), "open file description locks"), so they cost two system
calls, nothing is left behind, and who waits for one sleeps. Ranks that are threads have a description each, too.

Files of Open MPI's shared memory, removed once they are mapped: no kill leaves them behind in /dev/shm then.

Open MPI leaves it to the launcher to remove them. mpirun does; srun does not for a world of one, also at a good end,
nor where its own daemon on a host is killed, too. Under mpirun they stay: a program may start further processes there.

Memory shared by the ranks of a node, and waiting for one another through it.

Memory comes from ``os.memfd_create``, opened by the neighbours through ``/proc/PID/fd``: no limit of /dev/shm, no file
to leave behind when a job is killed, and alive for as long as an array views it. Where /proc is out of reach
(containers with process namespaces of their own) it comes from a window of MPI.
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
    from .mpi import MpiCommunicator


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


_MAPPED = re.compile(r" (/\S*/(?:sm|vader)_segment\.[^/\s]+)$", re.MULTILINE)


def remove(machine: MpiCommunicator, environ: Mapping[str, str] = os.environ) -> None:
    """Remove the files that all ranks of a machine have mapped; each of these ranks must call."""
    if is_launched(environ) and not started_by_srun(environ):
        return
    mapped = _mapped()
    if machine.size > 1 and not all(machine.allgather_json(len(mapped) == machine.size)):
        return  # somebody will look for one by its name
    for path in mapped:
        with contextlib.suppress(OSError):  # another rank has been faster
            path.unlink()


def _mapped() -> set[Path]:
    """Return the files of segments that this process has mapped, of itself and of other ranks."""
    with contextlib.suppress(OSError):
        return set(map(Path, _MAPPED.findall(Path("/proc/self/maps").read_text(errors="surrogateescape"))))
    return set()


_SPINS_WITH_A_CORE_EACH = 4000
_SPINS_WITHOUT = 40
_SLEEP_NS = 50_000_000
_TOKEN_BYTES = 16

LINE_NUMBERS = 8
"""So many float64 fill a cache line: a `NodeBarrier` holds no fewer."""


class NodeMemory(Protocol):
    """Memory that the ranks of one node share; a rank without neighbours has one of size 1."""

    rank: int
    size: int

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A zeroed array, the same memory on every rank of the node. Every rank of the node must call, in one order.

        Raises:
            HpcdpError: the system does not give as much; on every rank of the node.
        """
        ...

    def check(self) -> None:
        """Called now and then by who waits: raises when waiting has become pointless."""
        ...

    failure: HpcdpError | None
    """What the next `check` raises, once: set by a watchdog, see `different_calls`."""
    patience: np.ndarray
    """Shape ``(2,)`` int64, for the kernels that wait: looks before sleeping, nanoseconds of sleep before a `check`."""


def raise_failure(memory: NodeMemory) -> None:
    """Raise the `NodeMemory.failure`, if no other thread has."""
    failure, memory.failure = memory.failure, None
    if failure is not None:
        raise failure


def patience_for(ranks: int, cores: int) -> np.ndarray:
    """How ranks that share ``cores`` cores should wait for each other (see `NodeMemory.patience`)."""
    return np.array([_SPINS_WITH_A_CORE_EACH if ranks <= cores else _SPINS_WITHOUT, _SLEEP_NS], np.int64)


class NodeBarrier:
    """Where a node's ranks wait for each other, on a counter each: about a microsecond when every rank has a core.

    Every rank of the node must make it and pass it in the same order.

    Args:
        memory: the node's.
        most_numbers: so many may a rank leave in one `tally`.
    """

    def __init__(self, memory: NodeMemory, most_numbers: int = LINE_NUMBERS) -> None:
        self._memory = memory
        self._exchange = exchange = kernels.load("shm_allreduce")
        self._counters = memory.alloc((memory.size * exchange.STRIDE,), np.int32)
        capacity = -(-most_numbers // LINE_NUMBERS) * LINE_NUMBERS  # no two ranks write to one line
        self._board = memory.alloc((2, memory.size, capacity), np.float64)
        self._numbers = np.zeros(capacity, np.float64)
        self._state = exchange.state_of(memory.rank, memory.patience)
        self._meet, self._sum_by_all, self._done = exchange.meet, exchange.sum_by_all, exchange.DONE
        self._load()

    def _load(self) -> None:
        """Have the kernels loaded, by a gate of one rank: not in the first step, for which all wait."""
        counters, state = np.zeros(self._exchange.STRIDE, np.int32), self._exchange.state_of(0, self._memory.patience)
        self._meet(counters, 1, state, 0)
        self._sum_by_all(np.zeros(1), np.zeros((2, 1, 1)), counters, state, 0)

    def barrier(self) -> None:
        """Block until every rank has come as often as this one."""
        counters, state = self._counters, self._state
        while (met := self._meet(counters, self._memory.size, state, 0)) != self._done:
            self._wait_on(met)

    def tally(self, *numbers: float) -> list[float]:
        """A barrier at which every rank leaves some numbers and gets their sums, in float64.

        Raises:
            MismatchError: the ranks have not left as many, or some have called `barrier`; on every rank.
        """
        if self._memory.size == 1:
            return list(numbers)
        mine, kind = self._numbers, len(numbers)
        for place, number in enumerate(numbers):
            mine[place] = number
        board, counters, state = self._board, self._counters, self._state
        while (met := self._sum_by_all(mine, board, counters, state, kind)) != self._done:
            self._wait_on(met)
        return mine[:kind].tolist()

    def _wait_on(self, met: int) -> None:
        if met == self._exchange.DIFFERENT:
            raise MismatchError(
                "gate",
                expected="the same call on every rank of this node",
                got="another one on some rank",
                remedy="call step(), allreduce_grads() and update() in the same order on all ranks",
            )
        self._memory.check()


class ProgressCounters:
    """How far every rank of a node has got with each of several things: numbers that only grow, for all to see.

    Every rank of the node must make it. Nothing is sent, and nobody needs to be asked.

    Args:
        memory: the node's.
        things: how many there are.
    """

    def __init__(self, memory: NodeMemory, things: int = 1) -> None:
        self._memory = memory
        self._sync = kernels.load("shm_allreduce")
        self._counters = memory.alloc((things, memory.size * self._sync.STRIDE), np.int32)

    def post(self, number: int, thing: int = 0) -> None:
        """Say that this rank has got as far as ``number``."""
        self._sync.post(self._counters[thing], self._memory.rank, _wrapped(number))

    def reached(self, number: int, thing: int = 0, ranks: int | None = None) -> bool:
        """Whether the first ``ranks`` ranks, default all, have got so far; never blocks."""
        self._memory.check()
        ranks = self._memory.size if ranks is None else ranks
        return bool(self._sync.wait_all(self._counters[thing], ranks, _wrapped(number), 0, 0))

    def wait(self, number: int, thing: int = 0) -> None:
        """Block until all ranks have got so far."""
        counters, n, wrapped = self._counters[thing], self._memory.size, _wrapped(number)
        while not self._sync.wait_all(counters, n, wrapped, *self._memory.patience):
            self._memory.check()

    def counters(self, thing: int = 0) -> np.ndarray:
        """As the kernels take them (see `kernels.shm_allreduce`); behind each is space for 30 more words of its
        rank."""
        return self._counters[thing]

    def behind(self, number: int, thing: int = 0) -> list[int]:
        """The local ranks that have not got so far."""
        at = self._counters[thing, :: self._sync.STRIDE].astype(np.int64)
        return [rank for rank, here in enumerate(at) if _wrapped(int(here) - number) < 0]


def _wrapped(number: int) -> int:
    """``number`` as the counters hold it, in 32 bits; comparisons are by difference."""
    return (number + 2**31) % 2**32 - 2**31


class ProcessMemory:
    """`NodeMemory` of ranks that are processes.

    Args:
        comm: the node's ranks.
        allocate: one of `memfd` and `window`; both take ``(comm, nbytes)``.
        cores: how many cores these ranks may use together.
    """

    def __init__(
        self, comm: Communicator, allocate: Callable[[Communicator, int], np.ndarray | None], cores: int
    ) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.patience = patience_for(comm.size, cores)
        self.failure: HpcdpError | None = None
        self._comm = comm
        self._allocate = allocate

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        block = self._allocate(self._comm, max(nbytes, 1))
        if block is None:
            raise HpcdpError(
                "share memory", where=f"{self.size} ranks of a node", expected=f"{nbytes} bytes", got="none",
                remedy="lift the job's limits (ulimit -v, -f, -n; hpcdp doctor looks for more), or go other ways: "
                "HPCDP_SHARED_MEMORY=window or none",
            )  # fmt: skip
        return block[:nbytes].view(kind).reshape(shape)

    def check(self) -> None:
        """See `NodeMemory.check`. Returning to Python lets signals through; the launcher ends us when a rank dies."""
        if self.failure is not None:
            raise_failure(self)


class PrivateMemory:
    """`NodeMemory` of a rank that shares with nobody."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.patience = patience_for(1, 1)
        self.failure: HpcdpError | None = None

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def check(self) -> None:
        """Nobody to wait for."""


def memfd(comm: Communicator, nbytes: int) -> np.ndarray | None:
    """``nbytes`` zeroed bytes of an anonymous file, mapped by all ranks of ``comm``; None on all where that fails."""
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
            # The same path may be another process's file in a process namespace of our own.
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
    """The memory of a file, as NumPy takes it, given back with the last array that views it.

    Python's own keeps a descriptor open for each, before 3.13 (``trackfd``), and a job may have no more than 1024.
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
