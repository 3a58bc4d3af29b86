"""`hpcdp bench`: its options, one benchmark over the ranks of a launcher, its tables, files and plot.

Options are those of OSU and nccl-tests. Tables have the columns of OSU Micro-Benchmarks 7 or of nccl-tests, so that
scripts for those programs can read them: comment lines begin with ``#``, and each size is one line. The line after
OSU's title names hpcdp. Predictions, if requested, are in a last column. The exit status is 1 if a result was wrong.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import os
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..core.checks import check_name, whole_number
from ..core.environment import explained, speaks, terminal_columns
from ..errors import ConfigError, UnsupportedError, listed, to_stderr
from ..launch.parser import Parser

if TYPE_CHECKING:
    from ..comm import World

Row = dict[str, Any]
COLUMNS = 80
"""The width of comment lines; OSU's tables may be wider."""
OSU_VERSION = "7.4"
"""The version of OSU Micro-Benchmarks whose tables these are."""
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
    "allgatherv": "Allgatherv Latency",
    "alltoall": "All-to-All Personalized Exchange Latency",
    "gather": "Gather Latency",
    "scatter": "Scatter Latency",
    "pt2pt": "Latency",
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
_WIDTH, _SIZE_WIDTH, _ITERATIONS_WIDTH = 18, 10, 12
_MAIN_OVERLAP = ("overall", "compute", "pure", "overlap")
OSU_DTYPES = {"mpi_char": "int8", "mpi_int": "int32", "mpi_float": "float32"}
_OSU_NAMES = {dtype: name.upper() for name, dtype in OSU_DTYPES.items()}
_NCCL_WIDTH, _NCCL_PREDICTED_WIDTH = 116, 11
_GB_S = ("(GB/s)", "(GB/s)")
_NCCL_TYPES = {"float32": "float", "float64": "double", "float16": "half"}


class OsuStyle:
    """The tables of osu_latency, osu_bw, osu_allreduce, osu_iallreduce and so on; ``-f`` shows all columns.

    Args:
        settings: the settings of the benchmark.
        terminal: the width of the terminal, to which rows are folded; 0 for files and scripts, without folding.
    """

    def __init__(self, settings: Settings, terminal: int) -> None:
        self._settings = settings
        self._terminal = terminal
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
        """Return the lines above the table; ``facts`` describe the ranks and the benchmark."""
        settings = self._settings
        name = _OSU_NAMES.get(settings.dtype, settings.dtype)
        by = f"# Measured by hpcdp {__version__}, printed in the format of OSU Micro-Benchmarks."
        title = f"# OSU MPI {TITLES[settings.benchmark]} Test v{OSU_VERSION}"
        lines = ["", title, by, *_comments(facts), f"# Datatype: {name}."]
        if settings.benchmark == "iallreduce":
            lines += ["# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait", ""]
        cells = [f"{title:>{_WIDTH}}" for title, _ in self._columns]
        cells += [f"{'Iterations':>{_ITERATIONS_WIDTH}}"] if self._shows_iterations else []
        cells += [f"{'Validation':>{_WIDTH}}"] if settings.shows_validation else []
        cells += [f"{self._predicted[0]:>{_WIDTH}}"] if settings.predict else []
        return "\n".join([*lines, *self._folded("# Size", "#", cells)])

    def line(self, row: Row) -> str:
        """Return the line of one size."""
        settings = self._settings
        cells = [f"{row[key]:>{_WIDTH}.2f}" for _, key in self._columns]
        cells += [f"{row['iterations']:>{_ITERATIONS_WIDTH}}"] if self._shows_iterations else []
        cells += [f"{'Fail' if row['wrong'] else 'Pass':>{_WIDTH}}"] if settings.shows_validation else []
        cells += [f"{row[self._predicted[1]]:>{_WIDTH}.2f}"] if settings.predict else []
        return "\n".join(self._folded(str(row["nbytes"]), "", cells))

    def _folded(self, first: str, later: str, cells: Sequence[str]) -> list[str]:
        """Return the lines of a row that begin with ``first`` and ``later``, as many as the terminal requires."""
        lines = [f"{first:<{_SIZE_WIDTH}}"]
        for cell in cells:
            if 0 < self._terminal < len(lines[-1]) + len(cell):
                lines.append(f"{later:<{_SIZE_WIDTH}}")
            lines[-1] += cell
        return lines

    def closing(self, rows: Sequence[Row]) -> str:
        """Return the lines below the table: none."""
        return ""


