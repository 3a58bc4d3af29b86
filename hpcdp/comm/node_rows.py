"""Arrays of a node's ranks on its GPUs, summed where they lie: what NCCL and CUDA IPC both do, each in its way.

It is what the CPU's ranks do in shared memory (`hpcdp.gradients.reducer`): each rank has a row, which it fills; parts
of the columns have owners, in whose rows they are summed, in the order of the ranks where one GPU does it; owners
exchange their sums with other nodes; each part goes from its owner's row to all others. No call of it blocks the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..arrays import Array
from ..streams import Event, Stream, Streams
from .communicator import bounds
from .steps import Steps

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
