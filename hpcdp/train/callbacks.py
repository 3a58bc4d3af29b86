"""What `fit` tells while it runs: the interface, and the callbacks that show and keep a run's numbers."""

from __future__ import annotations

from . import progress
from .metrics import Record
from .run_folder import RunFolder


class Callback:
    """Told by `fit` what happens, on every rank that it is given to; the methods here do nothing.

    A callback that raises on some ranks only ends the job. It must not start a collective unless all ranks have it.
    """

    def on_resume(self, epochs: int, steps: int) -> None:
        """Before `on_start`, where a run goes on from a checkpoint: ``epochs`` whole epochs are done, and ``steps``
        steps since its start."""

    def on_start(self, epochs: int, steps: int) -> None:
        """Before the first epoch; ``steps`` is the number of steps of one epoch, alike on every rank."""

    def on_step(self, epoch: int, step: int) -> None:
        """After each step; both count from 1, ``step`` within the epoch."""

    def on_record(self, record: Record) -> None:
        """After numbers were exchanged over ranks: every few steps (kind "step") and after each epoch (kind "epoch").
        ``record`` is alike on every rank."""

    def on_end(self) -> None:
        """After the last epoch, and when training is interrupted or fails."""


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
