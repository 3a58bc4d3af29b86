"""States of optimizers come to the parameters of their names, in whatever order those are registered and given."""

import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn

from hpcdp import checkpoint
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, MismatchError
from hpcdp.torch import DistributedDataParallel, ShardedOptimizer, broadcast_optimizer_state

KINDS = [(owner, named) for owner in ("rank", "shard", "none") for named in (False, True)]


class Network(nn.Module):
    """Layers of one shape, registered in the order of ``names``."""

    def __init__(self, names, last="c"):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(3, 3, bias=name == "a"))
        for param in self.parameters():
            nn.init.constant_(param, 0.1)
        self.order = ["a", "b", last]

    def forward(self, x):
        for name in self.order:
            x = torch.tanh(getattr(self, name)(x) + 0.3)
        return x.pow(2).mean()


def made(world, owner, named, names, groups=None, last="c"):
    """A model and an optimizer; ``groups``: layers by group, of settings of their own."""
    net = Network(names, last)
    model = net if owner == "none" else DistributedDataParallel(net, world, owner=owner)
    params = list(model.named_parameters() if named else model.parameters())
    if groups:
        by_name = dict(net.named_parameters())
        params = [
            {"params": [pair if named else pair[1] for pair in by_name.items() if pair[0][0] in layers],
             "lr": 0.01 if "a" in layers else 0.03}
            for layers in groups
        ]  # fmt: skip
    if owner == "shard":
        return model, ShardedOptimizer(model, torch.optim.AdamW, params, lr=0.01)
    return model, torch.optim.AdamW(params, lr=0.01)


