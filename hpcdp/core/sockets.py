"""TCP sockets that accept connections through one network interface alone.

Open MPI and hydra bind the sockets that they listen on to all addresses, whatever they are told of interfaces. Bound to
an interface (socket(7), SO_BINDTODEVICE) such a socket refuses what comes through any other; ss shows it as
``0.0.0.0%lo:40123``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator

_PIDFD_GETFD = 438
"""The number of the system call on all machines, Linux 5.6 and later."""
_ALL_ADDRESSES = ("0.0.0.0", "::")


def keep_to_interface(interface: str, pid: int) -> None:
    """Bind the sockets of a process that listen on all addresses to ``interface``.

    Does nothing where the kernel does not let this process reach those of ``pid``, a child of its own: without pidfds,
    or in a container that forbids them.
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
    """Bind those that this process itself opens in this context, as `keep_to_interface` does."""
    before = _sockets(os.getpid())
    yield
    for descriptor in _sockets(os.getpid()) - before:
        _bind(os.dup(descriptor), interface)


def _sockets(pid: int) -> set[int]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    found.add(int(name))
    return found


def _bind(descriptor: int, interface: str) -> None:
    """Bind the socket of a descriptor, which is closed, if it listens on all addresses."""
    with socket.socket(fileno=descriptor) as found, contextlib.suppress(OSError):
        if (
            found.family in (socket.AF_INET, socket.AF_INET6)
            and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            and found.getsockname()[0] in _ALL_ADDRESSES
        ):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, f"{interface}\0".encode())