def _comments(facts: Sequence[str]) -> list[str]:
    return [
        line for fact in facts for line in textwrap.wrap(fact, COLUMNS, initial_indent="# ", subsequent_indent="# ")
    ]


class NcclStyle:
    """The tables of all_reduce_perf and so on: out of place, then in place; ``#wrong`` counts elements of all ranks."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def heading(self, facts: Sequence[str]) -> str:
        """See `OsuStyle.heading`."""
        settings = self._settings
        title = f"# hpcdp {TITLES[settings.benchmark].removesuffix(' Latency')} Test v{__version__}"
        counts = (
            f"minBytes {settings.sizes[0]} maxBytes {settings.sizes[-1]} step: {settings.factor}(factor) "
            f"warmup iters: {settings.warmup} iters: {settings.iterations or 'by size'} "
            f"validation: {int(settings.validate)}"
        )
        lines = [title, *_comments(facts), *self._settings_lines(counts), "#", *self._column_titles()]
        return "\n".join(line.rstrip() for line in lines)

    def line(self, row: Row) -> str:
        """Return the line of one size."""
        kind, op, root = self._constants()
        names = f"{row['total_nbytes']:>12}  {row['count']:>12}  {kind:>8}  {op:>6}  {root:>6}"
        return names + self._both(row)

    def closing(self, rows: Sequence[Row]) -> str:
        """Return the verdict and the average below the table."""
        measured = [figures for row in rows for figures in (row.get("out_of_place"), row) if figures]
        faulty = sum(figures["wrong"] for figures in measured)
        verdict = "not checked" if not self._settings.validate else f"{faulty} {'FAILED' if faulty else 'OK'}"
        average = sum(figures["busbw_gb_s"] for figures in measured) / len(measured)
        return f"# Out of bounds values : {verdict}\n# Avg bus bandwidth    : {average:.6g}\n#"

    def _settings_lines(self, counts: str) -> list[str]:
        return [f"# {counts}"]

    def _column_titles(self) -> list[str]:
        names = f"{'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
        units = f"{'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}"
        figures, figure_units = self._spaced("time", "algbw", "busbw", "#wrong"), self._spaced("(us)", *_GB_S, "")
        return [
            f"# {'':>{len(names)}}  {'out-of-place':^30}  {'in-place':^30}",
            f"# {names}{figures}{figures}{self._predicted('predicted')}",
            f"# {units}{figure_units}{figure_units}{self._predicted('(us)')}",
        ]

    def _constants(self) -> tuple[str, str, int]:
        """Return the type, the reduction and the root, which are equal in all lines."""
        settings = self._settings
        op = settings.op if "reduce" in settings.benchmark else "none"
        root = settings.root if settings.benchmark in ROOTED else -1
        return _NCCL_TYPES.get(settings.dtype, settings.dtype), op, root

    def _both(self, row: Row) -> str:
        """Return the figures out of place and in place, and the predicted time if requested."""
        predicted = self._predicted(f"{row['predicted_us']:.2f}") if self._settings.predict else ""
        return self._figures(row.get("out_of_place")) + self._figures(row) + predicted

    def _figures(self, figures: Row | None) -> str:
        if figures is None:
            return self._spaced("N/A", "N/A", "N/A", "N/A")
        us = figures["avg"]
        time_us = f"{us:.0f}" if us >= 10000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"
        faulty = figures["wrong"] if self._settings.validate else "N/A"
        return self._spaced(time_us, f"{figures['algbw_gb_s']:.2f}", f"{figures['busbw_gb_s']:.2f}", str(faulty))

    def _spaced(self, time_us: str, algbw: str, busbw: str, faulty: str) -> str:
        return f"{time_us:>9}  {algbw:>6}  {busbw:>6} {faulty:>6}"

    def _predicted(self, text: str) -> str:
        return f"{text:>{_NCCL_PREDICTED_WIDTH}}" if self._settings.predict else ""


class NarrowNcclStyle(NcclStyle):
    """The tables of `NcclStyle` in 80 columns: a comment line has what is equal in all lines."""

    def line(self, row: Row) -> str:
        """See `NcclStyle.line`."""
        return f"{row['total_nbytes']:>10}{self._both(row)}"

    def _settings_lines(self, counts: str) -> list[str]:
        kind, op, root = self._constants()
        return _comments([f"type {kind}, redop {op}, root {root}", counts])

    def _column_titles(self) -> list[str]:
        figures, units = self._spaced("time", "algbw", "busbw", "#wrong"), self._spaced("(us)", *_GB_S, "")
        return [
            f"# {'':>8}{'out-of-place':^30}{'in-place':^30}",
            f"# {'size':>8}{figures}{figures}{self._predicted('predicted')}",
            f"# {'(B)':>8}{units}{units}{self._predicted('(us)')}",
        ]

    def _spaced(self, time_us: str, algbw: str, busbw: str, faulty: str) -> str:
        return f"{time_us:>9}{algbw:>7}{busbw:>7}{faulty:>7}"

    def _predicted(self, text: str) -> str:
        return f"{text:>10}" if self._settings.predict else ""


def style_for(settings: Settings, terminal: int) -> OsuStyle | NcclStyle:
    """Return the format of a table on a terminal of this width, 0 for files and scripts."""
    if settings.style == "osu":
        return OsuStyle(settings, terminal)
    width = _NCCL_WIDTH + (_NCCL_PREDICTED_WIDTH if settings.predict else 0)
    return (NarrowNcclStyle if 0 < terminal < width else NcclStyle)(settings)


_OURS, _PEER, _LIMIT = "#3566a8", "#c8552b", "#6b6b6b"


def draw(
    rows: Sequence[dict[str, Any]], settings: Settings, limit: tuple[str, float] | None, title: str, where: str
) -> bytes:
    """Return a PNG plot of bandwidth over message size, with the MPI library's own curve if it was measured.

    Args:
        rows: the rows of a sweep in `communication`.
        settings: the settings of the benchmark.
        limit: the name and the GB/s of the machine's limit, a dashed line.
        title: one line above the plot.
        where: a smaller line below the title.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    from ..train.report import png, styled
    from .measure import format_size

    figure, (axes,) = styled(1, (9.0, 5.2))
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
    axes.legend(frameon=False, loc="best")
    axes.set_title(title, fontsize=11, loc="left", pad=21)
    axes.text(0, 1.025, where, transform=axes.transAxes, fontsize=8, color=_LIMIT)
    return png(figure)


