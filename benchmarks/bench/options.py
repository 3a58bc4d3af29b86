"""The command line of `hpcdp bench`: what can be asked for, in OSU's and nccl-tests' flags, and what is valid."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ... import __version__
from ...errors import ConfigError, check_name
from ...launch.arguments import Parser

COLLECTIVES = ("allreduce", "iallreduce", "reduce_scatter", "allgather", "broadcast", "reduce")
PAIRS = ("latency", "bandwidth", "bibandwidth", "multi_pair")
BENCHMARKS = (*PAIRS, *COLLECTIVES)
REDUCING = ("allreduce", "iallreduce", "reduce_scatter", "reduce")
STYLES = ("osu", "nccl")

ROOTED = ("broadcast", "reduce")

OSU_DTYPES = {"mpi_char": "int8", "mpi_int": "int32", "mpi_float": "float32"}
_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_DTYPES = ("float32", "float64", "float16", "bfloat16", *_INTEGERS)
_EPILOG = """\
benchmarks:
  between two ranks       latency, bandwidth, bibandwidth
  pairs (i, i + n/2)      multi_pair
  collectives             allreduce, iallreduce, reduce_scatter, allgather,
                          broadcast, reduce

examples:
  hpcdp launch -n 2 -- hpcdp bench allreduce -m 4:64M
  mpirun -n 4 hpcdp bench allgather --style nccl --csv allgather.csv
  srun hpcdp bench bandwidth -m 1M -W 16 --plot bandwidth.png
