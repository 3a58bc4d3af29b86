import numpy as np

from hpcdp.collectives import Monoid
from hpcdp.collectives.algorithm_choice import choose
from hpcdp.comm import thread_comm
from hpcdp.comm.communicator import resolve


def chosen(collective, dtype="f8", op="sum", ranks_per_node=None):
    def rank(world):
        return choose(collective, 64, np.dtype(dtype), resolve(collective, op, np.dtype(dtype)), world)

    results = thread_comm.run(2, rank, ranks_per_node)
    assert len(set(results)) == 1
    return results[0]


def test_auto_uses_shared_memory_inside_a_node_and_the_library_elsewhere():
    for collective in ("allreduce", "reduce_scatter", "reduce"):
        assert chosen(collective) == "shared"
        assert chosen(collective, "i2") == "native"
    assert chosen("allreduce", ranks_per_node=1) == "recursive_doubling"
    assert chosen("reduce", ranks_per_node=1) == "recursive_doubling"


def test_what_the_library_cannot_reduce_is_reduced_here():
    mine = Monoid(np.logaddexp, -np.inf)
    for collective in ("allreduce", "reduce_scatter", "reduce"):
        assert chosen(collective, op=mine) not in ("native", "shared", "reference")
