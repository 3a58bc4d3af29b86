"""The HTML report of one or several runs, the measurement of steps on which it is based, and plots of curves.

The page includes its plots, so it needs no other file and no network. `StepReport` measures where the time of an epoch
goes on each rank, and estimates the critical path of its steps. `draw_curves` and `Animator` draw PNG files.
"""

from __future__ import annotations

import base64
import html
import io
import os
import socket
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..comm import World
from ..core import files
from ..core.checks import file_name, is_number
from ..data_parallel.base_trainer import BaseTrainer
from ..data_parallel.overlap import BucketCost, BucketTimes, GpuTimes, critical_path, mirrored_need, reduction_seconds
from ..engine.engine import Span, Trace
from ..errors import ConfigError, DataError, HpcdpError, shortened, type_named
from .metrics import Record, read_metrics, replace_file

_TRAIN, _TEST = "#3566a8", "#c8552b"
LARGEST = 1e100
"""The largest loss in a plot; matplotlib's axes fail on larger ones, as a diverged run has them."""
_COLORS = ("#3566a8", "#c8552b", "#3f8f5b", "#8a5aa8", "#b08a1e", "#4a9aa8", "#a84a6b", "#6b6b6b")
PARTS = {"compute_s": ("computation", "#3566a8"), "data_s": ("data", "#b08a1e"), "exposed_s": ("waiting", "#c8552b")}
_MOST_BARS = 64
_LONGEST_NAME = 40
"""The maximum length of a run's name in a legend, which shows the end of longer names."""


def draw_all(runs: Sequence[Run]) -> dict[str, bytes]:
    """Return PNG plots of the metrics of ``runs`` by their headings, without those that would be empty."""
    curves: dict[str, Callable[[Run], list[tuple[str, list[float], list[float]]]]] = {
        "Loss": lambda run: [_points(run, "step", "loss"), _points(run, "epoch", "test_loss")],
        "Accuracy": lambda run: [_points(run, "step", "accuracy"), _points(run, "epoch", "test_accuracy")],
        "Samples a second": lambda run: [_points(run, "step", "samples_per_s")],
        "Exposed communication, ms a step": lambda run: [_exposed(run)],
    }
    figures: dict[str, bytes] = {}
    for heading, of_run in curves.items():
        lines = [(run.name, of_run(run)) for run in runs]
        if any(x for _, run_curves in lines for _, x, _ in run_curves):
            figures[heading] = _curves(heading, lines)
    compared = {run.name: parts for run in runs if (parts := _by_rank(run))}
    if compared:
        figures["Ranks, ms a step"] = _ranks(compared)
    return figures


def _points(run: Run, kind: str, name: str) -> tuple[str, list[float], list[float]]:
    return kind, *points(run.records, kind, name)


def _exposed(run: Run) -> tuple[str, list[float], list[float]]:
    epochs, values, before = [], [], 0
    for record in run.of_kind("step") if run.has_several_ranks else ():
        steps, before = record["step"] - before, record["step"]
        if steps > 0 and record.get("comm_exposed_s") is not None:
            epochs.append(record["epoch"])
            values.append(1e3 * record["comm_exposed_s"] / steps)
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
                style |= {"marker": "o", "markersize": 3.5} if len(x) == 1 else {}  # a single point has no line
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
    for text, name in zip(legend.get_texts(), names, strict=True):  # labels that begin with _ would be omitted
        text.set(text=name, parse_math=False)
    return png(figure)


def _by_rank(run: Run) -> dict[str, list[float]]:
    """Return the milliseconds per step of each rank by part, without the first epoch, which may compile kernels."""
    epochs = [record for record in run.of_kind("epoch") if "by_rank" in record]
    if not epochs:
        return {}
    first, measured = (epochs[0]["step"], epochs[1:]) if len(epochs) > 1 else (0, epochs)
    steps = max(1, measured[-1]["step"] - first)
    size = len(measured[-1]["by_rank"]["compute_s"])  # a run may resume with another number of ranks
    times = [record["by_rank"] for record in measured if len(record["by_rank"]["compute_s"]) == size]
    return {
        part: [1e3 * sum(rank) / steps for rank in zip(*[by_rank[part] for by_rank in times], strict=True)]
        for part in PARTS
    }


