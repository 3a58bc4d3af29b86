"""Changes of parameters that a program makes outside of `changing_parameters()`: refused, noticed, or followed."""

import copy

import numpy as np
import pytest
from changed_networks import network, steps
from raises import raises

from hpcdp import allreduce, broadcast, optim, reduce_scatter
from hpcdp.autograd import Tensor
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, HpcdpError
from hpcdp.train.trainer import Trainer


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_a_new_array_elsewhere_is_an_error_of_all_ranks_in_the_next_step(n, owner):
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, owner=owner)
        steps(net, trainer, world.rank, n, 0, 1)
        param, mine = net[1].bias, net[1].bias.data
        if world.rank == n - 1:
            param.data = mine * 2
        with raises(ConfigError, operation="step", where=f"1.bias, rank {n - 1}", expected="Trainer"):
            steps(net, trainer, world.rank, n, 1, 1)
        param.data = mine
        steps(net, trainer, world.rank, n, 1, 2)

    thread_comm.run(n, rank)


def test_what_a_later_trainer_leaves_alone_is_each_ranks_own():
    """As a body that is frozen for fine tuning."""

    def rank(world):
        net = network()
        Trainer(net.parameters(), optim.SGD(lr=0.1), world, owner="shard")
        for param in net[0].parameters():
            param.grad_req = "null"
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, owner="shard")
        before = net[0].weight.data.copy()
        with trainer.changing_parameters():
            net[0].weight *= 0.5
        np.testing.assert_array_equal(net[0].weight.data, before * np.float32(0.5))
        del trainer
        net[1].weight.data = net[1].weight.data.copy()
        net[1].weight *= 2

    thread_comm.run(3, rank)


def change_in_place(net):
    net[0].weight *= 0.5


def assign(net):
    net[0].weight[0] = 0


def change_a_row(net):
    net[0].weight[0] *= 0.5


def change_a_view(net):
    view = net[0].weight.T
    view += 1


def change_what_is_detached(net):
    detached = net[0].weight.detach().reshape(-1)
    detached[...] = 0


@pytest.mark.parametrize("change", [change_in_place, assign, change_a_row, change_a_view, change_what_is_detached])
def test_elsewhere_a_change_of_what_several_ranks_hold_is_refused(change):
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, owner="shard")
        before = net[0].weight.data.copy()
        with raises(HpcdpError, operation="in-place change", remedy="changing_parameters()", got=2):
            change(net)
        np.testing.assert_array_equal(net[0].weight.data, before)
        change(copy.deepcopy(net))  # which is this rank's own
        with trainer.changing_parameters():
            change(net)
        with raises(HpcdpError, operation="in-place change"):
            change(net)

    thread_comm.run(2, rank)


@pytest.mark.parametrize("how", [{"owner": "rank"}, {"kvstore": "dist_sync"}])
def test_what_each_rank_has_for_itself_may_be_changed(how):
    def rank(world):
        net = network()
        Trainer(net.parameters(), optim.SGD(lr=0.1), world, **how)
        change_in_place(net)

    thread_comm.run(2, rank)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits_that_are_set_elsewhere_are_trained_from_there(dtype):
    def rank(world):
        net = network(dtype)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.0), world, owner="rank")
        net.load_state_dict({name: np.full_like(each, 3) for name, each in net.state_dict().items()})
        steps(net, trainer, world.rank, 2, 0, 1)
        assert all((param.data.astype("f4") == 3).all() for param in net.parameters())

    thread_comm.run(2, rank)


REPLACED = {
    "zeros": lambda param: setattr(param, "grad", np.zeros_like(param.data)),
    "none": lambda param: setattr(param, "grad", None),
    "attached": lambda param: param.attach_grad(),
}


@pytest.mark.parametrize("how", [{"owner": "shard"}, {"owner": "rank"}, {"owner": "shard", "overlap": True}])
@pytest.mark.parametrize("replace", REPLACED)
@pytest.mark.parametrize("n", [1, 3])
def test_another_gradient_is_an_error_of_all_ranks_in_the_next_step(how, replace, n):
    """Backward would write there, and the parameter would not be trained."""

    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, **how)
        grad = net[1].bias.grad
        if world.rank == n - 1:
            REPLACED[replace](net[1].bias)
        with raises(ConfigError, operation="step", where=f"1.bias.grad, rank {n - 1}"):
            steps(net, trainer, world.rank, n, 0, 1)
        net[1].bias.grad = grad
        steps(net, trainer, world.rank, n, 0, 1)

    thread_comm.run(n, rank)


def test_a_new_array_of_one_rank_on_a_store_is_an_error_of_all():
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync", update_on_kvstore=False)
        if world.rank == 0:
            net[1].weight.data = np.ones((4, 8), "f4").T
        with raises(ConfigError, operation="step", where="1.weight, rank 0", expected="Trainer"):
            steps(net, trainer, world.rank, 3, 0, 1)

    thread_comm.run(3, rank)


def as_memory(array):
    return np.frombuffer(memoryview(array), "f4")


def as_strided(array):
    return np.lib.stride_tricks.as_strided(array, (2, 2), (4, 4))


@pytest.mark.parametrize("view", [as_memory, as_strided, np.transpose, np.ravel])
def test_by_whatever_name_it_is_what_ranks_hold_together(view):
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, owner="shard")
        before = net[0].weight.data.copy()
        part = view(net[0].weight.data)
        with raises(HpcdpError, operation="in-place change", remedy="changing_parameters()"):
            Tensor(part)[...] = 0
        for call in (allreduce, broadcast):
            with raises(HpcdpError, operation=call.__name__, where="x", got=2):
                call(part, world=world)
        whole = net[0].weight.data.reshape(-1)
        for call, values, out in ((allreduce, part + 1, part), (reduce_scatter, np.ones(2 * whole.size, "f4"), whole)):
            with raises(HpcdpError, operation=call.__name__, where="out"):
                call(values, world=world, out=out)
        with raises(HpcdpError, operation="load_state_dict", where="0.weight"):
            net.load_state_dict({name: each * 2 for name, each in net.state_dict().items()})
        np.testing.assert_array_equal(net[0].weight.data, before)
        np.testing.assert_allclose(allreduce(part.copy(), "mean", world), part, rtol=1e-6)
        net.load_state_dict(net.state_dict())
        del trainer

    thread_comm.run(2, rank)