"""


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Args:
        benchmark: one of `BENCHMARKS`.
        sizes: of messages in bytes, multiples of the dtype's.
        dtype: a name of NumPy's, or bfloat16.
        iterations: None for as many as suit the size.
        shows_validation: a column for it, as OSU's programs have where they validate.
        full: all of OSU's columns.
        root: the rank that sends, or gets the result.
        tests: calls of test() while iallreduce is under way.
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
        """All that will be written."""
        return [path for path in (self.csv, self.json, self.plot) if path]


def parser() -> Parser:
    """The options, for ``-h`` and for `parse`."""
    made = Parser(
        prog="hpcdp bench",
        usage="hpcdp bench BENCHMARK [-m MIN:MAX] [--style osu|nccl] [options]",
        description="Measure messages and collectives on the ranks that a launcher started.",
        epilog=_EPILOG,
    )
    add = made.add_argument
    add("benchmark", metavar="BENCHMARK", help="what to measure, one of those below")
    add("-v", "--version", action="version", version=f"hpcdp {__version__}", help="show the version and end")
    add(
        "-m", "--message-size", dest="sizes", default="", metavar="[MIN:]MAX", help="message sizes in bytes, e.g. 4:64M"
    )
    add("--factor", type=int, default=2, metavar="N", help="each size is N times the one before (2)")
    add("-M", "--mem-limit", dest="most", metavar="SIZE", help="leave out messages above SIZE bytes")
    add("-i", "--iterations", type=int, metavar="N", help="timed calls (default: by size)")
    add("-x", "--warmup", type=int, default=10, metavar="N", help="untimed calls before (10)")
    add("-f", "--full", action="store_true", help="all columns, e.g. least and greatest latency")
    add(
        "-c", "--validation", dest="validate", type=int, nargs="?", const=1, metavar="0|1",
        help="1: a column for the validation, which is done in any case; 0: do without",
    )  # fmt: skip
    add(
        "-T", "--type", dest="dtype", metavar="DTYPE",
        help="float32, bfloat16, int64 ...; or mpi_char, mpi_int, mpi_float",
    )  # fmt: skip
    add("-d", "--accelerator", dest="device", default="cpu", metavar="DEVICE", help="where the arrays are: cpu")
    add("-k", "--root-rank", dest="root", type=int, default=0, metavar="RANK", help="root of broadcast and reduce (0)")
    add("-l", "--in-place", action="store_true", help="collectives in place, as they are in any case")
    add("-W", "--window-size", dest="window", type=int, default=64, metavar="N", help="messages under way at once (64)")
    add(
        "-t", "--num-test-calls", dest="tests", type=int, default=0, metavar="N",
        help="calls of test() while iallreduce runs (0)",
    )  # fmt: skip
    add("--algorithm", default="auto", metavar="NAME", help="auto (default), native, ring ...")
    add("--op", default="sum", metavar="NAME", help="sum (default), mean, min, max, prod")
    add("--style", default="osu", metavar="NAME", help="columns of osu (default) or of nccl, for collectives")
    add("--predict", action="store_true", help="what the cost model expects, beside what was measured")
    add("--csv", metavar="FILE", help="a line for each size")
    add("--json", metavar="FILE", help="the figures, and the machine they were measured on")
    add("--plot", metavar="FILE", help="PNG: bandwidth over size, the MPI library's own, the machine's limit")
    return made


def parse(argv: Sequence[str]) -> Settings:
    """What ``argv`` asks for; names that need the ranks' world, such as algorithms, are checked later.

    Raises:
        ConfigError: it cannot be done.
    """
    given = parser().parse_args(argv)
    check_name("benchmark", given.benchmark, BENCHMARKS)
    check_name("style", given.style, STYLES)
    check_name("device", given.device, ("cpu",))
    reported = given.benchmark in COLLECTIVES and given.benchmark != "iallreduce"
    if given.style == "nccl" and not reported:
        valid = ", ".join(name for name in COLLECTIVES if name != "iallreduce")
        raise ConfigError("bench --style nccl", expected=valid, got=given.benchmark)
    if given.plot and not given.plot.endswith(".png"):
        raise ConfigError("bench --plot", expected="a file name ending in .png", got=repr(given.plot))
    files = [os.path.realpath(path) for path in (given.csv, given.json, given.plot) if path]
    files = [path for path in files if os.path.isfile(path) or not os.path.exists(path)]  # devices take several
    if len(set(files)) < len(files):
        raise ConfigError(
            "bench", expected="a file of its own for each of --csv, --json and --plot", got="the same one"
        )
    least = {"iterations": 1, "warmup": 0, "window": 1, "tests": 0, "factor": 2}
    for name, smallest in least.items():
        value = getattr(given, name)
        if value is not None and not smallest <= value <= 10**9:
            raise ConfigError(f"bench: {name}", expected=f"{smallest} or more, to 10^9", got=value)
    if given.validate not in (None, 0, 1):
        raise ConfigError("bench -c", expected="0 or 1", got=given.validate)
    for name, used_by, usual in (("algorithm", COLLECTIVES, "auto"), ("op", REDUCING, "sum"), ("root", ROOTED, 0)):
        value = getattr(given, name)
        if value != usual and given.benchmark not in used_by:
            flag = "root-rank" if name == "root" else name
            raise ConfigError(f"bench {given.benchmark} --{flag}", expected=f"one of {', '.join(used_by)}", got=value)
    dtype = given.dtype or ("float32" if given.benchmark in COLLECTIVES else "int8")
    dtype = OSU_DTYPES.get(dtype.lower(), dtype)
    check_name("dtype", dtype, _DTYPES)
    fields = {name: value for name, value in vars(given).items() if name in Settings.__dataclass_fields__}
    fields |= {"sizes": _sizes(given, dtype), "dtype": dtype}
    fields |= {"validate": given.validate != 0, "shows_validation": given.validate == 1}
    return Settings(**fields)


def _sizes(given: argparse.Namespace, dtype: str) -> tuple[int, ...]:
    """As OSU has them: MIN:MAX, MAX alone, or MIN: alone; rounded down to whole elements."""
    from ...arrays import dtype_of
    from ..harness.sizes import parse_size, size_range

    itemsize = dtype_of(dtype).itemsize
    low, high = given.sizes.split(":", 1) if ":" in given.sizes else ("", given.sizes)
    usual = (f"{itemsize}", "4M") if given.benchmark in PAIRS else (f"{max(4, itemsize)}", "64M")
    text = f"{low or usual[0]}:{high or usual[1]}"
    rounded = dict.fromkeys(size // itemsize * itemsize for size in size_range(text, given.factor))
    most = parse_size(given.most) if given.most else None
    found = tuple(size for size in rounded if size > 0 and (most is None or size <= most))
    if not found and most is not None:
        raise ConfigError("bench --mem-limit", expected=f"{min(rounded)} bytes or more", got=given.most)
    if not found:
        raise ConfigError("size range", expected=f"at least {itemsize} bytes, a {dtype}", got=repr(given.sizes))
    return found
