"""What users do to modules, wrappers and optimizers besides training: it works as in PyTorch, or is refused by name."""

import copy
import dataclasses
import gc
import io
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import toy
from torch import nn
from torch.nn.utils import prune
from toy import SEEDING, add_average, loss_of

import hpcdp.torch
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, MismatchError, StaleGradientError, UnsupportedError

SPREAD = [(1, None), (2, None), (3, 1), (4, 2)]


class Failing(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("backward fails")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        with SEEDING:
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.fails_at = None

    def forward(self, x):
        x = self.first(x)
        x = self.last(Failing.apply(x) if self.fails_at == "middle" else x)
        return Failing.apply(x) if self.fails_at == "end" else x


def wrapped(net, world, owner="rank", **options):
    """The wrapped module and an optimizer: SGD with momentum."""
    model = hpcdp.torch.DistributedDataParallel(net, world, owner=owner, **options)
    if owner == "shard":
        return model, hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alike(world, ours, theirs):
    world.barrier()
    found = toy.alike(ours, theirs)
    world.barrier()
    return found


@pytest.mark.parametrize("fails_at", ["end", "middle"])
@pytest.mark.parametrize("owner", ["rank", "shard"])
@pytest.mark.parametrize(("n", "ranks_per_node"), SPREAD)
def test_training_goes_on_after_a_backward_that_failed_on_all_ranks(n, ranks_per_node, owner, fails_at):
    def rank(world):
        net, reference = Network(), Network()
        model, optimizer = wrapped(net, world, owner)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            net.fails_at = fails_at if step == 1 else None
            optimizer.zero_grad()
            if step == 1:
                with pytest.raises(RuntimeError, match="backward fails"):
                    loss_of(model, step, world.rank).backward()
                continue
            loss_of(model, step, world.rank).backward()
            optimizer.step()
            theirs.zero_grad()
            add_average(reference, step, n)
            theirs.step()
        assert alike(world, model, reference)

    thread_comm.run(n, rank, ranks_per_node)


@pytest.mark.parametrize("before", ["rank", "shard"])
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_a_module_may_be_wrapped_again_and_the_first_wrapper_says_so(owner, before):
    def rank(world):
        net, reference = Network(), Network()
        first, _ = wrapped(net, world, before)
        model, optimizer = wrapped(net, world, owner)
        with raises(ConfigError, operation="forward", where="last.bias"):
            loss_of(first, 0, world.rank)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, world.rank).backward()
            optimizer.step()
            theirs.zero_grad()
            add_average(reference, step, world.size)
            theirs.step()
        assert alike(world, model, reference)

    thread_comm.run(2, rank)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_a_wrapper_that_is_gone_keeps_no_memory_while_its_module_lives(owner, overlap):
    def rank(world):
        net = Network()
        model, optimizer = wrapped(net, world, owner, overlap=overlap)
        loss_of(model, 0, world.rank).backward()
        optimizer.step()
        left = [weakref.ref(each) for each in (model, model.backward_pass.reducer, model.backward_pass)]
        del model, optimizer
        world.barrier()
        if world.rank == 0:
            gc.collect()  # of all threads
        world.barrier()
        assert [each() for each in left] == [None] * 3
        loss_of(net, 1, world.rank).backward()  # of this rank alone, from now on

    thread_comm.run(2, rank)


@pytest.mark.each_value
@pytest.mark.parametrize("owner", ["rank", "shard"])
@pytest.mark.parametrize(("n", "ranks_per_node"), SPREAD)
def test_two_models_of_which_one_is_trained_through_the_other(n, ranks_per_node, owner):
    def nets():
        with SEEDING:
            torch.manual_seed(1)
            return nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def noise(step, rank):
        return torch.from_numpy(np.random.default_rng([step, rank]).standard_normal((3, 4), "f4"))

    def rank(world):
        plain, pairs = nets(), [wrapped(net, world, owner) for net in nets()]
        (maker, makers), (critic, critics) = pairs
        theirs = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in plain]
        for step in range(4):
            critics.zero_grad()
            with critic.no_sync():
                critic(noise(step, world.rank)).mean().backward()
            made = maker(noise(step + 50, world.rank))
            (-critic(made.detach()).mean()).backward()
            critics.step()
            makers.zero_grad()
            critic(made).pow(2).mean().backward()
            makers.step()
            theirs[1].zero_grad()
            made = [plain[0](noise(step + 50, other)) for other in range(n)]
            for other in range(n):
                ((plain[1](noise(step, other)) - plain[1](made[other].detach())).mean() / n).backward()
            theirs[1].step()
            theirs[0].zero_grad()
            (sum(plain[1](each).pow(2).mean() for each in made) / n).backward()
            theirs[0].step()
        assert alike(world, maker, plain[0]) and alike(world, critic, plain[1])

    thread_comm.run(n, rank, ranks_per_node)


