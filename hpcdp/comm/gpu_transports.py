"""The transports between GPUs of a node, and the rows of a bucket on them.

How a node's ranks sum what they have on their GPUs: what each of them offers, and what is chosen.

Two ranks have the same GPU where it has one place on the PCI bus: numbers are each process's own. NCCL refuses such
ranks, or hangs; CUDA IPC is for them.

Arrays of a node's ranks on its GPUs, summed where they lie: what NCCL and CUDA IPC both do, each in its way.

It is what the CPU's ranks do in shared memory (`hpcdp.data_parallel.reducer`): each rank has a row, which it fills;
parts of the columns have owners, in whose rows they are summed, in the order of the ranks where one GPU does it; owners
exchange their sums with other nodes; each part goes from its owner's row to all others. No call of it blocks the host.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from os import getpid
from typing import Protocol

import numpy as np

from ..core.arrays import Array
from ..core.devices import Device, Event, Stream, Streams
from ..errors import DeviceError
from . import world
from .communicator import Communicator, Steps, bounds


class GpuTransport(Enum):
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
    seen = world.visible()
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


def choose(found: Sequence[Offer]) -> tuple[GpuTransport, str]:
    """The way of a node whose ranks have these offers, and a word on why; alike on all ranks, which have the same."""
    if len(found) == 1:
        return GpuTransport.ALONE, GpuTransport.ALONE.value
    without = [rank for rank, each in enumerate(found) if not each.bus_id]
    if without:
        return GpuTransport.HOST, f"local rank {without[0]} has no GPU"
    if not all(each.shares_memory for each in found):
        return GpuTransport.HOST, "its ranks share no host memory, in which they say how far they are"
    groups = by_gpu(found)
    for ranks in groups:
        if len({found[rank].uuid for rank in ranks}) > 1:
            first, second = ranks[:2]
            return (
                GpuTransport.HOST,
                f"local ranks {first} and {second} have instances of one GPU (MIG), which share no memory",
            )
        if len({found[rank].pid for rank in ranks}) < len(ranks):
            return (
                GpuTransport.HOST,
                "its ranks are threads of one process, and CUDA IPC opens no handle of its own process",
            )
    if len(groups) == 1:
        return GpuTransport.CUDA_IPC, GpuTransport.CUDA_IPC.value
    without = [rank for rank, each in enumerate(found) if not each.nccl]
    if without:
        return GpuTransport.HOST, f"local rank {without[0]} has no NCCL; pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]'"
    versions = sorted({each.nccl for each in found})
    if len(versions) > 1:
        return GpuTransport.HOST, f"its ranks have different versions of NCCL, {' and '.join(map(str, versions))}"
    way = GpuTransport.NCCL if len(groups) == len(found) else GpuTransport.GROUPS
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


Part = tuple[int, int]
"""The first column and one after the last."""

OwnedPart = tuple[int, Part]
"""The rank in whose row the part is summed, and the part."""

SUMMED_KINDS = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
"""What both `kernels/reduce.cu` and the host, for other nodes, add up."""


@dataclass(frozen=True)
class RowSize:
    """How long a row is, and of what."""

    count: int
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Of the row."""
        return self.count * self.dtype.itemsize


class NodeRows(Protocol):
    """One row for each rank of a node.

    A machine has ended when its work is given to `stream`, and need not be done: what `stream` is given next finds the
    sums. The ranks of a node may run the machines of different rows in different orders. Where rows share `stream`
    (NCCL's do) each machine has its turn there. So what it waits for on the GPU it is told as events ``after``, which
    were recorded before it begins: were `stream` to wait for them at once, so would machines whose turn comes first.
    """

    mine: Array
    """This rank's row, shape ``(count,)``; zeros at first."""
    size: RowSize
    stream: Stream
    """Where the work goes."""

    def reduce_scatter(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """Sum the columns ``parts[r]`` over all ranks into rank r's row, for each r; what else is there is undefined.

        Every rank of the node must run it, with the same parts: one for each rank, some may be empty.
        """
        ...

    def allgather(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """Bring the columns ``parts[r]`` of rank r's row to all others, for each r."""
        ...

    def allreduce(self, after: Sequence[Event] = ()) -> Steps:
        """Sum all columns over all ranks, into each row."""
        ...

    def check(self) -> None:
        """Called now and then by who waits for what `stream` does: raises when waiting has become pointless."""
        ...


def parts_of(count: int, owners: int, ranks: int) -> list[Part]:
    """Nearly equal parts of ``count`` columns for the first ``owners`` of ``ranks`` ranks; the others' are empty."""
    ends = bounds(count, owners)
    return [(ends[rank], ends[rank + 1]) if rank < owners else (count, count) for rank in range(ranks)]


class LoneRow:
    """`NodeRows` of a rank that sums with none of its node: what it has is the sum."""

    def __init__(self, streams: Streams, mine: Array, size: RowSize, stream: Stream) -> None:
        self._streams = streams
        self.mine, self.size, self.stream = mine, size, stream

    def reduce_scatter(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        yield from self.allreduce(after)

    def allgather(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        yield from self.allreduce(after)

    def allreduce(self, after: Sequence[Event] = ()) -> Steps:
        self._streams.wait_events(self.stream, after)
        yield []

    def check(self) -> None:
        """Nobody to wait for."""


def lone_rows(streams: Streams, sizes: Sequence[RowSize]) -> list[LoneRow]:
    """One for each size."""
    rows = [LoneRow(streams, streams.zeros(each.count, each.dtype), each, streams.stream()) for each in sizes]
    for row in rows:
        streams.follow(row.stream)
    return rows
