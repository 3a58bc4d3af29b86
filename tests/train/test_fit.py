import math

import numpy as np
import pytest
from raises import raises

from hpcdp import nn, optim
from hpcdp.checkpoint import Manager
from hpcdp.comm import thread_comm
from hpcdp.data import ArrayDataset, DataLoader, ShardedSampler
from hpcdp.errors import ConfigError
from hpcdp.nn.functional import l2_loss
from hpcdp.parallel.functional import SyncBatchNorm
from hpcdp.train.callbacks import Callback, EarlyStopping, ShowProgress
from hpcdp.train.checkpoints import Checkpoints
from hpcdp.train.fit import fit
from hpcdp.train.metrics import Evaluation, evaluate
from hpcdp.train.report import draw_curves
from hpcdp.train.trainer import Trainer

RNG = np.random.default_rng(11)
CENTERS = RNG.normal(size=(3, 5)) * 2
LABELS = RNG.integers(0, 3, size=70)
SAMPLES = ArrayDataset((CENTERS[LABELS] + RNG.normal(size=(70, 5))).astype(np.float32), LABELS)


class Batches:
    """A sampler of fixed batches."""

    def __init__(self, *batches: list[int]) -> None:
        self.batches = [np.array(batch, np.int64) for batch in batches]
        self.epochs: list[int] = []

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def network() -> nn.Module:
    net = nn.Sequential(nn.Dense(5, 8), nn.ReLU(), nn.Dense(8, 3))
    rng = np.random.default_rng(5)
    for param in net.parameters():
        param.data[...] = rng.normal(size=param.shape) * 0.3
    return net


def train(world, sampler, epochs=1, callbacks=(), owner="rank", checkpoints=None):
    net = network()
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.2, momentum=0.9), world=world, owner=owner)
    records = fit(
        net,
        trainer,
        DataLoader(SAMPLES, sampler, prefetch=0),
        epochs=epochs,
        evaluate=lambda: evaluate(net, SAMPLES, world),
        callbacks=callbacks,
        checkpoints=checkpoints,
        world=world,
    )
    return records, [np.array(param.data) for param in net.parameters()]


