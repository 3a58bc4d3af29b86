"""One network on several devices of one process computes, and learns, what it does on one."""

import pickle

import numpy as np
import pytest
from raises import raises

import hpcdp
from hpcdp import autograd, data, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data import ArrayDataset, DataLoader, ShardedSampler
from hpcdp.errors import ConfigError, DeviceError
from hpcdp.nn.functional import softmax_cross_entropy
from hpcdp.train.fit import fit
from hpcdp.train.metrics import evaluate
from hpcdp.train.trainer import Trainer

RNG = np.random.default_rng(5)
X, Y = RNG.standard_normal((37, 6)).astype(np.float32), RNG.integers(0, 4, 37)


def network():
    return nn.models.mlp(6, 4, hidden=(8, 5), seed=1)


def devices(count):
    return [hpcdp.cpu(index) for index in range(count)]


def test_the_documents_matrix():
    x = np.arange(20).reshape(4, 5)
    first, second = data.split_and_load(x, devices(2))
    np.testing.assert_array_equal(first, x[:2])
    np.testing.assert_array_equal(second, x[2:])
    assert not np.shares_memory(first, x)
    with raises(ConfigError, operation="split_batch", expected=3, got=4):
        data.split_and_load(x, devices(3))
    assert [len(part) for part in data.split_and_load(x, devices(3), even_split=False)] == [1, 1, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("samples", [37, 2, 0])
def test_results_and_gradients_are_those_of_one_device(count, samples):
    found = []
    for make in (lambda net: net, lambda net: nn.Replicas(net, devices(count))):
        net = network()
        with autograd.record():
            losses = softmax_cross_entropy(make(net)(X[:samples]), Y[:samples])
        losses.backward()
        found.append([losses.data, *(param.grad.copy() for param in net.parameters())])
    for one, several in zip(*found, strict=True):
        np.testing.assert_allclose(several, one, rtol=1e-5, atol=1e-6)


def test_pieces_that_a_program_loads_itself():
    net = network()
    replicas = nn.Replicas(net, devices(2))
    with autograd.record():
        losses = softmax_cross_entropy(net(X[:36]), Y[:36])
    losses.backward()
    expected = [param.grad.copy() for param in net.parameters()]
    xs, ys = (data.split_and_load(each[:36], replicas.devices) for each in (X, Y))
    with autograd.record():
        losses = [softmax_cross_entropy(replicas.on(d)(x), y) for d, x, y in zip(devices(2), xs, ys, strict=True)]
    autograd.backward(losses)
    for param, gradient in zip(net.parameters(), expected, strict=True):
        np.testing.assert_allclose(param.grad, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ranks", "count"), [(1, 2), (2, 2), (3, 4)])
def test_fit_and_evaluate_over_devices_and_ranks(ranks, count):
    def job(world, count=count):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world=world)
        many = nn.Replicas(net, devices(count)) if count else net
        loader = DataLoader(ArrayDataset(X, Y), ShardedSampler(len(X), 10, world.size, world.rank), prefetch=0)
        records = fit(
            many, trainer, loader, epochs=3, evaluate=lambda: evaluate(many, loader.dataset, world), world=world
        )
        return records[-1], [param.data.copy() for param in net.parameters()]

    ((record, alone),) = thread_comm.run(1, lambda world: job(world, None))
    for other, params in thread_comm.run(ranks, job):
        assert other["test_accuracy"] == pytest.approx(record["test_accuracy"], abs=1.5 / 37)
        assert other["test_loss"] == pytest.approx(record["test_loss"], rel=1e-4)
        for a, b in zip(params, alone, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_statistics_are_those_of_each_device():
    net = nn.Sequential(nn.Dense(6, 3), nn.BatchNorm(3))
    replicas = nn.Replicas(net, devices(2))
    x = X[:20].copy()
    x[10:] += 5
    with autograd.record():
        replicas(x)
    alone = nn.Sequential(nn.Dense(6, 3), nn.BatchNorm(3))
    alone.load_state_dict({**net.state_dict(), **{f"1.{name}": np.full(3, name[-1] == "r", "f4") for name in RUNNING}})
    with autograd.record():
        alone(x[:10])
    for name in RUNNING:
        np.testing.assert_allclose(net.state_dict()[f"1.{name}"], alone.state_dict()[f"1.{name}"], rtol=1e-5)
        there = replicas.on(hpcdp.cpu(1)).module.state_dict()[f"1.{name}"]
        assert np.abs(there - net.state_dict()[f"1.{name}"]).max() > 1e-3


def test_all_devices_predict_by_the_networks_statistics():
    net = nn.Sequential(nn.Dense(6, 3), nn.BatchNorm(3), nn.Dropout(0.2, seed=1))
    replicas = nn.Replicas(net, devices(3))
    with autograd.record():
        replicas(X)
    np.testing.assert_array_equal(replicas(X).data, net(X).data)
    state = {name: array + 1 for name, array in net.state_dict().items()}
    replicas.load_state_dict(state)  # as a resumed run does
    np.testing.assert_array_equal(replicas(X).data, net(X).data)


def activation_set(net):
    net[0].activation = "relu"


def bias_taken_away(net):
    net[0].bias.data[...] = 3
    net[0].bias = None


def layer_added(net):
    net.add(nn.BatchNorm(3))


def layer_replaced(net):
    setattr(net, "1", nn.Sequential(nn.Tanh(), nn.LayerNorm(3)))


def layer_taken_away(net):
    delattr(net, "1")


def layer_moved(net):
    net.tanh = nn.Tanh()
    first = vars(net).pop("0")
    setattr(net, "0", nn.Sequential(first))


@pytest.mark.parametrize(
    "change", [activation_set, bias_taken_away, layer_added, layer_replaced, layer_taken_away, layer_moved]
)
def test_what_the_network_becomes_its_replicas_become(change):
    net = nn.Sequential(nn.Dense(6, 3), nn.ReLU())
    for replicas in (nn.Replicas(net, devices(2)), pickle.loads(pickle.dumps(nn.Replicas(net, devices(2))))):
        replicas(X)
        change(replicas.net)
        np.testing.assert_allclose(replicas(X).data, replicas.net(X).data, rtol=1e-6)


def test_what_a_forward_assigns_is_its_devices():
    class Counts(nn.Module):
        def __init__(self):
            self.dense, self.rows = nn.Dense(6, 3), 0

        def forward(self, x):
            self.rows += len(x)
            return self.dense(x)

    replicas = nn.Replicas(Counts(), devices(2))
    for _ in range(3):
        replicas(X[:5])
    assert (replicas.net.rows, replicas.on(hpcdp.cpu(1)).module.rows) == (6, 9)


def test_a_network_that_returns_several_tensors_is_refused():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with raises(ConfigError, operation="Replicas", got="tuple"):
        nn.Replicas(Pair(), devices(2))(X)


RUNNING = ("running_mean", "running_var")


def test_a_parameter_of_two_layers_and_dropout():
    net = nn.models.gpt((4,), 5, width=8, heads=2, layers=1)
    replicas = nn.Replicas(net, devices(3))
    tokens = RNG.integers(0, 5, (7, 4))
    np.testing.assert_allclose(replicas(tokens).data, net(tokens).data, rtol=1e-5, atol=1e-6)
    dropped = nn.Replicas(nn.Dropout(0.5, seed=3), devices(2))
    with autograd.record():
        y = dropped(np.ones((2, 64), np.float32)).data
    assert (y[0] != y[1]).any()


def test_to_others_it_is_the_network():
    net = network()
    replicas = nn.Replicas(net, devices(3))
    assert all(a is b for a, b in zip(replicas.parameters(), net.parameters(), strict=True))
    assert list(replicas.state_dict()) == list(net.state_dict())
    assert [type(each) for each in replicas.modules()] == [type(each) for each in net.modules()]
    assert repr(replicas).startswith("Replicas(cpu(0), cpu(1), cpu(2)")


def test_devices_that_are_not_there():
    replicas = nn.Replicas(network(), devices(2))
    with raises(RuntimeError, operation="Replicas", where="cpu(2)", expected=["cpu(0)", "cpu(1)"]) as caught:
        replicas.on(hpcdp.cpu(2))
    assert isinstance(caught.value, DeviceError)
    with raises(RuntimeError, operation="device", where="gpu(99)"):
        data.split_and_load(X, [hpcdp.gpu(99)])
    with raises(RuntimeError, operation="device", expected=0, got="cpu(-1)"):
        hpcdp.cpu(-1)
    with raises(RuntimeError, operation="device", where="gpu(7)"):
        network().to(hpcdp.gpu(7))
    with raises(DeviceError, operation="device", expected=0, got="cpu('a')"):
        hpcdp.cpu("a")


@pytest.mark.parametrize("found", [[hpcdp.gpu(99)], [hpcdp.gpu(99), hpcdp.cpu()], [hpcdp.cpu(), hpcdp.gpu(99)]])
def test_every_device_of_replicas_must_be_there_also_the_first(found):
    for net in (network(), nn.Sequential(nn.Dense(None, 4))):
        with raises(RuntimeError, operation="device", where="gpu(99)"):
            nn.Replicas(net, found)


def test_the_network_must_be_on_the_first_device(monkeypatch):
    monkeypatch.setattr("hpcdp.core.arrays._cupy", lambda device: None)  # a machine that has every GPU
    for net in (network(), nn.Sequential(nn.Dense(None, 4))):
        with raises(
            RuntimeError, operation="Replicas", where="gpu(1)", got="cpu(0)", remedy=["net.to", "hpcdp.gpu(1)"]
        ):
            nn.Replicas(net, [hpcdp.gpu(1), hpcdp.cpu()])
    assert nn.Replicas(network(), [hpcdp.cpu(7)])(X).shape == (37, 4)  # a virtual device, in the same memory


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (
            lambda: nn.Replicas(network(), []),
            {"operation": "Replicas", "where": "devices", "expected": "list", "got": "[]"},
        ),
        (
            lambda: nn.Replicas(network(), hpcdp.cpu()),
            {"operation": "Replicas", "where": "devices", "expected": "list", "got": "cpu(0)"},
        ),
        (
            lambda: nn.Replicas(network(), devices(1) * 2),
            {"operation": "Replicas", "where": "devices", "expected": "distinct", "got": "cpu(0)"},
        ),
        (
            lambda: nn.Replicas(network, devices(2)),
            {"operation": "Replicas", "where": "net", "expected": "Module"},
        ),
        (
            lambda: data.split_and_load(X, 2),
            {"operation": "split_and_load", "where": "devices", "expected": "list", "got": 2},
        ),
        (
            lambda: data.split_and_load(X, ["cpu"]),
            {"operation": "split_and_load", "where": "devices", "expected": "list", "got": "cpu"},
        ),
        (lambda: data.split_and_load(None, devices(2)), {"operation": "split_batch", "where": "x"}),
        (lambda: network().to(like=3), {"operation": "to", "where": "like", "got": "int"}),
        (
            lambda: network().to("cpu"),
            {"operation": "to", "where": "dtype", "expected": "hpcdp.cpu(0)", "got": "cpu"},
        ),
    ],
)
def test_what_are_no_devices_and_no_network(make, fields):
    with raises(ConfigError, **fields):
        make()
