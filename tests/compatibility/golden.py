"""Compares the bits that two versions of the code compute on one machine.

    python tests/compatibility/golden.py --write BEFORE.json       by the Python of the one version
    python tests/compatibility/golden.py --compare BEFORE.json     by that of the other: status 1 where bits differ

Bits depend on the processor and on the libraries, so digests are compared on one machine and not kept. Every case
trains a small network for 20 steps, each rank with data of its own, and gives a digest for each step's losses and one
for all parameters and buffers at the end. Cases are chosen by ``--only WORD``. It uses public names alone.

``dist_async`` runs with one worker, by itself and with a server of its own: the pushes of several workers come in an
order that no two runs share.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import hpcdp
from hpcdp import autograd, kvstore, nn, optim
from hpcdp.train import SyncBatchNorm, TrainStep

STEPS = 20
LIMIT_S = 600
"""Of the job of one layout, which takes about a minute."""
LAYOUTS = {
    "1 rank": (1, 0, 0),
    "2 ranks": (2, 0, 0),
    "3 ranks": (3, 0, 0),
    "4 ranks": (4, 0, 0),
    "2 nodes of 1": (2, 1, 0),
    "2 nodes of 2": (4, 2, 0),
    "1 rank, 1 server": (1, 0, 1),
}
"""Ranks, ranks on a virtual node (0: all), and servers, by a name."""

Result = dict[str, Any]
Batch = tuple[np.ndarray, np.ndarray]


def digest(*arrays: Any) -> str:
    """Return a digest of shapes, dtypes and bits."""
    sha = hashlib.sha256()
    for array in arrays:
        array = np.ascontiguousarray(array)
        sha.update(f"{array.dtype} {array.shape} ".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]


def mlp() -> nn.Module:
    init = nn.init.Xavier(seed=1)
    return nn.Sequential(
        nn.Dense(12, 32, weight_init=init), nn.BatchNorm(32), nn.ReLU(), nn.Dropout(0.25, seed=2),
        nn.Dense(32, 33, weight_init=init), nn.Tanh(), nn.Dense(33, 4, weight_init=init),
    )  # fmt: skip


def conv() -> nn.Module:
    init = nn.init.Kaiming(seed=3)
    return nn.Sequential(
        nn.Conv2D(1, 16, 3, padding=1, weight_init=init, activation="relu"), nn.BatchNorm(16), nn.MaxPool2D(2),
        nn.Conv2D(16, 16, 3, padding=1, weight_init=init), nn.Sigmoid(), nn.AvgPool2D(2), nn.Dropout(0.25, seed=4),
        nn.Flatten(), nn.Dense(144, 4, weight_init=init),
    )  # fmt: skip


def lstm() -> nn.Module:
    return nn.models.char_lstm(input_shape=(6,), num_classes=5, size=12, seed=5)


def gpt() -> nn.Module:
    init = nn.init.Normal(0.2, seed=6)
    return nn.Sequential(
        nn.Embedding(5, 16, weight_init=init), nn.LayerNorm(16), nn.CausalSelfAttention(16, 2, weight_init=init),
        nn.GELU(), nn.Dense(16, 5, weight_init=init),
    )  # fmt: skip


def synchronized() -> nn.Module:
    return SyncBatchNorm.convert(mlp())


def half() -> nn.Module:
    return mlp().to("float16")


def bfloat() -> nn.Module:
    return mlp().to("bfloat16")


def double() -> nn.Module:
    return mlp().to("float64")


def batch(net: str, step: int, piece: int, size: int) -> Batch:
    """Return the samples of a step that are one rank's, or one virtual shard's."""
    rng = np.random.default_rng([17, step, piece])
    if net in ("lstm", "gpt"):
        return rng.integers(0, 5, (size, 6)), rng.integers(0, 5, (size, 6))
    x = rng.standard_normal((size, 1, 12, 12) if net == "conv" else (size, 12))
    return x.astype(np.float64 if net == "double" else np.float32), rng.integers(0, 4, size)


def momentum() -> optim.Optimizer:
    return optim.SGD(lr=optim.WarmupSchedule(optim.CosineSchedule(0.05, STEPS), 4), momentum=0.9, weight_decay=0.001)


RULES: dict[str, Callable[[], optim.Optimizer]] = {
    "sgd": lambda: optim.SGD(lr=0.05),
    "momentum": momentum,
    "nesterov": lambda: optim.SGD(lr=0.05, momentum=0.8, nesterov=True),
    "adam": lambda: optim.Adam(lr=0.01),
    "adamw": lambda: optim.AdamW(lr=optim.StepSchedule(0.01, 7), weight_decay=0.02),
    "lars": lambda: optim.LARS(lr=0.5, momentum=0.9),
}


class Case(NamedTuple):
    """What is trained, by what, and how steps are written."""

    net: str
    rule: str = "momentum"
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    how: str = "written"
    """"written": as a loop; "network": of a hybridized network; "plan": by a hybridized `TrainStep`; "accumulated": two
    backwards a step; "by hand": gradients are changed before the update; "uneven": one rank has no samples."""
    layouts: tuple[str, ...] = ("1 rank", "2 ranks", "3 ranks", "2 nodes of 1")


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "conv": conv, "lstm": lstm, "gpt": gpt, "synchronized": synchronized, "half": half, "bfloat": bfloat,
    "double": double,
}  # fmt: skip
ONE, EVERYWHERE = ("1 rank",), ("1 rank", "2 ranks", "3 ranks", "4 ranks", "2 nodes of 1", "2 nodes of 2")
CODECS = (
    "fp16", "bf16", "2bit", "2bit:threshold=0.05", "2bit:feedback=0", "1bit", "1bit:threshold=0,magnitude=0.1",
    "topk:ratio=0.05",
)  # fmt: skip


def cases() -> dict[str, Case]:
    """Return all cases by their names."""
    found: dict[str, Case] = {}
    for owner in ("rank", "shard"):
        for overlap in (False, True):
            name = f"owner={owner}, overlap={overlap}"
            options = {"owner": owner, "overlap": overlap, "bucket_cap_mb": 0.002}
            found[f"mlp, {name}"] = Case("mlp", options=options, layouts=EVERYWHERE)
            found[f"conv, {name}"] = Case("conv", options=options, layouts=EVERYWHERE[:2])
            found[f"mlp, plan, {name}"] = Case("mlp", options=options, how="plan")
        found[f"conv, plan, owner={owner}"] = Case("conv", options={"owner": owner}, how="plan")
        found[f"mlp, clipped, owner={owner}"] = Case("mlp", options={"owner": owner, "clip_norm": 0.1})
        found[f"half, owner={owner}"] = Case("half", "sgd", {"owner": owner, "loss_scale": "dynamic"})
        found[f"mlp, reproducible, owner={owner}"] = Case(
            "mlp", options={"owner": owner, "reproducible": True, "virtual_shards": 4}, layouts=EVERYWHERE
        )
        found[f"mlp, accumulated, owner={owner}"] = Case("mlp", options={"owner": owner}, how="accumulated")
        for rule in RULES:
            found[f"mlp, {rule}, owner={owner}"] = Case("mlp", rule, {"owner": owner}, layouts=("3 ranks",))
    found["mlp, auto"] = Case("mlp")
    found["mlp, hybridized network"] = Case("mlp", how="network")
    found["conv, hybridized network"] = Case("conv", how="network", layouts=("1 rank", "2 ranks"))
    found["conv, reproducible"] = Case("conv", "adam", {"reproducible": True}, layouts=("1 rank", "3 ranks"))
    found["mlp, uneven"] = Case("mlp", "adam", how="uneven")
    found["mlp, by hand"] = Case("mlp", options={"overlap": False}, how="by hand")
    found["mlp, nonfinite"] = Case("mlp", options={"policy": hpcdp.Policy(nonfinite="skip", unused="zero")})
    for net in ("lstm", "gpt", "synchronized", "bfloat", "double"):
        found[net] = Case(net, "adamw", layouts=("1 rank", "2 ranks", "2 nodes of 1"))
    for net in ("lstm", "gpt"):
        found[f"{net}, plan"] = Case(net, "adamw", {"clip_norm": 1.0}, "plan", ("1 rank", "2 ranks"))
    for codec in CODECS:
        inside = f"{codec}{',' if ':' in codec else ':'}inside_nodes=on"
        found[f"mlp, {inside}"] = Case("mlp", options={"compression": inside}, layouts=("2 ranks",))
        found[f"mlp, {codec}"] = Case("mlp", options={"compression": codec}, layouts=("2 nodes of 1", "2 nodes of 2"))
        found[f"mlp, plan, {codec}"] = Case(
            "mlp", options={"compression": codec}, how="plan", layouts=("2 nodes of 1",)
        )
        store = {"kvstore": "dist_sync", "compression": codec}
        found[f"mlp, dist_sync, {codec}"] = Case("mlp", options=store, layouts=("2 ranks",))
    found["mlp, plan, topk"] = Case("mlp", options={"compression": "topk"}, how="plan", layouts=("2 nodes of 1",))
    for kind in ("local", "device", "dist_sync", "dist_device_sync", "dist_async"):
        layouts = ONE if kind in ("local", "device") else EVERYWHERE if kind == "dist_sync" else Case("mlp").layouts
        layouts = ("1 rank", "1 rank, 1 server") if kind == "dist_async" else layouts
        for how in ("written", "plan"):
            found[f"mlp, {kind}, {how}"] = Case("mlp", options={"kvstore": kind}, how=how, layouts=layouts)
        if kind != "dist_async":
            sums = {"kvstore": kind, "update_on_kvstore": False}
            found[f"mlp, {kind}, update_on_kvstore=False"] = Case("mlp", "adamw", sums, layouts=layouts)
    found["conv, dist_sync"] = Case("conv", options={"kvstore": "dist_sync"}, layouts=("1 rank", "2 ranks"))
    return found


def train(case: Case, world: Any) -> Result:
    """Train a case; every rank calls."""
    net = NETS[case.net]()
    trainer = hpcdp.Trainer(net.parameters(), RULES[case.rule](), world, **case.options)
    step_of: Callable[[int], list[Any]]
    if case.how == "plan":
        planned = TrainStep(net, trainer)
        planned.hybridize()
        step_of = lambda step: [planned(*batch(case.net, step, world.rank, 6))[0].asnumpy()]  # noqa: E731
    else:
        if case.how == "network":
            net.hybridize()
        step_of = lambda step: written(case, net, trainer, world, step)  # noqa: E731
    losses = [step_of(step) for step in range(STEPS)]
    if not trainer.steps_together:
        trainer.synchronize()
    values = [param.asnumpy() for _, param in net.named_parameters()]
    buffers = [tensor.asnumpy() for _, tensor in net.named_buffers()]
    result = {
        "losses": [digest(*of_step) for of_step in losses],
        "values": digest(*values, *buffers),
        "last": float(np.mean([np.mean(array, dtype=np.float64) for array in losses[-1]])),
    }
    return of_all_ranks(result, world)


def written(case: Case, net: nn.Module, trainer: Any, world: Any, step: int) -> list[Any]:
    """Take one step as a loop writes it, and return the losses of its backwards."""
    if trainer.virtual_shards is not None:
        pieces = [batch(case.net, step, shard, 3) for shard in trainer.own_virtual_shards]
    else:
        size = 0 if case.how == "uneven" and world.size > 1 and (step + world.rank) % world.size == 0 else 6
        pieces = [batch(case.net, step, world.rank, size)]
        if case.how == "accumulated":
            pieces.append(batch(case.net, step, world.rank + 100, 4))
    losses = []
    for number, (x, y) in enumerate(pieces):
        last = number == len(pieces) - 1 or trainer.virtual_shards is not None
        if "policy" in case.options and step == 7 and world.rank == 0:
            x = x * np.float32("inf")
        with contextlib.nullcontext() if last else trainer.no_sync():
            if len(y):
                with autograd.record():
                    loss = nn.functional.softmax_cross_entropy(net(x), y)
                loss.backward(trainer.loss_scale)
                losses.append(loss.asnumpy())
            if case.how == "by hand":
                trainer.allreduce_grads()
                for param in net.parameters():
                    param.grad *= np.float32(0.5)
                trainer.update(len(y))
            else:
                trainer.step(len(y))
    return losses or [np.zeros(1)]


def of_all_ranks(result: Result, world: Any) -> Result:
    """Return one result of those of all ranks."""
    results = world.comm.allgather_json(result)
    return {
        "losses": [
            digest(np.array([each["losses"][step] for each in results])) for step in range(len(result["losses"]))
        ],
        "values": digest(np.array([each["values"] for each in results])),
        "last": results[0]["last"],
    }


def bits_of_collectives(world: Any) -> Result:
    """Reduce, scatter and gather arrays of several lengths and dtypes; every rank calls."""
    found = []
    for count in (1, 7, 1000, 40_000, 600_000):
        for dtype in (np.float32, np.float64, np.float16, np.int64):
            rng = np.random.default_rng([19, count, world.rank])
            values = (rng.standard_normal(count) * 8).astype(dtype)
            found += [hpcdp.allreduce(values.copy(), how) for how in ("sum", "max")]
        found.append(hpcdp.allgather(values[:50].astype(np.float32)))
        found.append(hpcdp.broadcast(values.copy(), world.size - 1))
    return of_all_ranks({"losses": [], "values": digest(*found), "last": 0.0}, world)


def bits_of_store(kind: str, world: Any) -> Result:
    """Push to and pull from a store without a trainer; every rank calls."""
    store = kvstore.create(kind, world)
    store.init([1, 2], [np.ones((40, 3), np.float32), np.zeros(70_000, np.float32)])
    store.set_optimizer(optim.SGD(lr=0.1, momentum=0.9))
    found = []
    for step in range(STEPS):
        for key, shape in ((1, (40, 3)), (2, (70_000,))):
            pushed = np.random.default_rng([23, step, key, world.rank]).standard_normal(shape).astype(np.float32)
            if step % 2:
                store.pushpull(key, pushed)
                found.append(digest(pushed))
            else:
                store.push(key, pushed)
                found.append(digest(np.asarray(store.pull(key))))
    store.barrier()
    return of_all_ranks({"losses": found, "values": "", "last": 0.0}, world)


def bits_of_torch(kind: str, world: Any) -> Result:
    """Train a module of PyTorch; every rank calls."""
    import torch

    import hpcdp.torch

    torch.manual_seed(3)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(12, 32), hpcdp.torch.SyncBatchNorm(32), torch.nn.ReLU(),
                              torch.nn.Linear(32, 4))  # fmt: skip
    if kind == "shard":
        model = hpcdp.torch.DistributedDataParallel(net, world, owner="shard", broadcast_buffers=False)
        optimizer: Any = hpcdp.torch.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    else:
        compression = None if kind == "rank" else kind
        model = hpcdp.torch.DistributedDataParallel(net, world, compression=compression)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = (torch.from_numpy(array) for array in batch("mlp", step, world.rank, 6))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().numpy())
    result = {
        "losses": [digest(loss) for loss in losses],
        "values": digest(*(tensor.detach().numpy() for tensor in net.state_dict().values())),
        "last": float(losses[-1]),
    }
    return of_all_ranks(result, world)


def jobs_of(layout: str, only: str) -> dict[str, Callable[[Any], Result]]:
    """Return what runs in a layout, by name: functions of the world."""
    jobs: dict[str, Callable[[Any], Result]] = {
        name: partial(train, case) for name, case in cases().items() if layout in case.layouts
    }
    ranks, _, servers = LAYOUTS[layout]
    for kind in ("dist_sync", "dist_async") if ranks == 1 else ("dist_sync",):
        jobs[f"store {kind}"] = partial(bits_of_store, kind)
    if not servers:
        jobs["collectives"] = bits_of_collectives
        if importlib.util.find_spec("torch"):
            for kind in ("rank", "shard", "2bit:inside_nodes=on")[: 3 if ranks > 1 else 2]:
                jobs[f"torch {kind}"] = partial(bits_of_torch, kind)
    return {f"{layout}: {name}": job for name, job in jobs.items() if only in f"{layout}: {name}"}


def run_command(ranks: int, arguments: list[str]) -> Result:
    """Train by `hpcdp train`, and read what it has written."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ["mlp", "--data", "digits", "--epochs", "2", "--ranks", str(ranks), "--run-dir", f"{folder}/run"]
        start = [sys.executable, "-m", "hpcdp.cli"]
        subprocess.run([*start, "train", *settings, *arguments], check=True, stdout=subprocess.DEVNULL, env=environ())
        export = ["checkpoint", "export", f"{folder}/run", f"{folder}/net.npz"]
        subprocess.run([*start, *export], check=True, stdout=subprocess.DEVNULL, env=environ())
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        with np.load(f"{folder}/net.npz") as file:
            values = [file[name] for name in sorted(file.files) if not name.startswith("meter")]  # those have times
    names = ("step", "loss", "accuracy", "samples", "learning_rate", "test_loss", "test_accuracy")
    losses = [digest(np.array([line.get(name) or -1 for name in names])) for line in lines]
    return {"losses": losses, "values": digest(*values), "last": lines[-1]["loss"]}


