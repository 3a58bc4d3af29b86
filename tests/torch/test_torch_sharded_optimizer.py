"""Sharded updates over thread ranks, against torch's optimizers in one process."""

import itertools

import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from pairs import pairs
from torch import nn
from toy import SEEDING, alike, batch, loss_of

import hpcdp.torch
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, MismatchError, UnsupportedError

NODES = [(1, None), (2, None), (3, None), (3, 1), (4, 2), (5, (2, 3))]
RULES = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True}),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 1e-2}),
]


def network(seed):
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 4))


def groups(model):
    params = list(model.parameters())
    return [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim == 1], "lr": 0.03}]


@pytest.mark.parametrize(("layout", "rule_and_settings", "clip"), pairs(NODES, RULES, [None, 0.3]))
def test_the_numbers_are_those_of_torch(layout, rule_and_settings, clip):
    (n, ranks_per_node), (rule, settings) = layout, rule_and_settings

    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(world.rank), world, owner="shard", bucket_cap_mb=0.004)
        reference = network(0)
        ours = hpcdp.torch.ShardedOptimizer(model, rule, groups(model), **settings)
        theirs = rule(groups(reference), **settings)
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (ours, theirs)]
        for step in range(5):
            ours.zero_grad()
            theirs.zero_grad()
            loss_of(model, step, world.rank).backward()
            (sum(loss_of(reference, step, other) for other in range(n)) / n).backward()
            if clip is not None:
                before = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
                assert float(ours.clip_grad_norm_(clip)) == pytest.approx(float(before), rel=1e-4)
            ours.step()
            theirs.step()
            for schedule in schedules:
                schedule.step()
            world.barrier()
            assert alike(model, reference), step
            world.barrier()

    thread_comm.run(n, rank, ranks_per_node)


FROZEN = [
    ((2, None), RULES[1], "rank", False),
    ((3, 1), RULES[2], "shard", True),
    ((2, None), RULES[3], "shard", False),
]


@pytest.mark.parametrize(
    ("layout", "rule_and_settings", "owner", "overlap"),
    [
        *FROZEN,
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in itertools.product(NODES, RULES, ["rank", "shard"], [False, True])
        ),
    ],
)
def test_what_is_frozen_in_mid_run_or_used_by_no_rank_stays_as_torchs_optimizers_leave_it(
    layout, rule_and_settings, owner, overlap
):
    (n, ranks_per_node), (rule, settings) = layout, rule_and_settings

    class Seldom(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.net = network(seed)
            with SEEDING:
                torch.manual_seed(seed)
                self.seldom = nn.Linear(300, 4)

        def forward(self, x, uses_seldom):
            x = self.net[0](x).relu()
            found = self.net[2](x)
            return found + self.seldom(x) if uses_seldom else found

    def loss(model, step, rank):
        x, y = batch(step, rank)
        return nn.functional.cross_entropy(model(x, step in (0, 3) and rank == n - 1), y)

    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(
            Seldom(world.rank), world, owner=owner, overlap=overlap, find_unused_parameters=True, bucket_cap_mb=0.004
        )
        reference = Seldom(0)
        if owner == "shard":
            ours = hpcdp.torch.ShardedOptimizer(model, rule, **settings)
        else:
            ours = rule(model.parameters(), **settings)
        theirs = rule(reference.parameters(), **settings)
        for step in range(6):
            world.barrier()
            for net in (model.module, reference):
                net.net[0].weight.requires_grad_(step not in (2, 3))
            ours.zero_grad()
            theirs.zero_grad()
            loss(model, step, world.rank).backward()
            (sum(loss(reference, step, other) for other in range(n)) / n).backward()
            ours.step()
            theirs.step()
            world.barrier()
            assert alike(model, reference), step
            states = [[state for state in each.state_dict()["state"].values() if state] for each in (ours, theirs)]
            for mine, torchs in zip(*states, strict=True):
                for name, value in torchs.items():
                    if value is not None:
                        assert torch.allclose(mine[name], torch.as_tensor(value), atol=1e-5), (step, name)
        world.barrier()

    thread_comm.run(n, rank, ranks_per_node)


@pytest.mark.parametrize("layout", NODES)
def test_parameters_are_changed_by_hand_once(layout):
    n, ranks_per_node = layout

    def rank(world):
        model, reference = hpcdp.torch.DistributedDataParallel(network(0), world, owner="shard"), network(0)
        ours = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
        other = {name: value + 1 for name, value in network(5).state_dict().items()}
        for step in range(3):
            with ours.changing_parameters(), ours.changing_parameters(), torch.no_grad():  # within itself does nothing
                with raises(ConfigError, operation="step", expected="changing_parameters()"):
                    ours.step()
                if step == 1:
                    model.module.load_state_dict(other)
                for param in model.parameters():
                    param.mul_(0.5).clamp_(-0.4, 0.4)
            with torch.no_grad():
                if step == 1:
                    reference.load_state_dict(other)
                for param in reference.parameters():
                    param.mul_(0.5).clamp_(-0.4, 0.4)
            assert alike(model, reference, atol=1e-6), step
            loss_of(model, step, world.rank).backward()
            theirs.zero_grad()
            (sum(loss_of(reference, step, other) for other in range(n)) / n).backward()
            ours.step()
            theirs.step()
        world.barrier()
        assert alike(model, reference)

    thread_comm.run(n, rank, ranks_per_node)


@pytest.mark.parametrize(("n", "ranks_per_node"), [(1, None), (3, None), (2, 1)])
@pytest.mark.parametrize("who", ["one", "all"])
def test_other_memory_of_a_parameter_is_an_error_of_all_ranks(who, n, ranks_per_node):
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(0), world, owner="shard")
        ours = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        name, param = next(model.module.named_parameters())
        place = param.data
        loss_of(model, 0, world.rank).backward()
        moves = who == "all" or world.rank == n - 1
        if moves:
            param.data = param.data.clone()
        kind, where = (ConfigError, name) if moves else (MismatchError, "item 1 of 1 on rank 0")
        with raises(kind, operation="step", where=where):
            ours.step()
        param.data = place
        loss_of(model, 1, world.rank).backward()
        ours.step()

    thread_comm.run(n, rank, ranks_per_node)


