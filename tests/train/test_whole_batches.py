"""What needs each rank's whole batch, or all ranks, where there are pieces, other data or ranks that do not wait."""

import numpy as np
import pytest
from raises import raises

import hpcdp
from hpcdp import data, nn, optim
from hpcdp.autograd import record
from hpcdp.comm import thread_comm
from hpcdp.data import ArrayDataset, DataLoader, ShardedSampler
from hpcdp.errors import ConfigError, MismatchError
from hpcdp.parallel import Pipeline
from hpcdp.train import SyncBatchNorm, TrainStep
from hpcdp.train.callbacks import AdaptWorkLoad
from hpcdp.train.fit import fit
from hpcdp.train.metrics import Evaluation, evaluate

CE = nn.functional.softmax_cross_entropy
RNG = np.random.default_rng(3)
X, Y = RNG.standard_normal((101, 4)).astype(np.float32), RNG.integers(0, 3, 101)


def network():
    return nn.Sequential(
        nn.Dense(4, 5, weight_init=nn.init.Xavier(1)), nn.BatchNorm(5), nn.Dense(5, 3, weight_init=nn.init.Xavier(2))
    )  # fmt: skip


def stages():
    whole = network()
    return [nn.Sequential(whole[0], whole[1]), whole[2]]


def test_replicas_refuse_layers_of_all_ranks():
    def job(world):
        net = SyncBatchNorm.convert(network(), world)
        nn.Replicas(net, [hpcdp.cpu(0)])
        with raises(ConfigError, operation="Replicas", got="SyncBatchNorm"):
            nn.Replicas(net, [hpcdp.cpu(0), hpcdp.cpu(1)])
        replicas = nn.Replicas(network(), [hpcdp.cpu(0), hpcdp.cpu(1)])
        for each in (replicas, nn.Sequential(replicas)):
            with raises(ConfigError, operation="SyncBatchNorm.convert", got="Replicas"):
                SyncBatchNorm.convert(each, world)
        with raises(ConfigError, operation="SyncBatchNorm.convert", got=3):
            SyncBatchNorm.convert(3, world)

    thread_comm.run(1, job)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_pipeline_refuses_layers_of_all_ranks_on_all_ranks(n):
    def job(world):
        parts = stages()
        SyncBatchNorm.convert(parts[0], world)
        with raises(ConfigError, operation="Pipeline stages[0]", got="SyncBatchNorm"):
            Pipeline(parts, CE, world)
        with raises(ConfigError, operation="SyncBatchNorm.convert", got="Pipeline"):
            SyncBatchNorm.convert(Pipeline(stages(), CE, world), world)

    thread_comm.run(n, job)


@pytest.mark.parametrize("n", [1, 2])
def test_a_pipeline_trains_by_its_own_step(n):
    def job(world):
        net = Pipeline(stages(), CE, world)
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas)
        loader = DataLoader(ArrayDataset(X, Y), ShardedSampler(101, 8))
        for train in (
            lambda: TrainStep(net, trainer),
            lambda: fit(net, trainer, loader, epochs=1, world=world),
        ):
            with raises(ConfigError, where="net", got="Pipeline"):
                train()
        with raises(ConfigError, operation="Pipeline.step", where="trainer", remedy="Trainer"):
            net.step(trainer.optimizer, X[:4], Y[:4])
        with raises(ConfigError, operation="Pipeline.step", got=["ndarray", "NoneType"]):
            net.step(trainer, X[:4], None)
        with record(), raises(ConfigError, operation="Pipeline", got="record()"):
            net(X[:4])
        assert net.step(trainer, X[:4], Y[:4]) > 0 and net(X[:4]).shape == (4, 3)

    thread_comm.run(n, job)


class Returns(nn.Module):
    def __init__(self, what):
        self.what = what

    def forward(self, x):
        return self.what(x)