def _curves(rows: Sequence[dict[str, Any]], settings: Settings) -> list[tuple[str, list[int], list[float]]]:
    """Return labels, sizes and GB/s of hpcdp, and of the MPI library if it was measured."""
    label = f"hpcdp, {settings.algorithm}" if settings.benchmark in COLLECTIVES else "hpcdp"
    sizes = [row.get("total_nbytes", row["nbytes"]) for row in rows]
    curves = [(label, sizes, [_rate(row, row["nbytes"]) for row in rows])]
    if "library" in rows[0]:
        curves.append(("the MPI library's own", sizes, [_rate(row["library"], row["nbytes"]) for row in rows]))
    return curves


def _predicted_rate(row: dict[str, Any]) -> float:
    """Return the predicted GB/s, computed like the measured ones."""
    if "predicted_mb_s" in row:
        return float(row["predicted_mb_s"] / 1e3)
    us = row[_mean(row)]
    return float(row.get("busbw_gb_s", row["nbytes"] / us / 1e3) * us / row["predicted_us"])


def _mean(figures: dict[str, Any]) -> str:
    """Return the name of the mean time of ``busbw``: for a nonblocking collective, the time without computation."""
    return "pure" if "pure" in figures else "avg"


def _rate(figures: dict[str, Any], nbytes: int) -> float:
    """Return GB/s by the median of the timings, which is robust against other load."""
    if "median_mb_s" in figures:
        return float(figures["median_mb_s"] / 1e3)
    if "busbw_gb_s" in figures:
        return float(figures["busbw_gb_s"] * figures[_mean(figures)] / figures["median"])
    return float(nbytes / figures["median"] / 1e3)


BLOCKS = ("allgatherv", "alltoall", "gather", "scatter")
"""Collectives of blocks, whose input and result are apart."""
COLLECTIVES = ("allreduce", "iallreduce", "reduce_scatter", "allgather", "broadcast", "reduce", *BLOCKS)
PAIRS = ("latency", "pt2pt", "bandwidth", "bibandwidth", "multi_pair")
BENCHMARKS = (*PAIRS, *COLLECTIVES)
OSU_NAMES = {"bw": "bandwidth", "bibw": "bibandwidth", "mbw_mr": "multi_pair", "bcast": "broadcast"}
"""OSU's names of benchmarks, where they differ; they are taken too."""
REDUCING = ("allreduce", "iallreduce", "reduce_scatter", "reduce")
STYLES = ("osu", "nccl")

