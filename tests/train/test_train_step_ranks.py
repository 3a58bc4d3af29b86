"""`TrainStep` on several ranks, on `graphs_on_host`: graphs that are cut where sums over ranks begin beside backward.

By hand each step gives the same bits, whatever the others do: ranks trace, capture and replay at the same time, and
lanes sum buckets while graphs are launched.
"""

from contextlib import nullcontext

import numpy as np
import pytest
from compared_steps import RULES, by_hand, check_alike, made, planned
from graph_checks import needs_compiler, on_gpu

from hpcdp import nn, optim
from hpcdp.comm import thread_comm

TRAINERS = {
    "momentum": {"rule": RULES["momentum"]},
    "16 bits": {
        "rule": lambda: optim.LARS(lr=0.5), "dtype": "float16", "loss_scale": "dynamic", "clip_norm": 0.05,
        "owner": "shard",
    },
}  # fmt: skip
RUNS = {
    "a node of 2 ranks": ("16 bits", 2, 2),
    "3 nodes": ("16 bits", 3, 1),
    "2 nodes of 2 ranks": ("momentum", 4, 2),
}
STEPS = (
    "plain", "short", "no_sync", "short", "plain", "empty", "no_sync", "empty", "short", "no_sync", "plain", "plain"
)  # fmt: skip
"""After a rank has had none of an "empty" step, it traces where others capture."""
pytestmark = [
    needs_compiler,
    pytest.mark.filterwarnings("ignore:gradients on GPUs", "ignore:(overflow|invalid)", "error:hybridize"),
]


def mlp():
    return nn.Sequential(nn.Dense(6, 16, activation="relu"), nn.Dense(16, 3))


def batch(rank, size, number):
    """Another one on each rank."""
    is_empty = STEPS[number] == "empty" and rank == number % size
    count = 0 if is_empty else 3 if STEPS[number] == "short" else 4
    rng = np.random.default_rng((rank, number))
    return rng.standard_normal((count, 6)).astype(np.float32), rng.integers(0, 3, count)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.thorough
def test_ranks_sum_beside_backward_to_the_same_bits(graphs_on_host, one_bucket_each, run):
    def train(world):
        pairs = [made(world, mlp, overlap=True, **TRAINERS[name]) for _ in range(2)]
        steps = [by_hand(*pairs[0]), planned(*pairs[1])]
        for number, kind in enumerate(STEPS):
            found = []
            for (_, trainer), step in zip(pairs, steps, strict=True):
                x, y = batch(world.rank, world.size, number)
                with trainer.no_sync() if kind == "no_sync" else nullcontext():
                    found.append(step(on_gpu(x), on_gpu(y)))
            check_alike(pairs, found)
        return pairs[1][1]

    name, num_ranks, ranks_per_node = RUNS[run]
    trainer = thread_comm.run(num_ranks, train, ranks_per_node)[0]
    num_buckets = len(trainer.reducer.buckets)
    assert num_buckets > 2 and len(graphs_on_host.launches) > num_ranks * 2 * num_buckets, "a part for each, and twice"
    assert trainer.step_count > 2 and (trainer.num_nonfinite > 0) == trainer.is_scaling
