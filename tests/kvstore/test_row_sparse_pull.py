"""Rows of keys: any, in any order, also several times, from all kinds of stores."""

import numpy as np
import pytest
from raises import raises
from small_stores import added, on_one_worker

from hpcdp import kvstore
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError


def test_rows_that_repeat_in_any_order(kind):
    def rows(store):
        values = np.arange(12, dtype="f4").reshape(4, 3)
        store.init("rows", values)
        wanted = np.zeros((4, 3), "f4")
        wanted[[1, 3]] = values[[1, 3]]
        assert (store.row_sparse_pull("rows", row_ids=np.array([3, 1, 3, 3])).wait() == wanted).all()
        out = np.full((4, 3), 5, "f4")
        store.row_sparse_pull("rows", out=out, row_ids=[])
        assert (out == 0).all()
        for wrong in ([4], [-1], [0.5], [[[1]]]):
            with raises(ConfigError, operation="row_sparse_pull", where="row_ids", expected=[0, 3]):
                store.row_sparse_pull("rows", row_ids=wrong)

    on_one_worker(kind, rows)


def test_rows_of_several_keys(kind):
    values = np.arange(12, dtype="f4").reshape(4, 3)

    def one(store):
        store.init([1, 2], [values, values[:, 0].copy()])
        first, second = store.row_sparse_pull([1, 2], row_ids=[[3, 0], np.array([2])])
        assert (np.asarray(first) == values * [[1], [0], [0], [1]]).all()
        assert (np.asarray(second) == values[:, 0] * [0, 0, 1, 0]).all()
        out = [np.empty((4, 3), "f4")]
        assert store.row_sparse_pull(np.int64(1), out=out, row_ids=[1]) is None
        assert (out[0] == values * [[0], [1], [0], [0]]).all()
        several = [np.empty((4, 3), "f4") for _ in range(3)]
        store.row_sparse_pull(1, out=several, row_ids=[2, 0, 2])
        assert all((each == values * [[1], [0], [1], [0]]).all() for each in several)
        store.row_sparse_pull(1, out=several, row_ids=[[1], np.array([3, 0]), [2]])
        for each, rows in zip(several, ([1], [0, 3], [2]), strict=True):
            assert (each[rows] == values[rows]).all() and np.count_nonzero(each.any(axis=1)) == len(rows)
        with raises(ConfigError, operation="row_sparse_pull", where="row_ids", expected=3, got=2):
            store.row_sparse_pull(1, out=several, row_ids=[[1], [2]])
        with raises(ConfigError, operation="row_sparse_pull", where="row_ids", expected=[0, 3], got=None):
            store.row_sparse_pull(1)
        with raises(ConfigError, operation="row_sparse_pull", where="row_ids", expected=["list", 2]):
            store.row_sparse_pull([1, 2], row_ids=[[1]])

    on_one_worker(kind, one)


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

    assert sum(thread_comm.run(ranks, one, per_node)) < ranks * (7 * 1200 + 20 * 64)  # of 40 rows each


def test_a_number_has_no_rows(kind):
    def one(store):
        store.init("w", np.ones((), "f4"))
        with pytest.raises(ConfigError):
            store.row_sparse_pull("w", row_ids=[0])
        return store.row_sparse_pull("w", row_ids=[]).wait().tolist()

    assert on_one_worker(kind, one) == 0.0
