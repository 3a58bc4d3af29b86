"""Loops that are left and gone on with, on the same and other numbers of parts."""

import json
import threading
from itertools import chain, islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raises import raises

from hpcdp.data import (
    ArrayDataset,
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    ShardedSampler,
    SharedSampler,
    VirtualShardSampler,
)
from hpcdp.errors import ConfigError

N = 23


def loader(sampler, prefetch=0) -> DataLoader:
    return DataLoader(ArrayDataset(np.zeros((N, 1), "f4"), np.arange(N)), sampler, prefetch)


def labels(batches) -> list[list[int]]:
    return [y.tolist() for _, y in batches]


def sharded(part, parts, **settings) -> ShardedSampler:
    return ShardedSampler(N, 4, parts, part, seed=3, **settings)


def virtual(part, parts, **settings) -> VirtualShardSampler:
    return VirtualShardSampler(N, 4, 4, parts, part, seed=3, **settings)


def global_batches(kind, parts, state=None, epoch=None, count=None, last="keep"):
    """What all parts yield together, global batch by batch, after a ``state``; and their states then."""
    found, states = [], []
    for part in range(parts):
        mine = loader(kind(part, parts, last=last))
        if state is not None:
            mine.load_state_dict(state)
        if epoch is not None:
            mine.set_epoch(epoch)
        each = len(mine.sampler.numbers) if kind is virtual else 1
        had = labels(islice(mine, None if count is None else count * each))
        found.append([list(chain(*had[k : k + each])) for k in range(0, len(had), each)])
        states.append(mine.state_dict())
    assert all(state == states[0] for state in states)
    return [list(chain(*pieces)) for pieces in zip(*found, strict=True)], states[0]


@given(st.sampled_from([sharded, virtual]), st.integers(1, 4), st.integers(1, 4), st.integers(0, 6),
       st.sampled_from(["keep", "discard", "pad", "rollover"]))  # fmt: skip
def test_any_number_of_parts_goes_on_in_the_same_global_order(kind, before, after, count, last):
    whole, _ = global_batches(kind, 1, epoch=5, last=last)
    count = min(count, len(whole))
    first, state = global_batches(kind, before, epoch=5, count=count, last=last)
    assert state["epoch"] == 5 and state["done"] == count
    rest, ended = global_batches(kind, after, state, last=last)
    assert first + rest == whole
    assert ended["done"] == len(whole) and ended["ended"]
    assert first + global_batches(kind, after, state, epoch=5, last=last)[0] == whole
    assert global_batches(kind, after, state, epoch=6, last=last) == global_batches(kind, 1, epoch=6, last=last)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("last", ["keep", "discard", "rollover"])
@pytest.mark.parametrize("order", [lambda: RandomSampler(N, seed=2), lambda: SequentialSampler(N)])
def test_batches_of_one_process_go_on_from_anywhere(order, last, prefetch):
    def make():
        return loader(BatchSampler(order(), 4, last), prefetch)

    straight = make()
    epochs = []
    for epoch in range(4):
        straight.set_epoch(epoch)
        epochs.append(labels(straight))
    for count in range(len(epochs[0]) + 1):
        first = make()
        first.set_epoch(0)
        had = labels(islice(first, count))
        second = make()
        second.load_state_dict(first.state_dict())
        for epoch in range(4):
            second.set_epoch(epoch)
            assert had + labels(second) == epochs[epoch]
            had = []


def test_reads_ahead_do_not_count_and_skipped_batches_are_not_read():
    class Recording(ArrayDataset):
        def __init__(self):
            super().__init__(np.zeros((N, 1), "f4"), np.arange(N))
            self.read = []

        def __getitem__(self, index):
            self.read.append(int(index[0]))
            return super().__getitem__(index)

    data = Recording()
    first = DataLoader(data, BatchSampler(SequentialSampler(N), 4), prefetch=3)
    for _ in islice(first, 2):
        pass
    assert first.state_dict()["done"] == 2
    second = DataLoader(data, BatchSampler(SequentialSampler(N), 4), prefetch=3)
    second.load_state_dict(first.state_dict())
    data.read.clear()
    assert [y[0] for _, y in second] == data.read == [8, 12, 16, 20]
    assert [y[0] for _, y in second] == [0, 4, 8, 12, 16, 20]  # whole again


