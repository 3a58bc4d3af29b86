"""dist_async: each push by itself, in order of arrival, wherever a key lies; and what it refuses."""

import os
import threading
import time
from functools import partial

import numpy as np
import pytest

import hpcdp
from hpcdp import kvstore, optim
from hpcdp.comm import threads
from hpcdp.errors import ConfigError, HpcdpError, MismatchError, UnsupportedError
from hpcdp.kvstore import placement
from hpcdp.kvstore.together import serve
from hpcdp.kvstore.wire import Kind, Message

WORLDS = [(1, None), (2, None), (3, None), (4, None), (2, 1), (3, 1), (3, 2), (4, 2), (5, 2)]
SHAPE = (2, 3)
PRIME = 1_000_003


def full(value, shape=SHAPE, dtype="f4"):
    return np.full(shape, value, dtype)


def added(key, received, stored):
    stored += np.asarray(2, stored.dtype) * received


def mixed(key, received, stored):
    """Pushes in another order give another value."""
    stored[...] = (stored * 31 + received) % PRIME


def half(key, received, stored):
    stored[0] = 77
    raise ZeroDivisionError("by nothing")


def fails(key, received, stored):
    raise ZeroDivisionError("by nothing")


@pytest.fixture(params=[False, True], ids=["whole", "split"])
def split(request, monkeypatch):
    """Whether keys are cut over all servers, where there are several nodes."""
    if request.param:
        monkeypatch.setattr(placement, "SPLIT_NBYTES", 8)
    return request.param


@pytest.mark.parametrize(("ranks", "per_node"), WORLDS)
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
        for found in threads.run(ranks, partial(one, dtype=dtype, shape=shape), per_node):
            for value, version, i in found:
                assert (value.dtype, value.shape) == (np.dtype(dtype), shape)
                assert (value == 1 + i * 2 * ranks * (ranks + 1) / 2).all()
                assert version == i * ranks


