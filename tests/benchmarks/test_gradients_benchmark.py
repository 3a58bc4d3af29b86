"""Reduce and update by every candidate gives the parameters of plain SGD, and the check can fail."""

import numpy as np
import pytest

import bench_gradients as gradients
from bench_floor import Floor
from hpcdp.bench.measure import FreshData, MeasuringSchedule, alternate
from hpcdp.comm import World, thread_comm


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_candidates_update_right(ranks: int) -> None:
    def each(world: World) -> dict:
        return gradients.compare_updates(world, Floor(world, 4), None, 300_000, 4, 1)

    row = thread_comm.run(ranks, each)[0]
    assert row["wrong"] == dict.fromkeys([gradients.OURS, "owners of shards", "every rank", "MPI, fused SGD"], 0)
    assert row["ratio"] > 0


def test_allreduced_gradients_are_right() -> None:
    def each(world: World) -> int:
        candidate = gradients.GradientAllreduce("buckets", world, FreshData(world.rank, world.size), 50_000)
        return alternate([candidate], world.comm.barrier, MeasuringSchedule(3, 1, 1))["buckets"].wrong

    assert thread_comm.run(2, each) == [0, 0]


def test_an_update_without_the_other_ranks_is_wrong() -> None:
    def each(world: World) -> int:
        data = FreshData(world.rank, world.size)
        grad, param = np.empty(1000, np.float32), np.zeros(1000, np.float32)
        alone = gradients.PeerStep("alone", data, gradients._Reference(world, data), grad, param, lambda: None)
        alone.step = lambda: np.subtract(param, 0.01 * grad, out=param)
        return alternate([alone], world.comm.barrier, MeasuringSchedule(2, 1, 0))["alone"].wrong

    assert min(thread_comm.run(2, each)) > 900
