"""The pictures of a report: curves of all runs over epochs, and the ranks of each run beside each other."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .plots import LARGEST, by_powers, styled

if TYPE_CHECKING:
    from .report import Run

_COLORS = ("#3566a8", "#c8552b", "#3f8f5b", "#8a5aa8", "#b08a1e", "#4a9aa8", "#a84a6b", "#6b6b6b")
PARTS = {"compute_s": ("computation", "#3566a8"), "data_s": ("data", "#b08a1e"), "exposed_s": ("waiting", "#c8552b")}
_MOST_BARS = 64
_LONGEST_NAME = 40
"""Of longer names the ends stand below the curves."""


def draw_all(runs: Sequence[Run]) -> dict[str, bytes]:
    """PNG pictures by their headings, of what ``runs`` have measured; those without a point are left out."""
    curves: dict[str, Callable[[Run], list[tuple[str, list[float], list[float]]]]] = {
        "Loss": lambda run: [_points(run, "step", "loss"), _points(run, "epoch", "test_loss")],
        "Accuracy": lambda run: [_points(run, "step", "accuracy"), _points(run, "epoch", "test_accuracy")],
        "Samples a second": lambda run: [_points(run, "step", "samples_per_s")],
        "Exposed communication, ms a step": lambda run: [_exposed(run)],
    }
    found: dict[str, bytes] = {}
    for heading, of_run in curves.items():
        lines = [(run.name, of_run(run)) for run in runs]
        if any(x for _, each in lines for _, x, _ in each):
            found[heading] = _curves(heading, lines)
    compared = {run.name: each for run in runs if (each := _by_rank(run))}
    if compared:
        found["Ranks, ms a step"] = _ranks(compared)
    return found


def _points(run: Run, kind: str, name: str) -> tuple[str, list[float], list[float]]:
    records = [each for each in run.of_kind(kind) if each.get(name) is not None]
    return kind, [each["epoch"] for each in records], [min(each[name], LARGEST) for each in records]


def _exposed(run: Run) -> tuple[str, list[float], list[float]]:
    epochs, values, before = [], [], 0
    for each in run.of_kind("step") if run.has_several_ranks else ():
        steps, before = each["step"] - before, each["step"]
        if steps > 0 and each.get("comm_exposed_s") is not None:
            epochs.append(each["epoch"])
            values.append(1e3 * each["comm_exposed_s"] / steps)
    return "step", epochs, values


def _curves(heading: str, lines: Sequence[tuple[str, Sequence[tuple[str, list[float], list[float]]]]]) -> bytes:
    count = sum(bool(x) for _, curves in lines for _, x, _ in curves)
    figure, (axes,) = styled(1, (9.0, 3.4 + 0.2 * -(-count // 2)))
    names = []
    for (name, curves), color in zip(lines, _colors(len(lines)), strict=True):
        for kind, x, y in curves:
            if x:
                name = name if len(name) <= _LONGEST_NAME else f"...{name[-_LONGEST_NAME:]}"
                both = f"{name}, {'test' if kind == 'epoch' else 'training'}" if len(curves) > 1 else name
                style: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linestyle": "--"} if kind == "epoch" else {}
                style |= {"marker": "o", "markersize": 3.5} if len(x) == 1 else {}  # which is no line
                axes.plot(x, y, color=color, linewidth=1.4, **style)
                names.append(both)
    axes.set_xlabel("epoch")
    axes.set_ylabel(heading.lower())
    axes.set_xlim(left=0)
    if heading == "Loss" and all(value > 0 for _, curves in lines for _, _, y in curves for value in y):
        by_powers(axes)
    elif heading != "Accuracy":
        axes.set_ylim(bottom=0)
    legend = figure.legend(axes.lines, ["?"] * count, frameon=False, loc="outside lower center", ncols=2, fontsize=9)
    for text, name in zip(legend.get_texts(), names, strict=True):  # else one that begins with _ has none
        text.set(text=name, parse_math=False)
    return _png(figure)


def _by_rank(run: Run) -> dict[str, list[float]]:
    """Milliseconds a step of each rank, by part, over all epochs but the first, in which things are compiled."""
    epochs = [each for each in run.of_kind("epoch") if "by_rank" in each]
    if not epochs:
        return {}
    first, measured = (epochs[0]["step"], epochs[1:]) if len(epochs) > 1 else (0, epochs)
    steps = max(1, measured[-1]["step"] - first)
    size = len(measured[-1]["by_rank"]["compute_s"])  # a run may go on with other ranks
    alike = [each["by_rank"] for each in measured if len(each["by_rank"]["compute_s"]) == size]
    return {
        part: [1e3 * sum(rank) / steps for rank in zip(*[each[part] for each in alike], strict=True)] for part in PARTS
    }


def _ranks(compared: Mapping[str, Mapping[str, Sequence[float]]]) -> bytes:
    figure, all_axes = styled(len(compared), (9.0, 2.6 * len(compared)))
    for axes in all_axes[1:]:
        axes.sharey(all_axes[0])  # so that bars of different runs can be compared
    for axes, (name, parts) in zip(all_axes, compared.items(), strict=True):
        ranks = range(len(parts["compute_s"]))
        below = [0.0] * len(ranks)
        for part, (label, color) in PARTS.items():
            if len(ranks) <= _MOST_BARS:
                axes.bar(ranks, parts[part], bottom=below, color=color, width=0.7, label=label)
            else:
                axes.plot(ranks, parts[part], color=color, linewidth=1.0, label=label)
            below = [low + more for low, more in zip(below, parts[part], strict=True)]
        axes.set_title(name, fontsize=10, loc="left", parse_math=False)
        axes.set_xlabel("rank")
        axes.set_ylabel("ms a step")
        if len(ranks) <= _MOST_BARS:
            axes.set_xticks(list(ranks)[:: max(1, len(ranks) // 16)])
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    return _png(figure)


def _colors(count: int) -> Sequence[Any]:
    if count <= len(_COLORS):
        return _COLORS[:count]
    from matplotlib import colormaps

    return [colormaps["turbo"](i / (count - 1)) for i in range(count)]


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.canvas.print_png(stream)
    return stream.getvalue()
