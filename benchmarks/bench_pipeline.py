"""A model in stages on as many ranks, against one rank with all of them: samples per second, and what idles.

``mpirun -n 2 python benchmarks/bench_pipeline.py`` cuts a multilayer perceptron into as many stages as there are ranks,
all with as much to compute, and trains it with several numbers of micro-batches. In turn with them rank 0 trains the
whole model on the same batches, with the same micro-batches, while the others sleep. With s stages and m micro-batches
the limit is ``s * m / (m + s - 1)`` times its rate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from bench_harness import programs
from bench_harness.figures import largest_difference, write_json
from hpcdp import comm, nn, optim
from hpcdp.bench.measure import check_writable, describe, median_ratio, pin_to_own_core, sleeping_barrier
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError
from hpcdp.launch.parser import Parser, at_least
from hpcdp.parallel import SCHEDULES, Pipeline
from hpcdp.train.trainer import Trainer

_LAYERS_A_STAGE, _CLASSES = 4, 10
_LOSS_TOLERANCE = 1e-5


def make_stage(width: int, seed: int, is_last: bool) -> nn.Module:
    """Return some dense layers from ``width`` to ``width``, or to the classes."""
    weights = nn.init.Xavier(seed)
    layers = [nn.Dense(width, width, activation="relu", weight_init=weights) for _ in range(_LAYERS_A_STAGE)]
    return nn.Sequential(*layers, *([nn.Dense(width, _CLASSES, weight_init=weights)] if is_last else []))


def trainer_of(
    world: comm.World, num_stages: int, width: int, micro_batches: int, schedule: str
) -> Callable[..., float]:
    """Return a function that trains on a batch and returns its loss."""
    stages = [partial(make_stage, width, stage, stage == num_stages - 1) for stage in range(num_stages)]
    loss = nn.functional.softmax_cross_entropy
    net = Pipeline(stages, loss, world, micro_batches=micro_batches, schedule=schedule)
    return partial(net.step, Trainer(net.parameters(), optim.SGD(lr=0.01), net.replicas))


def measure(
    world: comm.World, batch: int, width: int, micro_batches: list[int], schedule: str, turns: int
) -> dict[int, dict[str, float]]:
    """Measure the pipeline and one rank alone by the number of micro-batches; every rank must call.

    Returns for each number ``pipeline_s`` and ``alone_s`` (median seconds of a step), ``speedup`` (the median ratio
    within turns), ``limit`` (the largest possible speedup) and ``loss_difference`` (the largest relative one of the
    first steps).
    """
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((batch, width), np.float32), rng.integers(0, _CLASSES, batch)
    lonely = thread_comm.run(1, lambda single: single)[0]
    found = {}
    for number in micro_batches:
        together = trainer_of(world, world.size, width, number, schedule)
        alone = trainer_of(lonely, world.size, width, number, schedule) if world.rank == 0 else None
        losses = [[together(x, y), alone(x, y) if alone is not None else np.nan] for _ in range(3)]
        taken: dict[str, list[float]] = {"together": [], "alone": []}
        for _ in range(turns):
            world.comm.barrier()
            begin = time.perf_counter()
            together(x, y)
            taken["together"].append(max(world.comm.allgather_json(time.perf_counter() - begin)))
            begin = time.perf_counter()
            if alone is not None:
                alone(x, y)
            taken["alone"].append(time.perf_counter() - begin)
            sleeping_barrier(world)
        stages, pieces = world.size, min(number, batch)  # no micro-batch is empty
        found[number] = {
            "pipeline_s": float(np.median(taken["together"])),
            "alone_s": float(np.median(taken["alone"])),
            "speedup": median_ratio(taken["alone"], taken["together"]),
            "limit": stages * pieces / (pieces + stages - 1),
            "loss_difference": largest_difference(*np.transpose(losses)),
        }
    return found


def _table(found: dict[int, dict[str, float]]) -> str:
    lines = [f"{'micro-batches':>13}{'one rank, ms':>14}{'pipeline, ms':>14}{'speedup':>9}{'limit':>7}{'of it':>7}"]
    for number, each in found.items():
        alone, together = each["alone_s"] * 1e3, each["pipeline_s"] * 1e3
        share = each["speedup"] / each["limit"]
        lines.append(
            f"{number:>13}{alone:>14.1f}{together:>14.1f}{each['speedup']:>9.2f}{each['limit']:>7.2f}{share:>7.0%}"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python benchmarks/bench_pipeline.py", description=__doc__)
    parser.add_argument("--batch", type=at_least(1), default=512, help="samples (512)")
    parser.add_argument("--width", type=at_least(1), default=768, help="of the layers (768)")
    parser.add_argument("--micro-batches", default="1,2,4,8,16", metavar="M,...", help="(1,2,4,8,16)")
    parser.add_argument("--schedule", choices=[*SCHEDULES], default="1f1b")
    parser.add_argument("-i", dest="turns", type=at_least(1), default=15, metavar="N", help="turns (15)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    args = _parser().parse_args(argv)
    numbers = [int(each) if each.isdecimal() else 0 for each in args.micro_batches.split(",")]
    if min(numbers) < 1:
        expected = "numbers from 1 on, with commas between"
        raise ConfigError("pipeline --micro-batches", expected=expected, got=args.micro_batches)
    check_writable("pipeline --json", [args.json])
    world = comm.init()
    pin_to_own_core(world)
    with threadpool_limits(1):
        found = measure(world, args.batch, args.width, numbers, args.schedule, args.turns)
    if world.rank == 0:
        print(f"# {world.size} stages of {_LAYERS_A_STAGE} layers of {args.width}, batches of {args.batch}")
        print(_table(found))
    write_json(args.json, world, {"benchmark": "pipeline", "machine": describe(world), "figures": found})
    # Where all is on rank 0, the others have nothing to compare with. NaN is no small difference.
    right = world.rank != 0 or all(each["loss_difference"] <= _LOSS_TOLERANCE for each in found.values())
    return int(not right)


if __name__ == "__main__":
    programs.run(main)
