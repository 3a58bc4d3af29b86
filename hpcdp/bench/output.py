"""What `hpcdp bench` prints and draws: the tables of OSU's Micro-Benchmarks 7, those of nccl-tests, and a plot.

Scripts that read those programs' tables read these: comment lines begin with ``#``, then comes one line a size, in the
columns and widths of those programs. A prediction, where it is asked for, stands after them. Under OSU's title the next
line says that hpcdp has measured. The plot is of bandwidth over message size, with the MPI library's own curve and the
machine's limit.
"""

from __future__ import annotations

import io
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from .command import COLLECTIVES, OSU_DTYPES, ROOTED, Settings
from .measure import format_size

Row = dict[str, Any]
COLUMNS = 80
"""The width of a terminal, for comment lines."""
OSU_VERSION = "7.4"
"""The version of the programs whose tables these are."""
RATES = ("bandwidth", "bibandwidth", "multi_pair")
"""Benchmarks that print MB/s."""

TITLES = {
    "latency": "Latency",
    "bandwidth": "Bandwidth",
    "bibandwidth": "Bi-Directional Bandwidth",
    "multi_pair": "Multiple Bandwidth / Message Rate",
    "allreduce": "Allreduce Latency",
    "iallreduce": "Non-blocking Allreduce Latency",
    "reduce_scatter": "Reduce_scatter Latency",
    "allgather": "Allgather Latency",
    "broadcast": "Broadcast Latency",
    "reduce": "Reduce Latency",
}

_LATENCY = (("Avg Latency(us)", "avg"), ("Min Latency(us)", "minimum"), ("Max Latency(us)", "maximum"))
_BANDWIDTH = (("Bandwidth (MB/s)", "mb_s"), ("Min (MB/s)", "min_mb_s"), ("Max (MB/s)", "max_mb_s"))
_OVERLAP = (
    ("Overall(us)", "overall"),
    ("Compute(us)", "compute"),
    ("Coll. Init(us)", "init"),
    ("MPI_Test(us)", "test"),
    ("MPI_Wait(us)", "wait"),
    ("Pure Comm.(us)", "pure"),
    ("Min Comm.(us)", "minimum"),
    ("Max Comm.(us)", "maximum"),
    ("Overlap(%)", "overlap"),
)
_WIDTH, _ITERATIONS_WIDTH = 18, 12
_MAIN_OVERLAP = ("overall", "compute", "pure", "overlap")
_OSU_NAMES = {dtype: name.upper() for name, dtype in OSU_DTYPES.items()}
_NCCL_TYPES = {"float32": "float", "float64": "double", "float16": "half"}


class Style(ABC):
    """How results look.

    Args:
        settings: what was asked for.
        version: hpcdp's.
    """

    def __init__(self, settings: Settings, version: str) -> None:
        self._settings, self._version = settings, version

    @abstractmethod
    def heading(self, facts: Sequence[str]) -> str:
        """The lines above the table; ``facts`` say where it was measured."""

    @abstractmethod
    def line(self, row: Row) -> str:
        """One size."""

    def closing(self, rows: Sequence[Row]) -> str:
        """The lines below the table, or nothing."""
        return ""


