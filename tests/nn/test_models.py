import threading

import numpy as np
import pytest
import standin
from raises import raises

from hpcdp import autograd, nn, optim
from hpcdp.errors import ConfigError


def batch(shape, n=6, classes=10):
    rng = np.random.default_rng(6)  # the same whichever tests have run before
    return rng.standard_normal((n, *shape)).astype(np.float32), rng.integers(0, classes, n)


def train_step(net, x, y, optimizer, states, step):
    with autograd.record():
        loss = nn.functional.softmax_cross_entropy(net(x), y)
    loss.backward()
    for param, state in zip(net.parameters(), states, strict=True):
        optimizer.update(param.data.reshape(-1), param.grad.reshape(-1), state, step=step, scale=1 / len(y))
    return loss.asnumpy()


def train(net, x, y, steps=3, lr=0.1):
    optimizer = optim.SGD(lr=lr, momentum=0.9)
    states = [optimizer.init_state(param.data.reshape(-1)) for param in net.parameters()]
    return [train_step(net, x, y, optimizer, states, step) for step in range(1, steps + 1)]


def test_lenet_has_the_documents_shapes():
    net = nn.models.lenet()
    assert [param.shape for param in net.parameters()] == [
        (20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,),
    ]  # fmt: skip
    assert sum(param.size for param in net.parameters()) == 129_068
    assert net(np.zeros((0, 1, 28, 28), np.float32)).shape == (0, 10)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 16, 16), (3, 32, 32), (1, 28, 20), (2, 5, 9), (1, 27, 27)])
def test_lenet_adapts_to_other_images(shape):
    net = nn.models.lenet(shape, num_classes=7)
    x, y = batch(shape, classes=7)
    losses = train(net, x, y, steps=12)
    assert losses[0].shape == (6,)
    assert losses[-1].mean() < 0.9 * losses[0].mean()
    if shape == (1, 8, 8):
        assert sum(param.size for param in net.parameters()) == 129_068 - 3 * 129


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ((1, 3, 28), {"where": "height", "expected": 4, "got": 3}),
        ((28, 28), {"where": "input_shape", "expected": ["(channels, height, width)", 1], "got": (28, 28)}),
        ((0, 28, 28), {"where": "input_shape", "expected": ["(channels, height, width)", 1], "got": (0, 28, 28)}),
    ],
)
def test_what_is_impossible_for_lenet_is_said(shape, fields):
    with raises(ConfigError, operation="lenet", **fields):
        nn.models.lenet(shape)


def test_mlp():
    net = nn.models.mlp((1, 8, 8), num_classes=4, hidden=(32, 16))
    assert [param.shape for param in net.parameters()] == [(64, 32), (32,), (32, 16), (16,), (16, 4), (4,)]
    losses = train(net, *batch((1, 8, 8), classes=4), steps=20)
    assert losses[-1].mean() < 0.5 * losses[0].mean()
    assert [param.shape for param in nn.models.mlp(5, 2, hidden=()).parameters()] == [(5, 2), (2,)]
    with raises(ConfigError, operation="mlp", where="width", expected=1, got=0):
        nn.models.mlp(5, 2, hidden=(0,))


@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_seeds_fix_the_weights(name):
    first, same, other = (nn.models.create(name, input_shape=(1, 28, 28), num_classes=10, seed=s) for s in (0, 0, 1))
    pairs = zip(first.parameters(), same.parameters(), other.parameters(), strict=True)
    for a, b, c in pairs:
        np.testing.assert_array_equal(a.data, b.data)
        assert a.ndim == 1 or not np.array_equal(a.data, c.data)


def test_a_wrong_name_lists_the_valid_ones():
    with raises(ConfigError, operation="model", expected=["char_lstm", "resnet18", "resnet18_cifar"], got="lenett"):
        nn.models.create("lenett")
    with raises(ConfigError, operation="model", where="lenet", got="sead"):
        nn.models.create("lenet", sead=1)


def test_device_arrays_train_alike():
    x, y = batch((1, 28, 28))
    host, device = nn.models.lenet(seed=3), nn.models.lenet(seed=3)
    device.to(like=standin.asarray(x))
    for ours, expected in zip(train(device, standin.asarray(x), y), train(host, x, y), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4)
    for a, b in zip(device.parameters(), host.parameters(), strict=True):
        np.testing.assert_allclose(a.asnumpy(), b.data, rtol=1e-3, atol=1e-5)


def test_threads_train_networks_of_their_own_alike():
    x, y = batch((1, 28, 28), n=40)
    expected = train(nn.models.lenet(seed=1), x, y)
    results = {}

    def work(number):
        results[number] = train(nn.models.lenet(seed=1), x, y)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for losses in results.values():
        np.testing.assert_array_equal(losses, expected)
    assert len(results) == 3


def test_lenet_trains_as_pytorchs():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    net = nn.models.lenet(seed=2)
    layers = [
        torch.nn.Conv2d(1, 20, 3), torch.nn.ReLU(), torch.nn.AvgPool2d(2), torch.nn.Conv2d(20, 50, 5), torch.nn.ReLU(),
        torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(800, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10),
    ]  # fmt: skip
    peer = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for theirs, ours in zip(peer.parameters(), net.parameters(), strict=True):
            theirs.copy_(torch.from_numpy(ours.data.T.copy() if ours.ndim == 2 else ours.data))
    x, y = batch((1, 28, 28), n=20)
    optimizer = torch.optim.SGD(peer.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(peer(torch.from_numpy(x)), torch.from_numpy(y), reduction="none")
        loss.mean().backward()
        optimizer.step()
        expected.append(loss.detach().numpy())
    np.testing.assert_allclose(train(net, x, y, steps=5), expected, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "shape", "learned"),
    [(nn.models.resnet18, (1, 28, 28), 11_175_818), (nn.models.resnet18_cifar, (3, 32, 32), 11_173_962)],
)
def test_resnet18_has_the_published_number_of_parameters(make, shape, learned):
    net = make(shape)
    assert sum(param.size for param in net.parameters()) == learned
    assert net(np.zeros((2, shape[0], 8, 8), np.float32)).shape == (2, 10)
    assert [len(block) for block in net if isinstance(block, nn.Sequential)] == [2, 2, 2, 2]


def test_a_residual_block_is_its_formula():
    block = nn.models.Residual(3, 5, stride=2, normalises_shortcut=True)
    x = np.random.default_rng(6).standard_normal((4, 3, 7, 6)).astype(np.float32)
    normal = block.norm2(block.conv2(nn.functional.relu(block.norm1(block.conv1(x)))))
    expected = np.maximum(normal.data + block.shortcut(x).data, 0)
    np.testing.assert_array_equal(block(x).data, expected)
    assert block(x).shape == (4, 5, 4, 3) and block.shortcut[0].weight.shape == (5, 3, 1, 1)
    assert nn.models.Residual(3, 3).shortcut is None


def test_resnet18_learns():
    net, (x, y) = nn.models.resnet18((1, 4, 4), num_classes=3), batch((1, 4, 4), classes=3)
    losses = train(net, x, y, steps=4, lr=0.002)
    assert losses[-1].mean() < 0.5 * losses[0].mean()


@pytest.mark.parametrize("shape", [(28, 28), (0, 8, 8)])
def test_what_is_impossible_for_resnet18_is_said(shape):
    with raises(ConfigError, operation="resnet18", where="input_shape", expected="(channels, height, width)"):
        nn.models.resnet18(shape)
    with raises(ConfigError, operation="resnet18", where="variant", got="imagenet"):
        nn.models.resnet18(variant="imagenet")