def _ranks(compared: Mapping[str, Mapping[str, Sequence[float]]]) -> bytes:
    figure, all_axes = styled(len(compared), (9.0, 2.6 * len(compared)))
    for axes in all_axes[1:]:
        axes.sharey(all_axes[0])  # makes the bars of different runs comparable
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
    return png(figure)


def _colors(count: int) -> Sequence[Any]:
    if count <= len(_COLORS):
        return _COLORS[:count]
    from matplotlib import colormaps

    return [colormaps["turbo"](i / (count - 1)) for i in range(count)]


STRAGGLES_AT = 1.2
"""The multiple of the median over ranks above which a rank's own work makes it a straggler."""

_LOOK_EVERY, _LOOKS_KEPT = 8, 256
"""The sampling of bucket times, which costs 2 us per bucket: the first steps of an epoch, then one step in 8. The last
256 samples are kept."""

DATA, FORWARD, BACKWARD, STEP = "data", "forward", "backward", "step"
"""The phases of a step, in this order."""


class Phase:
    """A phase of a step: a context that adds up its time over steps, and records a span if there is a trace.

    Args:
        name: the name of the phase.
        trace: the trace, if any.
        times: the GPU's timer, if the phase computes on a GPU.
    """

    def __init__(self, name: str, trace: Trace | None, times: GpuTimes | None = None) -> None:
        self.name = name
        self.total_ns = 0
        """The host's time since the last `StepReport.start_epoch`."""
        self.start_ns = self.end_ns = 0
        self._trace, self._times = trace, times
        self._span: Span | None = None
        self._part: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        if self._times is not None:
            self._part = self._times.part(self.name)
            self._part.__enter__()
        if self._trace is not None:
            self._span = self._trace.span(self.name)
            self._span.__enter__()
        self.start_ns = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_ns = time.perf_counter_ns()
        self.total_ns += self.end_ns - self.start_ns
        if self._span is not None:
            self._span.__exit__(kind, error, trace)
        self._part.__exit__(None, None, None)


class StepReport:
    """A measurement of this rank's steps, compared with the other ranks once per epoch.

    Wrap each phase of a step in ``with report.phase["data"]:`` and so on, then call `end_step`. Work on a GPU is
    measured by its events. Only at the end of an epoch the host waits for them.
    """

    def __init__(self, trainer: BaseTrainer, world: World) -> None:
        trace: Trace | None = world.kept.get(Trace)
        self._times = trainer.measure_on_gpu()
        self.phase = {name: Phase(name, trace, self._times) for name in (FORWARD, BACKWARD, STEP)}
        self.phase[DATA] = Phase(DATA, trace)
        self._trainer, self._world = trainer, world
        self._backwards: deque[tuple[int, int]] = deque(maxlen=3)  # updates may complete a step later
        self._last_times: Sequence[BucketTimes] = trainer.bucket_times
        self.start_epoch()

    def start_epoch(self) -> None:
        """Reset the measurements."""
        for phase in self.phase.values():
            phase.total_ns = 0
        if self._times is not None:
            self._times.start()
        self._steps = 0
        self._exposed_s = self._trainer.stats.exposed_s
        self._buckets: dict[int, deque[tuple[float, float]]] = {}

    def end_step(self) -> None:
        """Record the trainer's bucket times of the last step."""
        self._steps += 1
        if self._times is not None:
            self._times.end_step()
            return  # bucket times are the host's, which do not show when a bucket is ready on the GPU
        backward = self.phase[BACKWARD]
        if not self._backwards or self._backwards[-1][0] != backward.start_ns:
            self._backwards.append((backward.start_ns, backward.end_ns))
        if self._steps > _LOOK_EVERY and self._steps % _LOOK_EVERY:
            return
        times = self._trainer.bucket_times
        if times is self._last_times or not times:
            return
        self._last_times = times
        first_ns = min(bucket.ready_ns for bucket in times)
        started = [start_ns for start_ns, end_ns in self._backwards if start_ns <= first_ns <= end_ns]
        if not started:  # this rank had no samples in the step
            return
        for bucket, reduction_s in zip(times, reduction_seconds(times), strict=True):
            measured = self._buckets.setdefault(bucket.number, deque(maxlen=_LOOKS_KEPT))
            measured.append(((bucket.ready_ns - started[-1]) / 1e9, reduction_s))

    def end_epoch(self) -> Record:
        """Return the step times of an epoch, the same on every rank; every rank must call."""
        return compare(self._world.comm.allgather_json(self._summary()))

    def _summary(self) -> dict[str, Any]:
        alone = self._world.size == 1
        seconds: dict[str, Any] = {name: phase.total_ns / 1e9 for name, phase in self.phase.items()}
        if self._times is not None:
            self._times.finish()
            seconds |= {name: self._times.seconds[name] for name in (FORWARD, BACKWARD, STEP)}
        return seconds | {
            "host": socket.gethostname(),
            "steps": self._steps,
            "exposed": 0.0 if alone else self._trainer.stats.exposed_s - self._exposed_s,
            "buckets": [] if alone else [[number, *_medians(times)] for number, times in sorted(self._buckets.items())],
        }


