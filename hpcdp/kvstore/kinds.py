"""What the names of stores mean."""

from __future__ import annotations

from typing import NamedTuple


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
    "dist_async": Kind("world", "host", "whoever pushes, or the server that keeps it, at each push"),
}
"""The valid names of `create`."""
