"""Training on parts times replicas goes as that of the unsplit model on one rank, whatever looks at whole models."""

import os

import numpy as np
import pytest
from pairs import pairs
from raises import raises
from split_networks import convolutions, mlp, normal, own

import hpcdp
from hpcdp import autograd, data, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data_parallel.sharded_update import squares_of_model
from hpcdp.errors import ConfigError, MismatchError
from hpcdp.parallel import ColumnDense, Pipeline, RowDense, split_world
from hpcdp.parallel.pipeline import Split
from hpcdp.train.fit import fit
from hpcdp.train.trainer import Trainer

LOSS = nn.functional.softmax_cross_entropy
STEPS, BATCH = 4, 12
SHAPES = {mlp: (6,), convolutions: (1, 8, 8)}


def batch(make, step):
    rng = np.random.default_rng(step)
    return rng.normal(size=(BATCH, *SHAPES[make])).astype("f4"), rng.integers(0, 4, BATCH)


def train(make, split, optimizer, **settings):
    """The network and the sums of its losses, after a few steps; ``split`` None: whole, on one rank."""
    lonely = split is None
    split = (
        Split(thread_comm.run(1, lambda world: world)[0], thread_comm.run(1, lambda world: world)[0])
        if lonely
        else split
    )
    net = make(None if lonely else split.parts)
    copies = split.replicas
    trainer = Trainer(net.parameters(), optimizer(), copies, **settings)
    losses = []
    for step in range(STEPS):
        x, y = batch(make, step)
        for shard in trainer.own_virtual_shards:
            number, index = (
                (trainer.virtual_shards or copies.size),
                (copies.rank if not trainer.virtual_shards else shard),
            )
            mine = slice(BATCH * index // number, BATCH * (index + 1) // number)
            with autograd.record():
                loss = LOSS(net(x[mine]), y[mine])
            loss.backward()
            trainer.step(len(y[mine]))
            losses.append(loss.data.sum(dtype="f8"))
    if not lonely:
        copies.comm.barrier()
        losses = np.sum(copies.comm.allgather_json([float(each) for each in losses]), axis=0)
    return net, losses


OPTIMIZERS = {
    "sgd": (lambda: optim.SGD(lr=0.5, momentum=0.9), {}),
    "clipped": (lambda: optim.SGD(lr=0.5, momentum=0.9), {"clip_norm": 0.05}),
    "lars": (lambda: optim.LARS(lr=1.0, trust=0.1, weight_decay=0.01), {}),
    "adam, beside": (lambda: optim.Adam(lr=0.01), {"overlap": True}),
}


@pytest.mark.parametrize(
    ("layout", "make", "kind", "owner"),
    pairs(
        [(1, 1, None), (2, 2, None), (3, 3, 2), (4, 2, 2), (4, 4, None)], [mlp, convolutions], OPTIMIZERS,
        ["rank", "shard"],
    ),
)  # fmt: skip
def test_losses_and_parameters_are_those_of_the_unsplit_model(layout, make, kind, owner):
    (n, num_parts, per_node), (optimizer, settings) = layout, OPTIMIZERS[kind]
    whole, losses = train(make, None, optimizer, **settings)
    assert losses[-1] != losses[0]

    def rank(world):
        net, found = train(make, split_world(num_parts, world), optimizer, owner=owner, **settings)
        np.testing.assert_allclose(found, losses, rtol=1e-4)
        values = dict(whole.named_parameters())
        for name, param in net.named_parameters():
            np.testing.assert_allclose(param.data, own(values[name].data, param), rtol=1e-3, atol=1e-4, err_msg=name)

    thread_comm.run(n, rank, per_node)


@pytest.mark.ordinary_ranks(2, 4)
@pytest.mark.mpi
@pytest.mark.parametrize("make", [mlp, convolutions])
def test_on_real_ranks(make):
    world = hpcdp.init()
    if world.size > 4:
        pytest.skip("needs no more ranks than the smallest layer has features, 4")
    for num_parts in {world.size, world.size // 2 if world.size % 2 == 0 else world.size}:
        settings = {"clip_norm": 0.05}
        optimizer = OPTIMIZERS["clipped"][0]
        whole, losses = train(make, None, optimizer, **settings)
        net, found = train(make, split_world(num_parts, world), optimizer, **settings)
        np.testing.assert_allclose(found, losses, rtol=1e-4)
        values = dict(whole.named_parameters())
        for name, param in net.named_parameters():
            np.testing.assert_allclose(param.data, own(values[name].data, param), rtol=1e-3, atol=1e-4)


def test_a_norm_counts_what_is_whole_once_and_every_part():
    """In whole numbers, so exactly: the same norm on any number of parts."""

    def rank(world, num_parts):
        parts, replicas = split_world(num_parts, world)
        net = nn.Sequential(ColumnDense(6, 10, parts), RowDense(10, 7, parts), nn.Dense(7, 3))
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.0), replicas)
        for param in trainer.reducer.params.values():
            shape = param.data.shape if param.cut is None else param.cut.whole(param.data.shape)
            param.grad[...] = own(np.arange(np.prod(shape), dtype="f4").reshape(shape) % 7, param)
            param.grad_hook(param)
        trainer.allreduce_grads()
        return squares_of_model(trainer.reducer) ** 0.5

    norms = {n: thread_comm.run(n, lambda world, n=n: rank(world, n)) for n in (1, 2, 3, 5)}
    assert {each for found in norms.values() for each in found} == {norms[1][0]} and norms[1][0] > 0
    np.testing.assert_allclose(thread_comm.run(4, lambda world: rank(world, 2)), 2 * norms[1][0])


