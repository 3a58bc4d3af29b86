"""PyTorch models over several ranks: PyTorch's wrapper over gloo and over the backend "hpcdp", and hpcdp's wrapper.

They run in turn with a candidate that does not communicate, and with ``--fsdp`` also with FSDP2 over both backends.

``hpcdp launch -n 2 -- python benchmarks/bench_torch_ddp.py`` measures the ranks that a launcher started. Without one,
``python benchmarks/bench_torch_ddp.py --hosts 1,2`` starts jobs of its own: on this machine, and on as many hosts with
slow links (`bench_harness.cluster`; needs root).

All candidates are made from the same weights, see the same batches, different on every rank, compute on one thread a
rank, and update by SGD with momentum, PyTorch's with its fused kernel; its wrapper's gradients are views of buckets. A
check before: the losses of the first steps are the same for all that communicate, but for a fiftieth of what they
differ by for the one that lets each rank train by itself.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench_harness import programs
from bench_harness.cluster import add_options, measure_places, where
from bench_harness.figures import largest_difference, write_json
from bench_harness.peers import CLASSES, CONTEXT, MODELS, VOCABULARY, Gloo, Model, require_torch, sharded, training_step
from hpcdp import comm
from hpcdp.bench.measure import check_writable, describe, median_ratio, pin_to_own_core
from hpcdp.core.checks import check_name
from hpcdp.core.environment import launched_ranks
from hpcdp.launch.parser import Parser, at_least

DDP, BACKEND, RANK, SHARD, ALONE = "DDP, gloo", "DDP, hpcdp", "hpcdp, every rank", "hpcdp, shards", "no communication"
FSDP, FSDP_BACKEND = "FSDP2, gloo", "FSDP2, hpcdp"
"""The candidates."""

_LR, _MOMENTUM = 0.01, 0.9
_BATCHES = 3
_CHECKED_STEPS = 4
_LARGEST_DIFFERENCE = 0.02
"""Of losses, as a share of the difference that training without communication makes: rounding grows with each step."""
_JOB_TIMEOUT_S = 600


def batches_of(model: Model, batch: int, rank: int) -> list[tuple[Any, Any]]:
    """Return batches of random samples and labels as tensors, different on every rank."""
    torch: Any = importlib.import_module("torch")
    rng = np.random.default_rng(rank)
    found = []
    for _ in range(_BATCHES):
        if model.sample is None:
            text = torch.from_numpy(rng.integers(0, VOCABULARY, (batch, CONTEXT + 1)))
            found.append((text[:, :-1].contiguous(), text[:, 1:].flatten()))
        else:
            images = rng.standard_normal((batch, *model.sample), np.float32)
            found.append((torch.from_numpy(images), torch.from_numpy(rng.integers(0, CLASSES, batch))))
    return found


def step_of(name: str, model: Model, batches: list[tuple[Any, Any]], world: comm.World) -> Callable[[int], Any]:
    """Return a function that trains candidate ``name`` on batch ``i`` and returns the loss; every rank must call."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    net = model.net(torch.nn)
    settings = {"lr": _LR, "momentum": _MOMENTUM}
    if name in (FSDP, FSDP_BACKEND):
        mesh = torch.distributed.DeviceMesh.from_group(_group_of(name), "cpu")
        wrapped = sharded(net, mesh)
    elif name in (RANK, SHARD):
        hpcdp_torch = importlib.import_module("hpcdp.torch")
        wrapped = hpcdp_torch.DistributedDataParallel(net, world, owner="rank" if name == RANK else "shard")
    else:
        ddp = torch.nn.parallel.DistributedDataParallel
        wrapped = net if name == ALONE else ddp(net, process_group=_group_of(name), gradient_as_bucket_view=True)
    if name == SHARD:
        optimizer = hpcdp_torch.ShardedOptimizer(wrapped, torch.optim.SGD, **settings)
    else:
        is_fused = name not in (FSDP, FSDP_BACKEND)  # DTensor has no fused kernel
        optimizer = torch.optim.SGD(wrapped.parameters(), fused=is_fused, **settings)

    return training_step(wrapped, optimizer, batches)


@functools.cache
def _group_of(name: str) -> Any:
    """Return the process group of a candidate; every rank must call."""
    backend = "hpcdp" if name in (BACKEND, FSDP_BACKEND) else "gloo"
    return importlib.import_module("torch.distributed").new_group(backend=backend)


