"""Ranks that read one file at the same time see together what one would see, step by step."""

from itertools import chain

import h5py
import numpy as np
import pytest

from hpcdp.comm import thread_comm
from hpcdp.data import BatchSampler, DataLoader, HDF5Dataset, RandomSampler, ShardedSampler, read_csv
from hpcdp.engine import Engine

N = 53


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_hdf5_file(tmp_path, ranks):
    x, y = np.random.default_rng(1).standard_normal((N, 3)).astype(np.float32), np.arange(N)
    with h5py.File(tmp_path / "set.h5", "w") as file:
        file["x"], file["y"] = x, y

    def job(world):
        dataset = HDF5Dataset(tmp_path / "set.h5")
        sampler = ShardedSampler(N, 8, world.size, world.rank, seed=4)
        with Engine() as engine:
            loader = DataLoader(dataset, sampler, prefetch=2, engine=engine)
            loader.set_epoch(3)
            batches = list(loader)
        dataset.close()
        return batches

    by_rank = thread_comm.run(ranks, job)
    whole = ShardedSampler(N, 8, seed=4)
    whole.set_epoch(3)
    for step, indices in enumerate(whole):
        pieces = [batches[step] for batches in by_rank]
        np.testing.assert_array_equal(np.concatenate([piece[1] for piece in pieces]), y[indices])
        np.testing.assert_array_equal(np.concatenate([piece[0] for piece in pieces]), x[indices])


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_table_of_which_each_rank_reads_a_part(tmp_path, ranks):
    (tmp_path / "table.csv").write_text("".join(f"{i},{i % 5}\n" for i in range(N)))

    def job(world):
        part = read_csv(tmp_path / "table.csv", num_parts=world.size, part_index=world.rank)
        batches = BatchSampler(RandomSampler(len(part), seed=1), 4, epoch_size=N // 4 // world.size)
        return part.x.ravel().tolist(), [len(y) for _, y in DataLoader(part, batches, prefetch=0)]

    seen, lengths = zip(*thread_comm.run(ranks, job), strict=True)
    assert sorted(chain(*seen)) == list(range(N))
    assert set(map(tuple, lengths)) == {(4,) * (N // 4 // ranks)}
