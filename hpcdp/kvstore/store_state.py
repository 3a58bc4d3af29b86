"""The state of a store, which any number of ranks can restore: for checkpoints, and the optimizer's alone as a file.

The file is a NumPy .npz archive, read with pickles refused, of one array for each key and state name. Array names are
``"int:3/momentum"`` and ``"str:weight/momentum"``. In keys, ``%``, NUL and halves of surrogate pairs are escaped by
``%``.
"""

from __future__ import annotations

import abc
import contextlib
import json
import re
import reprlib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..core import files
from ..core.arrays import Array, on_device_of, to_host
from ..core.checks import same_names
from ..core.devices import to_device_of
from ..core.state import Part, Sharded, take
from ..errors import ConfigError, DataError, HpcdpError
from ..optim import Optimizer
from .arguments import Entry, Key, checked_file
from .updaters import ByOptimizer, Codes, Replace, Updater, new_state, summary

_HEADER = "hpcdp/kvstore"
_SURROGATE = re.compile("[\ud800-\udfff]")
States = dict[tuple[Key, str], np.ndarray]
"""Optimizer states in the key's shape, by key and name."""


def _name(key: Key) -> str:
    text = str(key).replace("%", "%25").replace("\0", "%00")  # NUL ends a name in an archive
    return f"{type(key).__name__}:{_SURROGATE.sub(lambda half: f'%u{ord(half[0]):04x}', text)}"


def write_states(
    path: Path, optimizer: Optimizer, steps: Mapping[Key, int], states: States, names: Mapping[Key, str]
) -> None:
    """Write the states and the number of updates of each key to a file that replaces ``path`` atomically.

    ``names`` are the parameter names of keys that number parameters, see `read_states`; it may be empty.

    Raises:
        DataError: the file cannot be written.
    """
    header: dict[str, Any] = {"version": 1, "optimizer": optimizer.config()["name"]}
    header["steps"] = {_name(key): steps[key] for key in steps}
    header["names"] = {_name(key): name for key, name in names.items()}
    arrays = {f"{_name(key)}/{name}": to_host(array) for (key, name), array in states.items()}
    files.write("save_optimizer_states", path, _HEADER, header, arrays)


def read_states(
    path: Path, optimizer: Optimizer, shapes: Mapping[Key, tuple[int, ...]], names: Mapping[Key, str]
) -> tuple[dict[Key, int], States]:
    """Return the number of updates of each key, and its states.

    Args:
        path: the file.
        optimizer: the optimizer whose states the file must have.
        shapes: the shapes of the store's keys.
        names: the parameter names of keys that number parameters. Where the file has names, too, they match its keys
            to the store's.

    Raises:
        DataError: the file is missing, damaged, or of another optimizer, or other keys or shapes.
    """
    fields = {"optimizer": str, "steps": dict}
    header, arrays = files.read("load_optimizer_states", path, _HEADER, fields, "save_optimizer_states")
    updated, saved_by, mine = header["steps"], header["optimizer"], optimizer.config()["name"]
    if saved_by != mine:
        raise DataError("load_optimizer_states", where=path, expected=f"states of {mine}", got=f"states of {saved_by}")
    keys = {_name(key): key for key in shapes}
    called = header.get("names") if names else None
    if isinstance(called, dict) and called:
        keys_by_name = {name: key for key, name in names.items()}
        keys = {key: keys_by_name[name] for key, name in called.items() if name in keys_by_name}
    strange = next((name for name in updated if name not in keys), None)
    if strange is not None:
        raise DataError("load_optimizer_states", where=path, expected="states of this store's keys", got=strange)
    states: States = {}
    for name in updated:
        for state in optimizer.state_names():
            array = arrays.pop(f"{name}/{state}", None)
            if array is None or array.shape != tuple(shapes[keys[name]]):
                got = "no such array" if array is None else f"shape {array.shape}"
                where = f"{path}, {name}/{state}"
                raise DataError("load_optimizer_states", where=where, expected=f"shape {shapes[keys[name]]}", got=got)
            states[keys[name], state] = array
    if arrays:
        raise DataError("load_optimizer_states", where=path, expected="no other arrays", got=next(iter(arrays)))
    return {keys[name]: int(count) for name, count in updated.items()}, states


def is_store_file(path: Path) -> bool:
    """Return whether ``path`` is a file of `KVStore.save_optimizer_states`."""
    with contextlib.suppress(Exception):  # of a damaged file zipfile raises several kinds; `files.read` reports it
        if path.is_file():  # opening a FIFO would wait for a writer
            with zipfile.ZipFile(path) as archive:
                return f"{_HEADER}.npy" in archive.namelist()
    return False


T = TypeVar("T")


