"""Pushes and pulls in the calling thread: the same sums as on the lane, with whoever pushes in another way."""

import threading
import time
from functools import cache
from itertools import accumulate

import numpy as np
import pytest
from pairs import pairs

import hpcdp
from hpcdp import kvstore, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import HpcdpError, MismatchError
from hpcdp.kvstore import sync

WORLDS = [(1, None), (2, None), (3, None), (4, None), (5, None), (2, 1), (3, 1), (3, 2), (4, 2), (5, 2)]
"""Ranks, and ranks per node."""


CHUNKS = [sync.CHUNK_NBYTES, 1920]


@pytest.fixture(params=CHUNKS)
def chunks(request, monkeypatch):
    """All in one piece, and in many."""
    monkeypatch.setattr(sync, "CHUNK_NBYTES", request.param)


@cache
def drawn(rank, turn, size):
    return np.random.default_rng([rank, turn]).standard_normal(size) * 100


def pushed(rank, turn, size, dtype):
    return drawn(rank, turn, size).astype(dtype)


def summed(ranks, turn, size, dtype):
    """In the order of the ranks; half precision in single."""
    wide = np.float32 if dtype == "f2" else dtype
    return list(accumulate(pushed(rank, turn, size, dtype).astype(wide) for rank in range(ranks)))[-1].astype(dtype)


def same(got, wanted, ranks, per_node):
    """To the bit where the order of a sum is that of the ranks: on one node, and of two on several."""
    if per_node is None or ranks == 2 or got.dtype.kind == "i":
        assert got.tobytes() == wanted.tobytes()
    else:
        np.testing.assert_allclose(got, wanted, rtol=2e-2 if got.dtype == np.float16 else 1e-4, atol=0.5)


@pytest.mark.parametrize(
    ("layout", "dtype", "chunks"),
    pairs(WORLDS, ["f2", "f4", "f8", "i2", "u2", "i4", "i8"], CHUNKS),
    indirect=["chunks"],
)
def test_pushpull_is_the_sum_of_all_ranks_and_the_value_is_stored(layout, dtype, chunks):
    ranks, per_node = layout
    sizes = [0, 1, 15, 17, 331, 2003]

    def one(world):
        store = kvstore.create("dist_sync", world)
        store.init(sizes, [np.zeros(size, dtype) for size in sizes])
        found = []
        launched = []
        store._of_world.launch = lambda *args: launched.append(args)
        for turn in range(3):
            for size in sizes:
                value = pushed(world.rank, turn, size, dtype)
                if turn == 0:
                    store.pushpull(size, value)
                    out = value
                elif turn == 1:
                    out = np.empty_like(value)
                    store.pushpull(size, value, out)
                    assert value.tobytes() == pushed(world.rank, turn, size, dtype).tobytes()
                else:
                    out = np.zeros(2 * size, dtype)[::2]
                    store.pushpull(size, [value, np.zeros_like(value)], out)
                kept = np.empty_like(value)
                store.pull(size, kept)
                assert kept.tobytes() == np.ascontiguousarray(out).tobytes()
                found.append(np.ascontiguousarray(out))
        assert not launched
        return found

    for found in thread_comm.run(ranks, one, ranks_per_node=per_node):
        for at, got in enumerate(found):
            turn, size = at // len(sizes), sizes[at % len(sizes)]
            same(got, summed(ranks, turn, size, dtype), ranks, per_node)


@pytest.mark.parametrize(
    ("layout", "rule", "chunks"),
    pairs(WORLDS, [None, optim.SGD(lr=0.1), optim.Adam(lr=0.1), "function"], CHUNKS),
    indirect=["chunks"],
)
def test_every_rank_may_push_in_its_own_way(layout, rule, chunks):
    """Some push and pull in one, some push, do something else, and pull; all get the bits of those that only push."""
    ranks, per_node = layout

    def run(world, direct_share):
        store, chosen = kvstore.create("dist_sync", world), np.random.default_rng(world.rank)
        store.init(["a", "b"], [np.ones((31, 37), "f4"), np.ones(5, "f4")])
        if rule == "function":
            store.set_updater(_added)
        elif rule is not None:
            store.set_optimizer(rule)
        found = []
        for turn in range(6):
            for key, shape in (("a", (31, 37)), ("b", (5,))):
                value = pushed(world.rank, turn, shape, "f4")
                if chosen.random() < direct_share:
                    store.pushpull(key, value)
                    found.append(value)
                else:
                    store.push(key, value)
                    time.sleep(chosen.random() * 1e-3)
                    found.append(np.asarray(store.pull(key)))
        return b"".join(each.tobytes() for each in found)

    wanted = thread_comm.run(ranks, lambda world: run(world, 0), ranks_per_node=per_node)[0]
    for share in (0.5, 1):
        assert set(thread_comm.run(ranks, lambda world, s=share: run(world, s), ranks_per_node=per_node)) == {wanted}


