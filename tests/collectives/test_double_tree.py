"""Two binary trees: complementary for any number of ranks, and each carries half."""

import numpy as np
import pytest
from by_numpy import Recorded
from message_length import set_message_nbytes

from hpcdp.collectives import tree
from hpcdp.comm import thread_comm
from hpcdp.comm.communicator import resolve
from hpcdp.comm.progress import LANES, run_until_complete

SUM = resolve("allreduce", "sum", np.dtype("f4"))


def both(n):
    """The places of all ranks in the first tree, and those in the second."""
    return zip(*(tree.double_trees(rank, n) for rank in range(n)), strict=True)


@pytest.mark.parametrize("n", range(1, 70))
def test_each_is_a_binary_tree_over_all_ranks(n):
    for places in both(n):
        roots = [rank for rank, place in enumerate(places) if place.parent is None]
        assert len(roots) == 1
        reached, depth = {roots[0]}, 0
        level = list(roots)
        while level:
            for rank in level:
                assert len(places[rank].children) <= 2
                for child in places[rank].children:
                    assert places[child].parent == rank
                    assert child not in reached
                    reached.add(child)
            level = [child for rank in level for child in places[rank].children]
            depth += bool(level)
        assert reached == set(range(n))
        assert depth <= n.bit_length()


@pytest.mark.parametrize("n", range(2, 70))
def test_who_is_an_inner_rank_in_one_tree_is_a_leaf_in_the_other(n):
    first, second = both(n)
    inner = [[bool(place.children) for place in places] for places in (first, second)]
    in_both = [rank for rank in range(n) if inner[0][rank] and inner[1][rank]]
    assert in_both == ([0] if n % 2 else [])  # the first root has one child in each where n is odd
    assert all(len(a.children) + len(b.children) <= 2 for a, b in zip(first, second, strict=True))
    assert first.index(next(p for p in first if p.parent is None)) != second.index(
        next(p for p in second if p.parent is None)
    )


def test_the_drawing():
    first, second = both(8)
    assert {rank: place.children for rank, place in enumerate(first) if place.children} == {
        0: (4,), 2: (1, 3), 4: (2, 6), 6: (5, 7),
    }  # fmt: skip
    assert {rank: place.children for rank, place in enumerate(second) if place.children} == {
        7: (3,), 5: (6, 4), 3: (5, 1), 1: (2, 0),
    }  # fmt: skip


@pytest.mark.parametrize("segments", [1, 3, 20])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 8])
def test_what_is_sent(n, segments, monkeypatch):
    set_message_nbytes(monkeypatch, 64)

    def rank(world):
        comm = Recorded(world.comm)
        run_until_complete(tree.double_tree_allreduce(np.ones(2 * 16 * segments, "f4"), SUM, comm, 64))
        return comm

    half = 64 * segments
    for number, comm in enumerate(thread_comm.run(n, rank)):
        links = sum(len(place.children) + (place.parent is not None) for place in tree.double_trees(number, n))
        assert (len(comm.sent), comm.nbytes()) == (links * segments, links * half)
        assert comm.nbytes() <= 2 * 2 * half
        assert {tag for _, tag, _ in comm.sent} <= set(range(64, 64 + 2 * LANES))
