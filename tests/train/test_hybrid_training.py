"""Hybridized networks under trainers: the same bits as without plans, on any number of ranks and with any trainer."""

import numpy as np
import pytest
from trained_by_plans import OPTIONS, convolutional, require_same_bits

import hpcdp
from hpcdp import nn, optim
from hpcdp.autograd import predict_mode, record
from hpcdp.comm import thread_comm
from hpcdp.parallel.functional import SyncBatchNorm

F = nn.functional


def trained(world, hybrid, sync=False, accumulate=False, **options):
    """Parameters, statistics and results after steps on uneven batches, with a look at the network between them."""
    net = convolutional(world.rank)
    if sync:
        SyncBatchNorm.convert(net, world)
    if hybrid:
        net.hybridize()
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world, **options)
    rng = np.random.default_rng([7, world.rank])
    seen = []

    def backward(count):
        x = rng.standard_normal((count, 1, 6, 6)).astype(np.float32)
        with record():
            loss = F.softmax_cross_entropy(net(x), rng.integers(0, 3, count))
        loss.backward()

    for step in range(6):
        for _ in trainer.own_virtual_shards:
            count = 3 + (world.rank + step) % 2
            if accumulate:
                with trainer.no_sync():
                    backward(2)
                    trainer.step(2)
            backward(count)
            trainer.step(count)
        with predict_mode():
            seen.append(net(rng.standard_normal((2, 1, 6, 6)).astype(np.float32)).asnumpy())
    world.barrier()
    return [np.array(value) for value in net.state_dict().values()] + seen


@pytest.mark.each_value
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_training_is_the_same_bits(n, name):
    with_plans = thread_comm.run(n, lambda world: trained(world, True, **OPTIONS[name]))
    without = thread_comm.run(n, lambda world: trained(world, False, **OPTIONS[name]))
    require_same_bits(with_plans, without)


def test_the_update_behind_a_replay_is_one_call_a_bucket(monkeypatch):
    """Whatever the number of parameters: a plan has nothing to gain from an update of its own."""
    calls = []
    update = optim.SGD.update
    monkeypatch.setattr(
        optim.SGD, "update", lambda self, *args, **kwargs: calls.append(1) or update(self, *args, **kwargs)
    )

    def job(world):
        net = nn.models.mlp(8, 4, (8,) * 20)
        net.hybridize()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world)
        for _ in range(4):
            with record():
                loss = F.softmax_cross_entropy(net(np.ones((2, 8), np.float32)), np.array([0, 1]))
            loss.backward()
            calls.clear()
            trainer.step(2)
        return len(trainer.reducer.buckets), len(net.parameters())

    assert thread_comm.run(1, job) == [(1, 42)]
    assert len(calls) == 1
