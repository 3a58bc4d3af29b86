"""What stores keep, as a state: whole over all workers, and taken over by any number of them and any kind."""

import numpy as np
import pytest
from pairs import pairs
from raises import raises
from whole_state import held, joined, restore

from hpcdp import kvstore, optim
from hpcdp.checkpoint import Manager
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError
from hpcdp.kvstore.serve import serve

SHAPES = {3: (33, 7), 11: (), 12: (5,), 40: (1, 3)}
DTYPES = {3: "f4", 11: "f8", 12: "f2", 40: "i4"}
WORLDS = [(1, None), (2, None), (4, 2), (3, 1), (3, 2)]


def make(kind, world, rule=None, compression=None, keys=SHAPES):
    store = kvstore.create(kind, world) if kind.startswith("dist") else kvstore.create(kind)
    for key in keys:
        if compression is None or DTYPES[key] != "i4":
            store.init(key, np.ones(SHAPES[key], DTYPES[key]))
    if rule is not None:
        store.set_optimizer(rule())
    if compression is not None:
        store.set_gradient_compression(compression)
    return store


def push(store, steps, first):
    """So that no order of pushes gives other bits."""
    for step in range(first, first + steps):
        for key in store.keys:
            if DTYPES[key] != "i4":
                gradient = np.random.default_rng([step, key]).integers(-8, 8, SHAPES[key]) / 16
                if store.kind != "dist_async" or store.rank == store.num_workers - 1:
                    store.push(key, gradient.astype(DTYPES[key]))
        store.barrier()


def values(store):
    return {key: np.array(store.pull(key).wait()) for key in store.keys}


def same(state, other):
    assert list(state) == list(other)
    for key in state:
        if isinstance(state[key], dict):
            same(state[key], other[key])
        else:
            np.testing.assert_array_equal(state[key], other[key])


def schedule():
    return optim.SGD(lr=optim.StepSchedule(0.5, 2), momentum=0.5)


def run(kind, n, per_node, rule, steps, first=0, state=None, servers=0, compression=None):
    def worker(world):
        store = make(kind, world, rule, compression)
        if state is not None:
            restore(store, state, world)
        again = held(store.state_dict())
        push(store, steps, first)
        found = held(store.state_dict()), again, values(store)
        store.barrier()
        return found

    of_ranks = thread_comm.run(n, worker, per_node, servers, serve)
    after, before, pulled = zip(*of_ranks, strict=True)
    for each in pulled[1:]:
        same(each, pulled[0])
    whole = joined(list(after))
    same(whole["values"], pulled[0])
    return whole, joined(list(before))


@pytest.mark.parametrize(
    ("layout", "kind", "rule", "split"),
    pairs(WORLDS, ["dist_sync", "dist_async"], [schedule, lambda: optim.Adam(lr=0.25)], [False, True]),
    indirect=["split"],
)
def test_the_same_workers_go_on_with_the_same_bits(layout, kind, rule, split):
    n, per_node = layout
    state, _ = run(kind, n, per_node, rule, 3)
    assert state["updates"] == {3: 3, 11: 3, 12: 3} and state["states"][12]
    after, again = run(kind, n, per_node, rule, 2, 3, state)
    same(again, state)
    same(after, run(kind, n, per_node, rule, 5)[0])


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("n", "per_node"), [(2, None), (3, 1), (2, 2)])
def test_servers_of_their_own(n, per_node, servers, split):
    state, _ = run("dist_async", n, per_node, schedule, 3, servers=servers)
    after, again = run("dist_async", n, per_node, schedule, 2, 3, state, servers)
    same(again, state)
    same(after, run("dist_async", 2, None, schedule, 5)[0])
    same(run("dist_sync", 3, 2, schedule, 0, state=state)[1], state)


@pytest.mark.parametrize(
    ("kind", "then"), [("dist_sync", "dist_async"), ("dist_async", "local"), ("local", "dist_sync")]
)
@pytest.mark.parametrize(("n", "per_node"), WORLDS)
def test_any_kind_and_number_of_workers_takes_it_over(kind, then, n, per_node, split):
    state, _ = run(kind, 1 if kind == "local" else n, per_node, schedule, 3)
    same(run(then, 1 if then == "local" else n, per_node, schedule, 0, state=state)[1], state)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_without_an_updater_values_are_all(kind):
    state, _ = run(kind, 1, None, None, 2)
    assert list(state) == ["values", "optimizer"] and state["optimizer"] is None
    same(run("dist_sync", 2, None, None, 0, state=state)[1], state)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("kind", "n", "per_node"),
    [("local", 1, None), *((kind, *world) for kind in ("dist_sync", "dist_async") for world in [(2, None), (3, 1)])],
)
def test_what_was_not_sent_yet_goes_on(kind, n, per_node, split):
    state, _ = run(kind, n, per_node, schedule, 3, compression="2bit:threshold=0.5")
    assert state["residuals"][3].shape == (n, 33, 7) and state["residuals"][3].any()
    after, again = run(kind, n, per_node, schedule, 2, 3, state, compression="2bit:threshold=0.5")
    same(again, state)
    same(after, run(kind, n, per_node, schedule, 5, compression="2bit:threshold=0.5")[0])


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_settings_come_back_too(kind):
    """Also one that was assigned, and of which servers have a copy."""

    def worker(world):
        rule = optim.SGD(lr=0.5)
        store = make(kind, world, lambda: rule)
        rule.lr = 0.125
        state = held(store.state_dict())
        other = optim.SGD(lr=optim.ConstantSchedule(3.0), weight_decay=0.1)
        second = make(kind, world, lambda: other)
        second.load_state_dict(state)
        assert other == rule
        push(second, 1, 0)
        push(store, 1, 0)
        same(values(second), values(store))

    thread_comm.run(1 if kind == "local" else 2, worker, 1)
    if kind == "dist_async":
        thread_comm.run(2, worker, None, 1, serve)


