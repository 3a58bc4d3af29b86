from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdp.data_parallel.overlap import BucketCost, BucketTimes, critical_path, mirrored_need, reduction_seconds


def simulated_step(forward: int, backward: int, between: int, buckets: list[BucketCost], order) -> int:
    """Play a step second by second: a network that serves the first of ``order`` that is ready, then the forward."""
    left = {b.number: b.reduction_s for b in buckets}
    usable = {b.number: b.ready_s + b.update_s for b in buckets if not b.reduction_s}
    now = 0
    while any(left.values()):
        ready = [b for b in order if b.ready_s <= now and left[b.number]]
        now += 1
        if ready:
            left[ready[0].number] -= 1
            if not left[ready[0].number]:
                usable[ready[0].number] = now + ready[0].update_s
    now, passed = backward + between, 0
    for bucket in sorted(buckets, key=lambda b: b.needed_s):
        now += bucket.needed_s - passed
        passed = bucket.needed_s
        now = max(now, usable[bucket.number])
    return now + forward - passed


@st.composite
def steps(draw):
    forward, backward = draw(st.integers(0, 6)), draw(st.integers(0, 8))
    buckets = [
        BucketCost(
            number,
            draw(st.integers(0, backward)),
            draw(st.integers(0, 4)),
            draw(st.integers(0, forward)),
            draw(st.integers(0, 2)),
        )
        for number in range(draw(st.integers(0, 4)))
    ]
    return forward, backward, draw(st.integers(0, 3)), buckets


@given(steps())
def test_it_is_the_best_of_all_schedules_that_are_played(step):
    forward, backward, between, buckets = step
    best = min(simulated_step(forward, backward, between, buckets, order) for order in permutations(buckets))
    path = critical_path(forward, backward, buckets, between)
    assert path.seconds == best
    on_it = [bucket for bucket in buckets if bucket.number in path.buckets]
    if on_it:  # its own times add up to it
        rest = min(b.update_s + forward - b.needed_s for b in on_it)
        assert min(b.ready_s for b in on_it) + sum(b.reduction_s for b in on_it) + rest == best
    else:
        assert best == forward + backward + between


def test_which_buckets_it_runs_through():
    # forward 10, backward 20: bucket 0 is the last layers', 1 the first ones'
    hidden = [BucketCost(0, 8.0, 5.0, 6.0), BucketCost(1, 20.0, 0.0, 0.0)]
    assert critical_path(10.0, 20.0, hidden) == (30.0, ())
    assert str(critical_path(10.0, 20.0, hidden)) == "computation"
    last = [BucketCost(0, 8.0, 5.0, 6.0), BucketCost(1, 20.0, 3.0, 0.0)]
    assert critical_path(10.0, 20.0, last) == (33.0, (1,))
    assert str(critical_path(10.0, 20.0, last)) == "bucket 1"
    # Bucket 0 keeps the network busy when 1 is ready, but is not needed before 6: it gives way and is not on the path
    behind = [BucketCost(0, 8.0, 14.0, 6.0), BucketCost(1, 20.0, 3.0, 0.0)]
    assert critical_path(10.0, 20.0, behind) == (33.0, (1,))
    both = [BucketCost(0, 8.0, 24.0, 6.0), BucketCost(1, 20.0, 3.0, 0.0)]
    assert critical_path(10.0, 20.0, both) == (39.0, (0, 1))
    assert str(critical_path(1.0, 1.0, [BucketCost(n, 0.0, 1.0, 1.0) for n in range(6)])) == (
        "buckets 0, 1, 2, 3 and 2 more"
    )


def test_an_update_and_what_lies_between_count():
    bucket = BucketCost(0, 4.0, 1.0, 0.0, update_s=2.0)
    assert critical_path(3.0, 4.0, [bucket]).seconds == 4 + 1 + 2 + 3
    assert critical_path(3.0, 4.0, [bucket], between_s=5.0) == (12.0, ())


def second(times: list[tuple[int, int]]) -> list[BucketTimes]:
    return [BucketTimes(n, 1, 0, start * 10**9, end * 10**9) for n, (start, end) in enumerate(times)]


def test_time_that_reductions_share_is_divided():
    assert reduction_seconds([]) == []
    assert reduction_seconds(second([(0, 10), (4, 5)])) == pytest.approx([9.5, 0.5])
    assert reduction_seconds(second([(0, 2), (2, 5), (7, 8)])) == pytest.approx([2, 3, 1])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple), max_size=5))
def test_shared_times_against_a_walk_over_all_seconds(spans):
    expected = [Fraction(0)] * len(spans)
    for moment in range(20):
        busy = [n for n, (start, end) in enumerate(spans) if start <= moment < end]
        for n in busy:
            expected[n] += Fraction(1, len(busy))
    assert reduction_seconds(second(spans)) == pytest.approx([float(x) for x in expected])


def test_forward_needs_first_what_backward_has_ready_last():
    assert [mirrored_need(ready, 6.0, 12.0) for ready in (0.0, 3.0, 12.0, 13.0)] == [6.0, 4.5, 0.0, 0.0]
    assert mirrored_need(0.0, 6.0, 0.0) == 0.0