class StateDictMixin(abc.ABC):
    """The methods of a `KVStore` that save and restore its state."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._updater: Updater = Replace()
        self.key_names: Mapping[Key, str] = {}
        """Parameter names of keys that number parameters, for files of states."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """Number of this worker, from 0."""

    @property
    @abc.abstractmethod
    def num_workers(self) -> int:
        """Number of workers that push."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until all workers have called and their pushes have taken effect; raise the error of an own push."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until all pushes of this worker have taken effect; raise the error of one that failed."""

    @abc.abstractmethod
    def _finish(self, entries: list[Entry]) -> None:
        """Wait until this worker's pushes and pulls of some keys have ended, and drop their errors."""

    def _agreed(self, check: Callable[[], T]) -> T:
        """Return the result of ``check()``; an error on one worker is raised on all."""
        return check()

    def _meet_updated(self) -> None:
        """Call `barrier`, and raise a failed push of one worker on all, so that none waits for that one."""
        failure: Exception | None = None
        try:
            self.barrier()
        except Exception as error:
            failure = error

        def raise_failure() -> None:
            if failure is not None:
                raise HpcdpError("push", expected="an update", got=summary(failure))

        try:
            self._agreed(raise_failure)
        except HpcdpError as error:
            raise (failure or error) from None

    def _by_first(self, write: Callable[[], None]) -> None:
        """Call ``write()`` on the first worker, and raise its error on all."""
        write()

    def _own_part(self, entry: Entry, whole: Array) -> Array:
        """Return the part that this worker updates, flat, of an array of the key's shape."""
        return to_device_of(whole.reshape(-1), entry.stored)

    def whole(self, tensor: Sharded | Array) -> np.ndarray:
        """Return a whole tensor of a state on the host, from the parts of all workers; every worker must call."""
        return to_host(tensor.parts[0].values if isinstance(tensor, Sharded) else tensor).reshape(tensor.shape)

    def _held(self, entry: Entry, part: Array) -> Sharded | Array:
        """Return this worker's flat ``part`` of an array of the key's shape in the form of a state."""
        return part.reshape(entry.stored.shape)

    def _values_of(self, entry: Entry) -> Sharded | Array:
        """Return a key's value in the form of a state."""
        return entry.stored

    def _states_of(self, entry: Entry, rule: ByOptimizer) -> dict[str, Sharded | Array]:
        """Return a key's optimizer state by name in the form of a state."""
        own = rule.states.get(entry.key)
        if own is None:
            own = rule.states[entry.key] = new_state(rule.optimizer, self._own_part(entry, entry.stored))
        return {name: self._held(entry, part) for name, part in own.items()}

    def _updates_of(self, entry: Entry, rule: ByOptimizer) -> int:
        """Return the number of updates of a key."""
        return rule.steps.get(entry.key, 0)

    def _residuals_of(self, entry: Entry) -> list[Part]:
        """Return this worker's compression residuals of a key; none without compression."""
        return []

    def _put(self, entry: Entry, values: Any, states: Mapping[str, Any], updates: int | None) -> None:
        """Set a key's value, optimizer state and number of updates, which is None without an optimizer.

        ``values`` and ``states`` are the results of `_values_of` and `_states_of`, filled.
        """
        if isinstance(self._updater, ByOptimizer):
            self._updater.steps.pop(entry.key, None)
            if updates:
                self._updater.steps[entry.key] = updates

    def _renew(self, rule: ByOptimizer, config: dict[str, Any]) -> None:
        """Apply an optimizer's saved settings; every worker must call."""

        def apply_config() -> None:
            if config != rule.optimizer.config():
                rule.optimizer.take_config(config)

        self._agreed(apply_config)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the store; every worker must call.

        Returns:
            ``values`` by key; ``optimizer``, its settings as JSON, or None without one. With an optimizer ``states`` by
            key and name, and ``updates`` by key; with compression ``residuals`` by key, shape ``(workers, *shape)``.
            Arrays may be the store's own, which the next push changes.
        """
        self._meet_updated()
        rule = self._updater if isinstance(self._updater, ByOptimizer) else None
        entries = self._entries.items()
        state: dict[str, Any] = {
            "values": {key: self._values_of(entry) for key, entry in entries},
            "optimizer": None if rule is None else json.dumps(rule.optimizer.config()),
        }
        if rule is not None:
            updatable = [(key, entry) for key, entry in entries if entry.stored.dtype.kind == "f"]
            state["states"] = {key: self._states_of(entry, rule) for key, entry in updatable}
            state["updates"] = {key: self._updates_of(entry, rule) for key, entry in updatable}
        residuals = {key: self._residuals_of(entry) for key, entry in entries}
        if any(residuals.values()):
            state["residuals"] = {key: self._by_workers(self._entries[key], own) for key, own in residuals.items()}
        self.barrier()
        return state

    def _by_workers(self, entry: Entry, own: list[Part]) -> Sharded:
        shape = tuple(entry.stored.shape)
        parts = [Part(self.rank * int(entry.stored.size) + part.first, part.values) for part in own]
        return Sharded((self.num_workers, *shape), np.dtype(entry.stored.dtype), parts, shares=True)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict` in place; every worker must call, on a store with its keys and kind of updater.

        A checkpoint restores the state of any number of workers, on any kind of store.

        Raises:
            ConfigError: ``state`` is of other keys or another optimizer, or not the state of a store; on every worker.
        """
        self._agreed(lambda: self._check_state(state))
        self._finish(list(self._entries.values()))  # pulls under way read the old values
        own = self.state_dict()
        if isinstance(self._updater, ByOptimizer):
            self._renew(self._updater, json.loads(state["optimizer"]))
        for key, values, states in self._agreed(lambda: list(_filled(own, state))):
            self._put(self._entries[key], values, states, state.get("updates", {}).get(key))
        self.barrier()

    def _check_state(self, state: Any) -> None:
        if not (isinstance(state, Mapping) and isinstance(state.get("values"), Mapping) and "optimizer" in state):
            expected = "what state_dict() of a store returns"
            raise ConfigError("load_state_dict", expected=expected, got=reprlib.repr(state))
        same_names("load_state_dict", "the store", self._entries, state["values"], "key")
        has_rule = isinstance(self._updater, ByOptimizer)
        if (state["optimizer"] is None) == has_rule:
            own, saved = ("an", "no") if has_rule else ("no", "an")
            expected, got = f"a state with {own} optimizer, as the store has", f"a state with {saved} optimizer"
            raise ConfigError("load_state_dict", where="optimizer", expected=expected, got=got)

    def save_optimizer_states(self, path: str) -> None:
        """Write the optimizer's state of all keys to one file, which replaces ``path``; every worker must call.

        Raises:
            ConfigError: there is no optimizer, or ``path`` names no file; on every worker.
            DataError: the file cannot be written; on every worker.
        """
        rule = self._by_optimizer("save_optimizer_states").optimizer
        file = self._agreed(lambda: checked_file("save_optimizer_states", path))
        state = self.state_dict()
        updates = {key: count for key, count in state["updates"].items() if count}
        states = {(key, name): self.whole(tensor) for key in updates for name, tensor in state["states"][key].items()}
        self._by_first(lambda: write_states(file, rule, updates, states, self.key_names))

    def load_optimizer_states(self, path: str) -> None:
        """Restore a file of `save_optimizer_states`, of any number of workers; every worker must call.

        The state of keys without updates in the file is reset.

        Raises:
            ConfigError: there is no optimizer.
            DataError: the file is missing, damaged or of another optimizer, or other keys; on every worker.
        """
        rule = self._by_optimizer("load_optimizer_states").optimizer
        shapes = {key: tuple(entry.stored.shape) for key, entry in self._entries.items()}
        updates, saved = self._agreed(
            lambda: read_states(checked_file("load_optimizer_states", path), rule, shapes, self.key_names)
        )
        states = {
            key: {name: saved[key, name] if key in updates else np.zeros(shape) for name in rule.state_names()}
            for key, shape in shapes.items()
        }
        self.take_optimizer_states(states, {key: updates.get(key, 0) for key in shapes})

    def take_optimizer_states(self, states: Mapping[Key, Mapping[str, Any]], updates: Mapping[Key, int]) -> None:
        """Set the optimizer's state and the number of updates of all keys; every worker must call."""
        self.load_state_dict({**self.state_dict(), "states": states, "updates": updates})

    def _by_optimizer(self, operation: str) -> ByOptimizer:
        """Return the optimizer once the pushes of all workers have taken effect; every worker must call."""
        if not isinstance(self._updater, ByOptimizer):
            raise ConfigError(
                operation, expected="a store with an optimizer", got="none", remedy="call set_optimizer() first"
            )
        self._meet_updated()
        return self._updater


