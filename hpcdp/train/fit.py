"""`fit`, the training loop, the checks of its arguments on each rank and across ranks, and a shared work counter."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np

from ..autograd import Tensor
from ..comm import World, init
from ..comm.consistency import on_every_rank, require_same
from ..comm.world import require_world
from ..core.checks import function, instance, instances, whole_number
from ..data import DataLoader, ShardedSampler, SharedSampler, VirtualShardSampler
from ..data_parallel.base_trainer import BaseTrainer
from ..engine.engine import Trace
from ..errors import ConfigError, MismatchError
from ..kvstore.asynchronous import AsyncStore
from ..kvstore.store_trainer import StoreTrainer
from ..nn import Module
from ..nn.functional import softmax_cross_entropy
from ..nn.jit.cache import Phases
from .callbacks import AdaptWorkLoad, Callback, EarlyStopping, StatesOfCallbacks
from .checkpoints import Checkpoints, Position
from .metrics import Evaluation, Meter, Record, brought_to, first_output, place_of
from .report import BACKWARD, DATA, FORWARD, STEP, Phase, StepReport
from .trainer import TrainStep


def what_ranks_share(
    net: Module, loader: DataLoader, callbacks: Sequence[Callback], *, epochs: int, evaluate: object,
    checkpoints: Checkpoints | None,
) -> list[str]:  # fmt: skip
    """Describe the arguments that must be the same on all ranks; of ``evaluate`` only whether there is one."""
    arguments = [f"evaluate {'None' if evaluate is None else 'given'}"]
    arguments += ["checkpoints None"] if checkpoints is None else checkpoints.alike()
    shared = [alike for callback in callbacks if (alike := callback.alike()) is not None]
    arguments.append(f"shared callbacks {', '.join(shared) or 'none'}")
    return [f"epochs {epochs}", *arguments, _order(getattr(loader, "sampler", None)), *_layers(net, "net")]


def _order(sampler: Any) -> str:
    """Describe the order of samples if the ranks share one."""
    if isinstance(sampler, VirtualShardSampler):
        sampler = sampler.shards[0]
    if not isinstance(sampler, SharedSampler | ShardedSampler) or getattr(sampler, "num_parts", None) == 1:
        return "a sampler for each rank alone"
    names = ("n", "batch_size", "shuffle", "seed", "last", "num_parts", "weights")
    settings = ", ".join(f"{name}={getattr(sampler, name)!r}" for name in names if hasattr(sampler, name))
    return f"{type(sampler).__name__}({settings})"


def check_parts(loader: DataLoader, world: World) -> None:
    """Raise `MismatchError` on all ranks if two of them have the same part of the data; every rank must call.

    The ranks must have compared `what_ranks_share` before.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ShardedSampler) or sampler.num_parts != world.size:
        return  # with a split layer there are more ranks than parts, and some share a part
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
    """Raise `ConfigError` for a callback that needs test metrics without ``evaluate``, or has another sampler."""
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and not evaluates:
            callback.require_in(("loss", "accuracy"))
        if isinstance(callback, AdaptWorkLoad) and callback.sampler is not getattr(loader, "sampler", None):
            raise ConfigError(
                "AdaptWorkLoad", where="sampler", expected="the sampler of the loader", got="another sampler"
            )


def check_loader(loader: DataLoader, trainer: BaseTrainer) -> None:
    """Raise `ConfigError` unless the loader's sampler suits the trainer: its virtual shards, and its steps."""
    sampler = getattr(loader, "sampler", None)
    if trainer.steps_together and isinstance(sampler, SharedSampler):
        raise ConfigError(
            "fit", where="loader", expected="a sampler with fixed batches per rank", got="a SharedSampler",
            remedy="use a ShardedSampler, or kvstore='dist_async'",
        )  # fmt: skip
    num, own = getattr(sampler, "num_shards", None), getattr(sampler, "numbers", range(1))
    if num == trainer.virtual_shards and (num is None or own == trainer.own_virtual_shards):
        return
    expected = _loader_of(trainer.virtual_shards, trainer.own_virtual_shards)
    raise ConfigError("fit", where="loader", expected=expected, got=_loader_of(num, own))


