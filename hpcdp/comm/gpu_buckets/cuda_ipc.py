"""Rows of ranks that share one GPU, which NCCL refuses: the first of them maps the rows of the others by CUDA IPC.

Processes that share a GPU take turns on it unless a server (MPS) runs them together. A turn takes time to begin, even
for an event: 0.2 ms and more on an H200, where four rows of 64 MB are summed in 0.13 ms. So one rank sums for all, and
the others give the GPU no work meanwhile, not even a wait::

    each rank            polls until its row is complete; posts a number in host memory
    the first rank       sees all numbers; sums; polls until the sum is complete; posts
    each rank            sees that, and continues

Rows come from cudaMalloc itself, in multiples of 2 MiB, because a handle shares the whole block that contains an
allocation. Source: NVIDIA, "CUDA C++ Programming Guide", section "Interprocess Communication".
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ...core.arrays import Array, Event, Stream, Streams, words
from ...core.checks import choices
from ...errors import DeviceError, UnsupportedError
from ...kernels.cuda import kernels
from ...kernels.reference import EVERY_ROW, SUM
from ..communicator import Communicator, PolledRequest, Steps
from ..consistency import on_every_rank
from ..shared_memory import NodeMemory, ProgressCounters
from .transport import SUMMED_KINDS, Part, RowSize

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
            raise UnsupportedError("CUDA IPC", where="dtype", expected=choices(SUMMED_KINDS), got=unknown)
        if comm.size > kernels.MAX_ROWS:
            expected = f"at most {kernels.MAX_ROWS} ranks that share a GPU"
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
        memory = on_every_rank(self.comm, lambda: self._as_device_errors(lambda: [self._make(size) for size in sizes]))
        handles = self.comm.allgather_json([handle.hex() for _, handle in memory])
        for stream in self._streams_of_rows:
            self.streams.follow(stream)  # no rank reads or writes a row before it is cleared

        def open_all() -> list[IpcRows]:
            return [self._open(number, memory[number][0], handles, size, owner) for number, size in enumerate(sizes)]

        return on_every_rank(self.comm, lambda: self._as_device_errors(open_all))

    def hand_out(self) -> list[IpcRows]:
        """Return the rows, by number; once. `users` shows whether one or a view of one is still referenced."""
        rows, self.rows = self.rows, []
        return rows

    def _as_device_errors(self, act: Callable[[], Any]) -> Any:
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
                    kernels.combine_into(self._words(), first, last, owner, SUM)

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
                kernels.combine_into(self._words(), 0, self.size.count, _LEADER, SUM)

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
                kernels.combine_into(self._words(), 0, self.size.count, EVERY_ROW, SUM)

        yield from self._led(work, after)

    def _words(self) -> list[Array]:
        """Return the rows as the kernels take them."""
        return [words(row) for row in self._rows]
