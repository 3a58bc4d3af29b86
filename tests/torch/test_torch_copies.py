"""Objects of every public class for PyTorch are deep-copied and pickled, or say by name why not."""

import copy
import inspect
import pickle

import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn

import hpcdp.torch
from hpcdp.comm import thread_comm
from hpcdp.errors import UnsupportedError

COPIES = [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
MADE = {
    hpcdp.torch.DistributedSampler: lambda: hpcdp.torch.DistributedSampler(range(5)),
    hpcdp.torch.GradScaler: hpcdp.torch.GradScaler,
    hpcdp.torch.SyncBatchNorm: lambda: hpcdp.torch.SyncBatchNorm(3),
}
REFUSED = {
    hpcdp.torch.ShardedOptimizer: lambda: hpcdp.torch.ShardedOptimizer(
        hpcdp.torch.DistributedDataParallel(nn.Linear(3, 2), owner="shard")
    ),
}


def test_every_public_class_is_copied_or_says_by_name_why_not():
    public = [getattr(hpcdp.torch, name) for name in hpcdp.torch.__all__]
    copied_without = {hpcdp.torch.DistributedDataParallel}  # tested below
    assert {each for each in public if inspect.isclass(each)} == MADE.keys() | REFUSED.keys() | copied_without
    for copied in COPIES:
        for kind, make in MADE.items():
            assert type(copied(make())) is kind
        for kind, make in REFUSED.items():
            one = make()
            with raises(UnsupportedError, operation=kind.__name__, expected="copied"):
                copied(one)


@pytest.mark.parametrize("copied", [*COPIES, lambda x: torch.optim.swa_utils.AveragedModel(x).module])
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_a_copy_of_a_wrapper_is_one_of_its_module(owner, copied):
    model = hpcdp.torch.DistributedDataParallel(nn.Linear(3, 2), owner=owner)
    found = copied(model)
    assert type(found) is nn.Linear and found is not model.module
    assert torch.equal(found.weight, model.module.weight)
    assert found.weight.data_ptr() != model.module.weight.data_ptr()
    found(torch.ones(1, 3)).sum().backward()
    assert model.module.weight.grad is None


@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_a_copy_of_a_wrapped_module_is_of_the_same_ranks_and_trained_by_none(owner):
    def rank(world):
        net = nn.Sequential(hpcdp.torch.SyncBatchNorm(2, world=world), nn.Conv2d(2, 3, 1)).to(
            memory_format=torch.channels_last
        )
        model = hpcdp.torch.DistributedDataParallel(net, world, owner=owner)
        x = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(world.rank))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        if owner == "shard":
            optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        best = copy.deepcopy(net)
        before = [each.detach().clone() for each in best.parameters()]
        world.barrier()
        model(x).exp().sum().backward()  # of which no parameter's gradient is zero but for rounding
        optimizer.step()
        world.barrier()
        for param, own, same in zip(best.parameters(), net.parameters(), before, strict=True):
            assert torch.equal(param, same) and not torch.equal(own, same) and param.stride() == own.stride()
            assert param.grad is None
        best.load_state_dict(net.state_dict())
        assert torch.equal(net(x), best(x))
        world.barrier()

    thread_comm.run(3, rank)
