"""The processes of a job: their starts and ends, and the removal of what they leave behind.

- `Watch` observes the ranks below an mpirun: the order in which they end, and their statuses, which mpirun does not
  report. A pidfd of each rank wakes the launcher when the rank ends. Without /proc or pidfds nothing is observed, and
  only mpirun's output and status are known.
- `bound`, `adopt` and `end_orphans` end children with this process (prctl(2)), and orphans that it adopts as subreaper.
- `new` and `named` make folders that are removed with the job, or by the next job if their process was killed. Programs
  in them are executed, so a folder that other users could change or replace is refused. A folder is locked while a
  process needs it (flock(2)); an unlocked one was left behind. On network file systems without locks it stays.
- `own_folder` and `files_of_mpich_removed` clean /dev/shm, which is memory, and /tmp: ranks and daemons that a signal
  ends do not remove their files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..core.files import who_else_may_write
from . import hosts

LIMIT_S = 60.0
_WRAPPED_FROM = 55
"""Least number of characters of a line that an MPI library has wrapped."""


def child(command: list[str], answer: str = "") -> tuple[int, str]:
    """Run a command that might crash or hang, for at most `LIMIT_S` seconds.

    Returns:
        The exit status, 124 after the time limit, and the reason of a failure, or the last line of the output: of a
        command that succeeds the last one that begins with ``answer``, as MPI libraries may print lines after it.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace"
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return 124, f"nothing for {LIMIT_S:.0f} s: it hangs"
    lines = [line.rstrip() for line in output.splitlines() if set(line.strip()) - {"-"}]
    if not lines:
        return process.returncode, ""
    if process.returncode != 0:
        return process.returncode, _last_reason(output)
    return 0, next((line for line in reversed(lines) if line.startswith(answer)), lines[-1]).strip()


def _last_reason(output: str) -> str:
    """Return the first sentence of the last message, which MPI libraries wrap; a traceback ends in one line."""
    lines = [line.rstrip() for line in output.splitlines()]
    while not set(lines[-1].strip()) - {"-"}:
        lines.pop()
    first = len(lines) - 1
    while first > 0 and len(lines[first - 1]) >= _WRAPPED_FROM and not lines[first - 1].startswith((" ", "-")):
        first -= 1
    message = " ".join(line.strip() for line in lines[first:])
    return re.split(r"(?<=[a-z])\. (?=[A-Z])", message)[0]


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def bound(blocked: Iterable[int] = ()) -> Callable[[], None]:
    """Return a ``preexec_fn`` for a child that gets SIGTERM when this process ends, and blocks only ``blocked``."""
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    return before_exec


def adopt() -> None:
    """Make this process the subreaper of its descendants: the parent of those whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans() -> None:
    """End every child of this process, including adopted ones, by SIGTERM and then SIGKILL."""
    for sign, grace_s in ((signal.SIGTERM, 0.5), (signal.SIGKILL, 2.0)):
        deadline = time.monotonic() + grace_s
        signaled: set[int] = set()
        while (left := children()) and time.monotonic() < deadline:
            for pid in left - signaled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sign)
            signaled |= left
            time.sleep(0.01)
        if not left:
            return


def children() -> set[int]:
    """Reap the ended children of this process and return the others; some may have ended meanwhile."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return set()
    return {pid for pid, _ in _below(os.getpid())}


def living(parent: int) -> set[int]:
    """Return the children of a process that have not ended, without reaping any."""
    return {pid for pid, state in _below(parent) if state != b"Z"}


def _below(parent: int) -> Iterator[tuple[int, bytes]]:
    """Yield the children of a process and their states (proc(5))."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, its_parent, *_ = stat.read_bytes().rpartition(b")")[2].split()
            if int(its_parent) == parent:
                yield int(stat.parent.name), state


_OPENED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def new(base: Path, prefix: str) -> Iterator[Path]:
    """Make a folder with a new name in ``base``, for this user alone; remove it at the end of the context.

    Raises:
        OSError: it cannot be made, or others may write to ``base`` and replace it.
    """
    _remove_left_behind(base, prefix)
    with _kept(lambda: Path(tempfile.mkdtemp(prefix=prefix, dir=base))) as folder:
        yield folder


def of_this_host(prefix: str) -> str:
    """Return a prefix with the host's name, ``hpcdp-hosts-node1-``, since locks of other hosts are not visible."""
    return f"{prefix}-{socket.gethostname().partition('.')[0]}-"


