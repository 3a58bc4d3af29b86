"""Ranks that call `fit` with other things are told on all of them, before the first step."""

import numpy as np
import pytest
from raises import raises

from hpcdp import checkpoint, data, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import MismatchError
from hpcdp.train import SyncBatchNorm
from hpcdp.train.callbacks import AdaptWorkLoad, Callback, EarlyStopping
from hpcdp.train.checkpoints import Checkpoints
from hpcdp.train.fit import fit
from hpcdp.train.metrics import evaluate
from hpcdp.train.trainer import Trainer

X, Y = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32), np.arange(40) % 3

SAVED = {
    "checkpoints": {}, "every": {"every": 3}, "resume": {"resume": True}, "extra": {"extra": {"mean": 1}},
    "config": {"config": {"a": 2}},
}  # fmt: skip
"""What of `Checkpoints` is another one."""


def train(world, odd: str | None = None, folder=None):
    other = world.rank == world.size - 1
    net = nn.Sequential(nn.Dense(4, 6), nn.BatchNorm(6), nn.Dense(6, 3))
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world=world)
    if odd == "layers" and not other:
        SyncBatchNorm.convert(net, world)
    settings = {
        "seed": 3 if odd == "seed" and other else 0,
        "shuffle": not (odd == "shuffle" and other),
        "weights": [1] * (world.size - 1) + [2 if odd == "weights" and other else 1],
    }
    batch_size = 9 if odd == "batch_size" and other else 8
    part = {"part": 0, "order": world.size - 1 - world.rank}.get(odd, world.rank)
    sampler = data.ShardedSampler(len(X), batch_size, world.size, part, **settings)
    if odd == "kind" and other:
        sampler = data.BatchSampler(data.SequentialSampler(len(X)), 4)
    callbacks = [Callback()] if world.rank == 0 else []
    if odd == "adapting" and other:
        callbacks.append(AdaptWorkLoad(sampler))
    callbacks.append(EarlyStopping("loss", patience=2 if odd == "patience" and other else 5))
    samples = data.ArrayDataset(X, Y)
    checkpoints = None
    if odd in SAVED:
        manager = checkpoint.Manager(folder, world)
        saved = {"config": {"a": {"b": 1, "c": 2} if other else {"c": 2, "b": 1}}} | (SAVED[odd] if other else {})
        checkpoints = None if odd == "checkpoints" and other else Checkpoints(manager, **saved)
    return len(
        fit(
            net,
            trainer,
            data.DataLoader(samples, sampler, prefetch=0),
            epochs=3 if odd == "epochs" and other else 2,
            evaluate=None if odd == "evaluate" and other else lambda: evaluate(net, samples, world),
            callbacks=callbacks,
            checkpoints=checkpoints,
            world=world,
        )
    )


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("odd", "expected", "got"),
    [
        ("epochs", "epochs 2", "epochs 3"),
        ("seed", "seed=0", "seed=3"),
        ("shuffle", "shuffle=True", "shuffle=False"),
        ("batch_size", "batch_size=8", "batch_size=9"),
        ("weights", "1.0)", "2.0)"),
        ("kind", "ShardedSampler(", "a sampler for each rank alone"),
        ("adapting", "callbacks EarlyStopping(", "callbacks AdaptWorkLoad, EarlyStopping("),
        ("patience", "patience=5", "patience=2"),
        ("evaluate", "evaluate given", "evaluate None"),
        ("layers", "net.1 SyncBatchNorm", "net.1 BatchNorm"),
        ("checkpoints", "checkpoints every=None", "checkpoints None"),
        ("every", "checkpoints every=None", "checkpoints every=3"),
        ("resume", "resume=False", "resume=True"),
        ("extra", "extra=[]", "extra=['mean']"),
        ("config", 'config a = {"b": 1, "c": 2}', "config a = 2"),
    ],
)
def test_what_differs_is_named(ranks, odd, expected, got, tmp_path):
    def job(world):
        with raises(MismatchError, operation="fit", expected="rank 0", got=f"rank {ranks - 1}") as caught:
            train(world, odd, tmp_path)
        assert expected in caught.value.expected and got in caught.value.got
        return True

    assert thread_comm.run(ranks, job) == [True] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_with_one_part_of_the_data_are_refused(ranks):
    def job(world):
        with raises(
            MismatchError,
            operation="fit",
            where="loader",
            expected="part_index",
            got=", ".join(map(str, range(ranks))),
            remedy="part_index=world.rank",
        ):
            train(world, "part")
        return True

    assert thread_comm.run(ranks, job) == [True] * ranks


@pytest.mark.parametrize("odd", [None, "order"])
def test_callbacks_that_only_watch_and_who_has_which_part_may_differ(odd):
    assert thread_comm.run(3, lambda world: train(world, odd)) == [2] * 3


@pytest.mark.parametrize("odd", ["seed", "batch_size"])
def test_virtual_shards_are_compared_too(odd):
    def job(world):
        net = nn.Sequential(nn.Dense(4, 3))
        other = {"batch_size": 8, "seed": 0} | ({odd: 9} if world.rank == 1 else {})
        sampler = data.VirtualShardSampler(len(X), num_shards=4, num_parts=2, part_index=world.rank, **other)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world=world, reproducible=True, virtual_shards=4)
        with raises(MismatchError, operation="fit", where="item 5 of 7 on rank 0", expected=odd, got=[odd, 1]):
            fit(net, trainer, data.DataLoader(data.ArrayDataset(X, Y), sampler), epochs=1, world=world)
        return True

    assert thread_comm.run(2, job) == [True] * 2
