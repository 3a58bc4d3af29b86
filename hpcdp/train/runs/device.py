"""Where the ranks of a run compute: on GPUs or on the host, all alike."""

from __future__ import annotations

import os
import socket
from collections import Counter
from typing import TYPE_CHECKING

from ...comm import World, gpus
from ...comm.agreement import on_every_rank
from ...devices import MEMORY_LIMIT, Device, cpu
from ...errors import ConfigError

if TYPE_CHECKING:
    from .config import TrainConfig


_FOR_POOLS = 0.9
"""Of a GPU's memory, where ranks share it; the rest is for what is not in their pools."""


def choose_device(config: TrainConfig, world: World) -> Device:
    """Where this rank computes; a GPU becomes this thread's current one. Every rank must call.

    Raises:
        ConfigError: GPUs are asked for, and some rank has none; on every rank.
    """
    if config.device == "gpu":
        on_every_rank(world.comm, lambda: require_gpu(world.device))
    elif config.device == "cpu" or config.for_host or "cpu" in world.comm.allgather_json(world.device.kind):
        return cpu()
    world.device.use()
    _share_memory(world)
    return world.device


def _share_memory(world: World) -> None:
    """Ranks that share a GPU get equal parts of its memory, unless CuPy is told otherwise; every rank must call.

    The pool of each keeps what it has once taken, also when another one needs it, but not beyond its limit.
    """
    uuid = next((each.uuid for each in gpus.visible() if each.index == world.device.index), "")
    found = {tuple(each) for each in world.comm.allgather_json([uuid, socket.gethostname(), os.getpid()])}
    sharing = sum(of_other == uuid for of_other, _, _ in found)
    if sharing > 1 and not os.environ.get(MEMORY_LIMIT):
        world.device.limit_memory(_FOR_POOLS / sharing)


def require_gpu(device: Device) -> None:
    """Raises `ConfigError` unless ``device`` is a GPU, which it is where there are one and CuPy."""
    if device.kind != "gpu":
        there, remedy = "no GPU that CUDA's driver shows", "a machine with a GPU, or device=cpu"
        if gpus.visible():
            there, remedy = "no CuPy", "pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]', or device=cpu"
        raise ConfigError("setting device", expected="a GPU for each rank, and CuPy", got=there, remedy=remedy)


def described(device: Device, world: World) -> str | None:
    """The GPUs of all ranks in words, None where they compute on the host; every rank must call."""
    if device.kind == "cpu":
        return None
    own = next(each for each in gpus.visible() if each.index == device.index)
    found = world.comm.allgather_json([world.node, own.uuid, own.name])
    number = Counter(name for _, _, name in {tuple(each) for each in found})
    return ", ".join(f"{count} x {name}" for name, count in sorted(number.items()))
