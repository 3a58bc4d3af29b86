"""dist_async: each push by itself, in order of arrival, wherever a key lies; and what it refuses."""

import os
import threading
import time
from functools import partial

import numpy as np
import pytest
from raises import raises
from small_stores import LAYOUTS, SHAPE, added, full

import hpcdp
from hpcdp import kvstore, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, HpcdpError, MismatchError, UnsupportedError
from hpcdp.kvstore import server_keys

PRIME = 1_000_003


def mixed(key, received, stored):
    """Pushes in another order give another value."""
    stored[...] = (stored * 31 + received) % PRIME


@pytest.mark.parametrize(("ranks", "per_node", "split"), LAYOUTS, indirect=["split"])
def test_every_push_counts_once(ranks, per_node, split):
    """Key starts at 1, each rank pushes ones * (rank + 1) at rate 2: after i rounds exactly 1 + i 2 n (n + 1) / 2."""

    def one(world, dtype, shape):
        store = kvstore.create("dist_async", world)
        store.init("weight", full(1 if world.rank == 0 else 99, shape, dtype))
        store.set_updater(added)
        found = []
        for i in range(1, 4):
            store.push("weight", full(world.rank + 1, shape, dtype))
            store.barrier()
            pulled = store.pull("weight")
            found.append((np.asarray(pulled), pulled.version, i))
            store.barrier()
        return found

    for number, shape in enumerate((SHAPE, (40, 30), (7,), ())):
        dtype = ("f2", "f4", "f8")[(number + ranks) % 3]
        for found in thread_comm.run(ranks, partial(one, dtype=dtype, shape=shape), per_node):
            for value, version, i in found:
                assert (value.dtype, value.shape) == (np.dtype(dtype), shape)
                assert (value == 1 + i * 2 * ranks * (ranks + 1) / 2).all()
                assert version == i * ranks


def test_lists_repeated_keys_priorities_and_rows(split):
    def forms(world):
        store = kvstore.create("dist_async", world)
        store.init(["a", "b"], [full(0), full(0, (4,))])
        store.set_updater(added)
        store.push(["a", "b", "a"], [full(1), [full(2, (4,)), full(3, (4,))], full(5)], priority=-world.rank)
        store.barrier()
        assert (store.pull("a")[...] == 12 * world.size).all() and (store.pull("b")[...] == 10 * world.size).all()
        rows = store.row_sparse_pull("a", row_ids=[1, 1]).wait()
        assert (rows == [[0] * 3, [12 * world.size] * 3]).all()
        store.barrier()
        out, further, odd = full(0), full(0), np.zeros((3, 2), "f4").T
        store.pushpull("a", full(world.rank), out=[out, further])
        assert (out == further).all() and (out >= 12 * world.size + 2 * world.rank).all()
        store.pushpull("a", full(0), out=odd)  # not contiguous
        assert (odd >= out).all()
        store.broadcast("c", full(9 + world.rank), out=out)
        assert (out == 9).all()
        store.barrier()
        value = full(5)
        store.push("c", value)
        value[...] = 77  # may be changed at once
        store.barrier()
        assert (store.pull("c")[...] == 9 + 10 * world.size).all()

    for ranks, per_node in ((1, None), (3, 1), (4, 2)):
        thread_comm.run(ranks, forms, per_node)


def test_pushes_return_before_they_take_effect_and_keep_their_order():
    def order(world):
        begun, go_on = threading.Event(), threading.Event()

        def waits(key, received, stored):
            begun.set()
            assert go_on.wait(20)
            mixed(key, received, stored)

        store = kvstore.create("dist_async", world)
        store.init(1, full(1, dtype="i8"))
        store.set_updater(waits)
        store.push(1, full(2, dtype="i8"))
        earlier = store.pull(1)
        store.push(1, full(3, dtype="i8"))
        later = store.pull(1)
        assert begun.wait(20)
        go_on.set()
        assert (np.asarray(later) == 33 * 31 + 3).all() and (earlier[...] == 33).all()
        assert (earlier.version, later.version) == (1, 2)

    thread_comm.run(1, order)


def test_a_counter_gives_each_number_to_one_worker():
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init(["count", "other"], [np.zeros(1, np.int64), full(0)])
        taken = [store.take("count") for _ in range(50)]
        with pytest.raises((ConfigError, HpcdpError), match="int64"):  # another rank's error arrives as text
            store.take("other")
        assert taken == sorted(taken)
        return taken

    for ranks, per_node in ((1, None), (3, None), (3, 1), (4, 2)):
        taken = [number for found in thread_comm.run(ranks, one, per_node) for number in found]
        assert sorted(taken) == list(range(50 * ranks))


def test_no_updater_is_an_error_with_the_remedy():
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", full(1))
        assert (store.pull("w")[...] == 1).all()
        with raises(ConfigError, operation="push", where="dist_async"):
            store.push("w", full(1))

    thread_comm.run(2, one)


@pytest.mark.parametrize("per_node", [None, 1])
def test_all_numbers_travel_and_the_rest_is_refused_by_name(per_node):
    def one(world):
        store = kvstore.create("dist_async", world)
        names = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]
        store.init(names, [full(1, dtype=name) for name in names])
        store.set_updater(partial(added))
        store.push(names, [full(1 + world.rank, dtype=name) for name in names])
        store.barrier()
        for name in names:
            assert (store.pull(name)[...] == 1 + 2 * 3).all()
        for wrong in ("bool", "c8", ">f4", "M8[s]"):
            with raises(UnsupportedError, operation="init", where="key 'x'", expected="uint8"):
                store.init("x", np.zeros(3, wrong))
        store.barrier()
        store.set_optimizer(optim.SGD(lr=0.1))
        with raises(UnsupportedError, operation="push", where="key 'i4'", expected="float"):
            store.push("i4", full(1, dtype="i4"))

    thread_comm.run(2, one, per_node)


