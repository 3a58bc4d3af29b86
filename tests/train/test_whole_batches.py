"""What needs each rank's whole batch, or all ranks, where there are pieces, other data or ranks that do not wait."""

import numpy as np
import pytest

import hpcdp
from hpcdp import data, nn, optim
from hpcdp.autograd import record
from hpcdp.comm import thread_comm
from hpcdp.data import ArrayDataset, DataLoader, ShardedSampler
from hpcdp.errors import ConfigError, MismatchError
from hpcdp.parallel import Pipeline
from hpcdp.train import SyncBatchNorm, TrainStep
from hpcdp.train.evaluate import Evaluation, evaluate
from hpcdp.train.fit import fit
from hpcdp.train.load_balance import AdaptWorkLoad

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
        with pytest.raises(ConfigError, match=r"Replicas.*layers that do not communicate.*got a SyncBatchNorm"):
            nn.Replicas(net, [hpcdp.cpu(0), hpcdp.cpu(1)])
        replicas = nn.Replicas(network(), [hpcdp.cpu(0), hpcdp.cpu(1)])
        for each in (replicas, nn.Sequential(replicas)):
            with pytest.raises(ConfigError, match="whole batch, got a Replicas, which splits it"):
                SyncBatchNorm.convert(each, world)
        with pytest.raises(ConfigError, match=r"convert: expected a network, got "):
            SyncBatchNorm.convert(3, world)

    thread_comm.run(1, job)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_pipeline_refuses_layers_of_all_ranks_on_all_ranks(n):
    def job(world):
        parts = stages()
        SyncBatchNorm.convert(parts[0], world)
        with pytest.raises(ConfigError, match=r"stages\[0\].*layers that do not communicate.*got a SyncBatchNorm"):
            Pipeline(parts, CE, world)
        with pytest.raises(ConfigError, match="got a Pipeline, which splits it"):
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
            with pytest.raises(ConfigError, match=r"\[net\]: expected a network that is called, got a Pipeline"):
                train()
        with pytest.raises(ConfigError, match="a trainer of the pipeline's replicas, got another"):
            net.step(trainer.optimizer, X[:4], Y[:4])
        with pytest.raises(ConfigError, match="expected samples and a label for each, got a ndarray and a NoneType"):
            net.step(trainer, X[:4], None)
        with record(), pytest.raises(ConfigError, match="a call within record"):
            net(X[:4])
        assert net.step(trainer, X[:4], Y[:4]) > 0 and net(X[:4]).shape == (4, 3)

    thread_comm.run(n, job)


class Returns(nn.Module):
    def __init__(self, what):
        self.what = what

    def forward(self, x):
        return self.what(x)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (3, r"stages\[1\]\]: expected a module, or a function that makes one, got 3"),
        (lambda: None, r"stages\[1\]\]: expected a module, or a function that makes one, got None"),
        (Returns(lambda x: None), "expected stages that return one or more tensors, got a NoneType"),
        (Returns(lambda x: (x, x.data)), "expected stages that return one or more tensors, got a Tensor, a ndarray"),
    ],
)
def test_stages_that_are_none(stage, expected):
    def job(world):
        with pytest.raises(ConfigError, match=expected):
            net = Pipeline([nn.Dense(4, 3), stage], CE, world)
            trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas)
            net.step(trainer, X[:4], Y[:4])

    thread_comm.run(1, job)


@pytest.mark.parametrize("n", [1, 2])
def test_ranks_that_do_not_wait_take_no_layers_of_all(n):
    def job(world):
        net = SyncBatchNorm.convert(network(), world)
        with pytest.raises(ConfigError, match=r"Trainer.*layers without communication with dist_async"):
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
        with pytest.raises(ConfigError, match=r"Replicas.*layers that do not communicate"):
            TrainStep(replicas, trainer)(X[:6], Y[:6])
        replicas(X[:6])  # prediction needs no other rank
        parts = stages()
        pipeline = Pipeline(parts, CE, world)
        trainer = hpcdp.Trainer(pipeline.parameters(), optim.SGD(lr=0.1), pipeline.replicas)
        pipeline.step(trainer, X[:6], Y[:6])
        world.barrier()
        SyncBatchNorm.convert(parts[0], world)
        if world.rank == 0:
            with pytest.raises(ConfigError, match=r"Pipeline.step.*layers that do not communicate"):
                pipeline.step(trainer, X[:6], Y[:6])
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_async")
        SyncBatchNorm.convert(net, world)
        with pytest.raises(ConfigError, match=r"layers without communication with dist_async"):
            trainer.step(1)

    thread_comm.run(n, job)


