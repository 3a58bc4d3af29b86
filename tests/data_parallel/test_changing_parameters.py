"""A program that changes parameters by itself does so once, on however many ranks, and training goes on from there."""

import time

import numpy as np
import pytest
from changed_networks import halve, network, steps
from raises import raises

from hpcdp import nn, optim
from hpcdp.autograd import record
from hpcdp.comm import init, thread_comm
from hpcdp.errors import ConfigError, HpcdpError
from hpcdp.train.trainer import Trainer

HOW = [
    {"owner": "shard"},
    {"owner": "shard", "overlap": True},
    {"owner": "rank"},
    {"kvstore": "dist_sync"},
    {"kvstore": "dist_sync", "update_on_kvstore": False},
]
WORLDS = [(1, None), (2, None), (3, None), (4, 2), (3, 2), (2, 1)]


def run(n, per_node, how, dtype, change):
    def rank(world):
        net = network(dtype)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world, **how)
        steps(net, trainer, world.rank, n, 0, 3)
        change(net, trainer)
        steps(net, trainer, world.rank, n, 3, 3)
        return [param.data.astype("f4") for param in net.parameters()]

    return thread_comm.run(n, rank, per_node)


def within(change):
    def changed(net, trainer):
        with trainer.changing_parameters():
            change(net)

    return changed


@pytest.mark.each_value
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("n", "per_node"), WORLDS)
def test_all_ranks_change_them_once(n, per_node, how):
    def change(net, trainer):
        before = [param.data.copy() for param in net.parameters()]
        within(halve)(net, trainer)
        for param, values in zip(net.parameters(), before, strict=True):
            np.testing.assert_array_equal(param.data, values * np.float32(0.5))

    (expected,) = run(1, None, {"owner": "rank"}, "float32", within(halve))
    for params in run(n, per_node, how, "float32", change):
        for found, value in zip(params, expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("owner", ["rank", "shard"])
@pytest.mark.parametrize(("n", "per_node"), [(1, None), (3, None), (4, 2)])
def test_copies_in_float32_follow(n, per_node, owner):
    """An update that rounding would lose shows whether they have: all weights are set to 1."""

    def ones(net):
        for param in net.parameters():
            param[...] = 1.0

    def rank(world):
        net = network("float16")
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, owner=owner)
        steps(net, trainer, world.rank, n, 0, 2)
        within(ones)(net, trainer)
        masters = [state["master"] for state in trainer.owner.states]
        assert masters and all((master[master != 0] == 1).all() and master.any() for master in masters)

    thread_comm.run(n, rank, per_node)


@pytest.mark.parametrize("state", ["loaded", "new array"])
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_whole_states_and_new_arrays_are_taken_too(state, owner):
    best = {name: values * 3 for name, values in network().state_dict().items()}

    def load(net):
        if state == "loaded":
            net.load_state_dict(best)
            return
        for name, param in net.named_parameters():
            param.data = best[name].copy()

    results = run(3, 2, {"owner": owner}, "float32", within(load))
    (expected,) = run(1, None, {"owner": "rank"}, "float32", within(load))
    for params in results:
        for found, value in zip(params, expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-6)


def test_others_see_nothing_before_all_have_left():
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, owner="shard")
        before, after = net[0].weight.data.copy(), net[0].weight.data * 2
        with trainer.changing_parameters():
            if world.rank == 0:
                net[0].weight *= 2
            world.barrier()
            if world.rank:
                np.testing.assert_array_equal(net[0].weight.data, before)
                net[0].weight *= 2
        np.testing.assert_array_equal(net[0].weight.data, after)

    thread_comm.run(3, rank)


@pytest.mark.parametrize("fails_on", [0, 1])
def test_an_error_within_leaves_the_parameters_in_place(fails_on):
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, owner="shard")
        try:
            with trainer.changing_parameters():
                halve(net)
                if world.rank == fails_on:
                    raise ValueError("mine")
        except ValueError:
            assert world.rank == fails_on
        return net[0].weight.data.copy()

    first, second = thread_comm.run(2, rank)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, network()[0].weight.data * np.float32(0.5))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("fails", ["one", "all"])