def _added(key, received, stored):
    stored += received


@pytest.mark.parametrize(("ranks", "per_node"), [(2, None), (3, None), (2, 1), (4, 2)])
def test_one_key_may_be_under_way_while_another_is_waited_for(ranks, per_node):
    def one(world):
        store = kvstore.create("dist_sync", world)
        store.init(["a", "b"], [np.zeros(9, "f4")] * 2)
        first, second = ("a", "b") if world.rank == 0 else ("b", "a")
        out = np.ones(9, "f4")
        for _ in range(20):
            store.push(first, np.full(9, world.rank + 1, "f4"))
            store.pushpull(second, np.full(9, world.rank + 1, "f4"), out)
        other = np.empty_like(out)
        store.pull(first, other)
        return out[0], other[-1]

    total = ranks * (ranks + 1) / 2
    assert thread_comm.run(ranks, one, ranks_per_node=per_node) == [(total, total)] * ranks


def test_pushes_that_are_under_way_come_first():
    def one(world):
        store, go_on = kvstore.create("dist_sync", world), threading.Event()
        store.init("w", np.zeros(4, "f4"))

        def waits(key, received, stored):
            assert go_on.wait(20)
            stored *= 10
            stored += received

        store.set_updater(waits)
        store.push("w", np.full(4, 1, "f4"))
        store.push("w", np.full(4, 2, "f4"))
        out = np.empty(4, "f4")
        threading.Timer(0.02, go_on.set).start()
        store.pushpull("w", np.full(4, 3, "f4"), out)
        return out[0]

    assert thread_comm.run(2, one) == [246.0] * 2


@pytest.mark.parametrize("by_parts", [True, False])
def test_an_update_that_fails_is_told_to_all_and_until_the_next_push(by_parts):
    class Failing(optim.SGD):
        def update(self, param, grad, state, *, step, scale=1.0):
            if grad.size and grad[0] < 0:  # a value of one cache line belongs to the last rank
                raise ZeroDivisionError
            super().update(param, grad, state, step=step, scale=scale)

    def fails(key, received, stored):
        if received[0] < 0:
            raise ZeroDivisionError

    def one(world):
        store, said, out = kvstore.create("dist_sync", world), [], np.empty(3, "f4")
        store.init("w", np.zeros(3, "f4"))
        store._updater = kvstore.updaters.ByOptimizer(Failing(lr=1)) if by_parts else kvstore.updaters.ByFunction(fails)
        for call in (
            lambda: store.pushpull("w", np.full(3, -1, "f4"), out),
            lambda: store.pull("w", out),
            lambda: store.pushpull("w", np.full(3, 1, "f4"), out),
        ):
            try:
                call()
                said.append("fine")
            except ZeroDivisionError:
                said.append("own")
            except HpcdpError as error:
                said.append(str(error).split("\n")[0])
        return said

    other = f"push [key 'w']: expected an update, got ZeroDivisionError on rank {int(by_parts)}"
    found = thread_comm.run(2, one)
    assert sorted(found) == sorted([["own", "own", "fine"], [other, other, "fine"]])


def test_a_rank_that_has_not_pushed_is_known_to_those_that_wait():
    stores = {}

    def one(world):
        store = stores[world.rank] = kvstore.create("dist_sync", world)
        store.init("w", np.zeros(3, "f4"))
        world.barrier()
        if world.rank == 2:
            deadline = time.monotonic() + 20
            while (call := stores[0]._watchdog.call or [""])[0] != "pushpull of key 'w'" or call[2]() != [2]:
                assert time.monotonic() < deadline
                time.sleep(1e-3)
        store.pushpull("w", np.ones(3, "f4"))
        return True

    assert all(thread_comm.run(3, one))


@pytest.mark.parametrize("in_one", [True, False])
def test_a_learning_rate_that_ranks_set_differently_is_told_to_all(in_one):
    def one(world):
        store, rule, out = kvstore.create("dist_sync", world), optim.SGD(lr=0.1), np.empty(40, "f4")
        store.init("w", np.zeros(40, "f4"))
        store.set_optimizer(rule)
        found = []
        for rate in (0.5, 0.2 if world.rank < 2 else 0.3, 0.5):
            rule.lr = rate
            try:
                if in_one:
                    store.pushpull("w", np.zeros(40, "f4"), out)
                else:
                    store.push("w", np.zeros(40, "f4"))
                    store.pull("w", out)
                found.append("fine")
            except MismatchError as error:
                found.append(str(error).split("\n")[0])
        return found

    said = "push [key 'w']: expected the same learning rate on all ranks, got 0.2 on rank 0, 0.3 on rank 2"
    for found in thread_comm.run(3, one):
        assert found[1].startswith(said)
        assert found[::2] == ["fine"] * 2


