"""The processes of a job, watched.

The ranks of a job while they run: where they start, in which order they end, and how; mpirun does not say.

A pidfd of each rank wakes the launcher when the rank ends; between such ends it sleeps. Where /proc or pidfds are not
to be had, nothing is known and mpirun's own words and status stand.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .cleanup import living

_RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")
_LOOK_S, _LOOK_SOON_S, _LATER_LOOK_S = 0.02, 10.0, 1.0
"""Ranks are looked for so often, so long; later on less often. One that fails at an import lives for some 50 ms."""

# linux/pidfd.h, Linux 6.15 and later: the status of a process that its parent has reaped
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT, _PIDFD_INFO = 0xC040FF0B, 1 << 3, "=Q52xi"
# linux/signalfd.h
_SIGNALFD_INFO, _SIGNALFD_SIZE, _SIGNALFD_FLAGS = "=I4xi", 128, os.O_CLOEXEC | os.O_NONBLOCK


class End(NamedTuple):
    """The end of a rank: its wait status (wait(2)), None where it is not known, and when it was seen (monotonic)."""

    rank: int
    pid: int
    status: int | None
    at_s: float
    server: int | None = None
    """Which server it is, from 0; None for a worker."""
    host: str | None = None
    """Where it ran; None for this machine."""

    @property
    def exit_status(self) -> int:
        """As a shell puts it: 128 + the number of a signal; 0 where the status is not known."""
        code = os.waitstatus_to_exitcode(self.status or 0)
        return code if code >= 0 else 128 - code

    @property
    def who(self) -> str:
        """The rank, or the server, with its process and where that ran."""
        where = f"pid {self.pid}" + (f" on {self.host}" if self.host else "")
        if self.server is None:
            return f"rank {self.rank} ({where})"
        return f"server {self.server} (rank {self.rank}, {where})"

    def __str__(self) -> str:
        if self.status is None:
            how = "ended before the others"
        elif os.WIFSIGNALED(self.status):
            how = f"was killed by {name_of(os.WTERMSIG(self.status))}"
        elif self.status == 0:
            how = "ended without MPI_Finalize (exit status 0)"
        else:
            code = os.WEXITSTATUS(self.status)
            sign = f" ({name_of(code - 128)})" if code - 128 in signal.valid_signals() else ""
            how = f"ended with status {code}{sign} before the others"
        return f"{self.who} {how}"


class Signal(NamedTuple):
    """A signal to the launcher: its number and where it came from (``si_code``, sigaction(2))."""

    number: int
    code: int


class Start(NamedTuple):
    """A rank that was seen to run, and where; ``host`` is None for this machine."""

    rank: int
    pid: int
    host: str | None = None


class Watch:
    """Waits for signals that the caller has blocked and sees in which order the ranks below ``mpirun`` end.

    Args:
        mpirun: its process, a child of the caller's, or the caller itself.
        ranks: as many are looked for.
        signals: what `wait` receives.
        servers: so many of the ranks, the last ones, are servers.
        elsewhere: so many ranks more run on other hosts, whence `note` is told of them.
    """

    def __init__(
        self, mpirun: int, ranks: int, signals: set[signal.Signals], servers: int = 0, elsewhere: int = 0
    ) -> None:
        self._mpirun, self._count, self._missing, self._workers = mpirun, ranks, ranks, ranks + elsewhere - servers
        self._all = ranks + elsewhere
        self._next_look = time.monotonic() + _LOOK_S
        self._later = time.monotonic() + _LOOK_SOON_S
        self._ranks: dict[int, tuple[int, int]] = {}  # by pidfd: rank and pid
        self._others: dict[int, Callable[[], object]] = {}
        self.starts: list[Start] = []
        """The ranks that were seen to run, in that order."""
        self._ends: dict[int, End] = {}  # by rank, the first end first
        self.failed: End | None = None
        """The first end that was seen, while mpirun ran, to be none with status 0."""
        self.all_gone_at_s: float | None = None
        """When all ranks were first seen to be gone, none with a status other than 0 (monotonic)."""
        self.servers_alone_since_s: float | None = None
        """When servers were first seen to run without any worker (monotonic); None while there are workers."""
        self._signals = _signal_descriptor(signals)
        self._poll = select.epoll()
        self._poll.register(self._signals, select.EPOLLIN)

    def close(self) -> None:
        for descriptor in (self._signals, *self._ranks):
            os.close(descriptor)
        self._poll.close()

    def also(self, descriptor: int, when_ready: Callable[[], object], event: int = select.EPOLLIN) -> None:
        """Calls ``when_ready`` from `wait` whenever ``descriptor`` can be read, or written, until `no_more` of it."""
        self._others[descriptor] = when_ready
        self._poll.register(descriptor, event)

    def no_more(self, descriptor: int) -> None:
        """The opposite of `also`, called before the descriptor is closed."""
        if self._others.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def note(self, seen: Start | End) -> None:
        """A rank has been seen to start, or to end, elsewhere."""
        if isinstance(seen, Start):
            self.starts.append(seen)
        elif seen.rank not in self._ends:
            self._ends[seen.rank] = seen
            if seen.status and self.failed is None:
                self.failed = seen
            if len(self._ends) == self._all and self.failed is None:
                self.all_gone_at_s = seen.at_s

    def know_of(self, rank: int, pid: int) -> None:
        """A rank runs here, says who has started it; it may have ended before it was seen."""
        if rank not in (start.rank for start in self.starts) and not self._take(rank, pid):
            self.note(Start(rank, pid))
            self.note(End(rank, pid, None, time.monotonic(), self.server(rank)))

    def wait(self, timeout_s: float) -> Signal | None:
        """The next signal; None after ``timeout_s`` seconds at most."""
        if self._missing and time.monotonic() >= self._next_look:
            self._look()
            now = time.monotonic()
            self._next_look = now + (_LOOK_S if now < self._later else _LATER_LOOK_S)
        if self._missing:
            timeout_s = min(timeout_s, max(0.0, self._next_look - time.monotonic()))
        self._see(timeout_s)
        running = self.running
        if not running or min(running) < self._workers:
            self.servers_alone_since_s = None
        elif self.servers_alone_since_s is None:
            self.servers_alone_since_s = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            return Signal(*struct.unpack_from(_SIGNALFD_INFO, os.read(self._signals, _SIGNALFD_SIZE)))
        return None

    @property
    def running(self) -> set[int]:
        """The ranks that were seen to start, and not to end."""
        return {start.rank for start in self.starts} - self._ends.keys()

    def ends(self) -> list[End]:
        """The ends that were seen, the first one first; called once mpirun has ended and reaped its ranks."""
        self._see(0.0)
        late = {rank: descriptor for descriptor, (rank, _) in self._ranks.items()}
        return [
            end if end.status is not None or rank not in late else end._replace(status=_status_of_reaped(late[rank]))
            for rank, end in self._ends.items()
        ]

    def server(self, rank: int) -> int | None:
        """Which server a rank is, None for a worker."""
        return rank - self._workers if rank >= self._workers else None

    def name(self, rank: int) -> str:
        """``rank 2``, or ``server 0 (rank 2)``."""
        server = self.server(rank)
        return f"rank {rank}" if server is None else f"server {server} (rank {rank})"

    def nothing_is_left(self) -> bool:
        """Whether, of ranks that are gone, none is known to have ended well, or no process that they have started here
        runs on, whose output mpirun would wait for."""
        if all(end.status is None for end in self._ends.values()):
            return True
        return self._all == self._count and not living(self._mpirun) and living(os.getpid()) <= {self._mpirun}

    def notified(self, number: int) -> bool:
        """Whether all ranks have been started, here, and a signal has lost its default effect, to end them, on each.

        Then it was sent to each: an mpirun that has just started them now and then loses it.
        """
        pids = [pid for _, pid in _ranks_below(self._mpirun)]
        if len(pids) < self._count or not all(_takes(pid, number) for pid in pids):
            return False
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return True

    def _see(self, timeout_s: float) -> None:
        for descriptor, _ in self._poll.poll(timeout_s):  # those that became ready first come first
            if descriptor in self._others:
                self._others[descriptor]()
            elif descriptor in self._ranks:
                self._poll.unregister(descriptor)
                rank, pid = self._ranks[descriptor]
                status = _status_of_zombie(pid)
                status = _status_of_reaped(descriptor) if status is None else status
                self.note(End(rank, pid, status, time.monotonic(), self.server(rank)))

    def _look(self) -> None:
        known = {start.rank for start in self.starts}
        for rank, pid in _ranks_below(self._mpirun):
            if rank not in known:
                self._take(rank, pid)

    def _take(self, rank: int, pid: int) -> bool:
        """Whether there is such a process, whose end is waited for from now on."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        except (OSError, AttributeError):  # Python was built without
            return True
        self._ranks[descriptor] = rank, pid
        self.note(Start(rank, pid))
        self._poll.register(descriptor, select.EPOLLIN)
        self._missing -= 1
        return True


