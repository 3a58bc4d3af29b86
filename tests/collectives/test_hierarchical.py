"""Over nodes: any number of ranks on each, and what crosses the network."""

import numpy as np
import pytest
from by_numpy import assert_close, assert_same_bits, data, reduced
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdp.collectives import allreduce, hierarchical, iallreduce
from hpcdp.comm import thread_comm

NODES = [(5, 2), (7, 3), (8, 3), (6, (2, 1, 3)), (8, (4, 4)), (8, (1, 3, 4)), (4, (1, 1, 1, 1)), (3, (3,)), (1, (1,))]


@pytest.mark.each_value
@pytest.mark.parametrize("segment_nbytes", [512, 1 << 19])
@pytest.mark.parametrize(("n", "nodes"), NODES)
def test_any_ranks_per_node(n, nodes, segment_nbytes, monkeypatch):
    monkeypatch.setattr(hierarchical, "SEGMENT_NBYTES", segment_nbytes)
    cases = [
        (dtype, op, count)
        for dtype, op in [
            ("float16", "mean"),
            ("float32", "sum"),
            ("float64", "max"),
            ("int16", "sum"),
            ("int8", "min"),
        ]
        for count in (0, 1, n - 1, n + 1, 1009, 2501)  # which has more segments than there are lanes
    ]

    def rank(world):
        return [allreduce(data(world.rank, count, t), op, world, "hierarchical") for t, op, count in cases]

    for (dtype, op, count), *results in zip(cases, *thread_comm.run(n, rank, nodes), strict=True):
        assert_close(results[0], reduced(n, count, dtype, op), n, op, count)
        assert_same_bits(results)


@pytest.mark.parametrize("segments", [1, 4, 30])
@pytest.mark.parametrize(
    ("n", "nodes", "m", "rails"), [(8, 4, 2, 4), (8, 2, 4, 2), (7, 3, 3, 1), (6, (2, 4), 2, 2), (3, (3,), 1, 3)]
)
def test_what_crosses_the_network(n, nodes, m, rails, segments, monkeypatch):
    """2 (m - 1) messages a segment and 2 (m - 1) / m S / r bytes for m nodes and r rails, and nothing else."""
    monkeypatch.setattr(hierarchical, "SEGMENT_NBYTES", 960)
    count = 240 * segments

    def rank(world):
        allreduce(np.ones(count, "f4"), "sum", world, "hierarchical")
        assert world.comm.traffic.nbytes == world.node_comm.traffic.nbytes == 0
        return (world.rail_comm.traffic.messages, world.rail_comm.traffic.nbytes) if world.rail_comm else None

    sent = [traffic for traffic in thread_comm.run(n, rank, nodes) if traffic]
    assert sent == [(2 * (m - 1) * segments, 2 * (m - 1) * 4 * count / m / rails)] * (rails * m)


def test_ranks_that_share_no_memory_go_around_one_ring():
    def rank(world):
        allreduce(np.ones(60), "sum", world, "hierarchical")
        return world.rail_comm.traffic.nbytes

    assert thread_comm.run(5, rank, ranks_per_node=1) == [2 * 4 * 8 * 12] * 5


@settings(max_examples=30)
@given(
    nodes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    counts=st.lists(st.integers(0, 900), min_size=2, max_size=4),
    seed=st.integers(0, 99),
)
def test_several_at_once_take_turns_on_the_lanes(nodes, counts, seed):
    n = sum(nodes)

    def rank(world):
        arrays = [data(world.rank, count) for count in counts]
        requests = [iallreduce(x, "sum", world, "hierarchical") for x in arrays]
        for number in np.random.default_rng([seed, world.rank]).permutation(len(counts)):
            requests[number].wait()
        return arrays

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hierarchical, "SEGMENT_NBYTES", 512)
        results = thread_comm.run(n, rank, tuple(nodes))
    for count, *arrays in zip(counts, *results, strict=True):
        assert_close(arrays[0], reduced(n, count), n, "sum")
        assert_same_bits(arrays)
