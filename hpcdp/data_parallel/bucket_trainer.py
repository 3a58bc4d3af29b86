"""The trainer that sums gradients in buckets: a reduction for each bucket, and an update by the owners of its shards.

`BucketTrainer.step` is the way of a step, from top to bottom: close the step, reduce, update. Where the update is the
end of a CUDA graph, which has forward and backward, too, `GraphUpdate` takes the place of reduction and update.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import autograd
from ..comm import World, init
from ..comm.consistency import on_every_rank, on_rank_0, require_same
from ..compression import Compression, Settings
from ..core import files
from ..core.arrays import Array, from_host, is_cupy, on_device_of
from ..core.checks import is_number
from ..core.devices import Device, Streams
from ..core.state import FitsSaved, Saved, Sharded, cut_of, require_state, take
from ..errors import ConfigError, DataError, HpcdpError, NonFiniteGradientError, StaleGradientError
from ..kernels.cuda.capture import numbers
from ..kernels.reference.gradients import clipped_scale
from ..nn.microbatch import enter_shard
from ..optim import Optimizer
from . import Reducer, Replicated, ShardedUpdate, UpdateStrategy
from .buckets import Parameter, plan
from .deterministic import ReproducibleSteps, arithmetic, checked_virtual_shards, fix_arithmetic
from .policy import (
    DynamicLossScale,
    Policy,
    Unwritten,
    checked_policy,
    first_scale,
    is_dynamic,
    skipping,
    stale_anywhere,
)
from .profiling import EXPOSED, BucketTimes, CommunicationStats, GpuTimes
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
from .trainer import (
    BaseTrainer,
    MeanLosses,
    checked_count,
    completed,
    described,
    may_wait,
    require_alike,
    require_same_parameters,
    require_same_settings,
    require_whole,
    show_to_profiler,
    trained,
    unfinished,
)
from .trainer_state import RESIDUAL, joined, optimizer_states, regrouped, residuals

_ELEMENT_BY_ELEMENT = ("fp16", "bf16")
_HEADER = "hpcdp/trainer"
_NAMES = ("step_count", "loss_scale", "num_nonfinite", "optimizer", "states", "virtual_shards", "arithmetic", "layout")
_SAVED_WHOLE = "save all of its ranks' state: checkpoint.Manager(path, world).save(step, {'trainer': trainer})"


def share_over_parts(params: Sequence[Parameter], world: World, compression: Compression | None) -> list[int] | None:
    """Give parameters that are whole the first part's values; every rank must call.

    They stay alike to the bit if their gradients are summed alike. For that they must lie at the same places of the
    buckets, whatever the sizes of parts before them, since a sum may depend on where in a message an element lies.

    Returns:
        For each parameter the elements of its largest part; None where there are no parts.

    Raises:
        ConfigError: parameters are parts, and ``world`` is not that of ranks with the same ones; or ``compression``
            makes of an element what depends on those beside it.
        MismatchError: ranks with other parts have other parameters.
    """
    comm = world.part_comm
    if comm is None:
        require_whole("Trainer", params, "give it the replicas of split_world")
        return None
    codec = None if compression is None else compression.codec.name
    require_same(comm, "Trainer", [*map(_described, params), f"compression {compression}"])
    if codec is not None and codec not in _ELEMENT_BY_ELEMENT and comm.size > 1:
        expected = f"{' or '.join(_ELEMENT_BY_ELEMENT)} with layers that are split"
        raise ConfigError("Trainer", where="compression", expected=expected, got=codec)
    for param in params:
        if cut_of(param) is None:
            param.data = from_host(of_rank_0(param.data, comm), param.data)
    counts = comm.allgather_json([math.prod(param.data.shape) for param in params])
    return [max(each) for each in zip(*counts, strict=True)]


def _described(param: Parameter) -> str:
    shape, cut = tuple(param.data.shape), cut_of(param)
    whole = f"{shape}" if cut is None else f"{cut.whole(shape)} cut along axis {cut.axis}"
    return f"{param.name} {whole} {param.data.dtype}"


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
    """Raises `ConfigError` for settings that buckets have not; ``adding`` names parameters with ``grad_req="add"``."""
    if kvstore is not None:
        raise ConfigError("Trainer", where="kvstore", expected="None in buckets", got=repr(kvstore))
    if update_on_kvstore is not None:
        expected = "None without a kvstore"
        raise ConfigError("Trainer", where="update_on_kvstore", expected=expected, got=repr(update_on_kvstore))
    if not (isinstance(owner, str) and owner in OWNERS):  # an array answers for each of its elements
        raise ConfigError("Trainer", where="owner", expected=" or ".join(OWNERS), got=repr(owner))
    if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
        raise ConfigError("Trainer", where="clip_norm", expected="a positive norm", got=repr(clip_norm))
    if not (overlap is None or isinstance(overlap, bool)):
        raise ConfigError("Trainer", where="overlap", expected="True, False or None", got=repr(overlap))
    if overlap and adding:
        raise ConfigError(
            "Trainer", where=adding[0], expected="grad_req='write' with overlap", got="grad_req='add'",
            remedy="add up within no_sync(), or pass overlap=False",
        )  # fmt: skip


class BucketTrainer(BaseTrainer, FitsSaved):
    """See `hpcdp.Trainer`: the trainer that it makes without a ``kvstore``."""

    @may_wait
    def __init__(
        self,
        params: Sequence[Parameter],
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
        autograd.waitall()  # earlier calls are to have the values of this rank
        ours = trained(params, world)
        adding = [param.name for param in ours if param.grad_req == "add"]
        check_settings(kvstore, update_on_kvstore, owner, clip_norm, overlap, adding)
        self.compression = Compression.of(compression)
        self.world: World = init() if world is None else world
        self.virtual_shards = checked_virtual_shards(reproducible, virtual_shards, ours, self.compression, self.world)
        self.optimizer = optimizer
        self.stats = CommunicationStats()
        self.policy = checked_policy(policy)
        self.loss_scale = first_scale(loss_scale)
        self._dynamic: DynamicLossScale | None = None
        if is_dynamic(loss_scale):
            self.policy, self._dynamic = skipping(self.policy), DynamicLossScale()
        by_name = {param.name: param for param in ours}
        self._unwritten = Unwritten(self.policy, by_name, self.world.rank, self.world.size)
        self.clip_norm = None if clip_norm is None else float(clip_norm)
        self._leaves_some = False
        """Whether the step leaves parameters alone, which no rank has used."""
        self._replayed: Callable[[int, float], None] | None = None
        """What a CUDA graph has in the place of reduction and update, within `step_replayed`."""
        self._syncing = True
        self._held_count = 0
        settings = [f"{owner=} {bucket_cap_mb=} {clip_norm=} {overlap=} {loss_scale=} {self.policy}",
                    f"compression {self.compression}", f"virtual_shards={self.virtual_shards}"]  # fmt: skip
        require_alike(self.world, ours, optimizer, settings)
        room_for = share_over_parts(ours, self.world, self.compression)
        if self.virtual_shards is not None:
            fix_arithmetic(self.world)
        for param in ours:
            param.data = from_host(of_rank_0(param.data, self.world.comm), param.data)  # the program's may be read-only
        show_to_profiler(ours, self.world)
        layout, overlap = plan(described(ours), bucket_cap_mb, room_for=room_for), False if adding else overlap
        self.reducer = Reducer(
            ours, layout, self.world, overlap, self.compression, self.virtual_shards, sharded=owner == "shard",
            more_numbers=self._unwritten.length,
        )  # fmt: skip
        self._means = MeanLosses(warns=self.world.rank == 0)
        self.reducer.watch = self._means.note
        self.reducer.notify_waits(self.stats.waited)
        by_shards = owner == "shard" or (owner == "auto" and lies_once_per_node(self.reducer))
        self.owner: UpdateStrategy = (ShardedUpdate if by_shards else Replicated)(self.reducer, optimizer)
        self._places, self._grads = places_of(ours), [(param, param.grad) for param in ours]
        self._on_host = True
        self._stale: list[str] = []
        """Parameters without a gradient in earlier virtual shards of this step, where that is an error."""
        enter_shard(None)  # that of an earlier trainer
        num = self.virtual_shards
        self._reproducible = None if num is None else ReproducibleSteps(num, self.reducer, params)
        self.world.closings.add(self._let_go)

    def _let_go(self) -> None:
        self.reducer.let_go()
        vars(self).update(reducer=self.world.comm, owner=self.world.comm)

    def check_options(self, options: dict[str, Any]) -> None:
        said = {"kvstore": None, "update_on_kvstore": None, "owner": "auto", "clip_norm": None, "overlap": None}
        said |= {name: value for name, value in options.items() if name in said}
        check_settings(**said, adding=())
        Compression.of(options.get("compression"))
        checked_policy(options.get("policy"))

    def _on_its_gpu(self) -> AbstractContextManager[object]:
        """Make the GPU of the parameters, if they are on one, this thread's current GPU."""
        return on_device_of(next((bucket.mine for bucket in self.reducer.buckets), None))

    # A step.

    def step(self, count: int) -> int:
        """See `BaseTrainer.step`."""
        with self._on_its_gpu():
            count = checked_count("step", count)
            self._settle("step")
            self._warn_of_mean_losses("step", count)
            if not self._syncing:
                self._held_count += count
                return self._held_count
            if count:
                self._refuse_sums("step")
            began_ns = time.perf_counter_ns()
            if self._reproducible is not None:
                self._reproducible.leave(count)
                if not self._reproducible.is_last:
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
                    if self._reproducible is not None:
                        self._reproducible.move_statistics()
            finally:
                self._begin_step()
            self._account(began_ns)
            return total

    def _next_virtual_shard(self, count: int) -> int:
        assert self._reproducible is not None
        if count:
            self._stale += self._unwritten.refused(self.reducer.missing)
        self.reducer.next_virtual_shard()
        self._reproducible.enter(self.step_count + 1)
        self._held_count += count
        return self._held_count

    def _close_step(self, count: int) -> int:
        """Return the global count, by the one small exchange of a step, after which every rank has left backward."""
        reducer, unwritten, reproducible = self.reducer, self._unwritten, self._reproducible
        stale = self._stale
        if count + (self._held_count if reproducible is None else 0):
            stale = stale + unwritten.refused(reducer.missing)
        count += self._held_count
        stale = list(dict.fromkeys(stale))  # a name may be missing in several virtual shards
        unused = reducer.unused if reducer.num_missing else []
        if not stale:
            reducer.fill_with_zeros()
        waits = reducer.keeps_unsent and bool(unused)  # for what is not to be sent
        if not waits:
            reducer.launch_rest()
        learning_rate, loss_scale = self._settings
        settings = learning_rate, loss_scale, unwritten.mark(unused) if unused else 0
        used = unwritten.numbers(unused) if unwritten.length else ()
        met = () if reproducible is None else (reproducible.met_stranger,)
        lost = moved(self._places, self._grads)
        sums, alike = reducer.tally_alike(settings, count, bool(stale or lost), *met, *used)
        total, num_stale, *others = sums
        num_strangers, num_users = others[: len(met)], others[len(met) :]
        if not alike:
            self.drop()
            require_same_settings(self.world.comm, "step", learning_rate, loss_scale)
            unwritten.require_same_frozen(self.world.comm, "step", unused)
        if any(num_strangers):
            self.drop()
            raise HpcdpError(
                "step", expected="layers whose parameters the Trainer has", got="a BatchNorm of which it has none",
                remedy="give it the parameters of all that is trained; copies of nn.Replicas have none of theirs there",
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
        """Whether an update waits for a norm, or a check, of the sums; a graph's update has the norm within it."""
        return self._host_looks or (self.clips_on_gpu and self._replayed is None)

    @property
    def _host_looks(self) -> bool:
        """Whether an update waits until the host knows the norm of the sums, or whether they are finite."""
        return self.policy.nonfinite != "ignore" or (self.clip_norm is not None and not self.clips_on_gpu)

    @property
    def clips_on_gpu(self) -> bool:
        """Whether norm and scale stay on GPUs, each of which has all sums, so that no rank needs them of another."""
        if self.clip_norm is None or self.policy.nonfinite != "ignore" or self.optimizer.by_layer:
            return False
        reducer, world = self.reducer, self.world
        has_all = world.size == 1 or self.owner.holds_all
        is_whole = world.part_comm is None and world.model_comm is None and not reducer.is_deterministic
        return has_all and is_whole and all(is_cupy(bucket.mine) for bucket in reducer.buckets)

    def _reduce(self) -> None:
        if self.virtual_shards is not None and self._host_looks:
            self.reducer.reduce_everywhere()  # looking at parts of the sum would depend on what the parts are
        else:
            self.owner.reduce()

    def _update(self, total: int) -> None:
        """Update from gradients that are summed, over ``total`` samples; every rank must call."""
        scale = self._update_scale(total) if total else None
        if scale is not None:
            self.owner.update(self.step_count + 1, scale)
            self.step_count += 1

    def _update_scale(self, total: int) -> float | Array | None:
        """Return the factor of the sums over ``total`` samples in an update: less where they are clipped.

        Every rank must call. Counts sums that are not finite, and adapts a dynamic loss scale to them.

        Returns:
            None where the update is left out, because a sum is not finite.

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
            self._adapt_loss_scale(is_finite)
        if not is_finite and self.policy.nonfinite == "raise":
            raise NonFiniteGradientError(
                "step", where=f"step {self.step_count + 1}", expected="finite gradients",
                got="a NaN or an infinity in their sum over all ranks",
                remedy="lower the learning rate, or skip such steps: Policy(nonfinite='skip')",
            )  # fmt: skip
        if not is_finite and self.policy.nonfinite == "skip":
            return None
        return scale if self.clip_norm is None else clipped_scale([squares], scale, self.clip_norm)

    def clipped_on_gpu(self, scale: float | Array) -> Array:
        """Return ``scale``, which may itself lie on the GPU, clipped there: float64, shape ``(1,)``. Nothing waits."""
        assert self.clip_norm is not None
        return clipped_scale_on_gpu(self.reducer, scale, self.clip_norm)

    def _adapt_loss_scale(self, is_finite: bool) -> None:
        if self._dynamic is None:
            return
        before, self.loss_scale = self.loss_scale, self._dynamic.after_step(self.loss_scale, is_finite)
        if self.loss_scale != before:
            self.reducer.rescale_unsent(self.loss_scale / before)

    @property
    def is_scaling(self) -> bool:
        """Whether the loss scale follows what gradients do."""
        return self._dynamic is not None

    @property
    def good_steps(self) -> int:
        """Steps without an overflow since the loss scale has last changed; 0 where it does not follow them."""
        return 0 if self._dynamic is None else self._dynamic.good_steps

    def drop(self) -> None:
        """See `BaseTrainer.drop`; nobody leaves before what was launched has ended."""
        self.reducer.launch_rest()
        self.reducer.drop()
        self._begin_step()

    def _begin_step(self) -> None:
        if self._means is None:
            self.reducer.watch = None
        self.reducer.reset()
        self.reducer.overwrite()
        self._held_count = 0
        self._stale = []
        if self._reproducible is not None:
            self._reproducible.begin(self.step_count + 1)

    def _account(self, began_ns: int) -> None:
        self.stats.steps += 1
        self.stats.waited(began_ns, time.perf_counter_ns(), self._on_host)
        self.stats.ran((times.launched_ns, times.done_ns) for times in self.bucket_times)

    # Steps in parts: gradients that accumulate, or that a program changes between their sum and the update.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `BaseTrainer.no_sync`."""
        self._refuse_reproducible("no_sync", "make the global batch larger")
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
        return self.reducer.accumulating, not self._syncing

    def allreduce_grads(self) -> None:
        """See `BaseTrainer.allreduce_grads`."""
        with self._on_its_gpu():
            self._settle("allreduce_grads")
            self._refuse_reproducible("allreduce_grads", "let step() sum them")
            self._refuse_sums("allreduce_grads")
            began_ns = time.perf_counter_ns()
            self._close_step(0 if self.reducer.num_missing == len(self.reducer.params) else 1)
            self.reducer.reduce_everywhere()
            self._account(began_ns)

    def update(self, count: int) -> int:
        """See `BaseTrainer.update`."""
        with self._on_its_gpu():
            self._settle("update")
            if not self.reducer.holds_sums:
                raise StaleGradientError(
                    "update", expected="gradients that allreduce_grads() has summed", got="gradients of this rank alone"
                )
            held = checked_count("update", count) + self._held_count
            self._warn_of_mean_losses("update", count)
            settings = self._settings
            (total,), alike = self.reducer.tally_alike(settings, held)
            before = self.step_count
            try:
                if not alike:
                    require_same_settings(self.world.comm, "update", *settings)
                self._update(int(total))
                if self.step_count > before:
                    self.owner.pass_over()
            finally:
                self._begin_step()
            return int(total)

    def _refuse_reproducible(self, operation: str, remedy: str) -> None:
        """Raise `ConfigError` where gradients are summed by virtual shards."""
        if self.virtual_shards is not None:
            raise ConfigError(
                operation, expected="a Trainer without reproducible=True", got="one with it",
                remedy=f"{remedy}, or train without it",
            )  # fmt: skip

    def _refuse_sums(self, operation: str) -> None:
        """Raise `StaleGradientError` between `allreduce_grads` and `update`."""
        if self.reducer.holds_sums:
            raise StaleGradientError(
                operation, expected="gradients of this rank", got="those that allreduce_grads() has summed",
                remedy="call update(count), or step(0) to drop them",
            )  # fmt: skip

    # A step whose update a CUDA graph has.

    def graph_update(self, leaves: Sequence[Any]) -> GraphUpdate | None:
        """See `BaseTrainer.graph_update`.

        A graph can have the update where one rank has all sums, which nobody looks at, they are those of ``leaves``,
        whose hooks are the trainer's, and each rule is one kernel.
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
        """Whether `step` updates without a look of the host's at the sums, and not only counts."""
        return self._syncing and not self._host_looks and self._reproducible is None

    def step_replayed(self, reduce_and_update: Callable[[int, float], None], count: int) -> int:
        """`step` by a graph's ``reduce_and_update``, of the update's number and scale, which has clipping within it."""
        self._replayed = reduce_and_update
        try:
            return self.step(count)
        finally:
            self._replayed = None

    def leave_out_unused(self, names: Sequence[str]) -> None:
        """Leave out of this step's update what will have no gradient, where backward goes to all but these parameters.

        Where this rank steps alone; else the closing exchange of the step says it.
        """
        is_missing = self.reducer.is_missing
        self._leave_out(self._unwritten.left_alone([name for name in names if is_missing(name)], None))

    # Parameters, and what a step costs.

    def take_parameters(self) -> None:
        """See `BaseTrainer.take_parameters`."""
        self.owner.take_parameters()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            with self.owner.changing():
                yield
        finally:
            for param, grad in self._grads:  # another dtype, and back, has made new ones
                param.grad = grad

    @property
    def own_virtual_shards(self) -> range:
        """See `BaseTrainer.own_virtual_shards`."""
        return self.reducer.own_virtual_shards

    @property
    def bucket_times(self) -> Sequence[BucketTimes]:
        """See `BaseTrainer.bucket_times`."""
        return self.reducer.times

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
        self.reducer.measure_waits(lambda: times.part(EXPOSED))
        self._on_host = False
        return times

    # States: for checkpoints, of which each rank has its parts, and as a file of the optimizer's state alone.

    def state_dict(self) -> dict[str, Any]:
        """See `BaseTrainer.state_dict`."""
        self._refuse_unfinished("state_dict")
        layout = {
            "digest": self.reducer.layout.digest,
            "counts": list(self.reducer.layout.counts),
            "slots": {slot.name: {"bucket": slot.bucket, "offset": slot.offset} for slot in self.reducer.layout.slots},
        }
        if self.world.part_comm is not None:  # ranks with parts of other sizes have other buckets: a state has one
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
            "arithmetic": None if self.virtual_shards is None else arithmetic(),
            "layout": layout,
        }
        unsent = residuals(self.reducer, self.compression)
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
            own, given = optimizer_states(self.owner, self.reducer), state["states"]
            require_same_parameters(own, given)
            for name, states in own.items():
                if (MASTER in states) != (MASTER in given[name]):
                    had, has = ("16 bits", "another dtype")[:: 1 if MASTER not in states else -1]
                    raise ConfigError(
                        "load_state_dict", where=name, expected=f"parameters of {has}",
                        got=f"the state of those of {had}", remedy="make the network in the dtype that it had then",
                    )  # fmt: skip
            self.optimizer.take_config(json.loads(state["optimizer"]))
            self._take(own, given, state.get("residuals", {}))
            self.owner.take_passed_over(state.get("passed_over", {}))
            self.step_count = state["step_count"]
            self.loss_scale = state["loss_scale"]
            if self._dynamic is not None:
                self._dynamic.good_steps = state.get("good_steps", 0)
            self.num_nonfinite = state["num_nonfinite"]
            if self._reproducible is not None:
                self._reproducible.begin(self.step_count + 1)
            if self.world.rank or (self.world.part_comm is not None and self.world.part_comm.rank):
                return
            self._warn_of_arithmetic("load_state_dict", state["arithmetic"] or "")
            if self.virtual_shards is None and state["layout"]["digest"] != self.reducer.layout.digest:
                warnings.warn(
                    "load_state_dict: buckets were laid out in another way when this was saved (bucket_cap_mb, or "
                    "parts): last bits may differ from here on",
                    stacklevel=2,
                )

    def fitted(self, form: Any, saved: Saved) -> Any:
        """See `FitsSaved.fitted`: version 0.1.0 saved no updates that were passed over, and at first no good steps."""
        return completed(form, {"good_steps": 0, "passed_over": {"dict": []}})

    def save_states(self, path: str | Path) -> None:
        """See `BaseTrainer.save_states`.

        The file is a NumPy archive with one array a parameter and name of the optimizer's state,
        ``"<parameter>/<state>"``, whoever owned it, so that any number of ranks, any owner and any bucket size can read
        it. What compression has not sent yet is ``"<parameter>/residual"``, of shape ``(nodes, *shape)``.
        """
        self._refuse_half_a_step("save_states")
        arrays: dict[str, np.ndarray] = {}
        for name, tensor in self._tensors().items():
            whole = joined(tensor, self.world)
            if self.world.rank == 0:
                arrays[name] = whole
        header = {"version": 1, "step_count": self.step_count, "optimizer": self.optimizer.config()["name"]}
        if self.virtual_shards is not None:
            header |= {"virtual_shards": self.virtual_shards, "arithmetic": arithmetic()}
        if self.owner.passed_over:
            header["passed_over"] = self.owner.passed_over
        if self.is_scaling:
            header |= {"loss_scale": self.loss_scale, "good_steps": self.good_steps}
        write = partial(files.write, "save_states", Path(path), _HEADER, header, arrays)
        on_rank_0(self.world.comm, write)

    def load_states(self, path: str | Path) -> None:
        """See `BaseTrainer.load_states`."""
        with self._on_its_gpu():
            self._refuse_half_a_step("load_states")
            header, arrays = on_every_rank(self.world.comm, lambda: self._read_states(Path(path)))
            own = optimizer_states(self.owner, self.reducer)
            given = {name: {key: arrays[f"{name}/{key}"] for key in states} for name, states in own.items()}
            nodes = next((tensor.shape[0] for tensor in residuals(self.reducer, self.compression).values()), 1)
            rows = {name: arrays.get(f"{name}/{RESIDUAL}") for name in self.reducer.params}
            unsent = {name: regrouped(each, nodes) for name, each in rows.items() if each is not None and each.any()}
            self._take(own, given, unsent)
            self.owner.take_passed_over(header.get("passed_over", {}))
            self.step_count = header["step_count"]
            if self._dynamic is not None and "loss_scale" in header:
                self.loss_scale, self._dynamic.good_steps = header["loss_scale"], header["good_steps"]
            if self._reproducible is not None:
                self._reproducible.begin(self.step_count + 1)
            if self.world.rank == 0:
                self._warn_of_arithmetic(str(path), header.get("arithmetic", ""))

    def _read_states(self, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return header and arrays of a file of `save_states`; `DataError` unless it is of this model and optimizer."""
        fields = {"step_count": int, "optimizer": str}
        header, arrays = files.read("load_states", path, _HEADER, fields, "save_states")
        mine, num_shards = self.optimizer.config()["name"], header.get("virtual_shards", self.virtual_shards)
        if header["optimizer"] != mine:
            got = f"states of {header['optimizer']}"
            raise DataError("load_states", where=path, expected=f"states of {mine}", got=got)
        if self.virtual_shards not in (None, num_shards):
            raise DataError(
                "load_states", where=path, expected=f"states of {self.virtual_shards} virtual shards",
                got=f"states of {num_shards}", remedy=f"Trainer(reproducible=True, virtual_shards={num_shards})",
            )  # fmt: skip
        own = optimizer_states(self.owner, self.reducer)
        expected = {f"{name}/{key}": tensor.shape for name, states in own.items() for key, tensor in states.items()}
        shapes = {slot.name: slot.shape for slot in self.reducer.layout.slots}
        for name, array in arrays.items():  # of any number of nodes
            param, _, key = name.rpartition("/")
            if key == RESIDUAL and param in shapes and array.ndim:
                expected[name] = (len(array), *shapes[param])
        found = {name: array.shape for name, array in arrays.items()}
        if found != expected:
            odd = next(name for name in [*expected, *found] if found.get(name) != expected.get(name))
            raise DataError(
                "load_states", where=f"{path}, {odd}", expected=expected.get(odd, "no such array"),
                got=found.get(odd, "no such array"),
                remedy="build the model and optimizer that the states were saved from",
            )  # fmt: skip
        return header, arrays

    def _take(
        self, own: Mapping[str, Mapping[str, Sharded]], given: Mapping[str, Any], unsent: Mapping[str, Any]
    ) -> None:
        """Fill this rank's parts of the optimizer's state from those ``given``, and of what compression has not sent.

        Args:
            own: the optimizer's state by parameter and name.
            given: tensors by parameter and name.
            unsent: tensors of shape ``(nodes, *shape)`` by parameter.
        """
        for name, states in own.items():
            for key, tensor in states.items():
                take(f"{name}/{key}", tensor, given[name][key])
        mine = residuals(self.reducer, self.compression)
        for name, tensor in mine.items():
            if name in unsent:
                take(f"{name}/{RESIDUAL}", tensor, unsent[name])
                continue
            for part in tensor.parts:  # all was sent then
                part.values[...] = 0
        if unsent and not mine and self.world.rank == 0:
            warnings.warn("what compression had not sent yet is lost: nothing is compressed here", stacklevel=3)

    def _warn_of_arithmetic(self, operation: str, saved_by: str) -> None:
        """Warn that the last bits of a reproducible trainer may differ from those of another processor."""
        if self.virtual_shards is not None and saved_by not in ("", arithmetic()):
            warnings.warn(
                f"{operation}: saved where arithmetic was {saved_by}, and here it is {arithmetic()}: last bits may "
                "differ from here on",
                stacklevel=3,
            )

    def _tensors(self) -> dict[str, Sharded]:
        """Return what a file of states has, by ``"<parameter>/<name>"``."""
        states = optimizer_states(self.owner, self.reducer)
        found = {f"{name}/{key}": tensor for name, own in states.items() for key, tensor in own.items()}
        unsent = residuals(self.reducer, self.compression)
        return found | {f"{name}/{RESIDUAL}": tensor for name, tensor in unsent.items()}

    def _refuse_unfinished(self, operation: str) -> None:
        """Refuse what would lose gradients, and wait for updates under way; every rank must call."""

        def check() -> None:
            self._check_shards(operation)
            if self._held_count or self.reducer.accumulating or self.reducer.holds_sums:
                raise unfinished(operation)

        on_every_rank(self.world.comm, check)
        self.reducer.settle()

    def _refuse_half_a_step(self, operation: str) -> None:
        """Refuse parts of parameters, and a step between its virtual shards, and wait for updates under way.

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
                got=f"gradients of virtual shard {reducer.virtual_shard} under way",
                remedy="call it after the step of the last of own_virtual_shards, or drop this one by step(0) for each",
            )  # fmt: skip


class GraphUpdate:
    """The update of a step as the end of a CUDA graph; see `BucketTrainer.graph_update`.

    A graph freezes the numbers that a kernel is given, so learning rates, bias corrections and scales lie in the GPU's
    memory, and each launch brings those that have changed.
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
        """Whether each rule is its kernel and no more."""
        return all(piece.rule.update_is_its_kernel for piece, _ in self._captured)

    def capture(self) -> None:
        """Launch it, within a capture."""
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
        """Whether a launch of what was captured is still the update that is to be made."""
        trainer = self._trainer
        alone = all(map(trainer.reducer.takes, self._leaves))
        clips_alike = trainer.clip_norm == self._clip_norm
        return alone and clips_alike and trainer.updates_at_once and self._kernels() == self._captured

    def step(self, count: int, launch: Callable[[], None]) -> None:
        """Do what the trainer's ``step(count)`` does, where ``launch`` launches the graph."""

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
        found = []
        for pieces in self._trainer.owner.pieces:
            for piece in pieces:
                if id(piece.rule) not in names:
                    names[id(piece.rule)] = piece.rule.kernel(1, 1.0)[0]
                found.append((piece, names[id(piece.rule)]))
        return found