def assert_same_parameters(some, others):
    for a, b in zip(some, others, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("owner", ["rank", "shard"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_trains_as_one(ranks, owner):
    def job(world):
        sampler = ShardedSampler(len(SAMPLES), 16, world.size, world.rank, seed=4)
        return train(world, sampler, epochs=3, owner=owner)

    ((one_records, one_params),) = thread_comm.run(1, job)
    for records, params in thread_comm.run(ranks, job):
        assert_same_parameters(params, one_params)
        for record, one in zip(records, one_records, strict=True):
            assert record["loss"] == pytest.approx(one["loss"], rel=1e-4)
            for name in ("accuracy", "test_accuracy", "samples", "step", "epoch", "learning_rate"):
                assert record[name] == pytest.approx(one[name]), name
    assert one_records[-1]["loss"] < 0.7 * one_records[0]["loss"]


TARGETS = RNG.normal(size=(70, 3)).astype(np.float32)


def regress(world, targets, callbacks=(), checkpoints=None, evaluate=None):
    net = nn.Sequential(nn.Dense(5, math.prod(targets.shape[1:])))
    samples = ArrayDataset(SAMPLES.x, targets)
    sampler = ShardedSampler(len(samples), 16, world.size, world.rank, seed=4)
    return fit(
        net,
        Trainer(net.parameters(), optim.SGD(lr=0.05), world=world),
        DataLoader(samples, sampler, prefetch=0),
        epochs=2,
        loss=l2_loss,
        evaluate=evaluate,
        callbacks=callbacks,
        checkpoints=checkpoints,
        world=world,
    )


@pytest.mark.each_value
@pytest.mark.parametrize("targets", [TARGETS, TARGETS[:, :2], TARGETS[:, :1], TARGETS[:, 0]])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_regression_has_a_loss_and_no_accuracy(ranks, targets, tmp_path):
    told = []

    class Listen(Callback):
        def on_record(self, record):
            told.append(record)

    def job(world):
        shown = [Listen(), ShowProgress()] if world.rank == 0 else []
        with Manager(tmp_path, world) as manager:
            return regress(world, targets, shown, Checkpoints(manager, every="epoch"))

    for records in thread_comm.run(ranks, job):
        assert records[-1]["loss"] < records[0]["loss"]
    assert {record["kind"] for record in told} == {"step", "epoch"}
    assert [record["accuracy"] for record in told] == [None] * len(told)
    draw_curves(told, tmp_path / "curves.png")


def test_a_regression_may_have_a_loss_of_the_test_set(capsys):
    def job(world):
        return regress(world, TARGETS, [ShowProgress()], evaluate=lambda: Evaluation(math.nan, 0.25, math.nan, 70))

    (records,) = thread_comm.run(1, job)
    assert [(each["test_loss"], each["test_accuracy"]) for each in records] == [(0.25, None)] * 2
    assert "nan" not in capsys.readouterr().out


def test_a_callback_that_waits_for_an_accuracy_which_there_is_not_is_refused():
    with raises(ConfigError, operation="EarlyStopping", where="metric", got="accuracy"):
        thread_comm.run(1, lambda world: regress(world, TARGETS, [EarlyStopping("accuracy", patience=1)]))


def test_records_are_alike_on_every_rank():
    def job(world):
        told: list[dict] = []

        class Listen(Callback):
            def on_record(self, record):
                told.append(record)

        sampler = ShardedSampler(len(SAMPLES), 7, world.size, world.rank, seed=1)
        return train(world, sampler, epochs=2, callbacks=[Listen()])[0], told

    results = thread_comm.run(3, job)
    assert results[1] == results[0]
    assert results[2] == results[0]
    records, told = results[0]
    assert [r for r in told if r["kind"] == "epoch"] == records
    assert [r["step"] for r in told if r["kind"] == "step"] == [10, 20]
    assert [r["epoch"] for r in told] == [1, 1, 2, 2]
    assert sum(r["samples"] for r in records) == 2 * len(SAMPLES)
    assert all(r["comm_exposed_s"] <= r["comm_s"] <= r["seconds"] for r in records)


def test_ranks_with_fewer_batches_and_empty_ones_take_part_in_every_step():
    pieces = {
        0: [[0, 1, 2, 3], [4, 5], [6, 7, 8]],
        1: [[], [9, 10, 11]],
        2: [],
    }
    whole = [[0, 1, 2, 3], [4, 5, 9, 10, 11], [6, 7, 8]]
    ((one_records, one_params),) = thread_comm.run(1, lambda world: train(world, Batches(*whole), epochs=2))
    for records, params in thread_comm.run(3, lambda world: train(world, Batches(*pieces[world.rank]), epochs=2)):
        assert_same_parameters(params, one_params)
        assert [r["samples"] for r in records] == [12, 12]
        assert records[-1]["loss"] == pytest.approx(one_records[-1]["loss"], rel=1e-4)


def test_an_epoch_without_any_samples_changes_nothing():
    before = [np.array(p.data) for p in network().parameters()]
    for records, params in thread_comm.run(2, lambda world: train(world, Batches([], []))):
        assert_same_parameters(params, before)
        assert (records[0]["samples"], records[0]["loss"]) == (0, 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_epochs_of_different_length_where_short_batches_roll_over(ranks):
    def job(world):
        sampler = ShardedSampler(len(SAMPLES), 16, world.size, world.rank, seed=4, last="rollover")
        return train(world, sampler, epochs=3)

    ((_, one_params),) = thread_comm.run(1, job)
    for records, params in thread_comm.run(ranks, job):
        assert [r["samples"] for r in records] == [64, 64, 80]
        assert [r["epoch"] for r in records] == [1, 2, 3]
        assert_same_parameters(params, one_params)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"callbacks": EarlyStopping("loss", patience=1)}, "list"),
        ({"callbacks": [print]}, "Callback"),
        ({"epochs": 1.5}, 0),
        ({"checkpoints": "runs"}, ["Checkpoints", None]),
        ({"loader": [(1, 2)]}, "DataLoader"),
        ({"trainer": optim.SGD(lr=0.1)}, "Trainer"),
        ({"net": print}, "network"),
    ],
)
def test_arguments_of_another_kind_are_refused_on_every_rank(wrong, expected):
    def job(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.2), world=world)
        given = {
            "net": net,
            "trainer": trainer,
            "loader": DataLoader(SAMPLES, Batches([0])),
            "epochs": 1,
            "world": world,
        }
        with raises(ConfigError, operation="fit", where=next(iter(wrong)), expected=expected):
            fit(**given | (wrong if world.rank == 0 else {}))

    thread_comm.run(2, job)


def test_the_sampler_is_told_each_epoch():
    sampler = Batches([0, 1])
    thread_comm.run(1, lambda world: train(world, sampler, epochs=3))
    assert sampler.epochs == [0, 1, 2]


