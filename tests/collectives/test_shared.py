"""Collectives in a node's memory: nothing is sent."""

import numpy as np
from raises import raises

from hpcdp.collectives import allgather, allreduce, broadcast, reduce
from hpcdp.comm import thread_comm
from hpcdp.errors import UnsupportedError


def test_nothing_is_sent():
    def rank(world):
        allreduce(np.zeros(1000, np.float32), "sum", world, "shared")
        allgather(np.zeros(1000), world, "shared")
        broadcast(np.zeros(1000), 1, world, "shared")
        reduce(np.zeros(1000), "sum", 1, world, "shared")
        return world.comm.traffic.nbytes + world.node_comm.traffic.nbytes

    assert thread_comm.run(3, rank) == [0, 0, 0]


def test_several_nodes_are_refused_by_name():
    with raises(UnsupportedError, operation="allreduce", where="algorithm='shared'", got=2):
        thread_comm.run(4, lambda world: allreduce(np.zeros(3), world=world, algorithm="shared"), ranks_per_node=2)


def test_a_dtype_without_a_kernel_is_told():
    with raises(UnsupportedError, operation="allreduce", where="algorithm='shared'", expected=[8, 32, 64], got="int16"):
        thread_comm.run(2, lambda world: allreduce(np.zeros(3, "i2"), world=world, algorithm="shared"))