ROOTED = ("broadcast", "reduce", "gather", "scatter")

_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_DTYPES = ("float32", "float64", "float16", "bfloat16", *_INTEGERS)
_EPILOG = """\
benchmarks:
  between two ranks       latency, bandwidth, bibandwidth; pt2pt: send, recv
  pairs (i, i + n/2)      multi_pair, OSU's mbw_mr
  collectives             allreduce, iallreduce, reduce_scatter, allgather,
                          broadcast, reduce, allgatherv, alltoall, gather,
                          scatter

examples:
  hpcdp launch -n 2 -- hpcdp bench allreduce -m 4:64M
  mpirun -n 4 hpcdp bench allgather --style nccl --csv allgather.csv
  srun --mpi=pmix hpcdp bench bandwidth -m 1M -W 16 --plot bandwidth.png
"""


@dataclass(frozen=True)
class Settings:
    """The settings of a benchmark.

    Args:
        benchmark: one of `BENCHMARKS`.
        sizes: message sizes in bytes, multiples of the dtype's size.
        dtype: a NumPy dtype name, or bfloat16.
        iterations: the number of timed calls; None: by size.
        shows_validation: print a column for the validation, as OSU's programs do with ``-c``.
        full: print all of OSU's columns.
        root: the rank that sends, or gets the result.
        tests: calls of test() during an iallreduce.
        csv, json, plot: files to write.
    """

    benchmark: str
    style: str
    sizes: tuple[int, ...]
    factor: int
    dtype: str
    iterations: int | None
    warmup: int
    validate: bool
    shows_validation: bool
    full: bool
    root: int
    window: int
    tests: int
    algorithm: str
    op: str
    predict: bool
    csv: str | None
    json: str | None
    plot: str | None

    @property
    def files(self) -> list[str]:
        """The files to write."""
        return [path for path in (self.csv, self.json, self.plot) if path]


def parser() -> Parser:
    """Return the parser of the options."""
    made = Parser(
        prog="hpcdp bench",
        usage="hpcdp bench BENCHMARK [-m MIN:MAX] [--style osu|nccl] [options]",
        description="Measure messages and collectives on the ranks that a launcher started.",
        epilog=_EPILOG,
    )
    add = made.add_argument
    add("benchmark", metavar="BENCHMARK", help="what to measure, one of those below")
    add("-v", "--version", action="version", version=f"hpcdp {__version__}", help="show the version and exit")
    add(
        "-m", "--message-size", dest="sizes", default="", metavar="[MIN:]MAX", help="message sizes in bytes, e.g. 4:64M"
    )
    add("--factor", type=int, default=2, metavar="N", help="ratio of a size to the one before (default: 2)")
    add("-M", "--mem-limit", dest="most", metavar="SIZE", help="leave out messages above SIZE bytes")
    add("-i", "--iterations", type=int, metavar="N", help="timed calls (default: by size)")
    add("-x", "--warmup", type=int, default=10, metavar="N", help="untimed calls before (default: 10)")
    add("-f", "--full", action="store_true", help="all columns, e.g. minimum and maximum")
    add(
        "-c", "--validation", dest="validate", type=int, nargs="?", const=1, metavar="0|1",
        help="1: print a column for the validation; 0: do not validate (default: validate without a column)",
    )  # fmt: skip
    add(
        "-T", "--type", dest="dtype", metavar="DTYPE",
        help="float32, bfloat16, int64 ...; or mpi_char, mpi_int, mpi_float",
    )  # fmt: skip
    add("-d", "--accelerator", dest="device", default="cpu", metavar="DEVICE", help="memory of the arrays: cpu")
    add(
        "-k",
        "--root-rank",
        dest="root",
        type=int,
        default=0,
        metavar="RANK",
        help="root of broadcast and reduce (default: 0)",
    )
    add("-l", "--in-place", action="store_true", help="no effect: OSU's columns are in place, NCCL's have both")
    add(
        "-W", "--window-size", dest="window", type=int, default=64, metavar="N", help="messages in flight (default: 64)"
    )
    add(
        "-t", "--num-test-calls", dest="tests", type=int, default=0, metavar="N",
        help="calls of test() while iallreduce runs (default: 0)",
    )  # fmt: skip
    add("--algorithm", default="auto", metavar="NAME", help="auto, native, ring ... (default: auto)")
    add("--op", default="sum", metavar="NAME", help="sum, mean, min, max, prod (default: sum)")
    add("--style", default="osu", metavar="NAME", help="table of osu (default) or nccl; nccl for collectives only")
    add("--predict", action="store_true", help="also print the time that the cost model predicts")
    add("--csv", metavar="FILE", help="write the figures as CSV, one line per size")
    add("--json", metavar="FILE", help="write the figures and facts of the machine as JSON")
    add("--plot", metavar="FILE", help="plot bandwidth over size as PNG, with that of the MPI library")
    return made


