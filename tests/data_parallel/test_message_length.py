"""How long messages between nodes are: what ranks try, whom it binds, and that no sum depends on it."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hpcdp.collectives import iallreduce, ring
from hpcdp.comm import progress, thread_comm
from hpcdp.comm.progress import MESSAGE_NBYTES
from hpcdp.data_parallel import Reducer, bucket_layout


class Parameter:
    def __init__(self, name, count):
        self.name, self.data, self.grad = name, np.zeros(count, np.float32), None


@pytest.mark.parametrize(("seconds", "is_fast"), [((1e-3, 9e-3, 1e-3), True), ((1e-3, 20e-3, 1e-3), False)])
def test_messages_are_long_if_the_slowest_link_is_fast(monkeypatch, seconds, is_fast):
    """4 MB in 14 ms are 2.4 Gbit/s."""
    clock, together = threading.local(), ring.together

    def timed(machines):
        clock.now += seconds[clock.rank] if len(machines) > 1 else 0
        return together(machines)

    def rank(world):
        clock.now, clock.rank = 0, world.rank
        ring.fit_messages(world)
        return ring.message_nbytes(world)

    monkeypatch.setattr(ring, "together", timed)
    monkeypatch.setattr(ring, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    assert thread_comm.run(3, rank, 1) == [ring.LONG_NBYTES if is_fast else MESSAGE_NBYTES] * 3


def test_a_pipeline_has_enough_messages_unless_they_are_too_short():
    lengths = [0, 1, 60 << 10, 100_000, 480 << 10, 2 << 20, 8 << 20, 9 << 20, 25.5 * (1 << 20)]
    assert [progress.messages(nbytes, 1 << 20) for nbytes in lengths] == [1, 1, 1, 2, 8, 8, 8, 9, 26]
    assert [progress.messages(nbytes) for nbytes in lengths] == [1, 1, 1, 2, 8, 35, 137, 154, 436]


@pytest.mark.parametrize("nodes", [(1, 1, 1), (2, 1), (3,)])
def test_it_is_tried_once_in_a_world_of_several_nodes_and_for_long_arrays_alone(monkeypatch, nodes):
    tried = []
    monkeypatch.setattr(ring, "_link_s", lambda comm: (tried.append(comm.rank), 1e-6)[1])

    def rank(world):
        found = []
        for nbytes in (1 << 19, 1 << 20, 1 << 21):
            iallreduce(np.zeros(nbytes, np.uint8), "max", world, "ring").wait()
            found.append(ring.message_nbytes(world))
        ring.fit_messages(world)
        return found

    longer = MESSAGE_NBYTES if len(nodes) == 1 else ring.LONG_NBYTES
    assert thread_comm.run(3, rank, nodes) == [[MESSAGE_NBYTES, longer, longer]] * 3
    assert len(tried) == {3: 3, 2: 2, 1: 0}[len(nodes)]  # the ranks on a rail


@pytest.mark.parametrize(("n", "per_node"), [(2, 1), (3, 1), (4, 2), (5, 1)])
def test_sums_have_the_same_bits_however_long_messages_are(monkeypatch, n, per_node):
    def rank(world):
        params = [Parameter("a", 300_001), Parameter("b", 70)]
        layout = bucket_layout.plan([(p.name, p.data.shape, p.data.dtype) for p in params])
        reducer = Reducer(params, layout, world)
        found = []
        for step in range(2):
            for p in params:
                p.grad[...] = np.random.default_rng([world.rank, step]).standard_normal(p.data.shape, np.float32)
                p.grad_hook(p)
            reducer.reduce_everywhere()
            found += [np.array(p.grad) for p in params]
            reducer.reset()
        return found

    results = []
    for nbytes in (5_000, MESSAGE_NBYTES, 1 << 20):
        monkeypatch.setattr(ring, "message_nbytes", lambda world, nbytes=nbytes: nbytes)
        results.append(thread_comm.run(n, rank, per_node))
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            for x, y in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(x, y)
    wanted = sum(np.random.default_rng([r, 0]).standard_normal(300_001, np.float32).astype("f8") for r in range(n))
    np.testing.assert_allclose(results[0][0][0], wanted, rtol=1e-5, atol=1e-5)
