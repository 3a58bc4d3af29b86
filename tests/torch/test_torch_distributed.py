"""The wrapper over thread ranks, against one process that averages the gradients of all ranks by itself."""

from contextlib import nullcontext

import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn
from torch.utils.checkpoint import checkpoint
from toy import SEEDING, batch, loss_of

import hpcdp.torch
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, MismatchError, StaleGradientError, UnsupportedError

NODES = [(1, None), (2, None), (3, None), (2, 1), (3, 1), (4, 2), (5, (2, 3))]
STEPS = 4


def network(seed):
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 4))


def averages(reference, ranks, step):
    """The mean over ranks of the gradients of ``reference``, by name."""
    found = []
    for rank in range(ranks):
        reference.zero_grad()
        loss_of(reference, step, rank).backward()
        found.append({name: param.grad.clone() for name, param in reference.named_parameters()})
    return {name: sum(each[name] for each in found) / ranks for name in found[0]}


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("n", "ranks_per_node"), NODES)
def test_gradients_are_the_average_of_all_ranks(n, ranks_per_node, overlap):
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(world.rank), world, overlap=overlap, bucket_cap_mb=0.004)
        reference = network(0)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)]
        for step in range(STEPS):
            expected = averages(reference, n, step)
            optimizers[0].zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, step, world.rank).backward()
            for (name, param), own in zip(model.module.named_parameters(), reference.parameters(), strict=True):
                assert torch.allclose(param.grad, expected[name], atol=1e-6), (step, name)
                own.grad = expected[name]
            for optimizer in optimizers:
                optimizer.step()
        return [param.detach().numpy().tobytes() for param in model.parameters()]

    assert len({b"".join(each) for each in thread_comm.run(n, rank, ranks_per_node)}) == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("by_attribute", [False, True])
def test_without_synchronizing_gradients_add_up_and_the_next_backward_averages_them(overlap, by_attribute):
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(0), world, overlap=overlap)
        reference = network(0)
        if by_attribute:
            model.require_backward_grad_sync = False
        with nullcontext() if by_attribute else model.no_sync():
            for step in range(world.rank + 1):  # ranks may differ
                loss_of(model, step, world.rank).backward()
        if by_attribute:
            model.require_backward_grad_sync = True
        loss_of(model, 9, world.rank).backward()
        found = {name: param.grad.clone() for name, param in model.module.named_parameters()}
        expected = {name: torch.zeros_like(grad) for name, grad in found.items()}
        for other in range(world.size):
            reference.zero_grad()
            for step in (*range(other + 1), 9):
                loss_of(reference, step, other).backward()
            for name, param in reference.named_parameters():
                expected[name] += param.grad / world.size
        for name, grad in found.items():
            assert torch.allclose(grad, expected[name], atol=1e-6), name

    thread_comm.run(3, rank)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_backward_is_averaged_where_only_the_forward_was_within_no_sync(overlap):
    class Checkpointed(nn.Module):
        """All gradients come from backwards within the backward."""

        def __init__(self):
            super().__init__()
            self.layers = network(0)

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False)
            return x

    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(Checkpointed(), world, overlap=overlap)
        expected = averages(network(0), world.size, 0)
        x, y = batch(0, world.rank)
        with model.no_sync():
            loss = nn.functional.cross_entropy(model(x.requires_grad_()), y)
        loss.backward()
        for name, param in model.module.layers.named_parameters():
            assert torch.allclose(param.grad, expected[name], atol=1e-6), name

    thread_comm.run(2, rank)


class Branches(nn.Module):
    """Of two branches it uses those that it is told to."""

    def __init__(self):
        super().__init__()
        with SEEDING:
            torch.manual_seed(0)
            self.common, self.left, self.right = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, used):
        x = self.common(x)
        for name in used:
            x = getattr(self, name)(x)
        return x


@pytest.mark.parametrize("overlap", [False, True])
def test_what_some_ranks_leave_out_counts_as_zero_and_what_all_leave_out_is_left_alone(overlap):
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(Branches(), world, find_unused_parameters=True, overlap=overlap)
        model(torch.ones(2, 6), ["left"] if world.rank == 0 else []).sum().backward()
        own = Branches()
        own(torch.ones(2, 6), ["left"]).sum().backward()
        assert torch.allclose(model.module.left.weight.grad, own.left.weight.grad / world.size)
        assert model.module.right.weight.grad is None

    thread_comm.run(3, rank)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_left_out_is_an_error_that_names_it_on_all_ranks(overlap):
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(Branches(), world, overlap=overlap)
        with raises(StaleGradientError, operation="backward", where="rank 1", got=["right.weight", "right.bias"]):
            model(torch.ones(2, 6), ["left"] if world.rank == 1 else ["left", "right"]).sum().backward()
        model.zero_grad()
        model(torch.ones(2, 6), ["left", "right"]).sum().backward()  # and goes on
        assert model.module.right.weight.grad is not None

    thread_comm.run(2, rank)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_and_two_forwards_before_one_backward(reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            with SEEDING:
                torch.manual_seed(3)
                self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x):
            return self.last(checkpoint(self.first, x.requires_grad_(), use_reentrant=reentrant))

    def rank(world):
        reference = Net()  # before any rank is in a checkpoint, which sets the generator of all
        model = hpcdp.torch.DistributedDataParallel(Net(), world)
        x = batch(0, world.rank)[0]
        (model(x).sum() + (model(2 * x) ** 2).sum() if not reentrant else model(x).sum()).backward()
        total = 0
        for other in range(world.size):
            x = batch(0, other)[0]
            total += reference(x).sum() + (reference(2 * x) ** 2).sum() if not reentrant else reference(x).sum()
        total.backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad / world.size, atol=1e-4)

    thread_comm.run(2, rank)


