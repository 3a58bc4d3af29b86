"""The choice of transports for arrays on GPUs: of rows inside a node, and of CUDA-aware MPI between nodes.

Two ranks have the same GPU if it has one place on the PCI bus, because device numbers are each process's own.

CUDA-aware MPI libraries send and receive arrays in GPU memory. A library's own claim may be wrong: it then crashes, or
sends something else. So if it claims support, two ranks of a separate job try it on each machine, as in `hpcdp info`.
Between nodes a library uses another path, and a rank can start no job there. So the ranks themselves exchange a
message, check it, and time it against host memory: a library without GPUDirect copies in small pieces.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from os import getpid
from pathlib import Path
from typing import Protocol

import numpy as np

from ...core.arrays import Array, Device, Event, Stream, Streams, gpu
from ...core.checks import choices
from ...core.environment import apart
from ...errors import ConfigError, DeviceError
from .. import world as comm_world
from ..communicator import Communicator, Steps, bounds, split
from ..world import World


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
    """See `comm.world.Gpu`; empty without a GPU."""
    uuid: str = ""
    nccl: int = 0
    """The version of NCCL that CuPy has loaded; 0 for none."""
    shares_memory: bool = True
    """True if the rank shares host memory with all other ranks of its node."""
    pid: int = 0
    """The rank's process."""


def own_offer(device: Device, *, shares_memory: bool) -> Offer:
    """Return this rank's offer; imports CuPy if ``device`` is a GPU."""
    gpus = comm_world.visible()
    if device.kind == "cpu" or device.index >= len(gpus):
        return Offer(shares_memory=shares_memory)
    mine = gpus[device.index]
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


GPU_MESSAGES = "HPCDP_GPU_MESSAGES"
_MESSAGE_KINDS = ("auto", "direct", "staged")
"""Valid values of ``HPCDP_GPU_MESSAGES``: direct if tried and faster, direct without a trial, through host memory."""

_COUNTS = (100, 1 << 17)
"""Lengths in int64: a message that libraries send at once, and the longest of `data_parallel.gpu_reduction`."""
_TIMED, _IN_FLIGHT, _TURNS = 1 << 20, 4, 3
"""The length in float32 of a timed exchange, its messages in flight, and its repetitions."""
_LIMIT_S = 120.0
"""Seconds for the trial, which ends itself after 60 s."""

_TRY = "from hpcdp.cli import doctor as gpus; print(gpus.cuda_aware())"
_YES = "yes"
_OF_A_RANK = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "SLURM_")
"""Prefixes of variables by which launchers tell a process that it is a rank, and of which job."""
_USER_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_", "PRTE_ALLOW_")
"""Prefixes of a user's settings that affect the library's abilities."""
_OF_OPEN_MPI_4 = ("OMPI_MCA_ess_", "OMPI_MCA_orte_")


def claims_cuda_support(library: ctypes.CDLL) -> bool:
    """Return whether an MPI library claims to take arrays in GPU memory."""
    claim = ctypes.c_int()
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        claim.value = library.MPIX_Query_cuda_support()
    elif hasattr(library, "MPIX_GPU_query_support"):  # MPICH
        library.MPIX_GPU_query_support(0, ctypes.byref(claim))
    return bool(claim.value)


def agree_on_cuda_aware_mpi(world: World) -> tuple[bool, str]:
    """Return whether messages of ``world`` may use arrays in GPU memory, and the reason.

    Every rank must call, and all get the same answer, that of the first call. It is yes if all libraries claim support,
    a trial on each node succeeds, and messages between nodes arrive unchanged and faster than through host memory.
    ``HPCDP_GPU_MESSAGES`` of rank 0 overrides it. On one node ranks only send messages if their GPUs have no other
    transport; then all of them are timed.

    Raises:
        ConfigError: the variable is none of `_MESSAGE_KINDS`; on all ranks.
    """
    return world.keep("messages of GPUs", lambda: _agree_on_cuda_aware_mpi(world))


