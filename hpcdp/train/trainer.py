"""The Trainer: from the gradients of each rank's samples to one update by the global batch."""

from __future__ import annotations

import math
import operator
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..arrays import from_host, to_host
from ..comm import World, init
from ..comm.agreement import on_every_rank, require_same
from ..compression import Codec, Compression
from ..errors import ConfigError, HpcdpError, NonFiniteGradientError, StaleGradientError, listed
from ..gradients import EveryRank, Owner, Reducer, ShardOwner
from ..gradients.bucket import Parameter
from ..gradients.buckets import plan
from ..nn.virtual_shard import enter_shard
from ..optim import Optimizer
from . import trainer_states
from .policy import Policy
from .reproducible import ReproducibleSteps, checked_virtual_shards, fix_arithmetic

OWNERS = ("auto", "rank", "shard")
"""The valid values of ``owner``."""


@dataclass
class CommunicationStats:
    """Where the time of a trainer's steps went, on this rank, in seconds."""

    steps: int = 0
    total_s: float = 0.0
    """In communication: waiting for other ranks, summing over them, and updates that are fused into the sum."""
    exposed_s: float = 0.0
    """The part of it during which this rank did nothing else."""

    @property
    def hidden_share(self) -> float:
        """The share of communication that ran beside computation, 0 to 1."""
        return 1.0 - self.exposed_s / self.total_s if self.total_s else 0.0


