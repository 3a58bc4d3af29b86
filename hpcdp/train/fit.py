"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdp.autograd import Tensor, record
from hpcdp.collectives import allreduce
from hpcdp.comm import World, init
from hpcdp.comm.agreement import on_every_rank
from hpcdp.data import DataLoader
from hpcdp.errors import ConfigError
from hpcdp.nn import Module
from hpcdp.nn.functional import softmax_cross_entropy
from hpcdp.trace import Trace

from .callbacks import Callback
from .evaluate import Evaluation
from .metrics import Record, number_correct
from .step_report import BACKWARD, DATA, FORWARD, STEP, Phase, StepReport
from .trainer import Trainer

_EXCHANGE_EVERY = 10
"""Steps between two exchanges of metrics, about: one small allreduce in ten steps cannot be seen in the run's time."""


def fit(
    net: Module,
    trainer: Trainer,
    loader: DataLoader,
    *,
    epochs: int,
    loss: Callable[[Tensor, Any], Tensor] = softmax_cross_entropy,
    evaluate: Callable[[], Evaluation] | None = None,
    callbacks: Sequence[Callback] = (),
    world: World | None = None,
) -> list[Record]:
    """Train a classifier; every rank must call, with a loader of its own part of the data.

    Ranks may have batches of different sizes, empty batches and different numbers of batches: a rank without samples
    takes part in the step with count 0, so that each step is the step of the global batch and no rank waits for ever.
    The length of an epoch is the longest loader's.

    Args:
        net: changed in place, through the parameters that ``trainer`` has.
        loader: has a length and yields ``(x, y)``; it is told the epoch, counted from 0. With a reproducible trainer
            that of a `data.VirtualShardSampler` of as many virtual shards.
        loss: per sample, shape ``(batch,)``.
        evaluate: called on every rank after each epoch; usually ``lambda: train.evaluate(net, dataset, world)``.
        callbacks: may differ between ranks, see `Callback`.

    Returns:
        One record of kind "epoch" an epoch, alike on every rank (docs/training.md lists what is in it).

    Raises:
        ConfigError: the loader is not the trainer's: one of them has virtual shards, or another number of them.
    """
    world = world or init()
    on_every_rank(world.comm, lambda: _check_loader(loader, trainer))
    steps = max(world.comm.allgather_json(len(loader) // len(trainer.own_virtual_shards)))
    exchange_every = math.ceil(steps / max(1, round(steps / _EXCHANGE_EVERY)))
    meter, report = _Meter(trainer, world), StepReport(trainer, world)
    trace: Trace | None = world.kept.get(Trace)
    exchanging, evaluating = Phase("metrics", trace), Phase("evaluate", trace)
    records: list[Record] = []
    for callback in callbacks:
        callback.on_start(epochs, steps)
    try:
        for epoch in range(1, epochs + 1):
            loader.set_epoch(epoch - 1)
            meter.start_epoch()
            report.start_epoch()
            batches = iter(loader)
            for step in range(1, steps + 1):
                for shard in trainer.own_virtual_shards:
                    with report.phase[DATA]:
                        batch = next(batches, None)
                    meter.add(shard, *_train_shard(net, trainer, batch, loss, report))
                meter.end_step()
                report.end_step()
                if step % exchange_every == 0 or step == steps:
                    with exchanging:
                        exchanged = meter.exchange(epoch - 1 + step / steps)
                    if trace is not None and world.rank == 0:
                        trace.count("samples/s", exchanged["samples_per_s"])
                    _tell(callbacks, exchanged)
                for callback in callbacks:
                    callback.on_step(epoch, step)
            with evaluating:
                test = evaluate() if evaluate is not None else None
            records.append(meter.end_epoch(epoch, test) | report.end_epoch())
            _tell(callbacks, records[-1])
    finally:
        for callback in callbacks:
            callback.on_end()
    return records


def _check_loader(loader: DataLoader, trainer: Trainer) -> None:
    sampler = getattr(loader, "sampler", None)
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


def _tell(callbacks: Sequence[Callback], record: Record) -> None:
    for callback in callbacks:
        callback.on_record(record)


def _train_shard(
    net: Module, trainer: Trainer, batch: Any, loss: Callable[[Tensor, Any], Tensor], report: StepReport
) -> tuple[float, int, int]:
    """One call of `Trainer.step`, with this rank's ``batch``, None where it has none: summed loss, correct answers,
    samples."""
    phase = report.phase
    if batch is None or len(batch[1]) == 0:
        with phase[STEP]:
            trainer.step(0)
        return 0.0, 0, 0
    x, y = batch
    with phase[FORWARD], record():
        output = net(x)
        losses = loss(output, y)
    with phase[BACKWARD]:
        losses.backward()
    with phase[STEP]:
        trainer.step(len(y))
    return float(losses.data.sum()), number_correct(output.data, y), len(y)


class _Meter:
    """Sums of this rank since the last exchange, and of all ranks over the epoch."""

    def __init__(self, trainer: Trainer, world: World) -> None:
        self._trainer, self._world = trainer, world
        self._step = 0
        # A row for each virtual shard: sums over ranks are exact then, and those over rows have one order.
        self._own = np.zeros((trainer.virtual_shards or 1, 3))
        self._epoch = np.zeros(6)
        self._comm = self._comm_seconds()
        self._started = time.perf_counter()

    def start_epoch(self) -> None:
        """Begin an epoch; the time since the last one is not counted."""
        self._epoch = np.zeros(6)
        self._comm = self._comm_seconds()
        self._started = time.perf_counter()

    def add(self, shard: int, loss: float, correct: int, count: int) -> None:
        """Add what this rank has computed of a step."""
        self._own[shard] += (loss, correct, count)

    def end_step(self) -> None:
        """Count a step."""
        self._step += 1

    def exchange(self, epoch: float) -> Record:
        """Sum over ranks what was added since the last exchange; every rank must call."""
        now, comm = time.perf_counter(), self._comm_seconds()
        sums = np.concatenate([self._own.reshape(-1), [now - self._started], comm - self._comm])
        allreduce(sums, world=self._world)
        counted, times = sums[: self._own.size].reshape(self._own.shape), sums[self._own.size :]
        sums = np.concatenate([counted.sum(axis=0), times / self._world.size])
        self._own[:] = 0
        self._started, self._comm = now, comm
        self._epoch += sums
        return self._record("step", epoch, sums)

    def end_epoch(self, epoch: int, test: Evaluation | None) -> Record:
        """The record of the epoch's exchanged sums."""
        found = self._record("epoch", epoch, self._epoch)
        if test is not None:
            found |= {"test_loss": test.loss, "test_accuracy": test.accuracy}
        return found

    def _comm_seconds(self) -> np.ndarray:
        stats = self._trainer.stats
        return np.array([stats.total_s, stats.exposed_s])

    def _record(self, kind: str, epoch: float, sums: np.ndarray) -> Record:
        loss, correct, count, seconds, comm, exposed = (float(value) for value in sums)
        return {
            "kind": kind,
            "step": self._step,
            "epoch": epoch,
            "loss": loss / max(count, 1),
            "accuracy": correct / max(count, 1),
            "samples": int(count),
            "seconds": seconds,
            "samples_per_s": count / seconds if seconds else 0.0,
            "comm_s": comm,
            "comm_exposed_s": exposed,
            "learning_rate": self._trainer.optimizer.learning_rate(max(1, self._trainer.step_count)),
        }
