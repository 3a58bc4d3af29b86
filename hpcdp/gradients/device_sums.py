"""Buckets on GPUs: summed inside the node by NCCL or CUDA IPC, across nodes through the host, and brought to all again.

What `Reducer` and `Rail` do with rows in a node's memory, for rows on GPUs::

    backward | reduce-scatter in the node | own part: host, rail, host | allgather in the node | update

Streams are ordered by events; only the rail makes the host wait. On one node it is one allreduce. With compression the
own part stays on the GPU and its codes go to the host and over the rail. Where messages take arrays on GPUs
(`cuda_aware`), and without compression, nothing goes to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Array
from ..collectives.progress import Steps, together
from ..comm import Communicator, Request, World, cuda_aware, node_groups
from ..comm.agreement import on_every_rank
from ..comm.communicator import make_tag
from ..comm.node_rows import SUMMED_KINDS, NodeRows, Part, RowSize, lone_rows, parts_of
from ..comm.reductions import resolve
from ..comm.steps import StepsTo
from ..comm.ways import Way
from ..comm.world import GPU_OF_MESSAGES
from ..compression import Compression
from ..devices import gpu
from ..errors import DeviceError, UnsupportedError
from ..streams import Event, Stream, Streams
from . import message_length
from .bucket import Bucket, Parameter
from .buckets import LINE_NBYTES, Layout, Slot
from .code_staging import CodeStaging, Share
from .direct import Direct
from .rail import lanes_of_segment, padding
from .staging import Staging


class DeviceSums:
    """All buckets of a reducer whose parameters are on GPUs. All ranks must make it together.

    Args:
        params: all on one GPU, which is this thread's current device.
        layout: where each of them goes.
        world: the ranks.
        comm: all of them, for messages.
        rail: of `World.rail_comm`, for messages; None where this rank has none.
        signature: see `make_tag`.
        compression: how what goes between nodes is compressed, or with its ``inside_nodes`` between ranks. None: not.
        sharded: leave each part of the sums with its owner in the node, until `gather` brings it to the others.

    Raises:
        DeviceError: another device is current; on all ranks. And see `node_groups.make`.
        ConfigError: see `cuda_aware.agreed`; on all ranks.
        UnsupportedError: parameters on several GPUs, on all ranks; dtypes that no node can send to others. And see
            `node_groups.make`.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        layout: Layout,
        world: World,
        comm: Communicator,
        rail: Communicator | None,
        signature: int,
        compression: Compression | None,
        sharded: bool = False,
    ) -> None:
        self.sharded = sharded
        self._streams = streams = on_every_rank(world.comm, lambda: streams_of(params))
        self._counts = layout.counts
        sizes = [
            RowSize(_padded(count, world.num_rails, dtype), dtype)
            for count, dtype in zip(layout.counts, layout.dtypes, strict=True)
        ]
        self._rows: Sequence[NodeRows]
        if compression is not None and compression.inside_nodes:
            self._rows, self.way = lone_rows(streams, sizes), Way.HOST
        else:
            self._rows, self.way = node_groups.make(world, streams, sizes)
        alone = self.way is Way.HOST
        owners, ranks, self._rank = (1, 1, 0) if alone else (world.num_rails, world.local_size, world.local_rank)
        self._parts = [parts_of(each.count, owners, ranks) for each in sizes]
        if compression is not None:  # codes begin with a part: these are those of the CPU
            self._parts = [_shards(layout, number, owners, ranks) for number in range(len(sizes))]
        self.on_one_node = not alone and world.num_nodes == 1
        """Whether GPUs alone sum, and no message is sent."""
        self._across = comm if alone else rail
        self.goes_direct = False
        """Whether messages go from and to GPUs' memory, and not through the host; alike on all ranks."""
        self._staging: Staging | None = None
        self._direct: Direct | None = None
        self.codes: CodeStaging | None = None
        """What encodes this rank's part of each bucket; None without compression, or where it sends none."""
        if not self.on_one_node:
            _require_sums_on_the_host(sizes)
            self.goes_direct = compression is None and cuda_aware.agreed(world)[0]
            if self.goes_direct:
                world.keep(GPU_OF_MESSAGES, lambda: streams.device)
            if self._across is not None and compression is not None:
                self.codes = CodeStaging(streams, self._shares(layout), compression, self._across)
            elif self._across is not None and self.goes_direct:
                self._direct = Direct(streams, len(sizes), self._across)
            elif self._across is not None:
                self._staging = Staging(streams, [self._part(number).nbytes for number in range(len(sizes))])
                self._message_nbytes = message_length.fitting(world, self._across, layout.longest_nbytes)
        self._signature = signature
        self._writers: list[dict[int, Stream]] = [{} for _ in sizes]
        """Of each bucket the streams, by address, to which what it holds was given since it was `filled`."""
        self._written: list[list[Event]] = [[] for _ in sizes]
        """Of each bucket as many events as streams have written it at most in a step."""
        self._filled: list[Sequence[Event]] = [() for _ in sizes]
        """Of each bucket the events behind which it is filled."""
        self._done = [streams.event() for _ in sizes]
        self._behind: list[Sequence[Event]] = [() for _ in sizes]
        """Of each bucket the events behind what was last done with it."""
        self.copies = (1, 0)
        """How many ranks have this rank's part of the sums, and which of them it is."""
        if alone:
            self.copies = (world.size, world.rank)
        elif rail is not None:
            self.copies = (rail.size, rail.rank)

    def rows(self, number: int) -> Array:
        """Where the gradients of bucket ``number`` are to be written, shape ``(1, count)``."""
        return self._rows[number].mine[: self._counts[number]].reshape(1, self._counts[number])

    def written(self, bucket: Bucket) -> None:
        """Some of what is in its row is given to this thread's current stream, which need not be that of the rest."""
        stream = self._streams.current()
        self._writers[bucket.number][stream.ptr] = stream

    def filled(self, bucket: Bucket) -> None:
        """All that is in its row is `written`, or given to this thread's current stream; called before `sum` and
        `gather`."""
        self.written(bucket)
        writers, events = self._writers[bucket.number], self._written[bucket.number]
        while len(events) < len(writers):
            events.append(self._streams.event())
        for event, stream in zip(events, writers.values(), strict=False):
            self._streams.record(event, stream)
        self._filled[bucket.number] = tuple(events[: len(writers)])
        writers.clear()

    def sum(self, bucket: Bucket, turn: Request | None, unsent: Sequence[Slot] = ()) -> Steps:
        """Sum a bucket over all ranks, in place on each; it ends when the last work for that is given to the GPU.

        Args:
            unsent: see `Coder`.
        """
        number, filled = bucket.number, self._filled[bucket.number]
        row, parts = self._rows[number], self._parts[number]
        if self.on_one_node and not self.sharded:
            yield from row.allreduce(filled)
            self._note(number)
            return
        yield from row.reduce_scatter(parts, filled)
        self._note(number)
        summed_over_nodes = () if self.on_one_node else (yield from self._sum_over_nodes(number, row, turn, unsent))
        if self.sharded:
            self._behind[number] = (*self._behind[number], *summed_over_nodes)
        else:
            yield from row.allgather(parts, summed_over_nodes)
            self._note(number)

    def gather(self, bucket: Bucket) -> Steps:
        """Bring each part of a bucket from its owner's row to those of the node's other ranks, as `sum` does."""
        number = bucket.number
        yield from self._rows[number].allgather(self._parts[number], self._filled[number])
        self._note(number)

    def _note(self, number: int) -> None:
        self._streams.record(self._done[number], self._rows[number].stream)
        self._behind[number] = (self._done[number],)

    def _sum_over_nodes(
        self, number: int, row: NodeRows, turn: Request | None, unsent: Sequence[Slot]
    ) -> StepsTo[Sequence[Event]]:
        """Sum this rank's part; returns the events behind which the sum is there."""
        across = self._across
        if across is None:
            return ()
        tag = make_tag(self._signature % across.signatures, number)
        if self.codes is not None:
            return (yield from self.codes.sum(number, row, tag, turn, unsent))
        if self._direct is not None:
            return (yield from self._direct.sum(number, self._part(number), row, tag, turn))
        assert self._staging is not None

        def total(x: np.ndarray, tag: int, turn: Request | None) -> Steps:
            kind = resolve("reduction", "sum", x.dtype)
            return together(lanes_of_segment(x, kind, across, tag, self._message_nbytes, turn))

        return (yield from self._staging.sum(number, self._part(number), row, total, tag, turn))

    def summed(self, bucket: Bucket) -> None:
        """What this thread's current stream is given from now on finds what `sum` or `gather` has made; called after
        those."""
        self._streams.wait_events(self._streams.current(), self._behind[bucket.number])

    def shard(self, number: int) -> Part:
        """The columns of a bucket that this rank owns in its node; all where every rank gets all sums."""
        count = self._counts[number]
        first, last = self._parts[number][self._rank] if self.sharded else (0, count)
        return min(first, count), min(last, count)

    def _part(self, number: int) -> Array:
        return self._rows[number].mine[slice(*self._parts[number][self._rank])]

    def _shares(self, layout: Layout) -> list[Share]:
        columns = [parts[self._rank] for parts in self._parts]
        slots = [[slot for slot in layout.slots if slot.bucket == number] for number in range(len(columns))]
        return [
            Share(self._part(number), first, padding(slots[number], (first, last)))
            for number, (first, last) in enumerate(columns)
        ]


