"""Training whose bits are compared: a network with every layer that depends on how a batch is cut, on few samples."""

import numpy as np

from hpcdp import Trainer, nn, optim
from hpcdp.autograd import record
from hpcdp.data import ArrayDataset, VirtualShardSampler

RNG = np.random.default_rng(7)
IMAGES = RNG.standard_normal((75, 1, 6, 6)).astype(np.float32)
LABELS = RNG.integers(0, 4, 75)
"""Batches of 32 leave a last one of 11: fewer samples than 13 virtual shards."""
SET = ArrayDataset(IMAGES, LABELS)


def network(dropout=0.3):
    net = nn.Sequential(
        nn.Conv2D(1, 5, 3, padding=1), nn.BatchNorm(5), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout, seed=3),
        nn.Dense(180, 24, activation="relu"), nn.Dropout(dropout, seed=3), nn.Dense(24, 4),
    )  # fmt: skip
    for number, param in enumerate(net.parameters()):
        param.data = (np.random.default_rng(number).standard_normal(param.shape) / 8 + 0.1).astype(np.float32)
    return net


def trainer_of(net, world, rule=None, **options):
    options = {"reproducible": True, "bucket_cap_mb": 0.01} | options
    return Trainer(net.parameters(), rule or optim.Adam(lr=0.01), world, **options)


def sampler_of(trainer, world, batch_size=32, **options):
    return VirtualShardSampler(len(SET), batch_size, trainer.virtual_shards, world.size, world.rank, **options)


def backward(net, x, y):
    if len(y):
        with record():
            losses = nn.functional.softmax_cross_entropy(net(x), y)
        losses.backward()


def train(net, trainer, batches):
    """Returns the network's parameters and buffers, to the bit."""
    for indices in batches:
        backward(net, IMAGES[indices], LABELS[indices])
        trainer.step(len(indices))
    return b"".join(np.array(array).tobytes() for array in net.state_dict().values())


def epoch(world, num=8, seed=1, **options):
    net = network()
    trainer = trainer_of(net, world, virtual_shards=num, **options)
    return train(net, trainer, sampler_of(trainer, world, seed=seed))
