"""Training on stores: a small network, batches that are dealt to ranks in several ways, rules."""

import numpy as np

import hpcdp
from hpcdp import nn, optim
from hpcdp.autograd import record

WORLDS = [(1, None), (2, None), (3, None), (4, None), (2, 1), (3, 1), (3, 2), (4, 2)]
"""Ranks, and ranks per node."""


BATCH = 7


def network(seed=0):
    return nn.models.mlp(input_shape=5, num_classes=3, hidden=(4, 6), seed=seed)


def samples(step):
    rng = np.random.default_rng([1, step])
    return rng.standard_normal((BATCH, 5)).astype("f4"), rng.integers(0, 3, BATCH)


def backward(net, step, mine):
    x, y = samples(step)
    with record():
        loss = nn.functional.softmax_cross_entropy(net(x[mine]), y[mine])
    loss.backward()


def in_turn(world, step):
    return np.arange(world.rank, BATCH, world.size)


def uneven(world, step):
    """Some ranks may have none."""
    return np.flatnonzero(np.random.default_rng(step).integers(0, world.size, BATCH) == world.rank)


def all_to_the_last(world, step):
    return np.arange(BATCH) if world.rank == world.size - 1 else np.arange(0)


def rule(name):
    if name == "schedule":
        return optim.SGD(lr=optim.WarmupSchedule(optim.ConstantSchedule(0.2), steps=4), momentum=0.9)
    return optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01) if name == "sgd" else optim.Adam(lr=0.01)


def values_of(net):
    return np.concatenate([param.asnumpy().reshape(-1) for param in net.parameters()])


def train(world, optimizer="sgd", split=in_turn, steps=5, by_hand=False, **options):
    """The parameters after some steps of a batch of `BATCH` samples, dealt by ``split``."""
    net = network(seed=world.rank)  # rank 0's values count
    trainer = hpcdp.Trainer(net.parameters(), rule(optimizer), world, **options)
    for step in range(steps):
        mine = split(world, step)
        if len(mine):
            backward(net, step, mine)
        if by_hand:
            trainer.allreduce_grads()
            assert trainer.update(len(mine)) == BATCH
        else:
            assert trainer.step(len(mine)) == BATCH
        if step == 2:
            trainer.optimizer.lr = 0.05
    assert trainer.step(0) == 0  # nobody has samples: nothing happens
    assert trainer.step_count == steps
    trainer.synchronize()  # nothing is missing here, and nothing may change
    assert trainer.step_count == steps
    assert trainer.statistics() == {}
    return values_of(net)
