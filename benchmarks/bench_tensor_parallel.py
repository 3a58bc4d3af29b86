"""A multilayer perceptron whose layers are split over the ranks, against one rank with all of them.

``mpirun -n 2 python benchmarks/bench_tensor_parallel.py`` trains 784-4096-4096-10 on as many parts as there are ranks.
In turn with them rank 0 trains the whole model on the same batches, while the others sleep, and all ranks allreduce as
much as a step exchanges: what the first row layer gives. The limit is the time of one rank, divided by the ranks, and
that of the allreduce.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from threadpoolctl import threadpool_limits

from bench_harness import programs
from bench_harness.figures import largest_difference, write_json
from hpcdp import autograd, comm, nn, optim
from hpcdp.bench.measure import check_writable, describe, median_ratio, pin_to_own_core, sleeping_barrier
from hpcdp.collectives import allreduce
from hpcdp.comm import thread_comm
from hpcdp.launch.parser import Parser, at_least
from hpcdp.parallel import ColumnDense, RowDense, split_world
from hpcdp.train.trainer import Trainer

_FEATURES, _CLASSES = 784, 10
_LOSS_TOLERANCE = 1e-4


def trainer_of(world: comm.World, width: int) -> Callable[[np.ndarray, np.ndarray], float]:
    """Return a function that trains on a batch, with a slice of each layer per rank, and sums its losses."""
    parts, replicas = split_world(world.size, world)
    seeds = [nn.init.Xavier(seed) for seed in range(3)]
    net = nn.Sequential(
        ColumnDense(_FEATURES, width, parts, activation="relu", weight_init=seeds[0]),
        RowDense(width, width, parts, activation="relu", weight_init=seeds[1]),
        nn.Dense(width, _CLASSES, weight_init=seeds[2]),  # a hundredth of a layer: each rank has it
    )
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.01), replicas)

    def step(x: np.ndarray, y: np.ndarray) -> float:
        with autograd.record():
            loss = nn.functional.softmax_cross_entropy(net(x), y)
        loss.backward()
        trainer.step(len(y))
        return float(loss.data.sum(dtype=np.float64))

    return step


def measure(world: comm.World, batch: int, width: int, turns: int) -> dict[str, float]:
    """Seconds of a step on all ranks and on one; every rank must call.

    Returns ``split_s``, ``alone_s`` and ``allreduce_s``, medians; ``speedup``, the median ratio within turns;
    ``limit``, what it can be; and ``loss_difference``, the largest relative one of the first steps.
    """
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((batch, _FEATURES), np.float32), rng.integers(0, _CLASSES, batch)
    exchanged = rng.standard_normal((batch, width), np.float32)
    lonely = thread_comm.run(1, lambda single: single)[0]
    together, alone = trainer_of(world, width), trainer_of(lonely, width) if world.rank == 0 else None
    losses = [[together(x, y), np.nan if alone is None else alone(x, y)] for _ in range(3)]
    taken: dict[str, list[float]] = {"split": [], "allreduce": [], "alone": []}
    for _ in range(turns):
        for name, call in (
            ("split", lambda: together(x, y)),
            ("allreduce", lambda: allreduce(exchanged, "mean", world)),
        ):
            world.comm.barrier()
            begin = time.perf_counter()
            call()
            taken[name].append(max(world.comm.allgather_json(time.perf_counter() - begin)))
        begin = time.perf_counter()
        if alone is not None:
            alone(x, y)
        taken["alone"].append(time.perf_counter() - begin)
        sleeping_barrier(world)
    medians = {f"{name}_s": float(np.median(seconds)) for name, seconds in taken.items()}
    least_s = medians["alone_s"] / world.size + medians["allreduce_s"] * (world.size > 1)
    return medians | {
        "speedup": median_ratio(taken["alone"], taken["split"]),
        "limit": medians["alone_s"] / least_s,
        "loss_difference": largest_difference(*np.transpose(losses)),
    }


def _table(found: dict[int, dict[str, float]]) -> str:
    lines = [
        f"{'batch':>6}{'one rank, ms':>14}{'split, ms':>11}{'allreduce, ms':>15}{'speedup':>9}{'limit':>7}{'of it':>7}"
    ]
    for batch, each in found.items():
        alone, split, exchange = (each[name] * 1e3 for name in ("alone_s", "split_s", "allreduce_s"))
        share = each["speedup"] / each["limit"]
        lines.append(
            f"{batch:>6}{alone:>14.1f}{split:>11.1f}{exchange:>15.2f}{each['speedup']:>9.2f}{each['limit']:>7.2f}{share:>7.0%}"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python benchmarks/bench_tensor_parallel.py", description=__doc__)
    parser.add_argument("--batch", type=at_least(1), nargs="+", default=[64, 256, 1024], help="samples (64 256 1024)")
    parser.add_argument("--width", type=at_least(1), default=4096, help="of the hidden layers (4096)")
    parser.add_argument("-i", dest="turns", type=at_least(1), default=15, metavar="N", help="turns (15)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    args = _parser().parse_args(argv)
    check_writable("tensor_parallel --json", [args.json])
    world = comm.init()
    pin_to_own_core(world)
    with threadpool_limits(1):
        found = {batch: measure(world, batch, args.width, args.turns) for batch in args.batch}
    if world.rank == 0:
        print(f"# {_FEATURES}-{args.width}-{args.width}-{_CLASSES} split over {world.size} ranks")
        print(_table(found))
    write_json(args.json, world, {"benchmark": "tensor_parallel", "machine": describe(world), "figures": found})
    # Where all is on rank 0, the others have nothing to compare with. NaN is no small difference.
    right = world.rank != 0 or all(each["loss_difference"] <= _LOSS_TOLERANCE for each in found.values())
    return int(not right)


if __name__ == "__main__":
    programs.run(main)