class OsuStyle(Style):
    """As osu_latency, osu_bw, osu_allreduce, osu_iallreduce and so on print; ``-f`` shows all columns."""

    def __init__(self, settings: Settings, version: str) -> None:
        super().__init__(settings, version)
        full, name = settings.full, settings.benchmark
        if name == "iallreduce":
            columns = [column for column in _OVERLAP if full or column[1] in _MAIN_OVERLAP]
        elif name == "multi_pair":
            columns = [("MB/s", "mb_s"), ("Messages/s", "messages_s"), *(_BANDWIDTH[1:] if full else ())]
        else:
            columns = [*(_BANDWIDTH if "bandwidth" in name else _LATENCY)][: 3 if full else 1]
        self._columns, self._shows_iterations = columns, full and name != "iallreduce"
        rate = name in RATES
        self._predicted = ("Predicted(MB/s)", "predicted_mb_s") if rate else ("Predicted(us)", "predicted_us")

    def heading(self, facts: Sequence[str]) -> str:
        settings = self._settings
        name = _OSU_NAMES.get(settings.dtype, settings.dtype)
        by = f"# hpcdp {self._version} has measured, and prints as OSU Micro-Benchmarks {OSU_VERSION} do."
        title = f"# OSU MPI {TITLES[settings.benchmark]} Test v{OSU_VERSION}"
        lines = ["", title, by, *_comments(facts), f"# Datatype: {name}."]
        if settings.benchmark == "iallreduce":
            lines += ["# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait", ""]
        titles = "".join(f"{title:>{_WIDTH}}" for title, _ in self._columns)
        iterations = f"{'Iterations':>{_ITERATIONS_WIDTH}}" if self._shows_iterations else ""
        validation = f"{'Validation':>{_WIDTH}}" if settings.shows_validation else ""
        predicted = f"{self._predicted[0]:>{_WIDTH}}" if settings.predict else ""
        return "\n".join([*lines, f"{'# Size':<10}{titles}{iterations}{validation}{predicted}"])

    def line(self, row: Row) -> str:
        settings = self._settings
        values = "".join(f"{row[key]:>{_WIDTH}.2f}" for _, key in self._columns)
        iterations = f"{row['iterations']:>{_ITERATIONS_WIDTH}}" if self._shows_iterations else ""
        validation = f"{'Fail' if row['wrong'] else 'Pass':>{_WIDTH}}" if settings.shows_validation else ""
        predicted = f"{row[self._predicted[1]]:>{_WIDTH}.2f}" if settings.predict else ""
        return f"{row['nbytes']:<10}{values}{iterations}{validation}{predicted}"


def _comments(facts: Sequence[str]) -> list[str]:
    return [
        line for fact in facts for line in textwrap.wrap(fact, COLUMNS, initial_indent="# ", subsequent_indent="# ")
    ]


class NcclStyle(Style):
    """As all_reduce_perf and its like print: out of place, then in place; ``#wrong`` counts elements over all ranks."""

    def heading(self, facts: Sequence[str]) -> str:
        settings = self._settings
        least, largest = settings.sizes[0], settings.sizes[-1]
        iterations = settings.iterations or "by size"
        both = f"{'out-of-place':^30}  {'in-place':^30}"
        figures = f"{'time':>9}  {'algbw':>6}  {'busbw':>6} {'#wrong':>6}"
        units = f"{'(us)':>9}  {'(GB/s)':>6}  {'(GB/s)':>6} {'':>6}"
        names = f"{'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
        name_units = f"{'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}"
        lines = [
            f"# hpcdp {TITLES[settings.benchmark].removesuffix(' Latency')} Test v{self._version}",
            *_comments(facts),
            f"# minBytes {least} maxBytes {largest} step: {settings.factor}(factor) warmup iters: {settings.warmup} "
            f"iters: {iterations} validation: {int(settings.validate)}",
            "#",
            f"# {'':>{len(names)}}  {both}",
            f"# {names}{figures}{figures}{self._predicted('predicted')}",
            f"# {name_units}{units}{units}{self._predicted('(us)')}",
        ]
        return "\n".join(line.rstrip() for line in lines)

    def line(self, row: Row) -> str:
        settings = self._settings
        kind = _NCCL_TYPES.get(settings.dtype, settings.dtype)
        op = settings.op if "reduce" in settings.benchmark else "none"
        root = settings.root if settings.benchmark in ROOTED else -1
        both = self._figures(row.get("out_of_place")) + self._figures(row)
        predicted = self._predicted(f"{row['predicted_us']:.2f}") if settings.predict else ""
        return f"{row['total_nbytes']:>12}  {row['count']:>12}  {kind:>8}  {op:>6}  {root:>6}{both}{predicted}"

    def closing(self, rows: Sequence[Row]) -> str:
        measured = [each for row in rows for each in (row.get("out_of_place"), row) if each]
        faulty = sum(each["wrong"] for each in measured)
        verdict = "not checked" if not self._settings.validate else f"{faulty} {'FAILED' if faulty else 'OK'}"
        average = sum(each["busbw_gb_s"] for each in measured) / len(measured)
        return f"# Out of bounds values : {verdict}\n# Avg bus bandwidth    : {average:.6g}\n#"

    def _figures(self, figures: Row | None) -> str:
        if figures is None:
            return f"{'N/A':>9}  {'N/A':>6}  {'N/A':>6} {'N/A':>6}"
        us = figures["avg"]
        time_us = f"{us:.0f}" if us >= 10000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"
        faulty = figures["wrong"] if self._settings.validate else "N/A"
        return f"{time_us:>9}  {figures['algbw_gb_s']:>6.2f}  {figures['busbw_gb_s']:>6.2f} {faulty:>6}"

    def _predicted(self, text: str) -> str:
        return f"  {text:>9}" if self._settings.predict else ""