def test_where_a_loop_has_ended_its_epoch_is_over():
    first = loader(sharded(0, 1))
    first.set_epoch(3)
    whole = labels(first)
    state = first.state_dict()
    assert state["done"] == 6 and state["ended"]
    second = loader(sharded(0, 1))
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert labels(second) == whole  # as the first loader's next iteration would be
    second.load_state_dict(state)
    second.set_epoch(3)
    assert labels(second) == []
    assert labels(second) == whole


def test_states_before_and_between_loops():
    first = loader(sharded(0, 2))
    assert first.state_dict() | {"sampler": None} == {
        "epoch": 0, "done": 0, "begun": False, "ended": False, "sampler": None
    }  # fmt: skip
    next(iter(first))
    first.set_epoch(1)  # the loop was given up
    assert first.state_dict()["done"] == 0
    second = loader(sharded(0, 2))
    second.load_state_dict(first.state_dict())
    assert second.epoch == 1
    assert labels(second) == labels(first)


def test_a_state_that_was_restored_can_be_saved_again():
    first = loader(sharded(0, 1))
    whole = labels(first)
    for _ in islice(first, 1):
        pass
    for done, step in pairwise([1, 2, 2, 5]):
        second = loader(sharded(0, 1))
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
        assert labels(islice(second, step - done)) == whole[done:step]
        assert second.state_dict()["done"] == step
        first = second


def test_parts_that_take_batches_go_on_after_those_that_were_taken():
    class Numbers:
        lock = threading.Lock()

        def __iter__(self):
            self.count = 0
            return self

        def __next__(self):
            with self.lock:
                self.count += 1
                return self.count - 1

        def given(self):
            return self.count

    def make():
        numbers = Numbers()
        return numbers, loader(SharedSampler(N, 4, numbers, seed=3))

    _, straight = make()
    whole = labels(straight)
    numbers, first = make()
    had = labels(islice(first, 2))
    next(numbers)  # another part's
    assert first.state_dict()["done"] == 3
    _, second = make()
    second.load_state_dict(first.state_dict())
    batches = iter(second)
    assert [*had, *labels(islice(batches, 1))] == whole[:2] + whole[3:4]
    assert second.sampler.taken == 4
    assert second.state_dict()["done"] == 4
    assert labels(batches) == whole[4:]
    assert second.state_dict()["done"] == 6


class Numbers:
    """For one part."""

    def __iter__(self):
        self.count = 0
        return self

    def __next__(self):
        self.count += 1
        return self.count - 1

    def given(self):
        return self.count


@pytest.mark.parametrize("last", ["keep", "discard"])
@pytest.mark.parametrize("had", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(4, 6), (6, 4), (2, 5), (5, 2), (3, 3)])
def test_batches_that_parts_take_may_have_another_size_when_they_go_on(sizes, had, last):
    """As where there are other numbers of ranks; also twice within an epoch."""

    def make(batch_size):
        return loader(SharedSampler(N, batch_size, Numbers(), seed=3, last=last))

    order = list(chain(*labels(loader(SharedSampler(N, 1, Numbers(), seed=3)))))
    first, second, third = make(sizes[0]), make(sizes[1]), make(sizes[0])
    seen = labels(islice(first, had))
    second.load_state_dict(first.state_dict())
    went_on = second.state_dict()
    seen += labels(islice(second, 1))
    third.load_state_dict(second.state_dict())
    third.set_epoch(0)  # of which nothing may be left
    left = labels(third)
    found = list(chain(*seen, *left))
    assert found == order[: len(found)]
    assert N - len(found) < (1 if last == "keep" else max(sizes))
    assert [len(batch) for batch in seen + left[:-1]] == [sizes[0]] * had + [sizes[1]] + [sizes[0]] * (len(left) - 1)
    assert third.state_dict()["ended"]
    unmoved = make(sizes[0])
    unmoved.load_state_dict(went_on)  # restored, saved, and restored, without a batch in between
    rest = list(chain(*labels(unmoved)))
    assert rest == order[had * sizes[0] :][: len(rest)]
    assert N - had * sizes[0] - len(rest) < (1 if last == "keep" else sizes[0])
    for each in (second, third):
        each.set_epoch(1)
        assert len(each) == len(make(each.sampler.batch_size)) == len(labels(each))


