"""`fit`, the loop of epochs around a trainer.

The training loop.

What `fit` asks of its arguments before the first step: on each rank, and of all together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..autograd import Tensor
from ..comm import World, init
from ..comm.consistency import on_every_rank, require_same
from ..comm.world import require_world
from ..core.checks import whole_number
from ..data import DataLoader, ShardedSampler, SharedSampler, VirtualShardSampler
from ..data_parallel.trainer import BaseTrainer
from ..engine.engine import Trace
from ..errors import ConfigError, MismatchError, type_named
from ..kvstore.trainer import StoreTrainer
from ..nn import Module
from ..nn.functional import softmax_cross_entropy
from ..nn.jit.cache import Phases
from .callbacks import Callback, EarlyStopping, StatesOfCallbacks
from .checkpoints import Checkpoints, Position
from .evaluate import Evaluation, brought_to, first_output, place_of
from .load_balance import AdaptWorkLoad
from .metrics import Meter, Record
from .report import BACKWARD, DATA, FORWARD, STEP, Phase, StepReport
from .trainer import TrainStep


def check_arguments(net: object, trainer: object, loader: object, **others: Any) -> None:
    """Raises `ConfigError` where an argument of `fit` is of another kind."""
    callbacks, checkpoints = others["callbacks"], others["checkpoints"]
    whole_number("fit", "epochs", others["epochs"], 0)
    for where, valid, expected, got in (
        ("net", isinstance(net, Module), "a network", net),
        ("trainer", isinstance(trainer, BaseTrainer), "a Trainer", trainer),
        ("loader", isinstance(loader, DataLoader), "a DataLoader", loader),
        ("callbacks", isinstance(callbacks, Sequence), "a list of callbacks", callbacks),
        ("checkpoints", isinstance(checkpoints, Checkpoints | None), "Checkpoints or None", checkpoints),
        ("evaluate", others["evaluate"] is None or callable(others["evaluate"]), "a function", others["evaluate"]),
    ):
        if not valid:
            raise ConfigError("fit", where=where, expected=expected, got=type(got).__name__)
    if net.has_own_step:  # type: ignore[attr-defined]
        name = type(net).__name__
        raise ConfigError("fit", where="net", expected="a network that is called", got=f"a {name}, which has step()")
    for each in callbacks:
        if not isinstance(each, Callback):
            raise ConfigError("fit", where="callbacks", expected="instances of Callback", got=repr(each))


def what_ranks_share(
    net: Module, loader: DataLoader, callbacks: Sequence[Callback], *, epochs: int, evaluate: object,
    checkpoints: Checkpoints | None,
) -> list[str]:  # fmt: skip
    """What must be the same on all ranks, in words. Of ``evaluate`` ranks must have one or none; they may differ."""
    given = [f"evaluate {'None' if evaluate is None else 'given'}"]
    given += ["checkpoints None"] if checkpoints is None else checkpoints.alike()
    deciding = [each for each in (callback.alike() for callback in callbacks) if each is not None]
    callbacks_too = f"callbacks {', '.join(deciding) or 'none'} that decide"
    return [f"epochs {epochs}", *given, callbacks_too, _order(getattr(loader, "sampler", None)), *_layers(net, "net")]


def _order(sampler: Any) -> str:
    """Which samples come when, where parts of one order fall to the ranks; else each rank has its own."""
    if isinstance(sampler, VirtualShardSampler):
        sampler = sampler.shards[0]
    if not isinstance(sampler, SharedSampler | ShardedSampler) or getattr(sampler, "num_parts", None) == 1:
        return "a sampler for each rank alone"
    names = ("n", "batch_size", "shuffle", "seed", "last", "num_parts", "weights")
    settings = ", ".join(f"{name}={getattr(sampler, name)!r}" for name in names if hasattr(sampler, name))
    return f"{type(sampler).__name__}({settings})"


def check_parts(loader: DataLoader, world: World) -> None:
    """Raises `MismatchError`, on all ranks, where ranks among which an order is cut have the same part of it.

    Every rank must call, after they have compared `what_ranks_share`.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ShardedSampler) or sampler.num_parts != world.size:
        return  # ranks with a part in common, as those of a split layer, are more than parts
    parts = world.comm.allgather_json(sampler.part_index)
    for part in parts:
        if parts.count(part) > 1:
            ranks = ", ".join(str(rank) for rank, other in enumerate(parts) if other == part)
            raise MismatchError(
                "fit", where="loader", expected="another part_index on each rank", got=f"{part} on ranks {ranks}",
                remedy="make its sampler with part_index=world.rank",
            )  # fmt: skip


