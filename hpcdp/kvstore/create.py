"""The kinds of stores, by name."""

from __future__ import annotations

from typing import NamedTuple

from ..comm import World, init
from ..errors import ConfigError
from .local import LocalStore
from .store import KVStore
from .sync import SyncStore


class Kind(NamedTuple):
    """What a name means."""

    scope: str
    """Whose pushes meet: those of one process, or of all ranks of a world."""
    sums: str
    """Where arrays of several devices are added up: in host memory, or on a device."""
    updates: str
    """Who changes a value, and when."""


KINDS = {
    "local": Kind("process", "host", "the process, at each push"),
    "device": Kind("process", "device", "the process, at each push"),
    "dist_sync": Kind("world", "host", "the owners of its parts, when all ranks have pushed"),
    "dist": Kind("world", "host", "as dist_sync, which it stands for"),
    "dist_device_sync": Kind("world", "device", "the owners of its parts, when all ranks have pushed"),
}
"""The valid names of `create`."""


def create(name: str = "local", world: World | None = None) -> KVStore:
    """A new store, without keys.

    Args:
        name: one of `KINDS`, exactly. Those that begin with ``dist`` every rank must make, in the same order.
        world: for those; default `hpcdp.init()`. The others start no MPI.

    Raises:
        ConfigError: there is no such kind.
    """
    if name not in KINDS:
        raise ConfigError("kvstore.create", where="name", expected=f"one of {', '.join(KINDS)}", got=repr(name))
    if KINDS[name].scope == "process":
        return LocalStore(name)
    return SyncStore(name, init() if world is None else world)
