"""A disk that is full at any place: one error, and the run goes on; in compressed files HDF5 never meets it."""

import contextlib
import errno
import gc
import itertools
import os
import signal

import h5py
import numpy as np
import pytest
from full_disk import files_of_at_most
from pairs import pairs
from raises import raises
from samples import write_shard

from hpcdp.checkpoint import Manager, Part, Sharded, hdf5_file
from hpcdp.checkpoint.hdf5_file import BLOCK_NBYTES, FilePiece, ShardReader, Unfailing
from hpcdp.comm import thread_comm
from hpcdp.errors import DataError

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # of a torn HDF5 file


def state(step, world):
    """Of many data sets, and on each rank one of several chunks; hardly shrinks."""
    random = np.random.default_rng([step, world.rank])
    own = random.integers(0, 256, BLOCK_NBYTES + 70_000, np.uint8)
    many = {f"{number}": np.random.default_rng([step, number]).random(500) for number in range(20)}
    return {"many": many, "long": Sharded((world.size * own.size,), "u1", [Part(world.rank * own.size, own)])}


def check(found, step, world):
    expected = state(step, world)
    assert all(np.array_equal(found["many"][name], values) for name, values in expected["many"].items())
    (part,) = expected["long"].parts
    assert np.array_equal(found["long"][part.first : part.first + part.values.size], part.values)


@pytest.mark.parametrize(("compression", "n", "wait"), pairs([None, "gzip", "lzf"], [1, 2], [True, False]))
def test_a_disk_that_is_full_at_any_place(compression, n, wait, tmp_path):
    limits = [100, 4000, 1_100_000]  # in HDF5's first block, while it lays data sets out, in the elements

    def one(world):
        with Manager(tmp_path, world, compression=compression, keep=2) as manager:
            manager.save(1, state(1, world))
            for number, limit in enumerate(limits, 2):
                world.comm.barrier()
                with files_of_at_most(limit) if world.rank == 0 else contextlib.nullcontext():
                    world.comm.barrier()
                    with raises(DataError, operation="save") as caught:
                        manager.save(number, state(number, world), wait=wait)
                        manager.wait()
                    assert f"step-{number:010d}.tmp/shard-00000.h5" in str(caught.value.where)
                    world.comm.barrier()
                assert manager.steps() == [1]
            check(manager.restore().state, 1, world)
            manager.save(50, state(50, world), wait=wait)
            manager.wait()
            check(manager.restore(50).state, 50, world)

    thread_comm.run(n, one)
    assert {path.name for path in tmp_path.iterdir()} == {"step-0000000001", "step-0000000050", "writer.lock"}


def failing_from(monkeypatch, number):
    """All writes fail from that one on; what has been tried."""
    pwrite, calls = os.pwrite, itertools.count()

    def write(file, data, offset):
        if next(calls) >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    return calls


def test_each_write_may_be_the_first_that_fails(tmp_path, monkeypatch):
    pieces = [FilePiece(f"layer{number}/weight", 0, np.arange(40.0), "float64") for number in range(5)]
    path, count, opened = tmp_path / "shard-00000.h5", 0, len(os.listdir("/proc/self/fd"))
    while True:
        with monkeypatch.context() as context:
            tried = failing_from(context, count)
            try:
                write_shard(path, pieces, "gzip")
                break
            except DataError as error:
                assert str(error) == f"save [{path}]: got no space left on device"
            assert next(tried) == count + 1  # nothing was tried any more
            path.unlink()
        count += 1
    assert count > 15 and len(os.listdir("/proc/self/fd")) == opened
    with h5py.File(path) as file:
        assert all(np.array_equal(file[piece.dataset][:], piece.values) for piece in pieces)


def test_writes_of_chunks_may_be_short(tmp_path, monkeypatch):
    pwrite, values = os.pwrite, np.random.default_rng(0).standard_normal(1000)
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[: max(1, len(data) // 2)], offset))
    (stored,), _ = write_shard(tmp_path / "shard-00000.h5", [FilePiece("a", 0, values, "float64")], "lzf")
    out = np.empty_like(values)
    with ShardReader(tmp_path) as reader:
        reader.read(stored, 0, out)
    assert np.array_equal(out, values)


def test_a_full_file_is_read_as_it_would_be(tmp_path, monkeypatch):
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    file = Unfailing(descriptor)
    assert file.write(b"abcdef") == 6 and file.error is None
    failing_from(monkeypatch, 0)
    file.seek(4)
    assert file.write(b"EFGH") == 4 and file.error.errno == errno.ENOSPC
    file.seek(10)
    file.write(b"k")
    file.seek(5)
    file.write(b"!!")
    assert file.seek(0, os.SEEK_END) == 11
    file.seek(2)
    assert file.read(11) == b"cdE!!H\0\0k\0\0" and file.tell() == 13
    os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"abcdef"


def test_a_signal_ends_the_writing_and_never_meets_hdf5(tmp_path, monkeypatch):
    gc.collect()  # an object of HDF5 that this thread freed would make it wait for the other, which holds the lock
    write, pwrite, stops = hdf5_file._write, os.pwrite, []

    def watched(path, pieces, compression, stop):
        stops.append(stop)
        write(path, pieces, compression, stop)

    def interrupted(file, data, offset):
        if len(data) > BLOCK_NBYTES // 2 and not stops[0].is_set():  # a chunk, the first one
            os.kill(os.getpid(), signal.SIGINT)
            assert stops[0].wait(30)
        return pwrite(file, data, offset)

    monkeypatch.setattr(hdf5_file, "_write", watched)
    monkeypatch.setattr(os, "pwrite", interrupted)
    values = np.random.default_rng(0).integers(0, 256, 20 * BLOCK_NBYTES, np.uint8)
    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "shard-00000.h5", [FilePiece("a", 0, values, "uint8")], "lzf")
    assert (tmp_path / "shard-00000.h5").stat().st_size < 15 * BLOCK_NBYTES  # 8 wait in HDF5's memory