def test_files_of_optimizer_states_have_only_what_was_updated(tmp_path):
    def worker(world):
        store = make("dist_sync", world, schedule)
        store.state_dict()
        store.push(3, np.ones(SHAPES[3], "f4"))
        store.save_optimizer_states(str(tmp_path / "states"))
        store.load_optimizer_states(str(tmp_path / "states"))
        return held(store.state_dict())["updates"]

    assert thread_comm.run(2, worker) == [{3: 1, 11: 0, 12: 0}] * 2


def test_states_of_other_stores_are_refused():
    def worker(world, other, fields):
        state = held(make("dist_sync", world, schedule).state_dict())
        with raises(ConfigError, operation="load_state_dict", **fields):
            other(world).load_state_dict(state)

    for other, fields in (
        (lambda world: make("dist_sync", world, schedule, keys=[3, 11, 12]), {"where": "key 40"}),
        (lambda world: make("dist_sync", world), {"where": "optimizer"}),
        (lambda world: make("dist_sync", world, optim.Adam), {"where": "optimizer", "expected": "adam", "got": "sgd"}),
    ):
        thread_comm.run(2, lambda world, o=other, f=fields: worker(world, o, f))


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize(
    ("spoil", "fields"),
    [
        (lambda state: None, {"expected": "state_dict()", "got": None}),
        (lambda state: state | {"values": {3: state["values"][3]}}, {"where": "key 11"}),
        (
            lambda state: state | {"optimizer": None},
            {"where": "optimizer", "expected": "optimizer"},
        ),
        (
            lambda state: state | {"optimizer": state["optimizer"].replace("sgd", "adam")},
            {"where": "optimizer", "expected": "sgd", "got": "weight_decay"},
        ),
        (
            lambda state: state | {"values": {3: np.ones(2), 11: np.ones(())}},
            {"where": "key 3", "expected": (33, 7), "got": (2,)},
        ),
    ],
)
def test_a_state_that_is_wrong_on_one_worker_is_an_error_on_all(kind, spoil, fields):
    def worker(world):
        store = make(kind, world, schedule, keys=[3, 11])
        state = held(store.state_dict())
        with raises(ConfigError, operation="load_state_dict", **fields):
            store.load_state_dict(spoil(state) if world.rank == 1 else state)
        store.load_state_dict(state)
        assert all((value == 1).all() for value in values(store).values())

    thread_comm.run(3, worker, 2)


def test_workers_whose_rates_differ_take_over_a_state_together():
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(4))
        rule = optim.SGD(lr=0.5)
        store.set_optimizer(rule)
        state = store.state_dict()
        if world.rank == 1:
            rule.lr = 0.25
        store.load_state_dict(state)
        return rule.lr

    assert thread_comm.run(2, one) == [0.5, 0.5]


@pytest.mark.parametrize(("kind", "per_node"), [("local", None), ("dist_sync", None), ("dist_async", 1)])
def test_pulls_under_way_get_what_was_there_before(kind, per_node, split):
    keys, count = list(range(16)), 1 << 18

    def one(world):
        store = kvstore.create(kind) if kind == "local" else kvstore.create(kind, world)
        store.init(keys, [np.zeros(count, "f4")] * len(keys))
        pulls = [store.pull(key) for key in keys]
        store.load_state_dict({"values": {key: np.ones(count, "f4") for key in keys}, "optimizer": None})
        assert not any(pull.wait().any() for pull in pulls)
        return [store.pull(key).wait().all() for key in keys]

    assert np.all(one(None) if kind == "local" else thread_comm.run(2, one, per_node))


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_what_was_not_sent_is_forgotten_with_a_state_that_has_sent_all(kind):
    def one(world):
        store = make(kind, world, lambda: optim.SGD(lr=1.0), keys=[3])
        store.push(3, np.ones(SHAPES[3], "f4"))
        state = store.state_dict() | {"values": {3: np.zeros(SHAPES[3], "f4")}}
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        store.push(3, np.full(SHAPES[3], 0.4, "f4"))
        store.load_state_dict(state)
        store.push(3, np.full(SHAPES[3], 0.4, "f4"))
        return store.pull(3).wait().any()

    assert not np.any(one(None) if kind == "local" else thread_comm.run(2, one))


def test_a_checkpoint_of_keys_without_elements_that_are_compressed(tmp_path):
    def worker(world, begins):
        store = kvstore.create("dist_sync", world)
        store.set_gradient_compression("2bit")
        store.init(["none", "some"], [np.zeros((0, 3)), np.full(2, begins)])
        with Manager(tmp_path, world=world) as manager:
            manager.save(1, {"store": store}) if begins else manager.restore(into={"store": store})
        return store.pull("some").wait()[1]

    assert thread_comm.run(3, lambda world: worker(world, 7.0)) == [7.0] * 3
    assert thread_comm.run(2, lambda world: worker(world, 0.0)) == [7.0] * 2