@pytest.mark.parametrize(("rule", "settings"), RULES[1:])
def test_states_go_to_torch_and_back(rule, settings):
    def rank(world):
        model, reference = hpcdp.torch.DistributedDataParallel(network(0), world, owner="shard"), network(0)
        ours = hpcdp.torch.ShardedOptimizer(model, rule, **settings)
        theirs = rule(reference.named_parameters(), **settings)
        for step in range(6):
            loss_of(model, step, world.rank).backward()
            theirs.zero_grad()
            (sum(loss_of(reference, step, other) for other in range(world.size)) / world.size).backward()
            ours.step()
            theirs.step()
            if step == 2:
                mine, torchs = ours.state_dict(), theirs.state_dict()
                assert mine["param_groups"] == torchs["param_groups"]
                assert {k: set(v) for k, v in mine["state"].items()} == {k: set(v) for k, v in torchs["state"].items()}
                ours.load_state_dict(torchs)
                theirs.load_state_dict(mine)
            world.barrier()
            assert alike(model, reference), step
            world.barrier()

    thread_comm.run(3, rank)


def test_several_backwards_before_a_step_add_up():
    def rank(world):
        model, reference = hpcdp.torch.DistributedDataParallel(network(0), world, owner="shard"), network(0)
        ours = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        for step in range(3):
            loss_of(model, step, world.rank).backward()
            (sum(loss_of(reference, step, other) for other in range(world.size)) / world.size).backward()
        ours.step()
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        world.barrier()
        assert alike(model, reference)
        assert all(param.grad is None for param in model.parameters())

    thread_comm.run(2, rank)


def test_parameters_outside_of_all_groups_stay_as_they_are():
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(0), world, owner="shard")
        optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, [model.module[0].weight], lr=0.1)
        loss_of(model, 0, world.rank).backward()
        optimizer.step()
        world.barrier()
        changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), network(0).parameters(), strict=True)]
        assert changed == [True, False, False, False]

    thread_comm.run(2, rank)


def test_what_the_kernels_cannot_do_is_refused_by_name():
    def rank(world):
        def wrapped(owner="shard"):
            return hpcdp.torch.DistributedDataParallel(network(0), world, owner=owner)

        sharded = hpcdp.torch.ShardedOptimizer
        with raises(UnsupportedError, operation="ShardedOptimizer", where="amsgrad"):
            sharded(wrapped(), torch.optim.Adam, amsgrad=True)
        with raises(UnsupportedError, operation="ShardedOptimizer", where="dampening"):
            sharded(wrapped(), torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
        with raises(
            ConfigError,
            operation="ShardedOptimizer",
            where="optimizer_class",
            expected=["torch.optim.Adam", "torch.optim.AdamW"],
        ):
            sharded(wrapped(), torch.optim.Adagrad)
        with raises(ConfigError, operation="ShardedOptimizer", where="optimizer_class", got="an instance of SGD"):
            sharded(model := wrapped(), torch.optim.SGD(model.parameters(), lr=0.1))
        with raises(ConfigError, operation="ShardedOptimizer", where="model"):
            sharded(wrapped("rank"))

    thread_comm.run(1, rank)
