"""What ranks must do alike with a sharded optimizer, and what is not its model's: an error by name, nothing changed."""

import copy

import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import toy
from torch import nn
from toy import SEEDING, add_average, loss_of

import hpcdp.torch
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, MismatchError, NonFiniteGradientError, StaleGradientError, UnsupportedError

SPREAD = [(2, None), (3, 1), (4, 2)]


def network():
    with SEEDING:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def made(world, rule=torch.optim.SGD, params=None, net=None, **settings):
    model = hpcdp.torch.DistributedDataParallel(network() if net is None else net, world, owner="shard")
    params = None if params is None else params(model.module)
    return model, hpcdp.torch.ShardedOptimizer(model, rule, params, **(settings or {"lr": 0.1}))


def told(n, rank, error, ranks_per_node=None):
    """The message of ``error`` that every rank got."""
    said = []

    def one(world):
        with pytest.raises(error) as caught:
            rank(world)
        said.append(str(caught.value))

    thread_comm.run(n, one, ranks_per_node)
    assert len(said) == n
    return said[0]


@pytest.mark.parametrize(("n", "per_node"), SPREAD)
def test_another_class_on_one_rank(n, per_node):
    rules = [torch.optim.Adam, torch.optim.AdamW]
    text = told(n, lambda world: made(world, rules[world.rank > 0], lr=0.1, weight_decay=0.1), MismatchError, per_node)
    assert "torch.optim.Adam" in text and "torch.optim.AdamW on rank" in text


def test_groups_of_other_members():
    def rank(world):
        made(world, params=lambda net: [{"params": [*net[2 * world.rank].parameters()]}])

    assert "group 0: 0.weight, 0.bias" in told(2, rank, MismatchError)


def test_other_groups_that_are_added_later():
    def rank(world):
        model, optimizer = made(world, params=lambda net: net[0].parameters())
        optimizer.add_param_group({"params": [model.module[2].weight if world.rank else model.module[2].bias]})

    assert "add_param_group" in told(3, rank, MismatchError, 1)


@pytest.mark.parametrize(("n", "per_node"), SPREAD)
def test_clipping_by_another_norm(n, per_node):
    def rank(world):
        model, optimizer = made(world)
        loss_of(model, 0, world.rank).backward()
        optimizer.clip_grad_norm_(1.0 + world.rank)

    assert "clip_grad_norm_ by 1.0 " in told(n, rank, MismatchError, per_node)


@pytest.mark.parametrize(("n", "per_node"), SPREAD)
def test_scalers_of_another_scale(n, per_node):
    def rank(world):
        model, optimizer = made(world)
        scaler = hpcdp.torch.GradScaler(init_scale=1024.0 * (1 + world.rank))
        scaler.scale(loss_of(model, 0, world.rank)).backward()
        scaler.step(optimizer)

    assert "unscale by 0.0009765625" in told(n, rank, MismatchError, per_node)


def trained_state(steps):
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, step, 0).backward()
        optimizer.step()
    return optimizer.state_dict()


def test_other_states_are_loaded_by_no_rank():
    def rank(world):
        made(world, torch.optim.Adam, lr=0.1)[1].load_state_dict(trained_state(3 + world.rank))

    assert "tensor(4.)" in told(2, rank, MismatchError)


def spoil(state, kind):
    if kind == "shape":
        state["state"][2]["exp_avg_sq"] = torch.zeros(5, 8)
    elif kind == "scalar":
        state["state"][1]["exp_avg"] = torch.tensor(1.0)
    elif kind == "groups":
        state["param_groups"][0]["params"].pop()
    elif kind == "a number":
        state["state"][0]["exp_avg"] = 1.0
    return {"empty": {}, "list": [1], "no groups": {"state": {0: 3}, "param_groups": [1]}}.get(kind, state)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("shape", "load_state_dict [exp_avg_sq of 2.weight]: expected shape (4, 8), got (5, 8)"),
        ("scalar", "load_state_dict [exp_avg of 0.bias]: expected shape (8,), got ()"),
        ("groups", "expected groups of [4] parameters, got [3]"),
        ("empty", "expected a result of state_dict(), a dict with state and param_groups, got a dict with []"),
        ("list", "got list"),
        ("no groups", "expected a result of state_dict()"),
        ("a number", "expected a result of state_dict()"),
    ],
)
def test_states_of_another_form_are_refused_and_nothing_is_changed(kind, says):
    def rank(world):
        _, optimizer = made(world, torch.optim.Adam, lr=0.1)
        optimizer.load_state_dict(trained_state(2))
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ConfigError) as caught:
            optimizer.load_state_dict(spoil(trained_state(4), kind))
        assert says in str(caught.value)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for number, state in before["state"].items():
            for name, value in state.items():
                assert torch.equal(after["state"][number][name], value)

    thread_comm.run(2, rank)


@pytest.mark.parametrize("later", [False, True])
def test_a_parameter_of_no_model_is_refused(later):
    def rank(world):
        other = nn.Parameter(torch.ones(2))
        if not later:
            with raises(ConfigError, operation="ShardedOptimizer", where="group 1"):
                made(world, params=lambda net: [{"params": [*net.parameters()]}, {"params": [other]}])
            return
        model, optimizer = made(world)
        with raises(ConfigError, operation="ShardedOptimizer", where="group 1"):
            optimizer.add_param_group({"params": [other]})
        reference = network()
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
        loss_of(model, 0, world.rank).backward()
        optimizer.step()
        add_average(reference, 0, world.size)
        theirs.step()
        world.barrier()
        assert toy.alike(model.module, reference)
        world.barrier()

    thread_comm.run(2, rank)