@pytest.mark.parametrize(("ranks", "per_node"), WORLDS)
def test_an_optimizer_and_a_rate_that_is_assigned(ranks, per_node, split):
    """SGD without momentum: the order of pushes matters to the rounding alone."""
    rng = np.random.default_rng(3)
    gradients = rng.standard_normal((4, ranks, 37, 5))
    start = rng.standard_normal((37, 5))

    def one(world):
        store = kvstore.create("dist_async", world)
        rule = optim.SGD(lr=0.5)
        store.init(["big", "small"], [start, start[0]])
        store.set_optimizer(rule)
        for step in range(4):
            rule.lr = 0.5 / (step + 1)  # reaches the servers with the next push
            store.push("big", gradients[step, world.rank], priority=-1)
            store.pushpull("small", gradients[step, world.rank, 0], np.empty(5))
        store.barrier()
        return store.pull("big").wait(), store.pull("small").wait(), store.statistics()["pushes"]

    wanted = start - sum(0.5 / (step + 1) * gradients[step].sum(axis=0) for step in range(4))
    for big, small, pushes in threads.run(ranks, one, ranks_per_node=per_node):
        np.testing.assert_allclose(big, wanted, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(small, wanted[0], rtol=1e-12, atol=1e-14)
        assert pushes == 8


RATES = {
    "np.float32": lambda step: np.float32(0.5 / step),
    "a schedule": lambda step: optim.ConstantSchedule(0.25) if step < 3 else optim.StepSchedule(0.5, 2, 0.5),
    "a schedule, then a number": lambda step: optim.ConstantSchedule(0.25) if step < 3 else 0.125,
    "one that changes": lambda step: CHANGED,
}
CHANGED = optim.ConstantSchedule(0.0)


@pytest.mark.parametrize("rates", list(RATES))
@pytest.mark.parametrize(("ranks", "per_node", "num_servers"), [(1, None, 0), (2, 1, 0), (2, None, 1), (3, 1, 2)])
def test_whatever_rate_a_worker_assigns_is_that_of_its_pushes(ranks, per_node, num_servers, rates, split):
    """The last worker pushes; the others have assigned another rate, with which nothing is pushed."""
    rate_at, start = RATES[rates], np.zeros(7)

    def rule_at(rule, step):
        rule.lr = rate_at(step)
        if rule.lr is CHANGED:
            CHANGED.lr = 0.1 * step

    wanted, rule = start.copy(), optim.SGD(lr=9.0)
    for step in range(1, 6):
        rule_at(rule, step)
        rule.update(wanted, np.ones(7), {}, step=step)

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init(["w", "v"], [start, start])
        rule = optim.SGD(lr=9.0)
        store.set_optimizer(rule)
        rule.lr = 77.0
        world.barrier()
        for step in range(1, 6) if world.rank == ranks - 1 else ():
            rule_at(rule, step)
            store.push(["w", "v"], [np.ones(7), np.ones(7)])
            store.wait()
        store.barrier()
        return [np.asarray(each) for each in store.pull(["w", "v"])]

    for found in threads.run(ranks, one, per_node, num_servers, serve):
        for each in found:
            np.testing.assert_allclose(each, wanted, rtol=1e-12)


@pytest.mark.parametrize("per_node", [None, 1])
def test_a_rate_that_is_none_is_told_where_it_is_pushed(per_node):
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init(["w", "v"], [full(1), full(1)])
        rule = optim.SGD(lr=0.1)
        store.set_optimizer(rule)
        rule.lr = np.array(0.5)
        with pytest.raises(ConfigError, match=r"sgd lr.*expected a number >= 0, got array\(0\.5\)"):
            store.push(["w", "v"], [full(1), full(1)])

    threads.run(2, one, per_node)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_updates_of_one_worker_are_those_of_the_optimizer(kind, split):
    """One worker pushes, in all worlds: state and steps are the key's, wherever it lies."""
    rng = np.random.default_rng(5)
    gradients, start = rng.standard_normal((5, 11)).astype("f4"), rng.standard_normal(11).astype("f4")
    rule = optim.create(kind, lr=optim.StepSchedule(0.1, every=2, factor=0.5))
    wanted, state = start.copy(), rule.init_state(start)
    for step, gradient in enumerate(gradients, 1):
        rule.update(wanted, gradient, state, step=step)

    def one(world, who):
        store = kvstore.create("dist_async", world)
        store.init(0, start)
        store.set_optimizer(optim.create(kind, lr=optim.StepSchedule(0.1, every=2, factor=0.5)))
        if world.rank == who:
            for gradient in gradients:
                store.push(0, gradient)
        store.barrier()
        return store.pull(0).wait()

    for who in range(3):
        for found in threads.run(3, partial(one, who=who), ranks_per_node=2):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)


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
        threads.run(ranks, forms, per_node)


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

    threads.run(1, order)


@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (3, 1), (4, 2)])
def test_rows_alone_travel(ranks, per_node, split):
    values = np.arange(40 * 300, dtype="f4").reshape(40, 300)

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init(["rows", "few"], [values, values[:2]])
        store.set_updater(added)
        world.barrier()
        before = store.statistics()["sent_nbytes"]
        wanted = [39, world.rank, 7, 7, 20]
        found = store.row_sparse_pull("rows", row_ids=wanted)
        expected = np.zeros_like(values)
        expected[wanted] = values[wanted]
        assert (np.asarray(found) == expected).all() and found.version == 0
        out = np.full((2, 300), 5, "f4")
        store.row_sparse_pull("few", out=out, row_ids=[1])
        assert (out[0] == 0).all() and (out[1] == values[1]).all()
        store.row_sparse_pull("few", out=out, row_ids=[])
        assert (out == 0).all()
        store.barrier()
        return store.statistics()["sent_nbytes"] - before

    assert sum(threads.run(ranks, one, per_node)) < ranks * (7 * 1200 + 20 * 64)  # of 40 rows each


def test_a_counter_gives_each_number_to_one_worker():
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init(["count", "other"], [np.zeros(1, np.int64), full(0)])
        taken = [store.take("count") for _ in range(50)]
        with pytest.raises((ConfigError, HpcdpError), match="a key of one int64"):
            store.take("other")
        assert taken == sorted(taken)
        return taken

    for ranks, per_node in ((1, None), (3, None), (3, 1), (4, 2)):
        taken = [number for found in threads.run(ranks, one, per_node) for number in found]
        assert sorted(taken) == list(range(50 * ranks))


