"""What `fit` tells while it runs: the interface, and callbacks that show and keep a run's numbers, or end it early."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..core.checks import number, one_of, whole_number
from ..core.state import Stateful, require_state
from ..errors import ConfigError
from . import progress
from .metrics import Record
from .runs.run_dir import RunFolder


class Callback:
    """Told by `fit` what happens, on every rank that it is given to; the methods here do nothing.

    A callback that raises on some ranks only ends the job. It must not start a collective unless all ranks have it.
    """

    stop_training = False
    """Set to True, on any rank, it ends `fit` on all ranks after the epoch under way."""

    def alike(self) -> str | None:
        """What of it must be the same on every rank, which `fit` compares; its state, if it has one
        (`hpcdp.core.state`), is saved with the run. None: some ranks may have others, or none."""
        return None

    def on_resume(self, epochs: int, steps: int) -> None:
        """Before `on_start`, where a run goes on from a checkpoint: ``epochs`` whole epochs are done, and ``steps``
        steps since its start."""

    def on_start(self, epochs: int, steps: int) -> None:
        """Before the first epoch; ``steps`` is the number of steps of it, alike on every rank; where short batches roll
        over, others may have one more."""

    def on_step(self, epoch: int, step: int) -> None:
        """After each step; both count from 1, ``step`` within the epoch."""

    def on_record(self, record: Record) -> None:
        """After numbers were exchanged over ranks: every few steps (kind "step") and after each epoch (kind "epoch").
        ``record`` is alike on every rank."""

    def on_end(self) -> None:
        """After the last epoch, and when training is interrupted or fails, also by another callback; of those whose
        `on_start` has returned."""


class ShowProgress(Callback):
    """A live line on a terminal, plain lines in a log. Give it to one rank."""

    def __init__(self) -> None:
        self._latest: Record | None = None
        self._display: progress.Progress | None = None
        self._done = 0

    def on_resume(self, epochs: int, steps: int) -> None:
        """See `Callback.on_resume`."""
        self._done = steps

    def on_start(self, epochs: int, steps: int) -> None:
        """See `Callback.on_start`."""
        self._display = progress.create(epochs, steps, self._done)

    def on_step(self, epoch: int, step: int) -> None:
        """See `Callback.on_step`."""
        if self._display is not None:
            self._display.step(epoch, step, self._latest)

    def on_record(self, record: Record) -> None:
        """See `Callback.on_record`."""
        if record["kind"] == "step":
            self._latest = record
        elif self._display is not None:
            self._display.epoch(record)

    def on_end(self) -> None:
        """See `Callback.on_end`."""
        if self._display is not None:
            self._display.close()


class KeepMetrics(Callback):
    """Writes every record into a run folder. Give it to the rank that owns the folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def on_resume(self, epochs: int, steps: int) -> None:
        """See `Callback.on_resume`."""
        self._folder.go_on(epochs, steps)

    def on_record(self, record: Record) -> None:
        """See `Callback.on_record`."""
        self._folder.write(record)


_METRICS = {"loss": "min", "accuracy": "max", "test_loss": "min", "test_accuracy": "max"}
"""Which way each is better."""


class EarlyStopping(Callback):
    """Ends `fit` when a number of its epochs gets no better. Give a new one to every rank, for each `fit`.

    The parameters are then those of the last epoch; a `checkpoint.Manager` with ``best`` keeps those of the best one.
    The run is at its end: its checkpoint says so, and keeps `best` and `waited`.

    Args:
        metric: "loss", "accuracy", "test_loss" or "test_accuracy", as an epoch's record has them.
        patience: so many epochs in a row that are no better than the best before end the training.
        min_delta: what is better by no more than that is no better.
        mode: "min" or "max" is better. None: what is usual of the metric.

    Raises:
        ConfigError: a value outside of that; in `fit`: there is no such number, for want of an ``evaluate`` or of
            labels that are integers.

    Source: Goodfellow, Bengio and Courville, "Deep Learning", 2016, algorithm 7.1.
    """

    def __init__(self, metric: str, *, patience: int, min_delta: float = 0.0, mode: str | None = None) -> None:
        self.metric = one_of("EarlyStopping", "metric", metric, _METRICS)
        self.min_delta = number("EarlyStopping", "min_delta", min_delta, least=0)
        self.patience = whole_number("EarlyStopping", "patience", patience, 1)
        self.mode = one_of("EarlyStopping", "mode", _METRICS[metric] if mode is None else mode, ("min", "max"))
        self.best: float | None = None
        """The best number so far."""
        self.waited = 0
        """Epochs since then."""

    def alike(self) -> str:
        """See `Callback.alike`."""
        settings = f"patience={self.patience}, min_delta={self.min_delta:g}, mode={self.mode!r}"
        return f"EarlyStopping({self.metric!r}, {settings})"

    def on_record(self, record: Record) -> None:
        """See `Callback.on_record`."""
        if record["kind"] != "epoch":
            return
        self.require_in([name for name, value in record.items() if value is not None])
        value = float(record[self.metric])
        if self._is_better(value):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        self.stop_training = self.waited >= self.patience

    def require_in(self, names: Collection[str]) -> None:
        """Raises `ConfigError` unless the metric is among the ``names`` of what there is."""
        if self.metric not in names:
            there_is = ", ".join(name for name in _METRICS if name in names)
            raise ConfigError(
                "EarlyStopping", where="metric", expected=f"one of {there_is}", got=repr(self.metric),
                remedy="give fit an evaluate for numbers of the test set; accuracy is of integer labels alone",
            )  # fmt: skip

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return not math.isnan(value)
        return (self.best - value if self.mode == "min" else value - self.best) > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """See `hpcdp.core.state`."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `hpcdp.core.state`."""
        require_state("EarlyStopping", state, "best", "waited")
        self.best, self.waited = state["best"], state["waited"]


class StatesOfCallbacks:
    """What a run saves of callbacks that decide: by `Callback.alike`, so that one that was not there begins anew."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._own = [(each.alike(), each) for each in callbacks if each.alike() is not None]

    def state_dict(self) -> list[tuple[str | None, Any]]:
        """See `hpcdp.core.state`."""
        return [(alike, each.state_dict()) for alike, each in self._own if isinstance(each, Stateful)]

    def load_state_dict(self, state: Sequence[tuple[str | None, Any]]) -> None:
        """See `hpcdp.core.state`; of callbacks that are not there any more it is left out."""
        saved = dict(state)
        for alike, each in self._own:
            if alike in saved and isinstance(each, Stateful):
                each.load_state_dict(saved[alike])
