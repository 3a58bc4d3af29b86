"""`EarlyStopping`: all ranks end after the same epoch, also where a run is resumed in between."""

import numpy as np
import pytest
from raises import raises

from hpcdp import data, nn, optim
from hpcdp.checkpoint import Manager
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError
from hpcdp.train.callbacks import Callback, EarlyStopping
from hpcdp.train.checkpoints import Checkpoints
from hpcdp.train.fit import fit
from hpcdp.train.metrics import Evaluation
from hpcdp.train.trainer import Trainer

X, Y = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32), np.arange(20) % 3
SAMPLES = data.ArrayDataset(X, Y)


def train(world, losses, callbacks, epochs=9, folder=None, resume=False):
    """Epochs that were trained; after each `evaluate` says the next of ``losses``."""
    net = nn.Sequential(nn.Dense(4, 3))
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world=world)
    loader = data.DataLoader(SAMPLES, data.ShardedSampler(20, 10, world.size, world.rank), prefetch=0)
    said = iter(losses)
    arguments = {
        "epochs": epochs,
        "evaluate": (lambda: Evaluation(0.5, next(said), 10, 20)) if losses else None,
        "callbacks": callbacks,
        "world": world,
    }
    if folder is None:
        return [record["epoch"] for record in fit(net, trainer, loader, **arguments)]
    with Manager(folder, world) as manager:
        checkpoints = Checkpoints(manager, every="epoch", resume=resume)
        return [record["epoch"] for record in fit(net, trainer, loader, checkpoints=checkpoints, **arguments)]


@pytest.mark.each_value
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("losses", "settings", "last"),
    [
        ([3, 2, 2, 2.5, 1, 1, 1, 1, 1], {"patience": 2}, 4),
        ([3, 2, 2, 2.5, 1, 1, 1, 1, 1], {"patience": 3}, 8),
        ([3, 2, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], {"patience": 3, "min_delta": 0.25}, 9),
        ([3, 2, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], {"patience": 3, "min_delta": 0.5}, 6),
        ([1, 2, 3, 3, 4, 5, 6, 7, 8], {"patience": 1, "mode": "max"}, 4),
        ([float("nan")] * 9, {"patience": 2}, 2),
        ([9, 8, 7, 6, 5, 4, 3, 2, 1], {"patience": 1}, 9),
        ([3, 2, 2, 2.5, 1, 1, 1, 1, 1], {"patience": np.int64(2)}, 4),
    ],
)
def test_it_ends_after_epochs_that_are_no_better(ranks, losses, settings, last):
    ended = thread_comm.run(ranks, lambda world: train(world, losses, [EarlyStopping("test_loss", **settings)]))
    assert ended == [list(range(1, last + 1))] * ranks


def test_ranks_whose_numbers_differ_end_alike():
    def job(world):
        losses = [[1, 1, 1, 1, 1], [5, 4, 3, 2, 1], [1, 2, 1, 0, 1]][world.rank]
        stopping = EarlyStopping("test_loss", patience=2)
        return train(world, losses, [stopping], epochs=5), stopping.best, stopping.waited

    assert thread_comm.run(3, job) == [([1, 2, 3], 1, 2)] * 3


