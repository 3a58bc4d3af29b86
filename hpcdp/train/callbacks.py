"""The callback interface of `fit`, and callbacks that show progress, write metrics or stop training early."""

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
    """Base class of callbacks: `fit` calls these methods on every rank that has the callback. They do nothing here.

    A callback that raises on only some ranks ends the job. A callback may start a collective only if all ranks have it.
    """

    stop_training = False
    """Set it to True on any rank to end `fit` on all ranks after the current epoch."""

    def alike(self) -> str | None:
        """Describe the settings that must be the same on every rank; `fit` compares the descriptions.

        The state of such a callback (`hpcdp.core.state`), if any, is saved with the run. None: ranks may have different
        callbacks, or none.
        """
        return None

    def on_resume(self, epochs: int, steps: int) -> None:
        """Handle the resumption of a run from a checkpoint, before `on_start`.

        Args:
            epochs: complete epochs before the checkpoint.
            steps: steps before the checkpoint, since the start of the run.
        """

    def on_start(self, epochs: int, steps: int) -> None:
        """Handle the start of training, before the first epoch.

        Args:
            epochs: the number of epochs, including those before a checkpoint.
            steps: steps of the first epoch, the same on every rank. With ``last="rollover"`` later epochs may have one
                more.
        """

    def on_step(self, epoch: int, step: int) -> None:
        """Handle the end of a step; both numbers count from 1, ``step`` within the epoch."""

    def on_record(self, record: Record) -> None:
        """Handle new metrics of all ranks: every few steps (kind "step") and after each epoch (kind "epoch").

        Args:
            record: the metrics, the same on every rank.
        """

    def on_end(self) -> None:
        """Handle the end of training, also when it is interrupted or fails.

        `fit` calls it for each callback whose `on_start` has returned, even if another callback has raised.
        """


class ShowProgress(Callback):
    """Progress output: a live line on a terminal, plain lines in a log. Give it to one rank.

    Args:
        verbose: print where the time of each epoch went, too.
    """

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose
        self._latest: Record | None = None
        self._display: progress.LogProgress | progress.TerminalProgress | None = None
        self._done = 0

    def on_resume(self, epochs: int, steps: int) -> None:
        """See `Callback.on_resume`."""
        self._done = steps

    def on_start(self, epochs: int, steps: int) -> None:
        """See `Callback.on_start`."""
        self._display = progress.create(epochs, steps, self._done, verbose=self._verbose)

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
    """A callback that writes every record into a run folder. Give it to the rank that owns the folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def on_resume(self, epochs: int, steps: int) -> None:
        """See `Callback.on_resume`."""
        self._folder.go_on(epochs, steps)

    def on_record(self, record: Record) -> None:
        """See `Callback.on_record`."""
        self._folder.write(record)


_METRICS = {"loss": "min", "accuracy": "max", "test_loss": "min", "test_accuracy": "max"}
"""Metrics of an epoch, and whether lower or higher values are better."""


class EarlyStopping(Callback):
    """A callback that ends `fit` when a metric stops improving. Give a new instance to every rank, for each `fit`.

    The parameters stay those of the last epoch; a `checkpoint.Manager` with ``best`` keeps those of the best one. The
    run counts as finished: its checkpoint records that, together with `best` and `waited`.

    Args:
        metric: "loss", "accuracy", "test_loss" or "test_accuracy", as in an epoch's record.
        patience: epochs in a row without an improvement after which training ends.
        min_delta: an improvement must be larger than this.
        mode: "min" if lower values are better, "max" if higher ones are. None: by the metric.

    Raises:
        ConfigError: an argument is invalid. In `fit`: the metric is missing, because there is no ``evaluate`` or
            because labels are not integers.

    Source: Goodfellow, Bengio and Courville, "Deep Learning", 2016, algorithm 7.1.
    """

    def __init__(self, metric: str, *, patience: int, min_delta: float = 0.0, mode: str | None = None) -> None:
        self.metric = one_of("EarlyStopping", "metric", metric, _METRICS)
        self.min_delta = number("EarlyStopping", "min_delta", min_delta, least=0)
        self.patience = whole_number("EarlyStopping", "patience", patience, 1)
        self.mode = one_of("EarlyStopping", "mode", _METRICS[metric] if mode is None else mode, ("min", "max"))
        self.best: float | None = None
        """The best value so far."""
        self.waited = 0
        """Epochs since the best value."""

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
        """Raise `ConfigError` unless the metric is among ``names``."""
        if self.metric not in names:
            available = ", ".join(name for name in _METRICS if name in names)
            raise ConfigError(
                "EarlyStopping", where="metric", expected=f"one of {available}", got=repr(self.metric),
                remedy="pass fit(evaluate=...) for metrics of the test set; accuracy needs integer labels",
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
    """The saved states of the callbacks that all ranks have (`Callback.alike`); others start without a saved state."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = [(callback.alike(), callback) for callback in callbacks if isinstance(callback, Stateful)]

    def state_dict(self) -> list[tuple[str | None, Any]]:
        """See `hpcdp.core.state`."""
        return [(alike, callback.state_dict()) for alike, callback in self._callbacks if alike is not None]

    def load_state_dict(self, state: Sequence[tuple[str | None, Any]]) -> None:
        """See `hpcdp.core.state`. Ignores the states of callbacks that the run no longer has."""
        saved = dict(state)
        for alike, callback in self._callbacks:
            if alike is not None and alike in saved:
                callback.load_state_dict(saved[alike])
