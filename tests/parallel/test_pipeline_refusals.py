"""What a pipeline refuses, in one line and on all ranks."""

import pytest
from pipelined_network import LOSS, batch, stages
from raises import raises

from hpcdp import nn, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, DataError, MismatchError
from hpcdp.parallel import Pipeline, split_world
from hpcdp.train.trainer import Trainer


@pytest.mark.parametrize(
    ("n", "settings", "fields"),
    [
        (3, {}, {"where": "world", "expected": [1, 2], "got": 3}),
        (2, {"schedule": "2f2b"}, {"where": "schedule", "got": "2f2b"}),
        (2, {"schedule": ["gpipe"]}, {"where": "schedule", "got": "['gpipe']"}),
        (2, {"micro_batches": 0}, {"where": "micro_batches", "expected": 1, "got": 0}),
        (2, {"micro_batches": 1.5}, {"where": "micro_batches", "expected": 1, "got": 1.5}),
    ],
)
def test_what_cannot_be(n, settings, fields):
    with raises(ConfigError, operation="Pipeline", **fields):
        thread_comm.run(n, lambda world: Pipeline(stages(2), LOSS, world, **settings))


def test_what_is_no_world_is_refused():
    def rank(world):
        with raises(ConfigError, operation="Pipeline", where="world", expected=["World", "hpcdp.init()"]):
            Pipeline(stages(2), LOSS, split_world(1, world))

    thread_comm.run(2, rank)


def test_ranks_that_say_different_things():
    with raises(MismatchError, operation="Pipeline", where="item 2 of 3 on rank 0", expected="micro_batches"):
        thread_comm.run(2, lambda world: Pipeline(stages(2), LOSS, world, micro_batches=world.rank + 1))


def test_a_trainer_of_another_world_and_labels_that_are_missing():
    def rank(world):
        net = Pipeline(stages(2), LOSS, world)
        x, y = batch(0, 0)
        with raises(MismatchError, operation="Trainer", where="item 1 of 8 on rank 0"):
            Trainer(net.parameters(), optim.SGD(lr=0.1), world)
        with raises(ConfigError, operation="Pipeline.step", where="trainer", remedy="Trainer"):
            net.step(Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas.split(0)), x, y)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas)
        with raises(DataError, operation="Pipeline.step", got=[22, 21]):
            net.step(trainer, x, y[1:])

    thread_comm.run(2, rank)
    with raises(ConfigError, operation="Pipeline", where="stages[1]"):
        thread_comm.run(1, lambda world: Pipeline([*stages(1), lambda: None], LOSS, world))
    with raises(ConfigError, operation="Pipeline", where="stages", expected="list", got="Sequential()"):
        thread_comm.run(1, lambda world: Pipeline(nn.Sequential(), LOSS, world))


@pytest.mark.parametrize("lengths", [(8, 4, 8), (8, 8, 7), (7, 8, 8), (8, 3, 8), (8, 0, 8), (0, 8, 8), (8, 8, 0)])
def test_stages_whose_batches_differ_in_length_are_told(lengths):
    def rank(world):
        net = Pipeline(stages(3), LOSS, world)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas)
        net.step(trainer, *batch(0, 0, lengths[world.rank]))

    with raises(MismatchError, operation="Pipeline.step", where="batch"):
        thread_comm.run(3, rank)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_reproducible_trainer_is_refused(micro_batches):
    def rank(world):
        net = Pipeline(stages(2), LOSS, world, micro_batches=micro_batches)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas, reproducible=True)
        with raises(ConfigError, operation="Pipeline.step", where="trainer", expected="reproducible=True", got=8):
            net.step(trainer, *batch(0, 0))

    thread_comm.run(4, rank)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    ("loss", "fields"),
    [
        (lambda scores, y: LOSS(scores, y).mean(), {"got": "()", "remedy": ["mean()", "sum()"]}),
        (lambda scores, y: LOSS(scores, y).reshape(-1, 1), {"got": (1, 1)}),
    ],
)
def test_a_loss_that_is_not_per_sample_is_refused(n, loss, fields):
    def rank(world):
        net = Pipeline(stages(2), loss, world, micro_batches=22)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas)
        net.step(trainer, *batch(0, net.replicas.rank))

    with raises(ConfigError, operation="Pipeline.step", where="loss", expected=(1,), **fields):
        thread_comm.run(n, rank)


@pytest.mark.parametrize(("loss", "got"), [(lambda *_: None, "a NoneType"), (lambda *_: 0.5, "a float")])
def test_a_loss_that_is_no_tensor_is_refused(loss, got):
    def rank(world):
        net = Pipeline(stages(2), loss, world, micro_batches=22)
        net.step(Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas), *batch(0, net.replicas.rank))

    with raises(ConfigError, operation="Pipeline.step", where="loss", expected="Tensor", got=got):
        thread_comm.run(2, rank)
