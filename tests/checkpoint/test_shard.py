"""One file of a checkpoint."""

import errno
import os
import time

import h5py
import numpy as np
import pytest
from raises import raises
from samples import write_shard

from hpcdp.checkpoint.hdf5_file import BLOCK_NBYTES, FilePiece, ShardReader
from hpcdp.errors import DataError

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "F", "D", "G"]


def values_of(dtype, count):
    bits = np.random.default_rng(count).integers(0, 2 if dtype == "?" else 256, count * np.dtype(dtype).itemsize)
    return bits.astype(np.uint8).view(dtype)


def same_bits(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("compression", [None, "lzf", "gzip"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_come_back_bit_by_bit(dtype, compression, tmp_path):
    pieces = [FilePiece(f"a/{count}", 0, values_of(dtype, count), np.dtype(dtype).name) for count in (1, 7, 0, 1000)]
    stored, file = write_shard(tmp_path / "shard-00000.h5", pieces, compression)
    assert file.nbytes == (tmp_path / "shard-00000.h5").stat().st_size
    with ShardReader(tmp_path) as reader:
        for piece, each in zip(pieces, stored, strict=True):
            out = np.empty_like(piece.values)
            reader.read(each, 0, out)
            assert same_bits(out, piece.values)
    with h5py.File(tmp_path / "shard-00000.h5") as file:
        assert same_bits(file["a/1000"][...], pieces[-1].values)


@pytest.mark.parametrize("compression", [None, "lzf"])
def test_a_run_of_elements_is_read_and_no_more(compression, tmp_path):
    values = np.random.default_rng(0).standard_normal(BLOCK_NBYTES // 8 * 2 + 77)
    (stored,), _ = write_shard(tmp_path / "shard-00000.h5", [FilePiece("a", 0, values, "float64")], compression)
    block = BLOCK_NBYTES // 8
    with ShardReader(tmp_path) as reader:
        edges = [0, 1, block - 1, block, block + 1, 2 * block, values.size]
        for first in edges:
            for last in (each for each in edges if each >= first):
                around = np.full(last - first + 2, 1e9)
                reader.read(stored, first, around[1:-1])
                assert np.array_equal(around[1:-1], values[first:last]) and around[0] == around[-1] == 1e9


def test_bfloat16_has_a_mark(tmp_path):
    write_shard(tmp_path / "shard-00000.h5", [FilePiece("a", 0, np.arange(3, dtype=np.uint16), "bfloat16")])
    with h5py.File(tmp_path / "shard-00000.h5") as file:
        assert file["a"].attrs["dtype"] == "bfloat16" and file["a"].dtype == np.uint16


def test_long_data_sets_begin_on_pages(tmp_path):
    pieces = [FilePiece(name, 0, np.zeros(100_001, np.uint8), "uint8") for name in "abc"]
    stored, _ = write_shard(tmp_path / "shard-00000.h5", pieces)
    assert all(each.offset is not None and each.offset % 4096 == 0 for each in stored)


def test_no_file_is_overwritten(tmp_path):
    write_shard(tmp_path / "shard-00000.h5", [])
    with raises(DataError, operation="save", where=tmp_path / "shard-00000.h5"):
        write_shard(tmp_path / "shard-00000.h5", [])


def test_the_data_set_on_its_way_is_named(tmp_path, monkeypatch):
    def full(file, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with raises(DataError, operation="save", where=f"{tmp_path}/shard-00000.h5, layer/a"):
        write_shard(tmp_path / "shard-00000.h5", [FilePiece("layer/a", 0, np.zeros(3), "float64")])


def test_writes_may_be_short(tmp_path, monkeypatch):
    pwrite, values = os.pwrite, np.random.default_rng(0).standard_normal(1000)
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[: max(1, len(data) // 2)], offset))
    (stored,), _ = write_shard(tmp_path / "shard-00000.h5", [FilePiece("a", 0, values, "float64")])
    out = np.empty_like(values)
    with ShardReader(tmp_path) as reader:
        reader.read(stored, 0, out)
    assert np.array_equal(out, values)


@pytest.mark.parametrize("slow", ["to their place", "by the cache", "neither"])
def test_blocks_go_the_faster_way_and_are_the_same(slow, tmp_path, monkeypatch):
    values = np.random.default_rng(0).standard_normal(BLOCK_NBYTES // 8 * 40 + 5)
    (stored,), _ = write_shard(tmp_path / "shard-00000.h5", [FilePiece("a", 0, values, "float64")])
    out, at_once, read = np.zeros_like(values), [], os.preadv

    def noted(file, places, at):
        count = len(places[0])
        if slow != "neither" and (count < BLOCK_NBYTES) == (slow == "to their place"):
            time.sleep(0.002)
        at_once.append(count)
        return read(file, places, at)

    monkeypatch.setattr(os, "preadv", noted)
    with ShardReader(tmp_path) as reader:
        reader.read(stored, 3, out[3:])
    assert np.array_equal(out[3:], values[3:]) and not out[:3].any()
    later = set(at_once[-8:-2])
    if slow != "neither":
        assert later == ({BLOCK_NBYTES} if slow == "to their place" else {256 << 10})


def test_damaged_elements_do_not_reach_the_array(tmp_path):
    path, values = tmp_path / "shard-00000.h5", np.random.default_rng(0).standard_normal(BLOCK_NBYTES // 8 * 2)
    (stored,), _ = write_shard(path, [FilePiece("a", 0, values, "float64")])
    with open(path, "r+b") as file:
        file.seek(stored.offset + BLOCK_NBYTES + 8)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    out = np.zeros_like(values)
    with (
        ShardReader(tmp_path) as reader,
        raises(DataError, operation="restore", where=f"{file.name}, a", expected=["MiB", 1]),
    ):
        reader.read(stored, 0, out)
    assert np.array_equal(out[: BLOCK_NBYTES // 8], values[: BLOCK_NBYTES // 8])
    assert not out[BLOCK_NBYTES // 8 :].any()


@pytest.mark.parametrize("compression", ["lzf", "gzip"])
def test_damage_of_what_is_compressed_names_file_and_data_set(compression, tmp_path):
    path, out = tmp_path / "shard-00000.h5", np.empty(5000)
    values = np.random.default_rng(0).random(5000)
    (stored,), _ = write_shard(path, [FilePiece("net/w", 0, values, "float64")], compression)
    good = path.read_bytes()
    for at in (0, 875, len(good) - 1000):  # the file's own, a group's, a chunk's
        path.write_bytes(good[:at] + bytes([good[at] ^ 64]) + good[at + 1 :])
        with ShardReader(tmp_path) as reader, pytest.raises(DataError) as caught:
            reader.read(stored, 0, out)
        said = f"restore [{path}, net/w]: expected an undamaged data set, got an error of HDF5: "
        assert str(caught.value).startswith(said) and "'" not in str(caught.value).removeprefix(said).replace("n't", "")


@pytest.mark.parametrize("compression", [None, "lzf"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(compression, tmp_path):
    path = tmp_path / "shard-00000.h5"
    (stored,), _ = write_shard(path, [FilePiece("a", 0, np.zeros(3), "float64")], compression)
    path.unlink()
    os.mkfifo(path)
    with ShardReader(tmp_path) as reader, raises(DataError, operation="restore", where=f"{path}, a"):
        reader.read(stored, 0, np.zeros(3))
