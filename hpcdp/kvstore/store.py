"""`KVStore`, the base of all stores, and `WorldStore`, the base of stores over the ranks of a world.

Pushes and pulls of one key take effect in the order of the calls, those of different keys in any order, higher
priorities first. The calls are those of MXNet's KVStore. Any number of ranks can restore the state of a store.
"""

from __future__ import annotations

import abc
import contextlib
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import numpy as np

from ..comm import World
from ..comm.consistency import on_every_rank, on_rank_0, require_same
from ..compression import Compression, Settings
from ..core.arrays import Array, is_host, on_device_of, to_device_of, to_host
from ..core.checks import function, not_copied, number, same_names
from ..core.state import Part, Sharded, take
from ..data_parallel.trainer_state import joined
from ..engine import Engine, Variable
from ..errors import ConfigError, HpcdpError, MissingKeyError, UnsupportedError, listed
from ..optim import Optimizer, require_by_elements, require_optimizer
from .arguments import (
    Entry,
    Key,
    PendingPull,
    PullHandle,
    can_wait,
    carry,
    check_array,
    check_one_gpu,
    check_storable,
    checked_file,
    checked_integer,
    checked_rows,
    fill,
    grouped,
    lies_as,
    like,
    listed_keys,
    new_keys,
    one_for_each_key,
    rows_of_each,
)
from .updaters import (
    ByFunction,
    ByOptimizer,
    Codes,
    Function,
    Replace,
    Updater,
    check_codable,
    name_of,
    new_state,
    read_key_states,
    summary,
    write_key_states,
)

T = TypeVar("T")


