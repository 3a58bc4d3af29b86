"""An optimizer's state, given from one rank to all."""

import threading

import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn

import hpcdp.torch
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, UnsupportedError

SEEDING = threading.Lock()  # all thread ranks draw from one generator


def trained(rank, make):
    with SEEDING:
        torch.manual_seed(rank)
        net = nn.Linear(3, 2)
        net.weight = nn.Parameter(torch.randn(3, 2).t())
        x = torch.randn(4, 3)
    optimizer = make(net.parameters())
    for _ in range(rank):  # rank 0 has no state
        net(x).pow(2).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adam(params, betas=(0.8, 0.9), amsgrad=True),
        lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.25)),
    ],
)
@pytest.mark.parametrize("root", [0, 2])
def test_every_rank_has_the_state_of_the_root(make, root):
    def rank(world):
        optimizer, expected = trained(world.rank, make), trained(root, make).state_dict()
        hpcdp.torch.broadcast_optimizer_state(optimizer, root, world)
        found = optimizer.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            for name, value in state.items():
                came, value = torch.as_tensor(found["state"][number][name]), torch.as_tensor(value)
                assert torch.equal(came, value) and came.stride() == value.stride(), name

    thread_comm.run(3, rank)


def test_what_cannot_be_given_is_refused():
    def rank(world):
        optimizer = trained(1, lambda params: torch.optim.SGD(params, lr=0.1))
        with raises(ConfigError, operation="broadcast_optimizer_state", where="root", expected=[0, 1], got=2):
            hpcdp.torch.broadcast_optimizer_state(optimizer, 2, world)
        model = hpcdp.torch.DistributedDataParallel(nn.Linear(3, 2), world, owner="shard")
        with raises(ConfigError, operation="broadcast_optimizer_state", got="ShardedOptimizer"):
            hpcdp.torch.broadcast_optimizer_state(hpcdp.torch.ShardedOptimizer(model), 0, world)
        optimizer.state[optimizer.param_groups[0]["params"][0]]["odd"] = {1, 2}
        with raises(
            UnsupportedError, operation="broadcast_optimizer_state", expected=["tensors", "numbers"], got="set"
        ):
            hpcdp.torch.broadcast_optimizer_state(optimizer, 0, world)

    thread_comm.run(2, rank)
