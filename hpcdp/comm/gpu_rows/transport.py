"""The choice of the transport with which a node's ranks sum rows on their GPUs, and the interface of rows.

Two ranks have the same GPU if it has one place on the PCI bus, because device numbers are each process's own.
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

from ...core.arrays import Array, Device, Event, Stream, Streams
from ...errors import DeviceError
from .. import world
from ..communicator import Communicator, Steps, bounds


class GpuTransport(Enum):
    """A way to sum arrays on the GPUs of a node's ranks."""

    ALONE = "this node has one rank"
    NCCL = "NCCL: each rank has a GPU of its own"
    CUDA_IPC = "CUDA IPC: all ranks share one GPU, and one of them sums for all"
    GROUPS = "CUDA IPC among the ranks of each GPU, NCCL between the GPUs"
    HOST = "in host memory, each rank for itself"


@dataclass(frozen=True)
class Offer:
    """A rank's means for sums on GPUs."""

    bus_id: str = ""
    """See `world.Gpu`; empty without a GPU."""
    uuid: str = ""
    nccl: int = 0
    """The version of NCCL that CuPy has loaded; 0 for none."""
    shares_memory: bool = True
    """True if the rank shares host memory with all other ranks of its node."""
    pid: int = 0
    """The rank's process."""


def own_offer(device: Device, *, shares_memory: bool) -> Offer:
    """Return this rank's offer; imports CuPy if ``device`` is a GPU."""
    seen = world.visible()
    if device.kind == "cpu" or device.index >= len(seen):
        return Offer(shares_memory=shares_memory)
    mine = seen[device.index]
    return Offer(mine.bus_id, mine.uuid, _nccl_version(), shares_memory, getpid())


def _nccl_version() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's warning about missing NCCL: `choose` gives the remedy
        nccl = importlib.import_module("cupy.cuda.nccl")
    return nccl.get_version() if nccl.available else 0


def offers(comm: Communicator, mine: Offer) -> list[Offer]:
    """Return the offer of each rank of ``comm``; every rank must call."""
    return [Offer(**fields) for fields in comm.allgather_json(asdict(mine))]


def choose(node_offers: Sequence[Offer]) -> tuple[GpuTransport, str]:
    """Return the transport of a node whose ranks have these offers, and the reason; equal on all ranks."""
    if len(node_offers) == 1:
        return GpuTransport.ALONE, GpuTransport.ALONE.value
    without = [rank for rank, offer in enumerate(node_offers) if not offer.bus_id]
    if without:
        return GpuTransport.HOST, f"local rank {without[0]} has no GPU"
    if not all(offer.shares_memory for offer in node_offers):
        return GpuTransport.HOST, "its ranks share no host memory, in which they would report their progress"
    groups = by_gpu(node_offers)
    for ranks in groups:
        if len({node_offers[rank].uuid for rank in ranks}) > 1:
            first, second = ranks[:2]
            why = f"local ranks {first} and {second} have instances of one GPU (MIG), which share no memory"
            return GpuTransport.HOST, why
        if len({node_offers[rank].pid for rank in ranks}) < len(ranks):
            why = "its ranks are threads of one process, and CUDA IPC opens no handle of its own process"
            return GpuTransport.HOST, why
    if len(groups) == 1:
        return GpuTransport.CUDA_IPC, GpuTransport.CUDA_IPC.value
    without = [rank for rank, offer in enumerate(node_offers) if not offer.nccl]
    if without:
        return GpuTransport.HOST, f"local rank {without[0]} has no NCCL; pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]'"
    versions = sorted({offer.nccl for offer in node_offers})
    if len(versions) > 1:
        return GpuTransport.HOST, f"its ranks have different versions of NCCL, {' and '.join(map(str, versions))}"
    way = GpuTransport.NCCL if len(groups) == len(node_offers) else GpuTransport.GROUPS
    return way, way.value


def by_gpu(node_offers: Sequence[Offer]) -> list[list[int]]:
    """Return the local ranks of each GPU, ordered by the first of them."""
    groups: dict[str, list[int]] = {}
    for rank, offer in enumerate(node_offers):
        groups.setdefault(offer.bus_id, []).append(rank)
    return list(groups.values())


