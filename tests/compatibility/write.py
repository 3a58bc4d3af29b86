"""Writes the files in `data/`, which `test_files_of_earlier_versions.py` reads with later code.

    python tests/compatibility/write.py tests/compatibility/data/COMMIT.tar.xz

Run it by the Python of the version whose files are wanted. It uses public names only, so that one program writes with
the earlier code and describes to the test what to read with the later one. Each case trains, saves, notes the values
that it has then (``saved/``), trains on, and notes the values again (``later/``).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import hpcdp
from hpcdp import autograd, checkpoint, data, kvstore, nn, optim

STEPS, FURTHER_STEPS = 4, 3
ROWS = 12
"""Samples of a global batch."""

Values = dict[str, np.ndarray]


class Training:
    """A network of hpcdp in training: what is saved, how a step goes, and which values there are."""

    def __init__(self, net: nn.Module, make_trainer: Callable[[list[nn.Parameter]], hpcdp.Trainer], world: Any) -> None:
        self.net, self.world = net, world
        self.trainer = make_trainer(net.parameters())
        self.state = {"net": net, "trainer": self.trainer, "epoch": 3, "note": "as it was", "losses": [2.5, 1.25]}

    def step(self, number: int) -> None:
        if number == 2:
            self.trainer.optimizer.lr = 0.02  # an assigned rate is part of the state
        x, y = batch(number)
        shards = self.trainer.virtual_shards
        pieces = [slice(self.world.rank, None, self.world.size)]
        if shards is not None:
            pieces = [slice(shard * ROWS // shards, (shard + 1) * ROWS // shards) for shard in
                      self.trainer.own_virtual_shards]  # fmt: skip
        for piece in pieces:
            with autograd.record():
                loss = nn.functional.softmax_cross_entropy(self.net(x[piece]), y[piece])
            loss.backward(self.trainer.loss_scale)
            self.trainer.step(len(y[piece]))

    def values(self) -> Values:
        if not self.trainer.steps_together:
            self.trainer.synchronize()
        found = {name: np.array(param.asnumpy(), np.float32) for name, param in self.net.named_parameters()}
        return found | {"step_count": np.array(self.trainer.step_count)}

    def take(self, values: Mapping[str, np.ndarray]) -> None:
        """Take parameters from elsewhere, because the file holds the optimizer's state alone."""
        with self.trainer.changing_parameters():
            for name, param in self.net.named_parameters():
                param[...] = values[name].astype(param.dtype)

    def save_states(self, path: Path) -> None:
        self.trainer.save_states(path)

    def load_states(self, path: Path, values: Mapping[str, np.ndarray]) -> None:
        self.take(values)
        self.trainer.load_states(path)
        self.trainer.optimizer.lr = 0.02  # the file has no settings


class Store:
    """A key-value store without a trainer."""

    def __init__(self, kind: str, world: Any) -> None:
        self.world = world
        self.store = kvstore.create(kind, world)
        self.store.init([3, 5], [np.ones((2, 3), np.float32), np.zeros(4, np.float32)])
        self.store.set_optimizer(optim.SGD(lr=optim.StepSchedule(0.1, 2), momentum=0.9))
        self.state = {"store": self.store}

    def step(self, number: int) -> None:
        for key, shape in ((3, (2, 3)), (5, (4,))):
            samples = np.random.default_rng([7, number, key]).standard_normal((ROWS, *shape)).astype(np.float32)
            self.store.push(key, samples[self.world.rank :: self.world.size].sum(axis=0))

    def values(self) -> Values:
        self.store.barrier()
        found = {str(key): np.array(np.asarray(self.store.pull(key))) for key in (3, 5)}
        self.store.barrier()
        return found

    def save_states(self, path: Path) -> None:
        self.store.save_optimizer_states(str(path))

    def load_states(self, path: Path, values: Mapping[str, np.ndarray]) -> None:
        for key in (3, 5):
            self.store.assign(key, values[str(key)])
        self.store.load_optimizer_states(str(path))