@contextlib.contextmanager
def named(folder: Path, prefix: str) -> Iterator[None]:
    """Make ``folder``, whose name begins with ``prefix``, unless it exists; remove it at the end of the context.

    Raises:
        OSError: it cannot be made, or others may change it.
    """

    def make() -> Path:
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    _remove_left_behind(folder.parent, prefix)
    with _kept(make):
        yield


@contextlib.contextmanager
def _kept(make: Callable[[], Path]) -> Iterator[Path]:
    """Make and lock a folder; make it again if another process removes it as left behind before it is locked."""
    while True:
        folder = make()
        try:
            lock = os.open(folder, _OPENED)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):  # a file system without locks
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
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            lock = os.open(folder, _OPENED)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


_FOLDER = Path("/dev/shm")
_FOLDER_VARIABLES = (
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_osc_sm_backing_directory",
    # An mpirun does not start if a killed one of the same process number has left its files.
    "PRTE_MCA_prte_tmpdir_base",
)
_PREFIX, _OF_MPICH = "hpcdp-segments-", "mpich_shm_*"
# hydra's daemon writes the machine's topology for its ranks to /tmp, whatever TMPDIR is.
_TOPOLOGIES, _DAEMON = (Path("/tmp"), "hydra_hwloc_xmlfile_*"), "hydra_pmi_proxy"
_CLOCKS_DIFFER_S, _OLD_S = 2.0, 60.0


@contextlib.contextmanager
def own_folder(environ: Mapping[str, str]) -> Iterator[tuple[dict[str, str], Path | None]]:
    """Yield ``environ`` with a new folder for the files of Open MPI 5, and that folder; remove it at the end.

    The folder is None where the user has set all variables for it, or where it cannot be made.
    """
    unset = [name for name in _FOLDER_VARIABLES if name not in environ]
    with contextlib.ExitStack() as stack:
        folder = None
        if unset:
            with contextlib.suppress(OSError):  # a site may forbid it; Open MPI then reports what it needs
                folder = stack.enter_context(new(_FOLDER, _PREFIX))
        yield {**environ, **(dict.fromkeys(unset, str(folder)) if folder else {})}, folder


def same_folder(name: str) -> contextlib.AbstractContextManager[None]:
    """Make the folder of the launcher's `own_folder` on another host, until the end of the context."""
    return named(Path(name), _PREFIX)


@contextlib.contextmanager
def files_of_mpich_removed() -> Iterator[None]:
    """Remove MPICH's files, whose folder cannot be set, at the end of the context.

    These are unused segments, made during the context or by jobs whose launcher was killed, and the files of ended
    daemons. Segments of concurrent jobs are mapped or held open from their creation on. Those of a job that starts in
    another container, whose processes are not visible, are younger than a minute.
    """
    before = set(_FOLDER.glob(_OF_MPICH))
    try:
        yield
    finally:
        segments = set(_FOLDER.glob(_OF_MPICH))  # listed before files_in_use: a later one would look unused
        used = hosts.files_in_use(f"{_FOLDER}/") if segments else set()
        old_s = time.time() - _OLD_S
        for path in segments:
            with contextlib.suppress(OSError):
                info = path.stat()
                is_ours = info.st_uid == os.getuid() and str(path) not in used
                if is_ours and (path not in before or info.st_mtime < old_s):
                    path.unlink()
        _remove_topologies()


def _remove_topologies() -> None:
    """Remove this user's topology files that are older than every running daemon."""
    folder, names = _TOPOLOGIES
    oldest_s = min(hosts.started_at_s(_DAEMON), default=float("inf")) - _CLOCKS_DIFFER_S
    for path in folder.glob(names):
        with contextlib.suppress(OSError):
            info = path.lstat()
            if info.st_uid == os.getuid() and info.st_mtime < oldest_s:
                path.unlink()


_RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")
_LOOK_S, _LOOK_SOON_S, _LATER_LOOK_S = 0.02, 10.0, 1.0
"""Seconds between two searches for ranks, for the first seconds and later; a failing import takes some 50 ms."""

# linux/pidfd.h, Linux 6.15 and later: the status of a process that its parent has reaped
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT, _PIDFD_INFO = 0xC040FF0B, 1 << 3, "=Q52xi"
# linux/signalfd.h
_SIGNALFD_INFO, _SIGNALFD_SIZE, _SIGNALFD_FLAGS = "=I4xi", 128, os.O_CLOEXEC | os.O_NONBLOCK


class End(NamedTuple):
    """The end of a rank: its wait status (wait(2)), None where unknown, and the monotonic time of its observation."""

    rank: int
    pid: int
    status: int | None
    at_s: float
    server: int | None = None
    """The number of the server, from 0; None for a worker."""
    host: str | None = None
    """The rank's host; None for this machine."""

    @property
    def exit_status(self) -> int:
        """Return the status in the shell's convention: 128 + the number of a signal; 0 where it is unknown."""
        code = os.waitstatus_to_exitcode(self.status or 0)
        return code if code >= 0 else 128 - code

    @property
    def who(self) -> str:
        """Return the rank or the server, with its process and host."""
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
    """A signal to the launcher: its number and its origin (``si_code``, sigaction(2))."""

    number: int
    code: int


class Start(NamedTuple):
    """The observed start of a rank; ``host`` is None for this machine."""

    rank: int
    pid: int
    host: str | None = None


