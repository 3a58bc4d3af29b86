"""What stores refuse, by name: keys, values, arguments, and ranks that differ."""

import numpy as np
import pytest
import standin
from small_stores import SHAPE, added, full, on_one_worker

from hpcdp import kvstore, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.core.arrays import dtype_of
from hpcdp.errors import ConfigError, MismatchError, UnsupportedError


def halved(key, received, stored):
    stored += np.asarray(0.5, stored.dtype) * received


REFUSED = [
    (lambda store: kvstore.create("dist-sync"), "expected one of local, device, dist_sync, dist, dist_device_sync"),
    (lambda store: store.init("w", full(1)), r"init \[key 'w'\]: expected a new key, got one that was made before"),
    (lambda store: store.init(3, full(1)), r"init \[key 3\]: expected keys that are all int or all str, got both"),
    (lambda store: store.init(True, full(1)), r"init \[key\]: expected an int, a str or a list of them, got True"),
    (lambda store: store.init("x", [full(1), full(2)]), r"init \[key 'x'\]: expected one array"),
    (lambda store: store.init("x", 1.0), r"init \[key 'x'\]: expected one array, got a float"),
    (
        lambda store: store.push("x", full(1)),
        r"push \[key 'x'\]: expected one of the keys that init\(\) has made: 'w'",
    ),
    (
        lambda store: store.push(["w", "w"], [full(1)]),
        r"push \[value\]: expected a list of 2, one for each key, got 1",
    ),
    (
        lambda store: store.push(["w"], full(1)),
        r"push \[value\]: expected a list of 1, one for each key, got ndarray",
    ),
    (lambda store: store.push("w", full(1), priority=0.5), r"push \[priority\]: expected an integer, got 0.5"),
    (lambda store: store.set_updater(3), "set_updater: expected a function of key, received, stored, got 3"),
    (lambda store: store.set_optimizer("sgd"), "set_optimizer: expected an optimizer, e.g"),
    (lambda store: store.load_state_dict({}), r"load_state_dict: expected what state_dict\(\) .* got {}"),
    (lambda store: store.load_state_dict(None), r"load_state_dict: expected what state_dict\(\) .* got None"),
    (lambda store: store.num_dead_node(-1), r"num_dead_node \[timeout_s\]: expected a positive number"),
    (lambda store: store.init("c", np.zeros(2, "c8")), r"init \[key 'c'\]: expected an array of uint8, .*<c8"),
    (lambda store: store.init("b", np.zeros(2, dtype_of("bfloat16"))), r"init \[key 'b'\]: .*float64, got bfloat16"),
    (lambda store: store.init("o", np.array([None])), r"init \[key 'o'\]: expected an array of"),
    (lambda store: store.save_optimizer_states("x"), "expected a store with an optimizer, got none"),
]


def test_what_is_refused(kind):
    def refused(store):
        store.init("w", full(1))
        for call, said in REFUSED:
            with pytest.raises((ConfigError, UnsupportedError), match=said):
                call(store)

    on_one_worker(kind, refused)


@pytest.mark.parametrize("name", ["local", "dist_sync"])
def test_what_is_no_world_is_refused(name):
    with pytest.raises(
        ConfigError, match=r"kvstore.create \[world\]: expected the world of hpcdp.init\(\), .* got 'w'"
    ):
        kvstore.create(name, "w")


@pytest.mark.parametrize("wrong", [full(1, (3, 2)), full(1, dtype="f8"), full(1, dtype="i4"), 1.0])
def test_arrays_that_do_not_fit_are_refused_before_anything_is_pushed(kind, wrong):
    def refused(store):
        store.init(["w", "v"], [full(1), full(1)])
        with pytest.raises(UnsupportedError, match=r"push \[key 'v'\]: expected an array of \(2, 3\) float32, got "):
            store.push(["w", "v"], [full(5), [full(1), wrong]])
        assert (store.pull("w")[...] == 1).all()
        if hasattr(wrong, "dtype") and wrong.dtype != "f8":  # to which a pull casts
            with pytest.raises(UnsupportedError, match=r"pull \[key 'w'\]: expected an array of \(2, 3\) float32"):
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
            with pytest.raises(ConfigError, match=rf"init \[key 'x'\]: expected one array, got a {name}$"):
                store.init("x", wrong)
        for key, name, wrong in (
            ("p", "Parameter", param),
            ("w", "MaskedArray", masked),
        ):
            with pytest.raises(
                UnsupportedError, match=rf"push \[key '{key}'\]: expected an array of .*, got a {name}$"
            ):
                store.push(key, wrong)
        store.push("n", np.float64(-10))  # what NumPy makes of arrays without dimensions
        assert store.pull("n").wait() == 1
        with pytest.raises(
            UnsupportedError, match=r"pull \[key 'n'\]: expected an array of \(\) float64, got a float64"
        ):
            store.pull("n", out=np.float64(3))
        with pytest.raises(UnsupportedError, match=r"\[key 'n'\]: expected an array of \(\) float64, got a float64"):
            store.pushpull("n", np.float64(3))  # which the sum cannot overwrite
        assert store.pull("n").wait() == 1
        for call in (store.pull, lambda key, out: store.pushpull(key, full(1), out)):
            with pytest.raises(
                UnsupportedError, match=r"pull \[key 'w'\]: expected an array to write to, got a read-only"
            ):
                call("w", out=np.broadcast_to(np.float32(1), SHAPE))
        assert np.array_equal(store.pull("w").wait(), full(1))
        with pytest.raises(ConfigError, match=r"push \[key 'w'\]: expected an array or more, got an empty list"):
            store.push("w", [])

    on_one_worker(kind, one)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_key_that_one_rank_cannot_make_is_an_error_on_all(kind):
    def one(world):
        store = kvstore.create(kind, world)
        with pytest.raises(ConfigError, match=r"rank 1: init \[key 'a'\]: expected one array, got a float"):
            store.init("a", 3.0 if world.rank == 1 else np.array(3.0))
        store.init("n", np.float64(3) if world.rank == 1 else np.array(3.0))
        on_a_device = standin.asarray(np.ones(3, "f4"))  # which the first rank's value overwrites, as all others
        store.init("d", on_a_device if world.rank == 1 else np.zeros(3, "f4"))
        assert not np.asarray(store.pull("d")).any()
        store.init("a", np.zeros(3, "f4"))
        with pytest.raises(MismatchError, match=r"assign .*expected key 'a' as on rank 0, got key 'b' on rank 1"):
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

    for fn, kind_of, said in (
        (
            keys,
            MismatchError,
            r"expected key 'w' \(2, 3\) float32 as on rank 0, got key 'w' \(2, 4\) float32 on rank 2",
        ),
        (twice, ConfigError, "expected a new key, got one that was made before"),
        (rules, MismatchError, "set_optimizer"),
        (functions, MismatchError, "halved as on rank 0, got .*added on rank"),
        (kinds, MismatchError, r"kvstore.create .*expected dist_async .* as on rank 0, got dist_sync .* on ranks 1, 2"),
    ):
        with pytest.raises(kind_of, match=said):
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
