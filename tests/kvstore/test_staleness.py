"""Bounded delay: who leads by too much waits; and seeded schedules that can be had again."""

import threading
import time

import numpy as np
import pytest
from pairs import pairs
from raises import raises

import hpcdp
from hpcdp import kvstore, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError
from hpcdp.kvstore import server_keys
from hpcdp.kvstore.asynchronous import Replay
from hpcdp.kvstore.serve import serve

WORLDS = [
    *((False, *each) for each in ((2, None, 0), (3, None, 0), (2, 1, 1))),  # there is nothing to cut keys over
    *((split, *each) for split in (False, True) for each in ((3, 1, 0), (4, 2, 0), (3, 2, 2))),
]
"""Whether keys are cut, ranks, ranks per node, and servers."""


counts = np.zeros(0, int)
leads: list[int] = []


def notes(key, received, stored):
    """A server finds it by its name, so what it notes is global."""
    who = int(received[0])
    if who >= 0:  # the first part
        leads.append(counts[who] - counts.min())
        counts[who] += 1


@pytest.mark.each_value
@pytest.mark.parametrize(("split", "ranks", "per_node", "num_servers"), WORLDS, indirect=["split"])
@pytest.mark.parametrize("staleness", [1, 3])
def test_nobody_leads_by_more(ranks, per_node, num_servers, staleness, split):
    """A worker's push number c takes effect when all have pushed c - 1 - staleness times, at least."""
    global counts
    counts = np.zeros(ranks, int)
    leads.clear()

    def one(world):
        store = kvstore.create("dist_async", world, staleness=staleness)
        store.init("w", np.zeros(4, np.int64))
        store.set_updater(notes)
        for _ in range(12):
            if world.rank == ranks - 1:
                time.sleep(3e-3)
            store.push("w", np.array([world.rank, -1, -1, -1]))
        store.barrier()

    thread_comm.run(ranks, one, per_node, num_servers, serve)
    assert len(leads) == 12 * ranks
    assert max(leads) <= staleness + 1  # a push of the slowest may be allowed and not have taken effect


@pytest.mark.parametrize(("split", "ranks", "per_node", "num_servers"), WORLDS, indirect=["split"])
def test_uneven_numbers_of_pushes_hang_nobody(ranks, per_node, num_servers, split):
    def one(world):
        store = kvstore.create("dist_async", world, staleness=1)
        store.init("w", np.zeros(4))
        store.set_optimizer(optim.SGD(lr=1.0))
        for epoch in range(3):
            for _ in range(2 + 5 * ((world.rank + epoch) % ranks)):
                store.push("w", np.full(4, -1.0))
            store.barrier()
        for _ in range(7 * world.rank):  # and the last ones after others have gone
            store.push("w", np.full(4, -1.0))
        store.wait()
        return None

    thread_comm.run(ranks, one, per_node, num_servers, serve)


def test_none_is_without_bound_and_0_is_dist_sync():
    def one(world, staleness):
        store = kvstore.create("dist_async", world, staleness=staleness)
        store.init("w", np.zeros(3, "f4"))
        store.set_optimizer(optim.SGD(lr=0.1, momentum=0.9))
        for step in range(4):
            store.push("w", np.full(3, world.rank + step, "f4"))
            value = np.asarray(store.pull("w"))
        return store.kind, value

    def sync(world):
        store = kvstore.create("dist_sync", world)
        store.init("w", np.zeros(3, "f4"))
        store.set_optimizer(optim.SGD(lr=0.1, momentum=0.9))
        for step in range(4):
            store.push("w", np.full(3, world.rank + step, "f4"))
            value = np.asarray(store.pull("w"))
        return store.kind, value

    for per_node in (None, 1):
        for (kind, found), (wanted_kind, wanted) in zip(
            thread_comm.run(3, lambda world: one(world, 0), per_node), thread_comm.run(3, sync, per_node), strict=True
        ):
            assert kind == wanted_kind == "dist_sync"
            assert found.tobytes() == wanted.tobytes()

    def runs_ahead(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(3, "f4"))
        store.set_optimizer(optim.SGD(lr=0.1))
        if world.rank == 0:
            for _ in range(20):
                store.pushpull("w", np.ones(3, "f4"), np.empty(3, "f4"))
        world.barrier()

    thread_comm.run(2, runs_ahead, 1)