def test_with_an_error_all_ranks_and_nodes_have_what_rank_0_has_made(how, dtype, fails):
    if "kvstore" in how and dtype == "float16":
        return

    def rank(world):
        net = network(dtype)
        trainer = Trainer(net.parameters(), optim.SGD(lr=1e-4), world, **how)
        try:
            with trainer.changing_parameters():
                halve(net)
                if world.rank in ((2,) if fails == "one" else range(3)):
                    raise ValueError("mine")
                net[0].bias[...] = 7
        except ValueError:
            pass
        steps(net, trainer, world.rank, 3, 0, 1)
        return [param.data.astype("f4") for param in net.parameters()]

    first, *others = thread_comm.run(3, rank, 1)
    for params in others:
        for found, value in zip(params, first, strict=True):
            np.testing.assert_array_equal(found, value)
    np.testing.assert_allclose(first[0], network(dtype)[0].weight.data.astype("f4") * 0.5, atol=1e-2)
    assert (abs(first[1] - 7) < 0.1).all() == (fails == "one")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("values", [np.ones((3, 3), "f4"), np.ones((1, 8), "f4"), np.ones((6, 8), "f8")])
@pytest.mark.parametrize("ranks", [(1,), (0, 1, 2)])
def test_another_shape_or_dtype_is_refused_on_all_ranks(how, values, ranks):
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, **how)
        with (
            raises(ConfigError, operation="changing_parameters", where="0.weight", expected=[(6, 8), "float32"]),
            trainer.changing_parameters(),
        ):
            if world.rank in ranks:
                net[0].weight.data = values
        steps(net, trainer, world.rank, 3, 0, 2)

    thread_comm.run(3, rank, 2)


@pytest.mark.parametrize("how", HOW)
def test_arrays_that_give_the_values_stay_as_they_are(how):
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, **how)
        mine = np.full((6, 8), float(world.rank), "f4")
        mine.flags.writeable = False
        with trainer.changing_parameters():
            net[0].weight.data = mine
        assert (mine == world.rank).all() and not net[0].weight.data.any()

    thread_comm.run(3, rank, 2)


@pytest.mark.parametrize("how", HOW)
def test_within_itself_it_does_nothing(how):
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, **how)
        before = net[0].weight.data.copy()
        with trainer.changing_parameters():
            with trainer.changing_parameters():
                net[0].weight *= 3
            net[0].weight *= 5
        np.testing.assert_array_equal(net[0].weight.data, before * 3 * 5)

    thread_comm.run(3, rank, 2)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("call", ["step", "allreduce_grads", "update"])
def test_steps_within_are_refused(how, call):
    def rank(world):
        trainer = Trainer(network().parameters(), optim.SGD(lr=0.1), world, **how)
        with raises(ConfigError, operation=call, expected="changing_parameters()"), trainer.changing_parameters():
            getattr(trainer, call)(*[1] * (call != "allreduce_grads"))

    thread_comm.run(2, rank)


def test_pushes_of_others_are_not_lost_by_a_change_of_asynchronous_ranks():
    def rank(world):
        net = nn.Dense(6, 4)
        net.weight.data[...] = 0
        trainer = Trainer(net.parameters(), optim.SGD(lr=1.0), world, kvstore="dist_async")
        for _ in range(6):
            with record():
                loss = net(np.ones((1, 6), "f4")).sum(axis=1)
            loss.backward()
            trainer.step(1)
            time.sleep(0.002 * world.rank)
        with trainer.changing_parameters():
            net.weight *= 1.0
        np.testing.assert_allclose(net.weight.data, -6.0, rtol=1e-5)

    thread_comm.run(3, rank)