def parse(argv: Sequence[str]) -> Settings:
    """Return the settings of a command line; `check` checks those that depend on the world, such as algorithms.

    Raises:
        ConfigError: an option is invalid.
    """
    arguments = parser().parse_args(argv)
    arguments.benchmark = OSU_NAMES.get(
        arguments.benchmark.removeprefix("osu_"), arguments.benchmark.removeprefix("osu_")
    )
    check_name("benchmark", arguments.benchmark, BENCHMARKS)
    check_name("style", arguments.style, STYLES)
    check_name("device", arguments.device, ("cpu",))
    reported = arguments.benchmark in COLLECTIVES and arguments.benchmark != "iallreduce"
    if arguments.style == "nccl" and not reported:
        valid = ", ".join(name for name in COLLECTIVES if name != "iallreduce")
        raise ConfigError("bench --style nccl", expected=valid, got=arguments.benchmark)
    if arguments.plot and not arguments.plot.endswith(".png"):
        raise ConfigError("bench --plot", expected="a file name ending in .png", got=repr(arguments.plot))
    files = [os.path.realpath(path) for path in (arguments.csv, arguments.json, arguments.plot) if path]
    files = [path for path in files if os.path.isfile(path) or not os.path.exists(path)]  # devices take several
    if len(set(files)) < len(files):
        raise ConfigError("bench", expected="different files for --csv, --json and --plot", got="the same file twice")
    least = {"iterations": 1, "warmup": 0, "window": 1, "tests": 0, "factor": 2}
    for name, smallest in least.items():
        if getattr(arguments, name) is not None:
            whole_number(f"bench: {name}", None, getattr(arguments, name), smallest, 10**9)
    if arguments.validate is not None:
        whole_number("bench -c", None, arguments.validate, 0, 1, expected="0 or 1")
    for name, used_by, usual in (("algorithm", COLLECTIVES, "auto"), ("op", REDUCING, "sum"), ("root", ROOTED, 0)):
        value = getattr(arguments, name)
        if value != usual and arguments.benchmark not in used_by:
            flag = "root-rank" if name == "root" else name
            raise ConfigError(
                f"bench {arguments.benchmark} --{flag}", expected=f"one of {', '.join(used_by)}", got=value
            )
    dtype = arguments.dtype or ("float32" if arguments.benchmark in COLLECTIVES else "int8")
    dtype = OSU_DTYPES.get(dtype.lower(), dtype)
    check_name("dtype", dtype, _DTYPES)
    fields = {name: value for name, value in vars(arguments).items() if name in Settings.__dataclass_fields__}
    fields |= {"sizes": _sizes(arguments, dtype), "dtype": dtype}
    fields |= {"validate": arguments.validate != 0, "shows_validation": arguments.validate == 1}
    return Settings(**fields)


