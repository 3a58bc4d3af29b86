"""Recursive halving and doubling: who talks to whom about how much, for any number of ranks."""

import numpy as np
import pytest
from by_numpy import Recorded, data, reduced
from message_length import set_message_nbytes

from hpcdp.collectives import halving_doubling
from hpcdp.comm import thread_comm
from hpcdp.comm.communicator import resolve, split
from hpcdp.comm.progress import LANES, run_until_complete

SUM = resolve("allreduce", "sum", np.dtype("f4"))


def allreduced(n, count, dtype="float32"):
    def rank(world):
        comm, x = Recorded(world.comm), data(world.rank, count, dtype)
        run_until_complete(halving_doubling.allreduce(x, SUM, comm, 64))
        return comm.sent

    return thread_comm.run(n, rank)


def reduce_scattered(n, count):
    def rank(world):
        comm, x = Recorded(world.comm), data(world.rank, count)
        out = np.empty_like(split(x, n)[world.rank])
        run_until_complete(halving_doubling.reduce_scatter(x, out, SUM, comm, 64))
        np.testing.assert_allclose(out, split(reduced(n, count), n)[world.rank], rtol=1e-5, atol=1e-5)
        return comm.sent

    return thread_comm.run(n, rank)


def sizes(sent):
    return len(sent), sum(x.nbytes for _, _, x in sent)


@pytest.mark.parametrize("n", range(1, 18))
def test_what_an_allreduce_sends(n):
    """For S bytes over p ranks, the largest power of two, and n - p pairs."""
    p = max(power for power in (1, 2, 4, 8, 16) if power <= n)
    count = 16 * 6
    nbytes, steps = 4 * count, p.bit_length() - 1
    for rank, sent in enumerate(allreduced(n, count)):
        paired = rank < 2 * (n - p)
        if paired and rank % 2:
            assert sizes(sent) == (2, nbytes)
            continue
        expected = (2 * steps, 2 * (p - 1) * nbytes / p)
        assert sizes(sent) == ((expected[0] + 2, expected[1] + 1.5 * nbytes) if paired else expected)


@pytest.mark.parametrize("n", range(1, 10))
def test_what_a_reduce_scatter_sends(n):
    p = max(power for power in (1, 2, 4, 8) if power <= n)
    count = 840 * 3  # all parts and halves are whole
    nbytes, steps = 4 * count, p.bit_length() - 1
    everything = 0
    for rank, sent in enumerate(reduce_scattered(n, count)):
        paired = rank < 2 * (n - p)
        everything += sizes(sent)[1]
        if paired and rank % 2:
            assert sizes(sent) == (2, nbytes)
        else:
            assert len(sent) == steps + 2 * paired
        if n == p:
            assert sizes(sent)[1] == (p - 1) * nbytes / p
    handed_back = (n - p) * nbytes / n
    assert everything == (p - 1) * nbytes + (n - p) * 1.5 * nbytes + handed_back


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_longest_messages_of_an_allreduce_go_to_the_nearest_rank(n):
    steps = n.bit_length() - 1
    for rank, sent in enumerate(allreduced(n, 64)):
        distances = [dest ^ rank for dest, _, _ in sent]
        assert distances == [1 << i for i in range(steps)] + [1 << i for i in reversed(range(steps))]
        lengths = [x.size for _, _, x in sent]
        assert lengths == [64 >> i + 1 for i in range(steps)] + [64 >> i + 1 for i in reversed(range(steps))]


def test_long_arrays_go_in_segments_of_their_own_tags(monkeypatch):
    set_message_nbytes(monkeypatch, 32)
    for sent in allreduced(4, 16 * 20):
        assert sizes(sent) == (4 * 20, 2 * 3 * 64 * 20 / 4)
        assert {tag for _, tag, _ in sent} == set(range(64, 64 + LANES))
    for sent in reduce_scattered(4, 16 * 20):
        assert sizes(sent) == (2 * 20, 3 * 64 * 20 / 4)
        assert {tag for _, tag, _ in sent} == set(range(64, 64 + LANES))


def test_partial_sums_of_half_precision_travel_in_single():
    for sent in allreduced(4, 40, "float16"):
        assert sizes(sent) == (4, 30 * 4 + 30 * 2)


def test_a_reduce_scatter_leaves_its_input():
    def rank(world):
        x = data(world.rank, 21)
        run_until_complete(
            halving_doubling.reduce_scatter(x, split(np.empty(21, "f4"), 5)[world.rank], SUM, world.comm, 64)
        )
        np.testing.assert_array_equal(x, data(world.rank, 21))

    thread_comm.run(5, rank)
