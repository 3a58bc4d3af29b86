"""Sums of buckets over ranks and nodes, by the MPI library between nodes and by rings."""

import numpy as np
import pytest

from hpcdp import nn
from hpcdp.comm import threads
from hpcdp.gradients import Reducer, buckets, reducer


def gradient(rank, shape):
    return np.random.default_rng([rank, *shape]).standard_normal(shape).astype("f4")


@pytest.mark.parametrize("way", ["native", "hierarchical"])
@pytest.mark.parametrize(("n", "nodes"), [(1, None), (3, None), (3, 1), (4, 2), (5, 2), (6, (2, 1, 3))])
def test_every_rank_holds_the_sum(n, nodes, way, monkeypatch):
    monkeypatch.setattr(reducer, "choose", lambda *_: way)

    def rank(world):
        params = [nn.Parameter(np.zeros(shape, "f4"), name=f"p{i}") for i, shape in enumerate([(7, 3), (5,), (1,)])]
        made = Reducer(params, buckets.plan([(p.name, p.data.shape, p.data.dtype) for p in params]), world)
        sums = []
        for step in range(2):
            for param in params:
                param.grad[...] = gradient(10 * step + world.rank, param.data.shape)
            made.gate.barrier()
            made.reduce_everywhere()
            sums.append([param.grad.copy() for param in params])
            made.gate.barrier()
        return sums, world.rail_comm.traffic.messages if world.rail_comm else 0

    results = threads.run(n, rank, nodes)
    for sums, _ in results:
        for step in range(2):
            for found in sums[step]:
                wanted = sum(gradient(10 * step + rank, found.shape).astype("f8") for rank in range(n))
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert (results[0][1] > 0) == (nodes is not None and way == "hierarchical")
