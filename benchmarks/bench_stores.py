"""Training on every kind of store with one slow rank: time to an accuracy, staleness, bytes sent.

``python benchmarks/bench_stores.py --ranks 4 --slow 3`` trains LeNet on the digits in buckets and on stores, each in a
job of its own on this machine, in which each rank is a node, so that what they exchange is sent. Every rank sleeps in
each step, the last one ``--slow`` times as long, by so much that computing does not count: ranks may outnumber cores,
and the ratio of the times means something, where the times themselves do not.

A row gives the training time until the test accuracy was reached for the first time (``-``: it was not), the accuracy
at the end, the share of the batches that the slow rank has done, how many pushes of others took effect on a parameter
between a rank's pull and its push, on average and at most, and what a rank sends in an epoch; of ranks that step
together by the formula of the ring.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from bench_harness import programs
from bench_harness.figures import write_json
from hpcdp import comm
from hpcdp.autograd import Tensor
from hpcdp.bench.measure import as_json, bus_factor, check_writable, describe, write
from hpcdp.core.checks import check_name
from hpcdp.core.environment import launched_ranks
from hpcdp.errors import ConfigError
from hpcdp.launch.parser import Parser, at_least
from hpcdp.nn.functional import softmax_cross_entropy
from hpcdp.train import run as runs_run
from hpcdp.train.config import TrainConfig
from hpcdp.train.fit import fit
from hpcdp.train.metrics import evaluate
from hpcdp.train.run import make_loader, make_trainer

_ASYNC = {"kv_store": "dist_async", "lr": 0.03}
"""At the 0.05 of the others a run has diverged: late gradients bear less."""
STORES: dict[str, dict[str, Any]] = {
    "buckets": {},
    "dist_sync": {"kv_store": "dist_sync"},
    "dist_async": _ASYNC,
    "dist_async -s 2": {**_ASYNC, "servers": 2},
    "dist_async staleness=2": {**_ASYNC, "staleness": 2},
    "dist_async 2bit": {**_ASYNC, "compression": "2bit"},
}
"""What is compared: names and settings."""
_JOB_TIMEOUT_S = 900


def slowed(seconds: float) -> Callable[[Tensor, Any], Tensor]:
    """Return the loss of a rank whose steps take ``seconds`` longer."""

    def loss(output: Tensor, labels: Any) -> Tensor:
        time.sleep(seconds)
        return softmax_cross_entropy(output, labels)

    return loss


def measure(world: comm.World, name: str, config: TrainConfig, pace_s: float, slow: float) -> dict[str, Any]:
    """One training; every rank must call. Each step sleeps for ``pace_s``, on the last rank ``slow`` times that."""
    train_set, test_set = runs_run.datasets(config)
    net = runs_run.network(config, train_set)
    trainer = make_trainer(config, net, train_set, world)
    loader = make_loader(config, train_set, world, trainer.steps_together)
    is_slow = world.rank == world.size - 1
    records = fit(
        net, trainer, loader, epochs=config.epochs, world=world, loss=slowed(pace_s * (slow if is_slow else 1)),
        evaluate=lambda: evaluate(net, test_set, world, config.eval_batch_size),
    )  # fmt: skip
    steps = world.comm.allgather_json(trainer.stats.steps)
    sent = records[-1].get("sent_nbytes")
    if sent is None:
        nbytes = sum(param.data.nbytes for param in net.parameters())
        sent = bus_factor(world.num_nodes) * nbytes * trainer.step_count * world.num_nodes
    return {
        "store": name,
        "seed": config.seed,
        "seconds": np.cumsum([each["seconds"] for each in records]).tolist(),
        "test_accuracy": [each["test_accuracy"] for each in records],
        "staleness_mean": records[-1].get("staleness_mean", 0.0),
        "staleness_max": records[-1].get("staleness_max", 0),
        "slow_share": steps[-1] / sum(steps),
        "sent_mb": sent / 1e6 / world.num_nodes / config.epochs,
    }


def seconds_to(run: dict[str, Any], accuracy: float) -> float | None:
    """Seconds of training until ``accuracy`` was reached for the first time."""
    return next((s for s, a in zip(run["seconds"], run["test_accuracy"], strict=True) if a >= accuracy), None)


def table(runs: dict[str, list[dict[str, Any]]], accuracy: float) -> str:
    """Format a line of medians over seeds for each store."""
    head = f"s to {accuracy:g}"
    lines = [f"{'# store':<24}{head:>10}{'at end %':>10}{'slow %':>8}{'staleness':>11}{'at most':>9}{'MB':>8}"]
    for name, of_seeds in runs.items():
        times = [seconds_to(run, accuracy) for run in of_seeds]
        reached = [each for each in times if each is not None]
        middle = {key: float(np.median([run[key] for run in of_seeds])) for key in ("slow_share", "sent_mb")}
        mean = float(np.median([run["staleness_mean"] for run in of_seeds]))
        line = f"{name:<24}" + (f"{np.median(reached):>10.1f}" if len(reached) == len(times) else f"{'-':>10}")
        line += f"{100 * float(np.median([run['test_accuracy'][-1] for run in of_seeds])):>10.2f}"
        line += f"{100 * middle['slow_share']:>8.1f}{mean:>11.2f}"
        lines.append(line + f"{max(run['staleness_max'] for run in of_seeds):>9.0f}{middle['sent_mb']:>8.1f}")
    return "\n".join(lines)


def job(args: argparse.Namespace) -> int:
    """Run the first store with the first seed on the ranks of one job."""
    world = comm.init()
    with threadpool_limits(1):
        config = TrainConfig(ranks=world.size, epochs=args.epochs, seed=args.seeds[0], **STORES[args.stores[0]])
        found = measure(world, args.stores[0], config, args.pace_ms / 1e3, args.slow)
    write_json(args.json, world, found)
    return 0


def _run(args: argparse.Namespace, store: str, seed: int) -> dict[str, Any]:
    """One job's figures."""
    with tempfile.TemporaryDirectory(prefix="stores-") as folder:
        path = Path(folder, "found.json")
        program = [sys.executable, str(programs.path_of("stores")), "--stores", store, "--seeds", str(seed)]
        program += ["--epochs", str(args.epochs), "--pace-ms", str(args.pace_ms), "--slow", str(args.slow)]
        launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(args.ranks)]
        launch += ["-s", str(STORES[store].get("servers", 0)), "--"]
        command = [*launch, *program, "--json", str(path)]
        programs.finished("stores", store, command, _JOB_TIMEOUT_S, HPCDP_RANKS_PER_NODE="1")
        return dict(json.loads(path.read_text()))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_stores.py", description=__doc__)
    parser.add_argument("--ranks", type=at_least(2), default=4, help="each a node of its own (4)")
    parser.add_argument("--slow", type=float, default=3.0, metavar="X", help="how long the slow rank's steps take (3)")
    parser.add_argument("--pace-ms", type=float, default=20.0, metavar="MS", help="how long those of others take (20)")
    parser.add_argument("--epochs", type=at_least(1), default=15)
    parser.add_argument("--accuracy", type=float, default=0.97, help="on the test images (0.97)")
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0], metavar="N", help="a run with each (0)")
    parser.add_argument("--stores", nargs="+", default=list(STORES), metavar="NAME", help=f"of {', '.join(STORES)}")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    for name in args.stores:
        check_name("store", name, STORES)
    for option in ("slow", "pace_ms"):
        if not getattr(args, option) >= 0:
            where = f"--{option.replace('_', '-')}"
            raise ConfigError("stores", where=where, expected="a number from 0 on", got=getattr(args, option))
    if launched_ranks() is not None:
        return job(args)
    check_writable("stores", [args.json])
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.stores}
    for seed in args.seeds:
        for name, of_seeds in runs.items():
            of_seeds.append(_run(args, name, seed))
            print(f"# {name}: {of_seeds[-1]['test_accuracy'][-1]:.4f}", file=sys.stderr, flush=True)
    print(table(runs, args.accuracy))
    if args.json:
        settings = {name: getattr(args, name) for name in ("ranks", "slow", "pace_ms", "epochs", "accuracy")}
        write(args.json, as_json({"benchmark": "stores", "machine": describe(), **settings, "runs": runs}))
    return 0


if __name__ == "__main__":
    programs.run(main)
