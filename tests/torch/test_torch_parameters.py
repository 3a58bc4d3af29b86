"""Parameters of other layouts, and modules that are changed as a whole after they were wrapped."""

import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn
from toy import SEEDING

import hpcdp.torch
from hpcdp import checkpoint
from hpcdp.comm import thread_comm
from hpcdp.errors import MismatchError, UnsupportedError

LAYOUTS = [(1, None), (2, None), (3, 1), (4, 2)]


def network():
    with SEEDING:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5))
        net[3].weight = nn.Parameter(torch.randn(64, 5).t())
    return net.to(memory_format=torch.channels_last)


def loss_of(model, rank, dtype=torch.float32):
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
    return model(x.to(dtype)).pow(2).mean()


def expected(world, net):
    """The average of all ranks' gradients."""
    for rank in range(world.size):
        (loss_of(net, rank) / world.size).backward()
    return [param.grad for param in net.parameters()]


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(("n", "ranks_per_node"), LAYOUTS)
def test_fused_optimizers_update_channels_last_and_transposed_parameters(n, ranks_per_node, rule):
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(), world)
        reference = network()
        optimizers = [rule(each.parameters(), lr=0.01, fused=True) for each in (model, reference)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=step == 1)
            expected(world, reference)
            loss_of(model, world.rank).backward()
            for optimizer in optimizers:
                optimizer.step()
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                assert ours.grad.stride() == theirs.grad.stride()
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)

    thread_comm.run(n, rank, ranks_per_node)


def strided():
    """Channels last, also of one channel; transposed; one whose memory has gaps."""
    with SEEDING:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, (2, 3), groups=4), nn.Flatten(), nn.Linear(24, 5)
        )
        net[4].weight = nn.Parameter(torch.randn(24, 5).t())
        net[4].bias = nn.Parameter(torch.randn(10)[::2])
    return net.to(memory_format=torch.channels_last)


def strides_of(tensors):
    return [each.stride() for each in tensors]


@pytest.mark.parametrize("n", [1, 3])
def test_a_sharded_optimizer_keeps_strides(n, tmp_path):
    """Of parameters, gradients and states, which other optimizers and files have in the same order."""

    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(strided(), world, owner="shard")
        ours = hpcdp.torch.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
        reference = strided()
        theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)
        for step in range(4):
            theirs.zero_grad()
            for other in range(n):
                (loss_of(reference, other) / n).backward()
            loss_of(model, world.rank).backward()
            assert strides_of(each.grad for each in model.parameters()) == strides_of(model.parameters())
            if step == 2:
                mine, torchs = ours.state_dict(), theirs.state_dict()
                ours.load_state_dict(torchs)
                theirs.load_state_dict(mine)
                with checkpoint.Manager(tmp_path, world) as manager:
                    manager.save(1, {"model": model, "optimizer": ours})
                    manager.restore(into={"model": model, "optimizer": ours})
            ours.step()
            theirs.step()
        world.barrier()
        # torch gives what has gaps no gaps when it copies it; the others are as they were.
        assert strides_of(model.parameters()) == strides_of(each.clone() for each in reference.parameters())
        assert model.module[0].weight.stride() == (27, 1, 9, 3) and model.module[2].weight.stride() == (6, 1, 3, 1)
        for mine, torchs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, torchs, rtol=1e-3, atol=1e-4)
        found, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
        for number, state in expected.items():
            for name, value in state.items():
                torch.testing.assert_close(found[number][name], value, rtol=1e-3, atol=1e-5)
                assert found[number][name].stride() == torch.empty_like(value).stride()
        world.barrier()

    thread_comm.run(n, rank)


def test_ranks_whose_strides_differ_are_told_so():
    def rank(world):
        net = nn.Conv2d(3, 4, 3)
        net = net if world.rank else net.to(memory_format=torch.channels_last)
        hpcdp.torch.DistributedDataParallel(net, world)
        with raises(
            MismatchError, operation="DistributedDataParallel", where="item 1 of 2 on rank 0", expected=(27, 1, 9, 3)
        ):
            hpcdp.torch.DistributedDataParallel(net, world, owner="shard")

    thread_comm.run(2, rank)


@pytest.mark.parametrize("change", ["there and back", "layout"])
@pytest.mark.parametrize(("n", "ranks_per_node"), LAYOUTS)
def test_gradients_are_averaged_after_the_module_was_changed_as_a_whole(n, ranks_per_node, change):
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(), world)
        loss_of(model, world.rank).backward()  # what is changed has gradients
        if change == "layout":
            model.to(memory_format=torch.contiguous_format)
        else:
            model.double().float()
        for _ in range(2):
            model.zero_grad()
            loss_of(model, world.rank).backward()
            for ours, theirs in zip(model.parameters(), expected(world, network()), strict=True):
                assert torch.allclose(ours.grad, theirs, atol=1e-5)

    thread_comm.run(n, rank, ranks_per_node)


def test_a_longer_dtype_than_when_the_module_was_wrapped_is_refused_also_after_a_backward():
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(), world)
        loss_of(model, world.rank).backward()
        model.double()
        with raises(UnsupportedError, operation="backward", where="3.bias"):
            loss_of(model, world.rank, torch.float64).backward()

    thread_comm.run(2, rank)