def _medians(measured: Iterable[tuple[float, float]]) -> list[float]:
    """Return the median of each column, which ignores steps that compiled kernels or waited for a late rank."""
    return [statistics.median(column) for column in zip(*measured, strict=True)]


def compare(summaries: Sequence[Mapping[str, Any]]) -> Record:
    """Return the step times of an epoch from the summaries of all ranks; docs/tracing.md lists them.

    A rank's own work is its data loading and computation, without waiting for others. The critical path is that of the
    rank with the longest work. A bucket counts as ready when it is ready on the last rank. Its reduction time is the
    shortest of all ranks, because the others include waiting. Buckets that are reduced after backward are not measured;
    the whole exposed communication then counts as one.
    """
    work = [(summary[DATA] + _compute(summary)) / max(1, summary["steps"]) for summary in summaries]
    median = statistics.median_low(work)
    record: Record = {
        "data_s": statistics.fmean(summary[DATA] for summary in summaries),
        "compute_s": statistics.fmean(_compute(summary) for summary in summaries),
    }
    slowest = max(range(len(work)), key=work.__getitem__)
    path_s, path = _critical_path(summaries, slowest)
    record |= {"critical_path_s": path_s * summaries[slowest]["steps"], "critical_path": path}
    if len(work) > 1:
        ratios = [seconds / median if median > 0 else 1.0 for seconds in work]
        record |= {
            "by_rank": {
                "compute_s": [_compute(summary) for summary in summaries],
                "data_s": [summary[DATA] for summary in summaries],
                "exposed_s": [summary["exposed"] for summary in summaries],
            },
            "slowest_rank": slowest,
            "slowest_host": summaries[slowest]["host"],
            "slowest_ratio": ratios[slowest],
            "stragglers": [
                f"rank {rank} on {summaries[rank]['host']}"
                for rank in sorted(range(len(work)), key=lambda rank: -ratios[rank])
                if ratios[rank] > STRAGGLES_AT
            ],
        }
    return record


def _waited(summary: Mapping[str, Any]) -> float:
    """Return the seconds that forward waited for parameters: exposed communication outside the end of steps."""
    return min(summary[FORWARD], max(0.0, summary["exposed"] - summary[STEP]))


def _compute(summary: Mapping[str, Any]) -> float:
    update_s = max(0.0, summary[STEP] - summary["exposed"])
    return summary[FORWARD] + summary[BACKWARD] - _waited(summary) + update_s


