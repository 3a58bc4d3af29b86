"""The state of a store: saved, and restored at any number of ranks.

The optimizer's state of a store as a file: one array a key and name, whoever updated it.

A NumPy .npz archive, read with pickles refused. Names are ``"int:3/momentum"`` and ``"str:weight/momentum"``;
of keys with ``%``, NUL or halves of surrogate pairs these are escaped by ``%``.

What a store keeps, as part of a run's state: for checkpoints, and the optimizer's alone as a file.
"""

from __future__ import annotations

import abc
import json
import re
import reprlib
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
"""By key and name of the state, in the key's shape."""


def _name(key: Key) -> str:
    text = str(key).replace("%", "%25").replace("\0", "%00")  # where names in archives end
    return f"{type(key).__name__}:{_SURROGATE.sub(lambda found: f'%u{ord(found[0]):04x}', text)}"


def write_states(
    path: Path, optimizer: Optimizer, steps: Mapping[Key, int], states: States, names: Mapping[Key, str]
) -> None:
    """Write states and how often each key was updated, to a file that replaces ``path`` whole.

    Args:
        names: what keys that number parameters are called, see `read_states`; may be empty.

    Raises:
        DataError: it cannot be written.
    """
    header: dict[str, Any] = {"version": 1, "optimizer": optimizer.config()["name"]}
    header["steps"] = {_name(key): steps[key] for key in steps}
    header["names"] = {_name(key): name for key, name in names.items()}
    arrays = {f"{_name(key)}/{name}": to_host(array) for (key, name), array in states.items()}
    files.write("save_optimizer_states", path, _HEADER, header, arrays)


