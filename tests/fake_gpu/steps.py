"""Prints how often the host waits for its GPU in five steps of training, by kind of step, as JSON."""

import gc
import json
from typing import Any

import cupy
import fake_gpu
import numpy as np

import hpcdp
from hpcdp import nn, optim
from hpcdp.train import TrainStep
from hpcdp.train.trainer import Trainer

IMAGES = {"lenet": (1, 28, 28), "resnet18_cifar": (3, 32, 32)}
OPTIMIZERS = {"sgd": optim.SGD(0.1, momentum=0.9), "adamw": optim.AdamW(0.1), "lars": optim.LARS(0.1)}
WARM_UP, STEPS = 3, 5

world = hpcdp.init()
world.device.use()


HOW = ("", " hybridized", " whole")
"""As written; the network hybridized; the whole step."""


def waits(model: str, optimizer: str, how: str, **options: Any) -> int:
    net = nn.models.create(model, input_shape=IMAGES[model], num_classes=10, seed=0).to(world.device)
    if how == " hybridized":
        net.hybridize()
    trainer = Trainer(net.parameters(), OPTIMIZERS[optimizer], world=world, **options)
    step = TrainStep(net, trainer)
    step.hybridize(how == " whole")
    x, labels = cupy.zeros((2, *IMAGES[model]), np.float32), cupy.zeros(2, np.int64)
    before = 0
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            gc.collect()  # to give back memory of an earlier network waits, whenever that is
            before = fake_gpu.waits()
        step(x, labels)
    return fake_gpu.waits() - before


found = {}
for model in IMAGES:
    for how in HOW:
        for optimizer in OPTIMIZERS:
            found[f"{model} {optimizer}{how}"] = waits(model, optimizer, how)
        found[f"{model} sgd{how} clip_norm"] = waits(model, "sgd", how, clip_norm=1.0)
        found[f"{model} sgd{how} skip"] = waits(model, "sgd", how, policy=hpcdp.Policy(nonfinite="skip"))
if world.rank == 0:
    print(json.dumps({"device": str(world.device), "waits": found}))