def test_arrays_that_overlap_are_read_before_they_are_written():
    def one(world):
        store, values = kvstore.create("dist_sync", world), np.arange(3000, dtype="f4")
        store.init("w", np.zeros(2000, "f4"))
        store.pushpull("w", values[:2000], values[1000:])
        return (values[1000:] == world.size * np.arange(2000)).all()

    assert all(thread_comm.run(3, one))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rule", [None, optim.SGD(lr=0.1)])
def test_who_is_late_reads_the_value_of_its_round_while_others_push_the_next(ranks, rule):
    def one(world):
        store, out, kept = kvstore.create("dist_sync", world), np.empty(2003, "f4"), np.empty(2003, "f4")
        store.init("w", np.zeros(2003, "f4"))
        if rule is not None:
            store.set_optimizer(rule)
        for turn in range(12):
            store.pushpull("w", pushed(world.rank, turn, 2003, "f4"), out)
            if turn % ranks == world.rank:
                time.sleep(2e-3)
            store.pull("w", kept)
            assert kept.tobytes() == out.tobytes()
        return True

    assert all(thread_comm.run(ranks, one))


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
def test_on_real_ranks_in_place_and_to_another_array():
    world = hpcdp.init()
    store = kvstore.create("dist_sync")
    sizes = [1, 1000, 300_000]
    store.init(sizes, [np.zeros(size, "f8") for size in sizes])
    for turn in range(5):
        for size in sizes:
            value, out = pushed(world.rank, turn, size, "f8"), np.empty(size)
            if turn == world.rank:
                store.push(size, value)
                store.pull(size, out)
            else:
                store.pushpull(size, value, out)
            np.testing.assert_allclose(out, summed(world.size, turn, size, "f8"), rtol=1e-10, atol=1e-9)
    store.barrier()


@pytest.mark.parametrize(("ranks", "rule"), pairs([2, 3, 5], [None, optim.SGD(lr=1.0)]))
def test_two_threads_of_a_rank_may_push_different_keys_at_once(ranks, rule):
    size, turns = 2003, 40

    def one(world):
        store = kvstore.create("dist_sync", world)
        store.init(["a", "b"], [np.zeros(size, "f4")] * 2)
        if rule is not None:
            store.set_optimizer(rule)
        wrong = []

        def push(key):
            wanted = np.zeros(size, "f4")
            for turn in range(turns):
                value = pushed(world.rank, turn, size, "f4") * (1 if key == "a" else -2)
                total = summed(ranks, turn, size, "f4") * (1 if key == "a" else -2)
                wanted = total if rule is None else wanted - total
                store.pushpull(key, value)
                if value.tobytes() != wanted.astype("f4").tobytes():
                    wrong.append((key, turn))

        order = ["a", "b"] if world.rank % 2 else ["b", "a"]
        both = [threading.Thread(target=push, args=(key,)) for key in order]
        for each in both:
            each.start()
        for each in both:
            each.join(60)
            assert not each.is_alive()
        return wrong

    assert thread_comm.run(ranks, one) == [[]] * ranks


def test_threads_of_a_rank_push_one_key(monkeypatch):
    """A push is of the round in whose order it takes effect, also where another thread gets between."""

    def one(world):
        store = kvstore.create("dist_sync", world)
        store.init("w", np.zeros(4))
        lane = store._of_world
        launch, first, second = lane.launch, threading.Event(), threading.Event()

        def late(*args):
            if not first.is_set():
                first.set()
                second.wait(30)
            launch(*args)

        monkeypatch.setattr(lane, "launch", late)
        other = threading.Thread(target=store.push, args=("w", np.full(4, 1.0)))
        other.start()
        first.wait(30)
        store.push("w", np.full(4, 2.0))
        value = store.pull("w").wait().tolist()
        second.set()
        other.join(30)
        return value, store.pull("w").wait().tolist()

    assert thread_comm.run(2, one) == [([4.0] * 4, [2.0] * 4)] * 2


def test_calls_of_several_threads_end_for_the_watchdog_too():
    """It would report a call, and in the end the job, that has begun first and ended before the other one."""

    def one(world):
        dog = kvstore.create("dist_sync", world)._watchdog
        first, second = dog.watching("the first"), dog.watching("the second")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        within = dog.call
        second.__exit__(None, None, None)
        return within[0], dog.call

    assert thread_comm.run(1, one) == [("the second", None)]
