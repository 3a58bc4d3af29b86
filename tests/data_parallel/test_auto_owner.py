import os

import pytest

import hpcdp
from hpcdp import nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data_parallel import sharded_update

NBYTES = 3000 * 4
"""Of the parameters, and as long as their bucket."""


def owner_of(world, **settings):
    net = nn.Sequential(nn.Dense(2999, 1))
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world=world, **settings)
    (bucket,) = trainer.reducer.buckets
    assert NBYTES <= bucket.mine.nbytes < NBYTES + 128
    return "rank" if trainer.owner.holds_all else "shard"


@pytest.fixture
def cores(monkeypatch):
    """A core for each of three ranks, whatever there is."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))


def owners(monkeypatch, near, far, rate, **settings):
    """Of three ranks, of which one measures another rate."""
    monkeypatch.setattr(sharded_update, "NEAR_NBYTES", near)
    monkeypatch.setattr(sharded_update, "FAR_NBYTES", far)
    monkeypatch.setattr(sharded_update, "rate_gb_s", lambda reducer: rate if reducer.world.rank == 1 else 50.0)
    return thread_comm.run(3, lambda world: owner_of(world, **settings))


@pytest.mark.parametrize(
    ("near", "far", "rate", "wanted"),
    [
        (3 * NBYTES + 384, 4 * NBYTES, None, "rank"),  # nothing is measured
        (3 * NBYTES - 1, 4 * NBYTES, 8.0, "shard"),
        (3 * NBYTES - 1, 4 * NBYTES, 2.3, "rank"),
        (0, 3 * NBYTES - 1, None, "shard"),
    ],
)
def test_copies_that_fit_in_the_caches_are_each_ranks_own(monkeypatch, cores, near, far, rate, wanted):
    assert owners(monkeypatch, near, far, rate) == [wanted] * 3


def test_ranks_that_share_cores_and_updates_beside_the_next_forward_are_by_owners(monkeypatch, cores):
    assert owners(monkeypatch, 1 << 30, 1 << 30, None, overlap=True) == ["shard"] * 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert owners(monkeypatch, 1 << 30, 1 << 30, None) == ["shard"] * 3


@pytest.mark.parametrize(("ranks", "per_node", "wanted"), [(4, 2, "shard"), (2, 1, "rank"), (1, None, "rank")])
def test_of_several_nodes_those_whose_ranks_share_memory_have_owners(ranks, per_node, wanted):
    assert thread_comm.run(ranks, owner_of, ranks_per_node=per_node) == [wanted] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_rate_is_measured_by_all_ranks(ranks):
    def one(world):
        net = nn.Sequential(nn.Dense(3, 1))
        reducer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world=world, owner="shard").reducer
        rates = [sharded_update.rate_gb_s(reducer) for _ in range(2)]
        reducer.barrier()
        return rates

    assert all(0 < rate < 2000 for rates in thread_comm.run(ranks, one) for rate in rates)
