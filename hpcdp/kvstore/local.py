"""A store within one process: for one device or several, and for programs that shall run without MPI."""

from __future__ import annotations

from ..arrays import Array
from ..engine import Engine
from .arguments import Key, merged
from .store import Entry, KVStore

_LANE = "key-value store"


class LocalStore(KVStore):
    """See `KVStore`; all calls are this process's own affair."""

    rank = 0
    num_workers = 1

    def __init__(self, kind: str) -> None:
        super().__init__(kind, Engine(lanes=(_LANE,), max_inflight=1 << 20), _LANE)

    def barrier(self) -> None:
        self.wait()

    def _make(self, values: dict[Key, Array]) -> None:
        for key, value in values.items():
            self._entries[key] = Entry(key, value.copy(), self._engine.variable(f"key {key!r}"))

    def _push(self, entry: Entry, arrays: list[Array], priority: int) -> None:
        value, updater = merged(arrays), self._updater.now()
        var = entry.variable
        self._engine.push(
            lambda: updater.update(entry.key, value, entry.stored),
            [var],
            [var],
            self._lane,
            priority,
            f"push of {var.name}",
        )

    def _own_part(self, entry: Entry, whole: Array) -> Array:
        return whole.reshape(-1)

    def _joined(self, entry: Entry, part: Array) -> Array:
        return part.reshape(entry.stored.shape)
