"""Transports between GPUs: CUDA-aware messages, CUDA IPC on a shared GPU, and the rows of a bucket.

CUDA-aware MPI libraries send and receive arrays in GPU memory. A library's own claim may be wrong: it then crashes, or
sends something else. So if it claims support, two ranks of a separate job try it on each machine, as in `hpcdp info`.
Between nodes a library uses another path, and a rank can start no job there. So the ranks themselves exchange a
message, check it, and time it against host memory: a library without GPUDirect copies in small pieces.

Ranks that share one GPU, which NCCL refuses, sum through CUDA IPC: the first of them maps the rows of the others.
Processes that share a GPU take turns on it unless a server (MPS) runs them together. A turn takes time to begin, even
for an event: 0.2 ms and more on an H200, where four rows of 64 MB are summed in 0.13 ms. So one rank sums for all, and
the others give the GPU no work meanwhile, not even a wait::

    each rank            polls until its row is complete; posts a number in host memory
    the first rank       sees all numbers; sums; polls until the sum is complete; posts
    each rank            sees that, and continues

Rows come from cudaMalloc itself, in multiples of 2 MiB, because a handle shares the whole block that contains an
allocation. Source: NVIDIA, "CUDA C++ Programming Guide", section "Interprocess Communication".

Two ranks have the same GPU if it has one place on the PCI bus, because device numbers are each process's own.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from os import getpid
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..core.arrays import Array, words
from ..core.devices import Device, Event, Stream, Streams, gpu
from ..core.environment import apart
from ..errors import ConfigError, DeviceError, UnsupportedError
from ..kernels.cuda import gradients
from ..kernels.reference.gradients import EVERY_ROW, SUM
from . import world
from .communicator import Communicator, PolledRequest, Steps, bounds, split
from .consistency import on_every_rank
from .shared_memory import NodeMemory, ProgressCounters
from .world import World


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


SETTING = "HPCDP_GPU_MESSAGES"
MESSAGES = ("auto", "direct", "staged")
"""Valid values of ``HPCDP_GPU_MESSAGES``: direct if tried and faster, direct without a trial, through host memory."""

_COUNTS = (100, 1 << 17)
"""Lengths in int64: a message that libraries send at once, and the longest of `data_parallel.gpu_reduction`."""
_TIMED, _IN_FLIGHT, _TURNS = 1 << 20, 4, 3
"""The length in float32 of a timed exchange, its messages in flight, and its repetitions."""
_LIMIT_S = 120.0
"""Seconds for the trial, which ends itself after 60 s."""

_TRY = "from hpcdp.launch import doctor as gpus; print(gpus.cuda_aware())"
_YES = "yes"
_OF_A_RANK = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "SLURM_")
"""Prefixes of variables by which launchers tell a process that it is a rank, and of which job."""
_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_", "PRTE_ALLOW_")
"""Prefixes of a user's settings that affect the library's abilities."""
_OF_OPEN_MPI_4 = ("OMPI_MCA_ess_", "OMPI_MCA_orte_")


def says(library: ctypes.CDLL) -> bool:
    """Return whether an MPI library claims to take arrays in GPU memory."""
    claim = ctypes.c_int()
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        claim.value = library.MPIX_Query_cuda_support()
    elif hasattr(library, "MPIX_GPU_query_support"):  # MPICH
        library.MPIX_GPU_query_support(0, ctypes.byref(claim))
    return bool(claim.value)


def agreed(world: World) -> tuple[bool, str]:
    """Return whether messages of ``world`` may use arrays in GPU memory, and the reason.

    Every rank must call, and all get the same answer, that of the first call. It is yes if all libraries claim support,
    a trial on each node succeeds, and messages between nodes arrive unchanged and faster than through host memory.
    ``HPCDP_GPU_MESSAGES`` of rank 0 overrides it. On one node ranks only send messages if their GPUs have no other
    transport; then all of them are timed.

    Raises:
        ConfigError: the variable is none of `MESSAGES`; on all ranks.
    """
    return world.keep("messages of GPUs", lambda: _agree(world))


def _agree(world: World) -> tuple[bool, str]:
    setting = world.comm.allgather_json(os.environ.get(SETTING) or "auto")[0]
    if setting not in MESSAGES:
        raise ConfigError("reduction", where=SETTING, expected=" or ".join(MESSAGES), got=repr(setting))
    if setting == "direct" and world.rank == 0 and not library_says():
        warnings.warn(
            f"{SETTING}=direct, but the MPI library does not claim to take arrays in GPU memory: it may crash",
            stacklevel=5,
        )
    if setting != "auto":
        return setting == "direct", f"{SETTING}={setting}"
    if not all(world.comm.allgather_json(library_says())):
        return False, "no, the MPI library says"
    answers = world.comm.allgather_json(tried() if world.local_rank == 0 else _YES)
    no = next((answer for answer in answers if not answer.startswith(_YES)), None)
    if no is not None:
        return False, no
    wrong = [rank for rank, arrives in enumerate(world.comm.allgather_json(_arrives(world.rail_comm))) if not arrives]
    if wrong:
        return False, f"no: rank {wrong[0]} receives other data from another node than was sent"
    own = _seconds(world.rail_comm if world.num_nodes > 1 else world.comm)
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


def _seconds(comm: Communicator | None) -> tuple[float, float]:
    """Time an exchange between neighbours of ``comm``: direct, and through host memory; every rank of it must call.

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


