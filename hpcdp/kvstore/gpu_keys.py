"""Keys that every rank keeps on its GPU: CuPy arrays in a ``dist_device_sync`` store.

A push is summed on the GPU, over the node, and over nodes, like the gradients of a `Trainer` (see
`data_parallel.gpu_reduction`). Then every rank updates its value. Sums run on separate streams, updates and pulls on
one stream. Events order these and the program's current stream.

Source: as `sync`, but without owners, because a GPU updates a value faster than it receives it from another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..comm import Communicator, World
from ..comm.communicator import OPERATION_BITS, Steps
from ..comm.gpu_rows.transport import SUMMED_KINDS
from ..comm.shared_memory import ProgressCounters
from ..core.arrays import Array
from ..core.devices import Device, Event, Streams
from ..data_parallel.buckets import LINE_NBYTES, Bucket, Layout, Slot
from ..data_parallel.gpu_reduction import GpuReduction
from ..data_parallel.overlap import SendPriority
from ..errors import MismatchError, UnsupportedError
from .arguments import STORABLE, Key, fill, sum_into
from .sync_rounds import Reached
from .updaters import Updater

MOST_KEYS = (1 << OPERATION_BITS) - 1
"""Most keys of one `GpuKeys`, whose numbers distinguish the messages of their sums."""

_RATE_POSTED, _RATES_READ, _PHASES = 1, 2, 2
"""Milestones of a key's round: the rank has posted its learning rate, and has read those of the others."""


def can_stay(value: Array) -> bool:
    """Return whether ranks can sum CuPy arrays like ``value`` on their GPUs."""
    return np.dtype(value.dtype).name in SUMMED_KINDS and np.dtype(value.dtype) in STORABLE


def check_one_gpu(values: Mapping[Key, Array]) -> None:
    """Raise `UnsupportedError` unless all ``values`` are on one GPU."""
    devices = {key: Device.of(value) for key, value in values.items()}
    first = next(iter(devices.values()), None)
    odd = next((key for key, device in devices.items() if device != first), None)
    if odd is not None:
        raise UnsupportedError(
            "init", where=f"key {odd!r}", expected=f"an array on {first}, like the other keys",
            got=f"an array on {devices[odd]}",
        )  # fmt: skip


@dataclass
class _Held:
    """A key in the form of a parameter, for `GpuReduction`."""

    name: str
    data: Array
    grad: Any = None
    grad_req: str = "write"
    grad_hook: Any = None


class GpuKey:
    """A key on the GPU: its value, the row that is summed, and the node's progress counters."""

    def __init__(self, name: str, value: Array, bucket: Bucket, world: World, streams: Streams) -> None:
        self.value, self.bucket = value, bucket
        self.received = bucket.view(bucket.slots[0])
        """The push, then the sum: a view of the row in the key's shape."""
        self.updated = streams.event()
        """Event after the last update, which read the row."""
        self.rounds = 0
        self._name, self._memory = name, world.node_memory
        self._neighbours = world.node_comm.allgather_json(world.rank)
        self._milestones = ProgressCounters(world.node_memory)
        self._rates = world.node_memory.alloc((world.node_memory.size,), np.float64)

    def behind(self) -> list[int]:
        """Return the ranks of the node that have pushed less often than this one."""
        return self._milestones.behind(_milestone(self.rounds, _RATE_POSTED))

    def post_rate(self, number: int, rate: float) -> Steps:
        """Post the learning rate of round ``number``, once the node's ranks have read that of the last round."""
        yield [Reached(self._milestones, _milestone(number - 1, _RATES_READ))]
        self._rates[self._memory.rank] = rate
        self._milestones.post(_milestone(number, _RATE_POSTED))

    def compare_rates(self, number: int) -> Steps:
        """Raise `MismatchError` on all ranks of the node if their learning rates of a round differ."""
        yield [Reached(self._milestones, _milestone(number, _RATE_POSTED))]
        rates = self._rates.tolist()
        self._milestones.post(_milestone(number, _RATES_READ))
        at = next((at for at, rate in enumerate(rates) if rate != rates[0]), None)
        if at is not None:
            got = f"{rates[0]:g} on rank {self._neighbours[0]}, {rates[at]:g} on rank {self._neighbours[at]}"
            raise MismatchError("push", where=self._name, expected="the same learning rate on all ranks", got=got)


