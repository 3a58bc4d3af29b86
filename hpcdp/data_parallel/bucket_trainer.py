"""The trainer that sums gradients in buckets, and lets the owners of shards update.

`BucketTrainer._step` shows a step from top to bottom: close the step, reduce, update. `GraphUpdate` replaces reduction
and update where a CUDA graph contains forward, backward and update.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import autograd
from ..comm import World, init
from ..comm.consistency import on_every_rank, on_rank_0
from ..compression import Compression, Settings
from ..core import files
from ..core.arrays import Array, Device, Streams, from_host, is_cupy, on_device_of
from ..core.checks import instance, number, one_of
from ..core.state import FitsSaved, Saved, require_state
from ..errors import ConfigError, HpcdpError, NonFiniteGradientError, StaleGradientError, warn
from ..kernels.cuda import numbers
from ..kernels.reference import clipped_scale
from ..nn.virtual_shards import enter_shard
from ..optim import Optimizer
from . import Reducer, Replicated, ShardedUpdate, UpdateStrategy
from .base_trainer import (
    BaseTrainer,
    MeanLosses,
    completed,
    described,
    may_wait,
    require_alike,
    require_same_parameters,
    require_same_settings,
    require_whole,
    share_over_parts,
    show_to_profiler,
    trained,
    unfinished,
)
from .bucket_layout import ParameterLike, plan
from .deterministic import PlainSteps, ReproducibleSteps, checked_virtual_shards, fix_arithmetic
from .gradient_policy import Policy, Unwritten, checked_policy, stale_anywhere
from .loss_scaling import DynamicLossScaling, LossScaling, first_scale, is_dynamic, skipping
from .overlap import EXPOSED, BucketTimes, CommunicationStats, GpuTimes
from .sharded_update import (
    MASTER,
    UpdateRange,
    clipped_scale_on_gpu,
    lies_once_per_node,
    moved,
    moved_anywhere,
    of_rank_0,
    places_of,
    squares_of_model,
)
from .trainer_state import (
    FILE_HEADER,
    RESIDUAL,
    joined,
    optimizer_states,
    read_states,
    regrouped,
    residuals,
    take_residuals,
    take_states,
)

_NAMES = ("step_count", "loss_scale", "num_nonfinite", "optimizer", "states", "virtual_shards", "arithmetic", "layout")
_SAVED_WHOLE = "save the state of all ranks: checkpoint.Manager(path, world).save(step, {'trainer': trainer})"


OWNERS = ("auto", "rank", "shard")
"""The valid values of ``owner``."""


def check_settings(
    kvstore: object,
    update_on_kvstore: object,
    owner: object,
    clip_norm: object,
    overlap: object,
    adding: Sequence[str],
) -> None:
    """Raise `ConfigError` for settings of `hpcdp.Trainer` that are invalid for buckets.

    ``adding`` has the names of parameters with ``grad_req="add"``.
    """
    if kvstore is not None:
        raise ConfigError("Trainer", where="kvstore", expected="None in buckets", got=repr(kvstore))
    if update_on_kvstore is not None:
        expected = "None without a kvstore"
        raise ConfigError("Trainer", where="update_on_kvstore", expected=expected, got=repr(update_on_kvstore))
    one_of("Trainer", "owner", owner, OWNERS)
    if clip_norm is not None:
        number("Trainer", "clip_norm", clip_norm, above=0, most=math.inf, expected="a positive norm")
    instance("Trainer", "overlap", overlap, (bool, type(None)), "True, False or None")
    if overlap and adding:
        raise ConfigError(
            "Trainer", where=adding[0], expected="grad_req='write' with overlap", got="grad_req='add'",
            remedy="accumulate within no_sync(), or pass overlap=False",
        )  # fmt: skip


class BucketTrainer(BaseTrainer, FitsSaved):
    """The trainer that `hpcdp.Trainer` makes without a ``kvstore``; see there."""

    @may_wait
    def __init__(
        self,
        params: Sequence[ParameterLike],
        optimizer: Optimizer,
        world: World | None = None,
        *,
        kvstore: None = None,
        update_on_kvstore: None = None,
        compression: Settings = None,
        policy: Policy | None = None,
        owner: str = "auto",
        bucket_cap_mb: float | None = None,
        clip_norm: float | None = None,
        overlap: bool | None = None,
        reproducible: bool = False,
        virtual_shards: int | None = None,
        loss_scale: float | str = 1.0,
    ) -> None:
        params = list(params)
        autograd.waitall()  # earlier calls use the values of this rank, not of rank 0
        params = trained(params, world)
        adding = [param.name for param in params if param.grad_req == "add"]
        check_settings(kvstore, update_on_kvstore, owner, clip_norm, overlap, adding)
        self.compression = Compression.of(compression)
        self.world: World = init() if world is None else world
        self.virtual_shards = checked_virtual_shards(reproducible, virtual_shards, params, self.compression, self.world)
        self.optimizer = optimizer
        self.stats = CommunicationStats()
        self.policy = checked_policy(policy)
        self.loss_scale = first_scale(loss_scale)
        self._loss_scaling = LossScaling()
        if is_dynamic(loss_scale):
            self.policy, self._loss_scaling = skipping(self.policy), DynamicLossScaling()
        by_name = {param.name: param for param in params}
        self._unwritten = Unwritten(self.policy, by_name, self.world.rank, self.world.size)
        self.clip_norm = None if clip_norm is None else float(clip_norm)
        self._leaves_some = False
        """True if the step leaves out parameters, which no rank has used."""
        self._replayed: Callable[[int, float], None] | None = None
        """Reduction and update by a CUDA graph, within `step_replayed`."""
        self._syncing = True
        self._held_count = 0
        settings = [f"{owner=} {bucket_cap_mb=} {clip_norm=} {overlap=} {loss_scale=} {self.policy}",
                    f"compression {self.compression}", f"virtual_shards={self.virtual_shards}"]  # fmt: skip
        require_alike(self.world, params, optimizer, settings)
        room_for = share_over_parts(params, self.world, self.compression)
        if self.virtual_shards is not None:
            fix_arithmetic(self.world)
        for param in params:
            # a copy: the program's array may be read-only
            param.data = from_host(of_rank_0(param.data, self.world.comm), param.data)
        show_to_profiler(params, self.world)
        layout, overlap = plan(described(params), bucket_cap_mb, room_for=room_for), False if adding else overlap
        self.reducer = Reducer(
            params, layout, self.world, overlap, self.compression, self.virtual_shards, sharded=owner == "shard",
            more_numbers=self._unwritten.length,
        )  # fmt: skip
        self._means = MeanLosses(warns=self.world.rank == 0)
        self.reducer.watch = self._means.note
        self.reducer.count_waits(self.stats.waited)
        by_shards = owner == "shard" or (owner == "auto" and lies_once_per_node(self.reducer))
        self.owner: UpdateStrategy = (ShardedUpdate if by_shards else Replicated)(self.reducer, optimizer)
        self._places, self._grads = places_of(params), [(param, param.grad) for param in params]
        self._on_host = True
        self._stale: list[str] = []
        """Parameters without a gradient in earlier virtual shards of this step, if that is an error."""
        enter_shard(None)  # leave the virtual shard of an earlier trainer
        num = self.virtual_shards
        self._steps = PlainSteps() if num is None else ReproducibleSteps(num, self.reducer, params)
        self.world.closings.add(self._let_go)

    def _let_go(self) -> None:
        self.reducer.let_go()
        vars(self).update(reducer=self.world.comm, owner=self.world.comm)

    def check_options(self, options: dict[str, Any]) -> None:
        """See `BaseTrainer.check_options`."""
        settings = {"kvstore": None, "update_on_kvstore": None, "owner": "auto", "clip_norm": None, "overlap": None}
        settings |= {name: value for name, value in options.items() if name in settings}
        check_settings(**settings, adding=())
        Compression.of(options.get("compression"))
        checked_policy(options.get("policy"))

    def _on_its_gpu(self) -> AbstractContextManager[object]:
        return on_device_of(next((bucket.mine for bucket in self.reducer.buckets), None))

    # A step

    def _step(self, count: int) -> int:
        began_ns = time.perf_counter_ns()
        self._steps.leave(count)
        if not self._steps.is_last:
            return self._next_virtual_shard(count)
        total, before = self._close_step(count), self.step_count
        try:
            if not total:
                self.reducer.drop()
            elif self._needs_sums:
                self._reduce()
                self._update(total)
            else:
                reduce_and_update = self._replayed or self.owner.reduce_and_update
                reduce_and_update(self.step_count + 1, 1.0 / (total * self.loss_scale))
                self.step_count += 1
            if self.step_count > before:
                if self._leaves_some:
                    self.owner.pass_over()
                self._steps.move_statistics()
        finally:
            self._begin_step()
        self._account(began_ns)
        return total

    def _next_virtual_shard(self, count: int) -> int:
        if count:
            self._stale += self._unwritten.refused(self.reducer.missing)
        self.reducer.next_virtual_shard()
        self._steps.enter(self.step_count + 1)
        self._held_count += count
        return self._held_count

    def _close_step(self, count: int) -> int:
        """Return the global count, by the closing exchange of a step, after which every rank has left backward."""
        reducer, unwritten = self.reducer, self._unwritten
        stale = self._stale
        if self._steps.count_of_gradients(count, self._held_count):
            stale = stale + unwritten.refused(reducer.missing)
        count += self._held_count
        stale = list(dict.fromkeys(stale))  # a name may be missing in several virtual shards
        unused = reducer.unused if reducer.num_missing else []
        if not stale:
            reducer.fill_with_zeros()
        waits = reducer.keeps_unsent and bool(unused)  # until all ranks know which parameters not to send
        if not waits:
            reducer.launch_rest()
        learning_rate, loss_scale = self._settings
        settings = learning_rate, loss_scale, unwritten.mark(unused) if unused else 0
        used = unwritten.numbers(unused) if unwritten.length else ()
        strangers = self._steps.closing_numbers
        lost = moved(self._places, self._grads)
        sums, alike = reducer.tally_alike(settings, count, bool(stale or lost), *strangers, *used)
        total, num_stale, *more = sums
        num_strangers, num_users = more[: len(strangers)], more[len(strangers) :]
        if not alike:
            self.drop()
            require_same_settings(self.world.comm, "step", learning_rate, loss_scale)
            unwritten.require_same_frozen(self.world.comm, "step", unused)
        if any(num_strangers):
            self.drop()
            raise HpcdpError(
                "step", expected="layers with parameters of this Trainer", got="a BatchNorm without any",
                remedy="pass the parameters of the whole network to the Trainer; the copies of nn.Replicas have none",
            )  # fmt: skip
        if num_stale:
            error = moved_anywhere(self.world.comm, lost) or stale_anywhere(self.world.comm, stale)
            self.drop()
            raise error
        if unused or used or self._leaves_some:
            left_alone = unwritten.left_alone(unused, num_users)
            self._leave_out(left_alone)
            if waits:
                reducer.keep_unsent(left_alone)
                reducer.launch_rest()
        return int(total)

    def _leave_out(self, names: frozenset[str]) -> None:
        self.owner.leave_out(names)
        self._leaves_some = bool(names)

    @property
    def _settings(self) -> tuple[float, float]:
        """The learning rate and loss scale of the next update, which must be the same on all ranks."""
        return self.optimizer.learning_rate(self.step_count + 1), self.loss_scale

    @property
    def _needs_sums(self) -> bool:
        """True if an update waits for a norm, or a check, of the sums; a graph's update contains the norm."""
        return self._host_looks or (self.clips_on_gpu and self._replayed is None)

    @property
    def _host_looks(self) -> bool:
        """True if an update waits until the host knows the norm of the sums, or that they are finite."""
        return self.policy.nonfinite != "ignore" or (self.clip_norm is not None and not self.clips_on_gpu)

    @property
    def clips_on_gpu(self) -> bool:
        """True if norm and scale stay on the GPUs, which is possible where each GPU has all sums."""
        if self.clip_norm is None or self.policy.nonfinite != "ignore" or self.optimizer.by_layer:
            return False
        reducer, world = self.reducer, self.world
        has_all = world.size == 1 or self.owner.holds_all
        is_whole = world.part_comm is None and world.model_comm is None and not reducer.is_deterministic
        return has_all and is_whole and all(is_cupy(bucket.mine) for bucket in reducer.buckets)

    def _reduce(self) -> None:
        if self.reducer.is_deterministic and self._host_looks:
            self.reducer.reduce_everywhere()  # a norm of shards would depend on the number of ranks
        else:
            self.owner.reduce()

    def _update(self, total: int) -> None:
        """Update from gradients that are summed, over ``total`` samples; every rank must call."""
        scale = self._update_scale(total) if total else None
        if scale is not None:
            self.owner.update(self.step_count + 1, scale)
            self.step_count += 1

    def _update_scale(self, total: int) -> float | Array | None:
        """Return the factor of the sums over ``total`` samples in an update, with clipping; every rank must call.

        Counts sums that are not finite, and adapts a dynamic loss scale to them.

        Returns:
            The factor, or None if the update is skipped, because a sum is not finite.

        Raises:
            NonFiniteGradientError: a sum is not finite, and the policy is to raise.
        """
        scale = 1.0 / (total * self.loss_scale)
        if self.clips_on_gpu:
            return self.clipped_on_gpu(scale)
        if not self._host_looks:
            return scale
        squares = squares_of_model(self.reducer)
        is_finite = math.isfinite(squares)
        if self.policy.nonfinite != "ignore":
            self.num_nonfinite += not is_finite
            before, self.loss_scale = self.loss_scale, self._loss_scaling.after_step(self.loss_scale, is_finite)
            if self.loss_scale != before:
                self.reducer.rescale_unsent(self.loss_scale / before)
        if not is_finite and self.policy.nonfinite == "raise":
            raise NonFiniteGradientError(
                "step", where=f"step {self.step_count + 1}", expected="finite gradients",
                got="a NaN or an infinity in their sum over all ranks",
                remedy="lower the learning rate, or skip such steps by Policy(nonfinite='skip')",
            )  # fmt: skip
        if not is_finite and self.policy.nonfinite == "skip":
            return None
        return scale if self.clip_norm is None else clipped_scale([squares], scale, self.clip_norm)

    def clipped_on_gpu(self, scale: float | Array) -> Array:
        """Return ``scale`` times the clipping factor, on the GPU: float64, shape ``(1,)``; the host does not wait."""
        assert self.clip_norm is not None
        return clipped_scale_on_gpu(self.reducer, scale, self.clip_norm)

    @property
    def is_scaling(self) -> bool:
        """True if the loss scale is dynamic."""
        return self._loss_scaling.is_dynamic

    @property
    def good_steps(self) -> int:
        """Steps without an overflow since the last change of a dynamic loss scale; 0 for a fixed one."""
        return self._loss_scaling.good_steps

    def drop(self) -> None:
        """See `BaseTrainer.drop`: waits for the reductions that were launched."""
        self.reducer.launch_rest()
        self.reducer.drop()
        self._begin_step()

    def _begin_step(self) -> None:
        if self._means is None:
            self.reducer.watch = lambda: None
        self.reducer.reset()
        self._held_count = 0
        self._stale = []
        self._steps.begin(self.step_count + 1)

    def _account(self, began_ns: int) -> None:
        self.stats.steps += 1
        self.stats.waited(began_ns, time.perf_counter_ns(), self._on_host)
        self.stats.ran((times.launched_ns, times.done_ns) for times in self.bucket_times)

    # Steps in parts: gradients that accumulate, or that a program changes between their sum and the update

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `BaseTrainer.no_sync`."""
        self._steps.refuse("no_sync", "enlarge the global batch")
        with self._on_its_gpu():
            self.reducer.accumulate()
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before
            if before:
                self.reducer.launch_again()

    @property
    def accumulation(self) -> tuple[bool, bool]:  # type: ignore[override]
        """See `BaseTrainer.accumulation`."""
        return self.reducer.is_accumulating, not self._syncing

    def _require_own_sums(self, operation: str) -> None:
        if operation == "allreduce_grads":
            self._steps.refuse(operation, "let step() sum them")

    def _sum_gradients(self) -> None:
        self._close_step(0 if self.reducer.num_missing == len(self.reducer.params) else 1)
        self.reducer.reduce_everywhere()

    @property
    def _holds_sums(self) -> bool:  # type: ignore[override]
        return self.reducer.holds_sums

    def _update_from_sums(self, held: int) -> int:
        settings, before = self._settings, self.step_count
        (total,), alike = self.reducer.tally_alike(settings, held)
        try:
            if not alike:
                require_same_settings(self.world.comm, "update", *settings)
            self._update(int(total))
            if self.step_count > before:
                self.owner.pass_over()
        finally:
            self._begin_step()
        return int(total)

    # A step whose update a CUDA graph contains

    def graph_update(self, leaves: Sequence[Any]) -> GraphUpdate | None:
        """See `BaseTrainer.graph_update`.

        A graph can contain the update if there is one rank, the host reads no sum, the hooks of ``leaves`` are the
        trainer's, and each rule is one kernel.
        """
        reducer = self.reducer
        on_gpus = all(is_cupy(param.data) for param in reducer.params.values())
        if not on_gpus or self.world.size > 1 or reducer.overlap:
            return None
        update = GraphUpdate(self, leaves)
        return update if update.is_possible and update.still_fits() else None

    def launching(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """See `BaseTrainer.launching`."""
        return self.reducer.launching(leaves) if self._syncing else ()

    @property
    def updates_at_once(self) -> bool:
        """True if `step` updates, outside of `no_sync`, and the host reads no sum before."""
        return self._syncing and not self._host_looks and not self.reducer.is_deterministic

    def step_replayed(self, reduce_and_update: Callable[[int, float], None], count: int) -> int:
        """Run `step` with a graph's ``reduce_and_update(step, scale)``, which contains the clipping."""
        self._replayed = reduce_and_update
        try:
            return self.step(count)
        finally:
            self._replayed = None

    def leave_out_unused(self, names: Sequence[str]) -> None:
        """Leave the parameters ``names`` out of this step's update, if backward has not written them.

        Only for a world of one rank; other worlds agree in the closing exchange of the step.
        """
        is_missing = self.reducer.is_missing
        self._leave_out(self._unwritten.left_alone([name for name in names if is_missing(name)], None))

    # Parameters, and the cost of a step

    def take_parameters(self) -> None:
        """See `BaseTrainer.take_parameters`."""
        self.owner.take_parameters()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            with self.owner.changing():
                yield
        finally:
            for param, grad in self._grads:  # a change of dtype, and back, makes new arrays
                param.grad = grad

    @property
    def own_virtual_shards(self) -> range:
        """See `BaseTrainer.own_virtual_shards`."""
        return self.reducer.own_virtual_shards

    @property
    def bucket_times(self) -> Sequence[BucketTimes]:
        """See `BaseTrainer.bucket_times`."""
        return self.reducer.bucket_times

    @property
    def nbytes(self) -> dict[str, int]:
        """See `BaseTrainer.nbytes`."""
        return {
            "parameters": self.owner.nbytes_parameters,
            "gradients": self.reducer.nbytes,
            "state": self.owner.nbytes_state,
        }

    def measure_on_gpu(self) -> GpuTimes | None:
        """See `BaseTrainer.measure_on_gpu`."""
        if not all(is_cupy(param.data) for param in self.reducer.params.values()):
            return None

        def read(name: str, seconds: float) -> None:
            if name == EXPOSED:
                self.stats.waited_on_gpu(seconds)

        times = GpuTimes(Streams(Device.of(next(iter(self.reducer.params.values())).data)), read)
        self.reducer.measure_waits_on_gpu(lambda: times.part(EXPOSED))
        self._on_host = False
        return times

    # States: for checkpoints, with parts on each rank, and as a file of the optimizer's state

    def state_dict(self) -> dict[str, Any]:
        """See `BaseTrainer.state_dict`."""
        self._refuse_unfinished("state_dict")
        layout = {
            "digest": self.reducer.layout.digest,
            "counts": list(self.reducer.layout.counts),
            "slots": {slot.name: {"bucket": slot.bucket, "offset": slot.offset} for slot in self.reducer.layout.slots},
        }
        if self.world.part_comm is not None:  # the parts may have other buckets, but a state has one layout
            layout = self.world.part_comm.allgather_json(layout)[0]
        state = {
            "step_count": self.step_count,
            "loss_scale": self.loss_scale,
            "good_steps": self.good_steps,
            "num_nonfinite": self.num_nonfinite,
            "optimizer": json.dumps(self.optimizer.config()),
            "states": optimizer_states(self.owner, self.reducer),
            "passed_over": dict(self.owner.passed_over),
            "virtual_shards": self.virtual_shards,
            "arithmetic": self._steps.arithmetic,
            "layout": layout,
        }
        unsent = residuals(self.reducer)
        return state | ({"residuals": unsent} if unsent else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `BaseTrainer.load_state_dict`."""
        with self._on_its_gpu():
            self._refuse_unfinished("load_state_dict")
            require_state("a Trainer", state, *_NAMES)
            num_shards = state["virtual_shards"] or self.virtual_shards
            if self.virtual_shards not in (None, num_shards):
                raise ConfigError(
                    "load_state_dict", where="virtual_shards", expected=self.virtual_shards, got=num_shards,
                    remedy=f"Trainer(reproducible=True, virtual_shards={num_shards})",
                )  # fmt: skip
            own, saved = optimizer_states(self.owner, self.reducer), state["states"]
            require_same_parameters(own, saved)
            for name, states in own.items():
                if (MASTER in states) != (MASTER in saved[name]):
                    saved_kind, own_kind = ("16 bits", "another dtype")[:: 1 if MASTER not in states else -1]
                    raise ConfigError(
                        "load_state_dict", where=name, expected=f"the state of a parameter of {own_kind}",
                        got=f"the state of a parameter of {saved_kind}", remedy="make the network in the saved dtype",
                    )  # fmt: skip
            self.optimizer.take_config(json.loads(state["optimizer"]))
            take_states(own, saved)
            take_residuals(self.reducer, state.get("residuals", {}))
            self.owner.take_passed_over(state.get("passed_over", {}))
            self.step_count = state["step_count"]
            self.loss_scale = state["loss_scale"]
            self._loss_scaling.restore(state.get("good_steps", 0))
            self.num_nonfinite = state["num_nonfinite"]
            self._steps.begin(self.step_count + 1)
            if self.world.rank or (self.world.part_comm is not None and self.world.part_comm.rank):
                return
            self._steps.warn_of_other_arithmetic("load_state_dict", state["arithmetic"] or "")
            if not self.reducer.is_deterministic and state["layout"]["digest"] != self.reducer.layout.digest:
                warn(
                    "load_state_dict: the state was saved with another layout of buckets (bucket_cap_mb, or parts): "
                    "last bits may differ from here on"
                )

    def fitted(self, form: Any, saved: Saved) -> Any:
        """See `FitsSaved.fitted`: version 0.1.0 saved no ``passed_over``, and at first no ``good_steps``."""
        return completed(form, {"good_steps": 0, "passed_over": {"dict": []}})

    def save_states(self, path: str | Path) -> None:
        """See `BaseTrainer.save_states`.

        The file is a NumPy archive with one array ``"<parameter>/<state>"`` for each parameter and name of the
        optimizer's state. Any number of ranks can read it, with any owner and bucket size. Residuals of compression
        are ``"<parameter>/residual"``, of shape ``(nodes, *shape)``.
        """
        self._refuse_half_a_step("save_states")
        tensors = optimizer_states(self.owner, self.reducer)
        for name, unsent in residuals(self.reducer).items():
            tensors.setdefault(name, {})[RESIDUAL] = unsent
        arrays: dict[str, np.ndarray] = {}
        for name, of_param in tensors.items():
            for key, tensor in of_param.items():
                array = joined(tensor, self.world)
                if self.world.rank == 0:
                    arrays[f"{name}/{key}"] = array
        header = {"version": 1, "step_count": self.step_count, "optimizer": self.optimizer.config()["name"]}
        header |= self._steps.header
        if self.owner.passed_over:
            header["passed_over"] = self.owner.passed_over
        if self.is_scaling:
            header |= {"loss_scale": self.loss_scale, "good_steps": self.good_steps}
        write = partial(files.write, "save_states", Path(path), FILE_HEADER, header, arrays)
        on_rank_0(self.world.comm, write)

    def load_states(self, path: str | Path) -> None:
        """See `BaseTrainer.load_states`."""
        with self._on_its_gpu():
            self._refuse_half_a_step("load_states")
            rule, own = self.optimizer.config()["name"], optimizer_states(self.owner, self.reducer)
            shapes = {slot.name: slot.shape for slot in self.reducer.layout.slots}
            read = partial(read_states, Path(path), rule, shapes, own, self.virtual_shards)
            header, arrays = on_every_rank(self.world.comm, read)
            saved = {name: {key: arrays[f"{name}/{key}"] for key in states} for name, states in own.items()}
            unsent = {name: arrays[key] for name in shapes if (key := f"{name}/{RESIDUAL}") in arrays}
            take_states(own, saved)
            take_residuals(self.reducer, regrouped(self.reducer, unsent))
            self.owner.take_passed_over(header.get("passed_over", {}))
            self.step_count = header["step_count"]
            if self.is_scaling and "loss_scale" in header:
                self.loss_scale = header["loss_scale"]
                self._loss_scaling.restore(header["good_steps"])
            self._steps.begin(self.step_count + 1)
            if self.world.rank == 0:
                self._steps.warn_of_other_arithmetic(str(path), header.get("arithmetic", ""))

    def _refuse_unfinished(self, operation: str) -> None:
        """Raise if gradients would be lost, and wait for updates under way; every rank must call."""

        def check() -> None:
            self._check_shards(operation)
            if self._held_count or self.reducer.is_accumulating or self.reducer.holds_sums:
                raise unfinished(operation)

        on_every_rank(self.world.comm, check)
        self.reducer.settle()

    def _refuse_half_a_step(self, operation: str) -> None:
        """Raise for cut parameters, or within a step of several virtual shards; wait for updates under way.

        Every rank must call.
        """
        require_whole(operation, list(self.reducer.params.values()), _SAVED_WHOLE)
        on_every_rank(self.world.comm, lambda: self._check_shards(operation))
        self.reducer.settle()

    def _check_shards(self, operation: str) -> None:
        """Raise `StaleGradientError` between the virtual shards of a step."""
        reducer = self.reducer
        if reducer.is_deterministic and not (reducer.is_first_backward and reducer.is_untouched):
            raise StaleGradientError(
                operation, expected="the end of a step",
                got=f"gradients of virtual shard {reducer.virtual_shard}",
                remedy="call it after the step of the last of own_virtual_shards, or drop this step by step(0) for "
                "each remaining one",
            )  # fmt: skip


class GraphUpdate:
    """The update of a step at the end of a CUDA graph; see `BucketTrainer.graph_update`.

    A graph freezes the arguments of its kernels. So learning rates, bias corrections and scales are in the GPU's
    memory, and each launch copies those that have changed.
    """

    def __init__(self, trainer: BucketTrainer, leaves: Sequence[Any]) -> None:
        self._trainer, self._leaves = trainer, leaves
        of_graph = set(map(id, leaves))
        self._not_in_graph = [name for name, param in trainer.reducer.params.items() if id(param) not in of_graph]
        self._captured, self._clip_norm = self._kernels(), trainer.clip_norm
        self._now = (trainer.step_count + 1, 1.0)
        """Step and scale of the next launch."""

    @property
    def is_possible(self) -> bool:
        """True if each rule's update is one kernel."""
        return all(piece.rule.update_is_its_kernel for piece, _ in self._captured)

    def capture(self) -> None:
        """Launch the update within the capture of a graph."""
        scale = None
        if self._trainer.clips_on_gpu:
            scale = self._trainer.clipped_on_gpu(numbers(lambda: self._now[1:]))
        of_rules: dict[tuple[int, int], Array] = {}
        captured = iter(self._captured)
        owner = self._trainer.owner
        for bucket, pieces in zip(self._trainer.reducer.buckets, owner.pieces, strict=True):
            for piece in pieces:
                key = id(piece.rule), piece.passed_over
                if key not in of_rules:
                    of_rules[key] = numbers(partial(self._coefficients, piece))
                name, coefficients = next(captured)[1], of_rules[key]
                rule = partial(piece.rule.launch, name=name, coefficients=coefficients, scale=scale)
                owner.update_piece(bucket, piece, rule)

    def still_fits(self) -> bool:
        """Return whether the captured update is still the trainer's update."""
        trainer = self._trainer
        alone = all(map(trainer.reducer.takes, self._leaves))
        clips_alike = trainer.clip_norm == self._clip_norm
        return alone and clips_alike and trainer.updates_at_once and self._kernels() == self._captured

    def step(self, count: int, launch: Callable[[], None]) -> None:
        """Run the trainer's ``step(count)``, with reduction and update by ``launch``, which launches the graph."""

        def update(step: int, scale: float) -> None:
            self._now = step, scale
            launch()

        self._trainer.step_replayed(update, count)

    def _coefficients(self, piece: UpdateRange) -> tuple[float, ...]:
        step, scale = self._now
        rule, own_step = piece.rule_at(step)
        return rule.kernel(own_step, scale)[1]

    def _kernels(self) -> list[tuple[UpdateRange, str]]:
        self._trainer.leave_out_unused(self._not_in_graph)
        names: dict[int, str] = {}
        kernels = []
        for pieces in self._trainer.owner.pieces:
            for piece in pieces:
                if id(piece.rule) not in names:
                    names[id(piece.rule)] = piece.rule.kernel(1, 1.0)[0]
                kernels.append((piece, names[id(piece.rule)]))
        return kernels
