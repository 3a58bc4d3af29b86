import numpy as np

from hpcdp.collectives import allgather, allreduce, broadcast
from hpcdp.comm import thread_comm


def sent(n, call):
    def rank(world):
        call(world)
        return world.comm.traffic.messages, world.comm.traffic.nbytes

    return thread_comm.run(n, rank)


def test_it_sends_what_its_formula_says():
    x = np.zeros(100, np.float32)
    assert sent(5, lambda world: allreduce(x.copy(), "sum", world, "reference")) == [(4, 1600)] * 5
    assert sent(5, lambda world: allgather(x[:20], world, "reference")) == [(4, 320)] * 5
    assert sent(5, lambda world: broadcast(x.copy(), 3, world, "reference")) == [(0, 0)] * 3 + [(4, 1600), (0, 0)]
