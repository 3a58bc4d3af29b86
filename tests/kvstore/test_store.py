"""Stores of all kinds: the numbers of the documents, every form of arguments, and the order of things."""

import enum
import threading
import time
from functools import partial

import numpy as np
import pytest
import standin
from raises import raises
from small_stores import SHAPE, WORLDS, added, full, on_one_worker

import hpcdp
from hpcdp import kvstore, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.core.arrays import dtype_of
from hpcdp.errors import ConfigError, UnsupportedError


class Name(enum.StrEnum):
    C = "c"


class Number(enum.IntEnum):
    FOUR = 4


@pytest.fixture(params=[kind for kind in kvstore.KINDS if kind != "dist_async"])
def replacing(request):
    """A kind in which the stored value becomes the sum where there is no updater."""
    return request.param


def test_the_numbers_of_the_documents(replacing):
    def numbers(store):
        out = np.zeros(SHAPE, "f4")
        store.init(3, full(2))
        store.pull(3, out=out)
        assert (out == 2).all()
        store.push(3, full(8))
        store.pull(3, out=out)
        assert (out == 8).all()
        store.push(3, [full(1)] * 4)
        store.pull(3, out=out)
        assert (out == 4).all()

        def update(key, received, stored):
            assert key == 3 and received.shape == stored.shape == SHAPE
            stored += 2 * received

        store.set_updater(update)
        store.push(3, full(1))
        store.pull(3, out=out)
        assert (out == 6).all()
        assert (store.rank, store.num_workers, store.kind) == (0, 1, replacing)

    on_one_worker(replacing, numbers)


@pytest.mark.parametrize("per_node", [None, 1])
def test_a_pull_casts_to_another_float_dtype(kind, split, per_node):
    def rank(world):
        store = kvstore.create(kind, world)
        store.init("w", full(1.1))
        store.set_updater(added)
        values = np.full(SHAPE, 1.1, "f4")
        world.barrier()  # dist_async would apply the others' pushes meanwhile
        for dtype in (np.dtype("f8"), np.dtype("f2"), dtype_of("bfloat16")):
            out, rows, param = (np.zeros(SHAPE, dtype) for _ in range(3))
            store.pull("w", out=out)
            store.pull("w", out=[rows, param])
            for each in (out, rows, param):
                assert each.dtype == dtype
                np.testing.assert_array_equal(each, values.astype(dtype))
            rows[:] = 5
            store.row_sparse_pull("w", out=rows, row_ids=[1])
            np.testing.assert_array_equal(rows, np.where([[False], [True]], values, 0).astype(dtype))
        world.barrier()
        out = np.zeros(SHAPE, "f8")
        store.pushpull("w", full(70_000), out=out)
        store.barrier()
        store.pull("w", out=out)
        assert out[0, 0] == np.float32(values[0, 0] + 2 * 70_000 * (world.size if kind.startswith("dist") else 1))
        small = np.zeros(SHAPE, "f2")
        store.pull("w", out=small)
        assert np.isinf(small).all()
        with raises(
            UnsupportedError, operation="pull", where="key 'w'", expected=[(2, 3), "float32"], got=[(2, 3), "int64"]
        ):
            store.pull("w", out=np.zeros(SHAPE, "i8"))
        store.barrier()

    thread_comm.run(2, rank, per_node)


@pytest.mark.parametrize(("ranks", "per_node"), WORLDS)
def test_ranks_push_and_a_server_of_rate_r_adds(ranks, per_node):
    """Key starts at 1, each rank pushes ones * (rank + 1): after i rounds exactly 1 + i r n (n + 1) / 2."""

    def one(world, dtype, shape, rate):
        store = kvstore.create("dist_sync", world)
        store.init("weight", full(1 if world.rank == 0 else 99, shape, dtype))
        found = []
        store.set_updater(added if rate == 2 else halved)
        for _ in range(3):
            store.push("weight", full(world.rank + 1, shape, dtype))
            found.append(store.pull("weight"))
        return [np.asarray(each) for each in found]

    for number, shape in enumerate((SHAPE, (40, 30), (7,), ())):
        dtype = ("f2", "f4", "f8")[(number + ranks) % 3]
        for rate in (2, 0.5):
            for found in thread_comm.run(ranks, partial(one, dtype=dtype, shape=shape, rate=rate), per_node):
                for i, each in enumerate(found, 1):
                    assert (each.dtype, each.shape) == (np.dtype(dtype), shape)
                    assert (each == 1 + i * rate * ranks * (ranks + 1) / 2).all()


