"""What the cost model expects of a benchmark, beside what is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ...collectives import cost, select, tuning
from ...collectives.links import Machine
from ...comm import World
from ...comm.reductions import resolve
from . import probe
from .options import PAIRS, REDUCING, Settings

Row = dict[str, Any]
Predictor = Callable[[Row], dict[str, float]]
"""What is predicted of a row's benchmark, from its sizes: ``predicted_us`` or ``predicted_mb_s``."""


def predictor(settings: Settings, world: World) -> tuple[Predictor | None, str]:
    """How to predict, and a line that says what from; every rank must call, and must call what it returns.

    Links and cores are those that `hpcdp tune` has measured, else they are measured now. None for a rank alone, and
    where ranks share cores: the model takes a core for each, and how they are scheduled decides then.

    Raises:
        UnsupportedError: when it is called, for an algorithm that the model does not know; it lists those it does.
    """
    if world.size == 1:
        return None, "No predictions: a rank alone exchanges nothing."
    if reason := tuning.crowded(world):
        return None, f"No predictions: {reason}, and the model takes a core for each."
    if tuning.loaded(world) is not None:
        machine, basis = tuning.machine(world), "that hpcdp tune has measured"
    else:
        machine, basis = probe.probe(world), "measured just now; hpcdp tune keeps them"
    made = _of_messages if settings.benchmark in PAIRS else _of_collective
    return made(settings, world, machine), f"Predicted for links and cores {basis}."


def _of_messages(settings: Settings, world: World, machine: Machine) -> Predictor:
    """Half a round trip takes ``alpha + nbytes beta``, and half of what a call does.

    In a window the links carry one message while cores do what the next one needs: in a node these are the same cores,
    and take alpha for it; across nodes the slower of both sets the time, and each direction has a link of its own.
    """
    half, name = world.size // 2, settings.benchmark
    nodes = world.comm.allgather_json(world.node)
    inside = nodes[0] == nodes[half]
    link = machine.inside if inside else machine.across
    pairs = half if name == "multi_pair" else 1
    ways = 2 if name == "bibandwidth" else 1

    def latency_us(row: Row) -> dict[str, float]:
        nbytes: int = row["nbytes"]
        seconds = link.alpha_s + nbytes * link.at(nbytes).beta_s_per_byte + machine.call_s / 2
        return {"predicted_us": 1e6 * seconds}

    def bandwidth_mb_s(row: Row) -> dict[str, float]:
        nbytes: int = row["nbytes"]
        core_s, carried_s = ways * machine.inside.alpha_s, nbytes * link.at(nbytes).shared_s_per_byte * pairs
        message_s = core_s + ways * carried_s if inside else max(core_s, carried_s)
        seconds = settings.window * message_s + 2 * link.alpha_s
        return {"predicted_mb_s": 1e-6 * settings.window * ways * pairs * nbytes / seconds}

    return latency_us if name == "latency" else bandwidth_mb_s


def _of_collective(settings: Settings, world: World, machine: Machine) -> Predictor:
    """See `cost.predicted_s`; of "auto", the algorithm that it chooses."""
    collective, dtype = settings.benchmark.removeprefix("i"), np.dtype(settings.dtype)
    op = resolve(collective, settings.op, dtype) if settings.benchmark in REDUCING else None
    topology = tuning.topology(world)

    def predicted_us(row: Row) -> dict[str, float]:
        nbytes: int = row["total_nbytes"] if "total_nbytes" in row else row["nbytes"]
        algorithm = settings.algorithm
        if algorithm == "auto":
            algorithm = select.choose(collective, nbytes, dtype, op, world)
        return {"predicted_us": 1e6 * cost.predicted_s(collective, algorithm, nbytes, topology, machine)}

    return predicted_us


def with_predictions(rows: Iterable[Row], predicted: Predictor) -> Iterator[Row]:
    """The rows, each with what is predicted of it."""
    for row in rows:
        yield row | predicted(row)
