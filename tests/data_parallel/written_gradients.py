"""Parameters whose gradients the tests write themselves, and training on them, dealt to ranks in several ways."""

import numpy as np

from hpcdp import optim
from hpcdp.core.arrays import to_host
from hpcdp.train.trainer import Trainer

SHAPES = {"conv.weight": (20, 1, 3, 3), "conv.bias": (20,), "dense.weight": (300, 41), "dense.bias": (7,)}


class Parameter:
    """What the trainer asks of a parameter, without a tape."""

    def __init__(self, name, data):
        self.name, self.data, self.grad, self.grad_req, self.grad_hook = name, data, None, "write", None

    def write(self, gradient):
        if self.grad_req == "add":
            self.grad[...] = self.grad + gradient
        else:
            self.grad[...] = gradient
        self.grad_hook(self)


def model(seed, shapes=SHAPES, asarray=np.asarray):
    rng = np.random.default_rng(seed)
    return [Parameter(name, asarray(rng.standard_normal(s).astype("f4"))) for name, s in shapes.items()]


def sample_gradients(step, sample):
    rng = np.random.default_rng([step, sample])
    return [rng.standard_normal(shape).astype("f4") for shape in SHAPES.values()]


def backward(params, step, samples, asarray=np.asarray):
    sums = [np.zeros(shape, "f4") for shape in SHAPES.values()]
    for sample in samples:
        for total, gradient in zip(sums, sample_gradients(step, sample), strict=True):
            total += gradient
    for param, total in list(zip(params, sums, strict=True))[::-1]:
        param.write(asarray(total))


def train(world, optimizer="sgd", steps=6, split=None, owner="auto", clip_norm=None, asarray=np.asarray):
    """Six samples a step, dealt by ``split(world, step)``; the parameters at the end."""
    params = model(seed=world.rank, asarray=asarray)
    args = {"momentum": 0.9, "weight_decay": 0.01} if optimizer == "sgd" else {}
    trainer = Trainer(
        params, optim.create(optimizer, lr=0.1, **args), world,
        owner=owner, clip_norm=clip_norm, bucket_cap_mb=0.01,
    )  # fmt: skip
    for step in range(steps):
        mine = split(world, step) if split else range(world.rank, 6, world.size)
        if len(mine):
            backward(params, step, mine, asarray)
        assert trainer.step(len(mine)) == 6
    assert trainer.step(0) == 0  # nobody has samples: nothing happens
    assert trainer.step_count == steps
    world.comm.barrier()
    return np.concatenate([to_host(param.data).copy().reshape(-1) for param in params])


def all_to_the_last(world, step):
    return range(6) if world.rank == world.size - 1 else []


def uneven(world, step):
    owners = np.random.default_rng(step).integers(0, world.size, 6)
    return np.flatnonzero(owners == world.rank)