def halved(key, received, stored):
    stored += np.asarray(0.5, stored.dtype) * received


@pytest.mark.slow
def test_large_values_too():
    def one(world):
        store = kvstore.create("dist_sync", world)
        store.init(0, full(1, (1200, 1200)))
        store.set_updater(added)
        for _ in range(2):
            store.push(0, full(world.rank + 1, (1200, 1200)))
        return float(np.asarray(store.pull(0)).min()), float(np.asarray(store.pull(0)).max())

    assert thread_comm.run(3, one, ranks_per_node=2) == [(25.0, 25.0)] * 3


def test_several_keys_repeated_ones_and_lists_for_devices(replacing):
    def forms(store):
        store.init(["a", "b"], [full(0), full(0, (4,))])
        store.push(["a", "b", "a"], [full(1), [full(2, (4,)), full(3, (4,))], full(5)])
        assert (store.pull("a")[...] == 6).all() and (store.pull("b")[...] == 5).all()
        first, second = np.zeros(SHAPE, "f4"), np.zeros(SHAPE, "f4")
        other = np.zeros(4, "f4")
        store.pull(["a", "b", "a"], out=[first, [other], second])
        assert (first == 6).all() and (second == 6).all() and (other == 5).all()
        assert [each.shape for each in store.pull(["b", "a"])] == [(4,), SHAPE]
        values = [full(7), full(8)]
        store.pushpull("a", values)
        assert all((each == 15).all() for each in values)
        out = np.zeros(SHAPE, "f4")
        store.pushpull("a", full(3), out=out)
        assert (out == 3).all()
        store.broadcast("c", full(9), out=out)
        assert (out == 9).all()

    on_one_worker(replacing, forms)


@pytest.mark.parametrize(
    "keys",
    [(np.str_("a"), "b", Name.C), (3, Number.FOUR, np.int8(5))],
    ids=["str", "int"],
)
def test_keys_of_types_that_are_made_of_int_or_str(keys, replacing, tmp_path):
    def named(store):
        store.init(keys[0], full(1))
        store.init(list(keys[1:]), [full(2), full(3)])
        assert {type(key) for key in store.keys} in ({int}, {str})
        store.set_optimizer(optim.SGD(lr=1, momentum=0.5))
        store.push(list(keys), [full(1)] * 3)
        assert [(store.pull(key)[...] == number).all() for number, key in enumerate(keys)] == [True] * 3
        store.save_optimizer_states(str(tmp_path / "states"))

    on_one_worker(replacing, named)
    store = kvstore.create("local")
    store.init([str.__str__(key) if isinstance(key, str) else int(key) for key in keys], [full(0)] * 3)
    store.set_optimizer(optim.SGD(lr=1, momentum=0.5))
    store.load_optimizer_states(str(tmp_path / "states"))


def test_what_is_pushed_may_be_changed_at_once(replacing):
    def changes(store):
        store.init(1, full(0))
        value = full(5)
        store.push(1, value)
        value[...] = 77
        initial = full(6)
        store.init(2, initial)
        initial[...] = 77
        assert (store.pull(1)[...] == 5).all() and (store.pull(2)[...] == 6).all()

    on_one_worker(replacing, changes)


