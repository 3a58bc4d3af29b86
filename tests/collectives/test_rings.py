"""Several rings at once: the bytes on each, and orders and weights that cannot be."""

import numpy as np
import pytest
from by_numpy import Recorded, assert_close, assert_same_bits, data, reduced
from hypothesis import given, settings
from hypothesis import strategies as st
from message_length import set_message_nbytes
from raises import raises

from hpcdp.collectives import ring
from hpcdp.comm import thread_comm
from hpcdp.comm.communicator import resolve
from hpcdp.comm.progress import run_until_complete
from hpcdp.errors import UnsupportedError

SUM = resolve("allreduce", "sum", np.dtype("f4"))
EIGHT = [[node - 1 for node in order] for order in ([1, 2, 3, 4, 5, 6, 7, 8], [1, 4, 6, 3, 5, 8, 2, 7])]


def over(n, count, orders, weights=None):
    def rank(world):
        comm, x = Recorded(world.comm), data(world.rank, count)
        run_until_complete(ring.multi_ring_allreduce(x, SUM, comm, 64, orders, weights))
        return x, comm

    return thread_comm.run(n, rank)


def after(order, rank):
    return order[(order.index(rank) + 1) % len(order)]


@pytest.mark.parametrize("weights", [None, (3, 1), (0.25, 0.75), (1, 0)])
@pytest.mark.parametrize("message_nbytes", [1 << 17, 64])
def test_two_rings_over_eight_carry_their_shares(weights, message_nbytes, monkeypatch):
    set_message_nbytes(monkeypatch, message_nbytes)
    count = 8 * 8 * 64
    first, second = (1, 1) if weights is None else weights
    results = over(8, count, EIGHT, weights)
    for rank, (x, comm) in enumerate(results):
        assert_close(x, reduced(8, count), 8, "sum")
        neighbors = [after(order, rank) for order in EIGHT]
        assert len(set(neighbors)) == 2  # the rings share no link
        for neighbor, weight in zip(neighbors, (first, second), strict=True):
            share = weight / (first + second)
            assert comm.nbytes(neighbor) == 2 * 7 * share * 4 * count / 8
        assert comm.nbytes() == 2 * 7 * 4 * count / 8
    assert_same_bits([x for x, _ in results])


def test_links_of_the_two_rings_are_disjoint_in_both_directions():
    links = [{frozenset((rank, after(order, rank))) for rank in range(8)} for order in EIGHT]
    assert len(links[0] | links[1]) == 16


@settings(max_examples=40)
@given(
    n=st.integers(1, 8),
    count=st.integers(0, 200),
    nbytes=st.sampled_from([64, 1 << 20]),
    draw=st.data(),
)
def test_any_orders_and_weights(n, count, nbytes, draw):
    orders = draw.draw(st.lists(st.permutations(range(n)), min_size=1, max_size=4))
    weights = draw.draw(st.lists(st.integers(0, 9), min_size=len(orders), max_size=len(orders)).filter(any))
    with pytest.MonkeyPatch.context() as patch:
        set_message_nbytes(patch, nbytes)
        results = over(n, count, orders, weights)
    for x, _ in results:
        assert_close(x, reduced(n, count), n, "sum")
    assert_same_bits([x for x, _ in results])
    assert sum(comm.nbytes() for _, comm in results) == 2 * (n - 1) * 4 * count


@pytest.mark.parametrize("n", [2, 3, 6])
def test_both_ways_sends_half_to_either_side(n):
    def rank(world):
        comm = Recorded(world.comm)
        run_until_complete(ring.bidirectional_allreduce(np.ones(n * 8, "f4"), SUM, comm, 64))
        return comm

    for number, comm in enumerate(thread_comm.run(n, rank)):
        if n > 2:
            assert comm.nbytes((number + 1) % n) == comm.nbytes((number - 1) % n) == 2 * (n - 1) * 4 * 8 / 2
        assert len(comm.sent) == 2 * 2 * (n - 1)


@pytest.mark.parametrize(
    ("orders", "weights", "fields"),
    [
        ([[0, 1, 1]], None, {"where": "orders", "expected": [0, 2], "got": "[0, 1, 1]"}),
        ([[0, 1]], None, {"where": "orders", "got": "[0, 1]"}),
        ([[0, 1, 2], [0, 1, 3]], None, {"where": "orders", "got": "[0, 1, 3]"}),
        ([], None, {"where": "weights", "expected": [1, 64]}),
        ([[0, 1, 2]], (1, 2), {"where": "weights", "got": ["[1.0, 2.0]", 1]}),
        ([[0, 1, 2], [2, 1, 0]], (1, -1), {"where": "weights"}),
        ([[0, 1, 2], [2, 1, 0]], (0, 0), {"where": "weights"}),
        ([[0, 1, 2], [2, 1, 0]], (1, float("nan")), {"where": "weights"}),
        ([[0, 1, 2], [2, 1, 0]], (1, float("inf")), {"where": "weights"}),
    ],
)
def test_orders_and_weights_that_cannot_be(orders, weights, fields):
    with raises(UnsupportedError, operation="allreduce", **fields):
        over(3, 10, orders, weights)
