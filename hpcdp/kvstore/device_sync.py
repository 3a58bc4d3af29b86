"""``dist_device_sync``, a store that keeps keys with initial CuPy arrays on the ranks' GPUs, and merges pushes there.

A push is summed on the GPU, over the node, and over nodes, like the gradients of a `Trainer` (see
`data_parallel.gpu_reduction`). Then every rank updates its value. Sums run on separate streams, updates and pulls on
one stream. Events order these and the program's current stream. Keys whose initial values are on the host are kept
there, as in `sync`.

Source: as `sync`, but without owners, because a GPU updates a value faster than it receives it from another.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..comm import Communicator, World
from ..comm.communicator import OPERATION_BITS, Steps
from ..comm.gpu_buckets.transport import SUMMED_KINDS
from ..comm.shared_memory import ProgressCounters
from ..core.arrays import Array, Device, Event, Streams, is_cupy, is_host, to_device_of
from ..core.state import Part, Sharded
from ..data_parallel.bucket_layout import LINE_NBYTES, Bucket, Layout, Slot
from ..data_parallel.gpu_reduction import GpuReduction
from ..data_parallel.overlap import SendPriority
from ..data_parallel.reducer import shared_comms
from ..engine import Variable
from ..errors import MismatchError
from .arguments import STORABLE, Entry, Key, PullHandle, carry, fill, sum_into
from .store import KVStore
from .sync import MilestoneRequest, SyncStore
from .updaters import Updater

MOST_KEYS = (1 << OPERATION_BITS) - 1
"""Most keys of one `GpuKeys`, whose numbers distinguish the messages of their sums."""


_RATE_POSTED, _RATES_READ, _PHASES = 1, 2, 2
"""Milestones of a key's round: the rank has posted its learning rate, and has read those of the others."""


@dataclass
class _KeyParameter:
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
        self._neighbors = world.node_comm.allgather_json(world.rank)
        self._milestones = ProgressCounters(world.node_memory)
        self._rates = world.node_memory.alloc((world.node_memory.size,), np.float64)

    def behind(self) -> list[int]:
        """Return the ranks of the node that have pushed less often than this one."""
        return self._milestones.behind(_milestone(self.rounds, _RATE_POSTED))

    def post_rate(self, number: int, rate: float) -> Steps:
        """Post the learning rate of round ``number``, once the node's ranks have read that of the last round."""
        yield [MilestoneRequest(self._milestones, _milestone(number - 1, _RATES_READ))]
        self._rates[self._memory.rank] = rate
        self._milestones.post(_milestone(number, _RATE_POSTED))

    def compare_rates(self, number: int) -> Steps:
        """Raise `MismatchError` on all ranks of the node if their learning rates of a round differ."""
        yield [MilestoneRequest(self._milestones, _milestone(number, _RATE_POSTED))]
        rates = self._rates.tolist()
        self._milestones.post(_milestone(number, _RATES_READ))
        at = next((at for at, rate in enumerate(rates) if rate != rates[0]), None)
        if at is not None:
            got = f"{rates[0]:g} on rank {self._neighbors[0]}, {rates[at]:g} on rank {self._neighbors[at]}"
            raise MismatchError("push", where=self._name, expected="the same learning rate on all ranks", got=got)


