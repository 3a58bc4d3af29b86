"""Progress output of a run for rank 0, and plots: the curves of a run, and lines that grow while a program runs."""

from __future__ import annotations

import io
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ..core.checks import file_name
from ..errors import ConfigError, HpcdpError, shortened, type_named
from .metrics import Record, replace_file

_REFRESH_S = 0.1
_LOG_EVERY_S = 10.0
_COLUMNS = 79


def create(
    epochs: int, steps: int, done: int = 0, stream: TextIO | None = None, *, verbose: bool = False
) -> LogProgress | TerminalProgress:
    """Return the progress output for a terminal or a log.

    Args:
        epochs: the epochs of the run.
        steps: the steps of an epoch.
        done: steps before the checkpoint from which the run resumes.
        stream: where to print, default standard output.
        verbose: print where the time of each epoch went, too.
    """
    stream = stream or sys.stdout
    columns = terminal_columns(stream)
    if columns:
        return TerminalProgress(epochs, steps, stream, columns, done, verbose)
    return LogProgress(epochs, steps, stream, done, verbose)


def terminal_columns(stream: TextIO) -> int:
    """Return the width of the terminal that shows ``stream``; 0 if there is none that can rewrite a line.

    Under mpirun a rank cannot see the terminal. `hpcdp launch` passes its width in the variables that rich reads. Else
    Open MPI gives every rank a pseudo-terminal without a width, even if the output goes to a file. The output of the
    parent process, which is mpirun, then decides.
    """
    if os.environ.get("TERM", "").lower() in ("dumb", "unknown"):  # rich shows nothing live on these
        return 0
    interactive = os.environ.get("TTY_INTERACTIVE")
    if interactive is not None:
        width = os.environ.get("COLUMNS", "80")
        return int(width) if interactive == "1" and width.isdecimal() else 0
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
    """Open ``path`` without making it the controlling terminal, and without changing it if it is a file."""
    return os.open(path, (flags | os.O_NOCTTY | os.O_NONBLOCK) & ~(os.O_TRUNC | os.O_CREAT))


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


def loss_text(loss: float) -> str:
    """Format a loss with four decimals, unless training has diverged."""
    return f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.4g}"


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


def slowest_rank(epochs: Sequence[Record]) -> str | None:
    """Describe the rank that was the slowest one in most epochs; None for a run of one rank."""
    compared = [record for record in epochs if "slowest_rank" in record]
    if not compared:
        return None
    rank, times = Counter(record["slowest_rank"] for record in compared).most_common(1)[0]
    of_rank = [record for record in compared if record["slowest_rank"] == rank]
    ratio = statistics.median(record["slowest_ratio"] for record in of_rank)
    host = of_rank[-1]["slowest_host"]
    return f"rank {rank} on {host} in {times} of {len(compared)} epochs, {ratio:.2f} x the median"


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


_TRAIN, _TEST = "#3566a8", "#c8552b"
LARGEST = 1e100
"""The largest loss in a plot; matplotlib's axes fail on larger ones, as a diverged run has them."""


def draw_curves(records: Sequence[Record], path: str | Path, title: str = "") -> None:
    """Draw loss and accuracy over epochs into a PNG file, which is replaced atomically.

    Args:
        records: the result of `metrics.read_metrics`. Training values come from records of kind "step", test values
            from records of kind "epoch". Without values the axes stay empty.
        path: a file name that ends in ``.png``.
        title: one line above the picture.

    Raises:
        ConfigError: the name has another ending.
        OSError: the file cannot be written.
    """
    if Path(path).suffix != ".png":
        raise ConfigError("draw_curves", where="path", expected="a name that ends in .png", got=repr(str(path)))
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure, (loss_axes, accuracy_axes) = styled(2, (9.0, 3.6), columns=2)
    for axes, name, unit in ((loss_axes, "loss", ""), (accuracy_axes, "accuracy", "%")):
        train = points(records, "step", name)
        test = points(records, "epoch", f"test_{name}")
        marker = "o" if len(train[0]) == 1 else None  # one point is no line
        axes.plot(*train, color=_TRAIN, linewidth=1.4, marker=marker, markersize=3.5, label="training")
        axes.plot(*test, color=_TEST, linewidth=1.4, marker="o", markersize=3.5, label=_label(test[1], unit))
        axes.set_xlabel("epoch")
        axes.set_ylabel(name)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, loc="upper right" if name == "loss" else "lower right")
    if any(value and value > 0 for value in points(records, "step", "loss")[1]):
        by_powers(loss_axes)
    accuracy_axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    accuracies = [*points(records, "epoch", "test_accuracy")[1], *points(records, "step", "accuracy")[1]]
    _zoom_to_the_end(accuracy_axes, accuracies)
    if title:
        figure.suptitle(title, fontsize=10.5)
    replace_file(Path(path), png(figure))


