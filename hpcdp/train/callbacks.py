"""The callback interface of `fit`, and callbacks that show progress, keep metrics, stop early or share out batches."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TextIO

from ..core.checks import instance, number, one_of, whole_number
from ..core.environment import terminal_columns
from ..core.state import Stateful, require_state
from ..data import ShardedSampler
from ..errors import ConfigError, shortened
from .metrics import Record
from .report import loss_text
from .run_dir import RunFolder

_REFRESH_S = 0.1
_LOG_EVERY_S = 10.0
_COLUMNS = 79
_SUM_OF_SHARES = 1000
"""The sum of measured shares, which are integers so that files keep them exactly."""


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
        self._display: LogProgress | TerminalProgress | None = None
        self._done = 0

    def on_resume(self, epochs: int, steps: int) -> None:
        """See `Callback.on_resume`."""
        self._done = steps

    def on_start(self, epochs: int, steps: int) -> None:
        """See `Callback.on_start`."""
        columns = terminal_columns(sys.stdout)
        if columns:
            self._display = TerminalProgress(epochs, steps, sys.stdout, columns, self._done, self._verbose)
        else:
            self._display = LogProgress(epochs, steps, sys.stdout, self._done, self._verbose)

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


class LogProgress:
    """Progress in a log: a line per epoch, and one every ten seconds within a long epoch; no control characters."""

    def __init__(self, epochs: int, steps: int, stream: TextIO, done: int = 0, verbose: bool = False) -> None:
        self._epochs, self._steps, self._stream, self._verbose = epochs, steps, stream, verbose
        self._eta = _TimeLeft(epochs * steps, done)
        self._shown = time.monotonic()

    def step(self, epoch: int, step: int, latest: Record | None) -> None:
        """Show a step; cheap enough to call after each one.

        Args:
            epoch: the current epoch, counted from 1.
            step: the step within the epoch, counted from 1.
            latest: the last record of kind "step", None before the first.
        """
        if time.monotonic() - self._shown >= _LOG_EVERY_S:
            left = self._eta.text((epoch - 1) * self._steps + step)
            self._print(f"epoch {epoch}/{self._epochs}  step {step}/{self._steps}  {_numbers(latest)}  ETA {left}")

    def epoch(self, record: Record) -> None:
        """Show a completed epoch by its record."""
        self._print("\n".join(epoch_lines(record, self._epochs, self._verbose)))

    def close(self) -> None:
        """End the output, also of an interrupted run."""

    def _print(self, line: str) -> None:
        self._shown = time.monotonic()
        print(line, file=self._stream, flush=True)


class TerminalProgress:
    """Progress on a terminal: a live line at the bottom, and the completed epochs above it."""

    def __init__(
        self, epochs: int, steps: int, stream: TextIO, columns: int, done: int = 0, verbose: bool = False
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars
        from rich.table import Column

        self._epochs, self._steps, self._verbose = epochs, steps, verbose
        self._eta = _TimeLeft(epochs * steps, done)
        self._shown = 0.0
        console = Console(file=stream, width=columns - 1, force_terminal=True, highlight=False)
        # Cropped, because not every terminal has rich's ellipsis. No automatic refresh: that takes a thread.
        self._bars = Bars(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="crop")),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True, overflow="crop")),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._task: Any = self._bars.add_task(f"epoch 1/{epochs} step 0/{steps}", total=steps, numbers="")
        self._bars.start()

    def step(self, epoch: int, step: int, latest: Record | None) -> None:
        """See `LogProgress.step`."""
        now = time.monotonic()
        if now - self._shown < _REFRESH_S:
            return
        self._shown = now
        left = self._eta.text((epoch - 1) * self._steps + step)
        self._bars.update(
            self._task,
            completed=step,
            description=f"epoch {epoch}/{self._epochs} step {step}/{self._steps}",
            numbers=f"{_numbers(latest)} ETA {left}" if latest else f"ETA {left}",
        )
        self._bars.refresh()

    def epoch(self, record: Record) -> None:
        """See `LogProgress.epoch`."""
        for line in epoch_lines(record, self._epochs, self._verbose):
            self._bars.console.print(line, markup=False)

    def close(self) -> None:
        """See `LogProgress.close`."""
        self._bars.stop()


def epoch_lines(record: Record, epochs: int, verbose: bool = False) -> list[str]:
    """Return one line about a completed epoch, and with ``verbose`` where its time went, each of at most 79 columns."""
    width = len(str(epochs))
    accuracy = "" if record["accuracy"] is None else f"  accuracy {record['accuracy']:6.2%}"
    test = f"  test {record['test_accuracy']:6.2%}" if record.get("test_accuracy") is not None else ""
    line = (
        f"epoch {record['epoch']:{width}}/{epochs}  loss {loss_text(record['loss'])}"
        f"{accuracy}{test}  {record['samples_per_s']:,.0f} samples/s"
    )
    return [shortened(text, _COLUMNS) for text in (line, *(_time_lines(record) if verbose else ()))]


def _time_lines(record: Record) -> list[str]:
    """Describe where the time of an epoch went; nothing for a single rank."""
    if "slowest_rank" not in record:
        return []
    lines = [
        f"  compute {record['compute_s']:.2f} s  comm {record['comm_s']:.2f} s, {record['comm_exposed_s']:.2f} exposed"
        f"  critical path {record['critical_path_s']:.2f} s"
    ]
    if record["stragglers"]:
        lines.append(f"  slowest, {record['slowest_ratio']:.2f} x the median: {', '.join(record['stragglers'])}")
    return lines


def _numbers(latest: Record | None) -> str:
    if latest is None:
        return ""
    accuracy = "" if latest["accuracy"] is None else f" acc {latest['accuracy']:.1%}"
    return f"loss {latest['loss']:.3f}{accuracy} {latest['samples_per_s']:,.0f}/s"


class _TimeLeft:
    """An estimate of the remaining time at the mean rate since the start, at which ``done`` steps were complete."""

    def __init__(self, steps: int, done: int) -> None:
        self._steps, self._done = steps, done
        self._started = time.monotonic()

    def text(self, done: int) -> str:
        made = max(1, done - self._done)
        seconds = round((time.monotonic() - self._started) / made * max(0, self._steps - done))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


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


class KeepWorkLoad(Callback):
    """A callback that keeps the shares of this start when a run resumes, instead of those in the loader's state.

    Args:
        sampler: the sampler of this rank's loader, with the shares of this start.
    """

    def __init__(self, sampler: ShardedSampler) -> None:
        self.sampler, self.weights = sampler, sampler.weights

    def on_resume(self, epochs: int, steps: int) -> None:
        """See `Callback.on_resume`."""
        self.sampler.set_weights(self.weights)


class AdaptWorkLoad(Callback):
    """A callback that adapts the shares of ranks to their speed after each epoch. Give it to every rank.

    A rank's speed is its share divided by the time of its own work, without waiting for others. The epoch's record has
    these times for all ranks, so the callback needs no communication. The new share is the mean of the old share and
    the relative speed. The callback adds the shares used in an epoch to its record as ``work_load``; put it before
    callbacks that keep records.

    Args:
        sampler: the sampler of this rank's loader. Its weights change, and are part of its state.

    Raises:
        ConfigError: the sampler is not a `ShardedSampler`; in `fit`: it is not the sampler of the loader.
    """

    def __init__(self, sampler: ShardedSampler) -> None:
        self.sampler = instance("AdaptWorkLoad", "sampler", sampler, ShardedSampler, "a ShardedSampler")
        self.history: list[tuple[int, list[float]]] = []
        """The epochs and the shares used in them."""

    def alike(self) -> str:
        """See `Callback.alike`."""
        return "AdaptWorkLoad"

    def on_record(self, record: Record) -> None:
        """See `Callback.on_record`."""
        if record["kind"] != "epoch":
            return
        used = list(self.sampler.weights or [1.0] * self.sampler.num_parts)
        record["work_load"] = used
        self.history.append((record["epoch"], used))
        if "by_rank" in record:
            times = record["by_rank"]
            seconds = [a + b for a, b in zip(times["compute_s"], times["data_s"], strict=True)]
            self.sampler.set_weights(adapted(used, seconds, self.sampler.batch_size))


def adapted(used: Sequence[float], seconds: Sequence[float], batch_size: int) -> list[float]:
    """Return the next shares: integers with a sum of about 1000, each large enough for one sample of a batch.

    Args:
        used: the shares of an epoch.
        seconds: the working time of each rank in the epoch. Shares stay the same if one of them is 0.
        batch_size: samples of the global batch.
    """
    total = sum(used)
    if min(seconds) <= 0:
        return list(used)
    speeds = [share / spent for share, spent in zip(used, seconds, strict=True)]
    least = max(1.0, _SUM_OF_SHARES / batch_size)
    mean = [(share / total + speed / sum(speeds)) / 2 for share, speed in zip(used, speeds, strict=True)]
    return [float(round(max(least, _SUM_OF_SHARES * share))) for share in mean]


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
