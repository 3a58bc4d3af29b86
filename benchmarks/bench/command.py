"""`hpcdp bench`: one benchmark on the ranks that a launcher started, or on this process alone.

Prints a line for each size as it is measured, writes CSV, JSON and a plot where they are asked for, and is unsuccessful
when a result was wrong.
"""

from __future__ import annotations

import csv
import io
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, UnsupportedError, check_name, listed, to_stderr
from .options import COLLECTIVES, PAIRS, REDUCING, ROOTED, Settings, parse

if TYPE_CHECKING:
    from ...comm import World
    from .style import Row, Style

LIMIT_NBYTES = 64 << 20
"""What is copied to measure the machine's limit: more than its caches hold."""


def main(argv: Sequence[str]) -> int:
    """Measure what ``argv`` asks for and return the exit status: 1 when a result was wrong.

    Every rank of a job must call.

    Raises:
        ConfigError: on every rank, for what cannot be done.
    """
    settings = parse(argv)

    from ... import comm
    from ..harness.machine import pin_to_own_core

    world = comm.init()
    pin_to_own_core(world)
    return run(settings, world)


def run(settings: Settings, world: World) -> int:
    """`main` for ranks that know their world; rank 0 prints and writes."""
    from ... import __version__
    from ...comm.agreement import on_rank_0
    from ..harness.sizes import format_size
    from .style import NcclStyle, OsuStyle

    check(settings, world)
    facts = _facts(settings, world)
    measured = _rows(settings, world)
    if settings.predict:
        from . import prediction

        predicted, basis = prediction.predictor(settings, world)
        facts.append(basis)
        if predicted is None:
            settings = replace(settings, predict=False)
        else:
            measured = prediction.with_predictions(measured, predicted)
    style: Style = (OsuStyle if settings.style == "osu" else NcclStyle)(settings, __version__)
    rows: list[Row] = []
    try:
        for row in measured:
            if world.rank == 0:
                if not rows:
                    print(style.heading(facts))
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
    from ..harness.files import as_json, write
    from ..harness.machine import describe
    from .plot import draw

    def report() -> str:
        asked = {name: value for name, value in vars(settings).items() if name not in ("csv", "json", "plot")}
        about = {"library": world.library, "machine": describe(world), "limit": limit}
        return as_json({**asked, **about, "rows": rows})

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
    """What only the ranks' world can tell.

    Raises:
        ConfigError: on every rank: an algorithm, reduction, file or amount of memory that is not there.
    """
    from ...collectives import ALGORITHMS
    from ...comm.agreement import on_rank_0
    from ...comm.reductions import OPS
    from ..harness.files import check_writable
    from .plot import check_drawable

    if settings.benchmark in COLLECTIVES:
        collective = settings.benchmark.removeprefix("i")
        check_name(f"{collective} algorithm", settings.algorithm, ["auto", *ALGORITHMS[collective]])
    if settings.benchmark in REDUCING:
        check_name("op", settings.op, OPS)
    if settings.benchmark in ROOTED and not 0 <= settings.root < world.size:
        raise ConfigError("bench --root-rank", expected=f"a rank, 0 to {world.size - 1}", got=settings.root)
    if settings.plot and world.size < 2:
        raise ConfigError("bench --plot", expected="2 ranks or more, which exchange something", got="1")
    if settings.plot:
        on_rank_0(world.comm, check_drawable)
    check_writable("bench", settings.files, world)
    _check_memory(settings, world)


def _check_memory(settings: Settings, world: World) -> None:
    from ...launch.machine import memory_mib
    from ..harness.sizes import format_size

    arrays = 2 if settings.benchmark in PAIRS or settings.style == "nccl" else 1
    if settings.benchmark == "allgather":
        arrays += world.size - 1
    needed = arrays * settings.sizes[-1] * world.local_size >> 20
    available = min(world.comm.allgather_json(memory_mib()[1]))
    if needed > available:
        raise ConfigError(
            f"bench {settings.benchmark} -m",
            expected=f"messages that fit in the {available} MiB of memory that are free",
            got=f"{format_size(settings.sizes[-1])}, for which a node's ranks need {needed} MiB",
        )