@pytest.mark.parametrize(("ranks", "per_node", "num_servers"), [(2, None, 0), (2, 1, 0), (2, None, 1), (3, 1, 2)])
@pytest.mark.thorough
def test_who_holds_others_back_is_named(ranks, per_node, num_servers, split, monkeypatch, capfd):
    monkeypatch.setattr(server_keys, "REPORTED_S", 0.05)

    def one(world):
        store = kvstore.create("dist_async", world, staleness=1)
        store.init("w", np.zeros(3))
        store.set_optimizer(optim.SGD(lr=0.1))
        store.push("w", np.ones(3))  # may compile
        store.barrier()
        for _ in range(3):
            if world.rank == 1:
                time.sleep(0.5)
            store.push("w", np.ones(3))
        store.barrier()
        return store.statistics()["waited_s"]

    waited = thread_comm.run(ranks, one, per_node, num_servers, serve)
    assert waited[1] < 0.1 < waited[0]
    said = capfd.readouterr().err
    assert f"rank 0 of {ranks}: key 'w': waits for rank 1, more than 1 pushes behind (staleness=1)" in said


@pytest.mark.parametrize(
    ("split", "ranks", "per_node"),
    [
        *((False, n, None) for n in (1, 2, 3)),
        (True, 3, 1),
        (False, 4, 2),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((False, 3, 1), (True, 4, 2))),
    ],
    indirect=["split"],
)
def test_a_seed_replays_a_run_to_the_bit(ranks, per_node, split):
    def trained(world, seed):
        store = kvstore.create("dist_async", world, replay=seed, staleness=2)
        store.init(["w", "v"], [np.ones(5, "f4"), np.ones(3, "f4")])
        store.set_optimizer(optim.SGD(lr=0.1, momentum=0.9))
        rng, found = np.random.default_rng(world.rank), []
        for _ in range(2):
            for _ in range(4 + world.rank):
                weight = np.asarray(store.pull("w"))
                found.append(weight.tobytes())
                store.push("w", weight * rng.random(5).astype("f4"))
                store.pushpull("v", rng.random(3).astype("f4"), np.empty(3, "f4"))
            store.barrier()
        return found, np.asarray(store.pull("v")).tobytes()

    def run(seed):
        return thread_comm.run(ranks, lambda world: trained(world, seed), per_node)

    first = run(5)
    assert run(5) == first
    if ranks > 1:
        assert any(run(seed) != first for seed in range(4))


def test_replay_is_for_thread_ranks():
    with raises(ConfigError, operation="kvstore", where="replay"):
        kvstore.create("dist_async", replay=1)


MEETINGS = {
    "allreduce": lambda world, store, rule: hpcdp.allreduce(np.ones(3), world=world),
    "barrier": lambda world, store, rule: world.barrier(),
    "optimizer": lambda world, store, rule: store.set_optimizer(rule),
    "updater": lambda world, store, rule: store.set_updater(added),
    "compression": lambda world, store, rule: store.set_gradient_compression("fp16"),
    "init": lambda world, store, rule: store.init("v", np.zeros(3)),
    "assign": lambda world, store, rule: store.assign("w", np.zeros(4)),
}


def added(key, received, stored):
    stored += received


