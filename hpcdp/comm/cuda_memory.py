"""CUDA-aware MPI, and CUDA IPC between ranks of one node.

Whether messages go from and to a GPU's memory itself: some MPI libraries take arrays there (CUDA-aware ones).

What a library says of itself may be wrong: it then crashes, or sends something else. So where it says yes, two ranks of
a job of their own try it on each machine, as in `hpcdp info`. Between nodes a library goes another way than within a
machine, and a rank can start no job there. So then the ranks themselves send each other a message, look what comes, and
whether it comes sooner than through host memory: a library that has no way from GPU to GPU copies in small pieces.

Sums over ranks that share one GPU, which NCCL refuses: the first of them has mapped what the others have (CUDA IPC).

Processes that share a GPU take turns on it, unless a server (MPS) runs them together, and a turn takes time to begin,
even if it is for an event alone: 0.2 ms and more on an H200, where four rows of 64 MB are summed in 0.13. So one rank
sums for all, and the others give the GPU nothing meanwhile, not even a wait::

    each rank            sees that what its row waits for is done; posts a number in host memory
    the first rank       sees all numbers; sums; sees that it is done; posts
    each rank            sees that, and goes on

Rows come from cudaMalloc itself, in whole multiples of 2 MiB: a handle shares the block that an allocation lies in,
with all else that is in it.

Source: NVIDIA, "CUDA C++ Programming Guide", section "Interprocess Communication".

The transports between GPUs of a node, and the rows of a bucket on them.

How a node's ranks sum what they have on their GPUs: what each of them offers, and what is chosen.

Two ranks have the same GPU where it has one place on the PCI bus: numbers are each process's own. NCCL refuses such
ranks, or hangs; CUDA IPC is for them.

Arrays of a node's ranks on its GPUs, summed where they lie: what NCCL and CUDA IPC both do, each in its way.

It is what the CPU's ranks do in shared memory (`hpcdp.data_parallel.reducer`): each rank has a row, which it fills;
parts of the columns have owners, in whose rows they are summed, in the order of the ranks where one GPU does it; owners
exchange their sums with other nodes; each part goes from its owner's row to all others. No call of it blocks the host.
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


SETTING = "HPCDP_GPU_MESSAGES"
MESSAGES = ("auto", "direct", "staged")
"""The valid values of ``HPCDP_GPU_MESSAGES``: direct where it was tried and is sooner, direct untried, through host
memory."""

_COUNTS = (100, 1 << 17)
"""Of int64: what a library sends at once, and the longest message of `data_parallel.gpu_reduction`."""
_TIMED, _IN_FLIGHT, _TURNS = 1 << 20, 4, 3
"""Of float32, in so many messages at once."""
_LIMIT_S = 120.0
"""Of the try, which ends itself after 60 s."""

_TRY = "from hpcdp.launch import doctor as gpus; print(gpus.cuda_aware())"
_YES = "yes"
_OF_A_RANK = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "SLURM_")
"""How variables begin by which launchers tell a process that it is a rank, and of which job."""
_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_", "PRTE_ALLOW_")
"""What a user sets begins so, and has to do with what a library can."""
_OF_OPEN_MPI_4 = ("OMPI_MCA_ess_", "OMPI_MCA_orte_")


def says(library: ctypes.CDLL) -> bool:
    """Whether an MPI library says that it takes arrays in a GPU's memory."""
    said = ctypes.c_int()
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        said.value = library.MPIX_Query_cuda_support()
    elif hasattr(library, "MPIX_GPU_query_support"):  # MPICH
        library.MPIX_GPU_query_support(0, ctypes.byref(said))
    return bool(said.value)


def agreed(world: World) -> tuple[bool, str]:
    """Whether messages of ``world`` take arrays in GPUs' memory as they are, and why, or why not.

    Every rank must call, and all have the same answer, that of the first call: all libraries say so, on each node it
    was tried, and between nodes comes what was sent, sooner than through host memory; or what ``HPCDP_GPU_MESSAGES`` of
    rank 0 says. On one node no message is sent but where ranks have no way on their GPUs; then all of them are timed.

    Raises:
        ConfigError: it says something else than `MESSAGES`; on all ranks.
    """
    return world.keep("messages of GPUs", lambda: _agree(world))


