"""Ranks with different numbers of batches, over thread ranks."""

import numpy as np
import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from pairs import pairs
from torch import nn
from toy import SEEDING, alike, loss_of

import hpcdp.torch
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, MismatchError, UnsupportedError

BATCHES = [1, 4, 0, 3, 2]


def network(seed):
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 4))


def reference(n, by_all, make):
    """One process that does what all ranks should."""
    model = network(0)
    optimizer = make(model.parameters())
    for step in range(max(BATCHES[:n])):
        active = [rank for rank in range(n) if BATCHES[rank] > step]
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.zero_grad()
        for rank in reversed(active):  # the lowest last: its running statistics stay
            model.load_state_dict(before, strict=False)
            (loss_of(model, step, rank) / (n if by_all else len(active))).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("layout", "owner", "by_all", "overlap"),
    pairs([(1, None), (2, None), (3, 1), (4, 2), (5, None)], ["rank", "shard"], [True, False], [False, True]),
)
def test_ranks_without_data_take_part_with_nothing(layout, owner, by_all, overlap):
    n, ranks_per_node = layout
    settings = {"lr": 0.1, "momentum": 0.9}

    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(world.rank), world, owner=owner, overlap=overlap)
        if owner == "shard":
            optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, **settings)
        else:
            optimizer = torch.optim.SGD(model.parameters(), **settings)
        with model.join(divide_by_initial_world_size=by_all):
            for step in range(BATCHES[world.rank]):
                optimizer.zero_grad()
                loss_of(model, step, world.rank).backward()
                optimizer.step()
        world.barrier()
        expected, theirs = reference(n, by_all, lambda params: torch.optim.SGD(params, **settings))
        assert model.last_rank == int(np.argmax(BATCHES[:n]))
        assert alike(model, expected)
        world.barrier()
        if owner == "rank":
            hpcdp.torch.broadcast_optimizer_state(optimizer, model.last_rank, world)
        for both in (optimizer, theirs):
            both.zero_grad()
        for other in range(n):  # and all go on together
            (loss_of(expected, 9, other) / n).backward()
        loss_of(model, 9, world.rank).backward()
        for both in (optimizer, theirs):
            both.step()
        world.barrier()
        assert alike(model, expected)
        world.barrier()

    thread_comm.run(n, rank, ranks_per_node)


def test_who_has_no_data_follows_learning_rates_clipping_and_scaling():
    def rank(world):
        model, expected = hpcdp.torch.DistributedDataParallel(network(0), world, owner="shard"), network(0)
        optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
        theirs = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
        scaler = hpcdp.torch.GradScaler(init_scale=64.0)
        schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, theirs)]
        with model.join():
            for step in range(3 if world.rank == 1 else 0):
                scaler.scale(loss_of(model, step, 1)).backward()
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(0.3)
                scaler.step(optimizer)
                scaler.update()
                schedules[0].step()
        world.barrier()
        for step in range(3):
            theirs.zero_grad()
            (loss_of(expected, step, 1) / 2).backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.3)
            theirs.step()
            schedules[1].step()
        assert alike(model, expected)
        world.barrier()

    thread_comm.run(2, rank)


def test_ranks_that_do_different_things_are_told_so():
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(0), world)
        try:
            with model.join():
                loss = loss_of(model, 0, world.rank)
                (loss_of(model, 1, 1) if world.rank == 2 else loss).backward()
        except MismatchError as error:
            return str(error)
        return "nothing"

    for told in thread_comm.run(3, rank):
        assert "the same as on rank 0: backward" in told and "forward (True) on rank 2" in told


def test_what_cannot_be_joined_is_refused():
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(0), world)
        for other in (model, hpcdp.torch.DistributedDataParallel(network(0), world)):
            with model.join(), raises(ConfigError, operation="join", got="join()"), other.join():
                pass
        synced = hpcdp.torch.SyncBatchNorm.convert_sync_batchnorm(network(0), world)
        model = hpcdp.torch.DistributedDataParallel(synced, world)
        with raises(UnsupportedError, operation="join", expected="SyncBatchNorm"), model.join():
            pass

    thread_comm.run(2, rank)


def test_ranks_may_be_told_of_uneven_data_instead():
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(0), world)
        with model.join(throw_on_early_termination=True):
            loss_of(model, 0, world.rank).backward()
        steps = 0
        with (
            raises(MismatchError, operation="join", got="no more batches on ranks 0, 2", remedy="=False"),
            model.join(throw_on_early_termination=True),
        ):
            for step in range(3 if world.rank == 1 else 1):
                loss_of(model, step, world.rank).backward()
                steps += 1
        assert steps == 1
        loss_of(model, 0, world.rank).backward()  # all go on

    thread_comm.run(3, rank)


def test_ranks_without_data_take_part_in_sparse_gradients_with_nothing():
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(nn.Embedding(5, 2, sparse=True), world)
        with model.join():
            for _ in range(1 + world.rank):
                model.zero_grad()
                model(torch.tensor([world.rank, 4])).sum().backward()
        expected = [[0.0] * 2] * 2 + [[1 / 3] * 2] + [[0.0] * 2] + [[1 / 3] * 2]
        if world.rank == 2:
            assert torch.allclose(model.module.weight.grad.to_dense(), torch.tensor(expected))

    thread_comm.run(3, rank)
