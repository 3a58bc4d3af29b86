"""Sums over ranks that share one GPU, which NCCL refuses: the first of them has mapped what the others have (CUDA IPC).

Processes that share a GPU take turns on it, unless a server (MPS) runs them together, and a turn takes time to begin,
even if it is for an event alone: 0.2 ms and more on an H200, where four rows of 64 MB are summed in 0.13. So one rank
sums for all, and the others give the GPU nothing meanwhile, not even a wait::

    each rank            sees that what its row waits for is done; posts a number in host memory
    the first rank       sees all numbers; sums; sees that it is done; posts
    each rank            sees that, and goes on

Rows come from cudaMalloc itself, in whole multiples of 2 MiB: a handle shares the block that an allocation lies in,
with all else that is in it.

Source: NVIDIA, "CUDA C++ Programming Guide", section "Interprocess Communication".
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays import Array, words
from ..errors import DeviceError, UnsupportedError
from ..kernels.cuda import reduce as cuda_reduce
from ..kernels.reference.reduce import EVERY_ROW, SUM
from ..streams import Event, Stream, Streams
from .agreement import on_every_rank
from .communicator import Communicator
from .node_rows import SUMMED_KINDS, Part, RowSize
from .shared import Milestones, NodeMemory
from .steps import Steps, Until

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
        if comm.size > cuda_reduce.MAX_ROWS:
            expected = f"at most {cuda_reduce.MAX_ROWS} ranks that share a GPU"
            raise UnsupportedError("CUDA IPC", expected=expected, got=comm.size, remedy="start fewer ranks a node")
        self.comm, self.memory, self.streams = comm, memory, streams
        self.is_leader = comm.rank == _LEADER
        self._streams_of_rows = [streams.stream() for _ in sizes]
        self.written = Milestones(memory, max(len(sizes), 1))
        self.summed = Milestones(memory, max(len(sizes), 1))
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
            yield [Until(lambda: streams.is_idle(self.stream) and all(map(streams.query, after)), _YIELDS)]
        node.written.post(self._round, number)
        if node.is_leader:
            yield [Until(lambda: node.written.reached(self._round, number), _YIELDS)]
            streams.wait_events(self.stream, after)
            with streams.on_device(), self.stream:
                work()
            yield [Until(lambda: streams.is_idle(self.stream), _YIELDS)]
            node.summed.post(self._round, number)
        else:
            yield [Until(lambda: node.summed.reached(self._round, number, ranks=_LEADER + 1), _YIELDS)]

    def reduce_scatter(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        def work() -> None:
            for owner, (first, last) in enumerate(parts):
                if last > first:
                    cuda_reduce.combine_into(self._words(), first, last, owner, SUM)

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
                cuda_reduce.combine_into(self._words(), 0, self.size.count, _LEADER, SUM)

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
                cuda_reduce.combine_into(self._words(), 0, self.size.count, EVERY_ROW, SUM)

        yield from self._led(work, after)

    def _words(self) -> list[Array]:
        """The rows as the kernels take them."""
        return [words(each) for each in self._rows]
