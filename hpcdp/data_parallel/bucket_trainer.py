"""The trainer on buckets.

The trainer that sums gradients in buckets: a reduction for each, and an update by the owners of its shards.

Where ranks compute layers together (`hpcdp.parallel`): what a Trainer asks of parameters that are cut, or whole.

What a Trainer that sums gradients in buckets refuses: settings, and calls while gradients are under way.

Calls of a trainer on the GPU that its parameters are on, whatever GPU is current where it is called.

The update of a step as the end of a CUDA graph, which has forward and backward, too.

A graph freezes the numbers that a kernel is given, so learning rates, bias corrections and scales lie in the GPU's
memory, and each launch brings those that have changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from .. import autograd
from ..comm import World, init
from ..comm.consistency import on_every_rank, require_same
from ..compression import Compression, Settings
from ..core.arrays import Array, from_host, is_cupy, on_device_of
from ..core.devices import Device, Streams
from ..core.state import FitsSaved, Saved, cut_of
from ..errors import ConfigError, HpcdpError, StaleGradientError, is_number
from ..kernels.cuda.capture import numbers
from ..nn.microbatch import enter_shard
from ..optim import Optimizer
from . import Reducer, Replicated, ShardedUpdate, UpdateStrategy, trainer_state
from .buckets import Parameter, plan
from .deterministic import ReproducibleSteps, checked_virtual_shards, fix_arithmetic
from .parameter_edits import moved, moved_anywhere, of_rank_0, places_of
from .policy import (
    DynamicLossScale,
    Policy,
    Unwritten,
    checked_policy,
    clipped_on_gpu,
    clips_on_gpu,
    first_scale,
    host_looks,
    is_dynamic,
    skipping,
    stale_anywhere,
    update_scale,
)
from .profiling import EXPOSED, BucketTimes, CommunicationStats, GpuTimes
from .sharded_update import UpdateRange, lies_once_per_node
from .trainer import (
    MeanLosses,
    Trainer,
    checked_count,
    described,
    may_wait,
    require_alike,
    require_same_settings,
    show_to_profiler,
    trained,
    unfinished,
)

_ELEMENT_BY_ELEMENT = ("fp16", "bf16")


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


def require_whole(operation: str, params: Sequence[Parameter], remedy: str) -> None:
    """Raises `ConfigError` where one is a part of a parameter that other ranks have the rest of."""
    for param in params:
        cut = cut_of(param)
        if cut is not None and cut.total != param.data.shape[cut.axis]:
            raise ConfigError(
                operation, where=param.name, expected=f"all of shape {cut.whole(tuple(param.data.shape))}",
                got=f"a part of shape {tuple(param.data.shape)}", remedy=remedy,
            )  # fmt: skip


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


def refuse_reproducible(operation: str, reducer: Reducer, remedy: str) -> None:
    """Raises `ConfigError` where gradients are summed by virtual shards."""
    if reducer.virtual_shards is not None:
        raise ConfigError(
            operation, expected="a Trainer without reproducible=True", got="one with it",
            remedy=f"{remedy}, or train without it",
        )  # fmt: skip


def refuse_half_a_step(operation: str, reducer: Reducer) -> None:
    """Raises `StaleGradientError` between the virtual shards of a step."""
    shards = reducer.virtual_shards
    if shards is not None and (shards.current != shards.run.start or not reducer.arrivals.is_untouched):
        raise StaleGradientError(
            operation, expected="the end of a step", got=f"gradients of virtual shard {shards.current} under way",
            remedy="call it after the step of the last of own_virtual_shards, or drop this one by step(0) for each",
        )  # fmt: skip


def refuse_sums(operation: str, reducer: Reducer) -> None:
    """Raises `StaleGradientError` between `Trainer.allreduce_grads` and `Trainer.update`."""
    if reducer.holds_sums:
        raise StaleGradientError(
            operation, expected="gradients of this rank", got="those that allreduce_grads() has summed",
            remedy="call update(count), or step(0) to drop them",
        )  # fmt: skip


P = ParamSpec("P")
T = TypeVar("T")


def on_its_gpu(method: Callable[Concatenate[BucketTrainer, P], T]) -> Callable[Concatenate[BucketTrainer, P], T]:
    """``method`` with the GPU of the parameters, if they are on one, for this thread's current one."""

    @wraps(method)
    def call(self: BucketTrainer, *args: P.args, **kwargs: P.kwargs) -> T:
        with on_device_of(next((bucket.mine for bucket in self.reducer.buckets), None)):
            return method(self, *args, **kwargs)

    return call


