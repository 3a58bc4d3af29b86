"""`hpcdp bench`: one benchmark on the ranks that a launcher started, or on this process alone.

Prints a line for each size as it is measured, writes CSV, JSON and a plot where they are asked for, and is unsuccessful
when a result was wrong.
"""

from __future__ import annotations

import csv
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, UnsupportedError
from .options import COLLECTIVES, PAIRS, REDUCING, Settings, check_writable, parse

if TYPE_CHECKING:
    from ..comm import World
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

    from .. import comm
    from .machine import pin_to_own_core

    world = comm.init()
    pin_to_own_core(world)
    return run(settings, world)


def run(settings: Settings, world: World) -> int:
    """`main` for ranks that know their world; rank 0 prints and writes."""
    from .. import __version__
    from .style import NcclStyle, OsuStyle

    check(settings, world)
    style: Style = (OsuStyle if settings.style == "osu" else NcclStyle)(settings, __version__)
    facts = _facts(settings, world)
    measured = _rows(settings, world)
    if settings.predict:
        from . import prediction

        facts.append(prediction.source(world))
        measured = prediction.with_predictions(measured, prediction.predictor(settings, world))
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
    if world.rank == 0:
        if closing := style.closing(rows):
            print(closing, flush=True)
        if settings.csv:
            write_csv(settings.csv, rows)
        if settings.plot:
            from .plot import draw

            draw(rows, settings, limit, _heading(settings), facts[0])
    if settings.json:
        from .machine import describe, write_json

        asked = {name: value for name, value in vars(settings).items() if name not in ("csv", "json", "plot")}
        about = {"library": world.library, "machine": describe(world), "limit": limit}
        write_json(settings.json, world, {**asked, **about, "rows": rows})
    return 1 if any(_faulty(row) for row in rows) else 0


def check(settings: Settings, world: World) -> None:
    """What only the ranks' world can tell.

    Raises:
        ConfigError: on every rank: an algorithm, reduction, file or amount of memory that is not there.
    """
    import numpy as np

    from ..collectives import ALGORITHMS
    from ..comm.reductions import OPS, resolve
    from ..train.config import check_name

    if settings.benchmark in COLLECTIVES:
        collective = settings.benchmark.removeprefix("i")
        check_name(f"{collective} algorithm", settings.algorithm, ["auto", *ALGORITHMS[collective]])
    if settings.benchmark in REDUCING:
        check_name("op", settings.op, OPS)
        try:
            resolve(settings.benchmark, settings.op, np.dtype(settings.dtype))
        except UnsupportedError as error:
            raise ConfigError(str(error)) from error
    if settings.plot and world.size < 2:
        raise ConfigError("bench --plot", expected="2 ranks or more, which exchange something", got="1")
    reasons = [check_writable(path) for path in settings.files] if world.rank == 0 else []
    for reason in world.comm.allgather_json(reasons)[0]:
        if reason:
            raise ConfigError(f"bench: {reason}")
    _check_memory(settings, world)


def _check_memory(settings: Settings, world: World) -> None:
    from ..launch.machine import memory_mib
    from .measure import format_size

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
    import numpy as np

    from . import collective, point_to_point

    dtype, sizes = np.dtype(settings.dtype), list(settings.sizes)
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
    asked: dict[str, Any] = {"op": settings.op, "algorithm": settings.algorithm, **timings}
    how = collective.Sweep(settings.benchmark, out_of_place=settings.style == "nccl", **asked)
    if settings.benchmark == "iallreduce":
        return collective.overlap_sweep(how, sizes, world, tests=settings.tests)
    return collective.sweep(how, sizes, world, beside_library=beside and settings.algorithm != "native")


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
    import numpy as np

    from . import point_to_point
    from .floor import Floor, copy_rates
    from .measure import format_size

    if world.num_nodes > 1:
        how = point_to_point.Sweep("bandwidth", np.dtype(np.int8), warmup=1, validate=False, window=4)
        (row,) = point_to_point.sweep(how, [16 << 20], world)
        return "point to point between nodes", row["mb_s"] / 1e3
    size = format_size(LIMIT_NBYTES)
    rates = copy_rates(Floor(world, 4), LIMIT_NBYTES)
    if settings.benchmark in ("latency", "bandwidth"):
        return f"memory copy of {size}, one core", rates["one_core_gb_s"]
    return f"memory copy of {size}, all cores", rates["all_cores_gb_s"]


def _faulty(row: Row) -> bool:
    return any(each["wrong"] for each in (row, row.get("out_of_place"), row.get("library")) if each)


def write_csv(path: str, rows: Sequence[Row]) -> None:
    """A line a size; the figures of a nested row are in columns ``out_of_place_avg`` and so on."""
    flat = []
    for row in rows:
        nested = {key: value for key, value in row.items() if isinstance(value, dict)}
        line = {key: value for key, value in row.items() if key not in nested}
        for prefix, values in nested.items():
            line |= {f"{prefix}_{key}": value for key, value in values.items()}
        flat.append(line)
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
