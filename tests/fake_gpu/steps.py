"""Prints how often the host waits for its GPU in five steps of training, by kind of step, as JSON."""

import json

import cupy
import fake_gpu
import numpy as np

import hpcdp
from hpcdp import autograd, nn, optim
from hpcdp.train.trainer import Trainer

IMAGES = {"lenet": (1, 28, 28), "resnet18_cifar": (3, 32, 32)}
OPTIMIZERS = {"sgd": optim.SGD(0.1, momentum=0.9), "adamw": optim.AdamW(0.1), "lars": optim.LARS(0.1)}
WARM_UP, STEPS = 3, 5

world = hpcdp.init()
world.device.use()


def waits(model: str, optimizer: str, hybridized: bool, clip_norm: float | None) -> int:
    net = nn.models.create(model, input_shape=IMAGES[model], num_classes=10, seed=0).to(world.device)
    if hybridized:
        net.hybridize()
    trainer = Trainer(net.parameters(), OPTIMIZERS[optimizer], world=world, clip_norm=clip_norm)
    x, labels = cupy.zeros((2, *IMAGES[model]), np.float32), cupy.zeros(2, np.int64)
    before = 0
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            before = fake_gpu.waits()
        with autograd.record():
            loss = nn.losses.softmax_cross_entropy(net(x), labels).sum()
        loss.backward()
        trainer.step(2)
    return fake_gpu.waits() - before


found = {}
for model in IMAGES:
    for hybridized in (False, True):
        for optimizer in OPTIMIZERS:
            found[f"{model} {optimizer}{' hybridized' * hybridized}"] = waits(model, optimizer, hybridized, None)
        found[f"{model} sgd{' hybridized' * hybridized} clip_norm"] = waits(model, "sgd", hybridized, 1.0)
if world.rank == 0:
    print(json.dumps({"device": str(world.device), "waits": found}))