_OURS, _PEER, _LIMIT, _GRID = "#3566a8", "#c8552b", "#6b6b6b", "#d9d9d9"


def check_drawable() -> None:
    """Load what `draw` needs, before anything is measured for it.

    Raises:
        ConfigError: matplotlib is missing or broken.
    """
    try:
        from matplotlib.backends import backend_agg  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "bench --plot", expected="matplotlib", got=str(error), remedy="pip install matplotlib"
        ) from error


def draw(
    rows: Sequence[dict[str, Any]], settings: Settings, limit: tuple[str, float] | None, title: str, where: str
) -> bytes:
    """Draw the PNG that ``settings.plot`` asks for, and return it.

    Args:
        rows: of `collective.sweep`, `collective.overlap_sweep` or `point_to_point.sweep`.
        settings: what was measured.
        limit: its name and GB/s, a dashed line.
        title: one line above the picture.
        where: a smaller one below it.
    """
    # Figure and the Agg canvas alone: pyplot would look for a display and keep the figure in a global list.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(7.6, 4.4), dpi=130, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    curves = _curves(rows, settings)
    for (label, sizes, rates), color in zip(curves, (_OURS, _PEER), strict=False):
        axes.plot(sizes, rates, color=color, linewidth=1.8, marker="o", markersize=3.6, label=label)
    if settings.predict:
        curves.append(("hpcdp, predicted", curves[0][1], [_predicted_rate(row) for row in rows]))
        axes.plot(*curves[-1][1:], color=_OURS, linewidth=1.4, linestyle=":", label=curves[-1][0])
    shown = [rate for _, _, rates in curves for rate in rates]
    if limit is not None:
        name, rate = limit
        axes.axhline(rate, color=_LIMIT, linewidth=1.2, linestyle=(0, (5, 3)), label=f"{name}: {rate:.1f} GB/s")
        shown.append(rate)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(min(shown) / 1.6, max(shown) * 1.8)
    sizes = curves[0][1]
    axes.xaxis.set_major_locator(FixedLocator(sizes[:: 1 + (len(sizes) - 1) // 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(round(value))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(numticks=12))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("message size (bytes, 1K = 1024)")
    axes.set_ylabel("busbw (GB/s), median" if settings.benchmark in COLLECTIVES else "bandwidth (GB/s), median")
    axes.grid(True, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    axes.set_title(title, fontsize=11, loc="left", pad=21)
    axes.text(0, 1.025, where, transform=axes.transAxes, fontsize=8, color=_LIMIT)
    drawn = io.BytesIO()
    canvas.print_png(drawn)
    return drawn.getvalue()


def _curves(rows: Sequence[dict[str, Any]], settings: Settings) -> list[tuple[str, list[int], list[float]]]:
    """Labels, sizes and GB/s: ours, then the MPI library's where it was measured."""
    ours = f"hpcdp, {settings.algorithm}" if settings.benchmark in COLLECTIVES else "hpcdp"
    sizes = [row.get("total_nbytes", row["nbytes"]) for row in rows]
    curves = [(ours, sizes, [_rate(row, row["nbytes"]) for row in rows])]
    if "library" in rows[0]:
        curves.append(("the MPI library's own", sizes, [_rate(row["library"], row["nbytes"]) for row in rows]))
    return curves


def _predicted_rate(row: dict[str, Any]) -> float:
    """GB/s of what was predicted, by the same factor as those of what was measured."""
    if "predicted_mb_s" in row:
        return float(row["predicted_mb_s"] / 1e3)
    us = row[_mean(row)]
    return float(row.get("busbw_gb_s", row["nbytes"] / us / 1e3) * us / row["predicted_us"])


def _mean(figures: dict[str, Any]) -> str:
    """The name of the mean that its busbw is of: of a nonblocking collective, that without computing."""
    return "pure" if "pure" in figures else "avg"


def _rate(figures: dict[str, Any], nbytes: int) -> float:
    """GB/s by the median of the timings, which what else the machine does moves least."""
    if "median_mb_s" in figures:
        return float(figures["median_mb_s"] / 1e3)
    if "busbw_gb_s" in figures:
        return float(figures["busbw_gb_s"] * figures[_mean(figures)] / figures["median"])
    return float(nbytes / figures["median"] / 1e3)