def _agree(world: World) -> tuple[bool, str]:
    setting = world.comm.allgather_json(os.environ.get(SETTING) or "auto")[0]
    if setting not in MESSAGES:
        raise ConfigError("reduction", where=SETTING, expected=" or ".join(MESSAGES), got=repr(setting))
    if setting == "direct" and world.rank == 0 and not library_says():
        warnings.warn(
            f"{SETTING}=direct, but the MPI library says that it takes no arrays in a GPU's memory: it may crash",
            stacklevel=5,
        )
    if setting != "auto":
        return setting == "direct", f"{SETTING}={setting}"
    if not all(world.comm.allgather_json(library_says())):
        return False, "no, the MPI library says"
    answers = world.comm.allgather_json(tried() if world.local_rank == 0 else _YES)
    no = next((each for each in answers if not each.startswith(_YES)), None)
    if no is not None:
        return False, no
    wrong = [rank for rank, arrives in enumerate(world.comm.allgather_json(_arrives(world.rail_comm))) if not arrives]
    if wrong:
        return False, f"no: rank {wrong[0]} gets something else from another node than was sent"
    own = _seconds(world.rail_comm if world.num_nodes > 1 else world.comm)
    direct_s, staged_s = map(max, zip(*world.comm.allgather_json(own), strict=True))
    if direct_s > staged_s:
        took = f"{1e3 * staged_s:.1f} ms for {4 * _TIMED >> 20} MiB, not {1e3 * direct_s:.1f}"
        return False, f"no: the way through host memory is faster, {took}"
    return True, f"{answers[0]}, and between nodes comes what is sent" if world.num_nodes > 1 else answers[0]


def _arrives(comm: Communicator | None) -> bool:
    """Whether each rank of ``comm`` gets what the one before it sends, of all lengths; every rank of it must call."""
    if comm is None or comm.size == 1:
        return True
    cupy = importlib.import_module("cupy")
    before = (comm.rank - 1) % comm.size
    is_right = True
    for count in _COUNTS:
        sent, come = cupy.arange(count) + comm.rank, cupy.zeros(count, dtype=np.int64)
        cupy.cuda.get_current_stream().synchronize()  # a library does not wait for it
        _exchange(comm, sent, come)
        is_right = is_right and bool((come == cupy.arange(count) + before).all())
    return is_right


def _exchange(comm: Communicator, sent: Array, come: Array, messages: int = 1) -> None:
    """Send ``sent`` to the next rank of ``comm``, and get ``come`` from the one before, in so many messages at once."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    requests = [comm.irecv(each, before) for each in split(come, messages)]
    requests += [comm.isend(each, after) for each in split(sent, messages)]
    for each in requests:
        each.wait()


def _seconds(comm: Communicator | None) -> tuple[float, float]:
    """Of what each rank of ``comm`` sends to the next one, from GPU to GPU: by its own messages, and through host
    memory; every rank of it must call. The latter is not pipelined here, as the staging is: the former leaves the host
    to others, so it may take a little longer."""
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
    """Whether that which this process has loaded does; not where there is none."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    mapped = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return any(says(ctypes.CDLL(each)) for each in sorted(mapped) if Path(each).name.startswith("libmpi"))


def tried() -> str:
    """What two ranks on this machine have found, as `hpcdp info` tells it: it begins with ``yes``, or else says why
    not. For a process that may itself be a rank."""
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
    """``environ`` without what tells a process that it is a rank of a job."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_A_RANK) or (name.startswith(_SETTINGS) and not name.startswith(_OF_OPEN_MPI_4))
    }


_LEADER = 0
_BLOCK_NBYTES = 2 << 20
_YIELDS = 1000
"""Before a nap, where one row is waited for alone. Ranks post their numbers within microseconds of each other, an H200
sums two to four rows of 256 MB in 0.3 to 0.5 ms, and Linux makes each nap 0.1."""
_NO_MEMORY = 2
"""``cudaErrorMemoryAllocation``, which CuPy's module has not among its names."""


