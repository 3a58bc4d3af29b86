"""What is restored to a GPU that is not the current one comes there, behind what that GPU was given; on stand-ins."""

import numpy as np
import pytest

from hpcdp import kvstore, nn, optim
from hpcdp.checkpoint import Manager
from hpcdp.comm import thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.world import Gpu
from hpcdp.core.arrays import gpu, to_host


@pytest.fixture(autouse=True)
def three_gpus(gpus_on_host, monkeypatch):
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(3))
    monkeypatch.setattr(comm_world, "visible", lambda: found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_network(tmp_path, ranks):
    def rank(world):
        gpu(1).use()
        saved, net = (nn.models.mlp(6, 4, seed=seed).to(gpu(2)) for seed in (1, 2))
        with Manager(tmp_path, world=world) as manager:
            manager.save(1, {"net": saved})
            manager.restore(into={"net": net})
        return [[to_host(param.data).copy() for param in each.parameters()] for each in (saved, net)]

    for saved, found in thread_comm.run(ranks, rank):
        for x, y in zip(saved, found, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("by", ["state", "file"])
def test_a_store(tmp_path, by):
    def trained(world, number):
        store = kvstore.create("device", world)
        store.set_optimizer(optim.SGD(lr=0.5, momentum=0.5))
        store.init("key", gpu(2).put(np.full(5, number, np.float32)))
        store.push("key", gpu(2).put(np.full(5, number + 1, np.float32)))
        return store

    def rank(world):
        gpu(1).use()
        saved, store = trained(world, 1), trained(world, 5)
        if by == "state":
            store.load_state_dict(saved.state_dict())
        else:
            saved.save_optimizer_states(str(tmp_path / "states"))
            store.load_optimizer_states(str(tmp_path / "states"))
        found = gpu(2).put(np.zeros(5, np.float32))
        store.push("key", gpu(2).put(np.zeros(5, np.float32)))  # by half of the momentum that was restored, 2
        store.pull("key", found)
        return to_host(found)

    value = 0.0 if by == "state" else 2.0  # 1 - 0.5 * 2 and 5 - 0.5 * 6
    np.testing.assert_array_equal(thread_comm.run(1, rank)[0], np.full(5, value - 0.5 * 0.5 * 2))


@pytest.mark.parametrize("kinds", [("device", "local"), ("local", "device")])
def test_a_store_in_host_memory_and_one_on_a_gpu_take_each_others_state(kinds):
    def trained(kind, number):
        store = kvstore.create(kind)
        store.set_optimizer(optim.SGD(lr=0.5, momentum=0.5))
        store.init("key", gpu(2).put(np.full(5, number, np.float32)))
        store.push("key", gpu(2).put(np.full(5, number + 1, np.float32)))
        return store

    gpu(1).use()
    saved, store = trained(kinds[0], 1), trained(kinds[1], 5)
    store.load_state_dict(saved.state_dict())
    store.push("key", gpu(2).put(np.zeros(5, np.float32)))  # by half of the momentum that was taken, 2
    found = gpu(2).put(np.zeros(5, np.float32))
    store.pull("key", found)
    np.testing.assert_array_equal(to_host(found), np.full(5, 0 - 0.5 * 0.5 * 2))