class TorchTraining:
    """A module of PyTorch in training, on every rank alike or by shards."""

    def __init__(self, world: Any, kind: str) -> None:
        import torch

        import hpcdp.torch

        torch.manual_seed(5)
        self.torch, self.world, self.kind = torch, world, kind
        net = torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Tanh(),
                                  torch.nn.Linear(8, 3))  # fmt: skip
        settings: dict[str, Any] = {"lr": 0.05}
        self.model: Any = net
        if kind == "sharded":
            self.model = hpcdp.torch.DistributedDataParallel(net, world, owner="shard", broadcast_buffers=False)
            self.optimizer: Any = hpcdp.torch.ShardedOptimizer(self.model, torch.optim.AdamW, **settings)
        elif kind == "distributed":
            self.model = hpcdp.torch.DistributedDataParallel(net, world, compression="2bit:inside_nodes=on")
            self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9, **settings)
        else:
            self.optimizer = torch.optim.AdamW(net.parameters(), **settings)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.module = net
        self.state = {"net": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self, number: int) -> None:
        x, y = (self.torch.from_numpy(array) for array in batch(number))
        if self.kind != "plain":
            x, y = x[self.world.rank :: self.world.size], y[self.world.rank :: self.world.size]
        self.optimizer.zero_grad()
        self.torch.nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.scheduler.step()

    def values(self) -> Values:
        found = {name: tensor.detach().numpy().copy() for name, tensor in self.module.named_parameters()}
        return found | {"lr": np.array(self.scheduler.get_last_lr())}