def test_numpy_integers_are_keys():
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init(np.int64(3), full(1))
        return float(store.pull(3)[0, 0]), float(store.pull([np.int32(3)])[0][0, 0])

    assert thread_comm.run(1, one) == [(1.0, 1.0)]


def test_a_store_that_is_dropped_leaves_nothing_behind():
    listing = threading.Lock()  # which opens one file more, for the other rank to see

    def one(world):
        counts = []
        for turn in range(12):
            store = kvstore.create("dist_async", world, staleness=1)
            store.init("w", full(1, (1000,)))
            store.set_optimizer(optim.SGD(lr=0.1, momentum=0.9))
            store.pushpull("w", full(1, (1000,)), full(0, (1000,)))
            del store
            world.barrier()
            if turn in (1, 11):
                with listing:
                    counts.append(len(os.listdir("/proc/self/fd")))
            world.barrier()
        assert len(world.endings) <= 2
        return counts

    for early, late in thread_comm.run(2, one):
        assert late <= early


def test_what_is_refused():
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", full(1))
        store.set_optimizer(optim.SGD(lr=0.1))
        for wrong in (full(1, (3, 2)), full(1, dtype="f8"), 1.0):
            with raises(UnsupportedError, operation="push", where="key 'w'", expected=[(2, 3), "float32"]):
                store.push("w", wrong)
        store.init("counts", full(1, dtype="i8"))
        with raises(UnsupportedError, operation="set_gradient_compression", where="key 'counts'"):
            store.set_gradient_compression("2bit")

    thread_comm.run(2, one)
    for setting in ({"staleness": -1}, {"staleness": 1.5}, {"replay": True}):
        with raises(ConfigError, operation="kvstore.create", expected=0):
            kvstore.create("dist_async", **setting)
    with raises(ConfigError, operation="kvstore.create", where="staleness", expected="dist_sync", got=3):
        kvstore.create("dist_sync", staleness=3)

    def differ(world):
        kvstore.create("dist_async", world, staleness=1 + world.rank)

    with raises(
        MismatchError,
        operation="kvstore.create",
        where="item 1 of 1 on rank 0",
        expected=["staleness=1", "replay=None", "rank 0"],
        got=["dist_async", "staleness=2"],
    ):
        thread_comm.run(2, differ)


def test_a_large_key_goes_to_all_servers_and_small_ones_to_the_least_loaded():
    place = server_keys.Placement([4, 5, 6], splits=True)
    assert place.place(10, 4) == [(4, 0, 10)]
    large = place.place(3 << 20, 4)
    assert [part[1:] for part in large] == [(i << 20, i + 1 << 20) for i in range(3)]
    assert {part.server for part in large} == {4, 5, 6}
    for _ in range(20):
        place.place(1000, 4)
    assert max(place.nbytes.values()) - min(place.nbytes.values()) <= 4000
    whole = server_keys.Placement([0, 1], splits=False)
    assert len(whole.place(3 << 20, 4)) == 1
    assert len(whole.place(3 << 28, 4)) == 6  # so that a message counts its bytes in 32 bits
    assert whole.place(0, 4)[0][1:] == (0, 0)


@pytest.mark.mpi
def test_on_real_ranks():
    store = kvstore.create("dist_async")
    world = hpcdp.init()
    store.init(["a", "b"], [full(1 + world.rank), full(0, (300, 70))])
    store.init("count", np.zeros(1, np.int64))
    store.set_updater(added)
    for _ in range(30):
        store.push(["a", "b"], [[full(world.rank + 1), full(1)], full(world.rank + 1, (300, 70))])
        pulled = np.asarray(store.pull("b"))
        assert (pulled == pulled[0, 0]).all()
    taken = store.take("count")
    store.barrier()
    total = world.size * (world.size + 1) / 2
    assert (store.pull("a")[...] == 1 + 60 * (total + world.size)).all()
    assert (store.pull("b")[...] == 60 * total).all()
    assert sorted(world.comm.allgather_json(taken)) == list(range(world.size))
    assert store.num_dead_node() == 0
    store.barrier()


def test_an_idle_server_needs_no_core():
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", full(1))
        store.set_updater(added)
        store.push("w", full(1))
        store.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        time.sleep(0.5)
        return (time.process_time() - cpu) / (time.perf_counter() - began)

    assert max(thread_comm.run(2, one, 1)) < 0.25  # of both servers together


@pytest.mark.parametrize("per_node", [None, 1])
@pytest.mark.parametrize("count", [1.5, "a", 2**70])
def test_a_count_that_is_none_is_refused_wherever_the_key_lies(count, per_node):
    """Rounded to 0 it would give a number to several workers."""

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init([1, 2], [np.zeros(1, np.int64)] * 2)
        for key in (1, 2):
            with raises(ConfigError, operation="take", where="count"):
                store.take(key, count)
        return store.take(np.int64(1)), store.take(2, np.int64(3))

    taken = thread_comm.run(2, one, per_node)
    assert sorted(first for first, _ in taken) == [0, 1] and sorted(second for _, second in taken) == [0, 3]