def _require_sums_on_the_host(sizes: Sequence[RowSize]) -> None:
    strange = next((each.dtype for each in sizes if each.dtype.name not in SUMMED_KINDS), None)
    if strange is not None:
        raise UnsupportedError("reduction over nodes", where="dtype", expected=" or ".join(SUMMED_KINDS), got=strange)


def _padded(count: int, parts: int, dtype: np.dtype) -> int:
    """So many elements that all parts are alike, as NCCL wants them, and whole cache lines; alike on all nodes."""
    unit = parts * LINE_NBYTES // dtype.itemsize
    return -(-count // unit) * unit


def _shards(layout: Layout, number: int, owners: int, ranks: int) -> list[Part]:
    """The parts of a bucket as on the CPU; those of ranks that own none are empty."""
    count = layout.counts[number]
    return [layout.shard(number, owners, rank) if rank < owners else (count, count) for rank in range(ranks)]


def streams_of(params: Sequence[Parameter]) -> Streams:
    """Those of the GPU that all ``params`` are on, which is this thread's current device.

    Raises:
        DeviceError: it is not.
        UnsupportedError: they are on several.
    """
    devices = sorted({int(param.data.device.id) for param in params})
    if len(devices) > 1:
        found = " and ".join(str(gpu(each)) for each in devices)
        raise UnsupportedError("reduction", where="device", expected="all parameters on one GPU", got=found,
                               remedy="net.to(world.device)")  # fmt: skip
    streams = Streams(gpu(devices[0]))
    if streams.current_device() != streams.device:
        expected = f"{streams.device}, where the parameters are, as this thread's current device"
        raise DeviceError("reduction", where="device", expected=expected, got=streams.current_device(),
                          remedy="call world.device.use() before anything is computed")  # fmt: skip
    return streams
