"""What ranks have computed and how long it took, summed over them now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import Array
from ..collectives import allreduce
from ..comm import World
from ..state import Part, Sharded
from .metrics import BatchSums, Record
from .trainers.trainer import Trainer


class Meter:
    """Sums of this rank since the last exchange, and of all ranks over the epoch.

    They are part of a run's state, so that the numbers of a resumed run are those of one that was not interrupted.
    """

    def __init__(self, trainer: Trainer, world: World) -> None:
        self._trainer, self._world = trainer, world
        self._step = self._own_steps = 0
        # A row for each virtual shard: sums over ranks are exact then, and those over rows have one order.
        self._own = BatchSums(trainer.virtual_shards or 1)
        self._before = np.zeros(3)
        """Seconds since the last exchange, and those of communication, that an interrupted run has spent."""
        self.start_epoch()

    def start_epoch(self) -> None:
        """Begin an epoch; the time since the last one is not counted."""
        self._epoch = np.zeros(6)
        self.go_on()

    def go_on(self) -> None:
        """Go on with an epoch that was restored; the time until now is not counted."""
        self._comm = self._comm_seconds()
        self._started = time.perf_counter()

    @property
    def steps(self) -> int:
        """Steps since the start of the run, where ranks make them together; else until they have last met."""
        return self._step + (self._own_steps if self._trainer.steps_together else 0)

    def add(self, shard: int, losses: Array, outputs: Array, labels: Array) -> None:
        """Add what this rank has computed of a step; a GPU is waited for when sums are exchanged."""
        self._own.add(shard, losses, outputs, labels)

    def end_step(self) -> None:
        """Count a step, of all ranks or of this one alone."""
        self._own_steps += 1

    def exchange(self, epoch: float) -> Record:
        """Sum over ranks what was added since the last exchange; every rank must call."""
        own = self._own.rows  # before the time is taken: it is there when a GPU has computed it
        sums = np.concatenate([own.reshape(-1), self._spent(), [self._own_steps]])
        self.go_on()
        allreduce(sums, world=self._world)
        counted, times = sums[: own.size].reshape(own.shape), sums[own.size : -1]
        self._step += round(sums[-1] / (self._world.size if self._trainer.steps_together else 1))
        sums = np.concatenate([counted.sum(axis=0), times / self._world.size])
        self._own.set(np.zeros_like(own))
        self._own_steps, self._before[:] = 0, 0
        self._epoch += sums
        return self._record("step", epoch, sums)

    def end_epoch(self, epoch: int) -> Record:
        """The record of the epoch's exchanged sums."""
        return self._record("epoch", epoch, self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """Numbers that all ranks have, and the rows of this one; see `hpcdp.state`."""
        world, shards, run = self._world, self._trainer.virtual_shards, self._trainer.own_virtual_shards
        own = self._own.rows[run.start : run.stop]
        if shards is None:
            sums = _rows(own, world.size, world.rank, shares=True)
        else:
            sums = _rows(own, shards, run.start, shares=False)
        spent = _rows(self._spent()[None], world.size, world.rank, shares=True)
        return {"step": self._step, "own_steps": self._own_steps, "epoch": self._epoch, "sums": sums, "spent": spent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with these sums."""
        self._step, self._own_steps, self._epoch = state["step"], state["own_steps"], np.array(state["epoch"])
        first = self._trainer.own_virtual_shards.start
        own = np.zeros((self._trainer.virtual_shards or 1, 3))
        for part in state["sums"].parts:
            rows = part.values.reshape(-1, 3)
            own[first : first + len(rows)] = rows
        self._own.set(own)
        for part in state["spent"].parts:
            self._before[:] = part.values
        self.go_on()

    def _spent(self) -> np.ndarray:
        """Seconds since the last exchange, in all and in communication, all and exposed."""
        now = [time.perf_counter() - self._started]
        return self._before + np.concatenate([now, self._comm_seconds() - self._comm])

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
            "accuracy": None if math.isnan(correct) else correct / max(count, 1),
            "samples": round(count),  # of a run that went on with other ranks, the sum of shares of what each had
            "seconds": seconds,
            "samples_per_s": count / seconds if seconds else 0.0,
            "comm_s": comm,
            "comm_exposed_s": exposed,
            "learning_rate": self._trainer.optimizer.learning_rate(max(1, self._trainer.step_count)),
        }


def _rows(own: np.ndarray, num: int, first: int, shares: bool) -> Sharded:
    """This rank's ``own`` rows, from number ``first`` on, of ``num`` over all ranks."""
    part = Part(first * own.shape[1], np.array(own).reshape(-1))
    return Sharded((num, own.shape[1]), own.dtype, [part], shares=shares)