def _sizes(arguments: argparse.Namespace, dtype: str) -> tuple[int, ...]:
    """Return the sizes of OSU's forms MIN:MAX, MAX and MIN:, rounded down to whole elements."""
    from ..core.arrays import dtype_of
    from .measure import parse_size, size_range

    itemsize = dtype_of(dtype).itemsize
    low, high = arguments.sizes.split(":", 1) if ":" in arguments.sizes else ("", arguments.sizes)
    usual = (f"{itemsize}", "4M") if arguments.benchmark in PAIRS else (f"{max(4, itemsize)}", "64M")
    text = f"{low or usual[0]}:{high or usual[1]}"
    rounded = dict.fromkeys(size // itemsize * itemsize for size in size_range(text, arguments.factor))
    most = parse_size(arguments.most) if arguments.most else None
    sizes = tuple(size for size in rounded if size > 0 and (most is None or size <= most))
    if not sizes and most is not None:
        raise ConfigError("bench --mem-limit", expected=f"{min(rounded)} bytes or more", got=arguments.most)
    if not sizes:
        raise ConfigError("size range", expected=f"at least {itemsize} bytes, a {dtype}", got=repr(arguments.sizes))
    return sizes


LIMIT_NBYTES = 64 << 20
"""The bytes copied to measure the machine's limit, more than its caches hold."""


def main(argv: Sequence[str]) -> int:
    """Run ``hpcdp bench`` and return the exit status, 1 if a result was wrong; every rank of a job must call.

    Raises:
        ConfigError: an option is invalid; on every rank.
    """
    settings = parse(argv)

    with explained("starting MPI", speaks(), sys.stderr):
        from .. import comm
        from .measure import pin_to_own_core

        world = comm.init()
    pin_to_own_core(world)
    return run(settings, world)


def run(settings: Settings, world: World) -> int:
    """Run a benchmark in ``world`` and return the exit status; every rank must call. Rank 0 prints and writes."""
    from ..comm.consistency import on_rank_0
    from .measure import format_size

    check(settings, world)
    facts = _facts(settings, world)
    measured = _rows(settings, world)
    if settings.predict:
        from . import tune

        with explained("measuring links and cores", world.rank == 0, sys.stderr):
            predicted, basis = tune.predictor(settings, world)
        facts.append(basis)
        if predicted is None:
            settings = replace(settings, predict=False)
        else:
            measured = tune.with_predictions(measured, predicted)
    style = style_for(settings, terminal_columns(sys.stdout))
    rows: list[Row] = []
    try:
        with explained("loading kernels and measuring the first size", world.rank == 0, sys.stderr):
            first = [next(measured)]
        if world.rank == 0:
            print(style.heading(facts))
        for row in itertools.chain(first, measured):
            if world.rank == 0:
                print(style.line(row), flush=True)
            rows.append(row)
    except UnsupportedError as error:
        raise ConfigError(str(error)) from error
    limit = _limit(settings, world) if settings.plot else None
    if world.rank == 0 and (closing := style.closing(rows)):
        print(closing, flush=True)
    on_rank_0(world.comm, lambda: _write_files(settings, world, rows, limit, facts[0]))
    faulty = [format_size(row["nbytes"]) for row in rows if _faulty(row)]
    if faulty and world.rank == 0:
        to_stderr(f"hpcdp bench: {settings.benchmark}: wrong results at {listed(faulty, 8)}")
    return 1 if faulty else 0


def _write_files(
    settings: Settings, world: World, rows: Sequence[Row], limit: tuple[str, float] | None, where: str
) -> None:
    from .measure import as_json, describe, write

    def report() -> str:
        options = {name: value for name, value in vars(settings).items() if name not in ("csv", "json", "plot")}
        about = {"library": world.library, "machine": describe(world), "limit": limit}
        return as_json({**options, **about, "rows": rows})

    contents: list[tuple[str | None, Callable[[], bytes | str]]] = [
        (settings.csv, lambda: as_csv(rows)),
        (settings.plot, lambda: draw(rows, settings, limit, _heading(settings), where)),
        (settings.json, report),
    ]
    reasons = []
    for path, content in contents:
        try:
            if path:
                write(path, content())
        except ConfigError as error:
            reasons.append(str(error))
    if reasons:
        raise ConfigError(f"bench: {'; '.join(reasons)}")


def check(settings: Settings, world: World) -> None:
    """Check the settings that depend on the world; every rank must call.

    Raises:
        ConfigError: an unknown algorithm or reduction, a file that cannot be written, or too little memory; on every
            rank.
    """
    from ..collectives import ALGORITHMS
    from ..comm.communicator import OPS
    from .measure import check_memory, check_writable

    if settings.benchmark in COLLECTIVES:
        collective = settings.benchmark.removeprefix("i")
        check_name(f"{collective} algorithm", settings.algorithm, ["auto", *ALGORITHMS.get(collective, ())])
    if settings.benchmark in REDUCING:
        check_name("op", settings.op, OPS)
    if settings.benchmark in ROOTED:
        expected = f"a rank from 0 to {world.size - 1}"
        whole_number("bench --root-rank", None, settings.root, 0, world.size - 1, expected=expected)
    if settings.plot and world.size < 2:
        raise ConfigError("bench --plot", expected="2 ranks or more", got="1")
    check_writable("bench", settings.files, world)
    arrays = 2 if settings.benchmark in PAIRS or settings.style == "nccl" else 1
    if settings.benchmark in ("allgather", *BLOCKS):
        arrays += 2 * world.size - 1
    check_memory(f"bench {settings.benchmark} -m", world, settings.sizes[-1], arrays)


def _rows(settings: Settings, world: World) -> Iterator[Row]:
    from ..core.arrays import dtype_of
    from . import communication

    dtype, sizes = dtype_of(settings.dtype), list(settings.sizes)
    timings: dict[str, Any] = {
        "dtype": dtype, "iterations": settings.iterations, "warmup": settings.warmup, "validate": settings.validate,
    }  # fmt: skip
    beside = bool(settings.plot)
    if settings.benchmark in PAIRS:
        pairs = communication.PairSweep(settings.benchmark, window=settings.window, **timings)
        return communication.sweep_pairs(pairs, sizes, world, beside_library=beside)
    library_lacks = settings.op == "mean" and dtype.kind in "iu"
    beside = beside and settings.algorithm != "native" and not library_lacks
    options: dict[str, Any] = {"op": settings.op, "algorithm": settings.algorithm, **timings}
    how = communication.CollectiveSweep(
        settings.benchmark, out_of_place=settings.style == "nccl", root=settings.root, **options
    )
    if settings.benchmark == "iallreduce":
        return communication.overlap_sweep(how, sizes, world, tests=settings.tests, beside_library=beside)
    return communication.sweep_collective(how, sizes, world, beside_library=beside)


def _facts(settings: Settings, world: World) -> list[str]:
    """Return the comment lines above a table."""
    library = " ".join(world.library.split()) or "threads of one process"
    facts = [f"{_place(world)} ({socket.gethostname()}), {library}"]
    half = world.size // 2
    if settings.benchmark == "multi_pair":
        facts.append(f"[ pairs: {half} ] [ window size: {settings.window} ]")
    elif settings.benchmark in PAIRS:
        window = "" if settings.benchmark in ("latency", "pt2pt") else f", window size: {settings.window}"
        facts.append(f"Ranks 0 and {half}{window}.")
    else:
        op = f", op: {settings.op}" if settings.benchmark in REDUCING else ""
        op += f", root: {settings.root}" if settings.benchmark in ROOTED else ""
        where = "" if settings.style == "nccl" or settings.benchmark in BLOCKS else ", in place"
        facts.append(f"Algorithm: {settings.algorithm}{op}{where}.")
    return facts


def _heading(settings: Settings) -> str:
    """Return the title of a plot."""
    name = settings.benchmark.replace("_", " ")
    op = f", {settings.op}" if settings.benchmark in REDUCING else ""
    return f"{name[0].upper()}{name[1:]}{op} of {settings.dtype}"


def _place(world: World) -> str:
    numbers = ((world.size, "rank"), (world.num_nodes, "node"))
    return " on ".join(f"{number} {noun}{'s' if number > 1 else ''}" for number, noun in numbers)


def _limit(settings: Settings, world: World) -> tuple[str, float]:
    """Return the name and the GB/s of the machine's limit; every rank must call.

    It is the rate of memory copies on one node, and of messages between two nodes otherwise.
    """
    from .measure import format_size
    from .tune import copy_rates, link_rates

    if world.num_nodes > 1:
        return "point to point between nodes", link_rates(world, 16 << 20)["one_way"] / 1e3
    size = format_size(LIMIT_NBYTES)
    rates = copy_rates(world, LIMIT_NBYTES)
    if settings.benchmark in ("latency", "pt2pt", "bandwidth"):
        return f"memory copy of {size}, one core", rates["one_core_gb_s"]
    return f"memory copy of {size}, all cores", rates["all_cores_gb_s"]


def _faulty(row: Row) -> bool:
    return any(figures["wrong"] for figures in (row, row.get("out_of_place"), row.get("library")) if figures)


def as_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, with nested figures in columns ``out_of_place_avg`` and so on."""
    flat = []
    for row in rows:
        nested = {key: value for key, value in row.items() if isinstance(value, dict)}
        line = {key: value for key, value in row.items() if key not in nested}
        for prefix, values in nested.items():
            line |= {f"{prefix}_{key}": value for key, value in values.items()}
        flat.append(line)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(flat[0]))
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