def _layers(module: Module, path: str) -> Iterator[str]:
    yield f"{path} {type(module).__name__}"
    for name, part in module.children():
        yield from _layers(part, f"{path}.{name}")


def check_callbacks(callbacks: Sequence[Callback], evaluates: bool, loader: DataLoader) -> None:
    """Raises `ConfigError` where one waits for numbers of a test set, and there is no ``evaluate``, or changes the
    shares of another sampler than the loader's."""
    for each in callbacks:
        if isinstance(each, EarlyStopping) and not evaluates:
            each.require_in(("loss", "accuracy"))
        if isinstance(each, AdaptWorkLoad) and each.sampler is not getattr(loader, "sampler", None):
            raise ConfigError("AdaptWorkLoad", where="sampler", expected="that of fit's loader", got="another one")


def check_loader(loader: DataLoader, trainer: BaseTrainer) -> None:
    """Raises `ConfigError` where one of them has virtual shards, or another number of them, or ranks step together on
    batches that they take as they come."""
    sampler = getattr(loader, "sampler", None)
    if trainer.steps_together and isinstance(sampler, SharedSampler):
        raise ConfigError(
            "fit", where="loader", expected="batches of a rank's own where ranks step together", got="a SharedSampler",
            remedy="take a ShardedSampler, or kvstore='dist_async'",
        )  # fmt: skip
    num, own = getattr(sampler, "num_shards", None), getattr(sampler, "numbers", range(1))
    if num == trainer.virtual_shards and (num is None or own == trainer.own_virtual_shards):
        return
    expected = _loader_of(trainer.virtual_shards, trainer.own_virtual_shards)
    raise ConfigError("fit", where="loader", expected=expected, got=_loader_of(num, own))


def _loader_of(num_shards: int | None, own: range) -> str:
    """What a loader yields, in words."""
    if num_shards is None:
        return "one of whole batches of a rank"
    return f"that of a VirtualShardSampler for shards {own.start} to {own.stop - 1} of {num_shards}"


_EXCHANGE_EVERY = 10
"""Steps between two exchanges of metrics, about: one small allreduce in ten steps cannot be seen in the run's time."""


def fit(
    net: Module,
    trainer: BaseTrainer,
    loader: DataLoader,
    *,
    epochs: int,
    loss: Callable[[Tensor, Any], Tensor] = softmax_cross_entropy,
    evaluate: Callable[[], Evaluation] | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: Checkpoints | None = None,
    world: World | None = None,
    hybridize: bool = False,
) -> list[Record]:
    """Train a network; every rank must call, with a loader of its own part of the data.

    Ranks may have batches of different sizes, empty batches and different numbers of batches: a rank without samples
    takes part in the step with count 0, so that each step is the step of the global batch and no rank waits for ever.
    The length of an epoch is the longest loader's.

    On a store of kind ``dist_async`` ranks do not wait for each other: each makes a step for every batch that its
    loader yields, preferably one of a `data.SharedSampler`, from which faster ranks take more. They meet at the end of
    an epoch; only then numbers are exchanged.

    Args:
        net: changed in place, through the parameters that ``trainer`` has.
        loader: has a length and yields ``(x, y)``; it is told the epoch, counted from 0. With a reproducible trainer
            that of a `data.VirtualShardSampler` of as many virtual shards. Batches that are not where the parameters
            are, are brought there when their step begins; ``DataLoader(..., device=world.device)`` brings them ahead.
        loss: per sample, shape ``(batch,)``; no mean over samples, which the trainer takes over those of all ranks.
        evaluate: called on every rank after each epoch; usually ``lambda: train.evaluate(net, dataset, world)``. What
            it gives on rank 0 is in the record, None for an accuracy of NaN: a regression has none.
        callbacks: may differ between ranks, see `Callback`.
        checkpoints: when to save, whether to go on from a checkpoint, and who may ask for an early end; its `stopped`
            says then whether there was one. None: nothing is saved.
        hybridize: replay each step as one plan, see `TrainStep.hybridize`.

    Returns:
        One record of kind "epoch" for each epoch that this call has ended, alike on every rank (docs/training.md and
        docs/tracing.md list what is in it). Its accuracy is that of the first output, where there are several, and None
        where labels are no integers ``(batch, ...)`` for outputs ``(batch, ..., classes)``.

    Raises:
        ConfigError: an argument is none of that; the loader is not the trainer's: one of them has virtual shards, or
            another number of them; or there are checkpoints, and the run does not go on from them; no rank has a batch.
            In the first step, on ranks with samples: the loss is not of shape ``(batch,)``.
        MismatchError: ranks have another number of epochs, other kinds of layers, another order of the data set, other
            shares or callbacks that decide, or the same part of the data; on every rank, before the first step.
        DataError: there is no checkpoint to go on from, or another job saves there; on every rank.
        SaveError: a checkpoint could not be written; on every rank. Older ones are as they were.
    """
    require_world("fit", world)
    world = init() if world is None else world

    def check() -> None:
        check_arguments(
            net, trainer, loader, epochs=epochs, callbacks=callbacks, checkpoints=checkpoints, evaluate=evaluate
        )
        check_loader(loader, trainer)

    on_every_rank(world.comm, check)
    same = what_ranks_share(net, loader, callbacks, epochs=epochs, evaluate=evaluate, checkpoints=checkpoints)
    require_same(world.comm, "fit", same, "call fit alike on all ranks")
    check_parts(loader, world)
    check_callbacks(callbacks, evaluate is not None, loader)
    loop = _Loop(net, trainer, loader, loss, callbacks, world, checkpoints, hybridize)
    position = loop.begin()
    steps = loop.steps()
    if epochs and steps == 0:
        raise ConfigError(
            "fit", where="loader", expected="an epoch of at least one batch", got="none on any rank",
            remedy="a smaller batch_size, or last='keep'",
        )  # fmt: skip
    begun: list[Callback] = []
    try:
        for callback in callbacks:
            if position.total:
                callback.on_resume(position.epoch - 1, position.total)
            callback.on_start(epochs, steps)
            begun.append(callback)
        return loop.train(position, epochs, evaluate)
    finally:
        with contextlib.ExitStack() as ending:  # each is told, also where one before it raises
            for callback in reversed(begun):
                ending.callback(callback.on_end)


