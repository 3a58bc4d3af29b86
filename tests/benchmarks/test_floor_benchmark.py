"""The bare patterns sum what all ranks wrote, and their check can fail."""

import numpy as np
import pytest
from raises import raises

import bench_floor as floor
from bench_floor import Floor
from hpcdp.bench import tune
from hpcdp.bench.measure import MeasuringSchedule, alternate
from hpcdp.comm import World, thread_comm
from hpcdp.errors import UnsupportedError


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.thorough
def test_every_pattern_sums(ranks: int) -> None:
    counts = [1, 15, 16, 17, 63, 1000, 70_001, 300_007]

    def each(world: World) -> list[tuple[str, int, int]]:
        limits = Floor(world, 4 * max(counts))
        bad = []
        for count in counts:
            found = alternate(limits.patterns(count), limits.barrier, MeasuringSchedule(2, 2, 1))
            bad += [(name, count, series.wrong) for name, series in found.items() if series.wrong]
            assert all(min(series.ns) > 0 for series in found.values())
        return bad

    assert thread_comm.run(ranks, each) == [[]] * ranks


def test_a_missing_contribution_is_wrong() -> None:
    def each(world: World) -> list[int]:
        limits = Floor(world, 4000)
        found = []
        for candidate in limits.patterns(1000):
            candidate.refresh(1)
            limits.barrier()
            if world.rank == 1:
                limits.input(candidate.pattern, 1000)[300] += 1
            candidate.timed()
            found.append(candidate.wrong(1))
            limits.barrier()
        return found

    assert np.array_equal(thread_comm.run(2, each), np.ones((2, 5)))


def test_limits_of_the_machine_are_positive() -> None:
    def each(world: World) -> tuple[float, dict[str, float]]:
        limits = Floor(world, 4)
        return limits.line_round_trip_ns(10), tune.copy_rates(world, 1 << 16, 1)

    for round_trip, rates in thread_comm.run(2, each):
        assert round_trip > 0
        assert set(rates) == {"one_core_gb_s", "all_cores_gb_s"}
        assert min(rates.values()) > 0


def test_sweep_names_the_best_pattern() -> None:
    rows = thread_comm.run(2, lambda world: floor.sweep(world, [3, 4096], 3, 1))[0]
    assert [row["nbytes"] for row in rows] == [4, 4096]  # whole elements
    for row in rows:
        assert row["median_us"][row["best"]] == min(list(row["median_us"].values())[:4])
        assert row["wrong"] == 0


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 1)])
def test_ranks_that_share_no_memory_are_refused(ranks: int, per_node: int) -> None:
    with raises(UnsupportedError, operation="floor", expected=2):
        thread_comm.run(ranks, lambda world: Floor(world, 4), per_node)
