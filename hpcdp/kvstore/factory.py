"""`create`, which makes a store of a kind, and the stores of one process.

A store within one process: for one device or several, and for programs that shall run without MPI.

Makes a store of a kind, by its name.
"""

from __future__ import annotations

import numpy as np

from ..comm import World, init
from ..comm.consistency import on_every_rank, require_same
from ..comm.world import require_world
from ..compression import Compression
from ..core.arrays import Array, is_cupy, is_host, on_device_of
from ..core.checks import one_of, whole_number
from ..core.devices import Device, Stream, Streams
from ..core.state import Part
from ..engine import Engine, Variable
from ..engine.scheduler import throw
from ..errors import ConfigError
from .arguments import KINDS, Entry, Key, PullHandle, carry, check_storable, fill, like, merged, sum_into
from .asynchronous import AsyncStore
from .device_sync import DeviceSyncStore
from .store import KVStore
from .store_state import residuals_of
from .sync import SyncStore
from .updaters import ByOptimizer, Codes, check_codable

_LANE = "key-value store"


class LocalStore(KVStore):
    """See `KVStore`; all calls are this process's own affair. It compresses as a store with one worker does."""

    rank = 0
    num_workers = 1

    def __init__(self, kind: str) -> None:
        super().__init__(kind, Engine(lanes=(_LANE,), max_inflight=1 << 20), _LANE)
        self._sums_on_devices = KINDS[kind].sums == "device"
        self._compression: Compression | None = None
        self._codes: dict[Key, Codes] = {}
        self._settled: set[Key] = set()
        """Keys whose GPU is not to change any more; see `_place`."""
        self._loads: dict[Device, int] = {}
        """Bytes of these keys on each GPU."""
        self._last: dict[Key, tuple[Streams, Stream]] = {}
        """Of each key on a GPU the stream that was given the last work on its value; see `_in_turn`."""

    def barrier(self) -> None:
        """See `KVStore.barrier`."""
        self.wait()

    def _wait_for(self, entry: Entry, variable: Variable) -> None:
        super()._wait_for(entry, variable)
        self._in_turn(entry)

    def _in_turn(self, entry: Entry) -> None:
        """What the stream that is current on a key's GPU is given next comes behind all calls before, whatever streams
        those were given to."""
        if not is_cupy(entry.stored):
            return
        device = Device.of(entry.stored)
        before = self._last.get(entry.key)
        streams = before[0] if before is not None and before[0].device == device else Streams(device)
        current = streams.current()
        if before is not None and before != (streams, current):
            given = before[0].event()
            before[0].record(given, before[1])
            streams.wait_event(current, given)
        self._last[entry.key] = streams, current

    def _stays(self, value: Array) -> bool:
        return self._sums_on_devices and self._compression is None

    def _make(self, values: dict[Key, Array]) -> None:
        check_storable(values)
        if self._compression is not None:
            check_codable("init", values.items())
        for key, value in values.items():
            with on_device_of(value):
                self._entries[key] = Entry(key, value.copy(), self._engine.variable(f"key {key!r}"))
            self._in_turn(self._entries[key])
            self._code(key)

    def _assign(self, values: dict[Key, Array]) -> None:
        for key, value in values.items():
            carry(value, self._entries[key].stored)

    def _compress(self, compression: Compression | None) -> None:
        if compression is not None:
            check_codable("set_gradient_compression", ((key, each.stored) for key, each in self._entries.items()))
        self._compression, self._codes = compression, {}
        for key in self._entries:
            self._code(key)

    def _code(self, key: Key) -> None:
        if self._compression is not None:
            stored = self._entries[key].stored
            self._codes[key] = Codes(self._compression, [0, stored.size], stored.dtype)

    def _residuals_of(self, entry: Entry) -> list[Part]:
        return residuals_of(self._codes.get(entry.key))

    def _push(self, entry: Entry, arrays: list[Array], priority: int) -> None:
        codes = self._codes.get(entry.key)
        entry.count(None if codes is None else codes.sent_nbytes)
        if not is_host(entry.stored):
            self._push_there(entry, arrays)
            return
        value, updater, var = merged(arrays), self._updater.now(), entry.variable

        def update() -> None:
            received = value if codes is None else _decoded(codes, value)
            updater.update(entry.key, received, entry.stored)

        self._engine.push(update, [], [var], self._lane, priority, f"push of {var.name}")

    def _push_there(self, entry: Entry, arrays: list[Array]) -> None:
        """On a device, which is given its work here: another thread would have another current stream."""
        failure: BaseException | None = None
        self._in_turn(entry)
        received = like(entry.stored)
        sum_into(received, arrays)
        self._hold(entry)
        try:
            with on_device_of(entry.stored):
                self._updater.update(entry.key, received, entry.stored)
        except Exception as error:
            failure = error  # for who waits for the key
        finally:
            self._engine.release(entry.variable, failure)

    def _hold(self, entry: Entry) -> None:
        while not self._engine.hold(entry.variable):  # another thread of the program has it
            self._settle()

    def _place(self, entry: Entry, arrays: list[Array]) -> None:
        """Where a push comes from several GPUs, let each of them keep about as many bytes of keys, the largest first.

        Keys that were pushed before, or have a state, stay where they are.

        Source: Apache MXNet, ``src/kvstore/comm.h``, ``CommDevice::InitMergeBuffer``.
        """
        if entry.key in self._settled or is_host(entry.stored) or len(arrays) < 2:
            return
        devices = [Device.of(x) for x in arrays if is_cupy(x)]
        if len(set(devices)) < 2:
            return
        loads = self._loads
        for device in devices:
            loads.setdefault(device, 0)
        entries = [each for key, each in self._entries.items() if key not in self._settled and is_cupy(each.stored)]
        stateful = self._updater.states if isinstance(self._updater, ByOptimizer) else {}
        for each in sorted(entries, key=lambda each: -int(each.stored.nbytes)):
            device = Device.of(each.stored)
            if each.pushes == 0 and each.key not in stateful:
                device = min(devices, key=loads.__getitem__)
            loads[device] = loads.get(device, 0) + int(each.stored.nbytes)
            if device != Device.of(each.stored):
                self._hold(each)
                try:
                    self._in_turn(each)
                    each.stored = device.put(each.stored)
                finally:
                    self._engine.release(each.variable)
            self._settled.add(each.key)

    def _pull(self, entry: Entry, place: Array, priority: int, rows: np.ndarray | None = None) -> PullHandle:
        if is_host(entry.stored):
            return super()._pull(entry, place, priority, rows)
        failure, version = entry.variable.failure, entry.pushes
        self._in_turn(entry)
        with on_device_of(place):
            fill(place, entry.stored, rows)
        return PullHandle(lambda: throw(failure), place, lambda: version)


