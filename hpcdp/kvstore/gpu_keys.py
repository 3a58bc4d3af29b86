"""Keys that every rank keeps on its GPU: ``dist_device_sync``, where values are CuPy arrays.

A push is added up on the GPU, over the node, and over nodes as the gradients of a `Trainer` are (see
`data_parallel.gpu_reduction`); then every rank updates its value. Sums have streams of their own, updates and pulls one
together; events order these and the stream that is current where the program pushes and pulls.

Source: as `sync`; there is no owner, since a GPU updates a value faster than it gets one from another.
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
from ..comm.cuda_memory import SUMMED_KINDS
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
"""Of one `GpuKeys`, which tells the messages of their sums apart by their numbers."""

_SAID, _READ, _PHASES = 1, 2, 2
"""What a rank posts in a round of a key: its learning rate, and that it has read those of the others."""


def can_stay(value: Array) -> bool:
    """Whether ranks can sum arrays like ``value``, a CuPy array, on their GPUs."""
    return np.dtype(value.dtype).name in SUMMED_KINDS and np.dtype(value.dtype) in STORABLE


def check_one_gpu(values: Mapping[Key, Array]) -> None:
    """Raises `UnsupportedError` unless all ``values`` are on one GPU."""
    devices = {key: Device.of(value) for key, value in values.items()}
    first = next(iter(devices.values()), None)
    odd = next((key for key, device in devices.items() if device != first), None)
    if odd is not None:
        raise UnsupportedError("init", where=f"key {odd!r}", expected=f"an array on {first}, as of the keys before",
                               got=f"one on {devices[odd]}")  # fmt: skip


@dataclass
class _Held:
    """A key as `GpuReduction` sees it."""

    name: str
    data: Array
    grad: Any = None
    grad_req: str = "write"
    grad_hook: Any = None


class GpuKey:
    """One key: its value, the row that is summed, and how far the ranks of the node are with it."""

    def __init__(self, name: str, value: Array, bucket: Bucket, world: World, streams: Streams) -> None:
        self.value, self.bucket = value, bucket
        self.received = bucket.view(bucket.slots[0])
        """What is pushed, then the sum; a view of the row, in the key's shape."""
        self.updated = streams.event()
        """Behind the last update, which read the row."""
        self.rounds = 0
        self._name, self._memory = name, world.node_memory
        self._neighbours = world.node_comm.allgather_json(world.rank)
        self._milestones = ProgressCounters(world.node_memory)
        self._rates = world.node_memory.alloc((world.node_memory.size,), np.float64)

    def behind(self) -> list[int]:
        """The ranks of the node that have not pushed as often as this one."""
        return self._milestones.behind(_milestone(self.rounds, _SAID))

    def say_rate(self, number: int, rate: float) -> Steps:
        """Tell the node's ranks the learning rate of round ``number``, once they have read that of the last."""
        yield [Reached(self._milestones, _milestone(number - 1, _READ))]
        self._rates[self._memory.rank] = rate
        self._milestones.post(_milestone(number, _SAID))

    def compare_rates(self, number: int) -> Steps:
        """Raises `MismatchError` on all ranks of the node where they differ in the learning rate of a round."""
        yield [Reached(self._milestones, _milestone(number, _SAID))]
        rates = self._rates.tolist()
        self._milestones.post(_milestone(number, _READ))
        at = next((at for at, rate in enumerate(rates) if rate != rates[0]), None)
        if at is not None:
            got = f"{rates[0]:g} on rank {self._neighbours[0]}, {rates[at]:g} on rank {self._neighbours[at]}"
            raise MismatchError("push", where=self._name, expected="the same learning rate on all ranks", got=got)


class GpuKeys:
    """The keys of one call of ``init``; every rank of the world must make it, with values on its GPU.

    Args:
        values: alike on all ranks, for which they become the store's own; all on one GPU, at most `MOST_KEYS`.
        comm: all ranks, for messages; ``rail``: of `World.rail_comm`, or None. Both as `GpuReduction` has them.
        signature: see `make_tag`.

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
        """What pulls write to, and the events behind them: memory must stay until then."""
        self.keys: dict[Key, GpuKey] = {}
        for key, entry, bucket in zip(values, held, buckets, strict=True):
            self.keys[key] = GpuKey(entry.name, entry.data, bucket, world, streams)
        self.follow()

    def finish(self) -> None:
        """Let the stream that is current wait for all updates and pulls so far: it writes values next."""
        self._streams.follow(self._streams.current(), self._stream)

    def follow(self) -> None:
        """Let updates and pulls from now on wait for what the stream that is current has written."""
        self._streams.follow(self._stream)

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Within it this thread gives what it computes to the stream of updates and pulls."""
        with self._streams.on_device(), self._stream:
            yield

    def fill(self, key: Key, arrays: Sequence[Array]) -> int:
        """Take a push, before its `round`, whose number is returned; that of the push before must have ended."""
        mine, streams = self.keys[key], self._streams
        with streams.on_device():
            streams.wait_event(streams.current(), mine.updated)
            sum_into(mine.received, arrays)
            self._reduction.filled(mine.bucket)
        mine.rounds += 1
        return mine.rounds

    def round(self, key: Key, number: int, updater: Updater, turn: SendPriority | None) -> Steps:
        """Sum what all ranks have pushed, and update; it has ended when that is given to the GPU."""
        mine = self.keys[key]
        yield from mine.say_rate(number, updater.rate(key))
        yield from self._reduction.sum(mine.bucket, turn)
        with self._updating():
            self._reduction.summed(mine.bucket)
            self._streams.record(mine.updated, self._stream)  # for a push that follows an update that raises
        yield from mine.compare_rates(number)
        with self._updating():
            try:
                updater.update(key, mine.received, mine.value)
            finally:
                self._streams.record(mine.updated, self._stream)

    def pull(self, key: Key, place: Array, rows: np.ndarray | None) -> tuple[Callable[[], None], Callable[[], None]]:
        """Two functions: one copies the value to ``place``, on this GPU, when the pushes before have ended; the other
        lets the stream that is current wait for that."""
        streams, value = self._streams, self.keys[key].value
        begun, come = streams.event(), streams.event()
        streams.record(begun, streams.current())  # what was computed with `place` before
        while self._read and streams.query(self._read[0][0]):
            self._read.popleft()

        def copy() -> None:
            with self._updating():
                streams.wait_event(self._stream, begun)
                fill(place, value, rows)
                streams.record(come, self._stream)
            self._read.append((come, place))

        return copy, lambda: streams.wait_event(streams.current(), come)

    def arrive(self, key: Key) -> None:
        """Let the stream that is current wait for the last update of a key, whose `round` has ended."""
        self._streams.wait_event(self._streams.current(), self.keys[key].updated)


def _milestone(number: int, phase: int) -> int:
    """That of a phase of round ``number``, counted from 1; 0 is where all begin."""
    return (number - 1) * _PHASES + phase


def _layout(held: Sequence[_Held]) -> Layout:
    """A bucket for each key: they are pushed one by one."""
    dtypes = tuple(np.dtype(each.data.dtype) for each in held)
    slots = tuple(Slot(each.name, tuple(each.data.shape), number, 0) for number, each in enumerate(held))
    lines = [-(-slot.count * dtype.itemsize // LINE_NBYTES) or 1 for slot, dtype in zip(slots, dtypes, strict=True)]
    counts = tuple(each * LINE_NBYTES // dtype.itemsize for each, dtype in zip(lines, dtypes, strict=True))
    return Layout(slots, counts, dtypes)