COMMANDS = {
    "hpcdp train mlp, 1 rank": (1, []),
    "hpcdp train mlp, 2 ranks": (2, []),
    "hpcdp train mlp, 2 ranks, hybridized": (2, ["--hybridize", "--owner", "shard"]),
    "hpcdp train mlp, 2 ranks, dist_sync": (2, ["--kv-store", "dist_sync"]),
    "hpcdp train mlp, 2 ranks, reproducible": (2, ["--reproducible"]),
}


def environ(per_node: int = 0) -> dict[str, str]:
    """Return an environment in which nothing but the code decides the bits."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HPCDP_", "OMPI_", "PMI"))}
    kept |= {name: os.environ[name] for name in ("HPCDP_CACHE_DIR",) if name in os.environ}
    kept |= {"OMP_NUM_THREADS": "1", "HPCDP_TUNING_DIR": "/nonexistent"}
    return kept | ({"HPCDP_RANKS_PER_NODE": str(per_node)} if per_node else {})


def run_all(only: str) -> dict[str, Result]:
    """Run every layout in a job of its own, then the commands."""
    found: dict[str, Result] = {}
    for layout, (ranks, per_node, servers) in LAYOUTS.items():
        if not jobs_of(layout, only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "results.json")
            launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(ranks)]
            launch += ["-s", str(servers)] if servers else []
            program = [sys.executable, __file__, "--layout", layout, "--results", str(path), "--only", only]
            subprocess.run([*launch, "--", *program], check=True, env=environ(per_node), timeout=LIMIT_S)
            results = json.loads(path.read_text())
        found |= results
        print(f"{layout}: {len(results)} cases", flush=True)
    for name, (ranks, arguments) in COMMANDS.items():
        if only in name:
            found[name] = run_command(ranks, arguments)
    return found


def difference(before: Result, after: Result) -> str:
    """Say where two results of a case differ; empty where they are the same."""
    pairs = list(zip(before["losses"], after["losses"], strict=False))
    step = next((number for number, (a, b) in enumerate(pairs) if a != b), None)
    if step is not None:
        return f"losses from step {step} on; the last ones are {before['last']!r} and {after['last']!r}"
    return "" if before == after else f"values at the end; the last losses are {before['last']!r} and {after['last']!r}"


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has this in it")
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layout:
        warnings.simplefilter("ignore")
        world = hpcdp.init()
        results = {name: job(world) for name, job in jobs_of(options.layout, options.only).items()}
        if world.rank == 0:
            options.results.write_text(json.dumps(results))
        return 0
    if (options.write is None) == (options.compare is None):
        parser.error("expected --write FILE or --compare FILE")
    print(f"hpcdp of {Path(hpcdp.__file__).parents[1]}", flush=True)
    found = run_all(options.only)
    if options.write is not None:
        options.write.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} cases")
        return 0
    before = {name: case for name, case in json.loads(options.compare.read_text()).items() if options.only in name}
    faults = [f"{name}: only in one of both" for name in sorted(before.keys() ^ found.keys())]
    for name in before.keys() & found.keys():
        if text := difference(before[name], found[name]):
            faults.append(f"{name}: {text}")
    print("\n".join(sorted(faults)))
    print(f"{len(found)} cases, {len(faults)} differ")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
