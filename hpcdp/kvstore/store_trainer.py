"""The trainer on a key-value store: parameters are keys, gradients are pushed, and new values are pulled.

Source: Gluon's Trainer for the meaning of ``update_on_kvstore``; Li et al., "Scaling distributed machine learning with
the parameter server", 2014.
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
from ..comm.progress import ProgressEngine
from ..comm.shared_memory import LINE_NUMBERS
from ..comm.watchdog import WatchedBarrier
from ..compression import Compression, Settings
from ..core import files
from ..core.arrays import Array, array_namespace, is_half, on_device_of
from ..core.checks import instance, one_of
from ..core.environment import launched_ranks
from ..core.state import FitsSaved, Part, Saved, Sharded, require_state, unquoted
from ..data_parallel.base_trainer import (
    BaseTrainer,
    MeanLosses,
    completed,
    may_wait,
    members_of,
    require_alike,
    require_same_parameters,
    require_same_settings,
    require_whole,
    show_to_profiler,
    trained,
    unfinished,
)
from ..data_parallel.bucket_layout import Accumulation, ParameterLike
from ..data_parallel.gradient_policy import Policy, Unwritten, checked_policy, stale, stale_anywhere
from ..data_parallel.loss_scaling import first_scale, is_dynamic
from ..data_parallel.overlap import CommunicationLane, CommunicationStats
from ..data_parallel.reducer import StepSync, shared_comms
from ..data_parallel.sharded_update import changing, moved, moved_anywhere, places_of, rule_at
from ..data_parallel.trainer_state import FILE_HEADER, RESIDUAL, read_states, take_states
from ..errors import ConfigError, StaleGradientError, warn
from ..optim import Optimizer, require_by_elements
from . import KINDS, KVStore, create
from .arguments import Key, PendingPull, can_wait
from .asynchronous import AsyncStore
from .updaters import is_store_file, read_key_states


def pull_target(param: Any) -> Any:
    """Return the target of a pull: the parameter where its readers can wait, else its array."""
    return param if can_wait(param) else param.data


def scratch_like(arrays: Sequence[Array]) -> list[Array]:
    """Return an array like each of ``arrays``; those of one dtype share memory, because a push copies its value."""
    longest: dict[Any, Array] = {}
    for array in sorted(arrays, key=lambda array: array.size):
        longest[array.dtype] = array
    flat = {}
    for dtype, array in longest.items():
        with on_device_of(array):
            flat[dtype] = array_namespace(array).empty(array.size, dtype)
    return [flat[array.dtype][: array.size].reshape(array.shape) for array in arrays]


_BY_KEY = ("values", "states", "updates", "residuals")
"""Entries of a store's state that are dicts by key."""


