from itertools import chain, count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises

from hpcdp.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    ShardedSampler,
    SharedSampler,
    VirtualShardSampler,
    samplers,
)
from hpcdp.data.samplers import shuffled
from hpcdp.errors import ConfigError


def test_sequential_and_random() -> None:
    assert list(SequentialSampler(4)) == [0, 1, 2, 3] and len(SequentialSampler(4)) == 4
    sampler = RandomSampler(50, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(50)) and first != list(range(50))
    assert list(sampler) == first == list(RandomSampler(50, seed=3)) != list(RandomSampler(50, seed=4))
    sampler.set_epoch(1)
    second = list(sampler)
    assert sorted(second) == sorted(first) and second != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_batches_keep_discard_and_roll_over() -> None:
    def batches(sampler: BatchSampler) -> list[list[int]]:
        made = [batch.tolist() for batch in sampler]
        assert len(made) == len(sampler)
        return made

    assert batches(BatchSampler(SequentialSampler(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert batches(BatchSampler(SequentialSampler(7), 3, "discard")) == [[0, 1, 2], [3, 4, 5]]
    assert batches(BatchSampler(SequentialSampler(6), 3)) == [[0, 1, 2], [3, 4, 5]]
    assert batches(BatchSampler(SequentialSampler(0), 3)) == []
    rolling = BatchSampler(SequentialSampler(7), 3, "rollover")
    assert len(rolling) == 2
    assert [batch.tolist() for batch in rolling] == [[0, 1, 2], [3, 4, 5]]
    assert len(rolling) == 2
    assert [batch.tolist() for batch in rolling] == [[6, 0, 1], [2, 3, 4]]
    assert len(rolling) == 3
    assert [batch.tolist() for batch in rolling] == [[5, 6, 0], [1, 2, 3], [4, 5, 6]]
    assert next(iter(rolling)).dtype == np.int64


def test_sixty_thousand_leave_ninety_six() -> None:
    sizes = [len(batch) for batch in BatchSampler(RandomSampler(60000), 256)]
    assert sizes == [256] * 234 + [96]


@given(
    n=st.integers(0, 200),
    batch_size=st.integers(1, 40),
    num_parts=st.integers(1, 8),
    last=st.sampled_from(["keep", "discard", "pad"]),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_parts_together_see_what_one_part_sees(
    n: int, batch_size: int, num_parts: int, last: str, shuffle: bool, epoch: int
) -> None:
    batch_size = max(batch_size, num_parts)
    one = ShardedSampler(n, batch_size, 1, 0, shuffle, 7, last)
    parts = [ShardedSampler(n, batch_size, num_parts, i, shuffle, 7, last) for i in range(num_parts)]
    for sampler in (one, *parts):
        sampler.set_epoch(epoch)
    whole = list(one)
    pieces = list(zip(*parts, strict=True))
    assert len(whole) == len(pieces) == len(one) == len(parts[0])
    for batch, piece in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(np.concatenate(piece), batch)
        sizes = [len(part) for part in piece]
        assert max(sizes) - min(sizes) <= 1
    seen = np.concatenate([np.zeros(0, int), *whole])
    if last == "keep":
        assert sorted(seen) == list(range(n))
    elif last == "discard":
        assert len(seen) == len(set(seen)) == n // batch_size * batch_size
    else:
        assert all(len(batch) == batch_size for batch in whole) and set(seen) == set(range(n))
        assert len(whole) == -(-n // batch_size)


@pytest.mark.parametrize("n", [0, 1, 3, 23, 24])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_short_batches_roll_over_into_the_next_epoch(n: int, num_parts: int) -> None:
    """Whole batches of one stream of epochs, also where one batch takes several epochs; in any order of epochs."""

    def orders(epoch: int) -> list[int]:
        sampler = ShardedSampler(n, 8, seed=3)
        sampler.set_epoch(epoch)
        return list(chain(*(batch.tolist() for batch in sampler)))

    parts = [ShardedSampler(n, 8, num_parts, i, seed=3, last="rollover") for i in range(num_parts)]
    found: dict[int, list[list[int]]] = {}
    for epoch in (2, 0, 1, 5, 3, 4):
        for part in parts:
            part.set_epoch(epoch)
        found[epoch] = [list(chain(*pieces)) for pieces in zip(*parts, strict=True)]
        assert len(found[epoch]) == len(parts[0]) == (epoch + 1) * n // 8 - epoch * n // 8
    batches = [batch for epoch in range(6) for batch in found[epoch]]
    assert all(len(batch) == 8 for batch in batches)
    stream = list(chain(*map(orders, range(6))))
    assert list(chain(*batches)) == stream[: len(stream) // 8 * 8]


def test_epochs_and_seeds_change_the_order() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = ShardedSampler(100, 10, seed=seed)
        sampler.set_epoch(epoch)
        return np.concatenate(list(sampler)).tolist()

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(*key)) for key in ((0, 0), (0, 1), (1, 0), (1, 1))}) == 4


def test_epoch_size_is_the_same_on_every_part() -> None:
    """The documents' epoch_size = N / b / n, with b samples a worker."""
    for part in range(3):
        sampler = ShardedSampler(50_000, 128 * 3, 3, part, last="discard")
        assert len(sampler) == 50_000 // 128 // 3 == sum(1 for _ in sampler)
        assert all(len(batch) == 128 for batch in sampler)


def test_weights_cut_as_work_load_list() -> None:
    sizes = [[len(batch) for batch in ShardedSampler(600, 256, 2, i, weights=[3, 1])] for i in range(2)]
    assert sizes == [[192, 192, 66], [64, 64, 22]]
    together = np.concatenate([next(iter(ShardedSampler(600, 256, 2, i, weights=[3, 1]))) for i in range(2)])
    np.testing.assert_array_equal(together, next(iter(ShardedSampler(600, 256))))


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: ShardedSampler(10, 2, 3, 0), {"operation": "sampler", "where": "batch_size", "expected": 3, "got": 2}),
        (
            lambda: ShardedSampler(10, 4, 2, 2),
            {"operation": "sampler", "where": "part_index", "expected": [0, 1], "got": 2},
        ),
        (lambda: ShardedSampler(10, 4, 2, -1), {"operation": "sampler", "where": "part_index"}),
        (lambda: ShardedSampler(-1, 4), {"operation": "sampler", "where": "n"}),
        (lambda: ShardedSampler(10, 4, last="all"), {"operation": "sampler", "where": "last", "got": "all"}),
        (
            lambda: BatchSampler(SequentialSampler(3), 2, epoch_size=0),
            {"operation": "sampler", "where": "epoch_size", "expected": 1, "got": 0},
        ),
        (lambda: ShardedSampler(10, 4, 2, 0, weights=[1]), {"operation": "split", "where": "weights", "expected": 2}),
        (
            lambda: ShardedSampler(10, 4, 2, 0, weights=[1, float("nan")]),
            {"operation": "split", "where": "weights", "expected": 2},
        ),
        (
            lambda: ShardedSampler(10, 4, 2, 0, weights=[1, 0]),
            {"operation": "split", "where": "weights", "expected": 2},
        ),
        (
            lambda: BatchSampler(SequentialSampler(3), 0),
            {"operation": "sampler", "where": "batch_size", "expected": 1, "got": 0},
        ),
        (lambda: BatchSampler(SequentialSampler(3), 2, "pad"), {"operation": "sampler", "where": "last", "got": "pad"}),
        (lambda: RandomSampler(3, seed=-1), {"operation": "sampler", "where": "seed"}),
        (lambda: RandomSampler(3).set_epoch(-1), {"operation": "sampler", "where": "epoch"}),
    ],
)
def test_wrong_values_are_refused(make, fields: dict[str, object]) -> None:
    with raises(ConfigError, **fields):
        make()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_virtual_shards_are_the_same_for_any_number_of_parts(data) -> None:
    num_shards = data.draw(st.integers(1, 12))
    num_parts = data.draw(st.integers(1, num_shards))
    n, batch_size = data.draw(st.integers(0, 90)), data.draw(st.integers(num_shards, 40))
    last = data.draw(st.sampled_from(["keep", "discard", "pad", "rollover"]))

    def steps(part: int, parts: int) -> list[list[list[int]]]:
        sampler = VirtualShardSampler(n, batch_size, num_shards, parts, part, seed=2, last=last)
        sampler.set_epoch(3)
        pieces = [piece.tolist() for piece in sampler]
        assert len(pieces) == len(sampler)
        own = len(sampler.shards)
        return [pieces[first : first + own] for first in range(0, len(pieces), own)]

    together = [steps(part, num_parts) for part in range(num_parts)]
    alone = steps(0, 1)
    assert [list(chain(*parts)) for parts in zip(*together, strict=True)] == alone
    whole = ShardedSampler(n, batch_size, seed=2, last=last)
    whole.set_epoch(3)
    assert [list(chain(*pieces)) for pieces in alone] == [batch.tolist() for batch in whole]


