"""Layers that learn the size of their input from the first one."""

import copy
import pickle

import numpy as np
import pytest

import hpcdp
from hpcdp import autograd, nn, optim
from hpcdp.comm import threads
from hpcdp.errors import DeviceError, UnsupportedError
from hpcdp.nn.functional import softmax_cross_entropy
from hpcdp.nn.init import Xavier
from hpcdp.train.trainers.trainer import Trainer

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
    with pytest.raises(DeviceError, match="got none yet"):
        copy.deepcopy(net)[0].weight.asnumpy()


def test_an_lstm_too():
    layer = nn.LSTM(None, 4)
    assert repr(layer) == "LSTM(None, 4)"
    assert layer(np.zeros((2, 3, 5), np.float32)).shape == (2, 3, 4)
    assert repr(layer) == "LSTM(5, 4)"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_takes_it_after_a_call(ranks):
    def job(world):
        net = network()
        with pytest.raises(DeviceError, match=r"parameter \[0\.weight\]: expected values, got none yet, its shape is"):
            Trainer(net.parameters(), optim.SGD(lr=0.1), world=world)
        net(X[:1])
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world=world)
        part = slice(world.rank * 3, world.rank * 3 + 3)
        for _ in range(3):
            with autograd.record():
                losses = softmax_cross_entropy(net(X[part]), Y[part])
            losses.backward()
            trainer.step(3)
        return [param.data.copy() for param in net.parameters()]

    first, *others = threads.run(ranks, job)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_what_has_no_values_says_so():
    net = nn.Sequential(nn.Dense(None, 3))
    several = nn.Replicas(net, [hpcdp.cpu(0), hpcdp.cpu(1)])
    for look in (lambda: net[0].weight.data, net.state_dict, lambda: several.on(hpcdp.cpu(1))):
        with pytest.raises(RuntimeError, match=r"its shape is \(None, 3\); call the network once, on one sample"):
            look()
    with pytest.raises(UnsupportedError, match=r"forward \[Dense\(2, 3\)\]"):
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