@pytest.mark.parametrize(("n", "per_node"), SPREAD)
def test_clipping_a_norm_that_is_nan_does_what_torch_does(n, per_node):
    def rank(world):
        model, optimizer = made(world)
        loss = loss_of(model, 0, world.rank)
        (loss * float("nan") if world.rank == 1 else loss).backward()
        assert torch.isnan(optimizer.clip_grad_norm_(1e-3))
        optimizer.step()
        world.barrier()
        assert all(torch.isnan(each).all() for each in model.parameters())
        world.barrier()
        loss_of(model, 1, world.rank).backward()
        with pytest.raises(NonFiniteGradientError):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)

    thread_comm.run(n, rank, per_node)


def test_over_several_nodes_torchs_own_clipping_finds_no_gradients_and_ranks_stay_alike():
    def rank(world):
        model, optimizer = made(world)
        for step in range(3):
            loss_of(model, step, world.rank).backward()
            assert all(each.grad is None for each in model.parameters())
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        world.barrier()
        return torch.cat([each.detach().reshape(-1) for each in model.parameters()]).clone()

    first, *others = thread_comm.run(3, rank, 1)
    assert all(torch.equal(first, each) for each in others)


def test_a_step_without_a_backward_says_so():
    def rank(world):
        made(world)[1].step()

    assert "expected a backward since the last step or zero_grad(), got none" in told(2, rank, StaleGradientError)


class Sharing(nn.Module):
    """A buffer that is a parameter's memory, and a view of a buffer that is kept elsewhere."""

    def __init__(self):
        super().__init__()
        with SEEDING:
            torch.manual_seed(5)
            self.layer = nn.Linear(6, 4)
        self.register_buffer("weight", self.layer.weight.data)
        self.register_buffer("count", torch.zeros(3))
        self.seen = self.count.view(3, 1)

    def forward(self, x):
        self.seen += 1
        return self.layer(x) + x @ self.weight.T + self.count.sum() * 0.01


@pytest.mark.parametrize(("n", "per_node"), SPREAD)
def test_buffers_stay_where_they_are(n, per_node):
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(Sharing(), world)
        reference = Sharing()
        ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
        for step in range(4):
            for optimizer in (ours, theirs):
                optimizer.zero_grad()
            loss_of(model, step, world.rank).backward()
            counted = reference.count.clone()
            for other in range(n):
                reference.count.copy_(counted)
                (loss_of(reference, step, other) / n).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
        assert toy.alike(model.module, reference)
        assert model.module.count.tolist() == [4.0] * 3
        assert model.module.weight.data_ptr() == model.module.layer.weight.data_ptr()

    thread_comm.run(n, rank, per_node)


def test_a_buffer_in_the_memory_of_a_parameter_that_is_to_move_is_refused():
    with raises(UnsupportedError, operation="ShardedOptimizer", where="weight"):
        thread_comm.run(2, lambda world: made(world, net=Sharing()))


def test_parameters_in_the_same_memory_that_are_to_move_are_refused():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
            self.last.weight.data = self.first.weight.data

    with raises(UnsupportedError, operation="ShardedOptimizer", where="last.weight"):
        thread_comm.run(2, lambda world: made(world, net=Tied()))


def test_a_buffer_that_was_expanded_is_refused_on_all_ranks():
    def rank(world):
        net = nn.Linear(2, 2)
        net.register_buffer("expanded", torch.ones(1).expand(4))
        with raises(UnsupportedError, operation="DistributedDataParallel", where="expanded"):
            hpcdp.torch.DistributedDataParallel(net, world)
        hpcdp.torch.DistributedDataParallel(net, world, broadcast_buffers=False)

    thread_comm.run(2, rank)


def test_devices_where_torchs_wrapper_takes_them_are_refused():
    with raises(ConfigError, operation="DistributedDataParallel", where="world", expected="hpcdp.init()", got="[0]"):
        hpcdp.torch.DistributedDataParallel(nn.Linear(2, 2), [0])


def test_a_sparse_buffer_and_what_is_no_module_are_refused():
    net = nn.Linear(2, 2)
    net.register_buffer("sparse", torch.eye(2).to_sparse())
    with raises(UnsupportedError, operation="DistributedDataParallel", where="sparse"):
        thread_comm.run(1, lambda world: hpcdp.torch.DistributedDataParallel(net, world))
    with raises(ConfigError, operation="DistributedDataParallel", expected="torch.nn.Module", got=3):
        thread_comm.run(1, lambda world: hpcdp.torch.DistributedDataParallel(3, world))


@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_outputs_may_be_changed_in_place_where_parameters_may_be_unused(owner):
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(), world, owner=owner, find_unused_parameters=True)
        if owner == "shard":
            optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reference = network()
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
        halved = lambda net: lambda x: net(x).mul_(0.5)  # noqa: E731
        loss_of(halved(model), 0, world.rank).backward()
        optimizer.step()
        add_average(halved(reference), 0, world.size)
        theirs.step()
        world.barrier()
        assert toy.alike(model.module, reference)
        world.barrier()

    thread_comm.run(3, rank, 1)


@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_after_join_all_can_have_the_scale_of_those_that_went_on_longest(owner):
    def rank(world):
        model = hpcdp.torch.DistributedDataParallel(network(), world, owner=owner)
        if owner == "shard":
            optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = hpcdp.torch.GradScaler(init_scale=64.0, growth_interval=1)
        for epoch in range(2):
            with model.join():
                for step in range(1 + world.rank):
                    optimizer.zero_grad()
                    scaler.scale(loss_of(model, 10 * epoch + step, world.rank)).backward()
                    scaler.step(optimizer)
                    scaler.update()
            hpcdp.torch.broadcast_optimizer_state(scaler, model.last_rank, world)
        return scaler.get_scale()

    assert thread_comm.run(3, rank) == [64.0 * 2**6] * 3
