import numpy as np
import pytest

from hpcdp import nn
from hpcdp.comm import thread_comm
from hpcdp.data_parallel import Reducer
from hpcdp.data_parallel.bucket_layout import plan
from hpcdp.data_parallel.deterministic import closed_by, run_of


def test_runs_follow_each_other_and_differ_by_one():
    for num, size in ((8, 3), (13, 4), (24, 5), (4, 4)):
        runs = [run_of(num, rank, size) for rank in range(size)]
        assert [shard for run in runs for shard in run] == list(range(num))
        assert max(map(len, runs)) - min(map(len, runs)) <= 1


@pytest.mark.parametrize(
    ("run", "closed"),
    [(range(8), [0, 1, 0, 2, 0, 1, 0, 3]), (range(2, 5), [0, 1, 0]), (range(3, 8), [0, 0, 1, 0, 2])],
)
def test_how_many_nodes_a_leaf_closes(run, closed):
    assert [closed_by(leaf, run, (0, 8)) for leaf in run] == closed


def test_nodes_that_are_closed_leave_as_many_sums_as_the_run_needs():
    from hpcdp.data_parallel.deterministic import cover

    for num in (5, 8, 13, 24):
        for size in range(1, num + 1):
            for rank in range(size):
                run = run_of(num, rank, size)
                left = sum(1 - closed_by(leaf, run, (0, num)) for leaf in run)
                assert left == len(cover((0, num), run)), (num, size, rank)


def test_sums_take_no_more_memory_than_the_tree_is_deep():
    from hpcdp import Trainer, nn, optim

    def held(world):
        net = nn.Dense(64, 32)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, reproducible=True, virtual_shards=16)
        plain = Trainer(nn.Dense(64, 32).parameters(), optim.SGD(lr=0.1), world)
        return trainer.nbytes["gradients"] / plain.nbytes["gradients"]

    assert thread_comm.run(1, held) == [1 + 4]
    assert thread_comm.run(4, held) == [1 + 2] * 4
    assert thread_comm.run(16, held) == [1 + 1] * 16


def test_half_precision_is_added_in_single():
    def added(world):
        param = nn.Parameter(np.zeros(2, "f2"), name="p")
        reducer = Reducer([param], plan([("p", (2,), param.data.dtype)]), world, virtual_shards=3)
        for value in (2048.0, 1.0, 1.0):  # in half precision 2048 + 1 is 2048
            param.grad[...] = value
            param.grad_hook(param)
            if not reducer.is_last_backward:
                reducer.next_virtual_shard()
        reducer.launch_rest()
        reducer.tally(0)
        reducer.reduce_everywhere()
        return param.grad.tolist()

    assert thread_comm.run(1, added) == [[2050.0, 2050.0]]
