"""Training steps over slow links with every codec, against none, turn by turn.

``python benchmarks/bench_compression.py --hosts 2,4 --rate 1gbit,100mbit`` makes the hosts on this machine
(`bench_harness.cluster`; needs root) and runs jobs of its own on them; under a launcher the ranks that it started are
measured, as nodes of one rank each where they share one (``HPCDP_RANKS_PER_NODE=1``).

A model is trained with overlap by each candidate in turn. Beside the steps per second stand what a host sends in a
step, how long the link needs for that at least, and how much faster the step is than without compression. A last column
says below which rate of links the codec should pay by what coding takes here (`hpcdp.compression.pays_below`).
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench_harness import programs
from bench_harness.cluster import add_options, measure_models, measure_places, where
from bench_overlap import MODELS, Found, Model, Training
from hpcdp import comm
from hpcdp.bench.measure import as_json, bus_factor, check_writable, describe, median_ratio, write
from hpcdp.compression import CODECS, Compression, pays_below
from hpcdp.core.checks import check_name
from hpcdp.core.environment import launched_ranks
from hpcdp.errors import ConfigError
from hpcdp.launch.parser import Parser, at_least

NONE = "none"
_JOB_TIMEOUT_S = 600


def table(place: dict[str, Any]) -> str:
    """One place's figures as text, at most 80 columns wide."""
    link = place["link_mb_s"]["one_way"]
    lines = [f"# {where(place)}, {place['library']}", f"# link: {link:.1f} MB/s one way"]
    for each in place["rows"]:
        lines.append(f"# {each['model']}")
        lines.append(f"{'# codec':<16}{'steps/s':>10}{'x none':>9}{'sent MB':>10}{'link ms':>10}{'pays below':>16}")
        for name, found in each["codecs"].items():
            line = f"{name:<16}{found['steps_s']:>10.2f}{found['ratio']:>9.2f}{found['sent_mb']:>10.3f}"
            line += f"{1e3 * found['sent_mb'] / link:>10.1f}"
            below = found["pays_below_mb_s"]
            lines.append(line + ("" if below is None else f"{8 * below / 1e3:>9.1f} Gbit/s"))
    return "\n".join(lines)


def measure(world: comm.World, model: Model, codecs: list[str], turns: int, steps: int) -> dict[str, Any]:
    """One model; every rank must call."""
    trainings = {NONE: Training(model, world, None, overlap=True)}
    trainings |= {codec: Training(model, world, None, overlap=True, compression=codec) for codec in codecs}
    found = {name: Found() for name in trainings}
    for turn in range(turns):
        for name in list(trainings)[:: 1 if turn % 2 == 0 else -1]:
            world.barrier()
            trainings[name].turn(steps, found[name])
    taken = {
        name: np.max(world.comm.allgather_json(each.step_s), axis=0).tolist()  # by the slowest rank
        for name, each in found.items()
    }
    rows = {}
    for name, training in trainings.items():
        sent, _, _ = training.trainer.reducer.node_nbytes()
        if name == NONE:
            sent = bus_factor(world.num_nodes) * sum(b.mine.nbytes for b in training.trainer.reducer.buckets)
        codec = None if name == NONE else Compression.of(name)
        rows[name] = {
            "steps_s": 1 / float(np.median(taken[name])),
            "ratio": median_ratio(taken[NONE], taken[name]),
            "sent_mb": sent / 1e6,
            "pays_below_mb_s": None if codec is None else pays_below(codec.codec, world.num_nodes) / 1e6,
        }
    return {"model": model.title, "codecs": rows}


def job(args: argparse.Namespace) -> int:
    """Run the benchmark on the ranks of one job."""

    def row(world: comm.World, name: str) -> dict[str, Any]:
        return measure(world, MODELS[name], args.codecs, args.turns, args.steps)

    if comm.init().num_nodes == 1:
        raise ConfigError(
            "compression", where="ranks", expected="several nodes", got="one, whose ranks send no messages",
            remedy="HPCDP_RANKS_PER_NODE=1 makes a node of each rank",
        )  # fmt: skip
    measure_models("compression", args, row, table)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_compression.py", description=__doc__)
    add_options(parser, "2,4")
    parser.set_defaults(rate="1gbit,100mbit")
    parser.add_argument("--models", default="deep", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), metavar="CODEC", help="as a Trainer takes them")
    parser.add_argument("--turns", type=at_least(1), default=3, help="of each candidate (3)")
    parser.add_argument("--steps", type=at_least(1), default=3, help="that are timed in a turn (3)")
    args = parser.parse_args(argv)
    for name in args.models.split(","):
        check_name("model", name, list(MODELS))
    for name in args.codecs:
        Compression.of(name)
    if launched_ranks() is not None:
        return job(args)
    check_writable("compression", [args.json])
    arguments = ["--models", args.models, "--codecs", *args.codecs]
    arguments += ["--turns", str(args.turns), "--steps", str(args.steps)]
    places: list[dict[str, Any]] = []
    for rate in args.rate.split(","):
        at_rate = argparse.Namespace(**{**vars(args), "rate": rate, "json": None})
        found = measure_places("compression", arguments, at_rate, _JOB_TIMEOUT_S, table)
        if found is None:
            return 2
        places += found
    if args.json:
        write(args.json, as_json({"benchmark": "compression", "machine": describe(), "places": places}))
    return 0


if __name__ == "__main__":
    programs.run(main)
