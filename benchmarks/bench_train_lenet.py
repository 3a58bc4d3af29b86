"""LeNet, forward, backward and update, in samples per second: against PyTorch on one core, and from 1 to n ranks.

``python benchmarks/bench_train_lenet.py --batch 64`` alternates hpcdp and PyTorch (where it is installed) on one core,
one thread, after a check that both start with the same weights and get the same losses. ``mpirun -n 2 python
benchmarks/bench_train_lenet.py --framework hpcdp`` measures all ranks together, each with its own batches of that size;
``--framework torch`` does the same with PyTorch's DistributedDataParallel over gloo. `bench_suite` alternates such
jobs.

The network is that of "Dive into Deep Learning", section 12.5: 28 x 28 images, 129,068 parameters.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from bench_harness import programs
from bench_harness.figures import write_json
from bench_harness.peers import MODELS, Gloo, require_torch, training_step
from hpcdp import autograd, comm, nn, optim
from hpcdp.bench.measure import check_writable, describe, median_ratio, pin_to_own_core
from hpcdp.errors import ConfigError
from hpcdp.launch.parser import Parser, at_least
from hpcdp.train.trainer import Trainer

_LR, _MOMENTUM = 0.05, 0.9
_BATCHES = 4
_LOSS_TOLERANCE = 1e-3


def random_batches(batch: int, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return batches of images, shape ``(batch, 1, 28, 28)``, float32, and labels, int64; different on every rank."""
    rng = np.random.default_rng(rank)
    return [(rng.standard_normal((batch, 1, 28, 28), np.float32), rng.integers(0, 10, batch)) for _ in range(_BATCHES)]


def hpcdp_step(world: comm.World, batches: list[Any]) -> tuple[Callable[[int], Any], list[np.ndarray], Trainer]:
    """Return a step that trains on batch ``i`` and returns its loss, the initial parameters, and the trainer."""
    net = nn.models.lenet(input_shape=(1, 28, 28), num_classes=10, seed=0)
    trainer = Trainer(net.parameters(), optim.SGD(lr=_LR, momentum=_MOMENTUM), world=world)
    initial = [np.array(param.data) for param in net.parameters()]
    return step_of(net, trainer, batches), initial, trainer


def step_of(net: nn.Module, trainer: Trainer, batches: list[Any]) -> Callable[[int], Any]:
    """Return a function that trains ``net`` on batch ``i`` and returns its mean loss, without waiting for a GPU."""

    def step(i: int) -> Any:
        x, y = batches[i % len(batches)]
        with autograd.record():
            loss = nn.functional.softmax_cross_entropy(net(x), y)
        loss.backward()
        trainer.step(len(y))
        return loss.data.mean()

    return step