def refuse_shared(node_offers: Sequence[Offer]) -> None:
    """Raise `DeviceError` if two ranks have one GPU: NCCL may hang there."""
    ranks = next((ranks for ranks in by_gpu(node_offers) if len(ranks) > 1), None)
    if ranks is not None:
        raise DeviceError(
            "NCCL", where=f"GPU {node_offers[ranks[0]].bus_id}", expected="one rank on each GPU",
            got=f"local ranks {', '.join(map(str, ranks))}",
            remedy="start one rank per GPU of a node, with all GPUs visible (srun --gres=gpu:N --gpu-bind=none)",
        )  # fmt: skip


Part = tuple[int, int]
"""The first column, and the one after the last."""

OwnedPart = tuple[int, Part]
"""The rank in whose row the part is summed, and the part."""

SUMMED_KINDS = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
"""Dtypes that `kernels/reduce.cu` and, for other nodes, the host can sum."""


@dataclass(frozen=True)
class RowSize:
    """The length and the dtype of a row."""

    count: int
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """The size of the row in bytes."""
        return self.count * self.dtype.itemsize


class NodeRows(Protocol):
    """One row of columns for each rank of a node, on its GPUs, summed where they are.

    As for CPU ranks in shared memory (`hpcdp.data_parallel.reducer`), each rank fills its row. Parts of the columns
    have owners, in whose rows they are summed, in rank order if one GPU does it. Owners exchange their sums with other
    nodes; each part is then copied from its owner's row to all others. No call blocks the host.

    Steps end when their work is enqueued on `stream`; it need not be done, but later work on `stream` sees the sums.
    The ranks of a node may run the steps of different rows in different orders. If rows share `stream` (NCCL's do),
    each operation has its turn there. So GPU work that it depends on is passed as events ``after``, recorded before it
    begins: if `stream` waited for them at once, so would operations whose turn comes first.
    """

    mine: Array
    """This rank's row, shape ``(count,)``; zeros at first."""
    size: RowSize
    stream: Stream
    """The stream of the work."""

    def reduce_scatter(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """Sum the columns ``parts[r]`` over all ranks into rank r's row, for each r; other columns become undefined.

        Every rank of the node must run it, with the same parts: one for each rank, some may be empty.
        """
        ...

    def allgather(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """Copy the columns ``parts[r]`` of rank r's row to all others, for each r."""
        ...

    def allreduce(self, after: Sequence[Event] = ()) -> Steps:
        """Sum all columns over all ranks, into each row."""
        ...

    def check(self) -> None:
        """Raise if waiting for the work on `stream` has become pointless; called by waiting ranks from time to time."""
        ...


def parts_of(count: int, owners: int, ranks: int) -> list[Part]:
    """Return nearly equal parts of ``count`` columns for the first ``owners`` of ``ranks`` ranks; others are empty."""
    ends = bounds(count, owners)
    return [(ends[rank], ends[rank + 1]) if rank < owners else (count, count) for rank in range(ranks)]


class LoneRow:
    """`NodeRows` of a rank that sums with no other of its node: its row is the sum."""

    def __init__(self, streams: Streams, mine: Array, size: RowSize, stream: Stream) -> None:
        self._streams = streams
        self.mine, self.size, self.stream = mine, size, stream

    def reduce_scatter(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """See `NodeRows.reduce_scatter`."""
        yield from self.allreduce(after)

    def allgather(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """See `NodeRows.allgather`."""
        yield from self.allreduce(after)

    def allreduce(self, after: Sequence[Event] = ()) -> Steps:
        """Wait for the events."""
        self._streams.wait_events(self.stream, after)
        yield []

    def check(self) -> None:
        """Do nothing: there is no other rank."""


def lone_rows(streams: Streams, sizes: Sequence[RowSize]) -> list[LoneRow]:
    """Return a `LoneRow` for each size."""
    rows = [LoneRow(streams, streams.zeros(size.count, size.dtype), size, streams.stream()) for size in sizes]
    for row in rows:
        streams.follow(row.stream)
    return rows
