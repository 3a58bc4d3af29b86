"""What stores refuse, by name: keys, values, arguments, and ranks that differ."""

import numpy as np
import pytest
import standin
from raises import raises
from small_stores import SHAPE, added, full, on_one_worker

from hpcdp import kvstore, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.core.arrays import dtype_of
from hpcdp.errors import ConfigError, MismatchError, UnsupportedError


def halved(key, received, stored):
    stored += np.asarray(0.5, stored.dtype) * received


REFUSED = [
    (
        lambda store: kvstore.create("dist-sync"),
        {"operation": "kvstore.create", "where": "name", "expected": ["dist_sync", "dist_device_sync"]},
    ),
    (lambda store: store.init("w", full(1)), {"operation": "init", "where": "key 'w'", "got": "init()"}),
    (
        lambda store: store.init(3, full(1)),
        {"operation": "init", "where": "key 3", "expected": ["int", "str"], "got": "both"},
    ),
    (
        lambda store: store.init(True, full(1)),
        {"operation": "init", "where": "key", "expected": ["int", "str", "list"], "got": True},
    ),
    (lambda store: store.init("x", [full(1), full(2)]), {"operation": "init", "where": "key 'x'"}),
    (lambda store: store.init("x", 1.0), {"operation": "init", "where": "key 'x'", "got": "float"}),
    (
        lambda store: store.push("x", full(1)),
        {"operation": "push", "where": "key 'x'", "expected": ["init()", "w"]},
    ),
    (
        lambda store: store.push(["w", "w"], [full(1)]),
        {"operation": "push", "where": "value", "expected": ["list", 2], "got": ["list", 1]},
    ),
    (
        lambda store: store.push(["w"], full(1)),
        {"operation": "push", "where": "value", "expected": ["list", 1], "got": "ndarray"},
    ),
    (lambda store: store.push("w", full(1), priority=0.5), {"operation": "push", "where": "priority", "got": 0.5}),
    (lambda store: store.set_updater(3), {"operation": "set_updater", "got": 3}),
    (lambda store: store.set_optimizer("sgd"), {"operation": "set_optimizer", "got": "sgd"}),
    (lambda store: store.load_state_dict({}), {"operation": "load_state_dict", "expected": ["state_dict()", "store"]}),
    (
        lambda store: store.load_state_dict(None),
        {"operation": "load_state_dict", "expected": "state_dict()", "got": None},
    ),
    (lambda store: store.num_dead_node(-1), {"operation": "num_dead_node", "where": "timeout_s"}),
    (
        lambda store: store.init("c", np.zeros(2, "c8")),
        {"operation": "init", "where": "key 'c'", "expected": "uint8", "got": "c8"},
    ),
    (
        lambda store: store.init("b", np.zeros(2, dtype_of("bfloat16"))),
        {"operation": "init", "where": "key 'b'", "expected": "float64", "got": "bfloat16"},
    ),
    (lambda store: store.init("o", np.array([None])), {"operation": "init", "where": "key 'o'"}),
    (
        lambda store: store.save_optimizer_states("x"),
        {"operation": "save_optimizer_states", "remedy": "set_optimizer()"},
    ),
]


def test_what_is_refused(kind):
    def refused(store):
        store.init("w", full(1))
        for call, fields in REFUSED:
            with raises((ConfigError, UnsupportedError), **fields):
                call(store)

    on_one_worker(kind, refused)


@pytest.mark.parametrize("name", ["local", "dist_sync"])
def test_what_is_no_world_is_refused(name):
    with raises(ConfigError, operation="kvstore.create", where="world", expected="hpcdp.init()", got="w"):
        kvstore.create(name, "w")


@pytest.mark.parametrize("wrong", [full(1, (3, 2)), full(1, dtype="f8"), full(1, dtype="i4"), 1.0])
def test_arrays_that_do_not_fit_are_refused_before_anything_is_pushed(kind, wrong):
    def refused(store):
        store.init(["w", "v"], [full(1), full(1)])
        with raises(UnsupportedError, operation="push", where="key 'v'", expected=[(2, 3), "float32"]):
            store.push(["w", "v"], [full(5), [full(1), wrong]])
        assert (store.pull("w")[...] == 1).all()
        if hasattr(wrong, "dtype") and wrong.dtype != "f8":  # to which a pull casts
            with raises(UnsupportedError, operation="pull", where="key 'w'", expected=[(2, 3), "float32"]):
                store.pull("w", out=wrong)

    on_one_worker(kind, refused)