def test_half_precision_is_summed_in_single_and_frozen_parameters_are_left_alone():
    def rank(world):
        net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).bfloat16()
        net[0].weight.requires_grad_(False)
        model = hpcdp.torch.DistributedDataParallel(net, world)
        for step in range(2):
            model.zero_grad(set_to_none=step == 0)
            model(batch(0, world.rank)[0].bfloat16()).sum().backward()
        assert net[0].weight.grad is None
        assert net[1].bias.grad.dtype is torch.bfloat16
        assert net[1].bias.grad.tolist() == [5.0] * 4

    thread_comm.run(3, rank)


def test_buffers_are_those_of_rank_0_before_each_forward_and_states_load_in_plain_modules():
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(world.rank), world)
        for step in range(3):
            loss_of(model, step, world.rank).backward()
        reference = network(0)
        for step in range(3):
            loss_of(reference, step, 0).backward()
        loss_of(model, 3, world.rank)  # takes rank 0's of the step before, and adds its own
        loss_of(reference, 3, world.rank)
        plain = network(7)
        plain.load_state_dict(model.module.state_dict())
        for name, buffer in reference.named_buffers():
            assert torch.allclose(plain.get_buffer(name), buffer, atol=1e-6), name

    thread_comm.run(2, rank)


@pytest.mark.parametrize("shape", [(2,), "rank"])
def test_buffers_that_are_not_broadcast_are_each_ranks_own(shape):
    def rank(world):
        net = network(0)
        net.register_buffer("own", torch.full((world.rank + 1,) if shape == "rank" else shape, float(world.rank)))
        model = hpcdp.torch.DistributedDataParallel(net, world, broadcast_buffers=False)
        with model.join():
            for step in range(1 + world.rank):
                loss_of(model, step, world.rank).backward()
        assert set(net.own.tolist()) == {world.rank}
        assert int(net[1].num_batches_tracked) == 1 + world.rank

    thread_comm.run(3, rank)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_two_forwards_with_buffers_may_go_before_one_backward(n):
    def loss(net, other):  # as of a critic, of what is real and what is not
        return (net(batch(0, other)[0]) * net(batch(1, other)[0])).mean()

    def rank(world):
        model, reference = hpcdp.torch.DistributedDataParallel(network(0), world), network(0)
        loss(model, world.rank).backward()
        for other in range(n):
            (loss(reference, other) / n).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)

    thread_comm.run(n, rank)


def test_gradients_asked_for_by_hand_are_this_ranks():
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(0), world)
        (found,) = torch.autograd.grad(loss_of(model, 0, world.rank), [model.module[3].bias])
        reference = network(0)
        loss_of(reference, 0, world.rank).backward()
        assert torch.allclose(found, reference[3].bias.grad)

    thread_comm.run(2, rank)


def test_what_cannot_be_wrapped_is_refused_by_name():
    def rank(world):
        wrap = hpcdp.torch.DistributedDataParallel
        with raises(ConfigError, operation="DistributedDataParallel", where="module"):
            wrap(nn.ReLU(), world)
        with raises(ConfigError, operation="DistributedDataParallel", where="owner", got="all"):
            wrap(network(0), world, owner="all")
        with raises(UnsupportedError, operation="DistributedDataParallel", where="weight", got="torch.float8_e5m2"):
            wrap(nn.Linear(2, 2).to(torch.float8_e5m2), world)
        with raises(
            MismatchError,
            operation="DistributedDataParallel",
            where="item 1 of 2 on rank 0",
            got=[(3, 2), "torch.float32", "requires_grad", "rank 1"],
        ):
            wrap(nn.Linear(2, 2 + world.rank), world)

    thread_comm.run(2, rank)


def test_every_rank_draws_its_own_samples():
    def rank(world):
        sampler = hpcdp.torch.DistributedSampler(range(10), world=world, seed=3)
        sampler.set_epoch(2)
        return list(sampler)

    drawn = thread_comm.run(4, rank)
    expected = [list(torch.utils.data.DistributedSampler(range(10), 4, rank, seed=3)) for rank in range(4)]
    assert [len(each) for each in drawn] == [3] * 4
    assert set().union(*drawn) == set(range(10))
    assert drawn != expected  # of another epoch