def test_samplers_of_the_users_own_are_gone_on_with_by_counting():
    class Own:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 3

        def __iter__(self):
            return (np.array([10 * self.epoch + k]) % N for k in range(3))

    first = loader(Own())
    first.set_epoch(1)
    next(iter(first))
    second = loader(Own())
    second.load_state_dict(first.state_dict())
    assert labels(second) == [[11], [12]]


@pytest.mark.parametrize(
    ("make", "other", "fields"),
    [
        (sharded(0, 1), ShardedSampler(N, 5, seed=3), {"where": "ShardedSampler batch_size", "expected": 5, "got": 4}),
        (sharded(0, 1), ShardedSampler(N, 4, seed=4), {"where": "ShardedSampler seed", "expected": 4, "got": 3}),
        (sharded(0, 1), ShardedSampler(N - 1, 4, seed=3), {"where": "ShardedSampler n", "expected": 22, "got": 23}),
        (
            sharded(0, 1),
            sharded(0, 1, shuffle=False),
            {"where": "ShardedSampler shuffle", "expected": False, "got": True},
        ),
        (sharded(0, 1), sharded(0, 1, last="pad"), {"where": "ShardedSampler last", "expected": "pad", "got": "keep"}),
        (sharded(0, 1), virtual(0, 1), {"where": "VirtualShardSampler num_shards", "expected": 4}),
        (
            virtual(0, 1),
            VirtualShardSampler(N, 4, 2, seed=3),
            {"where": "VirtualShardSampler num_shards", "expected": 2, "got": 4},
        ),
        (
            virtual(0, 1),
            VirtualShardSampler(N, 5, 4, seed=3),
            {"where": "ShardedSampler batch_size", "expected": 5, "got": 4},
        ),
        (BatchSampler(RandomSampler(N), 4), BatchSampler(RandomSampler(N, 1), 4), {"where": "RandomSampler seed"}),
        (
            BatchSampler(RandomSampler(N), 4),
            BatchSampler(RandomSampler(N), 4, "discard"),
            {"where": "BatchSampler last"},
        ),
    ],
)
def test_states_of_another_order_are_refused_by_name(make, other, fields):
    state = loader(make).state_dict()
    state["epoch"] = state["sampler"]["epoch"] = 7
    mine = loader(other)
    with raises(ConfigError, operation="load_state_dict", **fields):
        mine.load_state_dict(state)
    assert mine.epoch == mine.sampler.epoch == 0


def test_weights_and_parts_may_differ():
    first = loader(sharded(1, 3))
    next(iter(first))
    second = loader(sharded(0, 2, weights=[3, 1]))
    second.load_state_dict(first.state_dict())
    assert len(list(second)) == 5


def test_between_virtual_shards_there_is_no_state():
    first = loader(virtual(0, 2))
    next(iter(first))
    with raises(ConfigError, operation="state_dict", where="VirtualShardSampler", got=[1, 2]):
        first.state_dict()


@pytest.mark.parametrize("state", [{}, {"epoch": 1}, None, [], {"sampler": 3}])
def test_what_is_no_state_is_refused(state):
    for each in (loader(sharded(0, 1)), sharded(0, 1), BatchSampler(RandomSampler(N), 4)):
        with raises(ConfigError, operation="load_state_dict"):
            each.load_state_dict(state)


def test_a_state_has_no_numbers_of_numpys():
    class Own(SequentialSampler):
        def __iter__(self):
            return iter(np.arange(self.n))

    mine = loader(BatchSampler(Own(N), np.int64(5), last="rollover"))
    mine.set_epoch(np.int64(2))
    next(iter(mine))
    state = mine.state_dict()
    assert json.loads(json.dumps(state)) == state and state["epoch"] == 2 and state["sampler"]["rest"] == [20, 21, 22]