def test_evaluate_by_ranks_of_which_some_say_own_data_is_refused():
    def job(world):
        evaluate(network(), ArrayDataset(X, Y), world, own_data=world.rank == 1)

    with pytest.raises(MismatchError, match=r"evaluate.*own_data=True on all"):
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

    for job, expected in ((other_length, "of 101 samples"), (other_samples, "a first sample with CRC-32")):
        with pytest.raises(MismatchError, match=f"evaluate.*{expected}.*own_data=True on all"):
            thread_comm.run(n, job)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda world: evaluate(network(), 3, world),
            r"evaluate \[dataset\]: expected a data set, such as .*, got an int",
        ),
        (
            lambda world: evaluate(network(), ArrayDataset(X, Y), world, num_parts=2, own_data=True),
            r"\[num_parts\]: expected None with own_data, got 2",
        ),
        (lambda world: DataLoader(ArrayDataset(X, Y), None), r"\[sampler\]: expected a sampler of batches.*NoneType"),
        (
            lambda world: DataLoader(None, ShardedSampler(3, 2)),
            r"\[dataset\]: expected a data set, such as .*, got a NoneType",
        ),
        (
            lambda world: list(DataLoader(ArrayDataset(X, Y), ShardedSampler(101, 8), transform=lambda x, y: x)),
            r"\[transform\]: expected a function that returns \(x, y\), got a ndarray",
        ),
        (lambda world: evaluate(network(), (X, Y), world), r"such as data.ArrayDataset\(x, y\), got a tuple"),
        (lambda world: DataLoader(X, ShardedSampler(3, 2)), r"such as data.ArrayDataset\(x, y\), got a ndarray"),
        (
            lambda world: DataLoader(ArrayDataset(X, Y), ShardedSampler(3, 2), transform="x"),
            r"\[transform\]: .*got 'x'",
        ),
        (lambda world: data.Augmentation(data.RandomFlip), r"\[changes\]: expected functions of a sample"),
        (lambda world: AdaptWorkLoad(data.BatchSampler(data.SequentialSampler(9), 4)), "a ShardedSampler, got"),
        (
            lambda world: nn.Dense(3, 3, weight_init="xavier"),
            r"\[weight_init\]: expected a function of a shape, such as",
        ),
        (lambda world: optim.LARS(lr=1.0, momentum=2.0), "lars momentum"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(call, expected):
    with pytest.raises(ConfigError, match=expected):
        thread_comm.run(1, call)


def test_fit_takes_an_evaluation_and_the_loaders_own_shares():
    def fitted(world, **options):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world)
        loader = DataLoader(ArrayDataset(X, Y), ShardedSampler(101, 16))
        return fit(net, trainer, loader, epochs=1, world=world, **options)

    other = AdaptWorkLoad(ShardedSampler(101, 16))
    for options, expected in (
        ({"evaluate": lambda: 0.5}, r"\[evaluate\]: expected an Evaluation, or None, got"),
        ({"evaluate": ArrayDataset(X, Y)}, r"\[evaluate\]: expected a function, got an ArrayDataset"),
        ({"callbacks": [other]}, r"AdaptWorkLoad \[sampler\]: expected the sampler of the loader"),
    ):
        with pytest.raises(ConfigError, match=expected):
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
        pytest.raises(hpcdp.HpcdpError, match=r"has not opened with locks, got one opened with locks; .*locking=False"),
    ):
        data.HDF5Dataset(path)
    with h5py.File(path, "r", locking=False):
        assert len(data.HDF5Dataset(path)) == 101
