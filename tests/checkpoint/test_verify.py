"""Whatever is changed in a checkpoint is found, and named in one line."""

import contextlib
import fcntl
import json
import os
import shutil
import zlib

import h5py
import numpy as np
import pytest
from on_threads import restore
from raises import raises
from saved import flip, save

from hpcdp.checkpoint import manifest
from hpcdp.checkpoint.inspect import faults
from hpcdp.errors import DataError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save(tmp_path_factory.mktemp("whole"))[0]


@pytest.fixture
def path(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / whole.name)


def where(path, name):
    found = manifest.read(path)
    (part, *_) = found.tensors[name].parts
    return path / part.file, part


@pytest.mark.parametrize("how", [{}, {"compression": "gzip"}, {"shards": "node"}], ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_was_saved_is_good(how, ranks, tmp_path):
    (path,) = save(tmp_path, ranks=ranks, **how)
    told = []
    assert list(faults(path, told.append)) == []
    assert sum(told) >= manifest.read(path).nbytes


@pytest.mark.parametrize("how", [{}, {"compression": "gzip"}], ids=str)
def test_locks_of_hdf5_are_none_of_its_affairs(how, tmp_path):
    """Some file systems refuse them; here another holds them all."""
    (path,) = save(tmp_path, **how)
    with contextlib.ExitStack() as held:
        for each in path.glob("*.h5"):
            fcntl.flock(held.enter_context(open(each)), fcntl.LOCK_EX)
            with pytest.raises(OSError, match="unable to lock file"):
                h5py.File(each, locking=True)
        assert list(faults(path)) == []


def test_a_changed_element(path):
    file, part = where(path, "net/weight")
    flip(file, part.offset + part.count * 4 - 1)
    (fault,) = faults(path)
    assert fault.startswith(f"{file.name}, net/weight: expected checksum ")


def test_every_damaged_tensor_has_a_line_of_its_own(path):
    for name in ("net/weight", "net/bias", "rng/rank-1/x"):
        file, part = where(path, name)
        flip(file, part.offset)
    found = list(faults(path))
    assert len(found) == 3
    assert {fault.split(":")[0].split(", ")[1] for fault in found} == {"net/weight", "net/bias", "rng/rank-1/x"}


def test_what_hdf5_reads_beside_the_elements(path):
    flip(path / "shard-00000.h5", 8)
    (fault,) = faults(path)
    assert fault.startswith("shard-00000.h5: checksum of what is not elements")


@pytest.mark.parametrize("at", [9, -1])
def test_a_changed_index(path, at):
    index = path / "index.h5"
    flip(index, at % index.stat().st_size)
    assert any(fault.startswith("index.h5: checksum") for fault in faults(path))


def test_a_changed_manifest(path):
    flip(path / "manifest.json", 30)
    (fault,) = faults(path)
    assert fault.startswith("manifest.json: a checksum that does not fit")


@pytest.mark.parametrize("nbytes", [0, 100, 5000])
def test_a_file_that_is_too_short(path, nbytes):
    file, _ = where(path, "net/weight")
    with open(file, "r+b") as opened:
        opened.truncate(nbytes)
    found = list(faults(path))
    assert found[0].startswith(f"{file.name}: expected ")
    assert found[0].endswith(f" bytes, got {nbytes:,}")
    assert any(fault.startswith(f"{file.name}, net/weight: expected at least ") for fault in found)


def test_a_missing_shard_which_an_index_reads_as_zeros(path):
    file, _ = where(path, "net/weight")
    file.unlink()
    with h5py.File(path / "index.h5") as index:
        assert not np.any(index["net/weight"][:100])
    found = list(faults(path))
    assert found[0] == f"{file.name}: no such file or folder"
    assert f"index.h5, net/weight: shows elements of {file.name}, which is not there: they read as zeros" in found


@pytest.mark.parametrize("name", ["index.h5", "manifest.json"])
def test_a_missing_file(path, name):
    (path / name).unlink()
    assert list(faults(path)) == [f"{name}: no such file or folder"]


def test_a_manifest_that_is_a_pipe(path):
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    assert list(faults(path)) == ["manifest.json: a folder, pipe or device"]


def test_a_file_too_many(path):
    (path / "shard-00007.h5").write_bytes(b"")
    assert list(faults(path)) == ["shard-00007.h5: not a file of this checkpoint"]


def test_a_compressed_element(tmp_path):
    (path,) = save(tmp_path, ranks=1, compression="gzip")
    with h5py.File(path / "shard-00000.h5") as file:
        chunk = file["net/weight"].id.get_chunk_info(1)
    flip(path / "shard-00000.h5", chunk.byte_offset + chunk.size // 2)
    (beside,) = faults(path)  # HDF5 is not asked which element: it may follow damage for ever
    assert beside.startswith("shard-00000.h5: checksum")


def test_a_commit_file_that_is_missing(tmp_path):
    (path,) = save(tmp_path, atomic_rename=False)
    assert list(faults(path)) == []
    (path / "committed").unlink()
    assert list(faults(path)) == ["committed: no such file, so it is not complete"]


def rewritten(path, change):
    """Change the manifest, and give it the checksum of what it says then."""
    members = json.loads((path / "manifest.json").read_bytes())
    change(members)
    del members["crc32"]
    body = json.dumps(members).encode()[:-1] + b",\n"
    (path / "manifest.json").write_bytes(body + f'"crc32": "{zlib.crc32(body):08x}"}}\n'.encode())


def test_an_index_of_another_checkpoint(path, tmp_path):
    other = save(tmp_path / "other", state=lambda step, world: {"net": {"weight": np.ones((3, 2))}})[0]
    shutil.copy(other / "index.h5", path / "index.h5")
    known = {file.name: file for file in manifest.read(other).files}["index.h5"]

    def change(members):
        members["files"][-1] |= {"nbytes": known.nbytes, "crc32_beside": known.crc32_beside}

    rewritten(path, change)
    found = list(faults(path))
    assert "index.h5, net/weight: expected shape (700, 1000) float32, got (3, 2) float64" in found
    assert "index.h5, net/bias: no such data set" in found


def test_elements_that_are_elsewhere_for_hdf5(path):
    def change(members):
        members["tensors"]["net/steps"]["parts"][0]["dataset"] = "net/step"

    rewritten(path, change)
    assert any(fault.startswith("shard-0000") and fault.endswith("got no such data set") for fault in faults(path))


@pytest.mark.parametrize("name", ["net", "/", "", "net/bias/x", "a\0b"])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_elements_that_are_no_data_set_for_hdf5(name, compression, tmp_path):
    state = {"net": {"bias": np.ones(3)}}
    (path,) = save(tmp_path, ranks=1, compression=compression, state=lambda step, world: state)
    rewritten(path, lambda members: members["tensors"]["net/bias"]["parts"][0].update(dataset=name))
    found = list(faults(path))
    assert all(fault.startswith(("shard-00000.h5, ", "index.h5, net/bias: ")) for fault in found)
    assert any("no such data set" in fault for fault in found)


def test_names_with_the_characters_that_hdf5_treats_apart(tmp_path):
    state = {"a/b": np.arange(3), "100%": {"": np.arange(4), ".": np.arange(5), "%d%%b": np.arange(6)}}
    (path,) = save(tmp_path, state=lambda step, world: state)
    assert list(faults(path)) == []
    with h5py.File(path / "index.h5") as file:
        read = {name: file[name][:].tolist() for name in manifest.read(path).tensors}
    assert read == {
        "a%2Fb": [0, 1, 2], "100%25/%": [0, 1, 2, 3], "100%25/%2E": [0, 1, 2, 3, 4], "100%25/%25d%25%25b": [*range(6)],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["shard-00000.h5", "index.h5"])
def test_hdf5_does_not_open_a_file_that_is_not_as_it_was_written(name, tmp_path, monkeypatch):
    """It may follow damage for ever, in C, where no signal ends it."""
    (path,) = save(tmp_path, ranks=1, compression="gzip")
    flip(path / name, 8)
    opened, open_file = [], h5py.File

    def noted(file, *args, **settings):
        opened.append(os.path.basename(file))
        return open_file(file, *args, **settings)

    monkeypatch.setattr(h5py, "File", noted)
    (fault,) = faults(path)
    assert fault.startswith(f"{name}: checksum") and name not in opened and len(opened) > 0
    if name.startswith("shard"):
        with raises(DataError, operation="restore", where=f"{path}/shard-00000.h5, net/weight"):
            restore(tmp_path, 1)
        assert name not in opened
