"""Layers that learn the size of their input from the first one."""

import copy
import pickle

import numpy as np
import pytest
from raises import raises

import hpcdp
from hpcdp import autograd, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, DeviceError, MismatchError, UnsupportedError
from hpcdp.nn.functional import softmax_cross_entropy
from hpcdp.nn.init import Xavier
from hpcdp.train.trainer import Trainer

X, Y = np.random.default_rng(2).standard_normal((6, 2, 7, 7)).astype(np.float32), np.arange(6) % 3


def network(known=False):
    first = Xavier(4)
    sizes = (2, 5, 45) if known else (None, None, None)
    return nn.Sequential(
        nn.Conv2D(sizes[0], 5, 3, weight_init=first), nn.BatchNorm(sizes[1]), nn.ReLU(), nn.AvgPool2D(2, 2, 1),
        nn.Flatten(), nn.Dense(sizes[2], 8, activation="relu", weight_init=first), nn.LayerNorm(8 if known else None),
        nn.Dense(8, 3, weight_init=Xavier(5)),
    )  # fmt: skip


def test_the_first_call_finds_the_shapes():
    net = network()
    assert "Conv2D(None, 5" in repr(net) and "BatchNorm(None" in repr(net) and "Dense(None, 8" in repr(net)
    with autograd.record():
        losses = softmax_cross_entropy(net(X), Y)
    losses.backward()
    known = network(known=True)
    assert repr(net) == repr(known)
    with autograd.record():
        expected = softmax_cross_entropy(known(X), Y)
    expected.backward()
    np.testing.assert_array_equal(losses.data, expected.data)
    for (name, param), (other, same) in zip(net.named_parameters(), known.named_parameters(), strict=True):
        assert name == other
        np.testing.assert_array_equal(param.grad, same.grad)
    for name, values in known.state_dict().items():
        np.testing.assert_array_equal(net.state_dict()[name], values)


def test_copies_wait_for_their_own_first_call():
    net = network()
    copied = copy.deepcopy(net)
    copied(X)
    assert "Conv2D(2, 5" in repr(copied) and "Conv2D(None, 5" in repr(net)
    for each in (copy.deepcopy(copied), pickle.loads(pickle.dumps(copied))):
        np.testing.assert_array_equal(each(X).data, copied(X).data)
    with raises(DeviceError, operation="parameter"):
        copy.deepcopy(net)[0].weight.asnumpy()


def test_an_lstm_too():
    layer = nn.LSTM(None, 4)
    assert repr(layer) == "LSTM(None, 4)"
    assert layer(np.zeros((2, 3, 5), np.float32)).shape == (2, 3, 4)
    assert repr(layer) == "LSTM(5, 4)"


def unseeded():
    """Of which each rank draws other values, if nobody agrees on them."""
    return nn.Sequential(
        nn.Conv2D(None, 5, 3), nn.BatchNorm(None), nn.Flatten(), nn.Dense(None, 8, activation="relu"), nn.Dense(8, 3)
    )


def train(world, build, calls_before=(), steps=3, counts=(3, 3, 3, 3), **options):
    """The values before the first update, those after some, and the losses of the steps of this rank."""
    net = build()
    if world.rank in calls_before:
        net(X[:1])
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world=world, **options)
    assert trainer.step_count == 0 and trainer.optimizer.lr == 0.1
    first = sum(counts[: world.rank])
    x, y = (np.concatenate([each, each])[first : first + counts[world.rank]] for each in (X, Y))
    losses = []
    for _ in range(steps):
        if len(y):
            with autograd.record():
                found = softmax_cross_entropy(net(x), y)
            found.backward()
            losses.append(found.data.copy())
        assert trainer.step(len(y)) == sum(counts[: world.size])
    return [np.array(param.data) for param in net.parameters()], losses


def same(found):
    for other in found[1:]:
        for a, b in zip(found[0][0], other[0], strict=True):
            np.testing.assert_array_equal(a, b)


