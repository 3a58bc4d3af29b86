"""What ranks have computed and how long it took, summed over them now and then."""

from __future__ import annotations

import time

import numpy as np

from hpcdp.collectives import allreduce
from hpcdp.comm import World

from .evaluate import Evaluation
from .metrics import Record
from .trainer import Trainer


class Meter:
    """Sums of this rank since the last exchange, and of all ranks over the epoch."""

    def __init__(self, trainer: Trainer, world: World) -> None:
        self._trainer, self._world = trainer, world
        self._step = self._own_steps = 0
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
        """Count a step, of all ranks or of this one alone."""
        self._own_steps += 1

    def exchange(self, epoch: float) -> Record:
        """Sum over ranks what was added since the last exchange; every rank must call."""
        now, comm = time.perf_counter(), self._comm_seconds()
        sums = np.concatenate([self._own.reshape(-1), [now - self._started], comm - self._comm, [self._own_steps]])
        allreduce(sums, world=self._world)
        counted, times = sums[: self._own.size].reshape(self._own.shape), sums[self._own.size : -1]
        self._step += round(sums[-1] / (self._world.size if self._trainer.steps_together else 1))
        sums = np.concatenate([counted.sum(axis=0), times / self._world.size])
        self._own[:], self._own_steps = 0, 0
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