class GpuKeys:
    """The keys of one call of ``init``; every rank of the world must make it, with values on its GPU.

    Args:
        values: initial values, alike on all ranks, all on one GPU, at most `MOST_KEYS`; the store keeps these arrays.
        world: the ranks.
        comm: communicator of all ranks, see `GpuReduction`.
        rail: duplicate of `World.rail_comm`, or None, see `GpuReduction`.
        signature: signature of message tags, see `make_tag`.

    Raises:
        DeviceError, UnsupportedError: see `GpuReduction`.
    """

    def __init__(
        self, values: Mapping[Key, Array], world: World, comm: Communicator, rail: Communicator | None, signature: int
    ) -> None:
        names = [f"key {key!r}" for key in values]
        held = [_Held(name, value) for name, value in zip(names, values.values(), strict=True)]
        layout = _layout(held)
        self._streams = streams = Streams(Device.of(held[0].data))
        with streams.on_device():
            self._reduction = GpuReduction(held, layout, world, comm, rail, signature, None)
        buckets = self._reduction.allocate(layout)
        self._stream = streams.stream()
        self._read: deque[tuple[Event, Array]] = deque()
        """Events after pulls, and their destinations, which must stay allocated until then."""
        self.keys: dict[Key, GpuKey] = {}
        for key, entry, bucket in zip(values, held, buckets, strict=True):
            self.keys[key] = GpuKey(entry.name, entry.data, bucket, world, streams)
        self.follow()

    def finish(self) -> None:
        """Let the current stream, which writes values next, wait for all earlier updates and pulls."""
        self._streams.follow(self._streams.current(), self._stream)

    def follow(self) -> None:
        """Let later updates and pulls wait for the current stream."""
        self._streams.follow(self._stream)

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Make the stream of updates and pulls current in this context."""
        with self._streams.on_device(), self._stream:
            yield

    def fill(self, key: Key, arrays: Sequence[Array]) -> int:
        """Sum ``arrays`` into a key's row, and return the number of its `round`; the last round must have ended."""
        mine, streams = self.keys[key], self._streams
        with streams.on_device():
            streams.wait_event(streams.current(), mine.updated)
            sum_into(mine.received, arrays)
            self._reduction.filled(mine.bucket)
        mine.rounds += 1
        return mine.rounds

    def round(self, key: Key, number: int, updater: Updater, turn: SendPriority | None) -> Steps:
        """Sum the pushes of all ranks, and update; the round ends when this work is queued on the GPU."""
        mine = self.keys[key]
        yield from mine.post_rate(number, updater.rate(key))
        yield from self._reduction.sum(mine.bucket, turn)
        with self._updating():
            self._reduction.summed(mine.bucket)
            self._streams.record(mine.updated, self._stream)  # for the next push if the update raises
        yield from mine.compare_rates(number)
        with self._updating():
            try:
                updater.update(key, mine.received, mine.value)
            finally:
                self._streams.record(mine.updated, self._stream)

    def pull(self, key: Key, place: Array, rows: np.ndarray | None) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return two functions for a pull to ``place`` on this GPU.

        The first queues the copy, after earlier pushes; the second lets the current stream wait for it.
        """
        streams, value = self._streams, self.keys[key].value
        begun, copied = streams.event(), streams.event()
        streams.record(begun, streams.current())  # after earlier work on `place`
        while self._read and streams.query(self._read[0][0]):
            self._read.popleft()

        def copy() -> None:
            with self._updating():
                streams.wait_event(self._stream, begun)
                fill(place, value, rows)
                streams.record(copied, self._stream)
            self._read.append((copied, place))

        return copy, lambda: streams.wait_event(streams.current(), copied)

    def arrive(self, key: Key) -> None:
        """Let the current stream wait for the last update of a key, whose `round` has ended."""
        self._streams.wait_event(self._streams.current(), self.keys[key].updated)


def _milestone(number: int, phase: int) -> int:
    """Return the milestone of a phase of round ``number``, from 1; milestone 0 is the start."""
    return (number - 1) * _PHASES + phase


def _layout(held: Sequence[_Held]) -> Layout:
    """Return a layout with one bucket for each key, because keys are pushed one by one."""
    dtypes = tuple(np.dtype(key.data.dtype) for key in held)
    slots = tuple(Slot(key.name, tuple(key.data.shape), number, 0) for number, key in enumerate(held))
    lines = [-(-slot.count * dtype.itemsize // LINE_NBYTES) or 1 for slot, dtype in zip(slots, dtypes, strict=True)]
    counts = tuple(num * LINE_NBYTES // dtype.itemsize for num, dtype in zip(lines, dtypes, strict=True))
    return Layout(slots, counts, dtypes)