def graph_update(trainer: BucketTrainer, leaves: Sequence[Any]) -> GraphUpdate | None:
    """The update of ``trainer``, if a graph can have it: one rank has all sums, of which nobody needs to know anything
    before, they are those of ``leaves``, whose hooks are the trainer's, and each rule is one kernel."""
    reducer = trainer.reducer
    on_gpus = all(is_cupy(each.data) for each in reducer.params.values())
    if not on_gpus or trainer.world.size > 1 or reducer.overlap:
        return None
    update = GraphUpdate(trainer, leaves)
    return update if update.is_possible and update.still_fits() else None


class GraphUpdate:
    """See `graph_update`."""

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
        if clips_on_gpu(self._trainer):
            scale = clipped_on_gpu(self._trainer, numbers(lambda: self._now[1:]))
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
        """What the trainer's ``step(count)`` does, where ``launch`` launches the graph."""

        def update(step: int, scale: float) -> None:
            self._now = step, scale
            launch()

        self._trainer.step_by(update, count)

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


_SAVED_WHOLE = "save all of its ranks' state: checkpoint.Manager(path, world).save(step, {'trainer': trainer})"


class BucketTrainer(Trainer, FitsSaved):
    """See `Trainer`: what it makes without a ``kvstore``."""

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
        self._means: MeanLosses | None = MeanLosses(warns=self.world.rank == 0)
        self.reducer.watch = self._means.note
        if self.reducer.beside is not None:
            self.reducer.beside.waited = self.stats.waited
        by_shards = owner == "shard" or (owner == "auto" and lies_once_per_node(self.reducer))
        self.owner: UpdateStrategy = (ShardedUpdate if by_shards else Replicated)(self.reducer, optimizer)
        self._places, self._grads = places_of(ours), [(param, param.grad) for param in ours]
        self._on_host = True
        self._stale: list[str] = []
        """Parameters without a gradient in earlier virtual shards of this step, where that is an error."""
        enter_shard(None)  # that of an earlier trainer
        shards = self.reducer.virtual_shards
        self._reproducible = None if shards is None else ReproducibleSteps(shards, params, self.world)
        self.world.closings.add(self._let_go)

    def _let_go(self) -> None:
        self.reducer.let_go()
        vars(self).update(reducer=self.world.comm, owner=self.world.comm)

    @staticmethod
    def check_options(options: dict[str, Any]) -> None:
        said = {"kvstore": None, "update_on_kvstore": None, "owner": "auto", "clip_norm": None, "overlap": None}
        said |= {name: value for name, value in options.items() if name in said}
        check_settings(**said, adding=())
        Compression.of(options.get("compression"))
        checked_policy(options.get("policy"))

    def forget_losses(self) -> None:
        if self._means is not None:
            self._means.forget()

    def measure_on_gpu(self) -> GpuTimes | None:
        if not all(is_cupy(param.data) for param in self.reducer.params.values()):
            return None

        def read(name: str, seconds: float) -> None:
            if name == EXPOSED:
                self.stats.waited_on_gpu(seconds)

        times = GpuTimes(Streams(Device.of(next(iter(self.reducer.params.values())).data)), read)
        self.reducer.waiting = lambda: times.part(EXPOSED)
        self._on_host = False
        return times

    @property
    def is_scaling(self) -> bool:
        """Whether the loss scale follows what gradients do."""
        return self._dynamic is not None

    @property
    def good_steps(self) -> int:
        """Steps without an overflow since the loss scale has last changed; 0 where it does not follow them."""
        return 0 if self._dynamic is None else self._dynamic.good_steps

    def take_loss_scale(self, scale: float, good_steps: int) -> None:
        """Go on with a loss scale that has held for so many steps."""
        self.loss_scale = scale
        if self._dynamic is not None:
            self._dynamic.good_steps = good_steps

    def take_parameters(self) -> None:
        """See `Trainer.take_parameters`."""
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
        """See `Trainer.own_virtual_shards`."""
        shards = self.reducer.virtual_shards
        return range(1) if shards is None else shards.run

    @property
    def bucket_times(self) -> Sequence[BucketTimes]:
        """See `Trainer.bucket_times`."""
        return self.reducer.times

    @property
    def nbytes(self) -> dict[str, int]:
        """See `Trainer.nbytes`."""
        shards = self.reducer.virtual_shards
        sums = 0 if shards is None else shards.nbytes
        return {
            "parameters": self.owner.nbytes_parameters,
            "gradients": sum(bucket.mine.nbytes for bucket in self.reducer.buckets) + sums,
            "state": self.owner.nbytes_state,
        }

    @on_its_gpu
    def step(self, count: int) -> int:
        """See `Trainer.step`."""
        return self.step_by(None if clips_on_gpu(self) else self.owner.reduce_and_update, count)

    def step_by(self, update: Callable[[int, float], None] | None, count: int) -> int:
        """`step` with an ``update`` that reduces and clips, too, for this one's step and by this scale, where the host
        does not look at sums; None: one after the other."""
        count = checked_count("step", count)
        self._settle("step")
        if self._means is not None:
            self._look_at_losses("step", count, stacklevel=6)
        if not self._syncing:
            self._held_count += count
            return self._held_count
        if count:
            refuse_sums("step", self.reducer)
        began_ns = time.perf_counter_ns()
        if self._reproducible is not None:
            self._reproducible.leave(count)
            if not self._reproducible.is_last:
                return self._next_virtual_shard(count)
        total, before = self._close_step(count), self.step_count
        try:
            if total and update is not None and not host_looks(self):
                update(self.step_count + 1, 1.0 / (total * self.loss_scale))
                self.step_count += 1
            elif total:
                self._reduce()
                self._update(total)
            else:
                self.reducer.drop()
            if self.step_count > before:
                if self._leaves_some:
                    self.owner.pass_over()
                if self._reproducible is not None:
                    self._reproducible.move_statistics()
        finally:
            self._begin_step()
        self._account(began_ns)
        return total

    def _look_at_losses(self, operation: str, count: int, stacklevel: int) -> None:
        assert self._means is not None
        if self._means.look(operation, count, self.loss_scale, stacklevel):
            self._means = self.reducer.watch = None

    @property
    def accumulation(self) -> tuple[bool, bool]:  # type: ignore[override]
        return self.reducer.arrivals.accumulating, not self._syncing

    def graph_update(self, leaves: Sequence[Any]) -> GraphUpdate | None:
        """See `Trainer.graph_update`."""
        return graph_update(self, leaves)

    def leave_out_unused(self, names: Sequence[str]) -> None:
        """Leave out of this step's update what will have no gradient, where backward goes to all but these parameters.

        Where this rank steps alone; else the closing exchange of the step says it.
        """
        is_missing = self.reducer.arrivals.is_missing
        self._leave_out(self._unwritten.left_alone([name for name in names if is_missing(name)], None))

    def launching(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """See `Trainer.launching`."""
        return self.reducer.launching(leaves) if self._syncing else ()

    @property
    def updates_at_once(self) -> bool:
        """Whether `step` updates without a look of the host's at the sums, and not only counts."""
        return self._syncing and not host_looks(self) and self._reproducible is None

    def _next_virtual_shard(self, count: int) -> int:
        assert self._reproducible is not None
        self._stale += self._refused(count)
        self.reducer.next_virtual_shard()
        self._reproducible.enter(self.step_count + 1)
        self._held_count += count
        return self._held_count

    def _reduce(self) -> None:
        if self.virtual_shards is not None and host_looks(self):
            self.reducer.reduce_everywhere()  # looking at parts of the sum would depend on what the parts are
        else:
            self.owner.reduce()

    def looked(self, is_finite: bool) -> None:
        """What the sums of a step are, where somebody has looked."""
        self.num_nonfinite += not is_finite
        if self._dynamic is not None:
            before, self.loss_scale = self.loss_scale, self._dynamic.after_step(self.loss_scale, is_finite)
            if self.loss_scale != before and self.reducer.coder is not None:
                for each in self.reducer.coder.feedback:
                    each.rescale(self.loss_scale / before)

    def _update(self, total: int) -> None:
        """Update from gradients that are summed."""
        scale = update_scale(self, total) if total else None
        if scale is not None:
            self.owner.update(self.step_count + 1, scale)
            self.step_count += 1

    @on_its_gpu
    def allreduce_grads(self) -> None:
        """See `Trainer.allreduce_grads`."""
        self._settle("allreduce_grads")
        refuse_reproducible("allreduce_grads", self.reducer, "let step() sum them")
        refuse_sums("allreduce_grads", self.reducer)
        began_ns = time.perf_counter_ns()
        self._close_step(0 if self.reducer.arrivals.num_missing == len(self.reducer.params) else 1)
        self.reducer.reduce_everywhere()
        self._account(began_ns)

    @on_its_gpu
    def update(self, count: int) -> int:
        """See `Trainer.update`."""
        self._settle("update")
        if not self.reducer.holds_sums:
            raise StaleGradientError(
                "update", expected="gradients that allreduce_grads() has summed", got="gradients of this rank alone"
            )
        held = checked_count("update", count) + self._held_count
        if self._means is not None:
            self._look_at_losses("update", count, stacklevel=5)
        settings = self._settings
        (total,), alike = self.reducer.closing.tally_alike(settings, held)
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Trainer.no_sync`."""
        refuse_reproducible("no_sync", self.reducer, "make the global batch larger")
        self._accumulate()
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before
            if before:
                self.reducer.arrivals.launch_again()

    @on_its_gpu
    def _accumulate(self) -> None:
        self.reducer.arrivals.accumulate()

    def _close_step(self, count: int) -> int:
        """The step's one small exchange: when it returns, every rank has left backward. The global count."""
        arrivals, unwritten, reproducible = self.reducer.arrivals, self._unwritten, self._reproducible
        stale = self._stale
        if arrivals.num_missing:
            stale = stale + self._refused(count + self._held_count if reproducible is None else count)
        count += self._held_count
        stale = list(dict.fromkeys(stale))  # a name may be missing in several virtual shards
        unused = arrivals.unused if arrivals.num_missing else []
        if not stale:
            arrivals.fill_with_zeros()
        waits = self.reducer.keeps_unsent and bool(unused)  # for what is not to be sent
        if not waits:
            self.reducer.launch_rest()
        learning_rate, loss_scale = self._settings
        settings = learning_rate, loss_scale, unwritten.mark(unused) if unused else 0
        used = unwritten.numbers(unused) if unwritten.length else ()
        met = () if reproducible is None else (reproducible.met_stranger,)
        lost = moved(self._places, self._grads)
        sums, alike = self.reducer.closing.tally_alike(settings, count, bool(stale or lost), *met, *used)
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
                self.reducer.keep_unsent(left_alone)
                self.reducer.launch_rest()
        return int(total)

    def _leave_out(self, names: frozenset[str]) -> None:
        self.owner.leave_out(names)
        self._leaves_some = bool(names)

    def _refused(self, count: int) -> list[str]:
        """Parameters without a gradient, although this rank had ``count`` samples, where that is an error."""
        return self._unwritten.refused(self.reducer.arrivals.missing) if count else []

    @property
    def _settings(self) -> tuple[float, float]:
        """Of the next update, which must be the same on all ranks."""
        return self.optimizer.learning_rate(self.step_count + 1), self.loss_scale

    def drop(self) -> None:
        """See `Trainer.drop`; nobody leaves before what was launched has ended."""
        self.reducer.launch_rest()
        self.reducer.drop()
        self._begin_step()

    def _begin_step(self) -> None:
        self.reducer.reset()
        self.reducer.arrivals.overwrite()
        self._held_count = 0
        self._stale = []
        if self._reproducible is not None:
            self._reproducible.begin(self.step_count + 1)

    def _account(self, began_ns: int) -> None:
        self.stats.steps += 1
        self.stats.waited(began_ns, time.perf_counter_ns(), self._on_host)
        self.stats.ran((each.launched_ns, each.done_ns) for each in self.bucket_times)

    def _refuse_unfinished(self, operation: str) -> None:
        """Refuse what would lose gradients; every rank must call."""

        def check() -> None:
            refuse_half_a_step(operation, self.reducer)
            if self._held_count or self.reducer.arrivals.accumulating or self.reducer.holds_sums:
                raise unfinished(operation)

        on_every_rank(self.world.comm, check)
        self.reducer.settle()

    def state_dict(self) -> dict[str, Any]:
        """See `Trainer.state_dict`."""
        self._refuse_unfinished("state_dict")
        return trainer_state.state_of(self)

    @on_its_gpu
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Trainer.load_state_dict`."""
        self._refuse_unfinished("load_state_dict")
        trainer_state.take_over(self, state)
        if self._reproducible is not None:
            self._reproducible.begin(self.step_count + 1)

    def fitted(self, form: Any, saved: Saved) -> Any:
        """See `FitsSaved.fitted`."""
        return trainer_state.fitted(form)

    def save_states(self, path: str | Path) -> None:
        """See `Trainer.save_states`."""
        require_whole("save_states", list(self.reducer.params.values()), _SAVED_WHOLE)
        on_every_rank(self.world.comm, lambda: refuse_half_a_step("save_states", self.reducer))
        self.reducer.settle()
        trainer_state.save(self, Path(path))

    @on_its_gpu
    def load_states(self, path: str | Path) -> None:
        """See `Trainer.load_states`."""
        require_whole("load_states", list(self.reducer.params.values()), _SAVED_WHOLE)
        on_every_rank(self.world.comm, lambda: refuse_half_a_step("load_states", self.reducer))
        self.reducer.settle()
        trainer_state.load(self, Path(path))
        if self._reproducible is not None:
            self._reproducible.begin(self.step_count + 1)