def test_pushes_and_pulls_return_before_they_are_done_and_keep_their_order(kind):
    def order(store):
        begun, go_on = threading.Event(), threading.Event()

        def waits(key, received, stored):
            begun.set()
            assert go_on.wait(20)
            stored += received

        store.init(1, full(1))
        store.set_updater(waits)
        store.push(1, full(1))
        earlier = store.pull(1)
        store.push(1, full(1))
        later = store.pull(1)
        assert begun.wait(20)
        go_on.set()
        assert (np.asarray(later) == 3).all() and (earlier[...] == 2).all()
        assert earlier.dtype == np.float32 and repr(earlier).startswith("PullHandle(array(")

    on_one_worker(kind, order)


def test_parameters_wait_when_they_are_read(kind):
    def pulled(store):
        go_on = threading.Event()
        layer = nn.Dense(3, 2)

        def waits(key, received, stored):
            assert go_on.wait(20)
            stored[...] = received

        store.init("w", full(0, (3, 2)))
        store.set_updater(waits)
        store.push("w", full(4, (3, 2)))
        store.pull("w", out=layer.weight)
        go_on.set()
        assert (layer(np.ones((1, 3), "f4")).data == 12).all()
        assert layer.weight.data_hook is None

    on_one_worker(kind, pulled)


def test_ranks_may_push_keys_in_other_orders_and_with_other_priorities():
    def one(world):
        store = kvstore.create("dist_sync", world)
        keys = list(range(7))
        store.init(keys, [full(0, (key + 1, 9)) for key in keys])
        order = np.random.default_rng(world.rank).permutation(keys)
        for key in order.tolist():
            store.push(key, full(world.rank + key, (key + 1, 9)), priority=(key * 7 + world.rank) % 5)
        return [float(store.pull(key)[0, 0]) for key in keys]

    for per_node in (None, 1, 2):
        assert thread_comm.run(4, one, ranks_per_node=per_node) == [[6.0 + 4 * key for key in range(7)]] * 4


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_stores_do_not_meet_each_other(kind):
    def one(world):
        stores = [kvstore.create(kind, world) for _ in range(3)]
        for number, store in enumerate(stores):
            store.init("key", full(number))
            store.set_updater(added)
        for number, store in enumerate(stores if world.rank % 2 else stores[::-1]):
            store.push("key", full(number + 1 if world.rank % 2 else 3 - number))
        for store in stores:
            store.barrier()
        return [float(store.pull("key")[0, 0]) for store in stores]

    assert thread_comm.run(3, one, ranks_per_node=1) == [[6.0, 13.0, 20.0]] * 3


@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (3, None), (4, 2)])
def test_values_can_be_assigned(kind, ranks, per_node):
    def one(store):
        store.init(["a", "b"], [full(1), full(2, (5,))])
        store.set_optimizer(optim.SGD(lr=1.0))
        store.push("a", full(1))
        earlier = store.pull("a")
        store.assign(["a", "b"], [full(7 + store.rank), full(8 + store.rank, (5,))])
        assert (earlier[...] <= 0).all()
        store.barrier()
        store.push("b", full(-1, (5,)))
        store.barrier()
        assert (store.pull("a")[...] == 7).all() and (store.pull("b")[...] == 8 + store.num_workers).all()
        for wrong, fields in (
            (("c", full(1)), {"where": "key 'c'"}),
            (("a", [full(1)] * 2), {"where": "key 'a'"}),
            (("a", full(1, (3,))), {"where": "key 'a'", "expected": [(2, 3), "float32"]}),
        ):
            with raises((ConfigError, UnsupportedError), operation="assign", **fields):
                store.assign(*wrong)

    if kvstore.KINDS[kind].scope == "process":
        one(kvstore.create(kind))
    else:
        thread_comm.run(ranks, lambda world: one(kvstore.create(kind, world)), per_node)


def test_a_broadcast_overwrites_its_value_where_no_other_place_is_named():
    def one(world):
        store, value = kvstore.create("dist_sync", world), full(world.rank + 1)
        store.broadcast("w", value)
        return value

    assert all(np.array_equal(value, full(1)) for value in thread_comm.run(3, one))