class GpuKeys:
    """The keys of one call of ``init``; every rank of the world must make it, with values on its GPU.

    Args:
        values: initial values, of the same shapes and dtypes on all ranks, all on one GPU, at most `MOST_KEYS`; the
            store keeps these arrays.
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
        held = [_KeyParameter(name, value) for name, value in zip(names, values.values(), strict=True)]
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


def _layout(held: Sequence[_KeyParameter]) -> Layout:
    """Return a layout with one bucket for each key, because keys are pushed one by one."""
    dtypes = tuple(np.dtype(key.data.dtype) for key in held)
    slots = tuple(Slot(key.name, tuple(key.data.shape), number, 0) for number, key in enumerate(held))
    lines = [-(-slot.count * dtype.itemsize // LINE_NBYTES) or 1 for slot, dtype in zip(slots, dtypes, strict=True)]
    counts = tuple(num * LINE_NBYTES // dtype.itemsize for num, dtype in zip(lines, dtypes, strict=True))
    return Layout(slots, counts, dtypes)


class DeviceSyncStore(SyncStore):
    """A `SyncStore` that keeps keys with initial CuPy arrays on the ranks' GPUs."""

    def __init__(self, kind: str, world: World) -> None:
        super().__init__(kind, world)
        self._on_gpus: dict[Key, GpuKeys] = {}

    def _stays(self, value: Array) -> bool:
        can_be_summed = np.dtype(value.dtype).name in SUMMED_KINDS and np.dtype(value.dtype) in STORABLE
        return self._compression is None and self._world.concurrent and is_cupy(value) and can_be_summed

    def _make(self, values: dict[Key, Array]) -> None:
        self._check_new(values)
        on_gpus: dict[Key, Array] = {}
        for key, value in values.items():
            first = self._of_first(value)
            if is_host(value):
                self._entries[key] = self._new(key, first)
            else:
                on_gpus[key] = to_device_of(first, value)
                variable = self._engine.variable(f"key {key!r}")
                self._entries[key] = Entry(key, on_gpus[key], variable, number=len(self._entries))
        keys = list(on_gpus)
        for at in range(0, len(keys), MOST_KEYS):
            self._keep_on_gpus({key: on_gpus[key] for key in keys[at : at + MOST_KEYS]})
        self._world.barrier()

    def _keep_on_gpus(self, values: dict[Key, Array]) -> None:
        """Make keys on GPUs; every rank must call."""
        world = self._world
        serial = world.kept["number of GpuKeys"] = world.kept.get("number of GpuKeys", 0) + 1
        signature = zlib.crc32(f"keys on GPUs {serial}".encode())
        rail, comm = shared_comms(world, "keys on GPUs", signature, world.rail_comm, world.comm)
        self._on_gpus |= dict.fromkeys(values, GpuKeys(values, world, comm, rail, signature))

    def _overwrite(self, entry: Entry, value: np.ndarray) -> None:
        if entry.key in self._on_gpus:  # every rank has its own copy
            carry(value, entry.stored)
            self._on_gpus[entry.key].follow()
        else:
            super()._overwrite(entry, value)

    def _finish(self, entries: list[Entry]) -> None:
        super()._finish(entries)
        for gpus in {self._on_gpus[entry.key] for entry in entries if entry.key in self._on_gpus}:
            gpus.finish()

    def _put(self, entry: Entry, values: Any, states: Mapping[str, Any], updates: int | None) -> None:
        super()._put(entry, values, states, updates)
        if entry.key in self._on_gpus:
            self._on_gpus[entry.key].follow()

    def _push(self, entry: Entry, arrays: list[Array], priority: int) -> None:
        gpus, updater = self._on_gpus.get(entry.key), self._updater.now()
        if gpus is None:
            super()._push(entry, arrays, priority)
            return
        with contextlib.suppress(Exception):  # a new push replaces the error of the last one
            self._wait_for(entry, entry.variable)
        entry.count()
        number = gpus.fill(entry.key, arrays)
        name = f"push of {entry.variable.name}"
        self._of_world.launch(
            lambda turn: gpus.round(entry.key, number, updater, turn), [entry.variable], priority, name
        )

    def _pull(self, entry: Entry, place: Array, priority: int, rows: np.ndarray | None = None) -> PullHandle:
        gpus = self._on_gpus.get(entry.key)
        if gpus is None:
            return super()._pull(entry, place, priority, rows)
        variable, version = self._engine.variable(f"pull of {entry.key!r}"), entry.pushes
        copy, arrive = gpus.pull(entry.key, place, rows)
        self._engine.push(copy, [entry.variable], [variable], self._lane, priority, variable.name)

        def until_there() -> None:
            self._wait_for(entry, variable)
            arrive()

        return PullHandle(until_there, place, lambda: version)

    def _pushpull(self, entry: Entry, arrays: list[Array], targets: list[Any], priority: int) -> None:
        how = KVStore if entry.key in self._on_gpus else SyncStore
        how._pushpull(self, entry, arrays, targets, priority)

    def _copied(self, entry: Entry, target: Any) -> bool:
        return entry.key not in self._on_gpus and super()._copied(entry, target)

    def _wait_for(self, entry: Entry, variable: Variable) -> None:
        super()._wait_for(entry, variable)
        if entry.key in self._on_gpus:
            self._on_gpus[entry.key].arrive(entry.key)

    def _behind(self, entry: Entry) -> list[int]:
        gpus = self._on_gpus.get(entry.key)
        return super()._behind(entry) if gpus is None else gpus.keys[entry.key].behind()

    def _held(self, entry: Entry, part: Array) -> Sharded:
        if entry.key not in self._on_gpus:
            return super()._held(entry, part)
        shape, dtype = tuple(entry.stored.shape), np.dtype(part.dtype)  # every rank holds all of it
        return Sharded(shape, dtype, [Part(0, part)], self._world.size, self._world.rank)

    def _values_of(self, entry: Entry) -> Sharded:
        on_gpu = entry.key in self._on_gpus
        return self._held(entry, entry.stored.reshape(-1)) if on_gpu else super()._values_of(entry)

    def _own_part(self, entry: Entry, whole: Array) -> Array:
        how = KVStore if entry.key in self._on_gpus else SyncStore
        return how._own_part(self, entry, whole)