def test_callbacks_are_told_every_step_and_the_end_also_of_a_failure():
    events: list[tuple] = []

    class Watch(Callback):
        def on_start(self, epochs, steps):
            events.append(("start", epochs, steps))

        def on_step(self, epoch, step):
            events.append(("step", epoch, step))
            if (epoch, step) == (2, 1):
                raise RuntimeError("stop here")

        def on_end(self):
            events.append(("end",))

    def job(world):
        with pytest.raises(RuntimeError, match="stop here"):
            train(world, Batches([0, 1], [2]), epochs=5, callbacks=[Watch()])

    thread_comm.run(1, job)
    assert events == [("start", 5, 2), ("step", 1, 1), ("step", 1, 2), ("step", 2, 1), ("end",)]


@pytest.mark.parametrize("failing", ["on_resume", "on_start", "on_step", "on_record", "on_end"])
def test_each_callback_is_told_the_end_where_another_one_fails(failing, tmp_path):
    ended: list[str] = []

    class Named(Callback):
        def __init__(self, name):
            self.name = name

        def on_end(self):
            ended.append(self.name)

    def fail(*arguments):
        raise RuntimeError("stop here")

    failed = Named("failed")
    setattr(failed, failing, fail)

    def job(world):
        with Manager(tmp_path, world) as manager:
            train(world, ShardedSampler(70, 35), checkpoints=Checkpoints(manager))
            going_on = Checkpoints(manager, resume=True)
            with pytest.raises(RuntimeError, match="stop here"):
                callbacks = [Named("before"), failed, Named("behind")]
                train(world, ShardedSampler(70, 35), epochs=2, callbacks=callbacks, checkpoints=going_on)

    thread_comm.run(1, job)
    begun = failing not in ("on_resume", "on_start")
    assert [name for name in ended if name != "failed"] == (["before", "behind"] if begun else ["before"])


def fitted(world, loss, batches):
    net = network()
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.2), world=world)
    fit(net, trainer, DataLoader(SAMPLES, Batches(*batches), prefetch=0), epochs=1, loss=loss, world=world)


PER_SAMPLE = nn.functional.softmax_cross_entropy


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda scores, y: PER_SAMPLE(scores, y).mean(), "()"),
        (lambda scores, y: PER_SAMPLE(scores, y).sum(), "()"),
        (lambda scores, y: scores * scores, "({count}, 3)"),
        (lambda scores, y: (scores * scores).reshape(-1), "({flat},)"),
    ],
)
def test_a_loss_that_is_not_per_sample_is_refused_before_it_trains(ranks, count, loss, got):
    got = got.replace("{count}", str(count)).replace("{flat}", str(3 * count))
    with raises(ConfigError, operation="train step", where="loss", expected=(count,), got=got):
        thread_comm.run(ranks, lambda world: fitted(world, loss, [list(range(count))]))


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda *_: None, "a NoneType"),
        (lambda *_: 0.5, "a float"),
        (lambda scores, y: PER_SAMPLE(scores, y).data, "a ndarray"),
    ],
)
def test_a_loss_that_is_no_tensor_is_refused(loss, got):
    with raises(ConfigError, operation="train step", where="loss", expected="Tensor", got=got):
        thread_comm.run(2, lambda world: fitted(world, loss, [[0, 1]]))


def test_losses_of_one_sample_and_of_none_are_per_sample():
    thread_comm.run(2, lambda world: fitted(world, PER_SAMPLE, [[0], [1, 2, 3]] if world.rank else [[4]]))
    net = nn.Sequential(nn.Dense(5, 3), SyncBatchNorm(3))  # by which ranks without samples compute, too

    def job(world):
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.2), world=world)
        loader = DataLoader(SAMPLES, Batches([], [0, 1]), prefetch=0)
        return fit(net, trainer, loader, epochs=1, world=world)[0]["samples"]

    assert thread_comm.run(1, job) == [2]


def test_a_loss_of_pieces_of_text_is_per_sample():
    tokens = np.random.default_rng(0).integers(0, 7, (4, 6))

    def job(world):
        net = nn.Sequential(nn.Embedding(7, 5), nn.Dense(5, 7))
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.2), world=world)
        loader = DataLoader(ArrayDataset(tokens, tokens), Batches([0, 1, 2, 3]), prefetch=0)
        return fit(net, trainer, loader, epochs=1, world=world)[0]["samples"]

    assert thread_comm.run(1, job) == [4]
