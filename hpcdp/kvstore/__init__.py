"""Key-value stores: every worker pushes values to keys, and pulls values from them.

Here are `create`, which makes a store of a kind, and `LocalStore`, the store of one process, which needs no MPI.

- `arguments`: checks of keys and values.
- `store`: the base of all kinds, with the state of a store.
- `sync`: pushes of all ranks are merged; `device_sync`: the same with keys on GPUs.
- `asynchronous`: each push takes effect alone, on servers: `client`, `server_loop`, `server_keys`.
- `serve`: the program of a server.
- `updaters`: optimizers and functions that update values; `store_trainer`: the trainer on a store.
"""

from __future__ import annotations

import numpy as np

from ..comm import World, init
from ..comm.consistency import on_every_rank, require_same
from ..comm.world import require_world
from ..compression import Compression
from ..core.arrays import Array, Device, Stream, Streams, is_cupy, is_host, on_device_of
from ..core.checks import one_of, whole_number
from ..core.state import Part
from ..engine import Engine, Variable
from ..engine.scheduler import throw
from ..errors import ConfigError
from .arguments import KINDS, Entry, Key, PullHandle, carry, check_storable, fill, like, merged, sum_into
from .asynchronous import AsyncStore
from .device_sync import DeviceSyncStore
from .store import KVStore, residuals_of
from .sync import SyncStore
from .updaters import ByOptimizer, Codes, check_codable

__all__ = ["KINDS", "KVStore", "PullHandle", "create"]


_LANE = "key-value store"


class LocalStore(KVStore):
    """A store of one process, for one or several devices; it compresses as a store with one worker."""

    rank = 0
    num_workers = 1

    def __init__(self, kind: str) -> None:
        super().__init__(kind, Engine(lanes=(_LANE,), max_inflight=1 << 20), _LANE)
        self._sums_on_devices = KINDS[kind].sums == "device"
        self._compression: Compression | None = None
        self._codes: dict[Key, Codes] = {}
        self._settled: set[Key] = set()
        """Keys whose GPU does not change any more; see `_place`."""
        self._loads: dict[Device, int] = {}
        """Bytes of these keys on each GPU."""
        self._last: dict[Key, tuple[Streams, Stream]] = {}
        """Stream of the last work on each key on a GPU; see `_in_turn`."""

    def barrier(self) -> None:
        """See `KVStore.barrier`."""
        self.wait()

    def _wait_for(self, entry: Entry, variable: Variable) -> None:
        super()._wait_for(entry, variable)
        self._in_turn(entry)

    def _in_turn(self, entry: Entry) -> None:
        """Let the current stream of a key's GPU wait for the earlier calls, which other streams may run."""
        if not is_cupy(entry.stored):
            return
        device = Device.of(entry.stored)
        before = self._last.get(entry.key)
        streams = before[0] if before is not None and before[0].device == device else Streams(device)
        current = streams.current()
        if before is not None and before != (streams, current):
            done = before[0].event()
            before[0].record(done, before[1])
            streams.wait_event(current, done)
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
        self._check_codable(compression)
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
        """Push to a key on a device, in this thread: another thread would have another current stream."""
        failure: BaseException | None = None
        self._in_turn(entry)
        received = like(entry.stored)
        sum_into(received, arrays)
        self._hold(entry)
        try:
            with on_device_of(entry.stored):
                self._updater.update(entry.key, received, entry.stored)
        except Exception as error:
            failure = error  # raised where the key is waited for
        finally:
            self._engine.release(entry.variable, failure)

    def _hold(self, entry: Entry) -> None:
        while not self._engine.hold(entry.variable):  # another thread of the program holds it
            self._settle()

    def _place(self, entry: Entry, arrays: list[Array]) -> None:
        """Distribute keys over the GPUs that push, with about equal bytes on each, largest keys first.

        Keys that were pushed before, or have an optimizer state, keep their GPU.

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
        entries = [other for key, other in self._entries.items() if key not in self._settled and is_cupy(other.stored)]
        stateful = self._updater.states if isinstance(self._updater, ByOptimizer) else {}
        for other in sorted(entries, key=lambda other: -int(other.stored.nbytes)):
            device = Device.of(other.stored)
            if other.pushes == 0 and other.key not in stateful:
                device = min(devices, key=loads.__getitem__)
            loads[device] = loads.get(device, 0) + int(other.stored.nbytes)
            if device != Device.of(other.stored):
                self._hold(other)
                try:
                    self._in_turn(other)
                    other.stored = device.put(other.stored)
                finally:
                    self._engine.release(other.variable)
            self._settled.add(other.key)

    def _pull(self, entry: Entry, place: Array, priority: int, rows: np.ndarray | None = None) -> PullHandle:
        if is_host(entry.stored):
            return super()._pull(entry, place, priority, rows)
        failure, version = entry.variable.failure, entry.pushes
        self._in_turn(entry)
        with on_device_of(place):
            fill(place, entry.stored, rows)
        return PullHandle(lambda: throw(failure), place, lambda: version)


def _decoded(codes: Codes, value: np.ndarray) -> np.ndarray:
    """Encode a push and decode it again."""
    wire, received = np.empty(codes.nbytes, np.uint8), np.empty(value.size, value.dtype)
    codes.encode(np.ascontiguousarray(value).reshape(-1), wire)
    codes.add([wire[place] for place in codes.places], received)
    return received.reshape(value.shape)


def create(
    name: str = "local", world: World | None = None, *, staleness: int | None = None, replay: int | None = None
) -> KVStore:
    """Make a new store, without keys.

    Args:
        name: a name in `KINDS`. Every rank must make a ``dist`` store, and several of them in the same order.
        world: the ranks of a ``dist`` store; default `hpcdp.init()`. Other kinds start no MPI.
        staleness: for ``dist_async``: the number of pushes of a key by which a worker may lead the slowest one before
            it waits; None: unbounded. 0 makes a ``dist_sync`` store, because pushes then go in rounds.
        replay: for ``dist_async`` on thread ranks: a seed that determines the order in which operations of this store,
            and of later ``dist_async`` stores in ``world``, take effect.

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
    require_same(world.comm, "kvstore.create", [f"{name} {staleness=} {replay=}"], "pass the same on all ranks")
    if name == "dist_async" and staleness != 0:
        return AsyncStore(name, world, staleness, replay)
    if KINDS[name].sums == "device":
        return DeviceSyncStore(name, world)
    return SyncStore("dist_sync" if name == "dist_async" else name, world)


def _check_settings(name: str, staleness: int | None, replay: int | None) -> None:
    for setting, value in (("staleness", staleness), ("replay", replay)):
        if value is not None and name != "dist_async":
            raise ConfigError(
                "kvstore.create", where=setting, expected=f"None with {name}", got=repr(value),
                remedy="leave it out, or create a dist_async store",
            )  # fmt: skip
        if value is not None:
            whole_number("kvstore.create", setting, value, 0)
