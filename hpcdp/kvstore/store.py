"""The stores that all ranks keep together.

What all stores have in common: the calls, their arguments, and values on their way.

Pushes and pulls of one key take effect in the order of the calls; those of different keys in any, those of higher
priority first. The calls are those of MXNet's KVStore.

What stores over the ranks of a world have in common: what ranks must agree on, and who speaks for all.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..comm import World
from ..comm.consistency import on_every_rank, on_rank_0, require_same
from ..compression import Compression, Settings
from ..core.arrays import Array, is_host, to_host
from ..core.checks import function, not_copied, number
from ..core.devices import to_device_of
from ..engine import Engine, Variable
from ..errors import ConfigError, MissingKeyError, UnsupportedError, listed
from ..optim import Optimizer, require_by_elements, require_optimizer
from .arguments import (
    Entry,
    Key,
    PendingPull,
    PullHandle,
    can_wait,
    carry,
    check_array,
    check_storable,
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
from .gpu_keys import check_one_gpu
from .store_state import StateDictMixin
from .updaters import ByFunction, ByOptimizer, Function, Replace, check_codable, name_of


class KVStore(StateDictMixin):
    """Values under keys; see `create`.

    Keys are ints or strs, in one store all of one kind. A value is an array, or a list of arrays, one a device, which
    is summed; several keys, as a list, take a list of values. Arrays that are pushed are copied at once, and may be
    changed when the call returns.

    Arrays may be NumPy's or on GPUs. What a key begins with says where it is kept: on its GPU in kinds that sum on
    devices, without compression; else on the host, where what is pushed is brought, and pulled from. On a GPU calls go
    to the stream that is current in the thread that calls.
    """

    __reduce__ = not_copied(
        "KVStore",
        "the store",
        "make another one by kvstore.create() and load_state_dict() what state_dict() of this one gives",
    )

    def __init__(self, kind: str, engine: Engine, lane: str) -> None:
        super().__init__()
        self.kind = kind
        self._engine, self._lane = engine, lane

    @property
    def keys(self) -> list[Key]:
        """Those that were made, in that order."""
        return list(self._entries)

    @property
    def has_updater(self) -> bool:
        """Whether a push changes the stored value by a rule, and does not replace it."""
        return not isinstance(self._updater, Replace)

    @abc.abstractmethod
    def _make(self, values: dict[Key, Array]) -> None:
        """Make keys that are new, each where its value is; see `_stays`."""

    def _stays(self, value: Array) -> bool:
        """Whether a key that begins with an array on a device is kept there."""
        return False

    def _place(self, entry: Entry, arrays: list[Array]) -> None:
        """Choose where a key is kept from now on, before ``arrays`` are pushed to it."""

    @abc.abstractmethod
    def _assign(self, values: dict[Key, Array]) -> None:
        """Overwrite keys, of which this worker has nothing on its way."""

    @abc.abstractmethod
    def _push(self, entry: Entry, arrays: list[Array], priority: int) -> None:
        """Let a push take effect, and return at once; the ``arrays``, one a device, are the caller's: see `merged`."""

    def init(self, key: Any, value: Any) -> None:
        """Make one key or several, once each; every worker must call, in the same order. The first worker's value wins.

        Raises:
            ConfigError: a key is there already, or is an int where others are strs.
            MismatchError: workers differ in the key, shape or dtype; on all of them.
        """

        def check() -> dict[Key, Array]:
            new = new_keys(key, value, self._entries.keys()).items()
            return {key: value if is_host(value) or self._stays(value) else to_host(value) for key, value in new}

        self._make(self._agreed(check))

    def assign(self, key: Any, value: Any) -> None:
        """Overwrite one key or several; every worker must call, alike. The first worker's value wins.

        What was pushed before has taken effect then. Versions and the optimizer's state stay as they are.

        Raises:
            ConfigError: there is no such key, or there is more than one array for it.
            UnsupportedError: an array of another shape or dtype than the key's.
            MismatchError: workers differ in the keys; all of these on all workers.
        """

        def check() -> dict[Key, Array]:
            named = self._named("assign", key, value)
            odd = next((entry for entry, arrays in named if len(arrays) != 1), None)
            if odd is not None:
                raise ConfigError("assign", where=f"key {odd.key!r}", expected="one array", got="several")
            return {entry.key: to_device_of(arrays[0], entry.stored) for entry, arrays in named}

        values = self._agreed(check)
        self._finish([self._entries[each] for each in values])
        self._assign(values)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Add to the next value of one key or several; returns at once.

        With an updater it is applied to the stored value and what is pushed, else that is stored. In ``dist_async``,
        which needs an updater, that is each push by itself. In other ``dist`` stores every worker must push, and it is
        the sum.

        Args:
            priority: keys of higher priority get the network first.

        Raises:
            ConfigError: there is no such key; ``dist_async`` has no updater.
            UnsupportedError: an array of another shape or dtype than the key's; no key is pushed then.
        """
        priority = checked_integer("push", "priority", priority)
        for entry, arrays in self._pushable(key, value):
            self._push(entry, arrays, priority)

    def pull(self, key: Any, out: Any = None, priority: int = 0) -> Any:
        """The values of one key or several after this worker's last push of each.

        Args:
            out: where to: arrays, which are filled when this returns, since an array cannot wait when it is read; or
                parameters of a network, which do, and so are filled later. For one key one of them or a list, for
                several keys a list of those. The value of a float key is cast to the float dtype of an array.
                None: new arrays.

        Returns:
            Without ``out``, and at once, a `PullHandle` for one key, a list of them for several. Else None.
        """
        priority = checked_integer("pull", "priority", priority)
        if out is None:
            entries = [self._entry("pull", each) for each in listed_keys("pull", key)]
            pulled = [self._pull(entry, like(entry.stored), priority) for entry in entries]
            return pulled if isinstance(key, list | tuple) else pulled[0]
        self._pull_into(self._named("pull", key, out), priority)
        return None

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull` to ``out``; without it ``value`` is overwritten."""
        priority = checked_integer("push", "priority", priority)
        pushed = self._pushable(key, value)
        places = self._named("pull", key, value if out is None else out)
        entry, targets = places[0]
        directly = len(pushed) == 1 == len(places) and pushed[0][0] is entry
        if directly and all(can_wait(each) or lies_as(entry.stored, each) for each in targets):
            self._pushpull(*pushed[0], places[0][1], priority)
        else:  # all are pushed before one is waited for: other ranks may name them in another order
            for entry, arrays in pushed:
                self._push(entry, arrays, priority)
            self._pull_into(places, priority)

    def _pushpull(self, entry: Entry, arrays: list[Array], targets: list[Any], priority: int) -> None:
        """`_push`, then pull to the ``targets``: arrays, filled when this returns, or parameters, which wait."""
        self._push(entry, arrays, priority)
        self._pull_into([(entry, targets)], priority)

    def _pull_to(self, entry: Entry, target: Array, priority: int, rows: np.ndarray | None = None) -> PullHandle:
        """`_pull` to an array that may lie elsewhere than the key, or be of another float dtype."""
        if lies_as(entry.stored, target):
            return self._pull(entry, target, priority, rows)
        here = self._pull(entry, like(entry.stored), priority, rows)
        return PullHandle(lambda: carry(here.wait(), target), target, lambda: here.version)

    def _pull_into(self, places: list[tuple[Entry, list[Any]]], priority: int) -> None:
        waits = []
        for entry, targets in places:
            for target in targets:
                on_its_way = self._pull_to(entry, target.data if can_wait(target) else target, priority)
                if can_wait(target):
                    target.data_hook = PendingPull(on_its_way)
                else:
                    waits.append(on_its_way)
        for on_its_way in waits:
            on_its_way.wait()

    def broadcast(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`init`, then `pull` to ``out``; without it ``value`` is overwritten."""
        self.init(key, value)
        self.pull(key, value if out is None else out, priority)

    def row_sparse_pull(self, key: Any, out: Any = None, row_ids: Any = None, priority: int = 0) -> Any:
        """Some rows of a value, all others zero; those of a value of one dimension are its elements.

        Args:
            key: one key, or a list of them; then ``out`` and ``row_ids`` are lists, too.
            out: as for `pull`, one array, or a list of them, one for each device.
            row_ids: integers of shape ``(count,)``, in any order, maybe repeated; for a list of arrays a list of them,
                one for each, or one for all.

        Raises:
            ConfigError: no rows are named, or some that there are not; there are other than as many lists as keys, or
                as arrays.
        """
        keys = listed_keys("row_sparse_pull", key)
        if isinstance(key, list | tuple):
            outs = [None] * len(keys) if out is None else out
            for where, given in (("out", outs), ("row_ids", row_ids)):
                one_for_each_key("row_sparse_pull", where, given, len(keys))
            all_of_them = [self.row_sparse_pull(*each, priority) for each in zip(keys, outs, row_ids, strict=True)]
            return all_of_them if out is None else None
        entry = self._entry("row_sparse_pull", keys[0])
        before = checked_integer("row_sparse_pull", "priority", priority)
        shape, dtype = tuple(entry.stored.shape), np.dtype(entry.stored.dtype)
        places = [like(entry.stored)] if out is None else list(out) if isinstance(out, list | tuple) else [out]
        wanted = [checked_rows("row_sparse_pull", each, shape) for each in rows_of_each(row_ids, len(places))]
        for place in places:
            check_array("row_sparse_pull", entry.key, place, shape, dtype)
        on_their_way = [self._pull_to(entry, place, before, rows) for place, rows in zip(places, wanted, strict=True)]
        if out is None:
            return on_their_way[0]
        for each in on_their_way:
            each.wait()
        return None

    def set_updater(self, updater: Function) -> None:
        """From the next push on change stored values by ``updater(key, received, stored)``, in place.

        It returns None, or ``stored`` itself. One that raises has changed nothing; who waits for the key gets the error
        until it is pushed again, or assigned.

        It is called in the thread that pushes, or in one of the store's, with what `push` says and the stored value, in
        the key's shape (in ``dist_async`` flat parts of a large key): on the worker that pushes, on one of every node,
        or on a server. So it must compute the same everywhere, and every worker must give the same function.

        Raises:
            ConfigError: it cannot be called, or servers of their own cannot import it.
            MismatchError: workers give functions of other names; on all of them.
        """
        function("set_updater", None, updater, "a function of key, received, stored")
        self._updater = ByFunction(updater)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """From the next push on change stored values by an update rule; every worker must call, with the same settings.

        What was received stands for the gradient. A learning rate that is assigned counts from the next push on.

        Raises:
            ConfigError: it is no `Optimizer`, or a rule that needs whole layers; on all workers.
            MismatchError: workers differ in its settings; on all of them.
        """
        require_optimizer("set_optimizer", optimizer)
        require_by_elements("set_optimizer", optimizer)
        self._updater = ByOptimizer(optimizer)

    def set_gradient_compression(self, settings: Settings) -> None:
        """From the next push on encode what is pushed, with what was not sent before; every worker must call, alike.

        Args:
            settings: a dict as MXNet takes, ``{"type": "2bit", "threshold": 0.5}``; what a Trainer takes, e.g.
                ``"topk:ratio=0.05"`` (see `hpcdp.compression.Compression`); or None: nothing is encoded any more.

        Raises:
            ConfigError: there is no such codec or setting.
            UnsupportedError: not in this kind of store.
            MismatchError: workers differ; on all of them.
        """
        self._compress(self._agreed(lambda: Compression.of(settings)))

    def _compress(self, compression: Compression | None) -> None:
        raise UnsupportedError(
            "set_gradient_compression", where=self.kind, expected="a kind that compresses", got="one that does not"
        )

    def sent_nbytes(self) -> tuple[int, int]:
        """Bytes of this worker's pushes so far, as they were encoded, and what they would have been without."""
        entries = self._entries.values()
        plain = sum(each.plain_nbytes for each in entries)
        return plain - sum(each.spared_nbytes for each in entries), plain

    def take(self, key: Any, count: int = 1) -> int:
        """The integer under a key, which is ``count`` greater then; of ``dist_async`` alone.

        Raises:
            UnsupportedError: in a store of another kind.
        """
        raise self._has_no("take")

    def statistics(self) -> dict[str, float]:
        """What this worker's pushes have met so far; of ``dist_async`` alone.

        Raises:
            UnsupportedError: in a store of another kind.
        """
        raise self._has_no("statistics")

    def _has_no(self, operation: str) -> UnsupportedError:
        expected = "a dist_async store, with a staleness other than 0"
        return UnsupportedError(operation, where="kvstore", expected=expected, got=f"one of kind {self.kind}")

    def num_dead_node(self, timeout_s: float = 60) -> int:
        """How many workers or servers are gone: have died, or said nothing for ``timeout_s`` seconds.

        0 in other kinds than ``dist_async``: there one that dies ends the job, so whoever can ask has lost none. So it
        does with ``dist_async``, too, unless the MPI library lets the others go on.

        Raises:
            ConfigError: that is no positive number.
        """
        expected = "a positive number of seconds"
        return self._num_dead(
            number("num_dead_node", "timeout_s", timeout_s, above=0, most=math.inf, expected=expected)
        )

    def _num_dead(self, timeout_s: float) -> int:
        return 0

    def wait(self) -> None:
        """Until all pushes of this worker have taken effect; raises what one of them raised."""
        for entry in self._entries.values():
            self._wait_for(entry, entry.variable)

    def _settle(self) -> None:
        """Until all pushes have ended, well or not."""
        for entry in self._entries.values():
            with contextlib.suppress(Exception):  # who has not asked for the value does not want to know
                self._wait_for(entry, entry.variable)

    def _finish(self, entries: list[Entry]) -> None:
        for entry in entries:  # a write waits for reads, too
            self._engine.push(lambda: None, [], [entry.variable], self._lane, 0, f"assignment of {entry.key!r}")
        for entry in entries:
            self._wait_for(entry, entry.variable)

    def _wait_for(self, entry: Entry, variable: Variable) -> None:
        """Until ``variable`` is written, by a push or a pull of ``entry``."""
        self._engine.wait_to_read(variable)

    def _named(self, operation: str, key: Any, value: Any) -> list[tuple[Entry, list[Any]]]:
        """The keys of a call and their arrays, which fit."""
        if type(key) is int or type(key) is str:  # one key and one array: what is done most often takes a microsecond
            one = self._entries.get(key)
            fits = one is not None and type(value) is np.ndarray and value.shape == one.stored.shape
            fits = fits and (operation != "pull" or value.flags.writeable)
            if one is not None and fits and value.dtype == one.stored.dtype:
                return [(one, [value])]
        named = [(self._entry(operation, each), arrays) for each, arrays in grouped(operation, key, value).items()]
        for entry, arrays in named:
            for array in arrays:
                check_array(operation, entry.key, array, tuple(entry.stored.shape), np.dtype(entry.stored.dtype))
        return named

    def _pushable(self, key: Any, value: Any) -> list[tuple[Entry, list[Any]]]:
        """The keys of a push and their arrays, which the updater can take, where the keys are kept."""
        named = self._named("push", key, value)
        for entry, arrays in named:
            self._place(entry, arrays)
        pushed = [(entry, [to_device_of(each, entry.stored) for each in arrays]) for entry, arrays in named]
        if isinstance(self._updater, ByOptimizer):
            for entry, _ in pushed:
                if entry.stored.dtype.kind != "f":
                    got, expected = entry.stored.dtype, "floating-point numbers in a store with an optimizer"
                    raise UnsupportedError("push", where=f"key {entry.key!r}", expected=expected, got=got)
        return pushed

    def _entry(self, operation: str, key: object) -> Entry:
        key = int(key) if isinstance(key, np.integer) else key
        if isinstance(key, int | str) and not isinstance(key, bool) and key in self._entries:
            return self._entries[key]
        there = listed([repr(each) for each in self._entries]) if self._entries else "none yet"
        expected = f"one of the keys that init() has made: {there}"
        raise MissingKeyError(operation, where=f"key {key!r}", expected=expected)

    def _pull(self, entry: Entry, place: Array, priority: int, rows: np.ndarray | None = None) -> PullHandle:
        variable, version = self._engine.variable(f"pull of {entry.key!r}"), entry.pushes

        def copy() -> None:
            fill(place, entry.stored, rows)

        self._engine.push(copy, [entry.variable], [variable], self._lane, priority, variable.name)
        return PullHandle(lambda: self._wait_for(entry, variable), place, lambda: version)


T = TypeVar("T")


class WorldStore(KVStore):
    """See `KVStore`; every rank of ``world`` must make it, and its keys."""

    def __init__(self, kind: str, world: World, engine: Engine, lane: str) -> None:
        super().__init__(kind, engine, lane)
        self._world = world
        self._compression: Compression | None = None
        world.closings.add(self._let_go)

    def _let_go(self) -> None:
        """The world is closed: whatever is called next fails at its first look at a key."""
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
        self._meet()  # with a push that failed, too: others wait
        self.wait()

    def _meet(self) -> None:
        """Wait until all workers have come here, with no push of theirs under way."""
        self._world.barrier()

    def init(self, key: Any, value: Any) -> None:
        """See `KVStore.init`."""
        with self._world.meeting():
            super().init(key, value)

    def assign(self, key: Any, value: Any) -> None:
        """See `KVStore.assign`."""
        with self._world.meeting():
            super().assign(key, value)

    def set_gradient_compression(self, settings: Settings) -> None:
        """See `KVStore.set_gradient_compression`."""
        with self._world.meeting():
            super().set_gradient_compression(settings)

    def set_updater(self, updater: Function) -> None:
        """See `KVStore.set_updater`."""
        require_same(self._world.comm, "set_updater", [name_of(updater)], "pass the same function on all ranks")
        super().set_updater(updater)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """See `KVStore.set_optimizer`."""
        self._agreed(lambda: require_optimizer("set_optimizer", optimizer))
        said = f"optimizer {optimizer.config()}"
        require_same(self._world.comm, "set_optimizer", [said], "pass the same on all ranks")
        super().set_optimizer(optimizer)

    def _check_new(self, values: dict[Key, Array]) -> None:
        """Refuse keys that ranks do not make alike, or cannot share; on all of them."""
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
        """Refuse keys that ranks do not assign alike, on all of them; when it returns all have come."""
        items = [f"key {key!r}" for key in values]
        require_same(self._world.comm, "assign", items, "assign the same keys in the same order on all ranks")

    def _agreed(self, check: Callable[[], T]) -> T:
        return on_every_rank(self._world.comm, check)

    def _by_first(self, write: Callable[[], None]) -> None:
        on_rank_0(self._world.comm, write)
