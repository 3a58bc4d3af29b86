"""What becomes of processes when others end (prctl(2)): children that end with this one, and those that others have
left behind, which became children of this one, a subreaper, and are ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

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
