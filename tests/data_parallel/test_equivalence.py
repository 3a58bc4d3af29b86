"""Data parallelism is exact: n ranks on parts of a batch do what one rank does on all of it."""

import numpy as np
import pytest

import hpcdp
from hpcdp import data, nn, optim
from hpcdp.autograd import record
from hpcdp.comm import thread_comm

STEPS, GLOBAL_BATCH = 6, 32


def parameters_after(world, model="lenet", owner="auto", weights=None, optimizer="sgd"):
    """Train on real digits, each rank on its part of every global batch; all parameters, flat."""
    digits = data.load("digits", "train", image_size=28)
    net = nn.models.create(model, seed=world.rank)  # the trainer makes them equal
    rule = optim.SGD(lr=0.05, momentum=0.9) if optimizer == "sgd" else optim.AdamW(lr=1e-3)
    trainer = hpcdp.Trainer(net.parameters(), rule, world, owner=owner)
    sampler = data.ShardedSampler(
        len(digits), GLOBAL_BATCH, num_parts=world.size, part_index=world.rank, seed=3, weights=weights
    )
    for step, part in enumerate(sampler):
        if step == STEPS:
            break
        x, y = digits[np.asarray(part)]
        if len(y):
            with record():
                loss = nn.functional.softmax_cross_entropy(net(x), y)
            loss.backward()
        assert trainer.step(len(y)) == GLOBAL_BATCH
    world.barrier()
    return np.concatenate([np.array(param.data).reshape(-1) for param in net.parameters()])


def relative_difference(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.fixture(scope="module")
def alone():
    return thread_comm.run(1, lambda world: parameters_after(world))[0]


def test_two_ranks_equal_one(alone):
    for result in thread_comm.run(2, lambda world: parameters_after(world)):
        assert relative_difference(result, alone) < 1e-5


def test_three_ranks_with_an_uneven_split_equal_one(alone):
    for result in thread_comm.run(3, lambda world: parameters_after(world, weights=[3, 1, 1])):
        assert relative_difference(result, alone) < 1e-5


def test_training_moved_the_parameters(alone):
    start = np.concatenate([param.data.reshape(-1) for param in nn.models.lenet(seed=0).parameters()])
    assert relative_difference(start, alone) > 0.02


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_real_ranks_equal_one_and_twice_the_same_run_gives_the_same_bits(owner, alone):
    world = hpcdp.init()
    first, second = parameters_after(world, owner=owner), parameters_after(world, owner=owner)
    assert relative_difference(first, alone) < 1e-5
    np.testing.assert_array_equal(first, second)
    sums = world.comm.allgather_json(int(first.view(np.uint32).astype(np.uint64).sum()))
    assert len(set(sums)) == 1
