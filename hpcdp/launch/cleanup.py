"""What a job leaves behind: processes, folders, segments of shared memory.

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
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

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
