"""The benchmark of key-value stores: what it reports, and that it sees a wrong sum."""

import pytest

import bench_kvstore as kvstore
from hpcdp import kvstore as kvstore_module
from hpcdp.comm import World, thread_comm


@pytest.mark.parametrize("per_node", [None, 1])
def test_ratios_to_allreduce_on_one_node_and_on_several(per_node: int | None) -> None:
    def each(world: World) -> dict:
        return kvstore.compare(world, kvstore_module.create("dist_sync", world), 1 << 12, iterations=4, warmup=1)

    row = thread_comm.run(2, each, ranks_per_node=per_node)[0]
    assert not any(row["wrong"].values())
    assert row["nbytes"] == 4096
    assert (kvstore.RING in row["ratio"]) == (kvstore.RING in row["median_us"]) == (per_node is not None)
    assert all(ratio > 0 for ratio in (*row["ratio"].values(), row["mpi_ratio"], row["copy_share"]))


def test_a_wrong_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(world: World) -> dict:
        store = kvstore_module.create("dist_sync", world)
        pull = store.pull
        monkeypatch.setattr(store, "pull", lambda key, out: (pull(key, out), out.__setitem__(0, 7)))
        return kvstore.compare(world, store, 64, iterations=4, warmup=1)["wrong"]

    found = thread_comm.run(2, each)[0]
    assert found["push, then pull"] > 0
    assert sum(found.values()) == found["push, then pull"]


@pytest.mark.parametrize(("n", "nbytes"), [(1, 4), (2, 1 << 12), (3, 4 << 20)])
def test_asynchronous_stores_beside_copies(n: int, nbytes: int) -> None:
    rows = thread_comm.run(n, lambda world: kvstore.compare_asynchronous(world, nbytes, iterations=3, warmup=1))
    assert rows[0]["keys"] == (4 if nbytes == 4 << 20 else 8)
    assert [row["wrong"] for row in rows] == [0] * n
    assert set(rows[0]["copy_share"]) == {"push", "pull", "push, then pull", "pushpull"}
    assert min(*rows[0]["copy_share"].values(), *rows[0]["median_us"].values()) > 0


def test_a_lost_push_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(world: World) -> dict:
        found, made = [], kvstore_module.create

        def create(kind: str, world: World) -> kvstore_module.KVStore:
            store = made(kind, world)
            push = store.push
            monkeypatch.setattr(store, "push", lambda key, value: found.append(key) if not found else push(key, value))
            return store

        monkeypatch.setattr(kvstore.kvstore, "create", create)
        return kvstore.compare_asynchronous(world, 64, iterations=2, warmup=0)

    assert thread_comm.run(1, each)[0]["wrong"] == 16
