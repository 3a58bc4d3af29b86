"""Sizes, fresh data, schedules and statistics."""

import time

import numpy as np
import pytest
from raises import raises

from hpcdp.bench import measure
from hpcdp.bench.measure import FreshData, MeasuringSchedule, Series
from hpcdp.core.arrays import dtype_of
from hpcdp.errors import ConfigError


@pytest.mark.parametrize(("text", "nbytes"), [("4", 4), ("64K", 65536), ("16m", 16 << 20), ("1G", 1 << 30)])
def test_sizes_are_binary(text: str, nbytes: int) -> None:
    assert measure.parse_size(text) == nbytes
    assert measure.parse_size(measure.format_size(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "K", "4X", "-4", "1.5M", "4²"])
def test_a_wrong_size_is_named(text: str) -> None:
    with raises(ConfigError, operation="size", expected="K"):
        measure.parse_size(text)


def test_size_range_ends_at_its_maximum() -> None:
    assert measure.size_range("4:64") == [4, 8, 16, 32, 64]
    assert measure.size_range("1K:1M", 32) == [1 << 10, 1 << 15, 1 << 20]
    for text, got in {"64": "'64'", "0:4": 0, "8:4": "8:4"}.items():
        with raises(ConfigError, got=got):
            measure.size_range(text)


def test_bus_factor_is_that_of_nccl_tests() -> None:
    assert [measure.bus_factor(n) for n in (1, 2, 4)] == [0, 1, 1.5]


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32"])
@pytest.mark.parametrize("count", [1, 8191, 20000])
def test_fresh_data_lead_to_their_reduction(op: str, dtype: str, count: int) -> None:
    if op == "mean" and dtype == "int32":
        pytest.skip("no mean of integers")
    kind = dtype_of(dtype)
    inputs = np.empty((3, count), kind)
    sides = [FreshData(rank, 3, kind, op) for rank in range(3)]
    for rank, side in enumerate(sides):
        side.write(inputs[rank], 5)
    by_numpy = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod}
    right = by_numpy[op](inputs.astype(np.float64), axis=0).astype(kind)
    assert sides[1].wrong(right, 5) == 0
    assert sides[1].wrong(right + np.ones((), kind) * (1 + (dtype == "bfloat16")), 5) == count


def test_stale_results_and_misplaced_segments_are_wrong() -> None:
    data = FreshData(0, 2)
    count = 100_000
    x = np.empty((2, count), np.float32)
    for rank in range(2):
        FreshData(rank, 2).write(x[rank], 3)
    total = x.sum(axis=0)
    assert not np.array_equal(x[0], x[1])
    assert data.wrong(total, 4) == count
    for segment in (16, 4096, 32768):
        shifted = total.copy()
        shifted[segment : 2 * segment] = total[:segment]
        assert data.wrong(shifted, 3) > segment // 2
    total[777] += 1
    assert data.wrong(total, 3) == 1


@pytest.mark.parametrize(
    ("op", "ranks"), [("prod", 3), ("prod", 6), ("sum", 31), ("mean", 62), ("max", 31), ("sum", 5)]
)
def test_stale_results_are_wrong_on_any_number_of_ranks(op: str, ranks: int) -> None:
    data = FreshData(0, ranks, np.float64, op)
    assert data.wrong(data.reduced(4), 4) == 0
    assert data.wrong(data.reduced(3), 4) > 0


class _Recorded:
    def __init__(self, name: str, log: list[tuple[str, int]], faulty: bool = False) -> None:
        self.name, self.log, self.faulty = name, log, faulty

    def refresh(self, iteration: int) -> None:
        self.written = iteration

    def timed(self) -> int:
        self.log.append((self.name, self.written))
        return 1000 * len(self.log)

    def wrong(self, iteration: int) -> int:
        assert iteration == self.written
        return 7 if self.faulty else 0


def test_candidates_take_turns_with_data_of_their_own() -> None:
    log: list[tuple[str, int]] = []
    barriers: list[None] = []
    found = measure.alternate(
        [_Recorded("a", log), _Recorded("b", log, faulty=True)],
        lambda: barriers.append(None),
        MeasuringSchedule(2, 3, 1),
    )
    assert [name for name, _ in log] == [*"ab", *"bbbaaa", *"aaabbb"]
    assert len({iteration for _, iteration in log}) == len(log) <= len(barriers)
    assert len(found["a"].ns) == len(found["b"].ns) == 6
    assert found["a"].wrong == 0
    assert found["b"].wrong == 14
    assert (
        measure.alternate([_Recorded("b", [], True)], lambda: None, MeasuringSchedule(1, 1, 0), False)["b"].wrong == 0
    )


def test_large_messages_are_timed_less_often() -> None:
    small, large = MeasuringSchedule.for_size(4, 100, 2), MeasuringSchedule.for_size(256 << 20, 100, 2)
    assert small.turns * small.repeats == 100
    assert small.repeats == 10
    assert (large.turns, large.repeats) == (5, 1)
    assert MeasuringSchedule.for_size(4, 1, 0) == MeasuringSchedule(1, 1, 0)


def test_statistics() -> None:
    ranks = [Series([1000, 2000, 9000, 4000], 2, 1), Series([3000, 1000, 1000, 8000], 2, 2)]
    assert measure.turn_medians(ranks).tolist() == [2.5, 8.5]
    taken = measure.timing(ranks)
    assert (taken.avg, taken.minimum, taken.maximum, taken.median) == (3.625, 3.25, 4.0, 5.5)
    assert taken.iterations == 4
    assert measure.wrong(ranks) == 3
    assert measure.median_ratio([2, 30, 8], [1, 10, 2]) == 3


def test_an_exchange_is_timed() -> None:
    x = np.zeros(3, np.float32)
    exchange = measure.MeasuredCollective("sleep", FreshData(0, 1), x, x, lambda: time.sleep(0.002))
    exchange.refresh(1)
    assert 2_000_000 <= exchange.timed() < 1_000_000_000
    assert exchange.wrong(1) == 0
    assert exchange.wrong(2) == 3
