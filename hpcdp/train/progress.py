"""What a person sees while a run goes on: one live line on a terminal, plain lines in a log. For rank 0."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from ..errors import shortened
from .metrics import Record

_REFRESH_S = 0.1
_LOG_EVERY_S = 10.0
_COLUMNS = 79


class Progress(Protocol):
    """Shows one run. Epochs and steps count from 1; ``latest`` is the last record of kind "step", None before it."""

    def step(self, epoch: int, step: int, latest: Record | None) -> None:
        """After a step, ``step`` of this epoch; cheap enough to call after each."""
        ...

    def epoch(self, record: Record) -> None:
        """After an epoch, with its record."""
        ...

    def close(self) -> None:
        """At the end of the run, also of one that was interrupted."""
        ...


def create(epochs: int, steps: int, done: int = 0, stream: TextIO | None = None) -> Progress:
    """The progress line that suits ``stream`` (standard output), for a run of ``epochs`` of ``steps`` steps each.

    ``done`` of them are done.
    """
    stream = stream or sys.stdout
    columns = terminal_columns(stream)
    if columns:
        return TerminalProgress(epochs, steps, stream, columns, done)
    return LogProgress(epochs, steps, stream, done)


def terminal_columns(stream: TextIO) -> int:
    """The width of the terminal that shows ``stream``; 0 where it goes to a file, where no width is known, and of one
    that cannot write a line anew.

    Under mpirun a rank cannot see the terminal. `hpcdp launch` tells it, in the variables that rich has for this. Else
    Open MPI gives every rank a pseudo-terminal of no width, whether its own output is a terminal or a file. There the
    output of the parent process, which is mpirun, decides.
    """
    if os.environ.get("TERM", "").lower() in ("dumb", "unknown"):  # as rich has them, which shows nothing live there
        return 0
    told = os.environ.get("TTY_INTERACTIVE")
    if told is not None:
        width = os.environ.get("COLUMNS", "80")
        return int(width) if told == "1" and width.isdecimal() else 0
    try:
        if not stream.isatty():
            return 0
        columns = os.get_terminal_size(stream.fileno()).columns
        if columns:
            return columns
        with open(f"/proc/{os.getppid()}/fd/1", "wb", buffering=0, opener=_open_terminal) as launcher:
            return os.get_terminal_size(launcher.fileno()).columns if launcher.isatty() else 0
    except (OSError, ValueError):
        return 0


def _open_terminal(path: str, flags: int) -> int:
    """Open ``path`` without making it this process's controlling terminal and, if it is a file, without touching it."""
    return os.open(path, (flags | os.O_NOCTTY | os.O_NONBLOCK) & ~(os.O_TRUNC | os.O_CREAT))


class LogProgress:
    """One line an epoch, and one every ten seconds inside a long epoch; no control characters."""

    def __init__(self, epochs: int, steps: int, stream: TextIO, done: int = 0) -> None:
        self._epochs, self._steps, self._stream = epochs, steps, stream
        self._eta = _TimeLeft(epochs * steps, done)
        self._shown = time.monotonic()

    def step(self, epoch: int, step: int, latest: Record | None) -> None:
        """See `Progress.step`."""
        if time.monotonic() - self._shown >= _LOG_EVERY_S:
            left = self._eta.text((epoch - 1) * self._steps + step)
            self._print(f"epoch {epoch}/{self._epochs}  step {step}/{self._steps}  {_numbers(latest)}  ETA {left}")

    def epoch(self, record: Record) -> None:
        """See `Progress.epoch`."""
        self._print("\n".join([epoch_line(record, self._epochs), *time_lines(record)]))

    def close(self) -> None:
        """See `Progress.close`."""

    def _print(self, line: str) -> None:
        self._shown = time.monotonic()
        print(line, file=self._stream, flush=True)


class TerminalProgress:
    """A live line at the bottom of a terminal, with the finished epochs above it."""

    def __init__(self, epochs: int, steps: int, stream: TextIO, columns: int, done: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars
        from rich.table import Column

        self._epochs, self._steps = epochs, steps
        self._eta = _TimeLeft(epochs * steps, done)
        self._shown = 0.0
        console = Console(file=stream, width=columns - 1, force_terminal=True, highlight=False)
        # Cut off, since not every terminal has rich's ellipsis. Refreshed by hand: rich's own refresh is a thread.
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
        """See `Progress.step`."""
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
        """See `Progress.epoch`."""
        for line in (epoch_line(record, self._epochs), *time_lines(record)):
            self._bars.console.print(line, markup=False)

    def close(self) -> None:
        """See `Progress.close`."""
        self._bars.stop()


def epoch_line(record: Record, epochs: int) -> str:
    """One line of at most 79 characters about a finished epoch."""
    width = len(str(epochs))
    accuracy = "" if record["accuracy"] is None else f"  accuracy {record['accuracy']:6.2%}"
    test = f"  test {record['test_accuracy']:6.2%}" if record.get("test_accuracy") is not None else ""
    return (
        f"epoch {record['epoch']:{width}}/{epochs}  loss {loss_text(record['loss'])}"
        f"{accuracy}{test}  {record['samples_per_s']:,.0f} samples/s"
    )


def loss_text(loss: float) -> str:
    """With four decimals, unless training has diverged."""
    return f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.4g}"


def time_lines(record: Record) -> list[str]:
    """Where the time of a finished epoch of several ranks went, in lines of at most 79 characters."""
    if "slowest_rank" not in record:
        return []
    lines = [
        f"  compute {record['compute_s']:.2f} s  comm {record['comm_s']:.2f} s, {record['comm_exposed_s']:.2f} exposed"
        f"  critical path {record['critical_path_s']:.2f} s"
    ]
    if record["stragglers"]:
        named = ", ".join(record["stragglers"])
        lines.append(shortened(f"  slowest, {record['slowest_ratio']:.2f} x the median: {named}", _COLUMNS))
    return lines


def slowest_rank(epochs: Sequence[Record]) -> str | None:
    """The rank that was the slowest one of most epochs, by their records; None of a run of one rank."""
    compared = [record for record in epochs if "slowest_rank" in record]
    if not compared:
        return None
    rank, times = Counter(record["slowest_rank"] for record in compared).most_common(1)[0]
    then = [record for record in compared if record["slowest_rank"] == rank]
    ratio = statistics.median(record["slowest_ratio"] for record in then)
    return f"rank {rank} on {then[-1]['slowest_host']} in {times} of {len(compared)} epochs, {ratio:.2f} x the median"


def _numbers(latest: Record | None) -> str:
    if latest is None:
        return ""
    accuracy = "" if latest["accuracy"] is None else f" acc {latest['accuracy']:.1%}"
    return f"loss {latest['loss']:.3f}{accuracy} {latest['samples_per_s']:,.0f}/s"


class _TimeLeft:
    """How long the rest of ``steps`` takes at the mean rate since ``done`` of them were done."""

    def __init__(self, steps: int, done: int) -> None:
        self._steps, self._done = steps, done
        self._started = time.monotonic()

    def text(self, done: int) -> str:
        made = max(1, done - self._done)
        seconds = round((time.monotonic() - self._started) / made * max(0, self._steps - done))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