def _decoded(codes: Codes, value: np.ndarray) -> np.ndarray:
    """What arrives of a push that is encoded."""
    wire, received = np.empty(codes.nbytes, np.uint8), np.empty(value.size, value.dtype)
    codes.encode(np.ascontiguousarray(value).reshape(-1), wire)
    codes.add([wire[place] for place in codes.places], received)
    return received.reshape(value.shape)


def create(
    name: str = "local", world: World | None = None, *, staleness: int | None = None, replay: int | None = None
) -> KVStore:
    """A new store, without keys.

    Args:
        name: one of `KINDS`, exactly. Those that begin with ``dist`` every rank must make, in the same order.
        world: for those; default `hpcdp.init()`. The others start no MPI.
        staleness: for ``dist_async``: by how many pushes of a key a worker may lead the slowest one before it waits.
            None: by any. 0: pushes go in rounds, which are merged: that is ``dist_sync``, and that is what is made.
        replay: for ``dist_async`` on thread ranks: a seed that decides in which order operations take effect, of this
            store and of those of ``dist_async`` that are made later in ``world``.

    Raises:
        ConfigError: there is no such kind, or it has no such setting.
    """
    one_of("kvstore.create", "name", name, KINDS)
    require_world("kvstore.create", world)
    if KINDS[name].scope == "process":
        _check_settings(name, staleness, replay)
        return LocalStore(name)
    world = init() if world is None else world
    on_every_rank(world.comm, lambda: _check_settings(name, staleness, replay))
    require_same(world.comm, "kvstore.create", [f"{name} {staleness=} {replay=}"], "make it alike on all ranks")
    if name == "dist_async" and staleness != 0:
        return AsyncStore(name, world, staleness, replay)
    if KINDS[name].sums == "device":
        return DeviceSyncStore(name, world)
    return SyncStore("dist_sync" if name == "dist_async" else name, world)


def _check_settings(name: str, staleness: int | None, replay: int | None) -> None:
    for setting, value in (("staleness", staleness), ("replay", replay)):
        if value is not None and name != "dist_async":
            raise ConfigError(
                "kvstore.create", where=setting, expected="None, or dist_async", got=f"{value!r} of {name}"
            )
        if value is not None:
            whole_number("kvstore.create", setting, value, 0)