def test_a_callback_of_one_rank_ends_the_training_of_all():
    class Enough(Callback):
        def on_record(self, record):
            self.stop_training = record["kind"] == "epoch" and record["epoch"] == 2

    def job(world):
        return train(world, [], [Enough()] if world.rank == world.size - 1 else [])

    assert thread_comm.run(3, job) == [[1, 2]] * 3


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_resumed_run_goes_on_counting_and_is_at_its_end_then(ranks, tmp_path):
    class Killed(BaseException):
        pass

    class Kill(Callback):
        def on_step(self, epoch, step):
            if (epoch, step) == (4, 2):
                raise Killed

    def job(world, losses, *more, resume=True):
        stopping = EarlyStopping("test_loss", patience=3)
        return train(world, losses, [stopping, *more], folder=tmp_path / "a", resume=resume), stopping.best

    with pytest.raises(Killed):
        thread_comm.run(ranks, lambda world: job(world, [3, 1, 2], Kill(), resume=False))
    assert thread_comm.run(ranks, lambda world: job(world, [2, 2, 2, 2, 2, 2])) == [([4, 5], 1)] * ranks
    assert thread_comm.run(ranks, lambda world: job(world, [2])) == [([], 1)] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_it_has_ended_goes_on_for_more_epochs_where_it_was(ranks, tmp_path):
    def job(world, losses, epochs, patience=2, resume=True):
        callbacks = [EarlyStopping("test_loss", patience=patience)]
        return train(world, losses, callbacks, epochs=epochs, folder=tmp_path / "a", resume=resume)

    assert thread_comm.run(ranks, lambda world: job(world, [3, 3, 3], 6, resume=False)) == [[1, 2, 3]] * ranks
    assert thread_comm.run(ranks, lambda world: job(world, [1], 6, patience=9)) == [[]] * ranks
    assert thread_comm.run(ranks, lambda world: job(world, [2, 1, 1, 1], 8)) == [[4, 5, 6, 7]] * ranks
    assert thread_comm.run(ranks, lambda world: job(world, [1], 8, patience=9)) == [[]] * ranks
    assert thread_comm.run(ranks, lambda world: job(world, [1, 1], 9, patience=9)) == [[8, 9]] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("before", [None, {"patience": 2}, {"patience": 9}])
@pytest.mark.parametrize("after", [None, {"patience": 2}])
def test_a_resumed_run_may_have_it_or_not(before, after, ranks, tmp_path):
    def job(world, losses, settings, epochs, resume=True):
        callbacks = [] if settings is None else [EarlyStopping("test_loss", **settings)]
        return train(world, losses, callbacks, epochs=epochs, folder=tmp_path / "a", resume=resume)

    first = thread_comm.run(ranks, lambda world: job(world, [1, 2], before, 2, resume=False))
    assert first == [[1, 2]] * ranks
    losses = [1.5, 1.5, 1.5, 1.5]
    last = 6 if after is None else 3 if before == after else 5  # one of which it has counted; the first, and two more
    found = thread_comm.run(ranks, lambda world: job(world, losses, after, 6))
    assert found == [list(range(3, last + 1))] * ranks


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        (
            {"metric": "acc", "patience": 1},
            {"where": "metric", "expected": ["test_loss", "test_accuracy"], "got": "acc"},
        ),
        ({"metric": ["loss"], "patience": 1}, {"where": "metric", "expected": ["test_loss", "test_accuracy"]}),
        ({"metric": "loss", "patience": True}, {"where": "patience", "expected": 1, "got": True}),
        ({"metric": "loss", "patience": 0}, {"where": "patience", "expected": 1, "got": 0}),
        ({"metric": "loss", "patience": -1}, {"where": "patience", "expected": 1, "got": -1}),
        ({"metric": "loss", "patience": 1.5}, {"where": "patience", "expected": 1, "got": 1.5}),
        ({"metric": "loss", "patience": 1, "min_delta": -1}, {"where": "min_delta", "expected": 0, "got": -1}),
        (
            {"metric": "loss", "patience": 1, "mode": "best"},
            {"where": "mode", "expected": ["min", "max"], "got": "best"},
        ),
    ],
)
def test_what_it_cannot_do_is_named(settings, fields):
    with raises(ConfigError, operation="EarlyStopping", **fields):
        EarlyStopping(**settings)


def test_numbers_that_nobody_evaluates_are_missed_before_the_first_step():
    with raises(ConfigError, operation="EarlyStopping", where="metric", got="test_loss"):
        thread_comm.run(2, lambda world: train(world, [], [EarlyStopping("test_loss", patience=1)]))
    assert thread_comm.run(2, lambda world: train(world, [], [EarlyStopping("loss", patience=1)], epochs=2))


def test_what_is_no_state_is_refused():
    with raises(ConfigError, operation="load_state_dict", where="EarlyStopping", expected="dict", got="best"):
        EarlyStopping("loss", patience=1).load_state_dict({})
