"""Shares of ranks in a batch: given, measured, kept; what is learned does not depend on them."""

import time

import numpy as np
from raises import raises

from hpcdp import nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data import ArrayDataset, DataLoader, ShardedSampler
from hpcdp.errors import ConfigError
from hpcdp.train.callbacks import AdaptWorkLoad, adapted
from hpcdp.train.config import TrainConfig, parse_work_load
from hpcdp.train.fit import fit
from hpcdp.train.trainer import Trainer

RNG = np.random.default_rng(3)
SAMPLES = ArrayDataset(RNG.standard_normal((96, 5)).astype(np.float32), RNG.integers(0, 3, 96))


class Slow(nn.Module):
    """A network that takes so many seconds a sample."""

    def __init__(self, net, seconds):
        self.net, self.seconds = net, seconds

    def forward(self, x):
        time.sleep(self.seconds * len(x))
        return self.net(x)


def train(world, epochs, seconds=None):
    net = nn.models.mlp(5, 3, hidden=(4,), seed=1)
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world=world)
    sampler = ShardedSampler(len(SAMPLES), 32, world.size, world.rank, seed=2)
    adapting = [] if seconds is None else [AdaptWorkLoad(sampler)]
    whole = net if seconds is None else Slow(net, seconds[world.rank])
    records = fit(whole, trainer, DataLoader(SAMPLES, sampler, 0), epochs=epochs, callbacks=adapting, world=world)
    return records, [param.data.copy() for param in net.parameters()], sampler.weights, adapting


def test_a_slow_rank_gets_less_and_nothing_else_changes():
    ((_, expected, _, _),) = thread_comm.run(1, lambda world: train(world, 4))
    for records, params, weights, (adapting,) in thread_comm.run(2, lambda world: train(world, 4, (0.0005, 0.002))):
        shares = [each["work_load"] for each in records]
        assert shares[0] == [1.0, 1.0]
        assert [each for _, each in adapting.history] == shares
        assert shares[1][0] > 1.15 * shares[1][1]
        assert weights[0] / sum(weights) > 0.62  # on the way to 0.8
        for a, b in zip(params, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_shares_go_half_of_the_way_to_the_speeds():
    assert adapted([1, 1], [1.0, 3.0], 64) == [625, 375]
    assert adapted([625, 375], [1.0, 1.0], 64) == [625, 375]
    assert adapted([1, 1, 1], [1.0, 1.0, 1000.0], 4) == [417, 417, 250]
    assert adapted([3, 1], [1.0, 0.0], 64) == [3, 1]


def test_settings():
    assert parse_work_load("3,1", 2) == [3, 1]
    assert parse_work_load("measured", 2) is None
    assert TrainConfig(ranks=2, work_load="3, 1").work_load == "3, 1"
    for text, ranks, fields in (
        ("3,1", 3, {"expected": [3, "measured"], "got": "3,1"}),
        ("fast", None, {"got": "fast"}),
        ("1,-1", 2, {"expected": 2}),
        ("1,nan", 2, {"expected": 2}),
    ):
        with raises(ConfigError, operation="setting work_load", **fields):
            TrainConfig(ranks=ranks, work_load=text)
    for other in ({"reproducible": True}, {"kv_store": "dist_async"}):
        with raises(ConfigError, operation="setting work_load", expected="together"):
            TrainConfig(work_load="measured", **other)