class CudaIpc:
    """The rows of ranks that share a GPU. All ranks of the node must make it together.

    Args:
        comm: the ranks of the node.
        memory: what they share.
        streams: of their GPU.
        sizes: of the rows, alike on all ranks.

    Raises:
        DeviceError: the GPU has no room, or a process cannot map what another has; on all ranks.
        UnsupportedError: there is no kernel for such numbers, or for so many ranks.
    """

    def __init__(self, comm: Communicator, memory: NodeMemory, streams: Streams, sizes: Sequence[RowSize]) -> None:
        strange = next((each.dtype for each in sizes if each.dtype.name not in SUMMED_KINDS), None)
        if strange is not None:
            raise UnsupportedError("CUDA IPC", where="dtype", expected=" or ".join(SUMMED_KINDS), got=strange)
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
        made = on_every_rank(self.comm, lambda: self._told(lambda: [self._make(each) for each in sizes]))
        handles = self.comm.allgather_json([handle.hex() for _, handle in made])
        for stream in self._streams_of_rows:
            self.streams.follow(stream)  # nobody reads or writes a row before it is cleared

        def open_all() -> list[IpcRows]:
            return [self._open(number, made[number][0], handles, size, owner) for number, size in enumerate(sizes)]

        return on_every_rank(self.comm, lambda: self._told(open_all))

    def hand_out(self) -> list[IpcRows]:
        """The rows, by number; once. They live as long as somebody has them or a view of one, which `users` tells."""
        rows, self.rows = self.rows, []
        return rows

    def _told(self, act: Callable[[], Any]) -> Any:
        """What ``act()`` returns; CUDA's errors as ours."""
        try:
            with self.streams.on_device():
                return act()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(
                "CUDA IPC", got=str(error),
                remedy="processes that share a GPU must see each other (containers: --ipc=host --pid=host); with one "
                "rank a GPU it is not needed",
            ) from error  # fmt: skip

    def _make(self, size: RowSize) -> tuple[int, bytes]:
        """The address of a row, and its handle."""
        runtime = self._cupy.cuda.runtime
        nbytes = max(-(-size.nbytes // _BLOCK_NBYTES), 1) * _BLOCK_NBYTES
        at = self._malloc(nbytes)
        self._allocated.append(at)
        runtime.memsetAsync(at, 0, nbytes, self.streams.current().ptr)
        return at, runtime.ipcGetMemHandle(at)

    def _malloc(self, nbytes: int) -> int:
        """The address of new memory; CuPy's pool keeps what arrays have given back, and CUDA may have no other left."""
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
                              remedy="let fewer ranks share it") from error  # fmt: skip

    def _open(self, number: int, at: int, handles: list[list[str]], size: RowSize, owner: _Owner) -> IpcRows:
        """The row at ``at`` of this rank; the leader maps those of all ranks."""
        places = [at]
        if self.is_leader:
            for rank in range(1, self.comm.size):
                there = self._cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(handles[rank][number]))
                self._mapped.append(there)
                places.append(there)
        rows = [self._array(each, size, owner) for each in places]
        return IpcRows(self, number, size, rows, self._streams_of_rows[number])

    def _array(self, at: int, size: RowSize, owner: _Owner) -> Array:
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(at, size.nbytes, owner)
        return self._cupy.ndarray((size.count,), size.dtype, cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        """Give all back, when all that was given to the streams is done; every rank of the node must call."""
        runtime = self._cupy.cuda.runtime
        for stream in self._streams_of_rows:
            self.streams.synchronize(stream)
        self.comm.barrier()
        with self.streams.on_device():
            for each in self._mapped:
                runtime.ipcCloseMemHandle(each)
            self._mapped.clear()
            self.comm.barrier()  # memory must not be freed while others have it mapped
            for each in self._allocated:
                runtime.free(each)
            self._allocated.clear()


class _Owner:
    """What rows, and views of them, keep alive as long as there is one."""


class IpcRows:
    """See `node_rows.NodeRows`; those of the leader, the first of which is its own, reach the rows of all.

    Its machines end when what they do is done, and not before.
    """

    def __init__(self, node: CudaIpc, number: int, size: RowSize, rows: list[Array], stream: Stream) -> None:
        self._node, self._number, self._rows = node, number, rows
        self.mine, self.size, self.stream = rows[0], size, stream
        self._round = 0

    def check(self) -> None:
        self._node.memory.check()

    def _led(self, work: Callable[[], None], after: Sequence[Event]) -> Steps:
        """Let the leader do ``work`` behind what all ranks have given their streams; all go on behind that."""
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
        def work() -> None:
            for owner, (first, last) in enumerate(parts):
                if last > first:
                    gradients.combine_into(self._words(), first, last, owner, SUM)

        yield from self._led(work, after)

    def allgather(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        def work() -> None:
            for owner, (first, last) in enumerate(parts):
                for rank, row in enumerate(self._rows):
                    if last > first and rank != owner:
                        self._node.streams.copy_async(row[first:last], self._rows[owner][first:last], self.stream)

        yield from self._led(work, after)

    def sum_at_leader(self, after: Sequence[Event] = ()) -> Steps:
        """Sum all columns over all ranks, into the leader's row."""

        def work() -> None:
            if self.size.count:
                gradients.combine_into(self._words(), 0, self.size.count, _LEADER, SUM)

        yield from self._led(work, after)

    def collect(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """Bring the columns ``parts[r]`` of rank r's row to the leader's."""
        yield from self._led(lambda: self._copy(parts, lambda rank: (self._rows[rank], self._rows[_LEADER])), after)

    def hand_out_parts(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        """Bring the columns ``parts[r]`` of the leader's row to rank r's."""
        yield from self._led(lambda: self._copy(parts, lambda rank: (self._rows[_LEADER], self._rows[rank])), after)

    def _copy(self, parts: Sequence[Part], rows: Callable[[int], tuple[Array, Array]]) -> None:
        for rank, (first, last) in enumerate(parts):
            if last > first and rank != _LEADER:
                source, target = rows(rank)
                self._node.streams.copy_async(target[first:last], source[first:last], self.stream)

    def allreduce(self, after: Sequence[Event] = ()) -> Steps:
        def work() -> None:
            if self.size.count:
                gradients.combine_into(self._words(), 0, self.size.count, EVERY_ROW, SUM)

        yield from self._led(work, after)

    def _words(self) -> list[Array]:
        """The rows as the kernels take them."""
        return [words(each) for each in self._rows]
