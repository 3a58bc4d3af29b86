"""``dist_device_sync``, a store that keeps keys on the ranks' GPUs, and merges pushes there (`gpu_keys`).

Keys whose initial values are on the host are kept there, as in `sync`.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..comm import World
from ..core.arrays import Array, is_cupy, is_host
from ..core.devices import to_device_of
from ..core.state import Part, Sharded
from ..engine import Variable
from . import gpu_keys
from .arguments import Entry, Key, PullHandle, carry
from .gpu_keys import GpuKeys, can_stay
from .store import KVStore
from .store_state import StateDictMixin
from .sync import SyncStore


class DeviceSyncStore(SyncStore):
    """A `SyncStore` that keeps keys with initial CuPy arrays on the ranks' GPUs."""

    def __init__(self, kind: str, world: World) -> None:
        super().__init__(kind, world)
        self._on_gpus: dict[Key, GpuKeys] = {}

    def _stays(self, value: Array) -> bool:
        return self._compression is None and self._world.concurrent and is_cupy(value) and can_stay(value)

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
        for at in range(0, len(keys), gpu_keys.MOST_KEYS):
            self._keep_on_gpus({key: on_gpus[key] for key in keys[at : at + gpu_keys.MOST_KEYS]})
        self._world.barrier()

    def _keep_on_gpus(self, values: dict[Key, Array]) -> None:
        """Make keys on GPUs; every rank must call."""
        world = self._world
        comm = world.keep("keys on GPUs", world.comm.duplicate)
        rail = None if world.rail_comm is None else world.keep("keys on GPUs, rail", world.rail_comm.duplicate)
        serial = world.kept["number of GpuKeys"] = world.kept.get("number of GpuKeys", 0) + 1
        signature = zlib.crc32(f"keys on GPUs {serial}".encode())
        for used in (comm, rail):
            if used is not None:
                used.users.add(signature % used.signatures)
        world.barrier()  # all ranks register the signature before any message with it arrives
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
        how = StateDictMixin if entry.key in self._on_gpus else SyncStore
        return how._own_part(self, entry, whole)