def _ranks_below(pid: int) -> Iterator[tuple[int, int]]:
    """(rank, pid) of the ranks among the descendants; what a rank has started itself carries its variables, too."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                rank, below = _rank(child), list[tuple[int, int]]()
                if rank is None:
                    below = list(_ranks_below(child))
                    rank = _rank(child)  # its program may have begun meanwhile, and started another
                if rank is None:
                    yield from below
                else:
                    yield rank, child


def _rank(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(_RANK_VARIABLES):
                return int(variable.partition(b"=")[2])
    return None


def _takes(pid: int, number: int) -> bool:
    """Whether a process catches or ignores a signal (proc(5), SigCgt and SigIgn)."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_bytes()
        masks = re.findall(rb"^Sig(?:Cgt|Ign):\s+([0-9a-f]+)$", status, re.MULTILINE)
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return False


def _status_of_zombie(pid: int) -> int | None:
    """From field 52 of /proc/PID/stat (proc(5)); None where its parent has been faster."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[49]) if fields[0] == b"Z" else None


def _status_of_reaped(descriptor: int) -> int | None:
    info = bytearray(struct.pack(_PIDFD_INFO, _PIDFD_INFO_EXIT, 0))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, status = struct.unpack(_PIDFD_INFO, info)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def _signal_descriptor(signals: set[signal.Signals]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = ctypes.create_string_buffer(128)
    libc.sigemptyset(wanted)
    for sign in signals:
        libc.sigaddset(wanted, int(sign))
    descriptor = int(libc.signalfd(-1, wanted, _SIGNALFD_FLAGS))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "signalfd")
    return descriptor


def name_of(sign: int) -> str:
    """Of a signal."""
    try:
        return signal.Signals(sign).name
    except ValueError:
        return f"signal {sign}"
