"""The network interface that a job's traffic between hosts takes."""

from __future__ import annotations

import socket
from pathlib import Path

from hpcdp.errors import ConfigError


def here() -> list[str]:
    """The names of this machine's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def check(name: str) -> None:
    """Raises `ConfigError`, which lists the interfaces that there are, unless this machine has that one."""
    if name not in here():
        raise ConfigError("launch --interface", expected=f"one of {', '.join(here())}", got=repr(name))


def devices(name: str) -> str:
    """What UCX calls an interface: itself, and before it the adapters that it belongs to, e.g. ``mlx5_0:1,ib0``."""
    adapters = sorted(Path("/sys/class/net", name, "device", "infiniband").glob("*"))
    return ",".join([*(f"{adapter.name}:1" for adapter in adapters), name])
