"""Around a ring: where chunks start, in which order they are added up, and what is sent."""

import numpy as np
import pytest
from by_numpy import Recorded, part
from hypothesis import given, settings
from hypothesis import strategies as st
from message_length import set_message_nbytes

from hpcdp.collectives import allgather, allreduce, reduce_scatter, ring
from hpcdp.comm import thread_comm
from hpcdp.comm.communicator import resolve
from hpcdp.comm.progress import LANES, TAGS, run_until_complete

SUM = resolve("allreduce", "sum", np.dtype("f4"))


def recorded(n, call):
    """What every rank sent."""

    def rank(world):
        comm = Recorded(world.comm)
        call(comm)
        return comm.sent

    return thread_comm.run(n, rank)


def uneven(rank, count):
    """Sums of these depend on their order."""
    rng = np.random.default_rng([rank, 3])
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-5, 6, count)).astype("f4")


@pytest.mark.parametrize("n", range(2, 9))
def test_chunk_i_starts_at_position_i(n):
    sent = recorded(n, lambda comm: run_until_complete(ring.allreduce(uneven(comm.rank, 41), SUM, comm, 64)))
    for position in range(n):
        dest, _, first = sent[position][0]
        assert dest == (position + 1) % n
        np.testing.assert_array_equal(first, part(uneven(position, 41), position, n))


@pytest.mark.parametrize("n", range(1, 9))
def test_a_chunk_is_added_up_on_its_way_from_its_position_on(n):
    wanted = np.empty(41, "f4")
    for chunk in range(n):
        total = part(uneven(chunk, 41), chunk, n).copy()
        for step in range(1, n):
            total = total + part(uneven((chunk + step) % n, 41), chunk, n)
        part(wanted, chunk, n)[...] = total
    for x in thread_comm.run(n, lambda world: allreduce(uneven(world.rank, 41), "sum", world, "ring")):
        np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize("segments", [1, 3, 20])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_what_an_allreduce_sends(n, segments, monkeypatch):
    set_message_nbytes(monkeypatch, 4 * 6)
    count = n * 6 * segments
    sent = recorded(n, lambda comm: run_until_complete(ring.allreduce(np.ones(count, "f4"), SUM, comm, 128)))
    for messages in sent:
        assert len(messages) == 2 * (n - 1) * segments
        assert sum(x.nbytes for _, _, x in messages) == 2 * (n - 1) * 4 * count // n
        assert {tag for _, tag, _ in messages} == (set(range(128, 128 + min(segments, LANES))) if n > 1 else set())
        assert LANES <= TAGS


@settings(max_examples=40)
@given(n=st.integers(1, 8), count=st.integers(0, 100), nbytes=st.integers(1, 500))
def test_all_ranks_together_send_the_formula_at_any_count(n, count, nbytes):
    with pytest.MonkeyPatch.context() as patch:
        set_message_nbytes(patch, nbytes)

        def rank(world):
            allreduce(np.ones(count), "sum", world, "ring")
            return world.comm.traffic

        traffic = thread_comm.run(n, rank)
    assert sum(rank.nbytes for rank in traffic) == 2 * (n - 1) * 8 * count
    assert {rank.messages for rank in traffic} == {2 * (n - 1) * max(1, -(-8 * count // (nbytes * n)))}


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_each_half_alone_sends_half(n, monkeypatch):
    def rank(world):
        reduce_scatter(np.ones(n * 10), "sum", world, "ring")
        halfway = world.comm.traffic.nbytes
        messages = world.comm.traffic.messages
        allgather(np.ones(10), world, "ring")
        return messages, halfway, world.comm.traffic.messages, world.comm.traffic.nbytes

    assert thread_comm.run(n, rank) == [(n - 1, 80 * (n - 1), 2 * (n - 1), 160 * (n - 1))] * n


def test_long_parts_go_in_lanes(monkeypatch):
    set_message_nbytes(monkeypatch, 8 * 10)
    sent = recorded(3, lambda comm: run_until_complete(ring.reduce_scatter(np.ones(90), np.empty(30), SUM, comm, 64)))
    for messages in sent:
        assert {tag for _, tag, _ in messages} == {64, 65, 66}
        assert sum(x.nbytes for _, _, x in messages) == 2 * 8 * 30


def test_partial_sums_of_half_precision_travel_in_single():
    def rank(world):
        allreduce(np.ones(40, "f2"), "sum", world, "ring")
        return world.comm.traffic.nbytes

    assert thread_comm.run(4, rank) == [3 * 10 * 4 + 3 * 10 * 2] * 4
