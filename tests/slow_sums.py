"""Rank 0's sums in its node's memory late, so that what others write too early is seen."""

import time

import pytest

from hpcdp.data_parallel import Reducer


def slow_sums(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[bool]:
    """Whether they are, in a list of one, which a test may change."""
    is_slow, sum_shard = [False], Reducer.sum_shard

    def sum_slowly(reducer, bucket, row=None):
        if is_slow[0] and reducer.world.rank == 0:
            time.sleep(seconds)
        sum_shard(reducer, bucket, row)

    monkeypatch.setattr(Reducer, "sum_shard", sum_slowly)
    return is_slow