def test_a_reproducible_trainer_gives_the_same_bits_on_any_number_of_replicas():
    def rank(world):
        net, _ = train(mlp, split_world(2, world), OPTIMIZERS["clipped"][0], reproducible=True, virtual_shards=4,
                       clip_norm=0.05)  # fmt: skip
        return [param.data.copy() for param in net.parameters()]

    two, four, eight = (thread_comm.run(n, rank)[:2] for n in (2, 4, 8))
    for part in range(2):
        for a, b, c in zip(two[part], four[part], eight[part], strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)


@pytest.mark.parametrize("compression", [None, "fp16", "bf16"])
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_what_is_whole_stays_alike_to_the_bit(owner, compression):
    """Where parts differ in size, and sums over nodes depend on where in a message an element lies."""

    def rank(world):
        parts, replicas = split_world(2, world)
        net = nn.Sequential(
            nn.Dense(6, 171, weight_init=normal(1)), nn.Dense(171, 171, activation="relu", weight_init=normal(2)),
            ColumnDense(171, 15, parts, activation="relu", weight_init=normal(3)),
            RowDense(15, 181, parts, weight_init=normal(4)), nn.Dense(181, 4, weight_init=normal(5)),
        )  # fmt: skip
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), replicas, owner=owner,
                          compression=compression)  # fmt: skip
        for step in range(STEPS):
            x, y = batch(mlp, step * 10 + replicas.rank)
            with autograd.record():
                loss = LOSS(net(x), y)
            loss.backward()
            trainer.step(len(y))
        world.comm.barrier()
        return {name: param.data.copy() for name, param in net.named_parameters() if param.cut is None}

    first, *others = thread_comm.run(6, rank, ranks_per_node=2)
    for found in others:
        for name, values in first.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_what_is_whole_begins_alike_without_a_seed():
    def rank(world):
        parts, replicas = split_world(2, world)
        net = nn.Sequential(ColumnDense(6, 8, parts), RowDense(8, 7, parts), nn.Dense(7, 4))
        Trainer(net.parameters(), optim.SGD(lr=0.1), replicas)
        return net[2].weight.data.copy(), net[0].weight.data.copy()

    found = thread_comm.run(4, rank)
    for whole, part in found[1:]:
        np.testing.assert_array_equal(whole, found[0][0])
        assert not np.array_equal(part, found[0][1]) or part is found[2][1]
    np.testing.assert_array_equal(found[2][1], found[0][1])
    np.testing.assert_array_equal(found[3][1], found[1][1])


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["sgd", "clipped"])
@pytest.mark.parametrize(("n", "num_parts"), [(2, 2), (4, 2), (8, 2), (6, 3)])
def test_stages_of_a_pipeline_may_be_split(n, num_parts, kind):
    optimizer, settings = OPTIMIZERS[kind]
    whole, losses = train(mlp, None, optimizer, **settings)
    values = dict(whole.named_parameters())

    def rank(world):
        parts, across = split_world(num_parts, world)
        stages = [
            lambda: nn.Sequential(
                ColumnDense(6, 10, parts, activation="relu", weight_init=normal(1)),
                RowDense(10, 7, parts, activation="relu", weight_init=normal(2)),
            ),
            lambda: nn.Sequential(ColumnDense(7, 4, parts, weight_init=normal(3), gather=True)),
        ]
        net = Pipeline(stages, LOSS, across, micro_batches=3)
        copies = net.replicas
        trainer = Trainer(net.parameters(), optimizer(), copies, **settings)
        mine = slice(BATCH * copies.rank // copies.size, BATCH * (copies.rank + 1) // copies.size)
        found = []
        for step in range(STEPS):
            x, y = batch(mlp, step)
            found.append(net.step(trainer, x[mine], y[mine]))
        world.comm.barrier()
        np.testing.assert_allclose(np.sum(copies.comm.allgather_json(found), axis=0), losses, rtol=1e-4)
        for name, param in net.named_parameters():
            stage, layer, what = name.split(".")
            expected = values[f"{2 * int(stage) + int(layer)}.{what}"].data
            np.testing.assert_allclose(param.data, own(expected, param), rtol=1e-3, atol=1e-4, err_msg=name)

    thread_comm.run(n, rank)


@pytest.mark.parametrize("make", [mlp, convolutions])
def test_the_digits_are_learnt_along_the_curve_of_the_unsplit_model(make):
    """By `fit`, in epochs whose last batch is short, so that copies have different numbers of samples."""
    x, y = data.load("digits", split="train")[np.arange(301)]
    x = x if make is convolutions else x.reshape(301, 64)

    def curve(world, num_parts):
        parts, replicas = split_world(num_parts, world)
        given = None if world.size == 1 else parts
        net = make(given, nn.init.Xavier, classes=10) if make is convolutions else make(given, nn.init.Xavier, 64, 10)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), replicas)
        sampler = data.ShardedSampler(len(x), 24, num_parts=replicas.size, part_index=replicas.rank, seed=3)
        loader = data.DataLoader(data.ArrayDataset(x, y), sampler, prefetch=0)
        records = fit(net, trainer, loader, epochs=3, loss=LOSS, world=replicas)
        return [record["loss"] for record in records]

    alone = thread_comm.run(1, lambda world: curve(world, 1))[0]
    assert alone[-1] < 0.8 * alone[0]
    for n, num_parts in ((2, 2), (3, 3), (4, 2), (4, 4)) if os.environ.get("HPCDP_TEST_THOROUGH") else ((3, 3), (4, 2)):
        for found in thread_comm.run(n, lambda world, num_parts=num_parts: curve(world, num_parts)):
            np.testing.assert_allclose(found, alone, rtol=2e-3)