class Watch:
    """An observer of signals, which the caller has blocked, and of the ends of the ranks below ``mpirun``.

    Args:
        mpirun: process number of a child of this process, or of this process itself.
        ranks: number of ranks on this machine.
        signals: the signals that `wait` receives.
        servers: number of servers, which are the last ranks.
        elsewhere: number of ranks on other hosts, which `note` reports.
    """

    def __init__(
        self, mpirun: int, ranks: int, signals: set[signal.Signals], servers: int = 0, elsewhere: int = 0
    ) -> None:
        self._mpirun, self._count, self._missing, self._workers = mpirun, ranks, ranks, ranks + elsewhere - servers
        self._all = ranks + elsewhere
        self._next_look = time.monotonic() + _LOOK_S
        self._later = time.monotonic() + _LOOK_SOON_S
        self._ranks: dict[int, tuple[int, int]] = {}  # by pidfd: rank and pid
        self._when_ready: dict[int, Callable[[], object]] = {}
        self.starts: list[Start] = []
        """The observed starts, in order."""
        self._ends: dict[int, End] = {}  # by rank, the first end first
        self.failed: End | None = None
        """The first end with a status other than 0, observed while mpirun ran."""
        self.all_gone_at_s: float | None = None
        """The monotonic time at which all ranks had ended, if none failed."""
        self.servers_alone_since_s: float | None = None
        """The monotonic time since which only servers run; None while there are workers."""
        self._signals = _signal_descriptor(signals)
        self._poll = select.epoll()
        self._poll.register(self._signals, select.EPOLLIN)

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in (self._signals, *self._ranks):
            os.close(descriptor)
        self._poll.close()

    def also(self, descriptor: int, when_ready: Callable[[], object], event: int = select.EPOLLIN) -> None:
        """Call ``when_ready`` from `wait` whenever ``descriptor`` is ready for ``event``, until `no_more`."""
        self._when_ready[descriptor] = when_ready
        self._poll.register(descriptor, event)

    def no_more(self, descriptor: int) -> None:
        """Undo `also`; call this before closing the descriptor."""
        if self._when_ready.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def note(self, event: Start | End) -> None:
        """Record a start or an end, observed here or reported by another host."""
        if isinstance(event, Start):
            self.starts.append(event)
        elif event.rank not in self._ends:
            self._ends[event.rank] = event
            if event.status and self.failed is None:
                self.failed = event
            if len(self._ends) == self._all and self.failed is None:
                self.all_gone_at_s = event.at_s

    def know_of(self, rank: int, pid: int) -> None:
        """Record a rank of this machine that mpirun has reported; it may have ended before it was observed."""
        if rank not in (start.rank for start in self.starts) and not self._take(rank, pid):
            self.note(Start(rank, pid))
            self.note(End(rank, pid, None, time.monotonic(), self.server(rank)))

    def wait(self, timeout_s: float) -> Signal | None:
        """Wait for the next signal and return it; None after at most ``timeout_s`` seconds."""
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
        """Return the ranks that have started and not ended."""
        return {start.rank for start in self.starts} - self._ends.keys()

    def ends(self) -> list[End]:
        """Return the observed ends in order; call this once mpirun has ended and reaped its ranks."""
        self._see(0.0)
        late = {rank: descriptor for descriptor, (rank, _) in self._ranks.items()}
        return [
            end if end.status is not None or rank not in late else end._replace(status=_status_of_reaped(late[rank]))
            for rank, end in self._ends.items()
        ]

    def server(self, rank: int) -> int | None:
        """Return the number of the server that ``rank`` is; None for a worker."""
        return rank - self._workers if rank >= self._workers else None

    def name(self, rank: int) -> str:
        """Return ``"rank 2"``, or ``"server 0 (rank 2)"``."""
        server = self.server(rank)
        return f"rank {rank}" if server is None else f"server {server} (rank {rank})"

    def nothing_is_left(self) -> bool:
        """Return whether mpirun has nothing to wait for, once all ranks have ended.

        True if no rank is known to have succeeded, or no process runs on here whose output mpirun would wait for.
        """
        if all(end.status is None for end in self._ends.values()):
            return True
        return self._all == self._count and not living(self._mpirun) and living(os.getpid()) <= {self._mpirun}

    def notified(self, number: int) -> bool:
        """Send a signal to all ranks once all run on this machine and handle it; return whether it was sent.

        An mpirun that has just started its ranks sometimes loses a signal.
        """
        pids = [pid for _, pid in _ranks_below(self._mpirun)]
        if len(pids) < self._count or not all(_takes(pid, number) for pid in pids):
            return False
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return True

    def _see(self, timeout_s: float) -> None:
        for descriptor, _ in self._poll.poll(timeout_s):  # in the order in which they became ready
            if descriptor in self._when_ready:
                self._when_ready[descriptor]()
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
        """Observe the end of a process; return whether it exists."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        except (OSError, AttributeError):  # a Python built without pidfds
            return True
        self._ranks[descriptor] = rank, pid
        self.note(Start(rank, pid))
        self._poll.register(descriptor, select.EPOLLIN)
        self._missing -= 1
        return True


def _ranks_below(pid: int) -> Iterator[tuple[int, int]]:
    """Yield (rank, pid) of the ranks among the descendants, but not a rank's children, which inherit its variables."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                rank, below = _rank(child), list[tuple[int, int]]()
                if rank is None:
                    below = list(_ranks_below(child))
                    rank = _rank(child)  # it may have become the rank meanwhile, and started a child
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
    """Return whether a process catches or ignores a signal (proc(5), SigCgt and SigIgn)."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_bytes()
        masks = re.findall(rb"^Sig(?:Cgt|Ign):\s+([0-9a-f]+)$", status, re.MULTILINE)
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return False


def _status_of_zombie(pid: int) -> int | None:
    """Return the status in field 52 of /proc/PID/stat (proc(5)); None where the parent has already reaped it."""
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
    mask = ctypes.create_string_buffer(128)
    libc.sigemptyset(mask)
    for sign in signals:
        libc.sigaddset(mask, int(sign))
    descriptor = int(libc.signalfd(-1, mask, _SIGNALFD_FLAGS))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "signalfd")
    return descriptor


def name_of(sign: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(sign).name
    except ValueError:
        return f"signal {sign}"