@pytest.mark.parametrize("place", ["before", "between"])
@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.AdamW])
def test_parameters_of_no_elements_are_in_nobodys_way(rule, place):
    class Holed(Network):
        def __init__(self):
            super().__init__()
            self.hole = nn.Parameter(torch.zeros(0, 3))
            if place == "between":
                with SEEDING:  # its first values come from the generator of all threads
                    self.more = nn.Linear(4, 4, bias=False)
                nn.init.ones_(self.more.weight)

        def forward(self, x):
            x = super().forward(x) + self.hole.sum()
            return self.more(x) if place == "between" else x

    def rank(world):
        model, reference = hpcdp.torch.DistributedDataParallel(Holed(), world, owner="shard"), Holed()
        optimizer = hpcdp.torch.ShardedOptimizer(model, rule, lr=0.1)
        theirs = rule(reference.parameters(), lr=0.1)
        for step in range(3):
            loss_of(model, step, world.rank).backward()
            theirs.zero_grad()
            add_average(reference, step, world.size)
            optimizer.step()
            theirs.step()
        assert alike(world, model, reference)

    thread_comm.run(2, rank)


@pytest.mark.parametrize(("owner", "overlap"), [("rank", False), ("shard", True)])
def test_wrapping_again_and_again_leaks_nothing(owner, overlap):
    def counts():
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        shared = sum("memfd:" in line or "/dev/shm" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shared

    def rank(world):
        net, seen = Network(), []
        for turn in range(53):
            net.first.weight.requires_grad_(turn % 2 == 0)
            model, optimizer = wrapped(net, world, owner, overlap=overlap)
            loss_of(model, 0, world.rank).backward()
            optimizer.step()
            del model, optimizer
            if turn in (2, 52):
                world.barrier()
                seen.append(counts() if world.rank == 0 else None)
                world.barrier()
        assert seen[0] == seen[1]

    thread_comm.run(2, rank)


def test_gradients_that_are_zeroed_count_no_more():
    def rank(world):
        net, reference = Network(), Network()
        model, optimizer = wrapped(net, world, "shard", find_unused_parameters=True)
        loss_of(model, 0, world.rank).backward()
        optimizer.zero_grad()
        optimizer.step()
        assert alike(world, model, reference)
        for zero in (optimizer.zero_grad, model.zero_grad):
            loss_of(model, 1, world.rank).backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.zero_grad()
            loss_of(model, 1, world.rank).backward()
            zero()
        loss_of(model, 2, world.rank).backward()
        optimizer.step()
        add_average(reference, 2, world.size)
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        assert alike(world, model, reference)

    thread_comm.run(3, rank)


def test_what_was_zeroed_after_no_sync_counts_as_not_used():
    def rank(world):
        model, optimizer = wrapped(Branches(), world, find_unused_parameters=True)
        with model.no_sync():
            model(torch.ones(2, 6), "b").sum().backward()
        optimizer.zero_grad()
        model(torch.ones(2, 6), "a").sum().backward()
        assert model.module.layers["b"].weight.grad is None

    thread_comm.run(2, rank)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    named: dict
    more: object


class Branches(nn.Module):
    """Uses one of two layers, or none."""

    def __init__(self):
        super().__init__()
        with SEEDING:
            torch.manual_seed(0)
            self.layers = nn.ModuleDict({"a": nn.Linear(6, 4), "b": nn.Linear(6, 4)})

    def forward(self, x, used):
        return self.layers[used](x) if used else 2 * x


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_steps_without_a_parameter_do_not_count_for_it(rule):
    settings = {"lr": 0.1, "weight_decay": 0.1}

    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(Branches(), world, owner="shard", find_unused_parameters=True)
        optimizer, reference = hpcdp.torch.ShardedOptimizer(model, rule, **settings), Branches()
        theirs = rule(reference.parameters(), **settings)
        for step, used in enumerate("aabaabb"):
            x = torch.from_numpy(np.random.default_rng([step, world.rank]).standard_normal((3, 6), "f4"))
            model(x, used).pow(2).mean().backward()
            theirs.zero_grad()
            for other in range(world.size):
                x = torch.from_numpy(np.random.default_rng([step, other]).standard_normal((3, 6), "f4"))
                (reference(x, used).pow(2).mean() / world.size).backward()
            optimizer.step()
            theirs.step()
            if step == 4:
                found, expected = optimizer.state_dict(), theirs.state_dict()
                for number, state in expected["state"].items():
                    assert found["state"][number].get("step") == state.get("step")
                optimizer.load_state_dict(expected)
        assert alike(world, model, reference)

    thread_comm.run(2, rank)


def test_a_rank_that_uses_no_parameter_at_all_takes_part():
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(Branches(), world, find_unused_parameters=True)
        x = torch.ones(2, 6, requires_grad=True)
        model(x, "a" if world.rank == 1 else None).sum().backward()
        own = Branches()
        own(torch.ones(2, 6), "a").sum().backward()
        assert torch.allclose(model.module.layers["a"].weight.grad, own.layers["a"].weight.grad / world.size)
        assert model.module.layers["b"].weight.grad is None

    thread_comm.run(3, rank)


def test_a_rank_that_uses_no_parameter_at_all_may_give_a_record():
    class Recorded(Branches):
        def forward(self, x, used):
            return [Record({"scores": super().forward(x, used)}, None)]

    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(Recorded(), world, find_unused_parameters=True)
        out = model(torch.ones(2, 6, requires_grad=True), "a" if world.rank == 1 else None)[0]
        assert type(out) is Record and out.more is None
        out.named["scores"].sum().backward()
        assert torch.allclose(model.module.layers["a"].weight.grad, torch.full((4, 6), 2.0 / world.size))

    thread_comm.run(3, rank)


def test_groups_may_come_later_and_states_of_a_part_are_given():
    def rank(world):
        model, reference = hpcdp.torch.DistributedDataParallel(Network(), world, owner="shard"), Network()
        optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.Adam, model.module.first.parameters(), lr=0.1)
        theirs = torch.optim.Adam(reference.first.parameters(), lr=0.1)
        for step in range(4):
            loss_of(model, step, world.rank).backward()
            reference.zero_grad()
            add_average(reference, step, world.size)
            optimizer.step()
            theirs.step()
            if step == 1:
                found, expected = optimizer.state_dict(), theirs.state_dict()
                assert found["state"].keys() == expected["state"].keys()
                group = {"lr": 0.01, "betas": (0.5, 0.6)}
                optimizer.add_param_group({"params": list(model.module.last.parameters()), **group})
                theirs.add_param_group({"params": list(reference.last.parameters()), **group})
        assert alike(world, model, reference)
        found, expected = optimizer.state_dict()["state"], theirs.state_dict()["state"]
        assert [found[each]["step"] for each in found] == [expected[each]["step"] for each in found] == [4, 4, 2, 2]

    thread_comm.run(2, rank)