WAYS = [{}, {"owner": "shard", "overlap": True}, {"kvstore": "dist_sync"}, {"kvstore": "dist_async"}]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("options", WAYS[:3])
def test_a_trainer_waits_for_the_first_step(ranks, options):
    """The same as with shapes that are known."""
    found, expected = (
        thread_comm.run(ranks, lambda world, k=k: train(world, lambda: network(k), **options)) for k in (False, True)
    )
    same(found)
    for a, b in zip(found, expected, strict=True):
        for mine, known in zip(a[0] + a[1], b[0] + b[1], strict=True):
            np.testing.assert_array_equal(mine, known)


@pytest.mark.parametrize("options", WAYS)
def test_ranks_begin_with_the_same_values_before_the_first_update(options):
    def rank(world):
        net = unseeded()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world=world, **options)
        with autograd.record():
            losses = softmax_cross_entropy(net(X), Y)
        before = losses.data.copy()
        losses.backward()
        trainer.step(6)
        trainer.synchronize()
        return before, [np.array(param.data) for param in net.parameters()]

    found = thread_comm.run(3, rank)
    for before, values in found[1:]:
        np.testing.assert_array_equal(before, found[0][0])
        for a, b in zip(values, found[0][1], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("counts", [(3, 0, 3), (0, 3, 3), (0, 0, 6)])
def test_a_rank_without_samples_gets_shapes_and_values_from_others(counts):
    same(thread_comm.run(3, lambda world: train(world, unseeded, counts=counts)))


@pytest.mark.parametrize("called", [(0,), (1,), (0, 1, 2)])
def test_a_call_before_the_trainer_is_made_counts_for_all_ranks(called):
    same(thread_comm.run(3, lambda world: train(world, unseeded, calls_before=called)))


def test_values_that_differ_are_refused_once_gradients_are_of_them():
    class Own:
        """An initializer without a generator that others know."""

        def __init__(self, rank):
            self.rank = rank

        def __call__(self, shape, dtype=np.float32):
            return np.full(shape, self.rank, dtype)

    def rank(world):
        net = nn.Dense(None, 3, weight_init=Own(world.rank))
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world=world)
        with autograd.record():
            losses = softmax_cross_entropy(net(np.ones((2, 4), np.float32)), np.arange(2))
        losses.backward()
        with raises(MismatchError, operation="Trainer", where="weight", expected=0, got=1):
            trainer.step(2)

    thread_comm.run(2, rank)


def test_before_the_shapes_are_known_there_is_nothing_to_look_at():
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world=world, loss_scale=4)
        assert trainer.loss_scale == 4
        for look in (lambda: trainer.nbytes, trainer.state_dict, lambda: trainer.no_sync().__enter__()):
            with raises(DeviceError, operation="parameter", where="0.weight"):
                look()
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            train_ready(net, trainer).nothing  # noqa: B018
        for options, fields in (
            ({"owner": "x"}, {"where": "owner"}),
            ({"reproducible": True}, {"expected": "shapes", "remedy": "Trainer"}),
        ):
            with raises(ConfigError, operation="Trainer", **fields):
                Trainer(network().parameters(), optim.SGD(lr=0.1), world=world, **options)

    def train_ready(net, trainer):
        with autograd.record():
            losses = softmax_cross_entropy(net(X), Y)
        losses.backward(trainer.loss_scale)
        trainer.step(6)
        return trainer

    thread_comm.run(2, rank)


def test_what_has_no_values_says_so():
    net = nn.Sequential(nn.Dense(None, 3))
    several = nn.Replicas(net, [hpcdp.cpu(0), hpcdp.cpu(1)])
    for look in (lambda: net[0].weight.data, net.state_dict, lambda: several.on(hpcdp.cpu(1))):
        with raises(RuntimeError, operation="parameter", got="(None, 3)"):
            look()
    with raises(UnsupportedError, operation="forward", where="Dense(2, 3)"):
        net(np.zeros((1, 2), np.float32))
        net(np.zeros((1, 4), np.float32))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_network_on_several_devices_finds_the_shapes_on_the_first(count):
    devices = [hpcdp.cpu(number) for number in range(count)]
    found = []
    for known in (True, False):
        net = network(known)
        several = nn.Replicas(net, devices)
        with autograd.record():
            losses = softmax_cross_entropy(several(X), Y)
        losses.backward()
        found.append([losses.data, *(param.grad for param in net.parameters())])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