def test_stores_do_not_meet_each_other():
    def one(world):
        stores = [kvstore.create("dist_async", world) for _ in range(3)]
        for number, store in enumerate(stores):
            store.init("key", full(number))
            store.set_updater(added)
        for number, store in enumerate(stores if world.rank % 2 else stores[::-1]):
            store.push("key", full(number + 1 if world.rank % 2 else 3 - number))
        for store in stores:
            store.barrier()
        return [float(store.pull("key")[0, 0]) for store in stores]

    assert threads.run(3, one, ranks_per_node=1) == [[6.0, 13.0, 20.0]] * 3


@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (2, None), (3, None), (2, 1), (3, 2), (4, 1)])
def test_the_documents_two_bit_numbers(ranks, per_node, split):
    """t = 0.5, rate 2: pushes of 0.4, 0.1, 0.2 and 0.3 add 0, t r n, nothing, and t r n."""

    def one(world, dtype):
        store = kvstore.create("dist_async", world)
        store.init("w", full(0, dtype=dtype))
        store.set_updater(added)
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        found = []
        for value in (0.4, 0.1, 0.2, 0.3):
            store.push("w", full(value, dtype=dtype))
            store.barrier()
            found.append(np.asarray(store.pull("w")))
            store.barrier()
        return found

    for dtype in ("f4", "f8"):
        for found in threads.run(ranks, partial(one, dtype=dtype), per_node):
            step = 0.5 * 2 * ranks
            for value, wanted in zip(found, (0, step, step, 2 * step), strict=True):
                assert (value == wanted).all()


@pytest.mark.parametrize("codec", ["fp16", "bf16", "1bit:threshold=0,magnitude=1.5", "topk:ratio=0.5"])
def test_other_codecs_send_all_in_the_end(codec):
    """Error feedback: what pushes of one value add up to is off by no more than a few of them."""

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(64, "f4"))
        store.set_updater(added)
        store.set_gradient_compression(codec)
        for _ in range(40):
            store.push("w", np.linspace(-1, 1, 64, dtype="f4"))
        store.barrier()
        return np.asarray(store.pull("w"))

    for found in threads.run(2, one, 1):
        np.testing.assert_allclose(found / 160, np.linspace(-1, 1, 64), atol=0.12)


@pytest.mark.parametrize(("saved", "loaded"), [((3, 2), (2, None)), ((1, None), (4, 2)), ((2, 1), (3, 1))])
def test_states_go_on_with_another_number_of_ranks(saved, loaded, tmp_path, split):
    path = str(tmp_path / "states.npz")
    gradient = np.random.default_rng(1).standard_normal((33, 7)).astype("f4")

    def some(world, steps, value=None):
        store = kvstore.create("dist_async", world)
        store.init("w", full(1, (33, 7)) if value is None else value)
        store.init("never", full(0))
        store.set_optimizer(optim.Adam(lr=0.1))
        if value is not None:
            store.load_optimizer_states(path)
        if world.rank == world.size - 1:
            for _ in range(steps):
                store.push("w", gradient)
        store.save_optimizer_states(path)
        return store.pull("w").wait()

    wanted = threads.run(1, lambda world: some(world, 5))[0]
    value = threads.run(saved[0], lambda world: some(world, 2), ranks_per_node=saved[1])[0]
    for found in threads.run(loaded[0], lambda world: some(world, 3, value), ranks_per_node=loaded[1]):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    local = kvstore.create("local")
    local.init("w", full(1, (33, 7)))
    local.set_optimizer(optim.Adam(lr=0.1))
    with pytest.raises(HpcdpError, match="states of this store's keys"):
        local.load_optimizer_states(path)
    local.init("never", full(0))
    local.load_optimizer_states(path)


