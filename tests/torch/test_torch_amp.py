"""Autocast, scaled losses, clipping and compiled modules, over thread ranks."""

import threading

import numpy as np
import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from pairs import pairs
from torch import nn

import hpcdp.torch
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, MismatchError

SEEDING = threading.Lock()  # all thread ranks draw from one generator


def network(seed):
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 4))


def loss_of(model, step, rank, spoil=False):
    rng = np.random.default_rng([step, rank])
    x = torch.from_numpy(rng.standard_normal((5, 6), "f4"))
    if spoil:
        x[0, 0] = float("inf")
    return nn.functional.cross_entropy(model(x).float(), torch.from_numpy(rng.integers(0, 4, 5)))


def alike(ours, theirs, atol=1e-5):
    return all(torch.allclose(a, b, atol=atol) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize(
    ("layout", "spoilt_step", "owner", "overlap"),
    pairs([(1, None), (2, None), (3, None), (4, 2)], [2, 3], ["rank", "shard"], [False, True]),
)
def test_a_step_with_an_infinity_on_one_rank_is_left_out_on_all(layout, spoilt_step, owner, overlap):
    """Also of the third step, which is clipped."""
    n, ranks_per_node = layout
    spoilt = n - 1, spoilt_step  # rank, step

    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(world.rank), world, owner=owner, overlap=overlap)
        if owner == "shard":
            optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
            clip = optimizer.clip_grad_norm_
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            clip = lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)  # noqa: E731
        reference = network(0)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        scaler = hpcdp.torch.GradScaler(init_scale=1024.0, growth_interval=2)
        for step in range(6):
            if step != spoilt_step + 1 or owner == "rank":  # a step by shards has dropped the gradients
                optimizer.zero_grad()
            theirs.zero_grad()
            scaler.scale(loss_of(model, step, world.rank, (world.rank, step) == spoilt)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                clip(0.2)
            scaler.step(optimizer)
            scaler.update()
            if step != spoilt[1]:
                for other in range(n):
                    (loss_of(reference, step, other) / n).backward()
                if step % 2:
                    nn.utils.clip_grad_norm_(reference.parameters(), 0.2)
                theirs.step()
            world.barrier()
            assert alike(model, reference), step
            world.barrier()
        return scaler.get_scale()

    assert set(thread_comm.run(n, rank, ranks_per_node)) == {
        1024.0 * 2 / 2 * 2
    }  # two good ones, the spoilt one, three more


def test_torchs_scaler_is_refused_where_each_rank_updates_its_part():
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(0), world, owner="shard")
        optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, 0, world.rank)).backward()
        with raises(ConfigError, operation="GradScaler", expected=["hpcdp.torch.GradScaler", "ShardedOptimizer"]):
            scaler.step(optimizer)

    thread_comm.run(2, rank)


def test_learning_rates_that_differ_are_told_on_all_ranks():
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(0), world, owner="shard")
        optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        for step in range(2):
            loss_of(model, step, world.rank).backward()
            if step == 0:
                optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * (world.rank == 1)
        with raises(
            MismatchError, operation="step", where="item 1 of 1 on rank 0", got="(1, 0.2, 0.0, False, 0.0, False)"
        ):
            optimizer.step()

    thread_comm.run(3, rank)


@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_autocast_computes_in_half_precision_and_sums_in_single(owner):
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(world.rank), world, owner=owner)
        reference = network(0)
        if owner == "shard":
            optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            theirs.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(torch.ones(1, 6))
                assert out.dtype is torch.bfloat16
                loss = loss_of(model, step, world.rank)
            loss.backward()
            optimizer.step()
            for other in range(world.size):
                with torch.autocast("cpu", torch.bfloat16):
                    part = loss_of(reference, step, other) / world.size
                part.backward()
            theirs.step()
            world.barrier()
            assert alike(model, reference, 1e-3)
            world.barrier()

    thread_comm.run(2, rank)


def test_gradients_that_are_averaged_can_be_clipped_by_torch():
    def rank(world):
        model, reference = hpcdp.torch.DistributedDataParallel(network(0), world), network(0)
        for step in range(2):
            model.zero_grad()
            reference.zero_grad()
            loss_of(model, step, world.rank).backward()
            for other in range(world.size):
                (loss_of(reference, step, other) / world.size).backward()
            norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (model, reference)]
            assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-4)
            for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.allclose(mine.grad, other.grad, atol=1e-6)

    thread_comm.run(3, rank)


@pytest.mark.parametrize("outside", [False, True])
def test_compiled_modules_are_averaged_as_others(outside):
    def rank(world):
        own, reference = network(0), network(0)
        if outside:
            model = torch.compile(hpcdp.torch.DistributedDataParallel(own, world), backend="aot_eager")
        else:
            model = hpcdp.torch.DistributedDataParallel(torch.compile(own, backend="aot_eager"), world)
        for step in range(3):
            own.zero_grad()
            reference.zero_grad()
            loss_of(model, step, world.rank).backward()
            for other in range(world.size):
                (loss_of(reference, step, other) / world.size).backward()
            for mine, other in zip(own.parameters(), reference.parameters(), strict=True):
                assert torch.allclose(mine.grad, other.grad, atol=1e-5)

    thread_comm.run(1, rank)  # compilation is not for several threads of a process
