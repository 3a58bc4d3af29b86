"""Buckets on GPUs: summed inside the node by NCCL or CUDA IPC, across nodes through the host, and brought to all again.

What `Reducer` and `Rail` do with rows in a node's memory, for rows on GPUs::

    backward | reduce-scatter in the node | own part: host, rail, host | allgather in the node | update

Streams are ordered by events; only the rail makes the host wait. On one node it is one allreduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Array
from ..collectives.progress import Steps
from ..comm import Communicator, Request, World, node_groups
from ..comm.communicator import make_tag
from ..comm.node_rows import SUMMED_KINDS, RowSize, parts_of
from ..comm.ways import Way
from ..devices import Device, gpu
from ..errors import UnsupportedError
from ..streams import Streams
from .bucket import Bucket, Parameter
from .buckets import LINE_NBYTES, Layout
from .rail import summed
from .staging import Staging


class DeviceSums:
    """All buckets of a reducer whose parameters are on GPUs. All ranks must make it together.

    Args:
        params: all on one GPU.
        layout: where each of them goes.
        world: the ranks.
        comm: all of them, for messages.
        rail: of `World.rail_comm`, for messages; None where this rank has none.
        signature: see `make_tag`.

    Raises:
        DeviceError, UnsupportedError: see `node_groups.make`.
        UnsupportedError: dtypes that no node can send to others.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        layout: Layout,
        world: World,
        comm: Communicator,
        rail: Communicator | None,
        signature: int,
    ) -> None:
        device = _device_of(params)
        self._streams = streams = Streams(device)
        self._counts = layout.counts
        sizes = [
            RowSize(_padded(count, world.num_rails, dtype), dtype)
            for count, dtype in zip(layout.counts, layout.dtypes, strict=True)
        ]
        if world.num_nodes > 1:
            _require_sums_on_the_host(sizes)  # before ranks make what they give back together
        self._group, self.way = node_groups.make(world, device, streams, sizes)
        alone = self.way is Way.HOST
        self._across = comm if alone else rail
        owners, ranks, self._rank = (1, 1, 0) if alone else (world.num_rails, world.local_size, world.local_rank)
        self._parts = [parts_of(each.count, owners, ranks) for each in sizes]
        self._one_node = not alone and world.num_nodes == 1
        self._staging: Staging | None = None
        if not self._one_node:
            _require_sums_on_the_host(sizes)
            if self._across is not None:
                nbytes = [self._part(number).nbytes for number in range(len(sizes))]
                self._staging = Staging(streams, nbytes)
        self._signature = signature
        self._filled, self._done = ([streams.event() for _ in sizes] for _ in range(2))

    def rows(self, number: int) -> Array:
        """Where the gradients of bucket ``number`` are to be written, shape ``(1, count)``."""
        return self._group.rows[number].mine[: self._counts[number]].reshape(1, self._counts[number])

    def filled(self, bucket: Bucket) -> None:
        """Its gradients are given to this thread's current stream; called before `sum`."""
        self._streams.record(self._filled[bucket.number], self._streams.current())

    def sum(self, bucket: Bucket, turn: Request | None) -> Steps:
        """Sum a bucket over all ranks, in place on each; it ends when the last work for that is given to the GPU."""
        row, parts = self._group.rows[bucket.number], self._parts[bucket.number]
        # Not in `filled`: buckets share the stream, and those before this one would wait for its gradients, too.
        self._streams.wait_event(row.stream, self._filled[bucket.number])
        if self._one_node:
            yield from row.allreduce()
        else:
            yield from row.reduce_scatter(parts)
            if self._staging is not None and self._across is not None:
                across = self._across
                tag = make_tag(self._signature % across.signatures, bucket.number)
                part = self._part(bucket.number)
                yield from self._staging.sum(
                    bucket.number, part, row, lambda x, tag, turn: summed(x, across, tag, turn), tag, turn
                )
            yield from row.allgather(parts)
        self._streams.record(self._done[bucket.number], row.stream)

    def summed(self, bucket: Bucket) -> None:
        """What this thread's current stream is given from now on finds the sums; called after `sum`."""
        self._streams.wait_event(self._streams.current(), self._done[bucket.number])

    def _part(self, number: int) -> Array:
        return self._group.rows[number].mine[slice(*self._parts[number][self._rank])]


def _require_sums_on_the_host(sizes: Sequence[RowSize]) -> None:
    strange = next((each.dtype for each in sizes if each.dtype.name not in SUMMED_KINDS), None)
    if strange is not None:
        raise UnsupportedError("reduction over nodes", where="dtype", expected=" or ".join(SUMMED_KINDS), got=strange)


def _padded(count: int, parts: int, dtype: np.dtype) -> int:
    """So many elements that all parts are alike, as NCCL wants them, and whole cache lines; alike on all nodes."""
    unit = parts * LINE_NBYTES // dtype.itemsize
    return -(-count // unit) * unit


def _device_of(params: Sequence[Parameter]) -> Device:
    devices = sorted({int(param.data.device.id) for param in params})
    if len(devices) > 1:
        found = " and ".join(str(gpu(each)) for each in devices)
        raise UnsupportedError("reduction", where="device", expected="all parameters on one GPU", got=found,
                               remedy="net.to(world.device)")  # fmt: skip
    return gpu(devices[0])