def _rows(settings: Settings, world: World) -> Iterator[Row]:
    from ...arrays import dtype_of
    from .. import collective, point_to_point

    dtype, sizes = dtype_of(settings.dtype), list(settings.sizes)
    timings: dict[str, Any] = {
        "dtype": dtype,
        "iterations": settings.iterations,
        "warmup": settings.warmup,
        "validate": settings.validate,
    }
    beside = bool(settings.plot)
    if settings.benchmark in PAIRS:
        pairs = point_to_point.Sweep(settings.benchmark, window=settings.window, **timings)
        return point_to_point.sweep(pairs, sizes, world, beside_library=beside)
    library_lacks = settings.op == "mean" and dtype.kind in "iu"
    beside = beside and settings.algorithm != "native" and not library_lacks
    asked: dict[str, Any] = {"op": settings.op, "algorithm": settings.algorithm, **timings}
    how = collective.Sweep(settings.benchmark, out_of_place=settings.style == "nccl", root=settings.root, **asked)
    if settings.benchmark == "iallreduce":
        return collective.overlap_sweep(how, sizes, world, tests=settings.tests, beside_library=beside)
    return collective.sweep(how, sizes, world, beside_library=beside)


def _facts(settings: Settings, world: World) -> list[str]:
    """The comment lines above a table."""
    library = " ".join(world.library.split()) or "threads of one process"
    facts = [f"{_place(world)} ({socket.gethostname()}), {library}"]
    half = world.size // 2
    if settings.benchmark == "multi_pair":
        facts.append(f"[ pairs: {half} ] [ window size: {settings.window} ]")
    elif settings.benchmark in PAIRS:
        window = "" if settings.benchmark == "latency" else f", window size: {settings.window}"
        facts.append(f"Ranks 0 and {half}{window}.")
    else:
        op = f", op: {settings.op}" if settings.benchmark in REDUCING else ""
        op += f", root: {settings.root}" if settings.benchmark in ROOTED else ""
        where = "" if settings.style == "nccl" else ", in place"
        facts.append(f"Algorithm: {settings.algorithm}{op}{where}.")
    return facts


def _heading(settings: Settings) -> str:
    """The title of a plot."""
    name = settings.benchmark.replace("_", " ")
    op = f", {settings.op}" if settings.benchmark in REDUCING else ""
    return f"{name[0].upper()}{name[1:]}{op} of {settings.dtype}"


def _place(world: World) -> str:
    numbers = ((world.size, "rank"), (world.num_nodes, "node"))
    return " on ".join(f"{number} {what}{'s' if number > 1 else ''}" for number, what in numbers)


def _limit(settings: Settings, world: World) -> tuple[str, float]:
    """The machine's own limit and its GB/s: memory copies in a node, else messages between two nodes; all must call."""
    from ..fabric import link_rates
    from ..floor import Floor, copy_rates
    from ..harness.sizes import format_size

    if world.num_nodes > 1:
        return "point to point between nodes", link_rates(world, 16 << 20)["one_way"] / 1e3
    size = format_size(LIMIT_NBYTES)
    rates = copy_rates(Floor(world, 4), LIMIT_NBYTES)
    if settings.benchmark in ("latency", "bandwidth"):
        return f"memory copy of {size}, one core", rates["one_core_gb_s"]
    return f"memory copy of {size}, all cores", rates["all_cores_gb_s"]


def _faulty(row: Row) -> bool:
    return any(each["wrong"] for each in (row, row.get("out_of_place"), row.get("library")) if each)


def as_csv(rows: Sequence[Row]) -> str:
    """A line a size; the figures of a nested row are in columns ``out_of_place_avg`` and so on."""
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
