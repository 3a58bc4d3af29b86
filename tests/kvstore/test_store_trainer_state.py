"""The state of a trainer on a store, with the network's beside it."""

import numpy as np
import pytest
from pairs import pairs
from raises import raises
from whole_state import held, joined, restore

import hpcdp
from hpcdp import checkpoint, nn, optim
from hpcdp.autograd import record
from hpcdp.comm import thread_comm
from hpcdp.core import files
from hpcdp.errors import ConfigError, StaleGradientError
from hpcdp.kvstore.store_trainer import _with_keys

BATCH = 6
KINDS = [
    {"kvstore": "dist_sync"},
    {"kvstore": "dist_sync", "update_on_kvstore": False},
    {"kvstore": "dist_sync", "compression": "2bit:threshold=0.01"},
    {"kvstore": "dist_sync", "compression": "2bit:threshold=0.01", "update_on_kvstore": False},
]


def network():
    return nn.models.mlp(input_shape=5, num_classes=3, hidden=(4, 6), seed=1)


def rule():
    return optim.SGD(lr=optim.StepSchedule(0.1, 2), momentum=0.9)


def train(net, trainer, world, steps, alone=False):
    for step in range(trainer.step_count, trainer.step_count + steps):
        rng = np.random.default_rng([1, step])
        x, y = rng.standard_normal((BATCH, 5)).astype("f4"), rng.integers(0, 3, BATCH)
        mine = np.arange(BATCH) if alone else np.arange(world.rank, BATCH, world.size)
        with record():
            loss = nn.functional.softmax_cross_entropy(net(x[mine]), y[mine])
        loss.backward()
        trainer.step(len(mine))


def values_of(net):
    return np.concatenate([param.asnumpy().reshape(-1) for param in net.parameters()])


def run(n, per_node, options, steps, state=None, restored_first="net"):
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule(), world, **options)
        if state is not None:
            whole = {"net": net, "trainer": trainer}
            for name in (restored_first, *(set(whole) - {restored_first})):
                restore(whole[name], state[name], world)
            assert trainer.step_count == state["trainer"]["step_count"]
        train(net, trainer, world, steps)
        found = held({"trainer": trainer, "net": net}), values_of(net)
        world.comm.barrier()
        return found

    states, values = zip(*thread_comm.run(n, rank, per_node), strict=True)
    return joined(list(states)), values[0]


@pytest.mark.parametrize(
    ("layout", "options", "first"), pairs([(1, None), (2, None), (3, 1), (4, 2)], KINDS, ["net", "trainer"])
)
def test_the_same_ranks_go_on_with_the_same_bits(layout, options, first):
    n, per_node = layout
    state, _ = run(n, per_node, options, 2)
    after, values = run(n, per_node, options, 2, state, first)
    straight, wanted = run(n, per_node, options, 4)
    np.testing.assert_array_equal(values, wanted)
    assert repr(after) == repr(straight)


@pytest.mark.parametrize("options", KINDS)
def test_any_number_of_ranks_takes_it_over(options):
    state, values = run(3, 2, options, 3)
    again, same = run(2, 1, options, 0, state)
    np.testing.assert_array_equal(same, values)
    for each in (state, again):
        each["trainer"].get("store", {}).pop("residuals", None)
    if "compression" not in options or "update_on_kvstore" not in options:
        assert repr(again) == repr(state)


def test_ranks_that_do_not_step_together_meet_and_go_on_from_what_the_store_has():
    def rank(world, state, steps):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule(), world, kvstore="dist_async")
        if state is not None:
            restore(trainer, state["trainer"], world)
        if world.rank == world.size - 1:
            train(net, trainer, world, steps, alone=True)
        found = held({"trainer": trainer, "net": net})  # meets, so that all have the same values
        return found, values_of(net)

    states, values = zip(*thread_comm.run(3, lambda world: rank(world, None, 4)), strict=True)
    state = joined(list(states))
    assert state["trainer"]["step_count"] == 4
    for per_node in (None, 1):
        states, again = zip(*thread_comm.run(2, lambda world: rank(world, state, 0), per_node), strict=True)
        assert repr(joined(list(states))) == repr(state)
        np.testing.assert_array_equal(again, [values[0]] * 2)


def test_a_trainer_of_one_process():
    def make():
        net = network()
        return net, hpcdp.Trainer(net.parameters(), rule(), kvstore="local")

    def some(net, trainer, steps):
        thread_comm.run(1, lambda world: train(net, trainer, world, steps))

    net, trainer = make()
    some(net, trainer, 2)
    again, other = make()
    restore(other, joined([held(trainer)]), None)
    np.testing.assert_array_equal(values_of(again), values_of(net))
    some(net, trainer, 2)
    some(again, other, 2)
    np.testing.assert_array_equal(values_of(again), values_of(net))