def torch_step(batches: list[Any], initial: list[np.ndarray], distributed: bool) -> Callable[[int], Any]:
    """Return the step in PyTorch from the parameters ``initial``, in DistributedDataParallel if ``distributed``."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    net = MODELS["lenet"].net(torch.nn)
    with torch.no_grad():
        for param, values in zip(net.parameters(), initial, strict=True):
            param.copy_(torch.from_numpy(values.T.copy() if values.ndim == 2 else values))
    model = torch.nn.parallel.DistributedDataParallel(net) if distributed else net
    optimizer = torch.optim.SGD(net.parameters(), lr=_LR, momentum=_MOMENTUM, fused=True)
    tensors = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in batches]

    return training_step(model, optimizer, tensors)


def turns_of(steps: dict[str, Callable[[int], Any]], batch: int, turns: int, seconds: float) -> dict[str, list[float]]:
    """Return samples per second of every candidate in every turn, each of about ``seconds``."""
    per_turn = {}
    for name, step in steps.items():
        begin = time.perf_counter()
        for i in range(3):
            step(i)
        per_turn[name] = max(1, int(3 * seconds / (time.perf_counter() - begin)))
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns):
        order = list(steps) if turn % 2 == 0 else list(steps)[::-1]
        for name in order:
            begin = time.perf_counter()
            for i in range(per_turn[name]):
                steps[name](i)
            rates[name].append(per_turn[name] * batch / (time.perf_counter() - begin))
    return rates


def against_torch(world: comm.World, batch: int, turns: int, seconds: float) -> dict[str, Any]:
    """One rank, hpcdp and PyTorch in turn.

    Returns ``samples_s`` (medians by name), ``ratio`` (of the rates, None without PyTorch) and ``loss_difference``, the
    largest relative one in the first steps from the same weights.
    """
    batches = random_batches(batch, 0)
    ours, initial, _ = hpcdp_step(world, batches)
    steps = {"hpcdp": ours}
    difference = None
    if importlib.util.find_spec("torch") is not None:
        steps["torch"] = torch_step(batches, initial, distributed=False)
        losses = np.array([[float(step(i)) for i in range(5)] for step in steps.values()])
        difference = float(np.max(np.abs(losses[0] / losses[1] - 1)))
    rates = turns_of(steps, batch, turns, seconds)
    return {
        "batch": batch,
        "samples_s": {name: float(np.median(each)) for name, each in rates.items()},
        "ratio": median_ratio(rates["hpcdp"], rates["torch"]) if "torch" in rates else None,
        "loss_difference": difference,
    }


def all_ranks(world: comm.World, framework: str, batch: int, turns: int, seconds: float) -> dict[str, Any]:
    """Median samples per second of all ranks together, by hpcdp or by PyTorch's DDP; every rank must call.

    ``unequal``, of hpcdp on several ranks: the mean time of a rank's own work in a step, over the mean of the longest
    of all ranks. Ranks that wait for each other in every step scale no better, however fast the exchange is.
    """
    batches = random_batches(batch, world.rank)
    step, initial, trainer = hpcdp_step(world, batches)
    gloo = Gloo(world) if framework == "torch" and world.size > 1 else None
    if framework == "torch":
        step = torch_step(batches, initial, distributed=gloo is not None)
    begin = time.perf_counter()
    for i in range(5):
        step(i)
    # Every step is collective: all ranks must make as many.
    steps = int(world.comm.allgather_json(max(1, int(5 * seconds / (time.perf_counter() - begin))))[0])
    rates, own_s = [], []
    for _ in range(turns):
        world.comm.barrier()
        begin = time.perf_counter()
        for i in range(steps):
            started, exposed_s = time.perf_counter(), trainer.stats.exposed_s
            step(i)
            own_s.append(time.perf_counter() - started - (trainer.stats.exposed_s - exposed_s))
        world.comm.barrier()
        rates.append(world.size * batch * steps / (time.perf_counter() - begin))
    if gloo is not None:
        gloo.close()
    of_all = np.array(world.comm.allgather_json(own_s))
    unequal = float(of_all.mean() / of_all.max(axis=0).mean()) if framework == "hpcdp" and world.size > 1 else None
    return {
        "framework": framework,
        "ranks": world.size,
        "batch": batch,
        "samples_s": float(np.median(rates)),
        "unequal": unequal,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_train_lenet.py", description=__doc__)
    parser.add_argument("--batch", type=at_least(1), default=64, help="samples a rank")
    frameworks = ("compare", "hpcdp", "torch")
    parser.add_argument(
        "--framework", choices=frameworks, default="compare", metavar="NAME", help=", ".join(frameworks)
    )
    parser.add_argument("--turns", type=at_least(1), default=15)
    parser.add_argument("--seconds", type=at_least(0.0), default=0.2, help="length of a turn")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    if args.framework == "torch":
        require_torch("train_lenet --framework torch")
    world = comm.init()
    check_writable("train_lenet", [args.json], world)
    pin_to_own_core(world)
    with threadpool_limits(1):
        if args.framework == "compare":
            if world.size > 1:
                raise ConfigError("train_lenet", where="--framework", expected="hpcdp or torch on several ranks")
            result = against_torch(world, args.batch, args.turns, args.seconds)
        else:
            result = all_ranks(world, args.framework, args.batch, args.turns, args.seconds)
    if world.rank == 0:
        print(json.dumps(result))
    write_json(args.json, world, {"benchmark": "train_lenet", "machine": describe(world), **result})
    difference = result.get("loss_difference")
    return 1 if difference is not None and not difference < _LOSS_TOLERANCE else 0


if __name__ == "__main__":
    programs.run(main)
