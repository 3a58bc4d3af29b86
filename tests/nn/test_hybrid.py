"""A hybridized network does what it does without a plan, to the bit: results, gradients, statistics, hooks."""

import copy

import numpy as np
import pytest

from hpcdp import autograd, nn, optim
from hpcdp.autograd import Tensor
from hpcdp.nn.models import Residual

F = nn.functional


def arrays(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Branches(nn.Module):
    """Every way of using operators that layers do not have: sharing, broadcasting, parts, several results."""

    def __init__(self):
        self.weight = nn.Parameter(arrays(6, 6, seed=1))
        self.bias = nn.Parameter(arrays(6, seed=2))
        self.table = arrays(6, seed=3)
        self.offset = Tensor(arrays(6, seed=4))

    def forward(self, x):
        h = (x @ self.weight + self.bias).tanh()
        h = autograd.where(h > 0.1, h * 2, F.relu(h @ self.weight) - self.offset)
        parts = autograd.concatenate([h[:, :2], h[:, [3, 2, 2]], h.max(axis=1, keepdims=True)], axis=1)
        parts = autograd.maximum(parts, self.table) / (abs(h).sum(axis=1, keepdims=True) + 1.5)
        mixed = autograd.stack([parts, h.exp().log(), (h * h + 1).sqrt() ** 2], axis=1)
        flat = mixed.transpose(0, 2, 1).reshape(x.shape[0], 18)
        pause = h.detach() * parts
        with autograd.pause():
            unrecorded = h.sigmoid()
        return F.softmax(flat), (pause + unrecorded - h.min(axis=0)).mean(), parts.astype(np.float64)


class Recurrent(nn.Module):
    """The same parameters used many times, and a row of a batch at a time."""

    def __init__(self):
        self.cell, self.out = nn.Dense(8, 4), nn.Dense(4, 3)

    def forward(self, xs):
        h = xs[:, 0, :4] * 0
        for step in range(xs.shape[1]):
            h = self.cell(autograd.concatenate([xs[:, step], h], axis=1)).tanh()
        return self.out(h)


NETWORKS = {
    "mlp": (lambda: nn.models.mlp(12, 4, (9, 7)), (5, 12)),
    "lenet": (lambda: nn.models.lenet((1, 12, 12)), (3, 1, 12, 12)),
    "residual": (lambda: nn.Sequential(Residual(2, 3, stride=2), Residual(3, 3)), (3, 2, 6, 6)),
    "convolution, relu": (lambda: nn.Sequential(nn.Conv2D(2, 3, 3, 2, 1), nn.ReLU(), nn.MaxPool2D(2)), (2, 2, 7, 7)),
    "dense, relu": (lambda: nn.Sequential(nn.Dense(6, 5, bias=False), nn.ReLU(), nn.Sigmoid(), nn.Tanh()), (4, 6)),
    "dropout": (lambda: nn.Sequential(nn.Dense(6, 5), nn.Dropout(0.4, seed=3), nn.Dense(5, 2)), (4, 6)),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm(3), nn.AvgPool2D(2), nn.GlobalAvgPool2D()), (4, 3, 6, 6)),
    "branches": (Branches, (4, 6)),
    "recurrent": (Recurrent, (4, 5, 4)),
}  # fmt: skip


def listed(found):
    return list(found) if isinstance(found, (tuple, list)) else [found]


def same(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape and a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(np.uint8) if a.ndim else a, b.view(np.uint8) if b.ndim else b)


def same_networks(net, plain):
    for (name, own), (_, other) in zip(net._tensors(), plain._tensors(), strict=True):
        np.testing.assert_array_equal(own.data, other.data, err_msg=name)
        if own.grad is not None:
            np.testing.assert_array_equal(own.grad, other.grad, err_msg=name)


def step(net, x, x_grad=True):
    x = Tensor(x)
    if x_grad:
        x.attach_grad()
    with autograd.record():
        found = listed(net(x))
        total = sum([(each * each).sum() for each in found[1:]], (found[0] * found[0]).sum())
    total.backward()
    return [*found, x.grad] if x_grad else found


IN_FLOAT64 = [(name, np.float64) for name in NETWORKS if name != "branches"]


@pytest.mark.parametrize(("name", "dtype"), [*((name, np.float32) for name in NETWORKS), *IN_FLOAT64])
def test_results_gradients_and_statistics_are_the_same_bits(name, dtype):
    make, shape = NETWORKS[name]
    net = make().to(dtype=dtype)
    plain = copy.deepcopy(net)
    net.hybridize()
    for number in range(3):
        x = arrays(*shape, seed=number, dtype=dtype)
        for own, other in zip(step(net, x), step(plain, x), strict=True):
            same(own, other)
        same_networks(net, plain)
        for net_mode in (autograd.predict_mode, autograd.train_mode):
            with net_mode():
                for own, other in zip(listed(net(x)), listed(plain(x)), strict=True):
                    same(own, other)
        same_networks(net, plain)


@pytest.mark.parametrize("name", ["resnet18", "resnet18_cifar"])
def test_large_models_are_the_same_bits(name):
    net = nn.models.create(name, input_shape=(3, 4, 4))
    plain = copy.deepcopy(net)
    net.hybridize()
    for number in range(3):
        x = arrays(2, 3, 4, 4, seed=number)
        for own, other in zip(step(net, x, False), step(plain, x, False), strict=True):
            same(own, other)
        same(net(x), plain(x))
    same_networks(net, plain)


@pytest.mark.parametrize("name", ["lenet", "dropout", "residual"])
def test_training_steps_are_the_same_bits(name):
    make, shape = NETWORKS[name]
    net = make()
    plain = copy.deepcopy(net)
    net.hybridize()
    optimizers = [optim.SGD(lr=0.05, momentum=0.9) for _ in range(2)]
    states = [[o.init_state(p.data.reshape(-1)) for p in n.parameters()]
              for n, o in zip((net, plain), optimizers, strict=True)]  # fmt: skip
    for number in range(1, 6):
        x, y = arrays(*shape, seed=number), np.arange(shape[0]) % 2
        for each, optimizer, state in zip((net, plain), optimizers, states, strict=True):
            with autograd.record():
                found = each(x)
                loss = F.softmax_cross_entropy(found.reshape(len(x), -1), y)
            loss.backward()
            for param, own in zip(each.parameters(), state, strict=True):
                optimizer.update(param.data.reshape(-1), param.grad.reshape(-1), own, step=number, scale=0.25)
        same_networks(net, plain)
