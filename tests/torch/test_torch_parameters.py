"""Parameters of other layouts, and modules that are changed as a whole after they were wrapped."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn
from toy import SEEDING

import hpcdp.torch
from hpcdp.comm import threads
from hpcdp.errors import UnsupportedError

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

    threads.run(n, rank, ranks_per_node)


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

    threads.run(n, rank, ranks_per_node)


def test_a_longer_dtype_than_when_the_module_was_wrapped_is_refused_also_after_a_backward():
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(), world)
        loss_of(model, world.rank).backward()
        model.double()
        with pytest.raises(UnsupportedError, match="change dtypes before wrapping"):
            loss_of(model, world.rank, torch.float64).backward()

    threads.run(2, rank)