@pytest.mark.parametrize("saved_by", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_keys_that_a_state_does_not_cover_begin_anew(kind, saved_by, tmp_path):
    path = str(tmp_path / "states.npz")

    def one(world, kind, loads):
        store = kvstore.create(kind) if kind == "local" else kvstore.create(kind, world)
        store.init([0, 1], [np.zeros(3), np.zeros(5)])
        store.set_optimizer(optim.SGD(lr=1.0, momentum=0.5))
        ones = [np.full(3, -1.0), np.full(5, -1.0)]
        if not loads:
            store.push(0, ones[0])
            store.barrier()
            return store.save_optimizer_states(path)
        for _ in range(2):
            store.push([0, 1], ones)
            store.barrier()
        store.load_optimizer_states(path)
        before = [np.asarray(each) for each in store.pull([0, 1])]
        store.barrier()
        store.push([0, 1], ones)
        store.barrier()
        return [float((np.asarray(each) - old)[0]) for each, old in zip(store.pull([0, 1]), before, strict=True)]

    threads.run(1, lambda world: one(world, saved_by, False))
    assert threads.run(1, lambda world: one(world, kind, True)) == [
        [1.5, 1.0]
    ]  # with the momentum of one push, or none


def test_no_updater_is_an_error_with_the_remedy():
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", full(1))
        assert (store.pull("w")[...] == 1).all()
        with pytest.raises(ConfigError, match=r"push \[dist_async\]: expected a store with an updater, got none; call"):
            store.push("w", full(1))

    threads.run(2, one)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("per_node", [None, 1])
def test_half_precision_is_updated_in_single(kind, per_node):
    rule = optim.SGD(lr=0.25, momentum=0.5)
    wanted, state = np.ones(70, "f4"), rule.init_state(np.ones(70, "f4"))
    for step in range(1, 5):
        rule.update(wanted, np.linspace(0, 1, 70).astype("f2").astype("f4"), state, step=step)
        wanted = wanted.astype("f2").astype("f4")

    def one(world):
        store = kvstore.create(kind, world)
        store.init("w", full(1, (70,), "f2"))
        store.set_optimizer(optim.SGD(lr=0.25, momentum=0.5))
        for _ in range(4):
            if kind == "dist_sync" or world.rank == 0:
                mine = world.rank == 0  # the others push nothing, or zeros
                store.push("w", np.linspace(0, 1, 70).astype("f2") * np.float16(mine))
        store.barrier()
        return np.asarray(store.pull("w"))

    for found in threads.run(2, one, per_node):
        assert found.dtype == np.float16
        np.testing.assert_array_equal(found, wanted.astype("f2"))


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
            with pytest.raises(UnsupportedError, match=r"init \[key 'x'\]: expected a NumPy array of uint8, "):
                store.init("x", np.zeros(3, wrong))
        store.barrier()
        store.set_optimizer(optim.SGD(lr=0.1))
        with pytest.raises(UnsupportedError, match=r"push \[key 'i4'\]: expected floating-point numbers"):
            store.push("i4", full(1, dtype="i4"))

    threads.run(2, one, per_node)


def test_numpy_integers_are_keys():
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init(np.int64(3), full(1))
        return float(store.pull(3)[0, 0]), float(store.pull([np.int32(3)])[0][0, 0])

    assert threads.run(1, one) == [(1.0, 1.0)]


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
        return counts

    for early, late in threads.run(2, one):
        assert late <= early


@pytest.mark.parametrize("per_node", [None, 1])
def test_an_updater_that_fails_half_way_has_changed_nothing(per_node):
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", full(1))
        store.set_updater(half)
        if world.rank:
            store.push("w", full(1))
            with pytest.raises((ZeroDivisionError, HpcdpError), match="by nothing"):
                store.pull("w").wait()
        world.barrier()
        if world.rank == 0:
            assert (store.pull("w")[...] == 1).all() and store.pull("w").version == 0
        world.barrier()

    threads.run(2, one, per_node)


@pytest.mark.parametrize("per_node", [None, 1])
def test_an_updater_that_fails_tells_who_pushed(per_node):
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", full(1))
        store.set_updater(fails)
        if world.rank:
            store.push("w", full(1))
            with pytest.raises((ZeroDivisionError, HpcdpError), match="by nothing"):
                store.pull("w").wait()
        store.set_updater(added)
        if world.rank:
            store.push("w", full(1))
        store.barrier()
        return float(store.pull("w")[0, 0]), store.pull("w").version

    assert threads.run(3, one, per_node) == [(5.0, 2)] * 3


def test_what_is_refused():
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", full(1))
        store.set_optimizer(optim.SGD(lr=0.1))
        for wrong in (full(1, (3, 2)), full(1, dtype="f8"), 1.0):
            with pytest.raises(
                UnsupportedError, match=r"push \[key 'w'\]: expected an array of \(2, 3\) float32, got "
            ):
                store.push("w", wrong)
        store.init("counts", full(1, dtype="i8"))
        with pytest.raises(UnsupportedError, match=r"set_gradient_compression \[key 'counts'\]"):
            store.set_gradient_compression("2bit")

    threads.run(2, one)
    for setting in ({"staleness": -1}, {"staleness": 1.5}, {"replay": True}):
        with pytest.raises(ConfigError, match="expected an integer, 0 or more"):
            kvstore.create("dist_async", **setting)
    with pytest.raises(ConfigError, match=r"\[staleness\]: expected None, or dist_async, got 3 of dist_sync"):
        kvstore.create("dist_sync", staleness=3)

    def differ(world):
        kvstore.create("dist_async", world, staleness=1 + world.rank)

    with pytest.raises(MismatchError, match="staleness=1 replay=None as on rank 0, got dist_async staleness=2"):
        threads.run(2, differ)


def test_nobody_is_dead_among_the_living():
    def one(world):
        store = kvstore.create("dist_async", world)
        for wrong in ("x", -1, 0, True):
            with pytest.raises(
                ConfigError, match=r"num_dead_node \[timeout_s\]: expected a positive number of seconds"
            ):
                store.num_dead_node(wrong)
        return store.num_dead_node(timeout_s=10)

    assert threads.run(4, one, 2) == [0] * 4


def test_the_dead_of_all_nodes_count_once():
    """Four workers on two nodes; what the kernel and the MPI library would tell is put in their place."""

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init(["a", "b"], [full(0), full(0)])
        store.set_optimizer(optim.SGD(lr=1.0))
        table, lost = store._table, store._server.comm.lost
        world.barrier()
        if world.node == 1:
            table.gone = lambda: [3]
        world.barrier()
        found = [store.num_dead_node(10)]
        world.barrier()
        if world.rank < 2:
            lost.add(3)
            found.append(store.num_dead_node(10))
            lost.add(2)  # whom it has asked so far
            found.append(store.num_dead_node(10))
            with pytest.raises(HpcdpError, match=r"\[on rank 2\]: expected an answer, got none: it has died; start"):
                store._transfer._ask_and_wait(2, Message(Kind.GONE, store._number))
        world.barrier()
        lost.clear()
        return found

    assert threads.run(4, one, 2) == [[1, 1, 2]] * 2 + [[1]] * 2


def test_a_large_key_goes_to_all_servers_and_small_ones_to_the_least_loaded():
    place = placement.Placement([4, 5, 6], splits=True)
    assert place.place(10, 4) == [(4, 0, 10)]
    large = place.place(3 << 20, 4)
    assert [part[1:] for part in large] == [(i << 20, i + 1 << 20) for i in range(3)]
    assert {part.server for part in large} == {4, 5, 6}
    for _ in range(20):
        place.place(1000, 4)
    assert max(place.nbytes.values()) - min(place.nbytes.values()) <= 4000
    whole = placement.Placement([0, 1], splits=False)
    assert len(whole.place(3 << 20, 4)) == 1
    assert len(whole.place(3 << 28, 4)) == 6  # so that a message counts its bytes in 32 bits
    assert whole.place(0, 4)[0][1:] == (0, 0)


def test_a_rank_that_dies_in_the_middle_of_an_update_is_named():
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", full(1))
        store.set_updater(added)
        if world.rank == 1:
            store._table.items["w"].cells[0]._numbers[:2] = 1, 1  # as it leaves it when it is killed there
        world.barrier()
        if world.rank == 0:
            with pytest.raises(
                HpcdpError, match=r"\[key 'w'\]: expected a whole value, got one that rank 1 has changed"
            ):
                store.pull("w").wait()
        world.barrier()

    threads.run(2, one)


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
        time.sleep(1.0)
        return (time.process_time() - cpu) / (time.perf_counter() - began)

    assert max(threads.run(2, one, 1)) < 0.25  # of both servers together