def _with_keys(store: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """Rename the keys of a store's state by ``keys``, from parameter numbers to names or back."""
    return {
        name: {keys.get(key, key): value for key, value in part.items()} if name in _BY_KEY else part
        for name, part in store.items()
    }


def _require_order(names: list[str], saved: Saved) -> None:
    saved_names = [unquoted(name.rpartition("/")[2]) for name in saved.names]
    then = [name for name in saved_names if name in names]
    now = [name for name in names if name in then]
    if len(set(then)) == len(then) and then != now:
        first = next(number for number, name in enumerate(now) if then[number] != name)
        raise ConfigError(
            "restore", where="store", expected="parameters in the order of the checkpoint, whose store has no names",
            got=f"{now[first]} before {then[first]}",
            remedy="restore into the network with its former order and save a new checkpoint, which records names",
        )  # fmt: skip


FOR_BUCKETS = {
    "owner": "auto",
    "bucket_cap_mb": None,
    "clip_norm": None,
    "overlap": None,
    "reproducible": False,
    "virtual_shards": None,
}
"""Options of `Trainer` that a store does not support, with their defaults."""


def check_settings(kind: object, update_on_kvstore: bool | None, policy: Policy, for_buckets: dict[str, Any]) -> None:
    """Raise `ConfigError` for options of `Trainer` that a store of this kind does not support."""
    one_of("Trainer", "kvstore", kind, KINDS, expected=f"a KVStore or one of {', '.join(KINDS)}")
    if update_on_kvstore is not None:
        instance("Trainer", "update_on_kvstore", update_on_kvstore, bool, "True, False or None")
    if update_on_kvstore is False and kind == "dist_async":
        raise ConfigError(
            "Trainer", where="update_on_kvstore", expected="True with dist_async", got="False",
            remedy="leave it out, or use dist_sync: asynchronous pushes have no sum",
        )  # fmt: skip
    if policy.nonfinite != "ignore":
        raise ConfigError(
            "Trainer", where="policy", expected="nonfinite='ignore' with a kvstore", got=repr(policy.nonfinite),
            remedy="leave kvstore out: a store does not check pushed gradients",
        )  # fmt: skip
    for name, value in for_buckets.items():
        default = FOR_BUCKETS[name]
        if type(value) is not type(default) or value != default:
            raise ConfigError(
                "Trainer", where=name, expected=f"{default!r} with a kvstore", got=repr(value),
                remedy="leave it out, or train without a kvstore",
            )  # fmt: skip


def check_precision(params: Sequence[ParameterLike], loss_scale: object) -> None:
    """Raise `ConfigError` for 16-bit parameters and a dynamic loss scale.

    Stores keep no float32 copies of parameters, and do not check sums of gradients.
    """
    remedy = "train without a kvstore"
    half = next((param for param in params if is_half(param.data)), None)
    if half is not None:
        raise ConfigError("Trainer", where=half.name, expected="float32 or float64 with a kvstore",
                          got=half.data.dtype, remedy=remedy)  # fmt: skip
    if is_dynamic(loss_scale):
        raise ConfigError("Trainer", where="loss_scale", expected="a number with a kvstore", got=repr(loss_scale),
                          remedy=remedy)  # fmt: skip


def check_apart(params: Sequence[ParameterLike]) -> None:
    """Raise `ConfigError` for layers that synchronize ranks, for ``dist_async``, whose ranks do not step together."""
    joint = next((param for param in params if getattr(param, "is_joint", False)), None)
    if joint is not None:
        raise ConfigError(
            "Trainer", where=joint.name, expected="layers without communication with dist_async",
            got="a layer of all ranks, such as SyncBatchNorm", remedy="use nn.BatchNorm, or dist_sync",
        )  # fmt: skip


def check_unused(store: KVStore, world: World | None) -> None:
    """Raise `ConfigError` for a store with keys or an updater, or of other ranks than ``world``."""
    if world is not None and (store.rank, store.num_workers) != (world.rank, world.size):
        expected = f"a store of the same world: rank {world.rank} of {world.size}"
        got = f"rank {store.rank} of {store.num_workers}"
        raise ConfigError("Trainer", where="kvstore", expected=expected, got=got)
    if store.keys or store.has_updater:
        got = f"keys {store.keys[:3]!r}" if store.keys else "a store with an updater"
        raise ConfigError(
            "Trainer", where="kvstore", expected="a store without keys and updater", got=got,
            remedy="create a store for each Trainer, which calls set_optimizer itself",
        )  # fmt: skip


class StoreTrainer(BaseTrainer, FitsSaved):
    """The trainer that `hpcdp.Trainer` makes with a ``kvstore``; every rank of a ``dist`` store must make it.

    Where the store updates, `step` returns once the pushes are queued, and a reader of a parameter waits for its new
    value. Gradients are divided before they are pushed. The ranks of a synchronous store exchange their counts and
    divide by the global one. The ranks of ``dist_async`` exchange nothing: each divides by its own count and the number
    of workers, so that one push of each rank has the weight of one global batch.
    """

    @may_wait
    def __init__(
        self,
        params: Sequence[ParameterLike],
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
        autograd.waitall()  # calls under way must not read values of another rank
        self._params = trained(params, world)
        self.names = [param.name for param in self._params]
        """Names of the parameters at construction, in order: a parameter of a part of the network may be renamed."""
        self.optimizer = optimizer
        self.stats = CommunicationStats()
        self.policy = checked_policy(policy)
        self.compression = Compression.of(compression)
        self.update_on_kvstore = update_on_kvstore is not False
        """True if the store updates the parameters; otherwise every rank updates them."""
        kind = _kind_of(kvstore)
        check_settings(kind, update_on_kvstore, self.policy, for_buckets)
        check_precision(self._params, loss_scale)
        self.loss_scale = first_scale(loss_scale)
        require_by_elements("Trainer", optimizer)
        require_whole("Trainer", self._params, "train without a kvstore")
        self.world: World | None = world
        """The ranks; None for a store of one process that was made without a world."""
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
        """The store, whose keys 0, 1, 2, ... are the parameters in order."""
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
        """Parameters that this step does not update, because no rank has used them."""
        self.passed_over: dict[str, int] = {}
        """Number of steps that did not update a parameter, by name, where every rank updates."""
        self._holds_sums = False
        self._syncing, self._held_count = True, 0
        self._accumulation = Accumulation(self._by_name)
        self._known_steps = 0
        """Updates by all ranks up to the last `synchronize`, where ranks do not step together."""
        for name, param in zip(self.names, self._params, strict=True):
            xp = array_namespace(param.data)
            param.data = xp.array(param.data, order="C")  # a copy: an earlier trainer may share its array among ranks
            param.grad = xp.zeros_like(param.data)
            param.grad_hook = partial(self._mark_written, name)
        self._nbytes = sum(param.data.nbytes for param in self._params)
        if self.compression is not None:
            self.store.set_gradient_compression(self.compression)
        self.store.key_names = dict(enumerate(self.names))
        self.store.init(self._keys, [param.data for param in self._params])
        self.states: list[dict[str, Any]] = []
        """Flat optimizer states of each parameter by name, where every rank updates."""
        if self.update_on_kvstore:
            self.store.set_optimizer(optimizer)
            self._scaled = scratch_like([param.grad for param in self._params])
        else:
            self.states = [optimizer.init_state(param.data.reshape(-1)) for param in self._params]
        self._pull_first()
        self._places = places_of(self._params)
        if self.world is not None:
            self.world.endings.add(self._take_last_values)
            self.world.closings.add(self._let_go)

    def _take_last_values(self) -> None:
        with suppress(Exception):  # a reader of the parameter gets the error
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
        """See `BaseTrainer.check_options`."""
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
        """See `BaseTrainer.nbytes`; the store needs the same amounts for its values and for pushed gradients."""
        nbytes = {"parameters": self._nbytes, "gradients": self._nbytes}
        if not self.update_on_kvstore:
            nbytes["state"] = sum(array.nbytes for state in self.states for array in state.values())
        return nbytes

    def _step(self, count: int) -> int:
        if not self.steps_together:
            check_apart(self._params)
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

    def _sum_gradients(self) -> None:
        self._close_step(1 if self._written else 0)
        self._sum()
        self._holds_sums = True

    def _update_from_sums(self, held: int) -> int:
        total = held
        if self._closing is not None and self.world is not None:
            total = int(self._tally("update", self._closing, self.world, [held])[0])
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
        if not self._accumulation.is_on:
            self._fill_unwritten_with_zeros()
        self._accumulation.begin()
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
        by_rank = self.world.comm.allgather_json(self.store.statistics())
        pushes = sum(own["pushes"] for own in by_rank)
        return {
            "staleness_mean": sum(own["staleness_mean"] * own["pushes"] for own in by_rank) / max(1, pushes),
            "staleness_max": max(own["staleness_max"] for own in by_rank),
            "waited_s": sum(own["waited_s"] for own in by_rank) / len(by_rank),
            "sent_nbytes": sum(own["sent_nbytes"] for own in by_rank),
        }

    def take_parameters(self) -> None:
        """See `BaseTrainer.take_parameters`."""
        if self.update_on_kvstore:
            self.store.assign(self._keys, [param.data for param in self._params])
            self._pull_first()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if not self.steps_together:
            self.synchronize()  # rank 0 may hold values older than pushes of other ranks, which would be lost
        with changing(places_of(self._params), self._comm, writes=True):
            yield

    @property
    def holds_gradients(self) -> bool:
        """True while gradients wait for a later update."""
        return self._holds_sums or self._held_count > 0 or self._accumulation.is_on

    def state_dict(self) -> dict[str, Any]:
        """See `BaseTrainer.state_dict`; ranks of ``dist_async`` wait for each other."""
        self._refuse_unfinished("state_dict")
        return self._state()

    def _state(self) -> dict[str, Any]:
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
        """See `BaseTrainer.load_state_dict`; parameters become the saved values of a store that updates."""
        self._settle("load_state_dict")
        self._refuse_unfinished("load_state_dict")
        require_state("a Trainer", state, "step_count", "loss_scale", "num_nonfinite")
        needed = ["store"] * self._needs_store + ["states"] * (not self.update_on_kvstore)
        if any(name not in state for name in needed):
            raise ConfigError(
                "load_state_dict", where="update_on_kvstore", expected=f"a state with {' and '.join(needed)}",
                got=f"a state with {', '.join(state)}",
                remedy="make the Trainer with the update_on_kvstore and compression of the saved one",
            )  # fmt: skip
        if not self.update_on_kvstore:
            require_same_parameters(self._own_states(), state["states"])
            self.optimizer.take_config(json.loads(state["optimizer"]))
            take_states(self._own_states(), state["states"])
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
            self.store.barrier()  # no rank pushes before all have pulled

    def fitted(self, form: Any, saved: Saved) -> Any:
        """Return the form of a state of version 0.1.0 as of today; see `FitsSaved.fitted`.

        That version saved numbers of parameters instead of names, and no ``passed_over`` where every rank updates.

        Raises:
            ConfigError: the network in the same checkpoint has its parameters in another order.
        """
        members = members_of(form)
        if "states" in members:
            form = completed(form, {"passed_over": {"dict": []}})
            members = members_of(form)
        store = members_of(members.get("store"))
        parts = {name: members_of(store[name]) for name in _BY_KEY if name in store}
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

        The file has the format of `BucketTrainer.save_states`, for any kind of store and either place of the update, so
        that trainers with and without a store load each other's files.
        """
        state = self._state()
        if self.update_on_kvstore:
            states = state["store"]["states"]
            passed_over = self._passed_over(self.step_count, state["store"]["updates"])
        else:
            states, passed_over = state["states"], self.passed_over
        arrays: dict[str, np.ndarray] = {}
        for name, tensors in states.items():
            for key, tensor in tensors.items():
                array = self.store.whole(tensor)
                if self.store.rank == 0:
                    arrays[f"{name}/{key}"] = array
        header = {"version": 1, "step_count": self.step_count, "optimizer": self.optimizer.config()["name"]}
        if passed_over:
            header["passed_over"] = passed_over
        write = partial(files.write, "save_states", Path(path), FILE_HEADER, header, arrays)
        write() if self.world is None else on_rank_0(self.world.comm, write)

    def load_states(self, path: str | Path) -> None:
        """See `BaseTrainer.load_states`.

        A file of `KVStore.save_optimizer_states` loads, too: `save_states` of a trainer on a store wrote those earlier.
        """
        read = partial(self._read_states, Path(path))
        step_count, passed_over, states = read() if self.world is None else on_every_rank(self.world.comm, read)
        if self.update_on_kvstore:
            updates: dict[Key, int] = {}
            by_key: dict[Key, dict[str, np.ndarray]] = {}
            for key, name in enumerate(self.names):
                updates[key], by_key[key] = step_count - passed_over.get(name, 0), states[name]
            self.store.take_optimizer_states(by_key, updates)
        else:
            take_states(self._own_states(), states)
        self.step_count = self._known_steps = step_count
        self.passed_over = passed_over

    def _read_states(self, path: Path) -> tuple[int, dict[str, int], dict[str, dict[str, np.ndarray]]]:
        """Read a file of states: step count, passed-over updates by parameter, and states by parameter and name.

        Raises:
            DataError: the file is missing, damaged or of another model or optimizer.
        """
        rule = self.optimizer
        shapes = {name: tuple(param.data.shape) for name, param in self._by_name.items()}
        if is_store_file(path):
            by_key = dict[Key, tuple[int, ...]](enumerate(shapes.values()))
            updates, saved = read_key_states(path, rule, by_key, self.store.key_names)
            step_count = max(updates.values(), default=0)
            own_updates = {name: updates.get(key, 0) for key, name in enumerate(self.names)}
            states = {
                name: {
                    state: saved[key, state] if key in updates else np.zeros(shapes[name])
                    for state in rule.state_names()
                }
                for key, name in enumerate(self.names)
            }  # keys without updates are not in the file
            return step_count, self._passed_over(step_count, own_updates), states
        state_names = list(rule.state_names())
        header, arrays = read_states(path, rule.config()["name"], shapes, dict.fromkeys(shapes, state_names))
        unsent = [array for name, array in arrays.items() if name.endswith(f"/{RESIDUAL}")]
        if self.store.rank == 0 and any(residual.any() for residual in unsent):
            warn("load_states: drops the compression residuals of a trainer without a kvstore")
        by_name = {name: {state: arrays[f"{name}/{state}"] for state in state_names} for name in shapes}
        return header["step_count"], dict(header.get("passed_over", {})), by_name

    @staticmethod
    def _passed_over(step_count: int, updates: Mapping[str, int]) -> dict[str, int]:
        return {name: step_count - count for name, count in updates.items() if count < step_count}

    @property
    def _needs_store(self) -> bool:
        """True if the trainer's state includes the store's: values that it updates, or compression residuals."""
        return self.update_on_kvstore or self.compression is not None

    def _own_states(self) -> dict[str, dict[str, Sharded]]:
        """Return the optimizer's state by parameter and name, where every rank updates and holds all of it."""
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
        """Raise `StaleGradientError` where gradients would be lost; every rank must call."""

        def check() -> None:
            if self.holds_gradients:
                raise unfinished(operation)

        check() if self.world is None else on_every_rank(self.world.comm, check)

    def _mark_written(self, name: str, param: ParameterLike) -> None:
        if self._holds_sums:
            raise StaleGradientError(
                "backward", where=name, expected="one backward pass before each step()", got="a second one",
                remedy="call update(count), or step(0) to drop the sums of allreduce_grads()",
            )  # fmt: skip
        self._written.add(name)
        if self._means is not None:
            self._means.note()

    def _require_own_sums(self, operation: str) -> None:
        if self.update_on_kvstore:
            raise ConfigError(
                operation, expected="a store that only sums", got="a store that updates",
                remedy="call step(count), or make the Trainer with update_on_kvstore=False",
            )  # fmt: skip

    def _close_step(self, count: int) -> int:
        """Refuse missing gradients, and return the step's count: that of all ranks where they step together."""
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
        """Sum ``numbers`` over all ranks, which must have the same settings and frozen parameters."""
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
            self.store.pushpull(key, scaled, out=pull_target(param), priority=-key)
            self._time(param)

    def _pass_over(self, key: int, param: ParameterLike) -> None:
        """Skip the push of an unused parameter, which a zero gradient would move by momentum and weight decay."""
        if isinstance(self.store, AsyncStore):
            self.store.pass_over(key)
            self._pull_one(key, param)  # other ranks may have pushed

    def _pull(self) -> None:
        for key, param in enumerate(self._params):
            self._pull_one(key, param)

    def _pull_one(self, key: int, param: ParameterLike) -> None:
        self.store.pull(key, out=pull_target(param), priority=-key)
        self._time(param)

    def _pull_first(self) -> None:
        self._pull()
        if not self.steps_together:
            self._await_values()
            self.store.barrier()  # no rank pushes before all have the first values

    def _await_values(self) -> None:
        for param in self._params:
            _ = param.data  # reading waits for the pull

    def _time(self, param: Any) -> None:
        """Add the time that readers wait for the new value of ``param`` to the statistics."""
        hook = getattr(param, "data_hook", None)
        if isinstance(hook, PendingPull):
            hook.waited = self.stats.waited

    def _sum(self) -> None:
        """Replace gradients by their sums over all ranks."""
        keys = [key for key, name in enumerate(self.names) if name not in self._left_alone]
        if keys:
            self.store.pushpull(keys, [self._params[key].grad for key in keys])

    def _update(self, total: int) -> None:
        """Update the parameters on this rank from summed gradients."""
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
        self._accumulation.end()

    def _account(self, began_ns: int) -> None:
        self.stats.steps += 1
        self.stats.waited(began_ns, time.perf_counter_ns())


def _kind_of(kvstore: str | KVStore) -> str:
    return kvstore.kind if isinstance(kvstore, KVStore) else kvstore


def _closing(world: World, more_numbers: int) -> StepSync:
    """Make the exchange of a few numbers and ``more_numbers`` that ends each step; every rank must call."""
    serial = world.kept["number of store trainers"] = world.kept.get("number of store trainers", 0) + 1
    name = f"steps of store trainer {serial}"
    signature = zlib.crc32(name.encode())
    gate = WatchedBarrier(world.node_memory, ProgressEngine.of(world).watchdog, LINE_NUMBERS + more_numbers)
    if world.node_memory.size == world.size:
        return StepSync(world, None, gate, None, signature, name)
    _, comm = shared_comms(world, "reducers", signature, None, world.comm)
    return StepSync(world, comm, gate, CommunicationLane.of(world), signature, name)
