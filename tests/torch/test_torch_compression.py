"""Compressed gradients of PyTorch modules: alike on all ranks, near the average, and in the states that go on."""

import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from pairs import pairs
from slow_sums import slow_sums
from torch import nn
from toy import SEEDING, add_average, loss_of

from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, MismatchError, StaleGradientError
from hpcdp.torch import DistributedDataParallel, ShardedOptimizer

STEPS = 20


def net():
    with SEEDING:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 4))


def flat(model):
    return torch.cat([param.detach().reshape(-1).clone() for param in model.parameters()])


def trained(world, compression, owner, overlap=None):
    model = DistributedDataParallel(net(), world, owner=owner, overlap=overlap, compression=compression)
    if owner == "shard":
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.5)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, world.rank).backward()
        optimizer.step()
    world.barrier()
    found = flat(model.module)
    world.barrier()
    return found


def reference(ranks):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    start = flat(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        add_average(model, step, ranks)
        optimizer.step()
    return start, flat(model)


SHARES = {"fp16": 0.02, "2bit": 0.5, "1bit": 0.9, "topk:ratio=0.2": 0.5}


@pytest.mark.parametrize(("layout", "codec", "owner"), pairs([(2, 1), (3, 1), (4, 2)], SHARES, ["rank", "shard"]))
def test_parameters_are_the_same_on_all_ranks_and_go_the_same_way(layout, codec, owner):
    n, per_node = layout
    start, exact = reference(n)
    found = thread_comm.run(n, lambda world: trained(world, codec, owner), per_node)
    for each in found[1:]:
        assert torch.equal(each, found[0])
    assert 0 < torch.dist(found[0], exact) < SHARES[codec] * torch.dist(start, exact)


def without_the_last_layer(model, optimizer, rank):
    last, model.module[-1] = model.module[-1], nn.Identity()
    with pytest.raises(StaleGradientError):
        model(torch.full((1, 6), 1.0 + rank)).sum().backward()
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.step()
    model.module[-1] = last


def dropped(model, optimizer, rank):
    loss_of(model, 99, rank).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("owner", "nothing"),
    [("rank", without_the_last_layer), ("shard", without_the_last_layer), ("shard", dropped)],
)
@pytest.mark.parametrize(("n", "per_node"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_what_follows_gradients_that_are_dropped_is_no_part_of_them(monkeypatch, n, per_node, owner, nothing, overlap):
    is_slow = slow_sums(monkeypatch, 0.05)

    def rank(world, slowly):
        model = DistributedDataParallel(net(), world, owner=owner, overlap=overlap, compression="topk:ratio=0.2")
        optimizer = (
            ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
            if owner == "shard"
            else torch.optim.SGD(model.parameters(), lr=0.1)
        )
        for step in range(3):
            if world.rank == 0:
                is_slow[0] = slowly
            nothing(model, optimizer, world.rank)
            if not slowly:
                world.barrier()
            if world.rank == 0:
                is_slow[0] = False
            optimizer.zero_grad()
            loss_of(model, step, world.rank).backward()
            optimizer.step()
        world.barrier()
        return flat(model.module)

    expected = thread_comm.run(n, lambda world: rank(world, False), per_node)[0]
    for found in thread_comm.run(n, lambda world: rank(world, True), per_node):
        assert torch.equal(found, expected)


def test_owners_and_overlap_change_no_more_than_rounding():
    one, *others = (
        thread_comm.run(3, lambda world, how=how: trained(world, "fp16", *how), 1)[0]
        for how in (("rank", True), ("rank", False), ("shard", True), ("shard", False))
    )
    for other in others:
        torch.testing.assert_close(other, one, rtol=0, atol=2e-3)


def test_what_is_no_codec_or_another_one_is_refused():
    with raises(ConfigError, operation="compression", expected="fp16"):
        thread_comm.run(1, lambda world: DistributedDataParallel(net(), world, compression="8bit"))
    with raises(MismatchError, operation="DistributedDataParallel", where="item 2 of 2 on rank 0"):
        thread_comm.run(
            2, lambda world: DistributedDataParallel(net(), world, compression=["fp16", None][world.rank]), 1
        )


@pytest.mark.each_value
@pytest.mark.parametrize("codec", ["2bit:threshold=0.01", "1bit:threshold=0"])
@pytest.mark.parametrize("n", [2, 4])
def test_a_threshold_means_the_same_whoever_updates(n, codec):
    one, *others = (
        thread_comm.run(n, lambda world, o=owner: trained(world, codec, o), 1)[0] for owner in ("rank", "shard")
    )
    torch.testing.assert_close(one, others[0], rtol=0, atol=1e-5)


def test_what_was_not_sent_can_be_saved_and_goes_on():
    saved = {}

    def train(world, model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step, world.rank).backward()
            optimizer.step()

    def made(world):
        model = DistributedDataParallel(net(), world, compression="2bit")
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def straight(world):
        model, optimizer = made(world)
        train(world, model, optimizer, range(5))
        state = model.compression_state()
        assert bool(state) == (world.rank == 0)
        if world.rank == 0:
            saved.update(module={k: v.clone() for k, v in model.module.state_dict().items()}, compression=state)
        train(world, model, optimizer, range(5, 10))
        return flat(model.module)

    def resumed(world, compression):
        model, optimizer = made(world)
        model.module.load_state_dict(saved["module"])
        model.load_compression_state(compression)
        train(world, model, optimizer, range(5, 10))
        return flat(model.module)

    wanted = thread_comm.run(3, straight, 1)[0]
    assert all(each.any() for each in saved["compression"].values())
    for compression, goes_on in ((saved["compression"], True), ({}, False)):
        for found in thread_comm.run(3, lambda world, c=compression: resumed(world, c), 1):
            assert torch.allclose(found, wanted, rtol=0, atol=1e-6) == goes_on
    bad = {"0.weight": torch.zeros(3, 2, 2)}
    with raises(ConfigError, operation="load_compression_state", where="0.weight", expected=(50, 6)):
        thread_comm.run(2, lambda world: made(world)[0].load_compression_state(bad), 1)


def test_overflows_of_all_gradients_are_skipped_once_with_topk():
    def rank(world):
        model = DistributedDataParallel(net(), world, compression="topk")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(6):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(model, step, world.rank))
            (loss * float("inf") if step == 2 and world.rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    assert thread_comm.run(2, rank, 1) == [512.0] * 2
