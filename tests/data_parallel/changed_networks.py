"""A network whose parameters programs change by themselves, and how it is trained."""

import numpy as np

from hpcdp import nn
from hpcdp.autograd import record


def network(dtype="float32"):
    net = nn.Sequential(nn.Dense(6, 8, activation="relu"), nn.Dense(8, 4))
    for number, param in enumerate(net.parameters()):
        param.data[...] = np.random.default_rng(number).normal(size=param.shape)
    return net.to(dtype)


def halve(net):
    for param in net.parameters():
        param *= 0.5


def steps(net, trainer, rank, size, first, count):
    for step in range(first, first + count):
        rng = np.random.default_rng(step)
        x, y = rng.normal(size=(12, 6)), rng.integers(0, 4, 12)
        mine = slice(12 * rank // size, 12 * (rank + 1) // size)
        with record():
            out = net(x[mine].astype(net[0].weight.dtype)).astype("float32")
            loss = nn.functional.softmax_cross_entropy(out, y[mine])
        loss.backward()
        trainer.step(len(y[mine]))