def test_virtual_shards_share_the_order_that_they_cut(monkeypatch) -> None:
    drawn = []

    def counted(*of: int) -> np.ndarray:
        drawn.append(of)
        return shuffled(*of)

    monkeypatch.setattr(samplers, "shuffled", counted)
    list(VirtualShardSampler(50, 16, 8, 2, 1, seed=3))
    assert drawn == [(50, 3, 0)]


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ((50, 16, 4, 5), {"where": "num_shards", "expected": 5, "got": 4}),
        ((50, 16, 4, 2, 2), {"where": "part_index", "expected": [0, 1], "got": 2}),
        ((50, 3, 4), {"where": "batch_size", "expected": 4, "got": 3}),
        ((50, 16, 0), {"where": "num_shards", "expected": 1, "got": 0}),
        ((50, 16, 4, 2, -1), {"where": "part_index", "expected": [0, 1], "got": -1}),
        ((50, 16.0, 4), {"where": "batch_size", "expected": 4, "got": 16.0}),
    ],
)
def test_virtual_shards_that_cannot_be_are_refused(args, fields: dict[str, object]) -> None:
    with raises(ConfigError, operation="sampler", **fields):
        VirtualShardSampler(*args)


class FromZero:
    """What several parts draw numbers from, as often as they are told."""

    def __iter__(self):
        return iter(self.numbers)

    def begin(self) -> None:
        self.numbers = count()