@pytest.mark.parametrize(
    ("stage", "fields"),
    [
        (3, {"where": "stages[1]", "got": 3}),
        (lambda: None, {"where": "stages[1]", "got": None}),
        (Returns(lambda x: None), {"got": "NoneType"}),
        (Returns(lambda x: (x, x.data)), {"got": ["Tensor", "ndarray"]}),
    ],
)
def test_stages_that_are_none(stage, fields):
    def job(world):
        with raises(ConfigError, operation="Pipeline", **fields):
            net = Pipeline([nn.Dense(4, 3), stage], CE, world)
            trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas)
            net.step(trainer, X[:4], Y[:4])

    thread_comm.run(1, job)


@pytest.mark.parametrize("n", [1, 2])
def test_ranks_that_do_not_wait_take_no_layers_of_all(n):
    def job(world):
        net = SyncBatchNorm.convert(network(), world)
        with raises(ConfigError, operation="Trainer", where="1.gamma", expected="dist_async"):
            hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_async")
        hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync")

    thread_comm.run(n, job)


@pytest.mark.parametrize("n", [1, 2])
def test_layers_that_become_those_of_all_ranks_are_found(n):
    """After what encloses them was made, and has trained."""

    def job(world):
        net = network()
        replicas = nn.Replicas(net, [hpcdp.cpu(0), hpcdp.cpu(1)])
        trainer = hpcdp.Trainer(replicas.parameters(), optim.SGD(lr=0.1), world)
        TrainStep(replicas, trainer)(X[:6], Y[:6])
        SyncBatchNorm.convert(net, world)
        with raises(ConfigError, operation="Replicas", got="SyncBatchNorm"):
            TrainStep(replicas, trainer)(X[:6], Y[:6])
        replicas(X[:6])  # prediction needs no other rank
        parts = stages()
        pipeline = Pipeline(parts, CE, world)
        trainer = hpcdp.Trainer(pipeline.parameters(), optim.SGD(lr=0.1), pipeline.replicas)
        pipeline.step(trainer, X[:6], Y[:6])
        world.barrier()
        SyncBatchNorm.convert(parts[0], world)
        if world.rank == 0:
            with raises(ConfigError, operation="Pipeline.step", got="SyncBatchNorm"):
                pipeline.step(trainer, X[:6], Y[:6])
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_async")
        SyncBatchNorm.convert(net, world)
        with raises(ConfigError, operation="Trainer", where="1.gamma", expected="dist_async"):
            trainer.step(1)

    thread_comm.run(n, job)


