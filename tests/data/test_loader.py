import gc
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import numpy as np
import pytest
from raises import raises

from hpcdp.data import (
    ArrayDataset,
    Augmentation,
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    ShardedSampler,
)
from hpcdp.engine import Engine
from hpcdp.errors import ConfigError


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.shutdown()


class Recording(ArrayDataset):
    """Notes which batches are read, on which thread, and how many reads run or lie unused."""

    def __init__(self, n: int, delay_s: float = 0.0, fail_at: int | None = None) -> None:
        super().__init__(np.arange(2 * n, dtype=np.float32).reshape(n, 2), np.arange(n))
        self.delay_s, self.fail_at = delay_s, fail_at
        self.begun: list[int] = []
        self.ended = 0
        self.threads: set[str] = set()

    def __getitem__(self, index):
        self.begun.append(int(index[0]))
        self.threads.add(threading.current_thread().name)
        time.sleep(self.delay_s)
        if self.fail_at is not None and self.fail_at in index:
            raise ValueError(f"sample {self.fail_at} is unreadable")
        self.ended += 1
        return super().__getitem__(index)


def batches(n: int, size: int) -> BatchSampler:
    return BatchSampler(SequentialSampler(n), size)


@pytest.mark.parametrize(
    "sampler",
    [SequentialSampler(9), RandomSampler(9), ShardedSampler(9, 4), [np.array([0, 8])]],
    ids=lambda sampler: type(sampler).__name__,
)
def test_numbers_beyond_the_data_set_are_named(sampler) -> None:
    batches = sampler if isinstance(sampler, list | ShardedSampler) else BatchSampler(sampler, 4)
    got = "the number 8" if isinstance(sampler, list) else "n=9"
    with raises(ConfigError, operation="DataLoader", where="sampler", expected=7, got=got, remedy="n=len(dataset)"):
        list(DataLoader(ArrayDataset(np.zeros((7, 2)), np.zeros(7)), batches, prefetch=0))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 50])
def test_every_batch_once_in_order_and_again(engine: Engine, prefetch: int) -> None:
    dataset = Recording(25)
    loader = DataLoader(dataset, batches(25, 4), prefetch, engine=engine)
    assert len(loader) == 7
    for _ in range(2):
        seen = list(loader)
        assert [len(x) for x, _ in seen] == [4] * 6 + [1]
        np.testing.assert_array_equal(np.concatenate([y for _, y in seen]), np.arange(25))
        np.testing.assert_array_equal(np.concatenate([x for x, _ in seen]), dataset.x)
    reader = {"MainThread"} if prefetch == 0 else dataset.threads - {"MainThread"}
    assert dataset.threads == reader


def test_batches_belong_to_the_loop(engine: Engine) -> None:
    dataset = Recording(12)
    kept = []
    for x, y in DataLoader(dataset, batches(12, 4), engine=engine):
        kept.append((x, y.copy()))
        y[:] = -1
    for i, (x, y) in enumerate(kept):
        np.testing.assert_array_equal(x, dataset.x[4 * i : 4 * i + 4])
        np.testing.assert_array_equal(y, np.arange(4 * i, 4 * i + 4))
    np.testing.assert_array_equal(dataset.y, np.arange(12))


def test_reads_ahead_but_not_further_than_asked(engine: Engine) -> None:
    dataset = Recording(40)
    loop = iter(DataLoader(dataset, batches(40, 4), prefetch=2, engine=engine))
    for used in range(1, 6):
        next(loop)
        engine.waitall()
        assert len(dataset.begun) == used + 2
    loop.close()


