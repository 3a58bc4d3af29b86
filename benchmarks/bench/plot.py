"""Bandwidth over message size, with the MPI library's own curve and the machine's limit drawn in."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError
from ..harness.sizes import format_size
from .options import COLLECTIVES, Settings

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
