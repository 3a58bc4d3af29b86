"""Sums that stay compressed on the wire: what is sent, what is kept, the same bits everywhere."""

import numpy as np
import pytest
from pairs import pairs

from hpcdp import compression
from hpcdp.comm import thread_comm
from hpcdp.comm.communicator import split
from hpcdp.comm.progress import run_until_complete
from hpcdp.compression import BFloat16, ErrorFeedback, Float16, OneBit, TopK, TwoBit
from hpcdp.core.arrays import dtype_of

F4 = np.dtype("f4")
CODECS = [Float16(), BFloat16(), TwoBit(), TwoBit(0.5), OneBit(), TopK(0.1)]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)


def gradient(rank, step, count):
    return np.random.default_rng([rank, step, count]).standard_normal(count).astype("f4") + np.float32(0.1)


def steps(n, codec, count, number, dtype="f4"):
    """For every rank: the sums of so many steps, what it still keeps, and what it sent."""

    def rank(world):
        feedback = ErrorFeedback(codec, count, dtype_of(dtype), share=1)
        sums = []
        before = world.comm.traffic.messages, world.comm.traffic.nbytes
        for step in range(number):
            x = gradient(world.rank, step, count).astype(dtype_of(dtype))
            run_until_complete(compression.compressed_allreduce(x, feedback, world.comm, 64 * (1 + step % 3)))
            sums.append(x)
        after = world.comm.traffic.messages, world.comm.traffic.nbytes
        return sums, feedback.residual, [b - a for a, b in zip(before, after, strict=True)]

    return thread_comm.run(n, rank)


@pytest.mark.parametrize(("n", "codec", "count"), pairs(range(1, 9), CODECS, [0, 1, 7, 8, 9, 997]))
def test_the_same_bits_on_all_ranks_and_nothing_lost(n, codec, count):
    found = steps(n, codec, count, 4)
    for sums, _, _ in found:
        for mine, first in zip(sums, found[0][0], strict=True):
            np.testing.assert_array_equal(mine, first)
    given = sum(gradient(rank, step, count).astype("f8") for rank in range(n) for step in range(4))
    arrived = np.sum(found[0][0], axis=0, dtype="f8")
    kept = np.sum([residual for _, residual, _ in found], axis=0, dtype="f8")
    np.testing.assert_allclose(arrived + kept, given, atol=1e-4)


@each_codec
@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("message", [64, 60 << 10])
def test_what_is_sent(n, codec, message, monkeypatch):
    monkeypatch.setattr(compression, "MESSAGE_NBYTES", message)
    count = 5003
    found = steps(n, codec, count, 1)
    assert sum(nbytes for _, _, (_, nbytes) in found) == compression.sent_nbytes(count, F4, codec, n)
    messages = {sent for _, _, (sent, _) in found}
    assert len(messages) == 1
    assert messages.pop() % (2 * (n - 1)) == 0
    if message > count:
        parts = [part.size for part in split(np.empty(count, "f4"), n)]
        assert compression.sent_nbytes(count, F4, codec, n) == 2 * (n - 1) * sum(codec.nbytes(p, F4) for p in parts)


def test_segments_change_no_more_than_rounding(monkeypatch):
    whole = steps(3, Float16(), 5003, 2)
    monkeypatch.setattr(compression, "MESSAGE_NBYTES", 100)
    for (one, _, _), (many, _, _) in zip(whole, steps(3, Float16(), 5003, 2), strict=True):
        np.testing.assert_allclose(one, many, atol=1e-2)


@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f8"])
@pytest.mark.parametrize("n", [2, 3])
def test_other_dtypes(n, dtype):
    found = steps(n, TwoBit(), 500, 6, dtype)
    kind, error = dtype_of(dtype), {"f2": 0.2, "bfloat16": 1.6}
    given = sum(gradient(rank, step, 500).astype(kind).astype("f8") for rank in range(n) for step in range(6))
    arrived = sum(each.astype("f8") for each in found[0][0])
    kept = sum(residual.astype("f8") for _, residual, _ in found)
    np.testing.assert_allclose(arrived + kept, given, atol=error.get(dtype, 1e-9 + 1e-5 * abs(given).max()))


def test_a_nan_of_one_rank_arrives_everywhere_and_is_gone_in_the_next_step():
    def rank(world):
        feedback = ErrorFeedback(TwoBit(), 100, F4)
        sums = []
        for step in range(2):
            x = gradient(world.rank, step, 100)
            if step == 0 and world.rank == 1:
                x[90] = np.nan
            run_until_complete(compression.compressed_allreduce(x, feedback, world.comm, 64))
            sums.append(x)
        return sums

    for first, second in thread_comm.run(3, rank):
        assert np.isnan(first[90])
        assert np.isfinite(second).all()


@each_codec
@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f4", "f8"])
@pytest.mark.parametrize("large", ["largest", "infinite"])
def test_what_overflows_is_no_error_of_the_rank_that_adds(codec, dtype, large):
    kind = dtype_of(dtype)
    largest = np.nextafter(kind.type(np.inf), kind.type(0))

    def rank(world):
        feedback = ErrorFeedback(codec, 1000, kind)
        for _ in range(2):
            x = np.ones(1000, kind)
            x[::7] = largest if large == "largest" else np.inf * (-1) ** world.rank
            with np.errstate(over="raise", invalid="raise"):
                run_until_complete(compression.compressed_allreduce(x, feedback, world.comm, 0))
        return x.tobytes()

    assert len(set(thread_comm.run(2, rank))) == 1


@pytest.mark.parametrize("n", [2, 3, 5])
def test_fixed_thresholds_follow_the_sequence_of_the_store_summed_over_ranks(n):
    """0.4, 0.1, 0.2 and 0.3 add n times 0.5 twice (PARITY), 0.4 again and again all of it."""

    def rank(world):
        feedback, sums = ErrorFeedback(TwoBit(0.5), 40, F4), []
        for value in (0.4, 0.1, 0.2, 0.3, *[0.4] * 100):
            x = np.full(40, value, "f4")
            run_until_complete(compression.compressed_allreduce(x, feedback, world.comm, 64))
            sums.append(x[0])
        return sums

    for sums in thread_comm.run(n, rank):
        # The owner adds its own part as it is, and sends the sum when it reaches n times the threshold.
        assert sums[3] + sums[2] + sums[1] + sums[0] == pytest.approx(n, abs=0.5 * n)
        assert sum(sums[4:]) == pytest.approx(40 * n, abs=n)
        assert set(sums) <= {0.0, 0.5 * n}
