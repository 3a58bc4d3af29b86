"""How long messages between nodes are: what ranks try, whom it binds, and that no sum depends on it."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hpcdp.comm import thread_comm
from hpcdp.comm.progress import MESSAGE_NBYTES
from hpcdp.data_parallel import Reducer, bucket_layout, cpu_reduction

SHORTEST = cpu_reduction.LONGER_NBYTES[0]


class Parameter:
    def __init__(self, name, count):
        self.name, self.data, self.grad = name, np.zeros(count, np.float32), None


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ((1, 1, 1), MESSAGE_NBYTES), ((1, 3, 1), MESSAGE_NBYTES), ((3, 1, 1), SHORTEST), ((9, 5, 2), 1 << 20),
        ((9, 3, 8), SHORTEST),
    ],
)  # fmt: skip
def test_longer_messages_are_sent_where_the_slowest_rank_gains_by_them(monkeypatch, seconds, chosen):
    """Until one is not worth it over that before."""
    lanes, clock = cpu_reduction.in_lanes, threading.local()
    lengths = (MESSAGE_NBYTES, *cpu_reduction.LONGER_NBYTES)

    def timed(pairs, steps, tag):
        length = max(length for length in lengths if pairs[0][0].nbytes > 0.9 * length)
        clock.now += seconds[lengths.index(length)] if clock.is_slow else 0
        return lanes(pairs, steps, tag)

    def rank(world):
        clock.now, clock.is_slow = 0, world.rank == 1
        return cpu_reduction.measured(world.comm)

    monkeypatch.setattr(cpu_reduction, "in_lanes", timed)
    monkeypatch.setattr(cpu_reduction, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    assert thread_comm.run(3, rank) == [chosen] * 3


def test_it_is_tried_once_in_a_world_and_for_long_buckets_alone(monkeypatch):
    tried = []
    monkeypatch.setattr(cpu_reduction, "measured", lambda comm: (tried.append(comm.rank), SHORTEST)[1])

    def rank(world):
        found = [cpu_reduction.fitting(world, world.comm, nbytes) for nbytes in (1 << 19, 1 << 20, 1 << 21)]
        return [*found, cpu_reduction.fitting(world, None, 1 << 30)]

    assert thread_comm.run(1, rank) == [[MESSAGE_NBYTES] * 4]
    assert thread_comm.run(3, rank) == [[MESSAGE_NBYTES, SHORTEST, SHORTEST, MESSAGE_NBYTES]] * 3
    assert sorted(tried) == [0, 1, 2]


@pytest.mark.parametrize(("n", "per_node"), [(2, 1), (3, 1), (4, 2), (5, 1)])
def test_sums_have_the_same_bits_however_long_messages_are(monkeypatch, n, per_node):
    def rank(world):
        params = [Parameter("a", 300_001), Parameter("b", 70)]
        layout = bucket_layout.plan([(p.name, p.data.shape, p.data.dtype) for p in params])
        reducer = Reducer(params, layout, world)
        asked.append(layout.longest_nbytes)
        found = []
        for step in range(2):
            for p in params:
                p.grad[...] = np.random.default_rng([world.rank, step]).standard_normal(p.data.shape, np.float32)
                p.grad_hook(p)
            reducer.reduce_everywhere()
            found += [np.array(p.grad) for p in params]
            reducer.reset()
        return found

    asked, results = [], []
    for nbytes in (5_000, MESSAGE_NBYTES, SHORTEST, 1 << 20):
        monkeypatch.setattr(cpu_reduction, "fitting", lambda world, comm, longest, nbytes=nbytes: nbytes)
        results.append(thread_comm.run(n, rank, per_node))
    assert all(each >= 1_200_000 for each in asked)
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            for x, y in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(x, y)
    wanted = sum(np.random.default_rng([r, 0]).standard_normal(300_001, np.float32).astype("f8") for r in range(n))
    np.testing.assert_allclose(results[0][0][0], wanted, rtol=1e-5, atol=1e-5)