def step(model, optimizer, rank):
    for _ in range(2):
        model(torch.arange(12.0).reshape(4, 3) / (3.0 + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def found(model, optimizer):
    """States and learning rates by name."""
    names = {id(param): name.removeprefix("module.") for name, param in model.named_parameters()}
    state = optimizer.state_dict()
    of_groups = {number: group["lr"] for group in state["param_groups"] for number in group["params"]}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {names[id(param)]: (state["state"][number]["exp_avg"].tolist(), of_groups[number])
            for number, param in enumerate(params)}  # fmt: skip


def save(folder, owner, named, names="abc", groups=None, wrap=lambda optimizer: optimizer):
    def rank(world):
        model, optimizer = made(world, owner, named, names, groups)
        step(model, optimizer, world.rank if owner != "none" else 0)
        with checkpoint.Manager(folder, world) as manager:
            manager.save(1, {"net": model, "optimizer": wrap(optimizer)})
        return found(model, optimizer)

    return thread_comm.run(2, rank)[0]


def restore(folder, owner, named, names, groups=None, last="c", steps=0, only=None, **options):
    def rank(world):
        model, optimizer = made(world, owner, named, names, groups, last)
        for _ in range(steps):
            step(model, optimizer, 0)
        into = {"net": model, "optimizer": optimizer}
        with checkpoint.Manager(folder, world) as manager:
            manager.restore(into={only: into[only]} if only else into, **options)
        result = found(model, optimizer)
        step(model, optimizer, 0)  # goes on
        return result

    return thread_comm.run(1 if owner == "none" else 3, rank)[0]


@pytest.mark.parametrize(("owner", "named"), KINDS)
def test_states_follow_names(owner, named, tmp_path):
    saved = save(tmp_path, owner, named)
    assert len({str(each) for each in saved.values()}) == 4
    assert restore(tmp_path, owner, named, "cab", steps=1) == saved
    assert restore(tmp_path, owner, not named, "bca") == saved


@pytest.mark.parametrize(("owner", "named"), [("rank", False), ("shard", True)])
def test_groups_and_their_settings_follow_names(owner, named, tmp_path):
    saved = save(tmp_path, owner, named, groups=["ab", "c"])
    assert len({lr for _, lr in saved.values()}) == 2
    assert restore(tmp_path, owner, named, "cba", groups=["c", "ba"]) == saved
    with raises(ConfigError, operation="restore", where="group 0", expected=["a.weight", "a.bias"]):
        restore(tmp_path, owner, named, "abc", groups=["a", "bc"])
    with raises(ConfigError, operation="restore", where="group 0"):
        restore(tmp_path, owner, named, "abc")


def test_renamed_layers_and_other_ones(tmp_path):
    saved = save(tmp_path, "none", False)
    rename = {"net/c.weight": "net/d.weight"}
    came = restore(tmp_path, "none", False, "dba", last="d", rename=rename)
    assert came == {name.replace("c.", "d."): each for name, each in saved.items()}
    with raises(ConfigError, operation="restore", where="param_names", expected="d.weight", got="c.weight"):
        restore(tmp_path, "none", False, "dba", last="d", strict=False)


class Nameless:
    """Saves an optimizer as version 0.1.0 has done before names were saved."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        state = self.optimizer.state_dict()
        for group in state["param_groups"]:
            group.pop("param_names", None)
        return state

    def load_state_dict(self, state):
        raise AssertionError


@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_states_without_names_are_taken_in_the_same_order_and_in_no_other(owner, tmp_path):
    saved = save(tmp_path, owner, False, wrap=Nameless)
    assert restore(tmp_path, owner, False, "abc", steps=1) == saved
    assert restore(tmp_path, owner, True, "abc") == saved
    with raises(ConfigError, operation="restore", where="param_groups", got="module.b.weight"):
        restore(tmp_path, owner, False, "bac")


def test_names_that_only_the_checkpoint_has(tmp_path):
    """Then shapes must tell what belongs to what."""
    saved = save(tmp_path, "none", False)
    with raises(ConfigError, operation="restore", where="param_names", remedy="model.named_parameters()"):
        restore(tmp_path, "none", False, "abc", only="optimizer", strict=False)
    assert restore(tmp_path, "none", True, "bca", only="optimizer", strict=False) == saved


def test_two_modules_of_one_optimizer_and_parameters_of_none(tmp_path):
    def build(order):
        torch.manual_seed(0)
        nets = {name: nn.Linear(2, 2, bias=False) for name in "xy"}
        loose = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([*(nets[name].weight for name in order), loose], 0.1, momentum=0.9)
        return nets, loose, optimizer

    nets, loose, optimizer = build("xy")
    (nets["x"].weight.sum() + 2 * nets["y"].weight.sum() + 3 * loose.sum()).backward()
    optimizer.step()
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, {"nets": nets, "optimizer": optimizer})
        nets, loose, optimizer = build("yx")
        manager.restore(into={"nets": nets, "optimizer": optimizer})
    momenta = [float(optimizer.state[each]["momentum_buffer"].flatten()[0])
               for each in (nets["x"].weight, nets["y"].weight, loose)]  # fmt: skip
    assert momenta == [1, 2, 3] and "param_names" not in optimizer.param_groups[0]


@pytest.mark.parametrize("named", [False, True])
def test_state_dicts_that_are_restored_as_dicts_are_in_the_same_order(named, tmp_path):
    def state(names):
        model, optimizer = made(None, "none", named, names)
        step(model, optimizer, 0)
        return {"net": model.state_dict(), "optimizer": optimizer.state_dict()}

    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, state("abc"))
        manager.restore(into=state("abc"))
        with raises(ConfigError, operation="restore", where="optimizer"):
            manager.restore(into=state("bac"))


def test_lbfgs_whose_state_is_of_all_together(tmp_path):
    def build(names):
        net = Network(names)
        return {"net": net, "optimizer": torch.optim.LBFGS(net.parameters(), max_iter=2)}

    state = build("abc")
    state["optimizer"].step(lambda: (loss := state["net"](torch.ones(2, 3))).backward() or loss)
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, state)
        manager.restore(into=build("abc"))
        with raises(ConfigError, operation="restore", where="param_names", expected="LBFGS"):
            manager.restore(into=build("bac"))


def test_a_sharded_optimizer_matches_by_name_what_it_is_given():
    def rank(world):
        model, optimizer = made(world, "shard", False, "abc")
        step(model, optimizer, world.rank)
        other, into = made(world, "shard", False, "cab")
        state = optimizer.state_dict()
        into.load_state_dict(state)
        assert found(other, into) == found(model, optimizer)
        assert state["param_groups"][0]["param_names"] == ["a.weight", "a.bias", "b.weight", "c.weight"]
        state["param_groups"][0]["param_names"][0] = "e.weight"
        with raises(ConfigError, operation="load_state_dict", where="param_names", expected="a.weight"):
            into.load_state_dict(state)

    thread_comm.run(2, rank)


def test_a_state_is_given_to_optimizers_of_the_same_order_only():
    def rank(world):
        _, optimizer = made(world, "none", True, "abc" if world.rank else "bac")
        with raises(MismatchError, operation="broadcast_optimizer_state", where="item 1 of 1 on rank 0"):
            broadcast_optimizer_state(optimizer, 0, world)

    thread_comm.run(2, rank)
