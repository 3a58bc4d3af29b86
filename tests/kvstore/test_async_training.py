"""Training on ``dist_async``: each rank at its own pace, on batches that it takes when it comes to them."""

import time
from collections import Counter

import numpy as np
import pytest
from pairs import in_turn
from raises import raises

import hpcdp
from hpcdp import kvstore, nn, optim
from hpcdp.autograd import record
from hpcdp.comm import thread_comm
from hpcdp.data import ArrayDataset, DataLoader, ShardedSampler, SharedSampler
from hpcdp.errors import ConfigError, StaleGradientError
from hpcdp.nn.functional import softmax_cross_entropy
from hpcdp.train.callbacks import Callback
from hpcdp.train.fit import SharedCount, fit
from hpcdp.train.metrics import evaluate

RNG = np.random.default_rng(11)
CENTERS = RNG.normal(size=(3, 5)) * 2
LABELS = RNG.integers(0, 3, size=203)
SAMPLES = ArrayDataset((CENTERS[LABELS] + RNG.normal(size=(203, 5))).astype(np.float32), LABELS)
BATCH = 8
NUM_BATCHES = -(-len(SAMPLES) // BATCH)
WORLDS = [(1, None), (2, None), (3, None), (4, None), (2, 1), (3, 2), (4, 2)]
"""Ranks, and ranks per node."""


class Told(Callback):
    def __init__(self):
        self.records, self.steps = [], []

    def on_start(self, epochs, steps):
        self.total = epochs, steps

    def on_record(self, record):
        self.records.append(record)

    def on_step(self, epoch, step):
        self.steps.append((epoch, step))


def network(seed=3):
    return nn.models.mlp(input_shape=5, num_classes=3, hidden=(8,), seed=seed)


def slowed(world, seconds):
    """A loss that takes longer on the last rank."""

    def loss(output, labels):
        if world.rank == world.size - 1:
            time.sleep(seconds)
        return softmax_cross_entropy(output, labels)

    return loss


def train(world, epochs=3, seconds=0.0, **options):
    net = network(seed=world.rank)
    store = kvstore.create("dist_async", world, **options)
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.3, momentum=0.5), world, kvstore=store)
    loader = DataLoader(SAMPLES, SharedSampler(len(SAMPLES), BATCH, SharedCount(world), seed=4), prefetch=0)
    told = Told()
    records = fit(
        net, trainer, loader, epochs=epochs, loss=slowed(world, seconds), callbacks=[told], world=world,
        evaluate=lambda: evaluate(net, SAMPLES, world),
    )  # fmt: skip
    values = np.concatenate([param.asnumpy().reshape(-1) for param in net.parameters()])
    return records, values, told, trainer


@pytest.mark.parametrize(("ranks", "per_node"), WORLDS)
def test_it_learns_and_ends_alike_on_every_rank(ranks, per_node):
    found = thread_comm.run(ranks, train, per_node)
    records = found[0][0]
    assert records[-1]["test_accuracy"] > 0.85 and records[-1]["loss"] < 0.7 * records[0]["loss"]
    for others, values, told, trainer in found:
        assert others == records == [each for each in told.records if each["kind"] == "epoch"]
        np.testing.assert_array_equal(values, found[0][1])
        assert told.total == (3, NUM_BATCHES)
        assert trainer.step_count == 3 * NUM_BATCHES
    for epoch, each in enumerate(records, 1):
        assert each["samples"] == len(SAMPLES)
        assert (each["epoch"], each["step"]) == (epoch, epoch * NUM_BATCHES)
        assert 0 <= each["staleness_mean"] <= each["staleness_max"]
        assert each["staleness_max"] == 0 or ranks > 1
    taken = Counter(step for _, _, told, _ in found for step in told.steps)
    assert taken == Counter((epoch, step) for epoch in (1, 2, 3) for step in range(1, NUM_BATCHES + 1))


def test_one_rank_alone_gets_what_it_gets_without_a_store():
    def rank(world, kind):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.3, momentum=0.5), world, kvstore=kind)
        loader = DataLoader(SAMPLES, ShardedSampler(len(SAMPLES), BATCH, seed=4), prefetch=0)
        fit(net, trainer, loader, epochs=2, world=world)
        return np.concatenate([param.asnumpy().reshape(-1) for param in net.parameters()])

    alone, stored = (thread_comm.run(1, lambda world, k=kind: rank(world, k))[0] for kind in (None, "dist_async"))
    np.testing.assert_allclose(stored, alone, rtol=1e-5, atol=1e-6)


def test_a_slow_rank_does_fewer_batches_and_holds_nobody_back():
    found = thread_comm.run(3, lambda world: train(world, epochs=2, seconds=0.1))
    done = [len(told.steps) for _, _, told, _ in found]
    assert sum(done) == 2 * NUM_BATCHES
    assert done[2] < min(done[:2]) / 2
    assert found[0][0][-1]["slowest_rank"] == 2
    assert found[0][0][-1]["test_accuracy"] > 0.85


def test_a_bound_on_staleness_holds_fast_ranks_back():
    found = thread_comm.run(3, lambda world: train(world, epochs=2, seconds=0.02, staleness=1))
    done = [len(told.steps) for _, _, told, _ in found]
    # In each epoch a lead of 1 that may still push, that push, one that waits behind it, and a batch already taken.
    assert max(done) - min(done) <= 2 * 4
    assert found[0][0][-1]["waited_s"] > 0