def read_states(
    path: Path, optimizer: Optimizer, shapes: Mapping[Key, tuple[int, ...]], names: Mapping[Key, str]
) -> tuple[dict[Key, int], States]:
    """How often each key was updated, and its states.

    Args:
        shapes: of the store's keys.
        names: what keys that number parameters are called: where the file has names, too, they say which key is which.

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
        for each in optimizer.state_names():
            array = arrays.pop(f"{name}/{each}", None)
            if array is None or array.shape != tuple(shapes[keys[name]]):
                got = "none" if array is None else f"shape {array.shape}"
                where = f"{path}, {name}/{each}"
                raise DataError("load_optimizer_states", where=where, expected=f"shape {shapes[keys[name]]}", got=got)
            states[keys[name], each] = array
    if arrays:
        raise DataError("load_optimizer_states", where=path, expected="no other arrays", got=next(iter(arrays)))
    return {keys[name]: int(count) for name, count in updated.items()}, states


T = TypeVar("T")


class StateDictMixin(abc.ABC):
    """The part of a `KVStore` that gives and takes its state."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._updater: Updater = Replace()
        self.key_names: Mapping[Key, str] = {}
        """What keys are called in files of states, where they number a network's parameters."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This worker's number."""

    @property
    @abc.abstractmethod
    def num_workers(self) -> int:
        """How many workers push."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until all workers have come here, and their pushes have taken effect; raises what one's own raised."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Until all pushes of this worker have taken effect; raises what one of them raised."""

    @abc.abstractmethod
    def _finish(self, entries: list[Entry]) -> None:
        """Until this worker's pushes and pulls of some keys have ended; what a push has raised counts no more."""

    def _agreed(self, check: Callable[[], T]) -> T:
        """What ``check()`` returns; what it raises on one worker is raised on all."""
        return check()

    def _meet_updated(self) -> None:
        """`barrier`; a push that has failed on one worker is an error on all, before others wait for that one."""
        failure: Exception | None = None
        try:
            self.barrier()
        except Exception as error:
            failure = error

        def tell() -> None:
            if failure is not None:
                raise HpcdpError("push", expected="an update", got=summary(failure))

        try:
            self._agreed(tell)
        except HpcdpError as error:
            raise (failure or error) from None

    def _by_first(self, write: Callable[[], None]) -> None:
        """Call ``write()`` on the first worker; what it raises is raised on all."""
        write()

    def _own_part(self, entry: Entry, whole: Array) -> Array:
        """Of an array of the key's shape what this worker updates, flat."""
        return to_device_of(whole.reshape(-1), entry.stored)

    def _joined(self, entry: Entry, part: Array) -> np.ndarray:
        """A NumPy array of the key's shape from every worker's part; every worker must call."""
        return to_host(part).reshape(entry.stored.shape)

    def _held(self, entry: Entry, part: Array) -> Sharded | Array:
        """An array of the key's shape of which this worker has ``part``, flat, for a state."""
        return part.reshape(entry.stored.shape)

    def _values_of(self, entry: Entry) -> Sharded | Array:
        """The value of a key, for a state."""
        return entry.stored

    def _states_of(self, entry: Entry, rule: ByOptimizer) -> dict[str, Sharded | Array]:
        """The optimizer's state of a key by name, for a state."""
        own = rule.states.get(entry.key)
        if own is None:
            own = rule.states[entry.key] = new_state(rule.optimizer, self._own_part(entry, entry.stored))
        return {name: self._held(entry, part) for name, part in own.items()}

    def _updates_of(self, entry: Entry, rule: ByOptimizer) -> int:
        """How often a key was updated."""
        return rule.steps.get(entry.key, 0)

    def _residuals_of(self, entry: Entry) -> list[Part]:
        """What this worker has not sent yet of a key; nothing where it sends no codes."""
        return []

    def _put(self, entry: Entry, values: Any, states: Mapping[str, Any], updates: int | None) -> None:
        """Let a key go on with ``values`` and ``states``, which are what `_values_of` and `_states_of` gave.

        Args:
            updates: how often it was updated; None without an optimizer.
        """
        if isinstance(self._updater, ByOptimizer):
            self._updater.steps.pop(entry.key, None)
            if updates:
                self._updater.steps[entry.key] = updates

    def _renew(self, rule: ByOptimizer, config: dict[str, Any]) -> None:
        """Take over the settings of an optimizer; every worker calls."""

        def take_over() -> None:
            if config != rule.optimizer.config():
                rule.optimizer.take_config(config)

        self._agreed(take_over)

    def state_dict(self) -> dict[str, Any]:
        """All that the store keeps; every worker must call.

        Returns:
            ``values`` by key; ``optimizer``, its settings as JSON, None without one; with one ``states`` by key and
            name, and ``updates`` by key; with compression ``residuals`` by key, shape ``(workers, *shape)``. Arrays may
            be the store's own, which the next push changes.
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
        """Go on from a `state_dict`; every worker must call, with the keys and the kind of updater that it had then.

        A checkpoint restores that of any number of workers, on any kind of store.

        Raises:
            ConfigError: it is of other keys or another optimizer, or no state of a store; on every worker.
        """
        self._agreed(lambda: self._check_state(state))
        self._finish(list(self._entries.values()))  # pulls on their way get what was there before
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
            held, lacks = ("one", "none") if has_rule else ("none", "one")
            raise ConfigError("load_state_dict", where="optimizer", expected=f"{held}, as the store has", got=lacks)

    def save_optimizer_states(self, path: str) -> None:
        """Write the optimizer's state of all keys to one file, which replaces ``path``; every worker must call.

        Raises:
            ConfigError: there is no optimizer, or ``path`` names no file; on every worker.
            DataError: the file cannot be written; on every worker.
        """
        rule = self._by_optimizer("save_optimizer_states")
        file = self._agreed(lambda: checked_file("save_optimizer_states", path))
        states = {
            (key, name): self._joined(entry, part)
            for key, entry in self._entries.items()  # those of the rule's states come as they were updated here
            for name, part in (rule.states[key].items() if rule.steps.get(key) else ())
        }
        self._by_first(lambda: write_states(file, rule.optimizer, rule.steps, states, self.key_names))

    def load_optimizer_states(self, path: str) -> None:
        """Restore what `save_optimizer_states` wrote, by any number of workers; every worker must call.

        Keys that had not been updated then begin anew.

        Raises:
            ConfigError: there is no optimizer.
            DataError: the file is missing, damaged or of another optimizer, or other keys; on every worker.
        """
        rule = self._by_optimizer("load_optimizer_states")
        shapes = {key: entry.stored.shape for key, entry in self._entries.items()}
        rule.steps, states = self._agreed(
            lambda: read_states(checked_file("load_optimizer_states", path), rule.optimizer, shapes, self.key_names)
        )
        rule.states = {}
        for key in rule.steps:
            entry = self._entries[key]
            with on_device_of(entry.stored):
                rule.states[key] = new_state(rule.optimizer, self._own_part(entry, entry.stored))
                for name, place in rule.states[key].items():
                    place[...] = self._own_part(entry, states[key, name])

    def _by_optimizer(self, operation: str) -> ByOptimizer:
        """The optimizer, when the pushes of all workers have taken effect; every worker must call."""
        if not isinstance(self._updater, ByOptimizer):
            raise ConfigError(
                operation, expected="a store with an optimizer", got="none", remedy="set_optimizer() first"
            )
        self._meet_updated()
        return self._updater


def _filled(own: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[tuple[Key, Any, dict[str, Any]]]:
    """Every key with its values and states in a store's ``own`` state, filled, as what was not sent yet, from another
    one."""
    residuals = state.get("residuals", {})
    for key, mine in own.get("residuals", {}).items():
        if key in residuals:
            take(f"key {key!r}, residual", mine, residuals[key])
        else:  # all was sent then
            for part in mine.parts:
                with on_device_of(part.values):
                    part.values[...] = 0
    for key, values in own["values"].items():
        states = {name: _taken(f"key {key!r}, {name}", each, state["states"][key][name])
                  for name, each in own.get("states", {}).get(key, {}).items()}  # fmt: skip
        yield key, _taken(f"key {key!r}", values, state["values"][key]), states


def _taken(where: str, own: Sharded | Array, given: Any) -> Sharded | Array:
    """``own``, filled from ``given``."""
    if isinstance(own, Sharded):
        take(where, own, given)
    else:
        whole = Sharded(tuple(own.shape), np.dtype(own.dtype), [Part(0, own.reshape(-1))])
        take(where, whole, given)
    return own


def residuals_of(codes: Codes | None) -> list[Part]:
    """What has not been sent of a key whose codes are made in one."""
    return [] if codes is None else [Part(0, codes.residual)]
