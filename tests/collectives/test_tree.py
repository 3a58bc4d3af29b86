"""Up and down a binomial tree: its shape, what is sent, and the order in which sums are formed."""

import numpy as np
import pytest
from by_numpy import Recorded, data
from message_length import set_message_nbytes

from hpcdp.collectives import tree
from hpcdp.comm import thread_comm
from hpcdp.comm.communicator import resolve
from hpcdp.comm.progress import run_until_complete

SUM = resolve("allreduce", "sum", np.dtype("f4"))


def sent(n, call):
    """``(messages, bytes)`` of every rank."""

    def rank(world):
        comm = Recorded(world.comm)
        run_until_complete(call(comm))
        return comm

    return [(len(comm.sent), comm.nbytes()) for comm in thread_comm.run(n, rank)]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13, 16, 33])
def test_it_is_a_tree_of_logarithmic_depth(n):
    for root in {0, n // 2, n - 1}:
        places = [tree.binomial(rank, n, root) for rank in range(n)]
        assert places[root].parent is None
        for rank, place in enumerate(places):
            for child in place.children:
                assert places[child].parent == rank
            depth, at = 0, rank
            while (parent := places[at].parent) is not None:
                depth, at = depth + 1, parent
            assert at == root
            assert depth <= (n - 1).bit_length()
        assert len(places[root].children) == (n - 1).bit_length()


def test_the_drawing():
    places = [tree.binomial(number, 8, 0) for number in range(8)]
    assert [place.children for place in places] == [(1, 2, 4), (), (3,), (), (5, 6), (), (7,), ()]
    assert [tree.binomial((number + 3) % 8, 8, 3).parent for number in (1, 2, 4, 6)] == [3, 3, 3, 7]


@pytest.mark.parametrize("segments", [1, 3, 20])
@pytest.mark.parametrize(("n", "root"), [(1, 0), (2, 1), (5, 3), (8, 0), (8, 6)])
def test_what_is_sent(n, root, segments, monkeypatch):
    set_message_nbytes(monkeypatch, 64)
    x, nbytes = np.ones(16 * segments, "f4"), 64 * segments
    children = [len(tree.binomial(rank, n, root).children) for rank in range(n)]
    assert sent(n, lambda comm: tree.broadcast(x.copy(), root, comm, 64)) == [
        (k * segments, k * nbytes) for k in children
    ]
    assert sent(n, lambda comm: tree.reduce(x.copy(), SUM, root, comm, 64)) == [
        (0, 0) if rank == root else (segments, nbytes) for rank in range(n)
    ]
    both = [len(tree.binomial(rank, n, 0).children) + (rank > 0) for rank in range(n)]
    assert sent(n, lambda comm: tree.allreduce(x.copy(), SUM, comm, 64)) == [(k * segments, k * nbytes) for k in both]


def test_partial_sums_of_half_precision_go_up_in_single_and_results_come_down_in_half():
    assert sent(4, lambda comm: tree.allreduce(np.ones(10, "f2"), SUM, comm, 64)) == [
        (2, 2 * 20), (1, 40), (2, 40 + 20), (1, 40),
    ]  # fmt: skip


def test_every_rank_adds_its_children_s_sums_nearest_first():
    def uneven(rank):
        return data(rank, 50) * np.float32(10.0) ** np.random.default_rng(rank).integers(-5, 6, 50).astype("f4")

    def total(number):
        result = uneven(number)
        for child in tree.binomial(number, 7, 0).children:
            result = result + total(child)
        return result

    def rank(world):
        x = uneven(world.rank)
        run_until_complete(tree.allreduce(x, SUM, world.comm, 64))
        return x

    for x in thread_comm.run(7, rank):
        np.testing.assert_array_equal(x, total(0))