def measure(
    world: comm.World, key: str, batch: int, turns: int, seconds: float, others: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure the model ``key`` at one batch size, the candidates in turn; every rank must call.

    Returns ``step_ms`` (medians of the slowest rank by candidate), ``ratio`` of DDP's time to each candidate's and
    ``share`` of the rate without communication (medians over turns), ``loss_difference``, the largest relative one,
    ``apart``, that of ranks without communication, and ``unequal``: the share that ranks would keep if communication
    took no time, but they waited for each other after each step, whose length varies.
    """
    model = MODELS[key]
    batches = batches_of(model, batch, world.rank)
    names = [*others, DDP, BACKEND, RANK, SHARD, ALONE] if world.size > 1 else [RANK, SHARD, ALONE]
    steps = {name: step_of(name, model, batches, world) for name in names}
    losses: dict[str, np.ndarray] = {}
    step_s: dict[str, float] = {}
    for name in names:
        checked, begin = [], 0.0
        for i in range(_CHECKED_STEPS):
            begin = time.perf_counter()
            checked.append(float(steps[name](i)))
        losses[name], step_s[name] = np.array(checked), time.perf_counter() - begin
    first = losses[DDP] if DDP in losses else losses[RANK]
    difference = largest_difference([losses[name] for name in names if name != ALONE], first)
    apart = largest_difference(losses[ALONE], first)
    # Over slow links a step with communication is ten times as long as one without: each candidate has its own count.
    slowest_s = {name: max(rank[name] for rank in world.comm.allgather_json(step_s)) for name in names}
    per_turn = {name: max(2, int(seconds / slowest_s[name])) for name in names}
    seconds_of: dict[str, list[float]] = {name: [] for name in names}
    each_s: list[float] = []
    for turn in range(turns):
        for name in names if turn % 2 == 0 else names[::-1]:
            steps[name](0)
            world.barrier()
            begin = time.perf_counter()
            ends = [begin]
            for i in range(per_turn[name]):
                steps[name](i)
                ends.append(time.perf_counter())
            seconds_of[name].append((ends[-1] - begin) / per_turn[name])
            if name == ALONE:
                each_s += np.diff(ends).tolist()
    ranks = world.comm.allgather_json(seconds_of)
    alone_s = np.array(world.comm.allgather_json(each_s))
    slowest = {name: np.max([rank[name] for rank in ranks], axis=0).tolist() for name in names}
    return {
        "key": key,
        "model": model.title,
        "batch": batch,
        "step_ms": {name: 1e3 * float(np.median(each)) for name, each in slowest.items()},
        "ratio": {name: median_ratio(slowest[DDP], each) for name, each in slowest.items()} if DDP in slowest else {},
        "unequal": float(np.mean(slowest[ALONE]) / alone_s.max(axis=0).mean()),
        "share": {name: median_ratio(slowest[ALONE], each) for name, each in slowest.items()},
        "loss_difference": float(np.max(world.comm.allgather_json(difference))),
        "apart": float(np.max(world.comm.allgather_json(apart))),
    }


def table(place: dict[str, Any]) -> str:
    """One place's figures as text, at most 80 columns wide."""
    lines = [f"# {where(place)}, PyTorch {place['torch']}"]
    for row in place["rows"]:
        lines.append(f"# {row['model']}, batch {row['batch']} a rank")
        lines.append(f"{'#':<20}{'step ms':>12}{'DDP / it':>12}{'of no communication':>24}")
        for name, step_ms in row["step_ms"].items():
            ratio = f"{row['ratio'][name]:.2f}" if row["ratio"] else "-"
            lines.append(f"{name:<20}{step_ms:>12.2f}{ratio:>12}{100 * row['share'][name]:>23.0f}%")
        lines.append(f"# steps that wait for the longer one {100 * row['unequal']:>42.0f}%")
        lines.append(
            f"# losses differ by {row['loss_difference']:.0e} at most, without communication {row['apart']:.0e}"
        )
    return "\n".join(lines)


def job(args: argparse.Namespace) -> int:
    """Run the benchmark on the ranks of one job."""
    world = comm.init()
    check_writable("torch_ddp", [args.json], world)
    if world.num_nodes == 1:  # the ranks of hosts on one machine would all take its first cores
        pin_to_own_core(world)
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    if world.num_nodes > 1 and args.json:
        tempfile.tempdir = str(Path(args.json).parent)  # where gloo's ranks meet: their /tmp are their hosts' own
    gloo = Gloo(world) if world.size > 1 else None
    place: dict[str, Any] = {"torch": str(torch.__version__), "library": world.library, "machine": describe(world)}
    place["rows"] = [
        measure(world, name, batch, args.turns, args.seconds, (FSDP, FSDP_BACKEND) if args.fsdp else ())
        for name in args.models.split(",")
        for batch in MODELS[name].batches
    ]
    if gloo is not None:
        gloo.close()
    if world.rank == 0:
        print(table(place), flush=True)
    write_json(args.json, world, {"benchmark": "torch_ddp", **place})
    return 0 if _agrees(place) else 1


def _agrees(place: dict[str, Any]) -> bool:
    alone = place["machine"]["ranks"] == 1
    return alone or all(row["loss_difference"] < _LARGEST_DIFFERENCE * row["apart"] for row in place["rows"])


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_torch_ddp.py", description=__doc__)
    add_options(parser, "1,2")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--turns", type=at_least(1), default=8, help="of each candidate (8)")
    parser.add_argument("--seconds", type=at_least(0.0), default=0.5, help="length of a turn (0.5)")
    parser.add_argument("--fsdp", action="store_true", help="also time FSDP2, over gloo and over hpcdp")
    args = parser.parse_args(argv)
    for name in args.models.split(","):
        check_name("model", name, list(MODELS))
    require_torch("torch_ddp")
    if launched_ranks() is not None:
        return job(args)
    arguments = ["--models", args.models, "--turns", str(args.turns), "--seconds", str(args.seconds)]
    arguments += ["--fsdp"] if args.fsdp else []
    places = measure_places("torch_ddp", arguments, args, _JOB_TIMEOUT_S, table)
    if places is None:
        return 2
    return 0 if all(map(_agrees, places)) else 1


if __name__ == "__main__":
    programs.run(main)