def _loader_of(num_shards: int | None, own: range) -> str:
    """Describe a loader by its virtual shards."""
    if num_shards is None:
        return "a loader without virtual shards"
    return f"a loader with a VirtualShardSampler for shards {own.start} to {own.stop - 1} of {num_shards}"


_EXCHANGE_EVERY = 10
"""Approximate number of steps between two exchanges of metrics. One small allreduce in ten steps costs no measurable
time."""


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
    """Train a network and return the metrics of each epoch; every rank must call, with its own part of the data.

    Ranks may have batches of different sizes, empty batches and different numbers of batches. A rank without samples
    takes part in the step with a count of 0, so each step is the step of the global batch. An epoch is as long as the
    longest loader.

    With a store of kind ``dist_async`` ranks do not wait for each other. Each rank makes a step for every batch that
    its loader yields; with a `data.SharedSampler` faster ranks get more batches. The ranks synchronize and exchange
    metrics at the end of an epoch.

    Args:
        net: the network, changed in place through the parameters of ``trainer``.
        trainer: a `Trainer` of the network's parameters.
        loader: a loader with a length that yields ``(x, y)``; `fit` sets its epoch, counted from 0. A reproducible
            trainer needs a `data.VirtualShardSampler` with the same number of virtual shards. Batches are copied to the
            device of the parameters when their step begins; ``DataLoader(..., device=world.device)`` copies them ahead.
        epochs: the number of epochs, including those of a checkpoint from which the run resumes.
        loss: a function of output and labels, per sample, shape ``(batch,)``. Do not average over samples: the trainer
            divides by the number of samples of all ranks.
        evaluate: a function called on every rank after each epoch, usually
            ``lambda: evaluate(net, dataset, world)`` with `hpcdp.train.metrics.evaluate`. The record contains the
            result of rank 0, with None for an accuracy of NaN (regression).
        callbacks: objects that `fit` notifies; they may differ between ranks, see `Callback`.
        checkpoints: when to save, whether to resume, and who may request an early stop, which its `stopped` then
            describes. None: nothing is saved.
        world: the ranks; default `hpcdp.init()`.
        hybridize: replay each step as one plan, see `TrainStep.hybridize`.

    Returns:
        One record of kind "epoch" for each epoch that this call has completed, the same on every rank. The guides to
        training and tracing list its fields. The accuracy is that of the first output, and None unless labels are
        integers of shape ``(batch, ...)`` for outputs of shape ``(batch, ..., classes)``.

    Raises:
        ConfigError: an argument is invalid; the loader and the trainer differ in their virtual shards; the folder
            contains checkpoints, and the run does not resume; no rank has a batch. In the first step, on ranks with
            samples: the loss is not of shape ``(batch,)``.
        MismatchError: ranks differ in the number of epochs, the kinds of layers, the order or the shares of the data
            or in callbacks with an `alike`, or have the same part of the data; on every rank, before the first step.
        DataError: there is no checkpoint to resume from, or another job saves in the folder; on every rank.
        SaveError: a checkpoint could not be written; on every rank. Older ones are intact.
    """
    require_world("fit", world)
    world = init() if world is None else world

    def check() -> None:
        whole_number("fit", "epochs", epochs, 0)
        instance("fit", "net", net, Module, "a network")
        instance("fit", "trainer", trainer, BaseTrainer, "a Trainer")
        instance("fit", "loader", loader, DataLoader, "a DataLoader")
        instance("fit", "callbacks", callbacks, Sequence, "a list of callbacks")
        instance("fit", "checkpoints", checkpoints, (Checkpoints, NoneType), "Checkpoints or None")
        if evaluate is not None:
            function("fit", "evaluate", evaluate, "a function")
        if net.has_own_step:
            own = f"a {type(net).__name__}, which has step()"
            raise ConfigError("fit", where="net", expected="a network that is called", got=own)
        instances("fit", "callbacks", callbacks, Callback, "instances of Callback")
        check_loader(loader, trainer)

    on_every_rank(world.comm, check)
    same = what_ranks_share(net, loader, callbacks, epochs=epochs, evaluate=evaluate, checkpoints=checkpoints)
    require_same(world.comm, "fit", same, "call fit with the same arguments on all ranks")
    check_parts(loader, world)
    check_callbacks(callbacks, evaluate is not None, loader)
    loop = _Loop(net, trainer, loader, loss, callbacks, world, checkpoints, hybridize)
    position = loop.begin()
    steps = loop.steps()
    if epochs and steps == 0:
        raise ConfigError(
            "fit", where="loader", expected="an epoch of at least one batch", got="no batch on any rank",
            remedy="choose a smaller batch_size, or last='keep'",
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
        with contextlib.ExitStack() as ending:  # calls every on_end, even if one of them raises
            for callback in reversed(begun):
                ending.callback(callback.on_end)


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
        self._target = place_of(self.net)  # read once: within a step this could wait for a pending update
        self._all_compute = any(part.needs_all_ranks for part in self.net.modules())
        self._trace: Trace | None = self.world.kept.get(Trace)
        self._exchanging = Phase("metrics", self._trace)

    def begin(self) -> Position:
        """Restore a checkpoint if the run resumes, and return the position at which training starts."""
        if self.checkpoints is None:
            return Position(1, 0, 0)
        parts: dict[str, Any] = {
            "network": self.net, "trainer": self.trainer, "loader": self.loader, "meter": self.meter,
            "callbacks": StatesOfCallbacks(self.callbacks),
        }  # fmt: skip
        return self.checkpoints.begin(self.world, parts)

    def steps(self) -> int:
        """Return the steps of the longest loader's epoch; every rank must call, in each epoch: they may change."""
        return max(self.world.comm.allgather_json(len(self.loader) // len(self.trainer.own_virtual_shards)))

    def train(self, start: Position, epochs: int, evaluate: Callable[[], Evaluation] | None) -> list[Record]:
        """Train from ``start`` to the end of the last epoch, or until all ranks stop early."""
        records: list[Record] = []
        evaluating = Phase("evaluate", self._trace)
        done, ended = start, 0 if self.checkpoints is None else self.checkpoints.ended
        for epoch in range(start.epoch, epochs + 1) if epochs > ended else ():
            statistics = self._run(epoch, start.step if epoch == start.epoch else 0)
            if statistics is None:
                return records
            times = self.report.end_epoch()  # before evaluate, whose waiting time is not part of training
            with evaluating:
                tested = {} if evaluate is None else self._tested(evaluate())
            records.append(self.meter.end_epoch(epoch) | tested | times | statistics)
            self._notify(records[-1])
            done, ended = Position(epoch + 1, 0, self.meter.steps), 0
            if any(self.world.comm.allgather_json(any(callback.stop_training for callback in self.callbacks))):
                ended = epochs
                break
            if self.checkpoints is not None and epoch < epochs:
                self.checkpoints.after_epoch(done, records[-1], self.trainer.steps_together)
        if self.checkpoints is not None:
            self.checkpoints.at_end(done, records[-1] if records else None, ended)
        return records

    def _tested(self, own: Evaluation | None) -> Record:
        """Return the result of rank 0 on all ranks, because results may differ in their last bits."""
        if own is None:
            numbers = {}
        else:
            instance("fit", "evaluate", own, Evaluation, "an Evaluation, or None")
            accuracy = None if math.isnan(own.accuracy) else float(own.accuracy)
            numbers = {"test_loss": float(own.loss), "test_accuracy": accuracy}
        tested: Record = self.world.comm.allgather_json(numbers)[0]
        return tested

    def _run(self, epoch: int, done: int) -> Record | None:
        """Train for an epoch from step ``done`` on; return further fields of its record, None where the run stops."""
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
        """Train for an epoch with all ranks in every step, and return whether the run stops early."""
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
        """Train for an epoch without waiting for others; return the store's statistics, None where the run stops."""
        batches, step, sampler = iter(self.loader), done, self.loader.sampler
        stop = None if self.checkpoints is None else self.checkpoints.stop
        while (batch := self._next(batches)) is not None:
            self._train(0, batch)
            self._end_step()
            step = getattr(sampler, "taken", step + 1)
            for callback in self.callbacks:
                callback.on_step(epoch, step)
            if stop is not None and stop.reason and isinstance(sampler, SharedSampler):
                sampler.close()  # for all ranks; they still use the batches that they have prefetched
        with self.report.phase[STEP]:
            trainer.synchronize()
        self._exchange(epoch)
        if self.checkpoints is not None:
            num_batches = getattr(sampler, "taken", step)  # a rank may have got no batch at all
            position = Position(epoch, max(self.world.comm.allgather_json(num_batches)), self.meter.steps)
            if self.checkpoints.where_all_meet(position):
                return None
        return trainer.statistics()

    def _next(self, batches: Iterator[Any]) -> Any:
        with self.report.phase[DATA]:
            return self._on_device(next(batches, None))

    def _on_device(self, batch: Any) -> Any:
        """Copy ``batch``, if there is one, to the device of the network."""
        return None if batch is None else tuple(brought_to(array, self._target) for array in batch)

    def _notify(self, record: Record) -> None:
        for callback in self.callbacks:
            callback.on_record(record)

    def _end_step(self) -> None:
        self.meter.end_step()
        self.report.end_step()

    def _exchange(self, epoch: float) -> None:
        """Sum the metrics since the last exchange over ranks; every rank must call."""
        with self._exchanging:
            exchanged = self.meter.exchange(epoch)
        if self._trace is not None and self.world.rank == 0:
            self._trace.count("samples/s", exchanged["samples_per_s"])
        self._notify(exchanged)

    def _train(self, shard: int, batch: Any) -> None:
        """Train by one batch of this rank; None: take part in the step without samples."""
        phase = self.report.phase
        if batch is None and self._all_compute:
            batch = self._on_device(self.loader.read(np.empty(0, np.int64)))
        if batch is None or (len(batch[1]) == 0 and not self._all_compute):
            with phase[STEP]:
                self.trainer.step(0)
            return
        x, y = batch
        losses, output = self._step(x, y)
        first = first_output("fit", output)
        self.meter.add(shard, losses.data, first.data, y)


_KEY = "given out"
_FAR = 1 << 40
"""More numbers than an iteration yields."""


class SharedCount:
    """An iterable counter 0, 1, 2, ... that yields each number on only one rank; for a `data.SharedSampler`.

    Every rank must create it. An iteration starts at 0 after all ranks have begun it.

    Args:
        world: the ranks; default `hpcdp.init()`.
    """

    def __init__(self, world: World | None = None) -> None:
        self._world = init() if world is None else world
        self._store = AsyncStore("dist_async", self._world)
        self._store.init(_KEY, np.zeros((), np.int64))
        self._count = 0

    def __iter__(self) -> Iterator[int]:
        self._store.barrier()  # all ranks have finished the previous iteration
        first = int(self._store.pull(_KEY).wait())
        self._store.barrier()
        self._count = 0
        return self._numbers(first)

    def given(self) -> int:
        """Return the count of numbers yielded on all ranks in this iteration; every rank must call."""
        return max(self._world.comm.allgather_json(self._count))

    def close(self) -> None:
        """End this iteration on all ranks; one rank or several may call."""
        self._store.take(_KEY, _FAR)

    def _numbers(self, first: int) -> Iterator[int]:
        while (number := self._store.take(_KEY) - first) < _FAR:
            self._count = number + 1
            yield number
