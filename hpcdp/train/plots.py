"""The picture that a run leaves behind, loss and accuracy over epochs; and lines that grow while a program runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, type_named
from ..replacing import replaced
from .metrics import Record
from .progress import loss_text

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
