"""The two ways of printing: the tables of OSU's Micro-Benchmarks 7 and those of nccl-tests.

Scripts that read those programs' tables read these: comment lines begin with ``#``, then comes one line a size, in the
columns and widths of those programs. A prediction, where it is asked for, stands after them. Under OSU's title the next
line says that hpcdp has measured.
"""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from .options import OSU_DTYPES, ROOTED, Settings

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
