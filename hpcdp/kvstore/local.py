"""A store within one process: for one device or several, and for programs that shall run without MPI."""

from __future__ import annotations

from pathlib import Path

from ..arrays import Array
from ..engine import Engine
from .arguments import Key
from .states import read_states, write_states
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
            number = len(self._entries)
            self._entries[key] = Entry(key, number, value.copy(), self._engine.variable(f"key {key!r}"))

    def _push(self, entry: Entry, value: Array, priority: int) -> None:
        updater = self._updater.now()
        var = entry.variable
        self._engine.push(
            lambda: updater.update(entry.key, value, entry.stored),
            [var],
            [var],
            self._lane,
            priority,
            f"push of {var.name}",
        )

    def save_optimizer_states(self, path: str) -> None:
        rule = self._by_optimizer("save_optimizer_states")
        arrays = {
            (key, name): array.reshape(self._entries[key].stored.shape)
            for key, state in rule.states.items()
            for name, array in state.items()
        }
        write_states(Path(path), rule.optimizer, rule.steps, arrays)

    def load_optimizer_states(self, path: str) -> None:
        rule = self._by_optimizer("load_optimizer_states")
        steps, arrays = read_states(Path(path), rule.optimizer, {k: e.stored.shape for k, e in self._entries.items()})
        rule.steps.clear()
        rule.steps.update(steps)
        rule.states.clear()
        for key in steps:
            rule.states[key] = rule.optimizer.init_state(self._entries[key].stored.reshape(-1))
            for name, place in rule.states[key].items():
                place[...] = arrays[key, name].reshape(-1)