def _critical_path(summaries: Sequence[Mapping[str, Any]], slowest: int) -> tuple[float, str]:
    """Return the length of the critical path of a step in seconds, and a description of it."""
    own = summaries[slowest]
    steps = max(1, own["steps"])
    forward_s, backward_s = (own[FORWARD] - _waited(own)) / steps, own[BACKWARD] / steps
    between_s = (own[DATA] + max(0.0, own[STEP] - own["exposed"])) / steps
    ready: dict[int, float] = {}
    busy: dict[int, float] = {}
    for summary in summaries:
        for number, ready_s, busy_s in summary["buckets"]:
            ready[number] = max(ready_s, ready.get(number, ready_s))
            busy[number] = min(busy_s, busy.get(number, busy_s))
    if not ready:
        exposed_s = min(summary["exposed"] / max(1, summary["steps"]) for summary in summaries)
        description = "computation" + (", then communication" if exposed_s > 0 else "")
        return forward_s + backward_s + between_s + exposed_s, description
    buckets = [
        BucketCost(number, ready[number], busy[number], mirrored_need(ready[number], forward_s, backward_s))
        for number in ready
    ]
    path = critical_path(forward_s, backward_s, buckets, between_s)
    return path.seconds, str(path)


_NUMBERS = ("loss", "accuracy", "test_loss", "test_accuracy", "samples_per_s", "seconds", "comm_exposed_s")
"""Fields of a record that may be missing or null."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1c1c; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .wide { overflow-x: auto }
td, th { padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top }
th { font-weight: 600 } .differs td { background: #fff6dd } img { max-width: 100%; height: auto }
"""


