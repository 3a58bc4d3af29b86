"""The report of a run, and of single steps.

One page of HTML about one run or several: what they reached, how fast, what waited for what, and their settings.

The page needs no other file and no network, so that it can be sent or opened from a file system: pictures are in it.

The pictures of a report: curves of all runs over epochs, and the ranks of each run beside each other.

Where the time of an epoch went, on which rank, and how short its steps could have been.
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
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..comm import World
from ..core import files
from ..core.checks import is_number
from ..data_parallel.profiling import BucketCost, BucketTimes, GpuTimes, critical_path, mirrored_need, reduction_seconds
from ..data_parallel.trainer import BaseTrainer
from ..engine.engine import Span, Trace
from ..errors import ConfigError, DataError, shortened
from .metrics import Record, read_metrics
from .progress import LARGEST, by_powers, loss_text, slowest_rank, styled

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


STRAGGLES_AT = 1.2
"""A rank is a straggler when its own work took more than so many times the median over ranks."""

_LOOK_EVERY, _LOOKS_KEPT = 8, 256
"""The buckets of an epoch's first steps are looked at, then those of one in so many (it takes 2 us a bucket), and so
many of the last looks count."""

DATA, FORWARD, BACKWARD, STEP = "data", "forward", "backward", "step"
"""The phases of a step, in this order."""


class Phase:
    """One part of a step, entered again in every step: adds up its time, and is a span of the trace if there is one.

    Args:
        times: where that part of the step is computed on a GPU, what measures it there, too.
    """

    def __init__(self, name: str, trace: Trace | None, times: GpuTimes | None = None) -> None:
        self.name = name
        self.total_ns = 0
        """Of the host, since the last `StepReport.start_epoch`."""
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
    """Measures the steps of this rank, and compares them with those of others once an epoch.

    Use ``with report.phase["data"]:`` and so on around each phase of a step, then `end_step`. What is computed on a GPU
    is measured there, by events, which are read without waiting for it, but for the last ones of an epoch.
    """

    def __init__(self, trainer: BaseTrainer, world: World) -> None:
        trace: Trace | None = world.kept.get(Trace)
        self._times = trainer.measure_on_gpu()
        self.phase = {name: Phase(name, trace, self._times) for name in (FORWARD, BACKWARD, STEP)}
        self.phase[DATA] = Phase(DATA, trace)
        self._trainer, self._world = trainer, world
        self._backwards: deque[tuple[int, int]] = deque(maxlen=3)  # updates may end a step late
        self._seen: Sequence[BucketTimes] = trainer.bucket_times
        self.start_epoch()

    def start_epoch(self) -> None:
        """Forget what was measured."""
        for phase in self.phase.values():
            phase.total_ns = 0
        if self._times is not None:
            self._times.start()
        self._steps = 0
        self._exposed_s = self._trainer.stats.exposed_s
        self._buckets: dict[int, deque[tuple[float, float]]] = {}

    def end_step(self) -> None:
        """Take in what the trainer knows of its last step."""
        self._steps += 1
        if self._times is not None:
            self._times.end_step()
            return  # when buckets were ready on the GPU is not known: those are times of the host
        backward = self.phase[BACKWARD]
        if not self._backwards or self._backwards[-1][0] != backward.start_ns:
            self._backwards.append((backward.start_ns, backward.end_ns))
        if self._steps > _LOOK_EVERY and self._steps % _LOOK_EVERY:
            return
        times = self._trainer.bucket_times
        if times is self._seen or not times:
            return
        self._seen = times
        first_ns = min(each.ready_ns for each in times)
        started = [start_ns for start_ns, end_ns in self._backwards if start_ns <= first_ns <= end_ns]
        if not started:  # of a step in which this rank had no samples
            return
        for each, reduction_s in zip(times, reduction_seconds(times), strict=True):
            measured = self._buckets.setdefault(each.number, deque(maxlen=_LOOKS_KEPT))
            measured.append(((each.ready_ns - started[-1]) / 1e9, reduction_s))

    def end_epoch(self) -> Record:
        """What an epoch's record says of its steps, alike on every rank; all must call, one small message a rank."""
        return compare(self._world.comm.allgather_json(self._summary()))

    def _summary(self) -> dict[str, Any]:
        alone = self._world.size == 1
        found: dict[str, Any] = {name: phase.total_ns / 1e9 for name, phase in self.phase.items()}
        if self._times is not None:
            self._times.finish()
            found |= {name: self._times.seconds[name] for name in (FORWARD, BACKWARD, STEP)}
        return found | {
            "host": socket.gethostname(),
            "steps": self._steps,
            "exposed": 0.0 if alone else self._trainer.stats.exposed_s - self._exposed_s,
            "buckets": [] if alone else [[n, *_medians(each)] for n, each in sorted(self._buckets.items())],
        }


def _medians(measured: Iterable[tuple[float, float]]) -> list[float]:
    """Of each column: a step in which something was compiled, or another rank was late, says little of the others."""
    return [statistics.median(column) for column in zip(*measured, strict=True)]


