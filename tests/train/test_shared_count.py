"""Numbers that ranks take as they come to them."""

import numpy as np
import pytest

from hpcdp.comm import thread_comm
from hpcdp.data import ArrayDataset, DataLoader, SharedSampler
from hpcdp.train.fit import SharedCount


@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_was_given_out_is_not_given_again_after_going_on(n):
    data = ArrayDataset(np.zeros((40, 1), "f4"), np.arange(40))

    def take(world, state):
        loader = DataLoader(data, SharedSampler(40, 2, SharedCount(world)), prefetch=0)
        if state is not None:
            loader.load_state_dict(state)
        else:
            loader.set_epoch(3)
        had = []
        for _, y in loader:
            had.append(y.tolist())
            if state is None and len(had) == 2 + world.rank:
                break
        return had, loader.state_dict()

    first = thread_comm.run(n, lambda world: take(world, None))
    assert all(state == first[0][1] for _, state in first)
    assert first[0][1]["done"] == sum(2 + rank for rank in range(n))
    rest = thread_comm.run(3, lambda world: take(world, first[0][1]))
    seen = [sample for had, _ in [*first, *rest] for batch in had for sample in batch]
    assert sorted(seen) == list(range(40))
    assert rest[0][1]["done"] == 20