class KVStore(abc.ABC):
    """A key-value store; see `create`.

    Keys are ints or strs, all of one type in a store. A value is an array, or a list of arrays, one for each device,
    which are summed. A list of keys takes a list of values. Pushed arrays are copied at once, and may be changed when
    the call returns.

    Arrays are NumPy arrays or on GPUs. In kinds that sum on devices, without compression, a key is kept on the GPU of
    its initial value. Otherwise it is kept on the host, and pushes and pulls copy between host and GPU. On a GPU, calls
    use the calling thread's current stream.
    """

    __reduce__ = not_copied(
        "KVStore", "the store", "call load_state_dict() of another store with state_dict() of this one"
    )

    def __init__(self, kind: str, engine: Engine, lane: str) -> None:
        self.kind = kind
        self._engine, self._lane = engine, lane
        self._entries: dict[Key, Entry] = {}
        self._updater: Updater = Replace()
        self.key_names: Mapping[Key, str] = {}
        """Parameter names of keys that number parameters, for files of states."""

    @property
    def keys(self) -> list[Key]:
        """Keys in the order in which they were made."""
        return list(self._entries)

    @property
    def has_updater(self) -> bool:
        """True if an updater or optimizer applies pushes; otherwise they replace the stored value."""
        return not isinstance(self._updater, Replace)

    @abc.abstractmethod
    def _make(self, values: dict[Key, Array]) -> None:
        """Make new keys, each on the device of its value; see `_stays`."""

    def _stays(self, value: Array) -> bool:
        """Return whether a key with an initial array on a device is kept there."""
        return False

    def _place(self, entry: Entry, arrays: list[Array]) -> None:
        """Choose the device of a key before ``arrays`` are pushed to it."""
        return

    @abc.abstractmethod
    def _assign(self, values: dict[Key, Array]) -> None:
        """Overwrite keys without pushes or pulls of this worker under way."""

    @abc.abstractmethod
    def _push(self, entry: Entry, arrays: list[Array], priority: int) -> None:
        """Push copies of ``arrays``, one for each device, without waiting; see `merged`."""

    def init(self, key: Any, value: Any) -> None:
        """Make one or several new keys with the first worker's values; every worker must call, in the same order.

        Args:
            key: a new key, or a list of them.
            value: the initial array of the key, or a list of one for each key.

        Raises:
            ConfigError: a key exists already, or is an int where others are strs.
            MismatchError: workers differ in the key, shape or dtype; on all of them.
        """

        def check() -> dict[Key, Array]:
            new = new_keys(key, value, self._entries.keys()).items()
            return {key: value if is_host(value) or self._stays(value) else to_host(value) for key, value in new}

        with self._meeting():
            self._make(self._agreed(check))

    def assign(self, key: Any, value: Any) -> None:
        """Overwrite one or several keys by the first worker's values; every worker must call, with the same keys.

        Earlier pushes take effect first. Versions and the optimizer's state do not change.

        Args:
            key: a key, or a list of them.
            value: an array in the key's shape and dtype, or a list of one for each key.

        Raises:
            ConfigError: there is no such key, or there is more than one array for it; on all workers.
            UnsupportedError: an array has another shape or dtype than the key; on all workers.
            MismatchError: workers differ in the keys; on all of them.
        """

        def check() -> dict[Key, Array]:
            named = self._named("assign", key, value)
            odd = next((entry for entry, arrays in named if len(arrays) != 1), None)
            if odd is not None:
                raise ConfigError("assign", where=f"key {odd.key!r}", expected="one array", got="several arrays")
            return {entry.key: to_device_of(arrays[0], entry.stored) for entry, arrays in named}

        with self._meeting():
            values = self._agreed(check)
            self._finish([self._entries[name] for name in values])
            self._assign(values)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Push arrays to one or several keys; returns without waiting.

        The updater is applied to the stored value and the pushed one; without an updater, the pushed value is stored.
        In ``dist_async``, which needs an updater, each push takes effect alone. In other ``dist`` stores every worker
        must push, and the sum of all workers' pushes takes effect.

        Args:
            key: a key, or a list of them.
            value: an array in the key's shape and dtype, or a list of them, one for each device; for a list of keys a
                list of those.
            priority: keys of higher priority use the network first.

        Raises:
            ConfigError: there is no such key; ``dist_async`` has no updater.
            UnsupportedError: an array has another shape or dtype than the key; no key is pushed then.
        """
        priority = checked_integer("push", "priority", priority)
        for entry, arrays in self._pushable(key, value):
            self._push(entry, arrays, priority)

    @overload
    def pull(self, key: Key, out: None = None, priority: int = 0) -> PullHandle: ...
    @overload
    def pull(self, key: list[Any] | tuple[Any, ...], out: None = None, priority: int = 0) -> list[PullHandle]: ...
    @overload
    def pull(self, key: Any, out: Any, priority: int = 0) -> None: ...
    def pull(self, key: Any, out: Any = None, priority: int = 0) -> Any:
        """Pull the values of one or several keys after this worker's last push of each.

        Args:
            key: a key, or a list of them.
            out: targets: arrays, which are filled when this returns, or parameters of a network, which are filled
                later, and whose readers wait. One target or a list for one key, a list of those for several. The value
                of a float key is cast to the float dtype of an array. None: new arrays.
            priority: keys of higher priority use the network first.

        Returns:
            None with ``out``. Without it a `PullHandle` for one key, a list of them for several, without waiting.
        """
        priority = checked_integer("pull", "priority", priority)
        if out is None:
            entries = [self._entry("pull", name) for name in listed_keys("pull", key)]
            pulled = [self._pull(entry, like(entry.stored), priority) for entry in entries]
            return pulled if isinstance(key, list | tuple) else pulled[0]
        self._pull_into(self._named("pull", key, out), priority)
        return None

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Call `push`, then `pull` to ``out``, or to ``value`` without it."""
        priority = checked_integer("push", "priority", priority)
        pushed = self._pushable(key, value)
        places = self._named("pull", key, value if out is None else out)
        entry, targets = places[0]
        directly = len(pushed) == 1 == len(places) and pushed[0][0] is entry
        if directly and all(can_wait(target) or lies_as(entry.stored, target) for target in targets):
            self._pushpull(*pushed[0], places[0][1], priority)
        else:  # push all before waiting for one: other ranks may list them in another order
            for entry, arrays in pushed:
                self._push(entry, arrays, priority)
            self._pull_into(places, priority)

    def _pushpull(self, entry: Entry, arrays: list[Array], targets: list[Any], priority: int) -> None:
        """Push, then pull to ``targets``: arrays, filled when this returns, or parameters, whose readers wait."""
        self._push(entry, arrays, priority)
        self._pull_into([(entry, targets)], priority)

    def _pull_to(self, entry: Entry, target: Array, priority: int, rows: np.ndarray | None = None) -> PullHandle:
        """Pull to an array that may be on another device than the key, or of another float dtype."""
        if lies_as(entry.stored, target):
            return self._pull(entry, target, priority, rows)
        pulled = self._pull(entry, like(entry.stored), priority, rows)
        return PullHandle(lambda: carry(pulled.wait(), target), target, lambda: pulled.version)

    def _pull_into(self, places: list[tuple[Entry, list[Any]]], priority: int) -> None:
        waits = []
        for entry, targets in places:
            for target in targets:
                pulled = self._pull_to(entry, target.data if can_wait(target) else target, priority)
                if can_wait(target):
                    target.data_hook = PendingPull(pulled)
                else:
                    waits.append(pulled)
        for pulled in waits:
            pulled.wait()

    def broadcast(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Call `init`, then `pull` to ``out``, or to ``value`` without it."""
        self.init(key, value)
        self.pull(key, value if out is None else out, priority)

    @overload
    def row_sparse_pull(self, key: Key, out: None = None, row_ids: Any = None, priority: int = 0) -> PullHandle: ...
    @overload
    def row_sparse_pull(
        self, key: list[Any] | tuple[Any, ...], out: None = None, row_ids: Any = None, priority: int = 0
    ) -> list[PullHandle]: ...
    @overload
    def row_sparse_pull(self, key: Any, out: Any, row_ids: Any = None, priority: int = 0) -> None: ...
    def row_sparse_pull(self, key: Any, out: Any = None, row_ids: Any = None, priority: int = 0) -> Any:
        """Pull rows of a value; the other rows are zero. The rows of a value of one dimension are its elements.

        Args:
            key: a key, or a list of them; then ``out`` and ``row_ids`` are lists, too.
            out: an array as for `pull`, or a list of them, one for each device.
            row_ids: integers of shape ``(count,)``, in any order, repeated or not; for a list of arrays a list of them,
                one for each, or one for all.
            priority: keys of higher priority use the network first.

        Returns:
            None with ``out``. Without it a `PullHandle`, or for a list of keys a list of them.

        Raises:
            ConfigError: ``row_ids`` is None or has a row that does not exist, or the numbers of lists differ.
        """
        keys = listed_keys("row_sparse_pull", key)
        if isinstance(key, list | tuple):
            outs = [None] * len(keys) if out is None else out
            for where, values in (("out", outs), ("row_ids", row_ids)):
                one_for_each_key("row_sparse_pull", where, values, len(keys))
            handles = [self.row_sparse_pull(*of_key, priority) for of_key in zip(keys, outs, row_ids, strict=True)]
            return handles if out is None else None
        entry = self._entry("row_sparse_pull", keys[0])
        priority = checked_integer("row_sparse_pull", "priority", priority)
        shape, dtype = tuple(entry.stored.shape), np.dtype(entry.stored.dtype)
        places = [like(entry.stored)] if out is None else list(out) if isinstance(out, list | tuple) else [out]
        rows = [checked_rows("row_sparse_pull", ids, shape) for ids in rows_of_each(row_ids, len(places))]
        for place in places:
            check_array("row_sparse_pull", entry.key, place, shape, dtype)
        pulled = [self._pull_to(entry, place, priority, ids) for place, ids in zip(places, rows, strict=True)]
        if out is None:
            return pulled[0]
        for handle in pulled:
            handle.wait()
        return None

    def set_updater(self, updater: Function) -> None:
        """Apply ``updater(key, received, stored)`` to later pushes, which changes ``stored`` in place.

        The updater returns None, or ``stored``. If it raises, the stored value is unchanged, and readers of the key get
        the error until the key is pushed or assigned again.

        It is called in the pushing thread or a thread of the store: on the pushing worker, on one worker of every node,
        or on a server. Arrays have the key's shape; in ``dist_async`` those of a large key are flat parts. So it must
        compute the same everywhere, and every worker must pass the same function.

        Raises:
            ConfigError: ``updater`` is not callable, or separate servers cannot import it.
            MismatchError: workers pass functions of different names; on all of them.
        """
        function("set_updater", None, updater, "a function of key, received, stored")
        self._updater = ByFunction(updater)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Apply an optimizer to later pushes, as gradients; every worker must call, with the same settings.

        A learning rate that is assigned to ``optimizer`` takes effect at the next push.

        Raises:
            ConfigError: ``optimizer`` is not an `Optimizer`, or its rule is not elementwise; on all workers.
            MismatchError: workers differ in its settings; on all of them.
        """
        require_optimizer("set_optimizer", optimizer)
        require_by_elements("set_optimizer", optimizer)
        self._updater = ByOptimizer(optimizer)

    def set_gradient_compression(self, settings: Settings) -> None:
        """Compress later pushes with error feedback; every worker must call, with the same settings.

        Args:
            settings: a dict as in MXNet, ``{"type": "2bit", "threshold": 0.5}``; settings as of a Trainer, e.g.
                ``"topk:ratio=0.05"`` (see `hpcdp.compression.Compression`); or None for no compression.

        Raises:
            ConfigError: there is no such codec or setting.
            UnsupportedError: a key is not of a float dtype on the host.
            MismatchError: workers differ; on all of them.
        """
        with self._meeting():
            self._compress(self._agreed(lambda: Compression.of(settings)))

    def _check_codable(self, compression: Compression | None) -> None:
        """Raise `UnsupportedError` unless the codec, if any, supports all keys."""
        values = ((key, entry.stored) for key, entry in self._entries.items())
        if compression is not None:
            check_codable("set_gradient_compression", values)

    @abc.abstractmethod
    def _compress(self, compression: Compression | None) -> None:
        """Set the compression of later pushes."""

    def sent_nbytes(self) -> tuple[int, int]:
        """Return the bytes of this worker's pushes, with and without compression."""
        entries = self._entries.values()
        plain = sum(entry.pushes * int(entry.stored.nbytes) for entry in entries)
        return plain - sum(entry.spared_nbytes for entry in entries), plain

    def take(self, key: Any, count: int = 1) -> int:
        """Return the integer of a key, and add ``count`` to it atomically; only in ``dist_async``.

        Raises:
            UnsupportedError: in a store of another kind.
        """
        raise self._has_no("take")

    def statistics(self) -> dict[str, float]:
        """Return statistics of this worker's pushes; only in ``dist_async``.

        Raises:
            UnsupportedError: in a store of another kind.
        """
        raise self._has_no("statistics")

    def _has_no(self, operation: str) -> UnsupportedError:
        expected = "a dist_async store, with a staleness other than 0"
        return UnsupportedError(operation, where="kvstore", expected=expected, got=f"a store of kind {self.kind}")

    def num_dead_node(self, timeout_s: float = 60) -> int:
        """Return the number of workers and servers that have died, or not answered for ``timeout_s`` seconds.

        It is 0 in kinds other than ``dist_async``, where a death ends the job. It also ends a job with ``dist_async``,
        unless the MPI library lets other processes continue.

        Raises:
            ConfigError: ``timeout_s`` is not a positive number.
        """
        expected = "a positive number of seconds"
        return self._num_dead(
            number("num_dead_node", "timeout_s", timeout_s, above=0, most=math.inf, expected=expected)
        )

    def _num_dead(self, timeout_s: float) -> int:
        return 0

    def wait(self) -> None:
        """Wait until all pushes of this worker have taken effect; raise the error of one that failed."""
        for entry in self._entries.values():
            self._wait_for(entry, entry.variable)

    def _settle(self) -> None:
        """Wait until all pushes have ended, with or without an error."""
        for entry in self._entries.values():
            with contextlib.suppress(Exception):  # the error is raised where the value is read
                self._wait_for(entry, entry.variable)

    def _finish(self, entries: list[Entry]) -> None:
        for entry in entries:  # a write also waits for earlier reads
            self._engine.push(lambda: None, [], [entry.variable], self._lane, 0, f"assignment of {entry.key!r}")
        for entry in entries:
            self._wait_for(entry, entry.variable)

    def _wait_for(self, entry: Entry, variable: Variable) -> None:
        """Wait until ``variable`` is written by a push or a pull of ``entry``."""
        self._engine.wait_to_read(variable)

    def _named(self, operation: str, key: Any, value: Any) -> list[tuple[Entry, list[Any]]]:
        """Return the keys of a call and their arrays, after checks."""
        if type(key) is int or type(key) is str:  # a fast path of about 1 us for one key and one array
            one = self._entries.get(key)
            fits = one is not None and type(value) is np.ndarray and value.shape == one.stored.shape
            fits = fits and (operation != "pull" or value.flags.writeable)
            if one is not None and fits and value.dtype == one.stored.dtype:
                return [(one, [value])]
        named = [(self._entry(operation, name), arrays) for name, arrays in grouped(operation, key, value).items()]
        for entry, arrays in named:
            for array in arrays:
                check_array(operation, entry.key, array, tuple(entry.stored.shape), np.dtype(entry.stored.dtype))
        return named

    def _pushable(self, key: Any, value: Any) -> list[tuple[Entry, list[Any]]]:
        """Return the keys of a push and their arrays, on the keys' devices, after checks for the updater."""
        named = self._named("push", key, value)
        for entry, arrays in named:
            self._place(entry, arrays)
        pushed = [(entry, [to_device_of(array, entry.stored) for array in arrays]) for entry, arrays in named]
        if isinstance(self._updater, ByOptimizer):
            for entry, _ in pushed:
                if entry.stored.dtype.kind != "f":
                    got, expected = entry.stored.dtype, "a float dtype in a store with an optimizer"
                    raise UnsupportedError("push", where=f"key {entry.key!r}", expected=expected, got=got)
        return pushed

    def _entry(self, operation: str, key: object) -> Entry:
        key = int(key) if isinstance(key, np.integer) else key
        if isinstance(key, int | str) and not isinstance(key, bool) and key in self._entries:
            return self._entries[key]
        keys = listed([repr(name) for name in self._entries]) or "none yet"
        raise MissingKeyError(operation, where=f"key {key!r}", expected=f"one of the keys made by init(): {keys}")

    def _pull(self, entry: Entry, place: Array, priority: int, rows: np.ndarray | None = None) -> PullHandle:
        variable, version = self._engine.variable(f"pull of {entry.key!r}"), entry.pushes

        def copy() -> None:
            fill(place, entry.stored, rows)

        self._engine.push(copy, [entry.variable], [variable], self._lane, priority, variable.name)
        return PullHandle(lambda: self._wait_for(entry, variable), place, lambda: version)

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

    def _meeting(self) -> AbstractContextManager[object]:
        """Return the context of a call that synchronizes all workers."""
        return contextlib.nullcontext()

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
        for key, entry in entries if any(residuals.values()) else ():
            shape, first = (self.num_workers, *entry.stored.shape), self.rank * int(entry.stored.size)
            parts = [Part(first + part.first, part.values) for part in residuals[key]]
            residual = Sharded(shape, np.dtype(entry.stored.dtype), parts, shares=True)
            state.setdefault("residuals", {})[key] = residual
        self.barrier()
        return state

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
        self._by_first(lambda: write_key_states(file, rule, updates, states, self.key_names))

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
            lambda: read_key_states(checked_file("load_optimizer_states", path), rule, shapes, self.key_names)
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


class WorldStore(KVStore):
    """A store over the ranks of ``world``; every rank must make it, and its keys."""

    def __init__(self, kind: str, world: World, engine: Engine, lane: str) -> None:
        super().__init__(kind, engine, lane)
        self._world = world
        self._compression: Compression | None = None
        world.closings.add(self._let_go)

    def _let_go(self) -> None:
        """Drop keys and engine when the world is closed: later calls raise the error of a closed world."""
        vars(self).update(_entries=self._world.comm, _engine=self._world.comm)

    @property
    def rank(self) -> int:
        """See `KVStore.rank`."""
        return self._world.rank

    @property
    def num_workers(self) -> int:
        """See `KVStore.num_workers`."""
        return self._world.size

    def barrier(self) -> None:
        """See `KVStore.barrier`."""
        self._settle()
        self._meet()  # also after a failed push: other workers wait
        self.wait()

    def _meet(self) -> None:
        """Wait until all workers have called, without pushes under way."""
        self._world.barrier()

    def _meeting(self) -> AbstractContextManager[object]:
        return self._world.meeting()

    def set_updater(self, updater: Function) -> None:
        """See `KVStore.set_updater`."""
        require_same(self._world.comm, "set_updater", [name_of(updater)], "pass the same function on all ranks")
        super().set_updater(updater)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """See `KVStore.set_optimizer`."""
        self._agreed(lambda: require_optimizer("set_optimizer", optimizer))
        settings = f"optimizer {optimizer.config()}"
        require_same(self._world.comm, "set_optimizer", [settings], "pass the same on all ranks")
        super().set_optimizer(optimizer)

    def _check_new(self, values: dict[Key, Array]) -> None:
        """Refuse new keys that differ between ranks, or cannot be shared; on all of them."""
        on_gpus = {key: value for key, value in values.items() if not is_host(value)}
        items = [
            f"key {key!r} {tuple(value.shape)} {value.dtype}{' on a GPU' * (key in on_gpus)}"
            for key, value in values.items()
        ]
        require_same(self._world.comm, "init", items, "make the same keys in the same order on all ranks")

        def check() -> None:
            check_storable({key: value for key, value in values.items() if key not in on_gpus})
            check_one_gpu(on_gpus)
            if self._compression is not None:
                check_codable("init", values.items())

        self._agreed(check)

    def _check_assigned(self, values: dict[Key, Array]) -> None:
        """Refuse assigned keys that differ between ranks, on all of them; also a barrier."""
        items = [f"key {key!r}" for key in values]
        require_same(self._world.comm, "assign", items, "assign the same keys in the same order on all ranks")

    def _agreed(self, check: Callable[[], T]) -> T:
        return on_every_rank(self._world.comm, check)

    def _by_first(self, write: Callable[[], None]) -> None:
        on_rank_0(self._world.comm, write)

    def whole(self, tensor: Sharded | Array) -> np.ndarray:
        """See `KVStore.whole`."""
        return joined(tensor, self._world) if isinstance(tensor, Sharded) else super().whole(tensor)
