"""The trainer on a key-value store: parameters are keys, gradients are pushed, and new values are pulled.

Source: Gluon's Trainer, for what ``update_on_kvstore`` means; Li et al., "Scaling distributed machine learning with the
parameter server", 2014.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import autograd
from ..comm import World, init
from ..comm.consistency import on_every_rank, on_rank_0
from ..comm.shared_memory import LINE_NUMBERS
from ..comm.tasks import ProgressEngine
from ..comm.watchdog import WatchedBarrier
from ..compression import Compression, Settings
from ..core.arrays import Array, array_namespace, from_host, is_half, on_device_of, to_host
from ..core.environment import launched_ranks
from ..core.state import FitsSaved, Part, Saved, Sharded, require_state, take, unquoted
from ..data_parallel.buckets import Parameter
from ..data_parallel.overlap import CommunicationLane
from ..data_parallel.policy import Policy, Unwritten, checked_policy, first_scale, is_dynamic, stale, stale_anywhere
from ..data_parallel.profiling import CommunicationStats
from ..data_parallel.reducer import StepSync
from ..data_parallel.sharded_update import changing, moved, moved_anywhere, places_of, rule_at
from ..data_parallel.trainer import (
    BaseTrainer,
    MeanLosses,
    checked_count,
    completed,
    may_wait,
    require_alike,
    require_same_parameters,
    require_same_settings,
    require_whole,
    show_to_profiler,
    trained,
    unfinished,
)
from ..errors import ConfigError, StaleGradientError
from ..optim import Optimizer, require_by_elements
from . import KINDS, KVStore, create
from .arguments import Key, PendingPull
from .asynchronous import AsyncStore
from .store_state import States, read_states, write_states


def place_of(param: Any) -> Any:
    """Where a new value goes: to the parameter, where that can wait for it."""
    return param if hasattr(param, "data_hook") else param.data


def places_in_turn(arrays: Sequence[Array]) -> list[Array]:
    """For each array another one of its kind; those of a dtype share their memory, since a push leaves with a copy."""
    longest: dict[Any, Array] = {}
    for each in sorted(arrays, key=lambda array: array.size):
        longest[each.dtype] = each
    flat = {}
    for dtype, each in longest.items():
        with on_device_of(each):
            flat[dtype] = array_namespace(each).empty(each.size, dtype)
    return [flat[each.dtype][: each.size].reshape(each.shape) for each in arrays]


_BY_KEY = ("values", "states", "updates", "residuals")
"""What a store's state has by key."""