@dataclass(frozen=True)
class Run:
    """The settings and the records of a run folder."""

    name: str
    settings: dict[str, Any]
    records: list[Record]

    def of_kind(self, kind: str) -> list[Record]:
        """Return the records of one ``kind``."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def has_several_ranks(self) -> bool:
        """True for several ranks. The times alone cannot tell: one rank measures some microseconds of communication."""
        return self.settings.get("ranks", 1) != 1 or any("by_rank" in record for record in self.records)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs of ``folders``, with the shortest names that are unique.

    Raises:
        ConfigError: a folder is not a run folder, or occurs twice.
        DataError: a file is damaged.
    """
    paths = [Path(folder).resolve() for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError("report", where=path, expected="each run once", got="a duplicate")
    num_parts = 1
    while len({path.parts[-num_parts:] for path in paths}) < len(paths):
        num_parts += 1
    return [_read(path, _shown("/".join(path.parts[-num_parts:]))) for path in paths]


def _shown(name: str) -> str:
    """Decode a file name independently of the locale, escaping bytes that are not UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _read(folder: Path, name: str) -> Run:
    path = folder / "metrics.jsonl"
    if not os.path.isfile(path):
        got = "no metrics.jsonl in it" if os.path.isdir(folder) else "no such folder"
        raise ConfigError("report", where=folder, expected="a run folder, which has a file metrics.jsonl", got=got)
    try:
        records = read_metrics(path)
        for number, record in enumerate(records, 1):
            _check_record(number, record)
        path = folder / "config.toml"
        settings = files.read_toml(path) if os.path.isfile(path) else {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError("report", where=path, expected="a file written by a run", got=str(error)) from error
    return Run(name, settings, records)


def _check_record(number: int, record: object) -> None:
    """Raise `ValueError` if a field that the report reads has another type."""
    if not isinstance(record, dict) or not {"kind", "epoch", "step"} <= record.keys():
        raise ValueError("a line that is not a record")
    numbers = ["epoch", "step", *(name for name in _NUMBERS if record.get(name) is not None)]
    texts = ["kind"]
    if "slowest_rank" in record:
        numbers += ["slowest_rank", "slowest_ratio"]
        texts.append("slowest_host")
    wrong = [(name, "a number") for name in numbers if not _is_number(record.get(name))]
    wrong += [(name, "a text") for name in texts if not isinstance(record.get(name), str)]
    if "by_rank" in record and not _are_times(record["by_rank"]):
        wrong.append(("by_rank", "equally many numbers for each part"))
    if wrong:
        name, expected = wrong[0]
        shown = shortened(repr(record.get(name)), 40)
        raise ValueError(f"record {number}: {name!r} is {shown}, not {expected}")


def _is_number(value: object) -> bool:
    """Return whether ``value`` is a finite number."""
    return is_number(value) and abs(value) <= sys.float_info.max


def _are_times(by_rank: object) -> bool:
    """Return whether ``by_rank`` has the same number of values for each part of a step."""
    parts = [by_rank.get(part) for part in PARTS] if isinstance(by_rank, dict) else []
    lengths = {len(part) if isinstance(part, list) and all(map(_is_number, part)) else None for part in parts}
    return len(lengths) == 1 and None not in lengths


def page(runs: Sequence[Run], figures: Mapping[str, bytes]) -> str:
    """Return the HTML page about ``runs``; ``figures`` are PNG plots by their headings, see `draw_all`."""
    title = ", ".join(run.name for run in runs)
    parts = [f"<h1>{_text(title)}</h1>", "<h2>Results</h2>", _table(*_results(runs))]
    for heading, picture in figures.items():
        data = base64.b64encode(picture).decode("ascii")
        parts += [f"<h2>{_text(heading)}</h2>", f'<img alt="{_text(heading)}" src="data:image/png;base64,{data}">']
    parts += ["<h2>Settings</h2>", _table(*_settings(runs))]
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


Rows = Sequence[tuple[str, Sequence[str]]]


def _results(runs: Sequence[Run]) -> tuple[Sequence[str], Rows]:
    results = [_result(run) for run in runs]
    names = [name for name in _ROWS if any(name in result for result in results)]
    return [run.name for run in runs], [(name, [result.get(name, "") for result in results]) for name in names]


_ROWS = (
    "network", "ranks", "epochs", "steps", "test accuracy", "best test accuracy", "test loss", "training time",
    "samples/s", "communication exposed", "critical path", "slowest rank",
)  # fmt: skip


def _result(run: Run) -> dict[str, str]:
    """Return the entries of the table for one run, without those that it has not measured."""
    steps, epochs = run.of_kind("step"), run.of_kind("epoch")
    result: dict[str, str] = {}
    if run.settings:
        result["network"] = f"{run.settings.get('model', '?')} on {run.settings.get('data', '?')}"
        result["ranks"] = str(run.settings.get("ranks", 1))
    if run.records:
        result["epochs"], result["steps"] = f"{run.records[-1]['epoch']:g}", str(run.records[-1]["step"])
    accuracies = [epoch["test_accuracy"] for epoch in epochs if epoch.get("test_accuracy") is not None]
    if accuracies:
        result["test accuracy"], result["best test accuracy"] = f"{accuracies[-1]:.4f}", f"{max(accuracies):.4f}"
    if epochs and epochs[-1].get("test_loss") is not None:
        result["test loss"] = loss_text(epochs[-1]["test_loss"])
    seconds = sum(step.get("seconds") or 0 for step in steps)
    if seconds:
        result["training time"] = f"{seconds:.1f} s"
        rates = [step["samples_per_s"] for step in steps if step.get("samples_per_s") is not None]
        if rates:
            result["samples/s"] = f"{statistics.median(rates):,.0f}, median"
        if run.has_several_ranks:
            exposed = sum(step.get("comm_exposed_s") or 0 for step in steps)
            result["communication exposed"] = f"{exposed:.2f} s, {exposed / seconds:.1%}"
    if epochs and epochs[-1].get("critical_path"):
        result["critical path"] = str(epochs[-1]["critical_path"])
    if slowest := slowest_rank(epochs):
        result["slowest rank"] = slowest
    return result


def _settings(runs: Sequence[Run]) -> tuple[Sequence[str], Rows]:
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = [(name, [str(run.settings.get(name, "")) for run in runs]) for name in names]
    return [run.name for run in runs], rows


def _table(columns: Sequence[str], rows: Rows) -> str:
    """Return an HTML table with a row for each name, marking rows whose values differ between runs."""
    lines = ["<tr><th></th>" + "".join(f"<th>{_text(column)}</th>" for column in columns) + "</tr>"]
    for name, values in rows:
        mark = ' class="differs"' if len(set(values)) > 1 else ""
        cells = "".join(f"<td>{_text(value)}</td>" for value in values)
        lines.append(f"<tr{mark}><th>{_text(name)}</th>{cells}</tr>")
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _text(value: object) -> str:
    return html.escape(str(value))


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


def loss_text(loss: float) -> str:
    """Format a loss with four decimals, unless training has diverged."""
    return f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.4g}"


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
