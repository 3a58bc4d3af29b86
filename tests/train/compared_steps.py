"""What tests of `TrainStep` on a GPU, or on `graphs_on_host`, share: the same steps by hand and by a plan."""

import numpy as np
from graph_checks import arrays, on_gpu, same

import hpcdp
from hpcdp import autograd, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.train import TrainStep

F = nn.functional
STEPS = 5
"""Traced, captured, replayed."""


def mlp():
    return nn.Sequential(nn.Dense(6, 8, activation="relu"), nn.Dropout(0.2, 3), nn.Dense(8, 3))


RULES = {
    "sgd": lambda: optim.SGD(lr=0.1, weight_decay=0.01),
    "momentum": lambda: optim.SGD(lr=optim.StepSchedule(0.1, 2, 0.5), momentum=0.9),
    "nesterov": lambda: optim.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optim.Adam(lr=0.01),
    "adamw": lambda: optim.AdamW(lr=optim.StepSchedule(0.1, 2, 0.5)),
}


def made(world, build=mlp, rule=RULES["momentum"], dtype=None, on_host=False, trained=slice(None), **options):
    """Network and trainer, of those parameters that are ``trained``, on the GPU unless ``on_host``; parameters by their
    numbers."""
    net = build()
    for number, param in enumerate(net.parameters()):
        param.data[...] = arrays(*param.shape, seed=number) / 4
    if not on_host:
        net.to(like=on_gpu(np.zeros(1, np.float32)))
    if dtype:
        net.to(dtype=dtype)
    return net, hpcdp.Trainer(net.parameters()[trained], rule(), world, **options)


def by_hand(net, trainer):
    def step(x, y):
        with autograd.record():
            output = net(x)
            losses = F.softmax_cross_entropy(output, y)
        losses.backward(trainer.loss_scale)
        trainer.step(len(y))
        return losses, output

    return step


def planned(net, trainer):
    step = TrainStep(net, trainer)
    step.hybridize()
    return step


def batches(shape, count=STEPS, host=False):
    rng = np.random.default_rng(1)
    for _ in range(count):
        x = rng.standard_normal(shape).astype(np.float32)
        y = rng.integers(0, 3, shape[:2] if len(shape) == 3 else shape[0])
        yield on_gpu(x), y if host else on_gpu(y)


def alone():
    return thread_comm.run(1, lambda world: world)[0]


def compare(world, shape=(4, 6), count=STEPS, host=False, between=lambda number, net, trainer: None, **options):
    """Train by hand and by a plan: the same losses, outputs, parameters, statistics and states. Returns both nets."""
    pairs = [made(world, **options), made(world, **options)]
    steps = [by_hand(*pairs[0]), planned(*pairs[1])]
    for number, (x, y) in enumerate(batches(shape, count, host)):
        found = []
        for (net, trainer), step in zip(pairs, steps, strict=True):
            between(number, net, trainer)
            found.append(step(x, y))
        check_alike(pairs, found)
    return pairs


def check_alike(pairs, found):
    """Whether both have ``found`` the same losses and outputs, and are where the other is."""
    for a, b in zip(*found, strict=True):
        same(a.data, b.data)
    for (name, own), (_, other) in zip(*(net._tensors() for net, _ in pairs), strict=True):
        assert name
        same(own.data, other.data)
    for own, other in zip(*(trainer.owner.states for _, trainer in pairs), strict=True):
        for name in own:
            same(own[name], other[name])
    numbers = [(each.step_count, each.num_nonfinite, each.loss_scale, each.good_steps) for _, each in pairs]
    assert numbers[0] == numbers[1]