def exchange(net):
    first, second = net[0].bias, net[2].bias
    first.data, second.data = second.data, first.data


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("n", [1, 3])
def test_arrays_may_be_exchanged_and_put_aside(how, n):
    def rank(world):
        net = nn.Sequential(nn.Dense(3, 4), nn.ReLU(), nn.Dense(2, 4))
        for number, param in enumerate(net.parameters()):
            param.data[...] = number + 1
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, **how)
        with trainer.changing_parameters():
            exchange(net)
        assert [param.data.flat[0] for param in net.parameters()] == [1, 4, 3, 2]
        with trainer.changing_parameters():
            aside = [param.data for param in net.parameters()]
            for param in net.parameters():
                param.data = np.zeros_like(param.data)
        assert not any(param.data.any() for param in net.parameters())
        with trainer.changing_parameters():
            for param, values in zip(net.parameters(), aside, strict=True):
                param.data = values
        assert [param.data.flat[0] for param in net.parameters()] == [1, 4, 3, 2]

    thread_comm.run(n, rank)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_is_older_than_the_block_is_not_changed_within_it(how, n):
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, **how)
        before = net[0].weight.data.copy()
        row, array = net[0].weight[0], net[0].weight.data
        world.barrier()
        with (
            trainer.changing_parameters(),
            raises(HpcdpError, operation="in-place change", remedy="changing_parameters()"),
        ):
            row *= 0.5
        for change in (lambda: array.__imul__(0.5), lambda: array.sort(axis=0)):
            with (
                raises(ConfigError, operation="changing_parameters", expected="param.data"),
                trainer.changing_parameters(),
            ):
                change()
            np.testing.assert_array_equal(net[0].weight.data, before)
        for older in (array, array[::-1]):
            with (
                raises(ConfigError, operation="changing_parameters", where="0.weight", remedy="param.data.copy()"),
                trainer.changing_parameters(),
            ):
                net[0].weight.data = older
            np.testing.assert_array_equal(net[0].weight.data, before)
        steps(net, trainer, world.rank, n, 0, 1)

    thread_comm.run(n, rank)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_small_updates_of_16_bits_are_not_lost_by_blocks_that_change_nothing(owner, dtype, n):
    """As clipping after each step, of weights that are within the bounds."""

    def rank(world):
        net = nn.Dense(1, 1)
        net.weight.data = np.ones((1, 1), "f4")
        trainer = Trainer(net.to(dtype).parameters(), optim.SGD(lr=1e-4), world, owner=owner)
        for _ in range(200):
            with record():
                loss = net(np.ones((1, 1), "f4")).astype("float32").sum(axis=1)
            loss.backward()
            trainer.step(1)
            with trainer.changing_parameters():
                net.weight[...] = np.clip(net.weight.data, -2, 2)
        np.testing.assert_allclose(net.weight.data.astype("f4"), 0.98, atol=2.0**-9)

    thread_comm.run(n, rank)


def test_gradients_are_the_trainers_again_behind_a_block():
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world)
        before = net[0].weight.data.copy()
        with trainer.changing_parameters():
            net.to("float64").to("float32")
        steps(net, trainer, world.rank, 2, 0, 1)
        assert (net[0].weight.data != before).any()

    thread_comm.run(2, rank)


@pytest.mark.parametrize("how", HOW)
def test_an_earlier_trainer_has_no_say(how):
    def rank(world):
        net = network()
        earlier = Trainer(net.parameters(), optim.SGD(lr=0.1), world, **how)
        Trainer(net.parameters(), optim.SGD(lr=0.1), world, owner="rank")
        before = net[0].weight.data.copy()
        with (
            raises(ConfigError, operation="changing_parameters", where="0.weight, rank 0"),
            earlier.changing_parameters(),
        ):
            net[0].weight *= 0.5
        np.testing.assert_array_equal(net[0].weight.data, before)

    thread_comm.run(3, rank)


@pytest.mark.parametrize("values", [[1.0], 2.0, None])
def test_what_is_no_array_is_refused_on_all_ranks(values):
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world)
        with (
            raises(ConfigError, operation="changing_parameters", where="1.bias", expected=[(4,), "float32"]),
            trainer.changing_parameters(),
        ):
            if world.rank == 1:
                net[1].bias.data = values
        steps(net, trainer, world.rank, 2, 0, 1)

    thread_comm.run(2, rank)


@pytest.mark.parametrize("how", HOW)
def test_no_trainer_is_made_within(how):
    def rank(world):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, owner="shard")
        with raises(ConfigError, operation="Trainer", expected="changing_parameters()"), trainer.changing_parameters():
            Trainer(net.parameters(), optim.SGD(lr=0.1), world, **how)
        steps(net, trainer, world.rank, 2, 0, 1)
        Trainer(net.parameters(), optim.SGD(lr=0.1), world, **how)

    thread_comm.run(2, rank)


def test_a_store_is_asked_nothing_within():
    trainer = Trainer(network().parameters(), optim.SGD(lr=0.1), kvstore="local")
    state = trainer.state_dict()
    for name, args in (("synchronize", ()), ("load_state_dict", (state,))):
        with raises(ConfigError, operation=name, expected="changing_parameters()"), trainer.changing_parameters():
            getattr(trainer, name)(*args)


@pytest.mark.mpi
def test_on_real_ranks():
    world = init()
    net = network()
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world)
    before = net[0].weight.data.copy()
    for _ in range(10):
        with trainer.changing_parameters():
            halve(net)
        world.barrier()
    np.testing.assert_array_equal(net[0].weight.data, before * np.float32(0.5**10))