def _with_keys(store: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """The state of a store with other keys, where ``keys`` has some: numbers of parameters, or their names."""
    return {
        name: {keys.get(key, key): value for key, value in part.items()} if name in _BY_KEY else part
        for name, part in store.items()
    }


def _members(form: Any) -> dict[Any, Any]:
    return dict(form["dict"]) if isinstance(form, dict) and "dict" in form else {}


def _require_order(names: list[str], saved: Saved) -> None:
    last = [unquoted(name.rpartition("/")[2]) for name in saved.names]
    then = [name for name in last if name in names]
    now = [name for name in names if name in then]
    if len(set(then)) == len(then) and then != now:
        odd = next(number for number, name in enumerate(now) if then[number] != name)
        raise ConfigError(
            "restore", where="store", expected="parameters in the order of the checkpoint, whose store has no names",
            got=f"{now[odd]} before {then[odd]}",
            remedy="restore into the network as it was, and save again: stores of trainers have names since",
        )  # fmt: skip


FOR_BUCKETS = {
    "owner": "auto",
    "bucket_cap_mb": None,
    "clip_norm": None,
    "overlap": None,
    "reproducible": False,
    "virtual_shards": None,
}
"""What a store has no use for, and what stands for "not said"."""


def check_settings(kind: object, update_on_kvstore: bool | None, policy: Policy, for_buckets: dict[str, Any]) -> None:
    """Raises `ConfigError` where a store of this kind cannot do what a Trainer is asked for."""
    if not isinstance(kind, str) or kind not in KINDS:
        expected = f"a KVStore or one of {', '.join(KINDS)}"
        raise ConfigError("Trainer", where="kvstore", expected=expected, got=repr(kind))
    if update_on_kvstore is not None and not isinstance(update_on_kvstore, bool):
        raise ConfigError(
            "Trainer", where="update_on_kvstore", expected="True, False or None", got=repr(update_on_kvstore)
        )
    if update_on_kvstore is False and kind == "dist_async":
        raise ConfigError(
            "Trainer", where="update_on_kvstore", expected="True with dist_async", got="False",
            remedy="leave it out, or take dist_sync: pushes that do not wait for each other have no sum",
        )  # fmt: skip
    if policy.nonfinite != "ignore":
        raise ConfigError(
            "Trainer", where="policy", expected="nonfinite='ignore' with a kvstore", got=repr(policy.nonfinite),
            remedy="leave kvstore out: a store does not look at what is pushed",
        )  # fmt: skip
    for name, value in for_buckets.items():
        unsaid = FOR_BUCKETS[name]
        if type(value) is not type(unsaid) or value != unsaid:
            raise ConfigError(
                "Trainer", where=name, expected=f"{unsaid!r} with a kvstore", got=repr(value),
                remedy="leave it out, or train without a kvstore",
            )  # fmt: skip


def check_precision(params: Sequence[Parameter], loss_scale: object) -> None:
    """Raises `ConfigError` for what needs float32 copies of parameters or a look at sums, which stores have not."""
    remedy = "train without a kvstore"
    half = next((param for param in params if is_half(param.data)), None)
    if half is not None:
        raise ConfigError("Trainer", where=half.name, expected="float32 or float64 with a kvstore",
                          got=half.data.dtype, remedy=remedy)  # fmt: skip
    if is_dynamic(loss_scale):
        raise ConfigError("Trainer", where="loss_scale", expected="a number with a kvstore", got=repr(loss_scale),
                          remedy=remedy)  # fmt: skip


def check_apart(params: Sequence[Parameter]) -> None:
    """Raises `ConfigError` for layers of all ranks, where ranks do not step together."""
    joint = next((param for param in params if getattr(param, "is_joint", False)), None)
    if joint is not None:
        raise ConfigError(
            "Trainer", where=joint.name, expected="layers of this rank alone with dist_async, whose ranks do not wait",
            got="one of all ranks, as SyncBatchNorm", remedy="take nn.BatchNorm, or dist_sync",
        )  # fmt: skip


def check_unused(store: KVStore, world: World | None) -> None:
    """Raises `ConfigError` for a store that others use, or of other ranks than ``world``."""
    if world is not None and (store.rank, store.num_workers) != (world.rank, world.size):
        expected = f"a store of the same world: rank {world.rank} of {world.size}"
        got = f"rank {store.rank} of {store.num_workers}"
        raise ConfigError("Trainer", where="kvstore", expected=expected, got=got)
    if store.keys or store.has_updater:
        got = f"keys {store.keys[:3]!r}" if store.keys else "one with an updater"
        raise ConfigError(
            "Trainer", where="kvstore", expected="a store without keys and updater", got=got,
            remedy="make one for each Trainer; it calls set_optimizer itself",
        )  # fmt: skip


class StoreTrainer(BaseTrainer, FitsSaved):
    """See `hpcdp.Trainer`: the trainer that it makes with a ``kvstore``. Every rank of a ``dist`` store must make it.

    Where the store updates, `step` returns when gradients are on their way, and whoever reads a parameter waits for its
    new value. Gradients are divided before they are pushed: by the global count, which the ranks of a synchronous store
    exchange. Those of ``dist_async`` exchange nothing: each divides by its own count and the number of workers, so that
    one push of each weighs as much as one global batch.
    """

    @may_wait
    def __init__(
        self,
        params: Sequence[Parameter],
        optimizer: Optimizer,
        world: World | None = None,
        *,
        kvstore: str | KVStore,
        update_on_kvstore: bool | None = None,
        compression: Settings = None,
        policy: Policy | None = None,
        loss_scale: float | str = 1.0,
        **for_buckets: Any,
    ) -> None:
        autograd.waitall()  # earlier calls are to have the values of this rank
        self._params = trained(params, world)
        self.names = [param.name for param in self._params]
        """Of the parameters, in their order; the same ones may be called otherwise later, as those of a part."""
        self.optimizer = optimizer
        self.stats = CommunicationStats()
        self.policy = checked_policy(policy)
        self.compression = Compression.of(compression)
        self.update_on_kvstore = update_on_kvstore is not False
        """Whether the store updates; else every rank does."""
        kind = _kind_of(kvstore)
        check_settings(kind, update_on_kvstore, self.policy, for_buckets)
        check_precision(self._params, loss_scale)
        self.loss_scale = first_scale(loss_scale)
        require_by_elements("Trainer", optimizer)
        require_whole("Trainer", self._params, "train without a kvstore")
        self.world: World | None = world
        """The ranks; None where a store of one process was made without."""
        if KINDS[kind].scope == "world":
            self.world = init() if world is None else world
            settings = f"kvstore {kind}, {self.update_on_kvstore=}, {self.policy}, compression {self.compression}"
            require_alike(self.world, self._params, optimizer, [settings])
        elif (size := launched_ranks() or 1 if world is None else world.size) > 1:
            raise ConfigError("Trainer", where="kvstore", expected=f"a dist store on {size} ranks", got=kind)
        if kind == "dist_async":
            check_apart(self._params)
        show_to_profiler(self._params, self.world)
        self.store = kvstore if isinstance(kvstore, KVStore) else create(kind, self.world)
        """Keys 0, 1, 2, ... are the parameters, in their order."""
        check_unused(self.store, self.world)
        self.steps_together = kind != "dist_async"
        self._by_name = dict(zip(self.names, self._params, strict=True))
        self._closing: StepSync | None = None
        num_together = 1 if self.world is None or not self.steps_together else self.world.size
        self._unwritten = Unwritten(self.policy, self._by_name, self.store.rank, num_together)
        if self.world is not None and self.steps_together:
            self._closing = _closing(self.world, self._unwritten.length)
        self._written: set[str] = set()
        self._means = MeanLosses(warns=self.store.rank == 0)
        self._left_alone: Set[str] = frozenset()
        """Parameters that this step does not update: no rank has used them."""
        self.passed_over: dict[str, int] = {}
        """Where every rank updates: in how many steps a parameter was left alone, by name."""
        self._holds_sums = False
        self._syncing, self._held_count = True, 0
        self._overwriting: set[str] | None = None
        """While gradients accumulate: the parameters whose gradients backward otherwise overwrites."""
        self._known_steps = 0
        """Updates of all ranks until they have last met, where they do not step together."""
        for name, param in zip(self.names, self._params, strict=True):
            xp = array_namespace(param.data)
            param.data = xp.array(param.data, order="C")  # an array of its own: an earlier trainer's may be shared
            param.grad = xp.zeros_like(param.data)
            param.grad_hook = partial(self._mark_written, name)
        self._nbytes = sum(param.data.nbytes for param in self._params)
        if self.compression is not None:
            self.store.set_gradient_compression(self.compression)
        self.store.key_names = dict(enumerate(self.names))
        self.store.init(self._keys, [param.data for param in self._params])
        self.states: list[dict[str, Any]] = []
        """Of each parameter, flat, by name, where every rank updates."""
        if self.update_on_kvstore:
            self.store.set_optimizer(optimizer)
            self._scaled = places_in_turn([param.grad for param in self._params])
        else:
            self.states = [optimizer.init_state(param.data.reshape(-1)) for param in self._params]
        self._pull_first()
        self._places = places_of(self._params)
        if self.world is not None:
            self.world.endings.add(self._take_last_values)
            self.world.closings.add(self._let_go)

    def _take_last_values(self) -> None:
        with suppress(Exception):  # whoever reads the parameter gets it
            self._await_values()

    def _let_go(self) -> None:
        for hooked in self._params:
            param: Any = hooked
            param.grad_hook = None
            if isinstance(getattr(param, "data_hook", None), PendingPull):
                param.data_hook = None
        assert self.world is not None
        vars(self).update(store=self.world.comm, _closing=self.world.comm)

    @staticmethod
    def ranks(world: World | None, options: dict[str, Any]) -> World | None:
        """See `BaseTrainer.ranks`."""
        kind = _kind_of(options["kvstore"])
        is_alone = isinstance(kind, str) and kind in KINDS and KINDS[kind].scope != "world"
        return None if is_alone else init() if world is None else world

    def check_options(self, options: dict[str, Any]) -> None:
        kind, policy = _kind_of(options["kvstore"]), checked_policy(options.get("policy"))
        for_buckets = {name: value for name, value in options.items() if name in FOR_BUCKETS}
        update = options.get("update_on_kvstore")
        check_settings(kind, update, policy, for_buckets)
        Compression.of(options.get("compression"))
        self.steps_together = kind != "dist_async"

    @property
    def _keys(self) -> list[int]:
        return list(range(len(self._params)))

    @property
    def nbytes(self) -> dict[str, int]:
        """See `BaseTrainer.nbytes`; the store has as much again for its values, and for what is pushed."""
        found = {"parameters": self._nbytes, "gradients": self._nbytes}
        if not self.update_on_kvstore:
            found["state"] = sum(array.nbytes for state in self.states for array in state.values())
        return found

    def step(self, count: int) -> int:
        """See `BaseTrainer.step`."""
        count = checked_count("step", count)
        if not self.steps_together:
            check_apart(self._params)
        self._settle("step")
        self._warn_of_mean_losses("step", count)
        if not self._syncing:
            self._held_count += count
            return self._held_count
        if count:
            self._refuse_sums("step")
        began_ns = time.perf_counter_ns()
        total = self._close_step(count)
        try:
            if total and self.update_on_kvstore:
                self.step_count += 1
                self._push_and_pull(total)
            elif total:
                self._sum()
                self._update(total)
        finally:
            self._begin_step()
        self._account(began_ns)
        return total

    def allreduce_grads(self) -> None:
        """See `BaseTrainer.allreduce_grads`."""
        self._settle("allreduce_grads")
        self._refuse_if_store_updates("allreduce_grads")
        self._refuse_sums("allreduce_grads")
        began_ns = time.perf_counter_ns()
        self._close_step(1 if self._written else 0)
        self._sum()
        self._holds_sums = True
        self._account(began_ns)

    def update(self, count: int) -> int:
        """See `BaseTrainer.update`."""
        self._settle("update")
        self._refuse_if_store_updates("update")
        if not self._holds_sums:
            raise StaleGradientError(
                "update", expected="gradients that allreduce_grads() has summed", got="gradients of this rank alone"
            )
        total = checked_count("update", count) + self._held_count
        self._warn_of_mean_losses("update", count)
        if self._closing is not None and self.world is not None:
            total = int(self._tally("update", self._closing, self.world, [total])[0])
        try:
            if total:
                self._update(total)
        finally:
            self._begin_step()
        return total

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `BaseTrainer.no_sync`."""
        self._refuse_sums("no_sync")
        if self._overwriting is None:
            self._fill_unwritten_with_zeros()
            self._overwriting = set()
        for name, param in self._by_name.items():
            if param.grad_req == "write":
                self._overwriting.add(name)
                param.grad_req = "add"
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def synchronize(self) -> None:
        """See `BaseTrainer.synchronize`."""
        self._settle("synchronize")
        began_ns = time.perf_counter_ns()
        self.store.barrier()
        if self.update_on_kvstore:  # else it holds sums of gradients
            self._pull()
            self._await_values()
            self.store.barrier()
        if self.world is not None and not self.steps_together:
            of_all = self.world.comm.allgather_json(self.step_count - self._known_steps)
            self._known_steps += sum(of_all)
            self.step_count = self._known_steps
        self.stats.waited(began_ns, time.perf_counter_ns())

    def statistics(self) -> dict[str, float]:
        """See `BaseTrainer.statistics`."""
        if self.world is None or not isinstance(self.store, AsyncStore):
            return {}
        found = self.world.comm.allgather_json(self.store.statistics())
        pushes = sum(each["pushes"] for each in found)
        return {
            "staleness_mean": sum(each["staleness_mean"] * each["pushes"] for each in found) / max(1, pushes),
            "staleness_max": max(each["staleness_max"] for each in found),
            "waited_s": sum(each["waited_s"] for each in found) / len(found),
            "sent_nbytes": sum(each["sent_nbytes"] for each in found),
        }

    def take_parameters(self) -> None:
        """See `BaseTrainer.take_parameters`."""
        if self.update_on_kvstore:
            self.store.assign(self._keys, [param.data for param in self._params])
            self._pull_first()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if not self.steps_together:
            self.synchronize()  # rank 0's values may be older than pushes of others, which would be lost
        with changing(places_of(self._params), self._comm, writes=True):
            yield

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients that a later update will use."""
        return self._holds_sums or self._held_count > 0 or self._overwriting is not None

    def state_dict(self) -> dict[str, Any]:
        """See `BaseTrainer.state_dict`; where ranks do not step together they wait for each other."""
        self._refuse_unfinished("state_dict")
        if not self.steps_together:
            self.synchronize()
        state: dict[str, Any] = {
            "step_count": self.step_count,
            "loss_scale": self.loss_scale,
            "num_nonfinite": self.num_nonfinite,
        }
        if self._needs_store:
            state["store"] = _with_keys(self.store.state_dict(), dict(enumerate(self.names)))
        if not self.update_on_kvstore:
            optimizer = json.dumps(self.optimizer.config())
            state |= {"optimizer": optimizer, "states": self._own_states(), "passed_over": dict(self.passed_over)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `BaseTrainer.load_state_dict`; of a store that updates, parameters become the values that it had."""
        self._settle("load_state_dict")
        self._refuse_unfinished("load_state_dict")
        require_state("a Trainer", state, "step_count", "loss_scale", "num_nonfinite")
        needed = ["store"] * self._needs_store + ["states"] * (not self.update_on_kvstore)
        if any(name not in state for name in needed):
            raise ConfigError(
                "load_state_dict", where="update_on_kvstore", expected=f"a state with {' and '.join(needed)}",
                got=f"one with {', '.join(state)}", remedy="make the Trainer as it was then",
            )  # fmt: skip
        if not self.update_on_kvstore:
            mine = self._own_states()
            require_same_parameters(mine, state["states"])
            self.optimizer.take_config(json.loads(state["optimizer"]))
            for name, states in mine.items():
                for key, own in states.items():
                    take(f"{name}/{key}", own, state["states"][name][key])
            self.passed_over = dict(state.get("passed_over", {}))
        if self._needs_store:
            numbers = {name: number for number, name in enumerate(self.names)}
            self.store.load_state_dict(_with_keys(state["store"], numbers))
        self.step_count = self._known_steps = state["step_count"]
        self.loss_scale = state["loss_scale"]
        self.num_nonfinite = state["num_nonfinite"]
        if self.update_on_kvstore:
            self._pull()
            self._await_values()
            self.store.barrier()  # nobody pushes before all have them

    def fitted(self, form: Any, saved: Saved) -> Any:
        """See `FitsSaved.fitted`: version 0.1.0 saved the numbers of parameters in the place of their names.

        Where every rank updates, it saved no updates that were passed over.

        Raises:
            ConfigError: the network in the same checkpoint has its parameters in another order.
        """
        members = _members(form)
        if "states" in members:
            form = completed(form, {"passed_over": {"dict": []}})
            members = _members(form)
        store = _members(members.get("store"))
        parts = {name: _members(store[name]) for name in _BY_KEY if name in store}
        if not parts or any(type(key) is not int for part in parts.values() for key in part):
            return form
        _require_order(self.names, saved)
        names = dict(enumerate(self.names))
        renamed = {
            name: {"dict": [[names.get(key, key), node] for key, node in part.items()]} for name, part in parts.items()
        }
        members["store"] = {"dict": [[*item] for item in (store | renamed).items()]}
        return {"dict": [[*item] for item in members.items()]}

    def save_states(self, path: str | Path) -> None:
        """See `BaseTrainer.save_states`.

        The file is that of the store, whoever updates (see `kvstore.store_state`): its keys are the numbers of the
        parameters, with their names beside.
        """
        if self.update_on_kvstore:
            self.store.save_optimizer_states(str(path))
            return
        steps: dict[Key, int] = {}
        states: States = {}
        if self.step_count:
            for key, (param, state) in enumerate(zip(self._params, self.states, strict=True)):
                steps[key] = self.step_count - self.passed_over.get(self.names[key], 0)
                states |= {(key, name): to_host(array).reshape(param.data.shape) for name, array in state.items()}
        write = partial(write_states, Path(path), self.optimizer, steps, states, self.store.key_names)
        write() if self.world is None else on_rank_0(self.world.comm, write)

    def load_states(self, path: str | Path) -> None:
        """See `BaseTrainer.load_states`; with ``update_on_kvstore`` or without, and on any kind of store."""
        shapes: dict[Key, tuple[int, ...]] = {key: tuple(param.data.shape) for key, param in enumerate(self._params)}
        read = partial(read_states, Path(path), self.optimizer, shapes, self.store.key_names)
        steps, states = read() if self.world is None else on_every_rank(self.world.comm, read)
        if self.update_on_kvstore:
            self.store.load_optimizer_states(str(path))
        else:
            for key, state in enumerate(self.states):
                for name, place in state.items():
                    place[...] = from_host(states[key, name].reshape(-1), place) if key in steps else 0
        self.step_count = self._known_steps = max(steps.values(), default=0)
        own = {name: steps.get(key, 0) for key, name in enumerate(self.names)}
        self.passed_over = {
            name: self.step_count - updates for name, updates in own.items() if updates < self.step_count
        }

    @property
    def _needs_store(self) -> bool:
        """Whether training goes on from something of the store: values that it updates, or what it has not sent."""
        return self.update_on_kvstore or self.compression is not None

    def _own_states(self) -> dict[str, dict[str, Sharded]]:
        """Return the optimizer's state by parameter and name, where every rank updates, and so has all of it."""
        copies, copy = (1, 0) if self.world is None else (self.world.size, self.world.rank)
        return {
            name: {
                key: Sharded(tuple(param.data.shape), np.dtype(array.dtype), [Part(0, array)], copies, copy)
                for key, array in state.items()
            }
            for (name, param), state in zip(self._by_name.items(), self.states, strict=True)
            if state
        }

    def _refuse_unfinished(self, operation: str) -> None:
        """Refuse what would lose gradients; every rank must call."""

        def check() -> None:
            if self.holds_gradients:
                raise unfinished(operation)

        check() if self.world is None else on_every_rank(self.world.comm, check)

    def _mark_written(self, name: str, param: Parameter) -> None:
        if self._holds_sums:
            raise StaleGradientError(
                "backward", where=name, expected="one backward before each step()", got="another one",
                remedy="call update(count), or step(0) to drop what allreduce_grads() has summed",
            )  # fmt: skip
        self._written.add(name)
        if self._means is not None:
            self._means.note()

    def _refuse_if_store_updates(self, operation: str) -> None:
        if self.update_on_kvstore:
            raise ConfigError(
                operation, expected="a store that only sums", got="one that updates",
                remedy="call step(count), or make the Trainer with update_on_kvstore=False",
            )  # fmt: skip

    def _refuse_sums(self, operation: str) -> None:
        if self._holds_sums:
            raise StaleGradientError(
                operation, expected="gradients of this rank", got="those that allreduce_grads() has summed",
                remedy="call update(count), or step(0) to drop them",
            )  # fmt: skip

    def _close_step(self, count: int) -> int:
        """Refuse gradients that are missing; the count of the step, where ranks step together of all of them."""
        count += self._held_count
        missing = [name for name in self.names if name not in self._written]
        refused, lost = self._unwritten.refused(missing) if count else [], moved(self._places)
        num_users: Sequence[float] | None = None
        if self._closing is not None and self.world is not None:
            numbers = [count, bool(refused or lost), *self._unwritten.numbers(missing)]
            total, num_stale, *num_users = self._tally("step", self._closing, self.world, numbers, missing)
            count = int(total)
            if num_stale:
                self._begin_step()
                raise moved_anywhere(self.world.comm, lost) or stale_anywhere(self.world.comm, refused)
        elif refused or lost:
            self._begin_step()
            raise moved_anywhere(None, lost) or stale(self.store.rank, refused)
        self._left_alone = self._unwritten.left_alone(missing, num_users)
        self._fill_unwritten_with_zeros()
        return count

    def _tally(
        self,
        operation: str,
        closing: StepSync,
        world: World,
        numbers: Sequence[float],
        missing: Sequence[str] = (),
    ) -> list[float]:
        """The sums of ``numbers`` over all ranks, which must have the same settings, and frozen parameters, now."""
        settings = self.optimizer.learning_rate(self.step_count + 1), self.loss_scale
        sums, alike = closing.tally_alike((*settings, self._unwritten.mark(missing)), *numbers)
        if not alike:
            self._begin_step()
            require_same_settings(world.comm, operation, *settings)
            self._unwritten.require_same_frozen(world.comm, operation, missing)
        return sums

    def _fill_unwritten_with_zeros(self) -> None:
        for name, param in self._by_name.items():
            if name not in self._written:
                param.grad[...] = 0

    def _push_and_pull(self, total: int) -> None:
        weight = total if self.steps_together else total * self.store.num_workers
        scale = 1.0 / (weight * self.loss_scale)
        for key, (name, param) in enumerate(self._by_name.items()):
            if name in self._left_alone:
                self._pass_over(key, param)
                continue
            scaled = self._scaled[key]
            with on_device_of(scaled):
                array_namespace(scaled).multiply(param.grad, scale, out=scaled)
            self.store.pushpull(key, scaled, out=place_of(param), priority=-key)
            self._time(param)

    def _pass_over(self, key: int, param: Parameter) -> None:
        """Push nothing for a parameter: a push of zero would move it by momentum and weight decay."""
        if isinstance(self.store, AsyncStore):
            self.store.pass_over(key)
            self._pull_one(key, param)  # others may have pushed

    def _pull(self) -> None:
        for key, param in enumerate(self._params):
            self._pull_one(key, param)

    def _pull_one(self, key: int, param: Parameter) -> None:
        self.store.pull(key, out=place_of(param), priority=-key)
        self._time(param)

    def _pull_first(self) -> None:
        self._pull()
        if not self.steps_together:
            self._await_values()
            self.store.barrier()  # nobody pushes before all have the first values

    def _await_values(self) -> None:
        for param in self._params:
            _ = param.data  # who reads it waits

    def _time(self, param: Any) -> None:
        """Count for how long somebody waits for the new value of ``param``."""
        hook = getattr(param, "data_hook", None)
        if isinstance(hook, PendingPull):
            hook.waited = self.stats.waited

    def _sum(self) -> None:
        """Make gradients the sums over all ranks."""
        keys = [key for key, name in enumerate(self.names) if name not in self._left_alone]
        if keys:
            self.store.pushpull(keys, [self._params[key].grad for key in keys])

    def _update(self, total: int) -> None:
        """Update on this rank, from gradients that are summed."""
        self.step_count += 1
        scale = 1.0 / (total * self.loss_scale)
        for (name, param), state in zip(self._by_name.items(), self.states, strict=True):
            if name in self._left_alone:
                self.passed_over[name] = self.passed_over.get(name, 0) + 1
                continue
            flat, grad = param.data.reshape(-1), param.grad.reshape(-1)
            rule, own_step = rule_at(self.optimizer, self.step_count, self.passed_over.get(name, 0))
            rule.update(flat, grad, state, step=own_step, scale=scale)

    def _begin_step(self) -> None:
        self._written = set()
        self._holds_sums, self._held_count = False, 0
        if self._overwriting is not None:
            for name in self._overwriting:
                if self._by_name[name].grad_req == "add":
                    self._by_name[name].grad_req = "write"
            self._overwriting = None

    def _account(self, began_ns: int) -> None:
        self.stats.steps += 1
        self.stats.waited(began_ns, time.perf_counter_ns())


def _kind_of(kvstore: str | KVStore) -> str:
    return kvstore.kind if isinstance(kvstore, KVStore) else kvstore


def _closing(world: World, more_numbers: int) -> StepSync:
    """What the ranks' steps end with, of a few numbers and ``more_numbers``; every rank must call."""
    serial = world.kept["number of store trainers"] = world.kept.get("number of store trainers", 0) + 1
    name = f"steps of store trainer {serial}"
    signature = zlib.crc32(name.encode())
    gate = WatchedBarrier(world.node_memory, ProgressEngine.of(world).watchdog, LINE_NUMBERS + more_numbers)
    if world.node_memory.size == world.size:
        return StepSync(world, None, gate, None, signature, name)
    comm = world.keep(("reducers", id(world.comm)), world.comm.duplicate)
    comm.users.add(signature % comm.signatures)
    world.barrier()  # before any rank sends what another would take for a mistake
    return StepSync(world, comm, gate, CommunicationLane.of(world), signature, name)