class Trainer:
    """Updates a model's parameters by the gradients of all ranks. Every rank must make it, with the same model.

    A loss is per sample and gradients are sums (as in Gluon), so each rank says how many samples its gradients stand
    for and the trainer divides by the global number once: uneven and empty shards give exactly the global batch's
    gradient.

    From construction on, ``param.data`` and ``param.grad`` are views of flat buckets; with ``owner="shard"`` the
    parameters lie in memory shared by the node, once. All ranks start with rank 0's values.

    Args:
        params: the model's parameters, ``net.parameters()``; those with ``grad_req="null"`` are left alone.
        optimizer: the update rule, with the same settings on every rank.
        world: the ranks; default `hpcdp.init()`.
        owner: who updates. ``"rank"``: every rank all parameters. ``"shard"``: every rank its shard, with 1/n of the
            optimizer's state for n ranks on the smallest node (`nbytes` tells). ``"auto"``: ``"shard"`` where the
            node's ranks share memory, else ``"rank"``. The numbers are the same to the bit.
        bucket_cap_mb: size of a bucket of gradients in MiB; the first has 1. None: an eighth of the model, but from
            1 to 25.
        clip_norm: scale the global batch's mean gradient down to this norm where it is longer.
        overlap: reduce a bucket as soon as backward has written it, and update its parameters while the next forward
            runs, as far as that does not need it; then gradients must not be changed by hand before `step`, and there
            is one backward for each, with ``grad_req="write"``. None: where there are several nodes. The numbers are
            the same to the bit.
        compression: how gradients are compressed between nodes: ``"fp16"``, ``"bf16"``, ``"2bit"``, ``"1bit"`` or
            ``"topk"``, with settings behind a colon (``"topk:ratio=0.05"``), or a `Compression`. None: not at all.
        policy: what to do about unused parameters and gradients that are not finite.
        reproducible: the same bits on any number of ranks and nodes. Each rank calls `step` after every virtual shard
            of `own_virtual_shards`, and the last of these calls updates; `data.VirtualShardSampler` yields them. Sets
            BLAS to one thread. See docs/reproducibility.md for what it refuses, and what it costs.
        virtual_shards: into how many pieces every global batch is then cut, at least one a rank; it decides the bits.
            None: 8.

    Raises:
        MismatchError: the ranks' parameters or settings differ, later in `step` their learning rates or loss scales; on
            every rank, naming ranks and the first difference.
        ConfigError: no parameters, an unknown owner or codec, a clip_norm that is not positive; what would keep a run
            from being reproducible.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        optimizer: Optimizer,
        world: World | None = None,
        *,
        owner: str = "auto",
        bucket_cap_mb: float | None = None,
        clip_norm: float | None = None,
        overlap: bool | None = None,
        compression: str | Codec | Compression | None = None,
        policy: Policy | None = None,
        reproducible: bool = False,
        virtual_shards: int | None = None,
    ) -> None:
        params = list(params)
        trained = [param for param in params if param.grad_req != "null"]
        adding = [param.name for param in trained if param.grad_req == "add"]
        if not trained:
            raise ConfigError("Trainer", where="params", expected="at least one trainable parameter", got="none")
        if owner not in OWNERS:
            raise ConfigError("Trainer", where="owner", expected=" or ".join(OWNERS), got=repr(owner))
        if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
            raise ConfigError("Trainer", where="clip_norm", expected="a positive norm", got=repr(clip_norm))
        if not (overlap is None or isinstance(overlap, bool)):
            raise ConfigError("Trainer", where="overlap", expected="True, False or None", got=repr(overlap))
        if overlap and adding:
            raise ConfigError(
                "Trainer", where=adding[0], expected="grad_req='write' with overlap", got="grad_req='add'",
                remedy="add up within no_sync(), or pass overlap=False",
            )  # fmt: skip
        self.compression = Compression.of(compression)
        self.world = init() if world is None else world
        self.virtual_shards = checked_virtual_shards(
            reproducible, virtual_shards, trained, self.compression, self.world
        )
        """Into how many pieces global batches are cut; None where the trainer is not reproducible."""
        self.optimizer = optimizer
        self.stats = CommunicationStats()
        self.step_count = 0
        """Updates made so far."""
        self.num_nonfinite = 0
        """Steps whose summed gradients held a NaN or an infinity, as far as the policy looks."""
        self.loss_scale = 1.0
        """How many times too large the gradients are, because the loss was scaled up before backward."""
        self.policy = Policy() if policy is None else policy
        self._warned: set[str] = set()
        self._clip_norm = clip_norm
        self._syncing = True
        self._held_count = 0
        described = [(param.name, tuple(param.data.shape), np.dtype(param.data.dtype)) for param in trained]
        items = [f"{name} {shape} {dtype}" for name, shape, dtype in described]
        items += [f"{name} grad_req='add'" for name in adding]
        items += [f"optimizer {optimizer.config()}", f"{owner=} {bucket_cap_mb=} {clip_norm=} {overlap=} {self.policy}",
                  f"compression {self.compression}", f"virtual_shards={self.virtual_shards}"]  # fmt: skip
        require_same(self.world.comm, "Trainer", items)
        if self.virtual_shards is not None:
            fix_arithmetic(self.world)
        for param in trained:
            values = np.ascontiguousarray(to_host(param.data))
            self.world.comm.native_broadcast(values, 0)
            param.data[...] = from_host(values, param.data)
        layout, overlap = plan(described, bucket_cap_mb), False if adding else overlap
        self.reducer = Reducer(trained, layout, self.world, overlap, self.compression, self.virtual_shards)
        by_shards = owner == "shard" or (owner == "auto" and self._somebody_shares())
        self.owner: Owner = (ShardOwner if by_shards else EveryRank)(self.reducer, optimizer)
        self._stale: list[str] = []
        """Parameters without a gradient in earlier virtual shards of this step, where that is an error."""
        enter_shard(None)  # that of an earlier trainer
        shards = self.reducer.virtual_shards
        self._reproducible = None if shards is None else ReproducibleSteps(shards, params, self.world)

    def _somebody_shares(self) -> bool:
        """Whether the ranks of some node hold the buckets together; every rank must call: nodes may differ."""
        return any(self.world.comm.allgather_json(self.reducer.memory.size > 1))

    @property
    def own_virtual_shards(self) -> range:
        """The virtual shards of every global batch that this rank computes, in order: one for each call of `step`.

        One, number 0, where the trainer is not reproducible.
        """
        shards = self.reducer.virtual_shards
        return range(1) if shards is None else shards.run

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of this rank: its share of the ``"parameters"``, its ``"gradients"``, with the sums of virtual shards
        where it is reproducible, its part of the ``"state"``."""
        shards = self.reducer.virtual_shards
        sums = 0 if shards is None else shards.nbytes
        return {
            "parameters": self.owner.nbytes_parameters,
            "gradients": sum(bucket.mine.nbytes for bucket in self.reducer.buckets) + sums,
            "state": self.owner.nbytes_state,
        }

    def step(self, count: int) -> int:
        """Reduce the gradients over all ranks and update; every rank must call. Changes parameters in place.

        The gradients are not changed in a way to rely on; see `allreduce_grads` for looking at their sum.

        Args:
            count: samples of this rank whose gradients backward has written. A rank that has run out of data passes 0
                and needs no backward.

        Returns:
            The global count; 0 when no rank had samples, and then nothing is updated. Inside `no_sync`, and before this
            rank's last virtual shard, the count held back so far on this rank.

        Raises:
            StaleGradientError: backward did not write all gradients on a rank with samples; raised on every rank. Or
                `allreduce_grads` has summed them already, and `update` is to follow.
        """
        count = _checked_count("step", count)
        if not self._syncing:
            self._held_count += count
            return self._held_count
        if count:
            self._refuse_sums("step")
        began = time.perf_counter()
        if self._reproducible is not None:
            self._reproducible.leave(count)
            if not self._reproducible.is_last:
                return self._next_virtual_shard(count)
        total, before = self._close_step(count), self.step_count
        try:
            if total and not self._looks_at_sums:
                self.step_count += 1
                self.owner.reduce_and_update(self.step_count, 1.0 / (total * self.loss_scale))
            else:
                self._reduce()
                self._update(total)
            if self._reproducible is not None and self.step_count > before:
                self._reproducible.move_statistics()
        finally:
            self._begin_step()
        self._account(began)
        return total

    def _next_virtual_shard(self, count: int) -> int:
        assert self._reproducible is not None
        self._stale += self._unwritten(count)
        self.reducer.next_virtual_shard()
        self._reproducible.enter(self.step_count + 1)
        self._held_count += count
        return self._held_count

    def _reduce(self) -> None:
        if self.virtual_shards is not None and self._looks_at_sums:
            self.reducer.reduce_everywhere()  # looking at parts of the sum would depend on what the parts are
        else:
            self.owner.reduce()

    @property
    def _looks_at_sums(self) -> bool:
        return self._clip_norm is not None or self.policy.nonfinite != "ignore"

    def _update(self, total: int) -> None:
        """Update from gradients that are summed."""
        if not total:
            return
        scale = 1.0 / (total * self.loss_scale)
        if self._looks_at_sums:
            norm = self.reducer.sum_norm()
            if not math.isfinite(norm):
                self.num_nonfinite += 1
                if self.policy.nonfinite == "raise":
                    raise NonFiniteGradientError(
                        "step", where=f"step {self.step_count + 1}", expected="finite gradients",
                        got="a NaN or an infinity in their sum over all ranks",
                        remedy="lower the learning rate, or skip such steps: Policy(nonfinite='skip')",
                    )  # fmt: skip
                if self.policy.nonfinite == "skip":
                    return
            elif self._clip_norm is not None and norm * scale > self._clip_norm:
                scale = self._clip_norm / norm
        self.step_count += 1
        self.owner.update(self.step_count, scale)

    def allreduce_grads(self) -> None:
        """Make every parameter's ``grad``, on every rank, the sum over all ranks; `update` is to follow.

        Every rank must call, after backward. For gradients that are changed by hand before the update.

        Raises:
            StaleGradientError: as `step`.
        """
        self._refuse_reproducible("allreduce_grads", "let step() sum them")
        self._refuse_sums("allreduce_grads")
        began = time.perf_counter()
        self._close_step(0 if self.reducer.num_missing == len(self.reducer.params) else 1)
        self.reducer.reduce_everywhere()
        self._account(began)

    def _refuse_reproducible(self, operation: str, remedy: str) -> None:
        if self.virtual_shards is not None:
            raise ConfigError(
                operation, expected="a Trainer without reproducible=True", got="one with it",
                remedy=f"{remedy}, or train without it",
            )  # fmt: skip

    def _refuse_half_a_step(self, operation: str) -> None:
        shards = self.reducer.virtual_shards
        if shards is None:
            return
        if shards.current != shards.run.start or not self.reducer.is_untouched:
            raise StaleGradientError(
                operation, expected="the end of a step", got=f"gradients of virtual shard {shards.current} under way",
                remedy="call it after the step of the last of own_virtual_shards, or drop this one by step(0) for each",
            )  # fmt: skip

    def _refuse_sums(self, operation: str) -> None:
        if self.reducer.holds_sums:
            raise StaleGradientError(
                operation, expected="gradients of this rank", got="those that allreduce_grads() has summed",
                remedy="call update(count), or step(0) to drop them",
            )  # fmt: skip

    def update(self, count: int) -> int:
        """Update from gradients that `allreduce_grads` has summed; every rank must call. Changes parameters in place.

        Args:
            count: samples of this rank behind the sum.

        Returns:
            The global count; 0 when no rank had samples, and then nothing is updated.
        """
        if not self.reducer.holds_sums:
            raise StaleGradientError(
                "update", expected="gradients that allreduce_grads() has summed", got="gradients of this rank alone"
            )
        held = _checked_count("update", count) + self._held_count
        total = int(self.reducer.closing.tally(held)[0])
        try:
            self._update(total)
        finally:
            self._begin_step()
        return total

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it `step` only counts: backward adds to the gradients, and the next step outside takes them all.

        Ranks may accumulate different numbers of batches.
        """
        self._refuse_reproducible("no_sync", "make the global batch larger")
        self.reducer.accumulate()
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before
            if before:
                self.reducer.launch_again()

    def _close_step(self, count: int) -> int:
        """The step's one small exchange: when it returns, every rank has left backward. The global count."""
        in_shards = self._reproducible is not None
        stale = self._stale + self._unwritten(count if in_shards else count + self._held_count)
        count += self._held_count
        stale = list(dict.fromkeys(stale))  # a name may be missing in several virtual shards
        if not stale:
            self.reducer.fill_missing_with_zeros()
        self.reducer.launch_rest()
        settings = self.optimizer.learning_rate(self.step_count + 1), self.loss_scale
        met = () if self._reproducible is None else (self._reproducible.met_stranger,)
        (total, num_stale, *num_strangers), alike = self.reducer.closing.tally_alike(settings, count, bool(stale), *met)
        if not alike:
            self._refuse(settings)
        if any(num_strangers):
            self._give_up()
            raise HpcdpError(
                "step", expected="layers whose parameters the Trainer has", got="a BatchNorm of which it has none",
                remedy="give it the parameters of all that is trained",
            )  # fmt: skip
        if num_stale:
            by_rank = self.world.comm.allgather_json(stale[:3])
            self._give_up()
            rank = next(rank for rank, names in enumerate(by_rank) if names)
            raise StaleGradientError(
                "step",
                where=f"rank {rank}",
                expected="a gradient for every parameter since the last step",
                got="none for " + ", ".join(by_rank[rank]),
                remedy="call backward() before step(), give unused parameters grad_req='null', or count them as zero: "
                "Policy(unused='zero')",
            )
        return int(total)

    def _unwritten(self, count: int) -> list[str]:
        """Parameters without a gradient, although this rank had ``count`` samples, where that is an error."""
        unused = self.reducer.missing if count else []
        if self.policy.unused == "warn" and not self._warned.issuperset(unused):
            self._warned.update(unused)
            warnings.warn(f"rank {self.world.rank}: no gradient for {listed(unused)}: counted as zero", stacklevel=4)
        return unused if self.policy.unused == "error" else []

    def _refuse(self, settings: tuple[float, float]) -> None:
        """Raise that ranks would go different ways, on all of them."""
        self._give_up()
        items = [f"learning rate {settings[0]}", f"loss scale {settings[1]}"]
        require_same(self.world.comm, "step", items, "change them alike on all ranks")

    def _give_up(self) -> None:
        """Drop the step before an error; nobody leaves before what was launched has ended."""
        self.owner.reduce()
        self._begin_step()

    def _begin_step(self) -> None:
        self.reducer.reset()
        self.reducer.overwrite()
        self._held_count = 0
        self._stale = []
        if self._reproducible is not None:
            self._reproducible.begin(self.step_count + 1)

    def _account(self, began: float) -> None:
        spent, busy_s, beside = time.perf_counter() - began, 0.0, self.reducer.beside
        if beside is not None:
            spent += beside.waited_s
            beside.waited_s = 0.0
            busy_s = beside.busy_s()
        self.stats.steps += 1
        self.stats.exposed_s += spent
        self.stats.total_s += max(spent, busy_s)

    def save_states(self, path: str | Path) -> None:
        """Write the optimizer's state, of all ranks, to one file, which replaces ``path`` whole; every rank must call.

        Raises:
            DataError: rank 0 cannot write there; on every rank.
            StaleGradientError: some, but not all virtual shards of a step are computed; on every rank.
        """
        on_every_rank(self.world.comm, lambda: self._refuse_half_a_step("save_states"))
        self.reducer.settle()
        trainer_states.save(self, Path(path))

    def load_states(self, path: str | Path) -> None:
        """Restore what `save_states` wrote, whatever the number of ranks and the owner then; every rank must call.

        Raises:
            DataError: the file is missing, damaged or of another model or optimizer; on every rank, nothing is changed.
            StaleGradientError: as `save_states`.
        """
        on_every_rank(self.world.comm, lambda: self._refuse_half_a_step("load_states"))
        self.reducer.settle()
        trainer_states.load(self, Path(path))
        if self._reproducible is not None:
            self._reproducible.begin(self.step_count + 1)


def _checked_count(operation: str, count: int) -> int:
    try:
        checked = operator.index(count)
    except TypeError:
        checked = -1
    if checked < 0:
        raise ConfigError(operation, where="count", expected="a number of samples, 0 or more", got=repr(count))
    return checked