@given(n=st.integers(0, 60), batch_size=st.integers(1, 20), seed=st.integers(0, 3), data=st.data())
@settings(max_examples=50, deadline=None)
def test_parts_that_take_batches_see_all_of_them(n: int, batch_size: int, seed: int, data: st.DataObject) -> None:
    numbers = FromZero()
    parts = [SharedSampler(n, batch_size, numbers, seed=seed) for _ in range(3)]
    alone = ShardedSampler(n, batch_size, seed=seed)
    for epoch in (0, 1):
        numbers.begin()
        alone.set_epoch(epoch)
        for part in parts:
            part.set_epoch(epoch)
        found, going = [], {which: iter(part) for which, part in enumerate(parts)}
        while going:
            which = data.draw(st.sampled_from(sorted(going)))
            batch = next(going[which], None)
            if batch is None:
                del going[which]
            else:
                found.append(batch.tolist())
                assert parts[which].taken == len(found)
        assert found == [batch.tolist() for batch in alone]
        assert len(found) == len(parts[0]) == len(alone)


def test_shared_batches_in_order_and_without_a_short_last_one() -> None:
    assert [batch.tolist() for batch in SharedSampler(5, 2, count(), shuffle=False)] == [[0, 1], [2, 3], [4]]
    sampler = SharedSampler(5, 2, count(), shuffle=False, last="discard")
    assert [batch.tolist() for batch in sampler] == [[0, 1], [2, 3]] and len(sampler) == 2
    for wrong in ({"batch_size": 0}, {"n": -1}, {"last": "pad"}, {"seed": -1}):
        with pytest.raises(ConfigError):
            SharedSampler(**({"n": 5, "batch_size": 2, "numbers": count()} | wrong))


def test_a_given_number_of_batches_begins_anew_where_samples_run_out() -> None:
    batches = BatchSampler(SequentialSampler(5), 2, epoch_size=4)
    assert len(batches) == 4
    assert [each.tolist() for each in batches] == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert [each.tolist() for each in batches.batches(3)] == [[1, 2]]
    assert [each.tolist() for each in BatchSampler(SequentialSampler(5), 2, epoch_size=1)] == [[0, 1]]
    empty = BatchSampler(SequentialSampler(0), 2, epoch_size=3)
    assert len(empty) == 0 and list(empty) == []
    with raises(ConfigError, operation="sampler", where="last", expected="epoch_size"):
        BatchSampler(SequentialSampler(5), 2, "rollover", epoch_size=4)


def test_other_weights_count_from_the_next_iteration_on_and_are_kept() -> None:
    sampler = ShardedSampler(20, 8, 2, 0, shuffle=False, weights=[3, 1])
    loop = iter(sampler)
    assert next(loop).tolist() == [0, 1, 2, 3, 4, 5]
    sampler.set_weights([1, 3])
    assert [len(each) for each in loop] == [6, 3]
    assert [len(each) for each in sampler] == [2, 2, 1]
    with raises(ConfigError, operation="split", where="weights", expected=2):
        sampler.set_weights([1, 0])
    state = sampler.state_dict()
    other = ShardedSampler(20, 8, 2, 1, shuffle=False)
    other.load_state_dict(state)
    assert other.weights == (1, 3)
    assert [len(each) for each in other] == [6, 6, 3]
    third = ShardedSampler(20, 8, 3, 1, shuffle=False)
    third.load_state_dict(state)
    assert third.weights is None
    other.load_state_dict(third.state_dict())
    assert other.weights == (1, 3)
