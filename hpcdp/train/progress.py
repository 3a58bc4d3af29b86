"""The progress bar and the plots of a run.

What a person sees while a run goes on: one live line on a terminal, plain lines in a log. For rank 0.

The picture that a run leaves behind, loss and accuracy over epochs; and lines that grow while a program runs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from ..core.files import replaced
from ..errors import ConfigError, HpcdpError, shortened, type_named
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


_TRAIN, _TEST = "#3566a8", "#c8552b"
LARGEST = 1e100
"""Where losses of a run that diverges are drawn that are larger: matplotlib's axes have no place for them."""


def draw_curves(records: Sequence[Record], path: str | Path, title: str = "") -> None:
    """Draw loss and accuracy over epochs into the PNG ``path``, which is replaced in one go.

    Args:
        records: what `metrics.read_metrics` gives: training numbers from records of kind "step", test numbers from
            those of kind "epoch". With no record that has a number, axes without a line are drawn.
        path: file name ending in ``.png``. Raises OSError where it cannot be written.
        title: one line above the picture.

    Raises:
        ConfigError: another ending.
    """
    _require_png("draw_curves", path)
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure, (loss_axes, accuracy_axes) = styled(2, (9.0, 3.6), columns=2)
    for axes, name, unit in ((loss_axes, "loss", ""), (accuracy_axes, "accuracy", "%")):
        train = _points(records, "step", name)
        test = _points(records, "epoch", f"test_{name}")
        marker = "o" if len(train[0]) == 1 else None  # one point is no line
        axes.plot(*train, color=_TRAIN, linewidth=1.4, marker=marker, markersize=3.5, label="training")
        axes.plot(*test, color=_TEST, linewidth=1.4, marker="o", markersize=3.5, label=_label(test[1], unit))
        axes.set_xlabel("epoch")
        axes.set_ylabel(name)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, loc="upper right" if name == "loss" else "lower right")
    if any(value and value > 0 for value in _points(records, "step", "loss")[1]):
        by_powers(loss_axes)
    accuracy_axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _zoom_to_the_end(accuracy_axes, [value for _, value in _pairs(records)])
    if title:
        figure.suptitle(title, fontsize=10.5)
    _write(figure, Path(path))


def _require_png(operation: str, path: str | Path) -> None:
    if Path(path).suffix != ".png":
        raise ConfigError(operation, where="path", expected="a name in .png", got=repr(str(path)))


def _write(figure: Any, path: Path) -> None:
    with replaced(path) as part, open(part, "wb") as file:
        figure.canvas.print_png(file)


class Animator:
    """Lines that grow while a program runs, as the document's ``Animator``: a PNG that is drawn anew with every point.

    Args:
        path: file name ending in ``.png``; replaced in one go, so that who looks at it sees a whole picture.
        xlabel: what `add` is given first, e.g. "epoch".
        legend: a name for each line.
        ylabel: what the lines are.

    Raises:
        ConfigError: another ending, a folder that is not there, or a ``legend`` that is one name.
    """

    def __init__(self, path: str | Path, xlabel: str, legend: Sequence[str], ylabel: str = "") -> None:
        _require_png("Animator", path)
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(
                "Animator", where="path", expected="a name in a folder that is there", got=repr(str(path))
            )
        if isinstance(legend, str):
            raise ConfigError("Animator", where="legend", expected="a name for each line, in a list", got=repr(legend))
        self.path, self.xlabel, self.ylabel, self.legend = Path(path), xlabel, ylabel, tuple(legend)
        self.X: list[list[float]] = [[] for _ in self.legend]
        self.Y: list[list[float]] = [[] for _ in self.legend]
        """The points of each line; ``Y[0][-1]`` is the last one of the first."""

    def add(self, x: float, ys: Sequence[float | None]) -> None:
        """A point more for each line, None for a line without one, and the picture anew.

        Raises:
            ConfigError: another number of values than of lines, or what is no number; no line has changed.
            OSError: the picture cannot be written.
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
        _write(figure, self.path)


def styled(count: int, size: tuple[float, float], columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure of ``size`` inches, and its ``count`` axes, in as many ``columns``."""
    # Figure and the Agg canvas alone: pyplot would look for a display and keep the figure in a global list.
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
    """Let the values of ``axes`` grow in powers, with numbers as people write them."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    between = (1, 2, 5) if axes.dataLim.ymax < 1e4 * axes.dataLim.minposy else (1,)  # with others there were no ticks
    axes.yaxis.set_major_locator(LogLocator(subs=between))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _points(records: Sequence[Record], kind: str, name: str) -> tuple[list[float], list[float]]:
    found = [r for r in records if r["kind"] == kind and r.get(name) is not None]
    return [r["epoch"] for r in found], [min(r[name], LARGEST) for r in found]


def _pairs(records: Sequence[Record]) -> list[tuple[float, float]]:
    epochs, values = _points(records, "epoch", "test_accuracy")
    train_epochs, train_values = _points(records, "step", "accuracy")
    return [*zip(epochs, values, strict=True), *zip(train_epochs, train_values, strict=True)]


def _label(values: Sequence[float], unit: str) -> str:
    if not values:
        return "test"
    return f"test, last {values[-1]:.2%}" if unit == "%" else f"test, last {loss_text(values[-1])}"


def _zoom_to_the_end(axes: object, values: Sequence[float]) -> None:
    """Leave out the first moments of a run that ends well, or its last points would lie in one flat line."""
    if not values:
        return
    best, worst = max(values), min(values)
    low = max(worst, best - 0.25)
    axes.set_ylim(low - 0.01, min(1.0, best) + 0.01 + 0.02 * (best - low))  # type: ignore[attr-defined]