@dataclasses.dataclass(slots=True)
class Output:
    scores: torch.Tensor
    named: dict


def test_outputs_may_be_nested():
    class Nested(Network):
        def forward(self, x):
            x = super().forward(x)
            return Output(x, {"pair": (x.sum(), [2 * x])})

    def rank(world):
        model, reference = hpcdp.torch.DistributedDataParallel(Nested(), world), Network()
        out = model(torch.ones(2, 6) * world.rank)
        (out.named["pair"][1][0].sum() + out.scores.pow(2).sum()).backward()
        for other in range(world.size):
            x = reference(torch.ones(2, 6) * other)
            ((2 * x).sum() + x.pow(2).sum()).div(world.size).backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad, atol=1e-5)

    thread_comm.run(2, rank)


def test_modules_are_copied_and_saved_and_sharded_optimizers_are_not():
    def rank(world):
        net = hpcdp.torch.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), world)
        model = hpcdp.torch.DistributedDataParallel(net, world)
        _, optimizer = wrapped(Network(), world, "shard")
        with raises(UnsupportedError, operation="ShardedOptimizer", remedy="state_dict()"):
            torch.save(optimizer, io.BytesIO())
        copied = copy.deepcopy(model.module)
        x = torch.arange(12.0).view(2, 6) * (1 + world.rank)
        assert torch.equal(copied(x), model.module(x))
        file = io.BytesIO()
        torch.save(model.module.state_dict(), file)
        with raises(UnsupportedError, operation="World", expected="hpcdp.init()"):
            torch.save(model.module, file)

    thread_comm.run(2, rank)


