"""The network interface that a job's traffic between hosts takes."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

from ..errors import ConfigError

# netdevice(7) and linux/if.h: a struct ifreq is 40 bytes, the name in 16 and then the flags
_GET_FLAGS, _REQUEST, _FLAGS_AT, _UP, _LOOPBACK = 0x8913, "16sH22x", 16, 0x1, 0x8


def here() -> list[str]:
    """The names of this machine's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def to_other_hosts() -> list[str]:
    """Of those the ones that are up and no loopback."""
    return [name for name in here() if _flags(name) & (_UP | _LOOPBACK) == _UP]


def is_loopback(name: str) -> bool:
    """Whether an interface of this machine leads to itself alone."""
    return bool(_flags(name) & _LOOPBACK)


def loopback() -> str:
    """The name of the one that leads to this machine alone."""
    return next(filter(is_loopback, here()), "lo")


def check(name: str, *, several_hosts: bool) -> None:
    """Raises `ConfigError`, which lists what is valid, unless this machine has that interface, and it leads to the
    others where there are several."""
    valid = to_other_hosts() if several_hosts else here()
    if name in valid:
        return
    why = ", which leads to no other host" if name in here() else ""
    expected = f"one of {', '.join(valid)}" if valid else "a machine with an interface that is up"
    raise ConfigError("launch --interface", expected=expected, got=f"{name!r}{why}")


def problem(name: str) -> str | None:
    """Why an interface cannot carry traffic between this machine and others; None where it can."""
    valid = to_other_hosts()
    if name in valid:
        return None
    what = f"network interface {name!r} leads to no other host" if name in here() else f"no network interface {name!r}"
    return f"{what}; valid: {', '.join(valid) or 'none is up'}"


def devices(name: str) -> str:
    """What UCX calls an interface: itself, and before it the adapters that it belongs to, e.g. ``mlx5_0:1,ib0``."""
    adapters = sorted(Path("/sys/class/net", name, "device", "infiniband").glob("*"))
    return ",".join([*(f"{adapter.name}:1" for adapter in adapters), name])


def _flags(name: str) -> int:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack(_REQUEST, name.encode(), 0)
        return int(struct.unpack_from("H", fcntl.ioctl(any_socket, _GET_FLAGS, request), _FLAGS_AT)[0])
    return 0