@pytest.mark.parametrize(
    ("meet", "layout", "waits"), pairs(MEETINGS, [(2, None, 0), (3, 1, 0), (3, 2, 2)], [False, True])
)
def test_who_waits_for_all_others_holds_none_back(layout, waits, meet):
    """Uneven numbers of pushes or, where they wait, pushpulls, and then a call of all ranks."""
    ranks, per_node, num_servers = layout

    def one(world):
        store, rule = kvstore.create("dist_async", world, staleness=1), optim.SGD(lr=1.0)
        store.init("w", np.zeros(4))
        store.set_optimizer(rule)
        for _ in range(3 if world.rank == 0 else 9):
            if waits:
                store.pushpull("w", np.full(4, -1.0), np.empty(4))
            else:
                store.push("w", np.full(4, -1.0))
        MEETINGS[meet](world, store, rule)
        store.push("w", np.full(4, -1.0))
        store.barrier()

    thread_comm.run(ranks, one, per_node, num_servers, serve)


def test_a_bound_goes_on_behind_a_call_of_all_ranks():
    def one(world):
        store = kvstore.create("dist_async", world, staleness=1)
        store.init("w", np.zeros(4))
        store.set_optimizer(optim.SGD(lr=1.0))
        store.push("w", np.ones(4))  # may compile
        for _ in range(3):
            hpcdp.allreduce(np.ones(3), world=world)
            if world.rank == 1:
                time.sleep(0.2)
            for _ in range(4):
                store.push("w", np.ones(4))
        return store.statistics()["waited_s"]

    waited = thread_comm.run(2, one)
    assert waited[0] > 0.1 > waited[1]


@pytest.mark.parametrize("meet", ["allreduce", "barrier"])
def test_a_replay_goes_on_where_ranks_meet(meet):
    def one(world):
        store = kvstore.create("dist_async", world, replay=3)
        store.init("w", np.zeros(4))
        store.set_optimizer(optim.SGD(lr=1.0))
        for turn in range(4):
            for _ in range(world.rank + turn):
                store.push("w", np.full(4, -1.0))
            MEETINGS[meet](world, store, None)
        store.barrier()
        return float(store.pull("w")[0])

    assert thread_comm.run(3, one) == [4 * 3 + 3 * 6] * 3


def test_a_call_of_all_ranks_that_fails_leaves_no_worker_out_of_a_replay():
    def one(world):
        store = kvstore.create("dist_async", world, replay=3)
        with pytest.raises(KeyError), world.meeting():
            raise KeyError
        world.comm.barrier()
        assert not world.kept[Replay]._away
        world.comm.barrier()
        store.barrier()

    thread_comm.run(2, one)


@pytest.mark.parametrize("settings", [{"staleness": 1}, {"replay": 3}])
def test_a_store_that_is_gone_on_all_ranks_costs_calls_of_all_ranks_nothing(settings):
    def one(world):
        stores = [kvstore.create("dist_async", world, **settings)]

        def exchanges():
            before = world.comm._meetings
            world.barrier()
            return world.comm._meetings - before

        counts = [exchanges()]
        for holds_longer in (1, 0):
            if world.rank != holds_longer:
                stores.clear()
            counts += [exchanges(), exchanges()]
        stores.append(kvstore.create("dist_async", world, **settings))
        return [*counts, exchanges()]

    assert thread_comm.run(2, one) == [[2, 2, 2, 2, 0, 2]] * 2


def slowly(key, received, stored):
    time.sleep(0.02)
    stored += received


@pytest.mark.parametrize("per_node", [None, 1])
def test_who_drops_a_store_with_pushes_under_way_holds_nobody_back(per_node):
    gone = threading.Event()

    def one(world):
        store = kvstore.create("dist_async", world, staleness=1)
        store.init(["a", "b"], [np.zeros(4)] * 2)
        store.set_updater(slowly)
        for _ in range(3 if world.rank else 12):
            for key in ("a", "b"):
                store.push(key, np.ones(4))
        if world.rank:
            del store
            return gone.wait(30)
        store.wait()
        gone.set()
        return [store.pull(key).wait().tolist() for key in ("a", "b")]

    assert thread_comm.run(2, one, per_node) == [[[15.0] * 4] * 2, True]