def compare(summaries: Sequence[Mapping[str, Any]]) -> Record:
    """One epoch's numbers from those of each rank; docs/tracing.md lists them.

    A rank's own work is its data and its computation in a step: all that it did but wait for others. The critical path
    is that of the rank with the longest computation. A bucket is ready when it is on the last rank, and its reduction
    takes as long as where it is shortest, since elsewhere it has waited for others. Where buckets were not measured,
    because they are reduced when backward is over, all of the exposed communication is one.
    """
    work = [(each[DATA] + _compute(each)) / max(1, each["steps"]) for each in summaries]
    median = statistics.median_low(work)
    found: Record = {
        "data_s": statistics.fmean(each[DATA] for each in summaries),
        "compute_s": statistics.fmean(_compute(each) for each in summaries),
    }
    slowest = max(range(len(work)), key=work.__getitem__)
    path_s, path = _critical_path(summaries, slowest)
    found |= {"critical_path_s": path_s * summaries[slowest]["steps"], "critical_path": path}
    if len(work) > 1:
        ratios = [seconds / median if median > 0 else 1.0 for seconds in work]
        found |= {
            "by_rank": {
                "compute_s": [_compute(each) for each in summaries],
                "data_s": [each[DATA] for each in summaries],
                "exposed_s": [each["exposed"] for each in summaries],
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
    return found


def _waited(summary: Mapping[str, Any]) -> float:
    """Seconds for which forward has waited for parameters: communication that was exposed, but not in a step's end."""
    return min(summary[FORWARD], max(0.0, summary["exposed"] - summary[STEP]))


def _compute(summary: Mapping[str, Any]) -> float:
    rest = max(0.0, summary[STEP] - summary["exposed"])
    return summary[FORWARD] + summary[BACKWARD] - _waited(summary) + rest


def _critical_path(summaries: Sequence[Mapping[str, Any]], slowest: int) -> tuple[float, str]:
    """Seconds a step, and what it runs through."""
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
        exposed_s = min(each["exposed"] / max(1, each["steps"]) for each in summaries)
        in_turn = "computation" + (", then communication" if exposed_s > 0 else "")
        return forward_s + backward_s + between_s + exposed_s, in_turn
    buckets = [
        BucketCost(number, ready[number], busy[number], mirrored_need(ready[number], forward_s, backward_s))
        for number in ready
    ]
    path = critical_path(forward_s, backward_s, buckets, between_s)
    return path.seconds, str(path)


_NUMBERS = ("loss", "accuracy", "test_loss", "test_accuracy", "samples_per_s", "seconds", "comm_exposed_s")
"""Fields of a record that may be missing, or null."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1c1c; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .wide { overflow-x: auto }
td, th { padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top }
th { font-weight: 600 } .differs td { background: #fff6dd } img { max-width: 100%; height: auto }
"""


@dataclass(frozen=True)
class Run:
    """What a run has left in its folder."""

    name: str
    settings: dict[str, Any]
    records: list[Record]

    def of_kind(self, kind: str) -> list[Record]:
        """Its records of one ``kind``."""
        return [each for each in self.records if each["kind"] == kind]

    @property
    def has_several_ranks(self) -> bool:
        """Whether it had others to communicate with: one rank may measure some microseconds of that, too."""
        return self.settings.get("ranks", 1) != 1 or any("by_rank" in each for each in self.records)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs of ``folders``, by the shortest names that tell them apart.

    Raises:
        ConfigError: one is no run folder, or is named twice.
        DataError: its files are damaged.
    """
    paths = [Path(folder).resolve() for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError("report", where=path, expected="each run once", got="it twice")
    num_parts = 1
    while len({path.parts[-num_parts:] for path in paths}) < len(paths):
        num_parts += 1
    return [_read(path, _shown("/".join(path.parts[-num_parts:]))) for path in paths]


def _shown(name: str) -> str:
    """A file's name as a text, whatever the locale has for characters: bytes that are none of UTF-8 are written out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _read(folder: Path, name: str) -> Run:
    path = folder / "metrics.jsonl"
    if not os.path.isfile(path):
        raise ConfigError("report", where=folder, expected="the folder of a run, with metrics.jsonl", got="none")
    try:
        records = read_metrics(path)
        for number, record in enumerate(records, 1):
            _check_record(number, record)
        path = folder / "config.toml"
        settings = files.read_toml(path) if os.path.isfile(path) else {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError("report", where=path, expected="what a run has written", got=str(error)) from error
    return Run(name, settings, records)


def _check_record(number: int, record: object) -> None:
    """Raises `ValueError` where a report could not be made of it: fields that are read are of another type."""
    if not isinstance(record, dict) or not {"kind", "epoch", "step"} <= record.keys():
        raise ValueError("a line that is no record")
    numbers = ["epoch", "step", *(name for name in _NUMBERS if record.get(name) is not None)]
    texts = ["kind"]
    if "slowest_rank" in record:
        numbers += ["slowest_rank", "slowest_ratio"]
        texts.append("slowest_host")
    wrong = [(name, "a number") for name in numbers if not _is_number(record.get(name))]
    wrong += [(name, "a text") for name in texts if not isinstance(record.get(name), str)]
    if "by_rank" in record and not _are_times(record["by_rank"]):
        wrong.append(("by_rank", "as many numbers of each part"))
    if wrong:
        name, expected = wrong[0]
        shown = shortened(repr(record.get(name)), 40)
        raise ValueError(f"record {number}, whose {name!r} is {shown}, not {expected}")


def _is_number(value: object) -> bool:
    """Whether JSON has it, and pictures have a place for it."""
    return is_number(value) and abs(value) <= sys.float_info.max


def _are_times(by_rank: object) -> bool:
    """Whether it has for each part of a step as many seconds, of each rank."""
    parts = [by_rank.get(part) for part in PARTS] if isinstance(by_rank, dict) else []
    lengths = {len(part) if isinstance(part, list) and all(map(_is_number, part)) else None for part in parts}
    return len(lengths) == 1 and None not in lengths


def page(runs: Sequence[Run], figures: Mapping[str, bytes]) -> str:
    """The page about ``runs``; ``figures`` are PNG pictures by their headings, see `report_figures.draw_all`."""
    title = ", ".join(run.name for run in runs)
    parts = [f"<h1>{_text(title)}</h1>", "<h2>Results</h2>", _table(*_results(runs))]
    for heading, png in figures.items():
        data = base64.b64encode(png).decode("ascii")
        parts += [f"<h2>{_text(heading)}</h2>", f'<img alt="{_text(heading)}" src="data:image/png;base64,{data}">']
    parts += ["<h2>Settings</h2>", _table(*_settings(runs))]
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


Rows = Sequence[tuple[str, Sequence[str]]]


def _results(runs: Sequence[Run]) -> tuple[Sequence[str], Rows]:
    found = [_result(run) for run in runs]
    names = [name for name in _ROWS if any(name in each for each in found)]
    return [run.name for run in runs], [(name, [each.get(name, "") for each in found]) for name in names]


_ROWS = (
    "network", "ranks", "epochs", "steps", "test accuracy", "best test accuracy", "test loss", "training time",
    "samples/s", "communication exposed", "critical path", "slowest rank",
)  # fmt: skip


def _result(run: Run) -> dict[str, str]:
    """What the table says of one run; what it has not measured is missing."""
    steps, epochs = run.of_kind("step"), run.of_kind("epoch")
    found: dict[str, str] = {}
    if run.settings:
        found["network"] = f"{run.settings.get('model', '?')} on {run.settings.get('data', '?')}"
        found["ranks"] = str(run.settings.get("ranks", 1))
    if run.records:
        found["epochs"], found["steps"] = f"{run.records[-1]['epoch']:g}", str(run.records[-1]["step"])
    accuracies = [each["test_accuracy"] for each in epochs if each.get("test_accuracy") is not None]
    if accuracies:
        found["test accuracy"], found["best test accuracy"] = f"{accuracies[-1]:.4f}", f"{max(accuracies):.4f}"
    if epochs and epochs[-1].get("test_loss") is not None:
        found["test loss"] = loss_text(epochs[-1]["test_loss"])
    seconds = sum(each.get("seconds") or 0 for each in steps)
    if seconds:
        found["training time"] = f"{seconds:.1f} s"
        rates = [each["samples_per_s"] for each in steps if each.get("samples_per_s") is not None]
        if rates:
            found["samples/s"] = f"{statistics.median(rates):,.0f}, median"
        if run.has_several_ranks:
            exposed = sum(each.get("comm_exposed_s") or 0 for each in steps)
            found["communication exposed"] = f"{exposed:.2f} s, {exposed / seconds:.1%}"
    if epochs and epochs[-1].get("critical_path"):
        found["critical path"] = str(epochs[-1]["critical_path"])
    if slowest := slowest_rank(epochs):
        found["slowest rank"] = slowest
    return found


def _settings(runs: Sequence[Run]) -> tuple[Sequence[str], Rows]:
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = [(name, [str(run.settings.get(name, "")) for run in runs]) for name in names]
    return [run.name for run in runs], rows


def _table(columns: Sequence[str], rows: Rows) -> str:
    """A row for each name; one whose values differ between runs is marked."""
    lines = ["<tr><th></th>" + "".join(f"<th>{_text(each)}</th>" for each in columns) + "</tr>"]
    for name, values in rows:
        mark = ' class="differs"' if len(set(values)) > 1 else ""
        lines.append(
            f"<tr{mark}><th>{_text(name)}</th>" + "".join(f"<td>{_text(each)}</td>" for each in values) + "</tr>"
        )
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _text(value: object) -> str:
    return html.escape(str(value))