def test_states_of_another_way_to_update_and_of_a_step_under_way_are_refused():
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule(), world, kvstore="dist_sync", update_on_kvstore=False)
        state = trainer.state_dict()
        other = hpcdp.Trainer(network().parameters(), rule(), world, kvstore="dist_sync")
        with raises(ConfigError, operation="load_state_dict", where="update_on_kvstore"):
            other.load_state_dict(state)
        with trainer.no_sync():
            train(net, trainer, world, 1)
        for call in (trainer.state_dict, lambda: trainer.load_state_dict(state)):
            with raises(StaleGradientError, got="no_sync()"):
                call()
        train(net, trainer, world, 1)
        trainer.load_state_dict(state)

    thread_comm.run(2, rank)


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_a_state_of_other_parameters_is_refused_and_changes_nothing(first, then):
    def make(world, count, lr):
        params = [nn.Parameter(np.full(3, 1 + i, "f4"), name=f"p{i}") for i in range(count)]
        trainer = hpcdp.Trainer(
            params, optim.SGD(lr, momentum=0.9), world, kvstore="dist_sync", update_on_kvstore=False
        )
        for param in params:
            param.grad[...] = 1 + world.rank
            param.grad_hook(param)
        trainer.step(1)
        return trainer

    def rank(world):
        state, other = make(world, first, 0.5).state_dict(), make(world, then, 0.25)
        with raises(ConfigError, operation="load_state_dict", where="p1"):
            other.load_state_dict(state)
        assert other.optimizer.lr == 0.25
        with raises(ConfigError, operation="load_state_dict", where="a Trainer", got="step_count"):
            other.load_state_dict({"states": state["states"], "optimizer": state["optimizer"]})

    thread_comm.run(2, rank)


class Registered(nn.Module):
    """Layers of one shape, registered in the order of ``names``, which forward does not go by."""

    def __init__(self, names):
        for name in names:
            setattr(self, name, nn.Dense(3, 3, weight_init=nn.init.Xavier(seed=1)))

    def forward(self, x):
        return self.b(self.a(x)).sum(axis=1)


class Numbered:
    """Saves a trainer as version 0.1.0 has done when its store's keys had no names."""

    def __init__(self, trainer):
        self.trainer = trainer

    def state_dict(self):
        numbers = {name: number for number, name in enumerate(self.trainer.names)}
        state = self.trainer.state_dict()
        return state | {"store": _with_keys(state["store"], numbers)}

    def load_state_dict(self, state):
        raise AssertionError


def registered(world, names, options):
    net = Registered(names)
    return net, hpcdp.Trainer(net.parameters(), optim.Adam(lr=0.01), world, **options)


def steps_of(net, trainer, world, count=1):
    """Parameters by name after some steps."""
    for _ in range(count):
        with record():
            loss = net(np.arange(12, dtype="f4").reshape(4, 3) / (1 + world.rank))
        loss.backward()
        trainer.step(4)
    trainer.synchronize()
    return {param.name: param.asnumpy().copy() for param in net.parameters()}


def by_name(path):
    return files.read("read", path, "hpcdp/trainer", {"step_count": int}, "save_states")[1]


NAMED = [{"kvstore": "dist_sync"}, {"kvstore": "dist_sync", "update_on_kvstore": False}, {"kvstore": "dist_async"}]


@pytest.mark.parametrize("options", NAMED, ids=str)
@pytest.mark.parametrize("as_file", [False, True])
def test_states_follow_the_names_of_parameters(options, as_file, tmp_path):
    """Into a network whose layers are registered in another order."""

    def rank(world):
        net, trainer = registered(world, "ab", options)
        steps_of(net, trainer, world, 3)
        other, into = registered(world, "ba", options)
        with checkpoint.Manager(tmp_path / "run", world) as manager:
            state = {"net": net} if as_file else {"net": net, "trainer": trainer}
            manager.save(1, state)
            manager.restore(into={"net": other} if as_file else {"net": other, "trainer": into})
        if as_file:
            trainer.save_states(tmp_path / "states")
            into.load_states(tmp_path / "states")
            into.save_states(tmp_path / "again")
            first, second = (by_name(tmp_path / name) for name in ("states", "again"))
            assert len(first) == 8 and first.keys() == second.keys()
            assert all(np.array_equal(first[name], second[name]) for name in first)
            return
        for _ in range(2):
            expected = steps_of(net, trainer, world)
            found = steps_of(other, into, world)
            if "async" not in options["kvstore"]:
                assert all(np.array_equal(found[name], expected[name]) for name in expected)
            else:
                assert all(np.allclose(found[name], expected[name], atol=0.02) for name in expected)

    thread_comm.run(2, rank)


def test_states_by_number_are_taken_in_the_same_order_and_in_no_other(tmp_path):
    def rank(world):
        net, trainer = registered(world, "ab", NAMED[0])
        steps_of(net, trainer, world, 3)
        other, into = registered(world, "ab", NAMED[0])
        with checkpoint.Manager(tmp_path, world) as manager:
            manager.save(1, {"net": net, "trainer": Numbered(trainer)})
            manager.restore(into={"net": other, "trainer": into})
            found, expected = steps_of(other, into, world), steps_of(net, trainer, world)
            assert all(np.array_equal(found[name], expected[name]) for name in expected)
            other, into = registered(world, "ba", NAMED[0])
            with raises(ConfigError, operation="restore", where="store", got="a.weight"):
                manager.restore(into={"net": other, "trainer": into})

    thread_comm.run(2, rank)