@pytest.mark.parametrize(("prefetch", "per_node"), in_turn([0, 2], [None, 2]))
def test_a_replay_is_that_of_the_whole_loop(prefetch, per_node):
    """Batches that are taken, too, whatever the times."""

    def rank(world, seed):
        net, hurry = network(), np.random.default_rng()
        store = kvstore.create("dist_async", world, replay=seed)
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.3, momentum=0.5), world, kvstore=store)
        loader = DataLoader(SAMPLES, SharedSampler(len(SAMPLES), BATCH, SharedCount(world), seed=4), prefetch=prefetch)

        def loss(output, labels):
            time.sleep(hurry.random() * 3e-3)
            return softmax_cross_entropy(output, labels)

        fit(net, trainer, loader, epochs=2, loss=loss, world=world, evaluate=lambda: evaluate(net, SAMPLES, world))
        return np.concatenate([param.asnumpy().reshape(-1) for param in net.parameters()]).tobytes()

    def run(seed):
        return thread_comm.run(3, lambda world: rank(world, seed), per_node)

    assert run(5) == run(5) != run(6)


def test_one_push_of_each_weighs_as_much_as_a_global_batch():
    """Without momentum, and where nobody pushes between a pull and a push of another."""

    def rank(world, kind):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore=kind)
        trainer.loss_scale = 4.0
        x, y = SAMPLES[np.arange(world.rank * 5, world.rank * 5 + 5)]
        with record():
            loss = softmax_cross_entropy(net(x), y)
        loss.backward(np.full(5, 4.0, "f4"))
        world.barrier()  # else some would begin from what others have pushed
        assert trainer.step(5) == (5 if kind == "dist_async" else 5 * world.size)
        world.barrier()
        if kind == "dist_async":
            assert trainer.step_count == 1
            trainer.synchronize()
            assert trainer.step_count == world.size
        return np.concatenate([param.asnumpy().reshape(-1) for param in net.parameters()])

    for ranks, per_node in WORLDS:
        together, alone = (
            thread_comm.run(ranks, lambda world, k=kind: rank(world, k), per_node)
            for kind in ("dist_sync", "dist_async")
        )
        for found in alone:
            np.testing.assert_allclose(found, together[0], rtol=1e-5, atol=1e-6)


def test_a_rank_without_samples_pushes_nothing():
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_async")
        assert trainer.step(0) == 0
        assert (trainer.step_count, trainer.store.statistics()["pushes"]) == (0, 0)

    thread_comm.run(2, rank)


def test_a_learning_rate_that_is_assigned_counts_from_the_next_push():
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_async")
        trainer.optimizer.lr = 0.0
        before = [param.asnumpy() for param in net.parameters()]
        x, y = SAMPLES[np.arange(5)]
        with record():
            loss = softmax_cross_entropy(net(x), y)
        loss.backward()
        trainer.step(5)
        trainer.synchronize()
        for param, value in zip(net.parameters(), before, strict=True):
            np.testing.assert_array_equal(param.asnumpy(), value)

    thread_comm.run(2, rank)


def test_a_missing_gradient_is_an_error_where_it_is_missing():
    def rank(world):
        trainer = hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world, kvstore="dist_async")
        if world.rank == 1:
            trainer.step(1)

    with raises(StaleGradientError, operation="step", where="rank 1"):
        thread_comm.run(2, rank)


def test_states_go_on_after_a_restart(tmp_path):
    def rank(world, load):
        *_, trainer = train(world, epochs=1)
        if load:
            trainer.load_states(tmp_path / "states")
            assert trainer.step_count == NUM_BATCHES
            trainer.synchronize()
            assert trainer.step_count == NUM_BATCHES
            trainer.save_states(tmp_path / "again")
        else:
            trainer.save_states(tmp_path / "states")

    thread_comm.run(2, lambda world: rank(world, False))
    thread_comm.run(3, lambda world: rank(world, True))
    with np.load(tmp_path / "states") as first, np.load(tmp_path / "again") as again:
        assert set(first.files) == set(again.files)
        for name in first.files:
            np.testing.assert_array_equal(first[name], again[name])


def test_updates_on_ranks_are_refused():
    with raises(ConfigError, operation="Trainer", where="update_on_kvstore", expected="dist_async", got=False):
        thread_comm.run(
            1,
            lambda world: hpcdp.Trainer(
                network().parameters(), optim.SGD(lr=0.1), world, kvstore="dist_async", update_on_kvstore=False
            ),
        )


def test_batches_that_are_taken_are_not_for_ranks_that_step_together():
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.3), world)
        loader = DataLoader(SAMPLES, SharedSampler(len(SAMPLES), BATCH, SharedCount(world)))
        fit(net, trainer, loader, epochs=1, world=world)

    with raises(ConfigError, operation="fit", where="loader", remedy="ShardedSampler"):
        thread_comm.run(2, rank)


@pytest.mark.parametrize(("ranks", "per_node"), WORLDS)
def test_a_count_gives_each_number_once_and_begins_again(ranks, per_node):
    def rank(world):
        count, found = SharedCount(world), []
        for up_to in (5, 0, 12):
            mine = []
            for number in count:
                if number >= up_to:
                    break
                mine.append(number)
            found.append(mine)
        return found

    found = thread_comm.run(ranks, rank, per_node)
    for which, up_to in enumerate((5, 0, 12)):
        assert sorted(number for each in found for number in each[which]) == list(range(up_to))
