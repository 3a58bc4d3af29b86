"""Restriction of listening TCP sockets to one network interface.

Open MPI and hydra bind the sockets that they listen on to all addresses, whatever interface they are given. A socket
that is bound to an interface (socket(7), SO_BINDTODEVICE) refuses connections through any other; ss shows it as
``0.0.0.0%lo:40123``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator

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
