"""Network, trainer and loader through a checkpoint in the middle of an epoch: the run goes on as before."""

import numpy as np
import pytest

from hpcdp import checkpoint, data, nn, optim
from hpcdp.autograd import record
from hpcdp.comm import thread_comm
from hpcdp.train.trainer import Trainer

N, BATCH, SAVED_AT, STEPS = 50, 8, 4, 9
"""An epoch has seven steps."""


def make(world, options):
    net = nn.Sequential(nn.Dense(5, 40), nn.BatchNorm(40), nn.Dropout(0.3, seed=7), nn.Dense(40, 3))
    for number, param in enumerate(net.parameters()):
        param.data[...] = np.random.default_rng(number).standard_normal(param.data.shape)
    rng = np.random.default_rng(0)
    dataset = data.ArrayDataset(rng.standard_normal((N, 5)).astype("f4"), rng.integers(0, 3, N))
    if options.get("reproducible"):
        sampler = data.VirtualShardSampler(N, BATCH, 8, world.size, world.rank, seed=1)
    else:
        sampler = data.ShardedSampler(N, BATCH, world.size, world.rank, seed=1)
    trainer = Trainer(net.parameters(), optim.Adam(lr=0.01), world, **options)
    return {"net": net, "trainer": trainer, "loader": data.DataLoader(dataset, sampler)}


def train(state, last):
    net, trainer, loader = state.values()
    while True:
        for x, y in loader:
            with record():
                loss = nn.functional.softmax_cross_entropy(net(x), y)
            loss.backward()
            trainer.step(len(y))
            if trainer.step_count == last:
                return
        loader.set_epoch(loader.epoch + 1)


def run(world, folder, options, restore, last, save=False):
    state = make(world, options)
    with checkpoint.Manager(folder, world) as manager:
        if restore:
            restored = manager.restore(into=state)
            assert not restored.missing and not restored.left_over
        train(state, last)
        if save:
            manager.save(last, state)
    world.comm.barrier()
    return np.concatenate([param.data.copy().reshape(-1) for param in state["net"].parameters()])


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [{"owner": "rank"}, {"compression": "2bit"}, {"kvstore": "dist_sync"}, {}, {"reproducible": True}],
    ids=lambda options: "-".join(map(str, options.values())) or "auto",
)
@pytest.mark.parametrize(("n", "per_node"), [(3, 1), (2, None), (4, 2), (1, None)])
@pytest.mark.filterwarnings("ignore:compression 2bit changes nothing")
def test_the_same_ranks_give_the_uninterrupted_runs_bits(n, per_node, options, tmp_path):
    thread_comm.run(n, lambda world: run(world, tmp_path, options, False, SAVED_AT, save=True), per_node)
    resumed = thread_comm.run(n, lambda world: run(world, tmp_path, options, True, STEPS), per_node)
    straight = thread_comm.run(n, lambda world: run(world, tmp_path, options, False, STEPS), per_node)
    np.testing.assert_array_equal(resumed, straight)


@pytest.mark.parametrize(("n", "m"), [(1, 3), (4, 2), (2, 4)])
def test_other_ranks_give_a_reproducible_runs_bits(n, m, tmp_path):
    options = {"reproducible": True}
    thread_comm.run(n, lambda world: run(world, tmp_path, options, False, SAVED_AT, save=True))
    resumed = thread_comm.run(m, lambda world: run(world, tmp_path, options, True, STEPS), 2)
    straight = thread_comm.run(1, lambda world: run(world, tmp_path, options, False, STEPS))
    np.testing.assert_array_equal(resumed[0], straight[0])
