"""Sums over ranks of which several share a GPU, on several GPUs: CUDA IPC on each of them, NCCL between.

::

    each GPU            the first of its ranks sums the rows of all into its own
    the first ranks     sum over the GPUs, each what ranks of its GPU own
    each GPU            the first rank brings the sums to the rows of the others

NCCL refuses two ranks on a GPU, and CUDA IPC sums on one; so the first rank of each is NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import DeviceError
from ..streams import Event, Streams
from .agreement import on_every_rank
from .communicator import Communicator
from .cuda_ipc import CudaIpc, IpcRows
from .nccl import NcclGroup, NcclRows
from .node_rows import OwnedPart, Part, RowSize
from .steps import Steps, StepsTo
from .world import World


class GpuGroups:
    """The rows of a node's ranks. All ranks of the node must make it together.

    Args:
        shared: the ranks of this rank's GPU, as a world.
        groups: the local ranks of each GPU, see `ways.by_gpu`.
        node: all ranks of the node.
        streams: of its GPU.
        sizes: of the rows, alike on all ranks.
        between: makes rows of NCCL in these arrays, between the GPUs; called by the first rank of each.

    Raises:
        DeviceError: as `CudaIpc`, on all ranks, and `Nccl`.
        UnsupportedError: as well.
    """

    def __init__(
        self,
        shared: World,
        groups: Sequence[Sequence[int]],
        node: Communicator,
        streams: Streams,
        sizes: Sequence[RowSize],
        between: Callable[[list[Any]], NcclGroup],
    ) -> None:
        self._streams = streams
        made: list[CudaIpc] = []
        try:  # or the first ranks of other GPUs would wait for one whose GPU has no room
            on_every_rank(node, lambda: made.append(CudaIpc(shared.node_comm, shared.node_memory, streams, sizes)))
        except DeviceError:
            for each in made:
                each.close()
            raise
        (self._ipc,) = made
        self.users = self._ipc.users
        """See `hand_out`."""
        on_gpus = self._ipc.hand_out()
        self._firsts = between([row.mine for row in on_gpus]) if self._ipc.is_leader else None
        over_gpus: Sequence[NcclRows | None] = [None] * len(on_gpus)
        if self._firsts is not None:
            over_gpus = self._firsts.hand_out()
        gpu_of = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
        own = groups[gpu_of[node.rank]]
        places = [gpu_of[rank] for rank in sorted(gpu_of)]
        self._rows = [GroupRows(streams, *each, own, places) for each in zip(on_gpus, over_gpus, strict=True)]

    @property
    def firsts(self) -> NcclGroup | None:
        """Of the first ranks, between the GPUs; None where another rank of this one is part of it."""
        return self._firsts

    def hand_out(self) -> list[GroupRows]:
        """The rows, by number; once. They live as long as somebody has them or a view of one, which `users` tells."""
        rows, self._rows = self._rows, []
        return rows

    def close(self) -> None:
        """Give all back, when all that was given to the streams is done; every rank of the node must call."""
        if self._firsts is not None:
            self._streams.synchronize(self._firsts.node.stream)
            self._firsts.close()
        self._ipc.close()


class GroupRows:
    """See `node_rows.NodeRows`. Its machines end when what they do is done.

    Args:
        on_gpu: the rows of this rank's GPU.
        over_gpus: those of the first ranks; None where this is no first rank.
        own: the local ranks of this GPU.
        places: of each local rank which GPU is its, by their first ranks.
    """

    def __init__(
        self, streams: Streams, on_gpu: IpcRows, over_gpus: NcclRows | None, own: Sequence[int], places: Sequence[int]
    ) -> None:
        self._on_gpu, self._over_gpus, self._own, self._places = on_gpu, over_gpus, own, places
        self.mine, self.size, self.stream = on_gpu.mine, on_gpu.size, on_gpu.stream
        self._streams, self._done = streams, streams.event()

    def check(self) -> None:
        self._on_gpu.check()
        if self._over_gpus is not None:
            self._over_gpus.check()

    def _over(self, machine: Callable[[NcclRows], Steps]) -> StepsTo[Sequence[Event]]:
        """Run it between the GPUs; the events behind which it is done."""
        if self._over_gpus is None:
            return ()
        yield from machine(self._over_gpus)
        self._streams.record(self._done, self._over_gpus.stream)
        return (self._done,)

    def _own_parts(self, parts: Sequence[Part]) -> list[Part]:
        return [parts[rank] for rank in self._own]

    def _of_gpus(self, parts: Sequence[Part]) -> list[OwnedPart]:
        """What each GPU's ranks own; one part where it is side by side."""
        found: list[OwnedPart] = []
        for place, part in zip(self._places, parts, strict=True):
            if found and found[-1][0] == place and found[-1][1][1] == part[0]:
                found[-1] = (place, (found[-1][1][0], part[1]))
            else:
                found.append((place, part))
        return found

    def _everything(self) -> list[Part]:
        return [(0, self.size.count)] * len(self._own)

    def reduce_scatter(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        yield from self._on_gpu.sum_at_leader(after)
        done = yield from self._over(lambda rows: rows.reduce(self._of_gpus(parts)))
        yield from self._on_gpu.hand_out_parts(self._own_parts(parts), done)

    def allgather(self, parts: Sequence[Part], after: Sequence[Event] = ()) -> Steps:
        yield from self._on_gpu.collect(self._own_parts(parts), after)
        done = yield from self._over(lambda rows: rows.broadcast(self._of_gpus(parts)))
        yield from self._on_gpu.hand_out_parts(self._everything(), done)

    def allreduce(self, after: Sequence[Event] = ()) -> Steps:
        yield from self._on_gpu.sum_at_leader(after)
        done = yield from self._over(lambda rows: rows.allreduce())
        yield from self._on_gpu.hand_out_parts(self._everything(), done)