def _tell(callbacks: Sequence[Callback], record: Record) -> None:
    for callback in callbacks:
        callback.on_record(record)


@dataclass
class _Loop:
    """The epochs of one `fit`."""

    net: Module
    trainer: BaseTrainer
    loader: DataLoader
    loss: Callable[[Tensor, Any], Tensor]
    callbacks: Sequence[Callback]
    world: World
    checkpoints: Checkpoints | None
    hybridize: bool

    def __post_init__(self) -> None:
        self.meter, self.report = Meter(self.trainer, self.world), StepReport(self.trainer, self.world)
        phases = Phases(*(self.report.phase[name] for name in (FORWARD, BACKWARD, STEP)))
        self._step = TrainStep(self.net, self.trainer, self.loss, phases)
        self._step.hybridize(self.hybridize)
        self._there = place_of(self.net)  # looked at now: in a step it may wait for what others update
        self._all_compute = any(part.needs_all_ranks for part in self.net.modules())
        self._trace: Trace | None = self.world.kept.get(Trace)
        self._exchanging = Phase("metrics", self._trace)

    def begin(self) -> Position:
        """Where the run goes on."""
        if self.checkpoints is None:
            return Position(1, 0, 0)
        parts: dict[str, Any] = {
            "network": self.net, "trainer": self.trainer, "loader": self.loader, "meter": self.meter,
            "callbacks": StatesOfCallbacks(self.callbacks),
        }  # fmt: skip
        return self.checkpoints.begin(self.world, parts)

    def steps(self) -> int:
        """The steps of an epoch of the longest loader; every rank must call, in each epoch: some have one more."""
        return max(self.world.comm.allgather_json(len(self.loader) // len(self.trainer.own_virtual_shards)))

    def train(self, start: Position, epochs: int, evaluate: Callable[[], Evaluation] | None) -> list[Record]:
        """Train from ``start`` to the end of the last epoch, or to where all ranks stop."""
        records: list[Record] = []
        evaluating = Phase("evaluate", self._trace)
        done, ended = start, 0 if self.checkpoints is None else self.checkpoints.ended
        for epoch in range(start.epoch, epochs + 1) if epochs > ended else ():
            seen = self._run(epoch, start.step if epoch == start.epoch else 0)
            if seen is None:
                return records
            times = self.report.end_epoch()  # what evaluate waits for is no part of the training
            with evaluating:
                tested = {} if evaluate is None else self._tested(evaluate())
            records.append(self.meter.end_epoch(epoch) | tested | times | seen)
            _tell(self.callbacks, records[-1])
            done, ended = Position(epoch + 1, 0, self.meter.steps), 0
            if any(self.world.comm.allgather_json(any(each.stop_training for each in self.callbacks))):
                ended = epochs
                break
            if self.checkpoints is not None and epoch < epochs:
                self.checkpoints.after_epoch(done, records[-1], self.trainer.steps_together)
        if self.checkpoints is not None:
            self.checkpoints.at_end(done, records[-1] if records else None, ended)
        return records

    def _tested(self, own: Evaluation | None) -> Record:
        """What rank 0 has found, on all ranks: those of a program's own ``evaluate`` may differ in their last bits."""
        if own is None:
            numbers = {}
        elif not isinstance(own, Evaluation):
            raise ConfigError("fit", where="evaluate", expected="an Evaluation, or None", got=type_named(own))
        else:
            accuracy = None if math.isnan(own.accuracy) else float(own.accuracy)
            numbers = {"test_loss": float(own.loss), "test_accuracy": accuracy}
        tested: Record = self.world.comm.allgather_json(numbers)[0]
        return tested

    def _run(self, epoch: int, done: int) -> Record | None:
        """Train for an epoch, of which ``done`` steps are done; what else its record says, None where the run stops."""
        self.loader.set_epoch(epoch - 1)
        if done:
            self.meter.go_on()
        else:
            self.meter.start_epoch()
        self.report.start_epoch()
        if isinstance(self.trainer, StoreTrainer) and not self.trainer.steps_together:
            return self._alone(epoch, done, self.trainer)
        return None if self._together(epoch, done) else {}

    def _together(self, epoch: int, done: int) -> bool:
        """All ranks make each step, also those that have no samples for it; whether the run stops."""
        steps = self.steps()
        exchange_every = math.ceil(steps / max(1, round(steps / _EXCHANGE_EVERY)))
        batches = iter(self.loader)
        for step in range(done + 1, steps + 1):
            for shard in self.trainer.own_virtual_shards:
                self._train(shard, self._next(batches))
            self._end_step()
            if step % exchange_every == 0 or step == steps:
                self._exchange(epoch - 1 + step / steps)
            for callback in self.callbacks:
                callback.on_step(epoch, step)
            if self.checkpoints is not None:
                position = Position(epoch, step, self.meter.steps)
                if self.checkpoints.after_step(position, steps):
                    return True
        return False

    def _alone(self, epoch: int, done: int, trainer: StoreTrainer) -> Record | None:
        """This rank makes a step for each of its batches, and waits for nobody until the epoch, or the run, ends.

        What the epoch's record says of it, None where the run stops.
        """
        batches, step, sampler = iter(self.loader), done, self.loader.sampler
        stop = None if self.checkpoints is None else self.checkpoints.stop
        while (batch := self._next(batches)) is not None:
            self._train(0, batch)
            self._end_step()
            step = getattr(sampler, "taken", step + 1)
            for callback in self.callbacks:
                callback.on_step(epoch, step)
            if stop is not None and stop.reason and isinstance(sampler, SharedSampler):
                sampler.close()  # and so for all ranks; what they have read ahead they use
        with self.report.phase[STEP]:
            trainer.synchronize()
        self._exchange(epoch)
        if self.checkpoints is not None:
            taken = getattr(sampler, "taken", step)  # also where this rank came too late for any
            position = Position(epoch, max(self.world.comm.allgather_json(taken)), self.meter.steps)
            if self.checkpoints.where_all_meet(position):
                return None
        return trainer.statistics()

    def _next(self, batches: Iterator[Any]) -> Any:
        with self.report.phase[DATA]:
            return self._brought(next(batches, None))

    def _brought(self, batch: Any) -> Any:
        """``batch``, if there is one, where the network computes."""
        return None if batch is None else tuple(brought_to(each, self._there) for each in batch)

    def _end_step(self) -> None:
        self.meter.end_step()
        self.report.end_step()

    def _exchange(self, epoch: float) -> None:
        """Sum over ranks what they have measured since they last did; every rank must call."""
        with self._exchanging:
            exchanged = self.meter.exchange(epoch)
        if self._trace is not None and self.world.rank == 0:
            self._trace.count("samples/s", exchanged["samples_per_s"])
        _tell(self.callbacks, exchanged)

    def _train(self, shard: int, batch: Any) -> None:
        """One call of `Trainer.step`, with this rank's ``batch``, None where it has none."""
        phase = self.report.phase
        if batch is None and self._all_compute:
            batch = self._brought(self.loader.read(np.empty(0, np.int64)))
        if batch is None or (len(batch[1]) == 0 and not self._all_compute):
            with phase[STEP]:
                self.trainer.step(0)
            return
        x, y = batch
        losses, output = self._step(x, y)
        first = first_output("fit", output)
        self.meter.add(shard, losses.data, first.data, y)