def test_what_is_no_array_is_refused_by_name(kind):
    param = nn.models.mlp(input_shape=3, num_classes=2, hidden=()).parameters()[0]
    masked = np.ma.masked_array(np.zeros(SHAPE, "f4"), np.zeros(SHAPE, bool))

    def one(store):
        store.init("w", full(1))
        store.init("p", param.data)
        store.init("n", np.zeros(()))
        store.set_optimizer(optim.SGD(lr=0.1))
        for name, wrong in (("Parameter", param), ("MaskedArray", masked), ("float", 3.0)):
            with raises(ConfigError, operation="init", where="key 'x'", got=name):
                store.init("x", wrong)
        for key, name, wrong in (
            ("p", "Parameter", param),
            ("w", "MaskedArray", masked),
        ):
            with raises(UnsupportedError, operation="push", where=f"key {key!r}", got=name):
                store.push(key, wrong)
        store.push("n", np.float64(-10))  # what NumPy makes of arrays without dimensions
        assert store.pull("n").wait() == 1
        with raises(UnsupportedError, operation="pull", where="key 'n'", expected=["()", "float64"], got="float64"):
            store.pull("n", out=np.float64(3))
        with raises(UnsupportedError, operation="pull", where="key 'n'", expected=["()", "float64"], got="float64"):
            store.pushpull("n", np.float64(3))  # which the sum cannot overwrite
        assert store.pull("n").wait() == 1
        for call in (store.pull, lambda key, out: store.pushpull(key, full(1), out)):
            with raises(UnsupportedError, operation="pull", where="key 'w'", expected="writable"):
                call("w", out=np.broadcast_to(np.float32(1), SHAPE))
        assert np.array_equal(store.pull("w").wait(), full(1))
        with raises(ConfigError, operation="push", where="key 'w'", got="list"):
            store.push("w", [])

    on_one_worker(kind, one)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_key_that_one_rank_cannot_make_is_an_error_on_all(kind):
    def one(world):
        store = kvstore.create(kind, world)
        with raises(ConfigError, operation="init", where="key 'a'", got="float", rank=1):
            store.init("a", 3.0 if world.rank == 1 else np.array(3.0))
        store.init("n", np.float64(3) if world.rank == 1 else np.array(3.0))
        on_a_device = standin.asarray(np.ones(3, "f4"))  # which the first rank's value overwrites, as all others
        store.init("d", on_a_device if world.rank == 1 else np.zeros(3, "f4"))
        assert not np.asarray(store.pull("d")).any()
        store.init("a", np.zeros(3, "f4"))
        with raises(
            MismatchError,
            operation="assign",
            where="item 1 of 1 on rank 0",
            expected=["a", "rank 0"],
            got=["b", "rank 1"],
        ):
            store.init("b", np.zeros(3, "f4"))
            store.assign("ab"[world.rank], np.zeros(3, "f4"))

    thread_comm.run(2, one)


def test_ranks_that_differ_are_told():
    def keys(world):
        kvstore.create("dist_sync", world).init("w", full(1, (2, 3 + world.rank // 2)))

    def twice(world):
        store = kvstore.create("dist_sync", world)
        store.init("w", full(1))
        store.init("w" if world.rank else "v", full(1))

    def rules(world):
        kvstore.create("dist_sync", world).set_optimizer(optim.SGD(lr=0.1 * (1 + world.rank)))

    def functions(world):
        kvstore.create("dist_sync", world).set_updater(added if world.rank else halved)

    def kinds(world):
        kvstore.create("dist_sync" if world.rank else "dist_async", world)

    for fn, kind_of, fields in (
        (
            keys,
            MismatchError,
            {
                "operation": "init",
                "where": "item 1 of 1 on rank 0",
                "expected": ["w", (2, 3), "float32", "rank 0"],
                "got": ["w", (2, 4), "float32", "rank 2"],
            },
        ),
        (twice, ConfigError, {"operation": "init", "where": "key 'w'", "got": "init()"}),
        (rules, MismatchError, {"operation": "set_optimizer", "where": "item 1 of 1 on rank 0"}),
        (
            functions,
            MismatchError,
            {"operation": "set_updater", "where": "item 1 of 1 on rank 0", "expected": "rank 0", "got": "ranks 1"},
        ),
        (
            kinds,
            MismatchError,
            {
                "operation": "kvstore.create",
                "where": "item 1 of 1 on rank 0",
                "expected": ["dist_async", "rank 0"],
                "got": ["dist_sync", "ranks 1", 2],
            },
        ),
    ):
        with raises(kind_of, **fields):
            thread_comm.run(3, fn)


@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
def test_what_is_no_optimizer_is_told_on_every_rank_whatever_others_pass(name):
    told = []

    def rank(world, given):
        try:
            kvstore.create(name, world).set_optimizer(given[world.rank])
        except ConfigError as error:
            told.append(str(error).partition(", got")[0])

    expected = "set_optimizer: expected an optimizer, e.g. hpcdp.optim.SGD(lr=0.1)"
    for given, who in (([object(), object()], ""), ([optim.SGD(lr=0.1), object()], "rank 1: ")):
        told.clear()
        thread_comm.run(2, lambda world, given=given: rank(world, given))
        assert told == [who + expected] * 2
