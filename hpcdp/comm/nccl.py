"""Sums over the GPUs of a node by NCCL, for ranks each of which has one of its own.

NCCL's kernels wait for each other on the GPUs. So they are launched only when all ranks are ready, and in one order on
all of them (`agreed_order`); and if a rank fails, the others end theirs (`Nccl.check`).

Source: NVIDIA, "NCCL User Guide", sections "Creating a Communicator", "Group Calls" and "Fault Tolerance".
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import DeviceError, UnsupportedError
from ..streams import Streams
from .agreed_order import THINGS, AgreedOrder
from .agreement import on_rank_0
from .communicator import Communicator
from .node_rows import Part, RowSize
from .shared import NodeMemory
from .steps import Steps, Until
from .ways import Offer, refuse_shared

_KINDS = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
"""The numbers of ``ncclDataType_t``."""

_SUM = 0
"""Of ``ncclRedOp_t``."""


class Nccl:
    """NCCL's communicator of a node's ranks, and their rows. All ranks of the node must make it together.

    Args:
        comm: the ranks of the node.
        memory: what they share.
        streams: of this rank's GPU.
        offers: of all ranks, see `ways.offers`.
        sizes: of the rows, alike on all ranks.

    Raises:
        DeviceError: two ranks have one GPU, or NCCL does not start; on all ranks.
        UnsupportedError: NCCL has no such numbers, or there are too many rows.
    """

    def __init__(
        self,
        comm: Communicator,
        memory: NodeMemory,
        streams: Streams,
        offers: Sequence[Offer],
        sizes: Sequence[RowSize],
    ) -> None:
        refuse_shared(offers)
        strange = next((each.dtype for each in sizes if each.dtype.name not in _KINDS), None)
        if strange is not None:
            raise UnsupportedError("NCCL", where="dtype", expected=" or ".join(_KINDS), got=strange)
        if len(sizes) > THINGS:
            raise UnsupportedError("NCCL", expected=f"at most {THINGS} rows", got=len(sizes))
        self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        self._memory, self._streams, self._ranks = memory, streams, comm
        self.rank = comm.rank
        self.order = AgreedOrder(memory)
        self.stream = streams.stream()
        name = on_rank_0(comm, self._new_name)
        with self._told(), streams.on_device():
            self._comm = self._nccl.NcclCommunicator(comm.size, bytes.fromhex(name), comm.rank)
        self._gone = ""
        rows = [streams.zeros(each.count, each.dtype) for each in sizes]
        self.rows = [NcclRows(self, number, *row) for number, row in enumerate(zip(rows, sizes, strict=True))]

    def _new_name(self) -> str:
        with self._told():
            return bytes(self._nccl.get_unique_id()).hex()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """NCCL's errors as ours, which say what to do."""
        try:
            yield
        except self._nccl.NcclError as error:
            remedy = "NCCL_DEBUG=INFO in the environment says more"
            raise DeviceError("NCCL", rank=self.rank, got=str(error), remedy=remedy) from error

    def launch(self, calls: Callable[[Any, int], None]) -> None:
        """Let ``calls(comm, stream)`` call collectives; they are one launch.

        Raises:
            DeviceError: NCCL refuses, or has been given up.
        """
        self.check()
        with self._told(), self._streams.on_device():
            self._nccl.groupStart()
            try:
                calls(self._comm, self.stream.ptr)
            finally:
                self._nccl.groupEnd()

    def check(self) -> None:
        """Raise, and end what is under way on the GPU, if it has failed or another rank is gone.

        Raises:
            DeviceError: NCCL has met an error since it was called, or has been given up.
        """
        if self._gone:
            raise DeviceError("NCCL", rank=self.rank, got=f"its communicator was given up: {self._gone}")
        try:
            self._memory.check()
            with self._told():
                self._comm.check_async_error()
        except Exception as error:
            self._abort(str(error))
            raise

    def _abort(self, why: str) -> None:
        """End NCCL's kernels that wait for other ranks; nothing can be summed any more."""
        if not self._gone:
            self._gone = why
            self._comm.abort()

    def close(self) -> None:
        """End the communicator, when all that was given to the stream is done; every rank of the node must call.

        CuPy would end it when its object is collected, at another moment on each rank, and NCCL may wait for others.
        """
        with self._streams.on_device():
            if not self._gone:
                self.stream.synchronize()
            self._ranks.barrier()
            if not self._gone:
                self._gone = "the world has ended"
                with self._told():
                    self._comm.destroy()


class NcclRows:
    """See `node_rows.NodeRows`."""

    def __init__(self, node: Nccl, number: int, mine: Any, size: RowSize) -> None:
        self.mine, self.size, self.stream = mine, size, node.stream
        self._node, self._number, self._kind = node, number, _KINDS[size.dtype.name]

    def check(self) -> None:
        self._node.check()

    def _at(self, column: int) -> int:
        return int(self.mine.data.ptr) + column * self.mine.dtype.itemsize

    def _in_turn(self, calls: Callable[[Any, int], None]) -> Steps:
        node, order = self._node, self._node.order
        order.ready(self._number)
        yield [Until(lambda: order.is_turn(self._number))]
        node.launch(calls)
        order.pass_on()

    def reduce_scatter(self, parts: Sequence[Part]) -> Steps:
        alike = _equal_part(parts)

        def calls(comm: Any, stream: int) -> None:
            if alike:
                own = self._at(parts[self._node.rank][0])
                comm.reduceScatter(self._at(parts[0][0]), own, alike, self._kind, _SUM, stream)
                return
            for owner, (first, last) in _not_empty(parts):
                at = self._at(first)
                comm.reduce(at, at, last - first, self._kind, _SUM, owner, stream)

        yield from self._in_turn(calls)

    def allgather(self, parts: Sequence[Part]) -> Steps:
        alike = _equal_part(parts)

        def calls(comm: Any, stream: int) -> None:
            if alike:
                own = self._at(parts[self._node.rank][0])
                comm.allGather(own, self._at(parts[0][0]), alike, self._kind, stream)
                return
            for owner, (first, last) in _not_empty(parts):
                at = self._at(first)
                comm.broadcast(at, at, last - first, self._kind, owner, stream)

        yield from self._in_turn(calls)

    def allreduce(self) -> Steps:
        at = self._at(0)
        yield from self._in_turn(lambda comm, stream: comm.allReduce(at, at, self.size.count, self._kind, _SUM, stream))


def _equal_part(parts: Sequence[Part]) -> int:
    """How long all parts are, which NCCL's own collectives want to be alike and in order; 0 where they are not."""
    count = parts[0][1] - parts[0][0]
    return count if all(part == (parts[0][0] + r * count, parts[0][0] + (r + 1) * count)
                        for r, part in enumerate(parts)) else 0  # fmt: skip


def _not_empty(parts: Sequence[Part]) -> list[tuple[int, Part]]:
    return [(owner, part) for owner, part in enumerate(parts) if part[1] > part[0]]
