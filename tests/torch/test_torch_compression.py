"""Compressed gradients of PyTorch modules: alike on all ranks, near the average, and in the states that go on."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn
from toy import SEEDING, add_average, loss_of

from hpcdp.comm import threads
from hpcdp.errors import ConfigError, MismatchError
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


@pytest.mark.parametrize("owner", ["rank", "shard"])
@pytest.mark.parametrize(("codec", "share"), [("fp16", 0.02), ("2bit", 0.5), ("1bit", 0.9), ("topk:ratio=0.2", 0.5)])
@pytest.mark.parametrize(("n", "per_node"), [(2, 1), (3, 1), (4, 2)])
def test_parameters_are_the_same_on_all_ranks_and_go_the_same_way(n, per_node, codec, share, owner):
    start, exact = reference(n)
    found = threads.run(n, lambda world: trained(world, codec, owner), per_node)
    for each in found[1:]:
        assert torch.equal(each, found[0])
    assert 0 < torch.dist(found[0], exact) < share * torch.dist(start, exact)


def test_owners_and_overlap_change_no_more_than_rounding():
    one, *others = (
        threads.run(3, lambda world, how=how: trained(world, "fp16", *how), 1)[0]
        for how in (("rank", True), ("rank", False), ("shard", True), ("shard", False))
    )
    for other in others:
        torch.testing.assert_close(other, one, rtol=0, atol=2e-3)


def test_what_is_no_codec_or_another_one_is_refused():
    with pytest.raises(ConfigError, match="expected one of fp16"):
        threads.run(1, lambda world: DistributedDataParallel(net(), world, compression="8bit"))
    with pytest.raises(MismatchError, match="compression"):
        threads.run(2, lambda world: DistributedDataParallel(net(), world, compression=["fp16", None][world.rank]), 1)
