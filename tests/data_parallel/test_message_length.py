"""How long messages between nodes are, and that no sum depends on it."""

import numpy as np
import pytest
from message_length import set_message_nbytes

from hpcdp.comm import progress, thread_comm
from hpcdp.data_parallel import Reducer, bucket_layout


class Parameter:
    def __init__(self, name, count):
        self.name, self.data, self.grad = name, np.zeros(count, np.float32), None


def test_messages_are_short_unless_they_are_many():
    lengths = [0, 1, 60 << 10, 100_000, 1 << 20, 32 * (60 << 10), 2 << 20, 16 << 20, 17 << 20, 25.5 * (1 << 20)]
    assert list(map(progress.messages, lengths)) == [1, 1, 1, 2, 18, 32, 16, 16, 17, 26]


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
    for nbytes in (5_000, 100_000, 1 << 20):
        set_message_nbytes(monkeypatch, nbytes)
        results.append(thread_comm.run(n, rank, per_node))
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            for x, y in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(x, y)
    wanted = sum(np.random.default_rng([r, 0]).standard_normal(300_001, np.float32).astype("f8") for r in range(n))
    np.testing.assert_allclose(results[0][0][0], wanted, rtol=1e-5, atol=1e-5)