def library_says() -> bool:
    """Return whether the MPI library of this process claims support; False without one."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    mapped = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return any(says(ctypes.CDLL(path)) for path in sorted(mapped) if Path(path).name.startswith("libmpi"))


def tried() -> str:
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
        if not name.startswith(_OF_A_RANK) or (name.startswith(_SETTINGS) and not name.startswith(_OF_OPEN_MPI_4))
    }


_LEADER = 0
_BLOCK_NBYTES = 2 << 20
_YIELDS = 1000
"""Tests before a nap of a lone waiter. Ranks post their numbers within microseconds of each other, an H200 sums two to
four rows of 256 MB in 0.3 to 0.5 ms, and Linux makes each nap 0.1 ms.
"""
_NO_MEMORY = 2
"""``cudaErrorMemoryAllocation``, which CuPy does not name."""


class CudaIpc:
    """The rows of ranks that share a GPU; all ranks of the node must make it together.

    Args:
        comm: the ranks of the node.
        memory: their shared memory.
        streams: the streams of their GPU.
        sizes: the sizes of the rows, equal on all ranks.

    Raises:
        DeviceError: the GPU's memory is full, or a process cannot map another's memory; on all ranks.
        UnsupportedError: there is no kernel for a dtype, or for this number of ranks.
    """

    def __init__(self, comm: Communicator, memory: NodeMemory, streams: Streams, sizes: Sequence[RowSize]) -> None:
        unknown = next((size.dtype for size in sizes if size.dtype.name not in SUMMED_KINDS), None)
        if unknown is not None:
            raise UnsupportedError("CUDA IPC", where="dtype", expected=" or ".join(SUMMED_KINDS), got=unknown)
        if comm.size > gradients.MAX_ROWS:
            expected = f"at most {gradients.MAX_ROWS} ranks that share a GPU"
            raise UnsupportedError("CUDA IPC", expected=expected, got=comm.size, remedy="start fewer ranks a node")
        self.comm, self.memory, self.streams = comm, memory, streams
        self.is_leader = comm.rank == _LEADER
        self._streams_of_rows = [streams.stream() for _ in sizes]
        self.written = ProgressCounters(memory, max(len(sizes), 1))
        self.summed = ProgressCounters(memory, max(len(sizes), 1))
        self._cupy: Any = importlib.import_module("cupy")
        self._allocated: list[int] = []
        self._mapped: list[int] = []
        owner = _Owner()
        try:
            self.rows = self._make_rows(sizes, owner)
        except DeviceError:
            self.close()
            raise
        self.users: weakref.WeakSet[object] = weakref.WeakSet([owner])
        """See `hand_out`."""

    def _make_rows(self, sizes: Sequence[RowSize], owner: _Owner) -> list[IpcRows]:
        memory = on_every_rank(self.comm, lambda: self._told(lambda: [self._make(size) for size in sizes]))
        handles = self.comm.allgather_json([handle.hex() for _, handle in memory])
        for stream in self._streams_of_rows:
            self.streams.follow(stream)  # no rank reads or writes a row before it is cleared

        def open_all() -> list[IpcRows]:
            return [self._open(number, memory[number][0], handles, size, owner) for number, size in enumerate(sizes)]

        return on_every_rank(self.comm, lambda: self._told(open_all))

    def hand_out(self) -> list[IpcRows]:
        """Return the rows, by number; once. `users` shows whether one or a view of one is still referenced."""
        rows, self.rows = self.rows, []
        return rows

    def _told(self, act: Callable[[], Any]) -> Any:
        """Return ``act()``; turn CUDA's errors into `DeviceError`."""
        try:
            with self.streams.on_device():
                return act()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(
                "CUDA IPC", got=str(error),
                remedy="start containers with --ipc=host --pid=host, so that the processes of a GPU see each other, or "
                "start one rank per GPU",
            ) from error  # fmt: skip

    def _make(self, size: RowSize) -> tuple[int, bytes]:
        """Allocate a row; return its address and handle."""
        runtime = self._cupy.cuda.runtime
        nbytes = max(-(-size.nbytes // _BLOCK_NBYTES), 1) * _BLOCK_NBYTES
        at = self._malloc(nbytes)
        self._allocated.append(at)
        runtime.memsetAsync(at, 0, nbytes, self.streams.current().ptr)
        return at, runtime.ipcGetMemHandle(at)

    def _malloc(self, nbytes: int) -> int:
        """Allocate memory; if CUDA has none left, free the unused memory of CuPy's pool first."""
        runtime = self._cupy.cuda.runtime
        try:
            return int(runtime.malloc(nbytes))
        except runtime.CUDARuntimeError as error:
            if error.status != _NO_MEMORY:
                raise
        self._cupy.get_default_memory_pool().free_all_blocks()
        try:
            return int(runtime.malloc(nbytes))
        except runtime.CUDARuntimeError as error:
            raise DeviceError("CUDA IPC", expected=f"{nbytes} free bytes on the GPU", got=str(error),
                              remedy="start fewer ranks per GPU") from error  # fmt: skip

    def _open(self, number: int, at: int, handles: list[list[str]], size: RowSize, owner: _Owner) -> IpcRows:
        """Return this rank's row at the address ``at``; the leader maps those of all ranks."""
        places = [at]
        if self.is_leader:
            for rank in range(1, self.comm.size):
                address = self._cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(handles[rank][number]))
                self._mapped.append(address)
                places.append(address)
        rows = [self._array(address, size, owner) for address in places]
        return IpcRows(self, number, size, rows, self._streams_of_rows[number])

    def _array(self, at: int, size: RowSize, owner: _Owner) -> Array:
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(at, size.nbytes, owner)
        return self._cupy.ndarray((size.count,), size.dtype, cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        """Release all memory once all enqueued work is done; every rank of the node must call."""
        runtime = self._cupy.cuda.runtime
        for stream in self._streams_of_rows:
            self.streams.synchronize(stream)
        self.comm.barrier()
        with self.streams.on_device():
            for address in self._mapped:
                runtime.ipcCloseMemHandle(address)
            self._mapped.clear()
            self.comm.barrier()  # memory must not be freed while others have it mapped
            for address in self._allocated:
                runtime.free(address)
            self._allocated.clear()


class _Owner:
    """An object that rows, and views of them, keep alive."""


class IpcRows:
    """`NodeRows` of ranks that share a GPU. The leader's reach the rows of all ranks, its own first.

    Its steps end when their work is done, and not before.
    """

    def __init__(self, node: CudaIpc, number: int, size: RowSize, rows: list[Array], stream: Stream) -> None:
        self._node, self._number, self._rows = node, number, rows
        self.mine, self.size, self.stream = rows[0], size, stream
        self._round = 0

    def check(self) -> None:
        """See `NodeRows.check`."""
        self._node.memory.check()

    def _led(self, work: Callable[[], None], after: Sequence[Event]) -> Steps:
        """Let the leader do ``work`` after the enqueued work of all ranks; all continue after it."""
        node, streams, number = self._node, self._node.streams, self._number
        self._round += 1
        if not node.is_leader:
            yield [PolledRequest(lambda: streams.is_idle(self.stream) and all(map(streams.query, after)), _YIELDS)]
        node.written.post(self._round, number)
        if node.is_leader:
            yield [PolledRequest(lambda: node.written.reached(self._round, number), _YIELDS)]
            streams.wait_events(self.stream, after)
            with streams.on_device(), self.stream:
                work()
            yield [PolledRequest(lambda: streams.is_idle(self.stream), _YIELDS)]
            node.summed.post(self._round, number)
        else:
            yield [PolledRequest(lambda: node.summed.reached(self._round, number, ranks=_LEADER + 1), _YIELDS)]

    def reduce_scatter(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """See `NodeRows.reduce_scatter`."""

        def work() -> None:
            for owner, (first, last) in enumerate(parts):
                if last > first:
                    gradients.combine_into(self._words(), first, last, owner, SUM)

        yield from self._led(work, after)

    def allgather(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """See `NodeRows.allgather`."""

        def work() -> None:
            for owner, (first, last) in enumerate(parts):
                for rank, row in enumerate(self._rows):
                    if last > first and rank != owner:
                        self._node.streams.copy_async(row[first:last], self._rows[owner][first:last], self.stream)

        yield from self._led(work, after)

    def sum_at_leader(self, after: Sequence[Event] = ()) -> Steps:
        """Sum all columns over all ranks into the leader's row."""

        def work() -> None:
            if self.size.count:
                gradients.combine_into(self._words(), 0, self.size.count, _LEADER, SUM)

        yield from self._led(work, after)

    def collect(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """Copy the columns ``parts[r]`` of rank r's row to the leader's."""
        yield from self._led(lambda: self._copy(parts, lambda rank: (self._rows[rank], self._rows[_LEADER])), after)

    def hand_out_parts(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """Copy the columns ``parts[r]`` of the leader's row to rank r's."""
        yield from self._led(lambda: self._copy(parts, lambda rank: (self._rows[_LEADER], self._rows[rank])), after)

    def _copy(self, parts: Sequence[Part], rows: Callable[[int], tuple[Array, Array]]) -> None:
        for rank, (first, last) in enumerate(parts):
            if last > first and rank != _LEADER:
                source, target = rows(rank)
                self._node.streams.copy_async(target[first:last], source[first:last], self.stream)

    def allreduce(self, after: Sequence[Event] = ()) -> Steps:
        """See `NodeRows.allreduce`."""

        def work() -> None:
            if self.size.count:
                gradients.combine_into(self._words(), 0, self.size.count, EVERY_ROW, SUM)

        yield from self._led(work, after)

    def _words(self) -> list[Array]:
        """Return the rows as the kernels take them."""
        return [words(row) for row in self._rows]