def test_what_cannot_be_done_is_refused_by_name():
    def rank(world):
        wrap = hpcdp.torch.DistributedDataParallel
        net = Network()
        net.first.weight.requires_grad_(world.rank == 0)
        with raises(
            MismatchError,
            operation="DistributedDataParallel",
            where="item 1 of 4 on rank 0",
            expected=["first.weight", "requires_grad"],
        ):
            wrap(net, world)
        with raises(UnsupportedError, operation="DistributedDataParallel", where="weight", expected="values"):
            wrap(nn.LazyLinear(3), world)
        with raises(UnsupportedError, operation="DistributedDataParallel", where="weight", remedy="sparse=False"):
            wrap(nn.Embedding(5, 2, sparse=True), world, owner="shard")
        tied = wrap(nn.Embedding(5, 2, sparse=True), world)
        with raises(UnsupportedError, operation="backward", where="weight", expected="a sparse gradient"):
            (tied(torch.tensor([1, 2])) @ tied.module.weight.t()).sum().backward()
        net = Network()
        net.first.weight.requires_grad_(False)
        model = wrap(net, world)
        net.first.weight.requires_grad_(True)
        with raises(ConfigError, operation="forward", where="first.weight", got="requires_grad=True"):
            loss_of(model, 0, world.rank)
        model = wrap(Network(), world).double()
        with raises(
            UnsupportedError, operation="backward", where="last.bias", expected="torch.float32", got="torch.float64"
        ):
            model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        model, optimizer = wrapped(Network(), world, "shard")
        model.module.first.weight.data = torch.zeros(8, 6)
        loss_of(model, 0, world.rank).backward()
        with raises(ConfigError, operation="step", where="first.weight"):
            optimizer.step()

    thread_comm.run(2, rank)


def test_parameters_that_are_not_the_wrapped_ones_are_refused_by_name():
    def assign(net):
        net.load_state_dict({name: each.clone() for name, each in net.state_dict().items()}, assign=True)

    def replace(net):
        net.last = nn.Linear(8, 4)

    def rank(world):
        for change, name in ((assign, "first.weight"), (replace, "last.weight")):
            model, _ = wrapped(Network(), world, find_unused_parameters=True)
            change(model.module)
            with raises(ConfigError, operation="forward", where=name, remedy="load_state_dict()"):
                loss_of(model, 0, world.rank)
            with torch.no_grad():
                loss_of(model, 0, world.rank)

    thread_comm.run(2, rank)


def test_wrapped_parameters_may_be_held_elsewhere():
    def rank(world):
        model, optimizer = wrapped(Network(), world, find_unused_parameters=True)
        prune.random_unstructured(model.module.first, "weight", 0)  # first.weight_orig from now on
        model.module.last.bias = None
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step, world.rank).backward()
            grads = world.comm.allgather_json(model.module.first.weight_orig.grad.tolist())
            assert grads[0] == grads[1]
        other = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
        torch.func.functional_call(model, other, (torch.ones(2, 6),)).sum().backward()
        assert all(each.grad is not None for each in other.values())

    thread_comm.run(2, rank)


def test_with_overlap_one_backward_goes_before_each_step_by_shards():
    def rank(world):
        model, optimizer = wrapped(Network(), world, "shard", overlap=True)
        loss_of(model, 0, world.rank).backward()
        with raises(StaleGradientError, operation="backward", where="last.bias", remedy="no_sync()"):
            loss_of(model, 1, world.rank).backward()
        optimizer.zero_grad()
        loss_of(model, 2, world.rank).backward()
        optimizer.step()
        reference = Network()
        add_average(reference, 2, world.size)
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        assert alike(world, model, reference)

    thread_comm.run(2, rank, 1)


def test_states_of_another_kind_are_refused():
    def rank(world):
        _, optimizer = wrapped(Network(), world, "shard")
        other = torch.optim.Adam(Network().parameters())
        with raises(ConfigError, operation="load_state_dict", remedy="state_dict()"):
            optimizer.load_state_dict(other.state_dict())
        model, optimizer = wrapped(Network(), world, "shard")
        optimizer.param_groups[0]["momentum"] = 0.0
        loss_of(model, 0, world.rank).backward()
        with raises(UnsupportedError, operation="ShardedOptimizer", where="momentum"):
            optimizer.step()

    thread_comm.run(2, rank)


def test_buffers_that_share_memory_go_on_to():
    class Shared(Network):
        def __init__(self):
            super().__init__()
            self.register_buffer("whole", torch.zeros(6))
            self.register_buffer("head", self.whole[:2])
            self.register_buffer("other", torch.zeros(3))

    def rank(world):
        net = Shared()
        model = hpcdp.torch.DistributedDataParallel(net, world)
        for step in range(3):
            net.head.add_(1 + world.rank)
            net.other.add_(1 + world.rank)
            loss_of(model, step, world.rank)
            assert net.whole.tolist() == [step + 1.0] * 2 + [0.0] * 4
            assert net.head.tolist() == [step + 1.0] * 2 and net.other.tolist() == [step + 1.0] * 3

    thread_comm.run(3, rank)
