"""What the cost model expects of a benchmark, beside what is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ..collectives import cost, select, tuning
from ..comm import World
from ..comm.reductions import resolve
from .options import REDUCING, Settings

Row = dict[str, Any]


def predictor(settings: Settings, world: World) -> Callable[[Row], float]:
    """Microseconds of a row's benchmark, from its sizes; every rank must call, and must call what it returns.

    A message takes ``alpha + nbytes beta`` on the link between its ranks; collectives are those of `cost.predicted_s`.

    Raises:
        UnsupportedError: when it is called, for an algorithm that the model does not know; it lists those it does.
    """
    machine, topology = tuning.machine(world), tuning.topology(world)
    if settings.benchmark == "latency":
        nodes = world.comm.allgather_json(world.node)
        link = machine.inside if nodes[0] == nodes[world.size // 2] else machine.across
        return lambda row: 1e6 * (link.alpha_s + row["nbytes"] * link.beta_s_per_byte)
    collective, dtype = settings.benchmark.removeprefix("i"), np.dtype(settings.dtype)
    op = resolve(collective, settings.op, dtype) if settings.benchmark in REDUCING else None

    def predicted_us(row: Row) -> float:
        nbytes: int = row["total_nbytes"] if "total_nbytes" in row else row["nbytes"]
        algorithm = settings.algorithm
        if algorithm == "auto":
            algorithm = select.choose(collective, nbytes, dtype, op, world)
        return 1e6 * cost.predicted_s(collective, algorithm, nbytes, topology, machine)

    return predicted_us


def source(world: World) -> str:
    """Where the links' figures come from, for the comment lines; every rank must call."""
    if tuning.loaded(world) is None:
        return "Predicted for assumed links and cores: run hpcdp tune to measure them."
    return "Predicted for links and cores that hpcdp tune has measured."


def with_predictions(rows: Iterable[Row], predicted_us: Callable[[Row], float]) -> Iterator[Row]:
    """The rows, each with its ``predicted_us``."""
    for row in rows:
        yield {**row, "predicted_us": predicted_us(row)}