class Loose:
    """What else a state may hold: a loader, generators, what each rank has for itself, a tensor in parts."""

    def __init__(self, world: Any) -> None:
        self.world = world
        x, y = np.arange(120, dtype=np.float32).reshape(60, 2), np.arange(60)
        sampler = data.ShardedSampler(60, 6, world.size, world.rank, seed=4)
        self.loader = data.DataLoader(data.ArrayDataset(x, y), sampler, prefetch=0)
        self.loader.set_epoch(2)
        self._batches = iter(self.loader)
        self.generator = np.random.default_rng(8)
        self.whole = np.zeros((5, 2), np.float64)
        self.drawn = np.zeros(3)
        self.rows = np.zeros(0, np.int64)

    @property
    def state(self) -> dict[str, Any]:
        first, last = (part * 10 // self.world.size for part in (self.world.rank, self.world.rank + 1))
        own = self.whole.reshape(-1)[first:last]
        return {
            "loader": self.loader,
            "generator": self.generator,
            "drawn": self.drawn,
            "own": checkpoint.PerRank({"of": self.world.rank}),
            "whole": checkpoint.Sharded((5, 2), np.dtype("f8"), [checkpoint.Part(first, own)]),
            "numbers": {1: [True, None, 2**70], "of": (1.5, float("inf"), "text")},
        }

    def step(self, number: int) -> None:
        _, y = next(self._batches)
        self.rows = np.sort(np.concatenate(self.world.comm.allgather_json(y.tolist()))).astype(np.int64)
        self.drawn[:] = self.generator.standard_normal(3)
        self.whole += np.arange(10).reshape(5, 2) * number

    def restored(self) -> None:
        """Iterate the loader anew, from where it was."""
        self._batches = iter(self.loader)

    def values(self) -> Values:
        first, last = (part * 10 // self.world.size for part in (self.world.rank, self.world.rank + 1))
        parts = self.world.comm.allgather_json(self.whole.reshape(-1)[first:last].tolist())
        return {"drawn": self.drawn.copy(), "rows": self.rows, "whole": np.concatenate(parts)}


@dataclass(frozen=True)
class Case:
    """One folder of the archive: who trained, on how many ranks, and in which kind of file it is kept.

    Args:
        make: builds what is saved, with values that are not the saved ones.
        ranks: that saved.
        per_node: of them on one virtual node; 0: all.
        manager: the settings of the `checkpoint.Manager`; None: `save_states` has written a file of states.
        goes_on: where training on computes what it did: "anywhere", "alike" (as many ranks and nodes), "never"; "alone"
            cannot be read by several ranks either.
        needs: a module without which it cannot be read.
    """

    make: Callable[[Any], Any]
    ranks: int = 1
    per_node: int = 0
    manager: dict[str, Any] | None = field(default_factory=dict)
    goes_on: str = "anywhere"
    needs: str = "numpy"


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the global batch of a step."""
    rng = np.random.default_rng([11, number])
    return rng.standard_normal((ROWS, 6)).astype(np.float32), rng.integers(0, 3, ROWS)


def plain() -> nn.Module:
    return nn.models.mlp(input_shape=6, num_classes=3, hidden=(8, 5), seed=1)


def layered() -> nn.Module:
    """A network with running statistics and a generator.

    Before a normalization stands no bias: its gradient is rounding noise, which Adam makes steps of.
    """
    init = nn.init.Xavier(seed=2)
    return nn.Sequential(nn.Dense(6, 8, bias=False, weight_init=init), nn.BatchNorm(8), nn.ReLU(),
                         nn.Dropout(0.25, seed=3), nn.Dense(8, 3, weight_init=init))  # fmt: skip


def half() -> nn.Module:
    return plain().to("float16")


def training(network: Callable[[], nn.Module], rule: Callable[[], optim.Optimizer], **options: Any) -> Callable:
    """Return a function that makes a `Training` on a world."""
    return lambda world: Training(network(), lambda params: hpcdp.Trainer(params, rule(), world, **options), world)


def store(kind: str) -> Callable[[Any], Store]:
    return lambda world: Store(kind, world)


def torch_training(kind: str) -> Callable[[Any], TorchTraining]:
    return lambda world: TorchTraining(world, kind)


def momentum() -> optim.Optimizer:
    return optim.SGD(lr=optim.WarmupSchedule(optim.StepSchedule(0.1, 3), 2), momentum=0.9, weight_decay=0.01)


def nesterov() -> optim.Optimizer:
    return optim.SGD(lr=0.05, momentum=0.8, nesterov=True)


def adam() -> optim.Optimizer:
    return optim.Adam(lr=0.01)


def adamw() -> optim.Optimizer:
    return optim.AdamW(lr=optim.CosineSchedule(0.01, 12), weight_decay=0.05)


def lars() -> optim.Optimizer:
    return optim.LARS(lr=0.5, momentum=0.9)


TWO_BITS = "2bit:inside_nodes=on"
STATES: dict[str, Any] = {"manager": None}

CASES = {
    "adamw": Case(training(layered, adamw), goes_on="alike"),
    "momentum-3-ranks": Case(training(plain, momentum, owner="shard"), ranks=3),
    "layered-2-ranks": Case(training(layered, nesterov, owner="rank"), ranks=2, goes_on="alike"),
    "two-nodes": Case(training(plain, momentum, compression="2bit"), ranks=2, per_node=1, goes_on="alike"),
    "node-files": Case(training(plain, adam), ranks=4, per_node=2, manager={"shards": "node"}),
    "gzip": Case(training(plain, adamw, owner="shard"), ranks=2, manager={"compression": "gzip"}),
    "committed": Case(training(plain, lars, clip_norm=1.0), manager={"atomic_rename": False}),
    "half": Case(training(half, momentum, loss_scale="dynamic"), ranks=2),
    "reproducible": Case(training(layered, adam, reproducible=True, virtual_shards=4), ranks=2),
    "loose": Case(Loose, ranks=2),
    "trainer-device": Case(training(plain, momentum, kvstore="device"), goes_on="alone"),
    "trainer-sync": Case(training(plain, momentum, kvstore="dist_sync"), ranks=2),
    "trainer-sync-2bit": Case(
        training(plain, momentum, kvstore="dist_sync", compression="2bit:threshold=0.01"), ranks=2, goes_on="alike"
    ),
    "trainer-sums": Case(training(plain, adamw, kvstore="dist_sync", update_on_kvstore=False), ranks=2),
    "trainer-async": Case(training(plain, momentum, kvstore="dist_async"), ranks=2, goes_on="never"),
    "store-local": Case(store("local"), goes_on="alone"),
    "store-sync": Case(store("dist_sync"), ranks=2),
    "store-async": Case(store("dist_async"), ranks=2, goes_on="never"),
    "torch": Case(torch_training("plain"), needs="torch"),
    "torch-sharded": Case(torch_training("sharded"), ranks=2, goes_on="alike", needs="torch"),
    "torch-compressed": Case(torch_training("distributed"), ranks=2, goes_on="alike", needs="torch"),
    "states-rank": Case(training(plain, momentum, owner="rank"), ranks=2, **STATES),
    "states-shard": Case(training(plain, adamw, owner="shard", overlap=True), ranks=2, **STATES),
    "states-lars": Case(training(plain, lars), **STATES),
    "states-2bit": Case(training(plain, momentum, compression=TWO_BITS), ranks=2, goes_on="alike", **STATES),
    "states-reproducible": Case(training(plain, adam, reproducible=True, virtual_shards=4), ranks=2, **STATES),
    "states-trainer-device": Case(training(plain, momentum, kvstore="device"), goes_on="alone", **STATES),
    "states-trainer-sync": Case(training(plain, adamw, kvstore="dist_sync"), ranks=2, **STATES),
    "states-trainer-sums": Case(
        training(plain, momentum, kvstore="dist_sync", update_on_kvstore=False), ranks=2, **STATES
    ),
    "states-trainer-async": Case(training(plain, momentum, kvstore="dist_async"), goes_on="alike", **STATES),
    "states-store-local": Case(store("local"), goes_on="alone", **STATES),
    "states-store-sync": Case(store("dist_sync"), ranks=2, **STATES),
    "states-store-async": Case(store("dist_async"), goes_on="alike", **STATES),
}


def convolutions() -> tuple[nn.Module, np.ndarray]:
    init = nn.init.Kaiming(seed=6)
    net = nn.Sequential(
        nn.HybridConcurrent(nn.Conv2D(2, 3, 3, padding=1, weight_init=init), nn.Conv2D(2, 1, 1, weight_init=init)),
        nn.BatchNorm(4), nn.ReLU(), nn.MaxPool2D(2), nn.Flatten(), nn.Dropout(0.5, seed=0),
        nn.Dense(36, 5, activation="relu", weight_init=init), nn.Sigmoid(),
    )  # fmt: skip
    return net, np.random.default_rng(9).standard_normal((3, 2, 6, 6)).astype(np.float32)


def recurrent() -> tuple[nn.Module, np.ndarray]:
    net = nn.models.char_lstm(input_shape=(4,), num_classes=6, size=5, seed=7)
    return net, np.random.default_rng(9).integers(0, 6, (3, 4))


def attention() -> tuple[nn.Module, np.ndarray]:
    init = nn.init.Normal(0.3, seed=8)
    net = nn.Sequential(nn.Embedding(6, 8, weight_init=init), nn.LayerNorm(8),
                        nn.CausalSelfAttention(8, 2, weight_init=init), nn.GELU(),
                        nn.Dense(8, 6, weight_init=init))  # fmt: skip
    return net, np.random.default_rng(9).integers(0, 6, (3, 4))


EXPORTS = {"convolutions": convolutions, "recurrent": recurrent, "attention": attention}

RUN_SETTINGS = (
    "mlp", "--data", "mnist", "--batch-size", "16", "--epochs", "1", "--schedule", "constant", "--warmup-epochs", "0",
    "--momentum", "0", "--shift", "0", "--lr", "0.2", "--seed", "5",
)  # fmt: skip


def tiny_mnist(folder: Path) -> None:
    """Write data in MNIST's format: images of 2 x 2, whose label is the brightest pixel."""
    (folder / "mnist").mkdir(parents=True)
    rng = np.random.default_rng(13)
    for name, count in (("train", 64), ("t10k", 32)):
        images = rng.integers(0, 256, (count, 2, 2), np.uint8)
        labels = images.reshape(count, 4).argmax(axis=1).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / "mnist" / f"{name}-{kind}-ubyte").write_bytes(header + array.tobytes())


def write_case(name: str, folder: Path) -> None:
    """Train a case and save it; every rank calls."""
    case, world = CASES[name], hpcdp.init()
    assert (world.size, world.local_size) == (case.ranks, case.per_node or case.ranks)
    run = case.make(world)
    for number in range(STEPS):
        run.step(number)
    expected = {f"saved/{key}": value for key, value in run.values().items()}
    if case.manager is None:
        run.save_states(folder / name / "states")
    else:
        with checkpoint.Manager(folder / name, world, **case.manager) as manager:
            manager.save(STEPS, run.state, metrics={"loss": 0.5}, config={"case": name})
    for number in range(STEPS, STEPS + FURTHER_STEPS):
        run.step(number)
    expected |= {f"later/{key}": value for key, value in run.values().items()}
    if world.rank == 0:
        np.savez(folder / name / "expected.npz", **expected)
        (folder / name / "writer.lock").unlink(missing_ok=True)


def write_export(name: str, folder: Path) -> None:
    net, x = EXPORTS[name]()
    with autograd.record():
        net(x)  # running statistics move
    net.hybridize()
    y = net(x).asnumpy()
    net.export(folder / name)
    np.savez(folder / f"{name}-expected.npz", x=x, y=y)


def write_run(folder: Path) -> None:
    """Train by the command line, and once more for twice as long: what a resumed run is to reach."""
    tiny_mnist(folder / "data")
    train = [sys.executable, "-m", "hpcdp.cli", "train"]
    longer = ["--epochs", "2", "--run-dir", str(folder / "longer")]
    for arguments in (["--run-dir", str(folder / "run")], longer):
        subprocess.run([*train, *RUN_SETTINGS, "--data-dir", str(folder / "data"), *arguments], check=True)
    shutil.copy(folder / "longer" / "metrics.jsonl", folder / "longer.jsonl")
    shutil.rmtree(folder / "longer")
    shutil.rmtree(folder / "data")
    for path in [*folder.rglob("writer.lock"), *folder.rglob("curves.png")]:
        path.unlink()
    config = folder / "run" / "config.toml"
    config.write_text(config.read_text().replace(str(folder), "/earlier"))


def write_all(folder: Path) -> None:
    for name, case in CASES.items():
        assert importlib.util.find_spec(case.needs), f"{case.needs} is needed to write {name}"
        (folder / name).mkdir()
        environ = {**os.environ, **({"HPCDP_RANKS_PER_NODE": str(case.per_node)} if case.per_node else {})}
        launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(case.ranks), "--"]
        subprocess.run([*launch, sys.executable, __file__, str(folder), "--case", name], env=environ, check=True)
    (folder / "exports").mkdir()
    for name in EXPORTS:
        write_export(name, folder / "exports")
    (folder / "weights").mkdir()
    for suffix in ("npz", "safetensors", "pt"):
        command = [sys.executable, "-m", "hpcdp.cli", "checkpoint", "export", str(folder / "momentum-3-ranks"),
                   str(folder / "weights" / f"net.{suffix}"), "--name", "net"]  # fmt: skip
        subprocess.run(command, check=True)
    write_run(folder / "train")


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out of the archive who has written it, and when."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("archive", type=Path, help="a new file, .tar.xz")
    parser.add_argument("--case", help="train and save this one, in the folder `archive`, on the ranks of this job")
    options = parser.parse_args()
    if options.case:
        write_case(options.case, options.archive)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_all(Path(folder))
        with tarfile.open(options.archive, "x:xz") as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.add(path, path.name, filter=anonymous)


if __name__ == "__main__":
    main()
