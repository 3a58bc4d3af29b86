"""One page of HTML about one run or several: what they reached, how fast, what waited for what, and their settings.

The page needs no other file and no network, so that it can be sent or opened from a file system: pictures are in it.
"""

from __future__ import annotations

import base64
import html
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import toml
from ..errors import ConfigError, DataError, is_number, shortened
from .metrics import Record, read_metrics
from .progress import loss_text, slowest_rank
from .report_figures import PARTS

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
        settings = toml.read(path) if os.path.isfile(path) else {}
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
