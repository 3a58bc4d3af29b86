"""A store within one process: for one device or several, and for programs that shall run without MPI."""

from __future__ import annotations

import numpy as np

from ..arrays import Array, is_host
from ..compression import Compression
from ..engine import Engine
from ..state import Part
from .arguments import Key, check_storable, merged
from .compress import Codes, check_codable
from .entry import Entry
from .keeps_state import residuals_of
from .store import KVStore

_LANE = "key-value store"


class LocalStore(KVStore):
    """See `KVStore`; all calls are this process's own affair. It compresses as a store with one worker does."""

    rank = 0
    num_workers = 1

    def __init__(self, kind: str) -> None:
        super().__init__(kind, Engine(lanes=(_LANE,), max_inflight=1 << 20), _LANE)
        self._compression: Compression | None = None
        self._codes: dict[Key, Codes] = {}

    def barrier(self) -> None:
        self.wait()

    def _make(self, values: dict[Key, Array]) -> None:
        check_storable({key: value for key, value in values.items() if is_host(value)})
        if self._compression is not None:
            check_codable("init", values.items())
        for key, value in values.items():
            self._entries[key] = Entry(key, value.copy(), self._engine.variable(f"key {key!r}"))
            self._code(key)

    def _assign(self, values: dict[Key, Array]) -> None:
        for key, value in values.items():
            self._entries[key].stored[...] = value

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
        value, updater, var = merged(arrays), self._updater.now(), entry.variable
        codes = self._codes.get(entry.key)
        entry.count(None if codes is None else codes.sent_nbytes)

        def update() -> None:
            received = value if codes is None else _decoded(codes, value)
            updater.update(entry.key, received, entry.stored)

        self._engine.push(update, [], [var], self._lane, priority, f"push of {var.name}")


def _decoded(codes: Codes, value: np.ndarray) -> np.ndarray:
    """What arrives of a push that is encoded."""
    wire, received = np.empty(codes.nbytes, np.uint8), np.empty(value.size, value.dtype)
    codes.encode(np.ascontiguousarray(value).reshape(-1), wire)
    codes.add([wire[place] for place in codes.places], received)
    return received.reshape(value.shape)