def test_evaluate_by_ranks_of_which_some_say_own_data_is_refused():
    def job(world):
        evaluate(network(), ArrayDataset(X, Y), world, own_data=world.rank == 1)

    with raises(MismatchError, operation="evaluate", where="item 1 of 2 on rank 0", remedy="own_data=True"):
        thread_comm.run(3, job)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_evaluate_of_data_of_ones_own_counts_all_of_it(n):
    whole = thread_comm.run(1, lambda world: evaluate(network(), ArrayDataset(X, Y), world))[0]

    def job(world):
        ends = [len(X) * number // n for number in range(n + 1)]
        if n > 2:
            ends[1] = 0  # a rank without samples
        own = slice(ends[world.rank], ends[world.rank + 1])
        return evaluate(network(), ArrayDataset(X[own], Y[own]), world, batch_size=7, own_data=True)

    for found in thread_comm.run(n, job):
        assert (found.count, found.correct) == (101, whole.correct)
        np.testing.assert_allclose(found.loss, whole.loss, rtol=1e-6)


@pytest.mark.parametrize("n", [2, 3])
def test_evaluate_refuses_data_that_differ_between_ranks(n):
    def other_length(world):
        evaluate(network(), ArrayDataset(X[world.rank :], Y[world.rank :]), world)

    def other_samples(world):
        own = slice(20 * world.rank, 20 * world.rank + 20)
        evaluate(network(), ArrayDataset(X[own], Y[own]), world)

    for job, fields in (
        (other_length, {"where": "item 1 of 2 on rank 0", "expected": 101}),
        (other_samples, {"where": "item 2 of 2 on rank 0", "expected": "CRC-32"}),
    ):
        with raises(MismatchError, operation="evaluate", remedy="own_data=True", **fields):
            thread_comm.run(n, job)


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (
            lambda world: evaluate(network(), 3, world),
            {"operation": "evaluate", "where": "dataset", "got": "int"},
        ),
        (
            lambda world: evaluate(network(), ArrayDataset(X, Y), world, num_parts=2, own_data=True),
            {"operation": "evaluate", "where": "num_parts", "expected": "own_data", "got": 2},
        ),
        (
            lambda world: DataLoader(ArrayDataset(X, Y), None),
            {"operation": "DataLoader", "where": "sampler", "got": "NoneType"},
        ),
        (
            lambda world: DataLoader(None, ShardedSampler(3, 2)),
            {"operation": "DataLoader", "where": "dataset", "expected": "data.ArrayDataset(x, y)", "got": "NoneType"},
        ),
        (
            lambda world: list(DataLoader(ArrayDataset(X, Y), ShardedSampler(101, 8), transform=lambda x, y: x)),
            {"operation": "DataLoader", "where": "transform", "expected": "(x, y)", "got": "ndarray"},
        ),
        (
            lambda world: evaluate(network(), (X, Y), world),
            {"operation": "evaluate", "where": "dataset", "expected": "data.ArrayDataset(x, y)", "got": "tuple"},
        ),
        (
            lambda world: DataLoader(X, ShardedSampler(3, 2)),
            {"operation": "DataLoader", "where": "dataset", "expected": "data.ArrayDataset(x, y)", "got": "ndarray"},
        ),
        (
            lambda world: DataLoader(ArrayDataset(X, Y), ShardedSampler(3, 2), transform="x"),
            {"operation": "DataLoader", "where": "transform", "got": "x"},
        ),
        (lambda world: data.Augmentation(data.RandomFlip), {"operation": "Augmentation", "where": "changes"}),
        (
            lambda world: AdaptWorkLoad(data.BatchSampler(data.SequentialSampler(9), 4)),
            {"operation": "AdaptWorkLoad", "where": "sampler", "expected": "ShardedSampler"},
        ),
        (
            lambda world: nn.Dense(3, 3, weight_init="xavier"),
            {"operation": "parameter", "where": "weight_init", "got": "xavier"},
        ),
        (lambda world: optim.LARS(lr=1.0, momentum=2.0), {"operation": "LARS", "where": "momentum"}),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(call, fields):
    with raises(ConfigError, **fields):
        thread_comm.run(1, call)


def test_fit_takes_an_evaluation_and_the_loaders_own_shares():
    def fitted(world, **options):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world)
        loader = DataLoader(ArrayDataset(X, Y), ShardedSampler(101, 16))
        return fit(net, trainer, loader, epochs=1, world=world, **options)

    other = AdaptWorkLoad(ShardedSampler(101, 16))
    for options, fields in (
        ({"evaluate": lambda: 0.5}, {"operation": "fit", "where": "evaluate", "expected": ["Evaluation", None]}),
        ({"evaluate": ArrayDataset(X, Y)}, {"operation": "fit", "where": "evaluate", "got": "ArrayDataset"}),
        ({"callbacks": [other]}, {"operation": "AdaptWorkLoad", "where": "sampler", "expected": "sampler"}),
    ):
        with raises(ConfigError, **fields):
            thread_comm.run(1, lambda world, options=options: fitted(world, **options))
    found = thread_comm.run(1, lambda world: fitted(world, evaluate=lambda: Evaluation(0.5, 1.0, 1, 2)))[0]
    assert found[0]["test_accuracy"] == 0.5


def test_a_file_that_is_open_with_locks_is_called_that(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", locking=True) as file:
        file["x"], file["y"] = X, Y
    with (
        h5py.File(path, "r", locking=True),
        raises(hpcdp.HpcdpError, operation="read HDF5", where=path),
    ):
        data.HDF5Dataset(path)
    with h5py.File(path, "r", locking=False):
        assert len(data.HDF5Dataset(path)) == 101
