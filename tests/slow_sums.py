"""Rank 0's sums in its node's memory late, so that what others write too early is seen."""

import time

import pytest

from hpcdp.data_parallel.cpu_reduction import SharedMemoryReduction


def slow_sums(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[bool]:
    """Whether they are, in a list of one, which a test may change."""
    is_slow, sum_shard = [False], SharedMemoryReduction.sum_shard

    def sum_slowly(reduction, bucket, everywhere=False):
        if is_slow[0] and reduction.memory.rank == 0:
            time.sleep(seconds)
        sum_shard(reduction, bucket, everywhere)

    monkeypatch.setattr(SharedMemoryReduction, "sum_shard", sum_slowly)
    return is_slow