def _agree_on_cuda_aware_mpi(world: World) -> tuple[bool, str]:
    setting = world.comm.allgather_json(os.environ.get(GPU_MESSAGES) or "auto")[0]
    if setting not in _MESSAGE_KINDS:
        raise ConfigError("reduction", where=GPU_MESSAGES, expected=choices(_MESSAGE_KINDS), got=repr(setting))
    if setting == "direct" and world.rank == 0 and not mpi_claims_cuda_support():
        warnings.warn(
            f"{GPU_MESSAGES}=direct, but the MPI library does not claim to take arrays in GPU memory: it may crash",
            stacklevel=5,
        )
    if setting != "auto":
        return setting == "direct", f"{GPU_MESSAGES}={setting}"
    if not all(world.comm.allgather_json(mpi_claims_cuda_support())):
        return False, "no, the MPI library says"
    answers = world.comm.allgather_json(try_cuda_aware_mpi() if world.local_rank == 0 else _YES)
    no = next((answer for answer in answers if not answer.startswith(_YES)), None)
    if no is not None:
        return False, no
    wrong = [rank for rank, arrives in enumerate(world.comm.allgather_json(_arrives(world.rail_comm))) if not arrives]
    if wrong:
        return False, f"no: rank {wrong[0]} receives other data from another node than was sent"
    own = _exchange_seconds(world.rail_comm if world.num_nodes > 1 else world.comm)
    direct_s, staged_s = map(max, zip(*world.comm.allgather_json(own), strict=True))
    if direct_s > staged_s:
        times = f"{1e3 * staged_s:.1f} ms for {4 * _TIMED >> 20} MiB, not {1e3 * direct_s:.1f}"
        return False, f"no: staging in host memory is faster, {times}"
    return True, f"{answers[0]}, and messages between nodes arrive" if world.num_nodes > 1 else answers[0]


def _arrives(comm: Communicator | None) -> bool:
    """Return whether each rank of ``comm`` receives what the previous one sends; every rank of it must call."""
    if comm is None or comm.size == 1:
        return True
    cupy = importlib.import_module("cupy")
    before = (comm.rank - 1) % comm.size
    is_right = True
    for count in _COUNTS:
        sent, received = cupy.arange(count) + comm.rank, cupy.zeros(count, dtype=np.int64)
        cupy.cuda.get_current_stream().synchronize()  # libraries do not wait for the stream
        _exchange(comm, sent, received)
        is_right = is_right and bool((received == cupy.arange(count) + before).all())
    return is_right


def _exchange(comm: Communicator, sent: Array, received: Array, messages: int = 1) -> None:
    """Send ``sent`` to the next rank of ``comm`` and receive from the previous one, in ``messages`` pieces at once."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    requests = [comm.irecv(piece, before) for piece in split(received, messages)]
    requests += [comm.isend(piece, after) for piece in split(sent, messages)]
    for request in requests:
        request.wait()


def _exchange_seconds(comm: Communicator | None) -> tuple[float, float]:
    """Time an exchange between neighbors of ``comm``: direct, and through host memory; every rank of it must call.

    The latter is not pipelined here, unlike the real staging. Direct messages may take a little longer, because they
    leave the host to other work.
    """
    if comm is None or comm.size == 1:
        return 0.0, 0.0
    streams = Streams(gpu(int(importlib.import_module("cupy").cuda.runtime.getDevice())))
    stream, exchange = streams.stream(), partial(_exchange, comm, messages=_IN_FLIGHT)
    on_gpu = [streams.empty((_TIMED,), np.dtype(np.float32), stream) for _ in range(2)]
    on_host = [streams.pinned(4 * _TIMED, stream).view(np.float32) for _ in range(2)]

    def through_host() -> None:
        streams.copy_async(on_host[0], on_gpu[0], stream)
        streams.synchronize(stream)
        exchange(*on_host)
        streams.copy_async(on_gpu[1], on_host[1], stream)
        streams.synchronize(stream)

    def seconds(way: Callable[[], None]) -> float:
        comm.barrier()
        begin = time.perf_counter()
        way()
        return time.perf_counter() - begin

    turns = [(seconds(partial(exchange, *on_gpu)), seconds(through_host)) for _ in range(_TURNS)]
    direct, staged = map(min, zip(*turns, strict=True))
    return direct, staged


def mpi_claims_cuda_support() -> bool:
    """Return whether the MPI library of this process claims support; False without one."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    mapped = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return any(
        claims_cuda_support(ctypes.CDLL(path)) for path in sorted(mapped) if Path(path).name.startswith("libmpi")
    )


def try_cuda_aware_mpi() -> str:
    """Return the result of a trial with two ranks on this machine, as in `hpcdp info`: ``yes``, or why not.

    For a process that may itself be a rank.
    """
    try:
        done = subprocess.run(
            [sys.executable, *apart(), "-c", _TRY], env=outside_of_jobs(os.environ), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_LIMIT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no: it cannot be tried, {error}"
    if done.returncode:
        return f"no: it cannot be tried, {(done.stderr.splitlines() or [f'status {done.returncode}'])[-1]}"
    return done.stdout.splitlines()[-1]


def outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables that tell a process that it is a rank of a job."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_A_RANK) or (name.startswith(_USER_SETTINGS) and not name.startswith(_OF_OPEN_MPI_4))
    }
