"""The end of this process, its exit status, and the sockets that it or a child listens on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

from ..errors import ConfigError, HpcdpError, LaunchError, Terminated, report_directly
from .environment import launched_rank, launched_ranks

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit statuses after Ctrl-C and SIGTERM, as in a shell."""

_OF_ALL_S, _OF_SOME_S = 1.0, 0.2


def fail(reason: object, status: int, *, by_all: bool = False) -> int:
    """Write the reason on one line of stderr; exit if this is a rank, without MPI_Finalize, which waits for all ranks.

    Rank 0 reports first, so that mpirun ends the others before they repeat the same reason; if all ranks have certainly
    failed alike, the others report nothing. The launcher reports an interrupt.

    Args:
        reason: an error, or a text.
        status: the exit status.
        by_all: whether all ranks fail with this reason; implied by `HpcdpError.is_on_every_rank`.

    Returns:
        ``status``, outside a job.
    """
    rank = launched_rank()
    by_all = by_all or (isinstance(reason, HpcdpError) and reason.is_on_every_rank)
    if rank:
        time.sleep(_OF_ALL_S if by_all else _OF_SOME_S)
    if rank is None or (status not in (INTERRUPTED, TERMINATED) and not (rank and by_all)):
        is_alone = rank is None or launched_ranks() == 1
        of_each = by_all or isinstance(reason, ConfigError | LaunchError)  # a wrong argument is wrong on each rank
        is_named = isinstance(reason, HpcdpError) and reason.rank is not None
        who = "" if is_alone or of_each or is_named else f"rank {rank}: "
        with contextlib.suppress(OSError):  # a closed terminal may be the reason
            report_directly(f"hpcdp: {who}{reason}")
    if rank is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status


def end_early(error: KeyboardInterrupt | OSError, what: str) -> int:
    """End the command ``what`` after Ctrl-C or SIGTERM, or a failed write to its standard output; raise other errors.

    Returns:
        The exit status, outside a job.
    """
    if isinstance(error, Terminated):
        return fail("ended by SIGTERM", TERMINATED)
    if isinstance(error, KeyboardInterrupt):
        return fail("interrupted", INTERRUPTED)
    if isinstance(error, BrokenPipeError):
        lead_nowhere(sys.stdout.fileno())  # Python flushes it once more when it ends
        return 128 + signal.SIGPIPE
    if _can_be_written(sys.stdout):
        raise error
    lead_nowhere(sys.stdout.fileno())
    return fail(HpcdpError(what, where="standard output", got=error.strerror), 1)


def lead_nowhere(descriptor: int) -> None:
    """Redirect ``descriptor`` to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere == descriptor:
        os.set_inheritable(nowhere, True)
        return
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _can_be_written(stream: TextIO) -> bool:
    try:
        print(file=stream, flush=True)
    except OSError:
        return False
    return True


_status = 0


def exit_status() -> int:
    """Return the status of the last uncaught `sys.exit`, which is the program's exit status; 0 before any."""
    return _status


class _Exit(SystemExit):
    __module__ = "builtins"

    @property
    def code(self) -> Any:  # type: ignore[override]
        code = vars(SystemExit)["code"].__get__(self)
        if sys._getframe().f_back is None:  # the interpreter itself reads the code: the program has ended
            global _status
            _status = code & 0xFF if isinstance(code, int) else int(code is not None)
        return code

    def __reduce__(self) -> tuple[type[SystemExit], tuple[Any, ...]]:  # to be sent to another process
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = SystemExit.__name__  # in tracebacks


def _exit(status: object = None, /) -> NoReturn:
    """Replace `sys.exit`."""
    raise _Exit(status)


def record_exit_status() -> None:
    """Record the status that the program passes to `sys.exit` from now on; `exit_status` returns it.

    Python calls no hook for SystemExit, but the interpreter reads the code of one that nobody has caught. In jobs of
    several ranks `sys.exit` therefore raises an exception that records the reading. hpcdp calls this at import, because
    ``sys.exit(main())`` looks up the name before it calls ``main``. A SystemExit that the program makes itself, ``raise
    SystemExit(3)``, is not recorded.
    """
    sys.exit = _exit


_PIDFD_GETFD = 438
"""The number of the system call on all architectures, Linux 5.6 and later."""
_ALL_ADDRESSES = ("0.0.0.0", "::")


def keep_to_interface(interface: str, pid: int) -> None:
    """Bind the sockets of a process that listen on all addresses to ``interface``.

    Does nothing where the kernel denies access to the sockets of ``pid``, a child of this process: without pidfds, or
    in a container that forbids them.
    """
    with contextlib.suppress(OSError, AttributeError):
        process = os.pidfd_open(pid)
        try:
            for descriptor in _sockets(pid):
                copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
                if copy >= 0:
                    _bind(copy, interface)
        finally:
            os.close(process)


@contextlib.contextmanager
def kept_to_interface(interface: str) -> Iterator[None]:
    """Bind the sockets that this process opens in this context, as `keep_to_interface` does."""
    before = _sockets(os.getpid())
    yield
    for descriptor in _sockets(os.getpid()) - before:
        _bind(os.dup(descriptor), interface)


def _sockets(pid: int) -> set[int]:
    descriptors = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    descriptors.add(int(name))
    return descriptors


def _bind(descriptor: int, interface: str) -> None:
    """Bind the socket of a descriptor if it listens on all addresses; close the descriptor."""
    with socket.socket(fileno=descriptor) as listener, contextlib.suppress(OSError):
        if (
            listener.family in (socket.AF_INET, socket.AF_INET6)
            and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            and listener.getsockname()[0] in _ALL_ADDRESSES
        ):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, f"{interface}\0".encode())