@pytest.mark.parametrize("quick", [True, False])
def test_batches_that_are_there_at_once_are_read_by_the_loop(engine: Engine, monkeypatch, quick: bool) -> None:
    """Others ahead, after two that were not, by another thread."""
    monkeypatch.setattr("hpcdp.data.loader._QUICK_S", 1e9 if quick else 0.0)
    threads: list[str] = []

    def noting(sample, rng):
        threads.append(threading.current_thread().name)
        return sample

    dataset = ArrayDataset(np.arange(40.0).reshape(20, 2), np.arange(20))
    loader = DataLoader(dataset, batches(20, 4), augment=Augmentation(noting), engine=engine)
    for _ in range(2):
        threads.clear()
        np.testing.assert_array_equal(np.concatenate([y for _, y in loader]), np.arange(20))
        here = 20 if quick else 8
        assert threads[:here] == ["MainThread"] * here and set(threads[here:]) == (set() if quick else {"hpcdp-io"})


def test_sharded_epochs_are_deterministic_and_reshuffled(engine: Engine) -> None:
    dataset = Recording(50)

    def epoch(number: int, seed: int = 1) -> list[int]:
        loader = DataLoader(dataset, ShardedSampler(50, 8, 3, 1, seed=seed), engine=engine)
        loader.set_epoch(number)
        return np.concatenate([y for _, y in loader]).tolist()

    assert epoch(0) == epoch(0) != epoch(1)
    assert epoch(1) == epoch(1) != epoch(1, seed=2)


