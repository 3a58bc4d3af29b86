"""The processes of a job, watched.

The ranks of a job while they run: where they start, in which order they end, and how; mpirun does not say.

A pidfd of each rank wakes the launcher when the rank ends; between such ends it sleeps. Where /proc or pidfds are not
to be had, nothing is known and mpirun's own words and status stand.

What a job leaves behind: processes, folders, segments of shared memory.

Commands that might crash or hang, run as children with a limit, and what they say.

What becomes of processes when others end (prctl(2)): children that end with this one, and those that others have
left behind, which became children of this one, a subreaper, and are ended.

Folders of a job's own, removed with it: by the next job where the process that made one was killed.

What is in it is executed, or says what is, so a folder that other users could change or exchange is refused.

A folder is locked as long as a process lives that needs it (flock(2)), so one that nobody has locked was left behind.
Where a file system of the network knows no such locks, what was left behind stays.

What a job leaves in /dev/shm, which is memory, and in /tmp: ranks and daemons that a signal ends do not remove their
own files.
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
"""So many characters a line has at least that an MPI library has wrapped."""


def child(command: list[str], answer: str = "") -> tuple[int, str]:
    """Exit status of ``command``, ended with all its children at the limit, and its last line or what it failed of.

    Of a command that has succeeded it is the last line that begins with ``answer``, if there is one: MPI libraries may
    have the last word.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return 124, f"nothing for {LIMIT_S:.0f} s: it hangs"
    lines = [line.rstrip() for line in said.splitlines() if set(line.strip()) - {"-"}]
    if not lines:
        return process.returncode, ""
    if process.returncode != 0:
        return process.returncode, _last_reason(said)
    return 0, next((line for line in reversed(lines) if line.startswith(answer)), lines[-1]).strip()


def _last_reason(said: str) -> str:
    """The first sentence of the last message in ``said``: MPI libraries wrap theirs, a traceback ends in one line."""
    lines = [line.rstrip() for line in said.splitlines()]
    while not set(lines[-1].strip()) - {"-"}:
        lines.pop()
    first = len(lines) - 1
    while first > 0 and len(lines[first - 1]) >= _WRAPPED_FROM and not lines[first - 1].startswith((" ", "-")):
        first -= 1
    message = " ".join(line.strip() for line in lines[first:])
    return re.split(r"(?<=[a-z])\. (?=[A-Z])", message)[0]


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def bound(blocked: Iterable[int] = ()) -> Callable[[], None]:
    """The ``preexec_fn`` of a child that gets SIGTERM when this process ends, and begins with these signals blocked
    alone, whatever this process has blocked."""
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    return before_exec


def adopt() -> None:
    """Make this process the parent of all processes below it whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans() -> None:
    """Ends every process below this one, those that it has started itself among them."""
    for sign, grace_s in ((signal.SIGTERM, 0.5), (signal.SIGKILL, 2.0)):
        deadline = time.monotonic() + grace_s
        told: set[int] = set()
        while (left := children()) and time.monotonic() < deadline:
            for pid in left - told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sign)
            told |= left
            time.sleep(0.01)
        if not left:
            return


def children() -> set[int]:
    """The children of this process, those that have ended since others were reaped among them."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return set()
    return {pid for pid, _ in _below(os.getpid())}


def living(parent: int) -> set[int]:
    """The children of a process that have not ended; none is reaped."""
    return {pid for pid, state in _below(parent) if state != b"Z"}


def _below(parent: int) -> Iterator[tuple[int, bytes]]:
    """The children of a process, and their states (proc(5))."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, its_parent, *_ = stat.read_bytes().rpartition(b")")[2].split()
            if int(its_parent) == parent:
                yield int(stat.parent.name), state


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


_FOLDER = Path("/dev/shm")
_FOLDER_VARIABLES = (
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_osc_sm_backing_directory",
    # An mpirun does not start where one of the same process number, which was killed, has left its files.
    "PRTE_MCA_prte_tmpdir_base",
)
_PREFIX, _OF_MPICH = "hpcdp-segments-", "mpich_shm_*"
# hydra's daemon writes the machine's topology there, wherever TMPDIR is, for its ranks to read.
_TOPOLOGIES, _DAEMON = (Path("/tmp"), "hydra_hwloc_xmlfile_*"), "hydra_pmi_proxy"
_CLOCKS_DIFFER_S, _OLD_S = 2.0, 60.0


@contextlib.contextmanager
def own_folder(environ: Mapping[str, str]) -> Iterator[tuple[dict[str, str], Path | None]]:
    """``environ`` with a folder of the job's own for the files of Open MPI 5, and that folder, which is removed with
    all that is in it; None where the user has named others for all of them."""
    unset = [name for name in _FOLDER_VARIABLES if name not in environ]
    with contextlib.ExitStack() as stack:
        folder = None
        if unset:
            with contextlib.suppress(OSError):  # a site may forbid it; Open MPI then says what it needs itself
                folder = stack.enter_context(new(_FOLDER, _PREFIX))
        yield {**environ, **(dict.fromkeys(unset, str(folder)) if folder else {})}, folder


def same_folder(name: str) -> contextlib.AbstractContextManager[None]:
    """On another host the folder that `own_folder` has made on the launcher's."""
    return named(Path(name), _PREFIX)


@contextlib.contextmanager
def files_of_mpich_removed() -> Iterator[None]:
    """Removes what MPICH, which takes no folder for it, has left behind: segments that were made meanwhile, or by jobs
    whose launcher was killed, and that nobody uses, and files of daemons that have gone.

    Segments of jobs that run beside this one are mapped or held open from their making on; those of a job that starts
    in another container, whose processes are not seen, are young.
    """
    before = set(_FOLDER.glob(_OF_MPICH))
    try:
        yield
    finally:
        there = set(_FOLDER.glob(_OF_MPICH))  # before who uses them is asked: no later one is taken for unused
        used = hosts.files_in_use(f"{_FOLDER}/") if there else set()
        old_s = time.time() - _OLD_S
        for path in there:
            with contextlib.suppress(OSError):
                found = path.stat()
                if str(path) in used or found.st_uid != os.getuid():
                    continue
                if path not in before or found.st_mtime < old_s:
                    path.unlink()
        _remove_topologies()


def _remove_topologies() -> None:
    """Those of this user that are older than every daemon that runs."""
    folder, names = _TOPOLOGIES
    oldest_s = min(hosts.started_at_s(_DAEMON), default=float("inf")) - _CLOCKS_DIFFER_S
    for path in folder.glob(names):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.getuid() and found.st_mtime < oldest_s:
                path.unlink()


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