def test_keys_of_higher_priority_come_first(kind):
    def order(store):
        begun, go_on, updated = threading.Event(), threading.Event(), []

        def notes(key, received, stored):
            updated.append(key)
            if key == 0:
                begun.set()
                assert go_on.wait(20)

        store.init([0, 1, 2, 3], [full(0)] * 4)
        store.set_updater(notes)
        store.push(0, full(1))
        assert begun.wait(20)
        for key, priority in ((1, -5), (2, 5), (3, 0)):  # while the first one keeps the thread that updates
            store.push(key, full(1), priority=priority)
        go_on.set()
        store.wait()
        return updated

    assert on_one_worker(kind, order) == [0, 2, 3, 1]


@pytest.mark.parametrize("waits_in", ["pull", "wait"])
def test_a_rank_that_has_not_pushed_is_known_to_those_that_wait(waits_in):
    def one(world):
        store, seen = kvstore.create("dist_sync", world), []
        store.init("w", full(1))
        if world.rank != 2:
            store.push("w", full(1))
        world.barrier()
        if world.rank == 0:
            deadline = time.monotonic() + 20
            while store._rows["w"].milestones.behind(1) != [2]:  # its lane, too, takes its time
                assert time.monotonic() < deadline
            lane, wait = store._of_world, store._of_world.wait
            lane.wait = lambda variable: seen.append(store._watchdog.call[2]())
            pulled = store.pull("w") if waits_in == "pull" else store
            pulled.wait()
            lane.wait = wait
        world.barrier()
        if world.rank == 2:
            store.push("w", full(1))
        store.barrier()
        return seen

    assert thread_comm.run(3, one)[0] == [[2]]


def test_arrays_on_a_device():
    store = kvstore.create("device")
    store.init(1, standin.asarray(full(1)))
    store.push(1, [standin.asarray(full(2)), standin.asarray(full(3))])
    out = standin.asarray(full(0))
    store.pull(1, out=out)
    assert (out.to_host() == 5).all()

    def through_the_host(world):
        store = kvstore.create("dist_sync", world)
        store.init(1, standin.asarray(full(1)))
        store.pushpull(1, [standin.asarray(full(world.rank)), standin.asarray(full(3))], out=out[world.rank])

    out = [standin.asarray(full(0)) for _ in range(3)]
    thread_comm.run(3, through_the_host)
    assert all((each.to_host() == 12).all() for each in out)


@pytest.mark.mpi
def test_on_real_ranks():
    store = kvstore.create("dist_sync")
    world = hpcdp.init()
    store.init(["a", "b"], [full(1 + world.rank), full(0, (300, 70))])
    store.set_updater(added)
    for _ in range(3):
        store.push(["a", "b"], [[full(world.rank + 1), full(1)], full(world.rank + 1, (300, 70))])
    total = world.size * (world.size + 1) / 2
    assert (store.pull("a")[...] == 1 + 6 * (total + world.size)).all()
    assert (store.pull("b")[...] == 6 * total).all()
    store.barrier()


@pytest.mark.parametrize(("kind", "updater"), [("dist_sync", None), ("dist_async", optim.Adam(lr=1.0))])
def test_many_keys_share_few_pieces_of_memory(kind, updater):
    """Each costs an exchange of the node's ranks, and a process cannot have many."""
    keys, shapes = list(range(300)), [(), (0,), (3,), (5, 7)]

    def one(world):
        sizes, alloc = [], world.node_memory.alloc

        def counted(shape, dtype):
            sizes.append(np.prod(shape))
            return alloc(shape, dtype)

        world.node_memory.alloc = counted
        store = kvstore.create(kind, world)
        begun = len(sizes)
        store.init(keys, [np.full(shapes[key % 4], key, "f4") for key in keys])
        if updater is not None:
            store.set_optimizer(updater)
        assert all((store.pull(key).wait() == key).all() for key in keys)
        world.barrier()
        for key in keys:
            store.push(key, np.full(shapes[key % 4], 1, "f4"))
        store.barrier()
        expected = [2.0 if updater is None else key - 2.0 for key in keys]
        assert all(np.allclose(store.pull(key), each) for key, each in zip(keys, expected, strict=True))
        return len(sizes) - begun

    assert max(thread_comm.run(2, one)) <= 4