def test_empty_pieces_are_yielded(engine: Engine) -> None:
    dataset = ArrayDataset(np.zeros((9, 3), np.float32), np.arange(9))
    shapes = [
        [x.shape for x, _ in DataLoader(dataset, ShardedSampler(9, 4, 4, part), engine=engine)] for part in range(4)
    ]
    assert all(part[:2] == [(1, 3), (1, 3)] for part in shapes)
    assert sorted(part[2] for part in shapes) == [(0, 3), (0, 3), (0, 3), (1, 3)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_unreadable_sample_is_raised_where_it_is_asked_for(engine: Engine, prefetch: int) -> None:
    loader = DataLoader(Recording(20, fail_at=9), batches(20, 4), prefetch, engine=engine)
    seen = []
    with pytest.raises(ValueError, match="sample 9 is unreadable") as caught:
        for _, y in loader:
            seen.append(y[0])
    assert seen == [0, 4]
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "__getitem__"
    engine.waitall()
    assert [y[0] for _, y in DataLoader(Recording(8), batches(8, 4), engine=engine)] == [0, 4]


def test_a_loop_that_is_left_early_leaves_nothing_running(engine: Engine) -> None:
    dataset = Recording(400, delay_s=0.02, fail_at=13)
    for _ in DataLoader(dataset, batches(400, 4), prefetch=50, engine=engine):
        break
    gc.collect()
    begun = len(dataset.begun)
    assert begun < 45
    engine.waitall()
    assert len(dataset.begun) <= begun + 1  # one that was about to begin


def test_a_forgotten_loop_may_end_on_the_lane_itself(engine: Engine) -> None:
    """The collector closes a loop that lies in a reference cycle on whatever thread it runs, here the reading one."""
    loop = iter(DataLoader(Recording(40, delay_s=0.01), batches(40, 4), prefetch=5, engine=engine))
    next(loop)
    cycle = [loop]
    cycle.append(cycle)  # type: ignore[arg-type]
    gc.disable()
    try:
        del loop, cycle
        engine.push(gc.collect, lane="io", priority=1)
        waiting = threading.Thread(target=engine.waitall, daemon=True)
        waiting.start()
        waiting.join(timeout=10)
        assert not waiting.is_alive()
    finally:
        gc.enable()


def test_a_forked_child_leaves_the_loop_that_it_was_in() -> None:
    program = """
import os, time
import numpy as np
from hpcdp.data import DataLoader, Dataset, ShardedSampler

class Slow(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        time.sleep(0.2)
        return index, index

for x, _ in DataLoader(Slow(), ShardedSampler(20, 2)):
    child = os.fork()
    if child:
        print(os.waitpid(child, 0)[1])
    break
if child == 0:
    assert len(list(DataLoader(Slow(), ShardedSampler(20, 10)))) == 2
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    assert (ended.stdout, ended.returncode) == ("0\n", 0), ended.stderr


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_stop_iteration_of_the_data_set_does_not_end_the_epoch(engine: Engine, prefetch: int) -> None:
    samples = iter(np.arange(8))

    class Once(Recording):
        def __getitem__(self, index):
            return np.array([next(samples) for _ in index]), index

    loader = DataLoader(Once(12), batches(12, 4), prefetch=prefetch, engine=engine)
    with pytest.raises(RuntimeError, match="StopIteration"):
        for _ in loader:
            pass
    assert not loader.state_dict()["ended"]


def test_an_exception_in_the_loop_is_the_one_that_is_seen(engine: Engine) -> None:
    dataset = Recording(40, delay_s=0.005)
    with pytest.raises(ZeroDivisionError):
        for _ in DataLoader(dataset, batches(40, 4), engine=engine):
            raise ZeroDivisionError
    gc.collect()
    engine.waitall()
    assert len(dataset.begun) <= 3


def test_transform(engine: Engine) -> None:
    names = set()

    def double(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        names.add(threading.current_thread().name)
        return 2 * x, y + 1

    dataset = Recording(10)
    seen = list(DataLoader(dataset, batches(10, 3), transform=double, engine=engine))
    np.testing.assert_array_equal(np.concatenate([x for x, _ in seen]), 2 * dataset.x)
    np.testing.assert_array_equal(np.concatenate([y for _, y in seen]), np.arange(1, 11))
    assert names == dataset.threads and "MainThread" not in names


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("given", "got"), [((1, 2, 3), "a tuple of 3"), (np.zeros((2, 3)), "a ndarray"), (None, "a NoneType")]
)
def test_what_is_no_pair_is_told(engine: Engine, prefetch: int, given, got: str) -> None:
    class Gives(Recording):
        def __getitem__(self, index):
            return given

    with raises(ConfigError, operation="DataLoader", where="dataset", expected="(x, y)", got=got):
        list(DataLoader(Gives(8), batches(8, 4), prefetch, engine=engine))
    with raises(ConfigError, operation="DataLoader", where="transform", expected="(x, y)", got=got):
        list(DataLoader(Recording(8), batches(8, 4), prefetch, lambda x, y: given, engine=engine))


def test_two_loops_at_a_time_share_the_lane(engine: Engine) -> None:
    loader = DataLoader(Recording(40), BatchSampler(RandomSampler(40, 5), 4), engine=engine)
    for (_, ours), (_, theirs) in zip(loader, loader, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_process_engine_is_the_default() -> None:
    dataset = Recording(8)
    assert len(list(DataLoader(dataset, batches(8, 4)))) == 2
    assert dataset.threads == {"hpcdp-io"}


@pytest.mark.parametrize("prefetch", [-1, 1.5, None])
def test_wrong_prefetch(prefetch) -> None:
    with raises(ConfigError, operation="DataLoader", where="prefetch", expected=0):
        DataLoader(Recording(8), batches(8, 4), prefetch)


@pytest.mark.parametrize("remedy", ["none", "prefetch=0", "own engine"])
def test_a_loader_inside_a_data_set(engine: Engine, remedy: str) -> None:
    inner = Recording(6)
    own = Engine()

    class Nested(ArrayDataset):
        def __getitem__(self, index):
            inside = DataLoader(
                inner,
                batches(6, 2),
                prefetch=0 if remedy == "prefetch=0" else 2,
                engine=own if remedy == "own engine" else engine,
            )
            total = sum(float(x.sum()) for x, _ in inside)
            return np.full(len(index), total), np.asarray(index)

    def iterate() -> None:
        try:
            seen.extend(float(x[0]) for x, _ in DataLoader(Nested(inner.x, inner.y), batches(6, 3), engine=engine))
        except ConfigError as error:
            seen.append(str(error))

    seen: list[float | str] = []
    looping = threading.Thread(target=iterate, daemon=True)
    looping.start()
    looping.join(10)
    assert not looping.is_alive()
    if remedy == "none":
        assert "a DataLoader inside a data set needs prefetch=0" in str(seen[0])
        engine.waitall()
        assert not inner.begun
    else:
        assert seen == [inner.x.sum()] * 2
    own.shutdown()