def test_parts_and_replicas():
    def rank(world):
        parts, replicas = split_world(2, world)
        return parts.rank, parts.size, replicas.rank, replicas.size, replicas.part_comm.rank, parts.part_comm

    assert thread_comm.run(6, rank) == [(r % 2, 2, r // 2, 3, r % 2, None) for r in range(6)]


@pytest.mark.parametrize("num_parts", [0, 3, -1, 2.0, None])
def test_numbers_of_parts_that_cannot_be(num_parts):
    with raises(ConfigError, operation="split_world", where="num_parts", expected=4):
        thread_comm.run(4, lambda world: split_world(num_parts, world))


def test_ranks_that_disagree_and_trainers_that_cannot_be(tmp_path):
    with raises(
        MismatchError,
        operation="split_world",
        where="item 1 of 1 on rank 0",
        expected=["num_parts", 1, "rank 0"],
        got=["num_parts", 2],
    ):
        thread_comm.run(2, lambda world: split_world(world.rank + 1, world))

    def differ(world):
        parts, replicas = split_world(2, world)
        net = nn.Sequential(ColumnDense(6, 8, parts), *([nn.Dense(4, 4)] if world.rank else []))
        Trainer(net.parameters(), optim.SGD(lr=0.1), replicas)

    with raises(MismatchError, operation="Trainer", where="item 3 of 3 on rank 0", got=1):
        thread_comm.run(2, differ)

    def rank(world):
        parts, replicas = split_world(2, world)
        net = mlp(parts)
        with raises(ConfigError, operation="Trainer", where="0.weight", expected=(6, 10), got=(6, 5)):
            Trainer(net.parameters(), optim.SGD(lr=0.1), world)
        with raises(ConfigError, operation="Trainer", where="0.weight"):
            Trainer(net.parameters(), optim.SGD(lr=0.1), replicas, kvstore="dist_sync")
        with raises(ConfigError, operation="Trainer", where="compression", expected=["fp16", "bf16"], got="2bit"):
            Trainer(net.parameters(), optim.SGD(lr=0.1), replicas, compression="2bit")
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), replicas)
        for call in (trainer.save_states, trainer.load_states):
            with raises(ConfigError, where="0.weight", remedy="checkpoint.Manager(path, world)"):
                call(tmp_path / "states")

    thread_comm.run(2, rank)


@pytest.mark.parametrize("by_hand", [False, True])
def test_parts_of_one_replica_drop_the_same_and_replicas_do_not(by_hand):
    def one(world):
        split = Split(world.split(world.rank // 2), world) if by_hand else split_world(2, world)
        net = nn.Sequential(RowDense(4, 64, split.parts, scatter=True), nn.Dropout(0.5, seed=3))
        with autograd.train_mode():
            return net[1](np.ones(64, "f4")).data

    masks = thread_comm.run(6, one)
    for first, second in ((0, 1), (2, 3), (4, 5)):
        np.testing.assert_array_equal(masks[first], masks[second])
    assert len({mask.tobytes() for mask in masks}) == 3


def test_stages_of_one_replica_drop_what_the_whole_model_does_on_its_rank():
    def stages():
        return [nn.Sequential(nn.Dense(3, 32), nn.Dropout(0.5, seed=number)) for number in (1, 2)]

    def dropped(net):
        with autograd.train_mode():
            return {name: layer(np.ones(32, "f4")).data.tobytes() for name, layer in net._modules("")
                    if isinstance(layer, nn.Dropout)}  # fmt: skip

    whole = thread_comm.run(2, lambda world: dropped(Pipeline(stages(), LOSS, world=world.split(world.rank))))
    of_ranks = thread_comm.run(4, lambda world: dropped(Pipeline(stages(), LOSS, world=world)))
    for rank, found in enumerate(of_ranks):
        assert found.items() <= whole[rank % 2].items()
    assert len({mask for found in of_ranks for mask in found.values()}) == 4
