"""The choice of a reduction, and what all reductions on the host and both schedulers have in common."""

import numpy as np
import pytest

from hpcdp import nn
from hpcdp.comm import thread_comm
from hpcdp.compression import Compression
from hpcdp.data_parallel import Reducer, bucket_layout
from hpcdp.data_parallel.bucket_layout import State
from hpcdp.data_parallel.cpu_reduction import HierarchicalReduction, SharedMemoryReduction
from hpcdp.data_parallel.deterministic import DeterministicReduction
from hpcdp.data_parallel.overlap import OverlapScheduler, Scheduler

SHAPES = [(7, 3), (5,), (40, 30)]
INSIDE = Compression.of({"type": "fp16", "inside_nodes": "on"})
CASES = {
    "one rank": (1, None, {}, SharedMemoryReduction),
    "one node": (2, None, {}, SharedMemoryReduction),
    "compressed on one node": (2, None, {"compression": Compression.of("fp16")}, SharedMemoryReduction),
    "two nodes": (2, 1, {}, HierarchicalReduction),
    "uneven nodes": (3, (1, 2), {}, HierarchicalReduction),
    "compressed inside a node": (2, None, {"compression": INSIDE}, HierarchicalReduction),
    "reproducible on one node": (2, None, {"virtual_shards": 2}, DeterministicReduction),
    "reproducible on two nodes": (2, 1, {"virtual_shards": 2}, DeterministicReduction),
}


def make(world, overlap, **settings):
    params = [nn.Parameter(np.zeros(shape, "f4"), name=f"p{i}") for i, shape in enumerate(SHAPES)]
    layout = bucket_layout.plan([(p.name, p.data.shape, p.data.dtype) for p in params], 0.004, 0.004)
    return Reducer(params, layout, world, overlap, **settings), params


def write(params, value):
    for param in reversed(params):
        param.grad[...] = value
        param.grad_hook(param)


@pytest.mark.filterwarnings("ignore:compression")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_each_reduction_sums_by_the_same_calls(case, overlap):
    n, nodes, settings, expected = CASES[case]

    def rank(world):
        reducer, params = make(world, overlap, **settings)
        write(params, 1.0 + world.rank)
        reducer.launch_rest()
        reducer.tally(0)
        reducer.reduce_everywhere()
        sums = [float(x) for param in params for x in np.unique(param.grad)]
        reducer.reset()
        return type(reducer.reduction), type(reducer.scheduler), set(sums)

    scheduler = OverlapScheduler if overlap else Scheduler
    assert thread_comm.run(n, rank, nodes) == [(expected, scheduler, {n * (n + 1) / 2})] * n


def test_a_bucket_is_updated_when_it_is_reduced():
    def rank(world):
        reducer, params = make(world, True)
        write(params, 1.0)
        reducer.launch_rest()
        reducer.tally(0)
        states = []
        for bucket in reversed(reducer.buckets):
            reducer.update_later(bucket, lambda bucket=bucket: states.append(bucket.state))
        reducer.settle()
        return states, len(reducer.buckets)

    for states, num_buckets in thread_comm.run(2, rank, 1):
        assert states == [State.REDUCED] * num_buckets


def test_only_gradients_over_the_network_are_left_unsent():
    def rank(world):
        reducer, _ = make(world, False, compression=Compression.of("fp16"))
        return reducer.keeps_unsent

    assert thread_comm.run(2, rank, 1) == [True] * 2
    with pytest.warns(UserWarning, match="changes nothing on one node"):
        assert thread_comm.run(2, rank) == [False] * 2