def png(figure: Any) -> bytes:
    """Return a figure of `styled` as the contents of a PNG file."""
    stream = io.BytesIO()
    figure.canvas.print_png(stream)
    return stream.getvalue()


class Animator:
    """A PNG plot of lines that grow while a program runs, redrawn for every point.

    The interface is that of ``Animator`` in "Dive into Deep Learning".

    Args:
        path: a file name that ends in ``.png``. The file is replaced atomically.
        xlabel: the quantity on the x-axis, e.g. "epoch".
        legend: a name for each line.
        ylabel: the quantity on the y-axis.

    Raises:
        ConfigError: the name has another ending, the folder is missing, or ``legend`` is a single name.
    """

    def __init__(self, path: str | Path, xlabel: str, legend: Sequence[str], ylabel: str = "") -> None:
        if isinstance(legend, str):
            raise ConfigError("Animator", where="legend", expected="a list with a name per line", got=repr(legend))
        self.path = file_name("Animator", "path", path, [".png"])
        self.xlabel, self.ylabel, self.legend = xlabel, ylabel, tuple(legend)
        self.X: list[list[float]] = [[] for _ in self.legend]
        self.Y: list[list[float]] = [[] for _ in self.legend]
        """The values of each line; ``Y[0][-1]`` is the last value of the first line."""

    def add(self, x: float, ys: Sequence[float | None]) -> None:
        """Add a point to each line and redraw the plot.

        Args:
            x: the position of the points.
            ys: a value for each line, None for a line without a new point.

        Raises:
            ConfigError: the number of values is not that of the lines, or a value is not a number. No line has changed.
            OSError: the plot cannot be written.
        """
        count = len(ys) if isinstance(ys, Sequence | np.ndarray) else type_named(ys)
        if count != len(self.legend):
            raise ConfigError("Animator.add", expected=f"a list of {len(self.legend)} values", got=count)
        try:
            points = [(line, float(x), float(y)) for line, y in enumerate(ys) if y is not None]
        except HpcdpError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError("Animator.add", expected="numbers, or None", got=error) from error
        for line, at_x, at_y in points:
            self.X[line].append(at_x)
            self.Y[line].append(at_y)
        figure, (axes,) = styled(1, (5.0, 3.4))
        for name, at, values in zip(self.legend, self.X, self.Y, strict=True):
            shown = [max(-LARGEST, min(value, LARGEST)) for value in values]
            axes.plot(at, shown, linewidth=1.4, marker="o", markersize=3, label=name)
        axes.set_xlabel(self.xlabel)
        axes.set_ylabel(self.ylabel)
        axes.legend(frameon=False)
        replace_file(self.path, png(figure))


def styled(count: int, size: tuple[float, float], columns: int = 1) -> tuple[Any, list[Any]]:
    """Return a figure of ``size`` inches and its ``count`` axes, arranged in ``columns``."""
    # Figure and the Agg canvas alone: pyplot would open a display and keep the figure in a global list.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(-(-count // columns), columns, squeeze=False).reshape(-1).tolist()
    for axes in all_axes:
        axes.grid(True, color="#d9d9d9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    return figure, all_axes


def by_powers(axes: Any) -> None:
    """Give ``axes`` a logarithmic y-axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    subs = (1, 2, 5) if axes.dataLim.ymax < 1e4 * axes.dataLim.minposy else (1,)  # else LogLocator drops all ticks
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def points(records: Sequence[Record], kind: str, name: str) -> tuple[list[float], list[float]]:
    """Return the epochs and the values of a metric in the records of one ``kind``, at most `LARGEST`."""
    shown = [record for record in records if record["kind"] == kind and record.get(name) is not None]
    return [record["epoch"] for record in shown], [min(record[name], LARGEST) for record in shown]


def _label(values: Sequence[float], unit: str) -> str:
    if not values:
        return "test"
    return f"test, last {values[-1]:.2%}" if unit == "%" else f"test, last {loss_text(values[-1])}"


def _zoom_to_the_end(axes: object, values: Sequence[float]) -> None:
    """Cut off the start of a run, whose low accuracy would flatten the end of the curve."""
    if not values:
        return
    best, worst = max(values), min(values)
    low = max(worst, best - 0.25)
    axes.set_ylim(low - 0.01, min(1.0, best) + 0.01 + 0.02 * (best - low))  # type: ignore[attr-defined]
