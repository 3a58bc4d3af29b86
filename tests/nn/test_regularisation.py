import copy

import numpy as np
import pytest
import standin
from raises import raises

from hpcdp import autograd, nn
from hpcdp.autograd import Tensor
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError

X = (2 + 3 * np.random.default_rng(0).standard_normal((8, 3, 4, 4))).astype(np.float32)


def test_running_statistics_move_in_training_only():
    layer = nn.BatchNorm(3, momentum=0.8)
    mean, var = layer.running_mean.data, layer.running_var.data
    layer(X)
    np.testing.assert_array_equal(mean, np.zeros(3))
    with autograd.train_mode():
        y = layer(X)
    np.testing.assert_allclose(y.data.mean(axis=(0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(mean, 0.2 * X.mean(axis=(0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(var, 0.8 + 0.2 * X.var(axis=(0, 2, 3)), rtol=1e-5)
    assert layer.running_mean.data is mean
    with autograd.train_mode():
        layer(X[:0])  # no samples have no statistics
    np.testing.assert_allclose(mean, 0.2 * X.mean(axis=(0, 2, 3)), rtol=1e-5)


def test_prediction_uses_the_running_statistics():
    layer = nn.BatchNorm(3)
    layer.running_mean.data[:], layer.running_var.data[:] = [1, 2, 3], [4, 5, 6]
    layer.gamma.data[:], layer.beta.data[:] = [1, 2, 0.5], [0, 1, -1]
    with autograd.record(train_mode=False):
        y = layer(X)
    expected = (X - np.array([1, 2, 3]).reshape(3, 1, 1)) / np.sqrt(np.array([4, 5, 6]) + 1e-5).reshape(3, 1, 1)
    scaled = expected * np.array([1, 2, 0.5]).reshape(3, 1, 1) + np.array([0, 1, -1]).reshape(3, 1, 1)
    np.testing.assert_allclose(y.data, scaled, rtol=1e-4, atol=1e-5)
    y.backward()
    np.testing.assert_allclose(layer.beta.grad, np.full(3, X[:, 0].size), rtol=1e-6)
    np.testing.assert_allclose(layer.gamma.grad, expected.sum(axis=(0, 2, 3)), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mean", [1e3, 1e4, 1e6])
def test_the_gradient_of_gamma_in_prediction_keeps_its_digits_far_from_zero(mean):
    layer = nn.BatchNorm(2)
    layer.running_mean.data[:] = mean
    rng = np.random.default_rng(4)
    x, heads = ((rng.standard_normal((4096, 2)) + offset).astype(np.float32) for offset in (mean, 0.5))
    with autograd.record(train_mode=False):
        y = layer(x)
    y.backward(heads)
    exact = ((x.astype(np.float64) - mean) / np.sqrt(1 + 1e-5) * heads).sum(axis=0)
    np.testing.assert_allclose(layer.gamma.grad, exact, rtol=1e-5)


def test_the_same_as_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    ours, theirs = nn.BatchNorm(3), torch.nn.BatchNorm2d(3)
    x, peer = Tensor(X.copy()), torch.tensor(X, requires_grad=True)
    x.attach_grad()
    weights = np.random.default_rng(1).standard_normal(X.shape).astype(np.float32)
    with autograd.record():
        y = ours(x)
    y.backward(weights)
    theirs(peer).backward(torch.from_numpy(weights))
    np.testing.assert_allclose(y.data, theirs(peer).detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(x.grad, peer.grad.numpy(), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(ours.gamma.grad, theirs.weight.grad.numpy(), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(ours.beta.grad, theirs.bias.grad.numpy(), rtol=1e-4, atol=1e-4)


def test_dropout_is_reproducible_and_off_in_prediction():
    x = np.ones((50, 40), np.float32)
    layers = [
        nn.Dropout(0.4, seed=3),
        nn.Dropout(0.4, seed=3),
        nn.Dropout(0.4, seed=4),
        nn.Dropout(0.4),
        nn.Dropout(0.4),
    ]
    with autograd.train_mode():
        first, same, other, fresh, fresh_too = (layer(x).data for layer in layers)
        next_call = layers[0](x).data
    np.testing.assert_array_equal(first, same)
    for different in (other, next_call):
        assert not np.array_equal(first, different)
    assert not np.array_equal(fresh, fresh_too)
    np.testing.assert_allclose(sorted(set(first.reshape(-1).tolist())), [0, 1 / 0.6], rtol=1e-6)
    assert abs(first.mean() - 1) < 0.1
    tensor = Tensor(x)
    assert layers[0](tensor) is tensor
    with autograd.train_mode():
        assert nn.Dropout(0.0)(tensor) is tensor


@pytest.mark.parametrize("p", [-0.1, 1.0, 3])
def test_impossible_probabilities_are_refused(p):
    with raises(ConfigError, operation="Dropout", where="p", expected=[0, 1]):
        nn.Dropout(p)


def test_device_arrays_give_the_same():
    def train(asarray):
        net = nn.Sequential(nn.BatchNorm(3), nn.Dropout(0.3, seed=2)).to(like=asarray(X))
        with autograd.record():
            y = net(asarray(X))
        y.backward()
        predicted = net(asarray(X))
        tensors = [y, predicted, *[tensor for _, tensor in net.named_buffers()], Tensor(net[0].gamma.grad)]
        return [tensor.asnumpy() for tensor in tensors]

    for device, host in zip(train(standin.asarray), train(np.asarray), strict=True):
        np.testing.assert_allclose(device, host, rtol=1e-4, atol=1e-4)


def test_generators_are_named_by_their_paths_each_once():
    shared = nn.Dropout(0.5, seed=1)
    net = nn.Sequential(nn.Dense(3, 4), shared, nn.Sequential(nn.Dropout(0.2, seed=2), shared))
    named = dict(net.named_generators())
    assert list(named) == ["1.generator", "2.0.generator"]
    assert named["1.generator"] is shared.generator
    assert not dict(nn.Dense(3, 4).named_generators())
    assert not any("generator" in name for name in net.state_dict())


def test_a_dropout_whose_generator_is_restored_drops_the_same():
    x = np.ones((20, 30), "f4")
    first, second = nn.Dropout(0.5), nn.Dropout(0.5)
    with autograd.train_mode():
        first(x)
        state = dict(first.named_generators())["generator"].bit_generator.state
        expected = first(x).data
        dict(second.named_generators())["generator"].bit_generator.state = state
        np.testing.assert_array_equal(second(x).data, expected)


def masks_on_ranks(n, seed, calls=2):
    """What a layer of each of ``n`` thread ranks keeps, by rank."""

    def one(world):
        layer = nn.Dropout(0.5, seed=seed)
        with autograd.train_mode():
            return [layer(np.ones(64, "f4")).data != 0 for _ in range(calls)]

    return np.array(thread_comm.run(n, one)).reshape(n, -1)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks_drop_different_elements_and_the_same_in_every_run(n):
    masks = masks_on_ranks(n, seed=7)
    np.testing.assert_array_equal(masks, masks_on_ranks(n, seed=7))
    np.testing.assert_array_equal(masks[:1], masks_on_ranks(1, seed=7))
    for found in (masks, masks_on_ranks(n, seed=None)):
        shares = [np.mean(a == b) for number, a in enumerate(found) for b in found[:number]]
        assert min(shares) > 0.2 and max(shares) < 0.8  # by chance half of 128 elements are alike


def test_a_seed_waits_for_the_replica_and_a_generator_under_way_does_not(monkeypatch):
    x = np.ones(64, "f4")
    early, begun, copied = (nn.Dropout(0.5, seed=1) for _ in range(3))  # before hpcdp.init() has set the rank
    alone = nn.Dropout(0.5, seed=1)
    with autograd.train_mode():
        begun(x)
        expected = [alone(x).data for _ in range(2)]
        monkeypatch.setattr("hpcdp.core.environment._number", 3)
        late = nn.Dropout(0.5, seed=1)
        copied = copy.deepcopy(copied)
        first = late(x).data
        np.testing.assert_array_equal(early(x).data, first)
        np.testing.assert_array_equal(copied(x).data, first)
        np.testing.assert_array_equal(begun(x).data, expected[1])
        assert not np.array_equal(first, expected[0])
        restored = nn.Dropout(0.5, seed=1)
        restored.generator.bit_generator.state = late.generator.bit_generator.state
        np.testing.assert_array_equal(restored(x).data, late(x).data)


@pytest.mark.parametrize("seed", [-1, 1.5, "a"])
def test_seeds_that_are_none_are_refused(seed):
    with raises(ConfigError, operation="Dropout", where="seed", expected=0):
        nn.Dropout(0.5, seed=seed)