def _filled(own: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[tuple[Key, Any, dict[str, Any]]]:
    """Fill a store's ``own`` state from ``state``, residuals included, and yield each key, its value and its states."""
    residuals = state.get("residuals", {})
    for key, residual in own.get("residuals", {}).items():
        if key in residuals:
            take(f"key {key!r}, residual", residual, residuals[key])
        else:  # saved without compression
            for part in residual.parts:
                with on_device_of(part.values):
                    part.values[...] = 0
    for key, values in own["values"].items():
        states = {name: _taken(f"key {key!r}, {name}", array, state["states"][key][name])
                  for name, array in own.get("states", {}).get(key, {}).items()}  # fmt: skip
        yield key, _taken(f"key {key!r}", values, state["values"][key]), states


def _taken(where: str, own: Sharded | Array, saved: Any) -> Sharded | Array:
    """Fill ``own`` from ``saved``, and return it."""
    if isinstance(own, Sharded):
        take(where, own, saved)
    else:
        take(where, Sharded(tuple(own.shape), np.dtype(own.dtype), [Part(0, own.reshape(-1))]), saved)
    return own


def residuals_of(codes: Codes | None) -> list[Part]:
    """Return the residuals of a key that is encoded as one array."""
    return [] if codes is None else [Part(0, codes.residual)]
