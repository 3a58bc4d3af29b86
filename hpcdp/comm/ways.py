"""How a node's ranks sum what they have on their GPUs: what each of them offers, and what is chosen.

Two ranks have the same GPU where it has one place on the PCI bus: numbers are each process's own. NCCL refuses such
ranks, or hangs; CUDA IPC is for them.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from os import getpid

from ..devices import Device
from ..errors import DeviceError
from . import gpus
from .communicator import Communicator


class Way(Enum):
    """How a node's ranks sum what they have on their GPUs."""

    ALONE = "this node has one rank"
    NCCL = "NCCL: each rank has a GPU of its own"
    CUDA_IPC = "CUDA IPC: all ranks share one GPU, and one of them sums for all"
    GROUPS = "CUDA IPC among the ranks of each GPU, NCCL between the GPUs"
    HOST = "in host memory, each rank for itself"


@dataclass(frozen=True)
class Offer:
    """What a rank has for sums on GPUs."""

    bus_id: str = ""
    """See `Gpu`; empty where the rank has none."""
    uuid: str = ""
    nccl: int = 0
    """The version of NCCL that CuPy has loaded; 0 where there is none."""
    shares_memory: bool = True
    """Whether it shares host memory with all other ranks of its node."""
    pid: int = 0
    """Of its process."""


def own_offer(device: Device, *, shares_memory: bool) -> Offer:
    """That of this rank; imports CuPy where ``device`` is a GPU."""
    seen = gpus.visible()
    if device.kind == "cpu" or device.index >= len(seen):
        return Offer(shares_memory=shares_memory)
    mine = seen[device.index]
    return Offer(mine.bus_id, mine.uuid, _nccl_version(), shares_memory, getpid())


def _nccl_version() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's, where there is none: `choose` says what to do
        nccl = importlib.import_module("cupy.cuda.nccl")
    return nccl.get_version() if nccl.available else 0


def offers(comm: Communicator, mine: Offer) -> list[Offer]:
    """That of each rank of ``comm``; every rank must call."""
    return [Offer(**each) for each in comm.allgather_json(asdict(mine))]


def choose(found: Sequence[Offer]) -> tuple[Way, str]:
    """The way of a node whose ranks have these offers, and a word on why; alike on all ranks, which have the same."""
    if len(found) == 1:
        return Way.ALONE, Way.ALONE.value
    without = [rank for rank, each in enumerate(found) if not each.bus_id]
    if without:
        return Way.HOST, f"local rank {without[0]} has no GPU"
    if not all(each.shares_memory for each in found):
        return Way.HOST, "its ranks share no host memory, in which they say how far they are"
    groups = by_gpu(found)
    for ranks in groups:
        if len({found[rank].uuid for rank in ranks}) > 1:
            first, second = ranks[:2]
            return Way.HOST, f"local ranks {first} and {second} have instances of one GPU (MIG), which share no memory"
        if len({found[rank].pid for rank in ranks}) < len(ranks):
            return Way.HOST, "its ranks are threads of one process, and CUDA IPC opens no handle of its own process"
    if len(groups) == 1:
        return Way.CUDA_IPC, Way.CUDA_IPC.value
    without = [rank for rank, each in enumerate(found) if not each.nccl]
    if without:
        return Way.HOST, f"local rank {without[0]} has no NCCL; pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]'"
    versions = sorted({each.nccl for each in found})
    if len(versions) > 1:
        return Way.HOST, f"its ranks have different versions of NCCL, {' and '.join(map(str, versions))}"
    way = Way.NCCL if len(groups) == len(found) else Way.GROUPS
    return way, way.value


def by_gpu(found: Sequence[Offer]) -> list[list[int]]:
    """The local ranks of each GPU, by the first of them."""
    groups: dict[str, list[int]] = {}
    for rank, each in enumerate(found):
        groups.setdefault(each.bus_id, []).append(rank)
    return list(groups.values())


def refuse_shared(found: Sequence[Offer]) -> None:
    """Raise `DeviceError` where two ranks have one GPU: NCCL may hang there."""
    ranks = next((ranks for ranks in by_gpu(found) if len(ranks) > 1), None)
    if ranks is not None:
        raise DeviceError(
            "NCCL", where=f"GPU {found[ranks[0]].bus_id}", expected="one rank on each GPU",
            got=f"local ranks {', '.join(map(str, ranks))}",
            remedy="start as many ranks a node as it has GPUs, which all see (srun --gres=gpu:N --gpu-bind=none); "
            "ranks that share one GPU sum through CUDA IPC",
        )  # fmt: skip
