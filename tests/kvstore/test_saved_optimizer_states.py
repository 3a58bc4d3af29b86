"""States of optimizers in a file: another number of ranks goes on from them, and any kind of store."""

import numpy as np
import pytest
from raises import raises
from small_stores import full

from hpcdp import kvstore, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import HpcdpError

SIZES = [((3, 2), (2, None)), ((1, None), (4, 2)), ((2, 1), (3, 1))]
"""Ranks, and ranks per node, that save, and that load."""


def local(*keys):
    """A store of one process with some of the keys."""
    store = kvstore.create("local")
    for key in keys:
        store.init(key, full(1, (33, 7)) if key == "w" else full(0))
    store.set_optimizer(optim.Adam(lr=0.1))
    return store


@pytest.mark.parametrize(
    ("kind", "saved", "loaded", "split"),
    [
        *(("dist_sync", *sizes, False) for sizes in SIZES),
        *(("dist_async", *sizes, split) for sizes in SIZES for split in (False, True)),
    ],
    indirect=["split"],
)
def test_states_go_on_with_another_number_of_ranks(kind, saved, loaded, split, tmp_path):
    path = str(tmp_path / "states.npz")
    gradient = np.random.default_rng(1).standard_normal((33, 7)).astype("f4")

    def some(world, steps, value=None):
        store = kvstore.create(kind, world)
        store.init("w", full(1, (33, 7)) if value is None else value)
        store.init("never", full(0))
        store.set_optimizer(optim.Adam(lr=0.1))
        if value is not None:
            store.load_optimizer_states(path)
        for _ in range(steps):
            if kind == "dist_sync":
                store.push("w", gradient / world.size)
            elif world.rank == world.size - 1:
                store.push("w", gradient)
        store.save_optimizer_states(path)
        return store.pull("w").wait()

    wanted = thread_comm.run(1, lambda world: some(world, 5))[0]
    value = thread_comm.run(saved[0], lambda world: some(world, 2), ranks_per_node=saved[1])[0]
    for found in thread_comm.run(loaded[0], lambda world: some(world, 3, value), ranks_per_node=loaded[1]):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    local("w", "never").load_optimizer_states(path)  # of any kind of store
    with raises(HpcdpError, operation="load_optimizer_states", where=path):
        local("never").load_optimizer_states(path)


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

    thread_comm.run(1, lambda world: one(world, saved_by, False))
    assert thread_comm.run(1, lambda world: one(world, kind, True)) == [
        [1.5, 1.0]
    ]  # with the momentum of one push, or none
