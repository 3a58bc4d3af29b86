"""Networks that are copied and pickled while a trainer has them, to keep the best one, say."""

import copy
import pickle

import numpy as np
import pytest
from raises import raises

import hpcdp
from hpcdp import nn, optim
from hpcdp.autograd import record
from hpcdp.comm import thread_comm
from hpcdp.errors import UnsupportedError


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"owner": "shard"}, {"kvstore": "dist_async"}], ids=str)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_of_a_network_is_one_that_nobody_trains(settings, copied):
    def rank(world):
        net = nn.Sequential(nn.Dense(4, 3), nn.Dense(3, 2))
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, **settings)

        def trains(net, trainer):
            with record():
                loss = net(np.full((2, 4), 1.0 + world.rank, "f4")).sum()
            loss.backward()
            trainer.step(2)

        trains(net, trainer)
        best = copied(net)
        kept = [param.data.copy() for param in best.parameters()]
        for param, own, same in zip(net.parameters(), best.parameters(), kept, strict=True):
            np.testing.assert_array_equal(param.data, same)
            assert not np.shares_memory(param.data, own.data) and not np.shares_memory(param.grad, own.grad)
        trains(net, trainer)
        for param, own, same in zip(net.parameters(), best.parameters(), kept, strict=True):
            np.testing.assert_array_equal(own.data, same)
            assert param.name == own.name and not np.array_equal(param.data, same)
        trains(best, hpcdp.Trainer(best.parameters(), optim.SGD(lr=0.1), world))
        trainer.synchronize()

    for n in (1, 2, 3):
        thread_comm.run(n, rank)


def test_a_trainer_is_not_copied():
    trainer = hpcdp.Trainer(nn.Dense(4, 2).parameters(), optim.SGD(lr=0.1))
    with raises(UnsupportedError, operation="Trainer"):
        copy.deepcopy(trainer)
