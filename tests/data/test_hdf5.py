import contextlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from raises import raises

from hpcdp.core import hdf5
from hpcdp.data import HDF5Dataset
from hpcdp.errors import DataError


@pytest.fixture
def values(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.random((300, 2, 3), dtype=np.float32), rng.integers(0, 10, 300)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["x"], file["y"] = x, y
        file["group/labels"] = y[:10]
        file["words"] = ["a"] * 300
        file["scalar"] = 1.0
    return tmp_path / "v.h5", x, y


INDICES = [
    3,
    np.int64(-1),
    slice(None),
    slice(250, 400),
    slice(10, 3),
    slice(1, 100, 7),
    slice(20, 2, -3),
    np.array([], np.int64),
    np.array([5]),
    np.array([7, 8, 9]),
    np.array([299, 0, 150, 0, -1]),
    np.random.default_rng(1).permutation(300)[:64],
    np.arange(300) % 3 == 0,
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_reads_what_numpy_would_index(values, index) -> None:
    path, x, y = values
    dataset = HDF5Dataset(path)
    got = dataset[index]
    np.testing.assert_array_equal(got[0], x[index])
    np.testing.assert_array_equal(got[1], y[index])
    assert got[0].dtype == np.float32 and len(dataset) == 300 and dataset.sample_shape == (2, 3)
    dataset.close()


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_numbers_of_another_machine_come_in_the_order_of_bytes_of_this_one(tmp_path, values, index) -> None:
    _, x, y = values
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"], file["y"] = x.astype(">f4"), y.astype(">i8")
    got = HDF5Dataset(tmp_path / "other.h5")[index]
    for found, expected in zip(got, (x[index], y[index]), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype.isnative and found.dtype == expected.dtype


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.uint64])
def test_indices_of_any_integers(values, dtype) -> None:
    path, x, y = values
    index = np.array([99, 3, 127, 0, 3] + ([-1, -128] if np.dtype(dtype).kind == "i" else [200]), dtype)
    got = HDF5Dataset(path)[index]
    np.testing.assert_array_equal(got[0], x[index])
    np.testing.assert_array_equal(got[1], y[index])


@pytest.mark.parametrize("read", [len, lambda dataset: dataset[0], lambda dataset: dataset[2:5]])
def test_reads_after_close_say_that_it_is_closed(values, read) -> None:
    dataset = HDF5Dataset(values[0])
    dataset.close()
    dataset.close()
    with raises(DataError, operation="read HDF5", got="closed"):
        read(dataset)


def test_opened_for_reading_only(values) -> None:
    path = values[0]
    before = path.read_bytes()
    path.chmod(0o400)
    dataset = HDF5Dataset(path)
    with pytest.raises((OSError, ValueError)):
        dataset._file.create_dataset("z", data=1)
    dataset.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("index", [300, -301, np.array([0, 300]), np.array([-301])])
def test_out_of_bounds(values, index) -> None:
    with pytest.raises(IndexError, match="out of bounds for 300"):
        HDF5Dataset(values[0])[index]


@pytest.mark.parametrize("index", [np.array([0.0, 1.5]), np.ones(299, bool), np.ones((300, 1), bool)])
def test_what_is_no_index_of_samples(values, index) -> None:
    with pytest.raises(IndexError, match=r"for 300 samples|instead of integers"):
        HDF5Dataset(values[0])[index]


@pytest.mark.parametrize(
    ("names", "got"),
    [
        (("images", "y"), "images"),
        (("group", "y"), "group"),
        (("x", "group/labels"), [300, 10]),
        (("x", "words"), "object"),
        (("x", "scalar"), ["float64", "()"]),
    ],
)
def test_faults_say_what_the_file_has(values, names, got: object) -> None:
    with raises(DataError, operation="read HDF5", got=got):
        HDF5Dataset(values[0], *names)


def test_no_hdf5_file(tmp_path: Path, values) -> None:
    with raises(DataError, operation="read HDF5", where=tmp_path / "missing.h5"):
        HDF5Dataset(tmp_path / "missing.h5")
    (tmp_path / "t.h5").write_bytes(values[0].read_bytes()[:3000])
    with raises(DataError, operation="read HDF5", where=tmp_path / "t.h5", expected="HDF5"):
        HDF5Dataset(tmp_path / "t.h5")


def test_damaged_chunks_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "c.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(1000.0), chunks=(100,), fletcher32=True)
        file["y"] = np.arange(1000)
        offset = file["x"].id.get_chunk_info(3).byte_offset
    content = bytearray(path.read_bytes())
    content[offset + 11] ^= 1
    path.write_bytes(content)
    dataset = HDF5Dataset(path)
    np.testing.assert_array_equal(dataset[:300][0], np.arange(300.0))
    with raises(DataError, operation="read HDF5", where=path):
        dataset[np.array([2, 310])]


def test_a_virtual_data_set_needs_its_files(tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((20,), "f8")
    for i in range(2):
        with h5py.File(tmp_path / f"part{i}.h5", "w") as file:
            file["x"] = np.full(10, float(i))
        layout[10 * i : 10 * i + 10] = h5py.VirtualSource(f"part{i}.h5", "x", (10,))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=-1)
        file["y"] = np.arange(20)
    assert HDF5Dataset(tmp_path / "all.h5", external=True)[:][0].sum() == 10
    with h5py.File(tmp_path / "part1.h5", "a") as file:
        file.move("x", "z")
    with raises(DataError, operation="read HDF5", where=f"{tmp_path}/all.h5:x", expected="part1.h5"):
        HDF5Dataset(tmp_path / "all.h5", external=True)
    (tmp_path / "part1.h5").unlink()
    with raises(DataError, operation="read HDF5", where=f"{tmp_path}/all.h5:x", expected="part1.h5"):
        HDF5Dataset(tmp_path / "all.h5", external=True)


def test_a_virtual_data_set_needs_what_it_shows_of_its_own_file(tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((20,), "f8")
    layout[:] = h5py.VirtualSource(".", "a%%b", (20,))
    with h5py.File(tmp_path / "own.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
        file["y"], file["a%b"] = np.arange(20), np.ones(20)
    with contextlib.closing(HDF5Dataset(tmp_path / "own.h5")) as dataset:
        assert dataset[:][0].sum() == 20
    with h5py.File(tmp_path / "own.h5", "a") as file:
        del file["a%b"]
    with raises(DataError, operation="read HDF5", where=f"{tmp_path}/own.h5:x"):
        HDF5Dataset(tmp_path / "own.h5")


def virtual(path: Path, source: Path | str) -> Path:
    """A file whose x shows 4 numbers of the data set x in another one."""
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource(source, "x", (4,))
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=-1)
        file["y"] = np.arange(4)
    return path


def test_a_virtual_data_set_finds_its_files_where_hdf5_does(tmp_path: Path, monkeypatch) -> None:
    with h5py.File(tmp_path / "s%.h5", "w") as file:
        file["x"] = np.arange(4.0)
    beside, away = virtual(tmp_path / "beside.h5", "s%%.h5"), virtual(tmp_path / "away" / "v.h5", "s%%.h5")
    moved = virtual(tmp_path / "moved.h5", tmp_path / "before" / "s%%.h5")
    (tmp_path / "away" / "link.h5").symlink_to(beside)

    def reads(path: Path) -> None:
        with contextlib.closing(HDF5Dataset(path, external=True)) as dataset:
            np.testing.assert_array_equal(dataset[:][0], np.arange(4.0))

    for path in (beside, moved, tmp_path / "away" / "link.h5"):
        reads(path)
    with raises(DataError, operation="read HDF5", where=f"{away}:x", expected="s%%.h5"):
        HDF5Dataset(away, external=True)
    monkeypatch.setenv("HDF5_VDS_PREFIX", f"/nowhere:{tmp_path}")
    reads(away)
    monkeypatch.delenv("HDF5_VDS_PREFIX")
    monkeypatch.chdir(tmp_path)
    reads(away)


def test_a_virtual_data_set_needs_what_those_that_it_shows_need(tmp_path: Path) -> None:
    inner = virtual(tmp_path / "inner.h5", "gone.h5")
    with raises(DataError, operation="read HDF5", where=f"{tmp_path}/outer.h5:x", expected="gone.h5"):
        HDF5Dataset(virtual(tmp_path / "outer.h5", inner), external=True)


def test_files_of_a_virtual_data_set_that_are_numbered_by_hdf5(tmp_path: Path) -> None:
    for part in range(2):
        with h5py.File(tmp_path / f"part-{part}.h5", "w") as file:
            file["x"] = np.arange(10.0 * part, 10.0 * part + 10)
    all_parts = h5py.h5s.create_simple((0,), (h5py.h5s.UNLIMITED,))
    all_parts.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (10,), (10,))
    shows = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    shows.set_virtual(all_parts, b"part-%b.h5", b"x", h5py.h5s.create_simple((10,)))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_DOUBLE, all_parts, shows)
        file["y"] = np.arange(20)
    with contextlib.closing(HDF5Dataset(tmp_path / "all.h5", external=True)) as dataset:
        np.testing.assert_array_equal(dataset[np.array([19, 0, 10])][0], [19, 0, 10])


def test_any_damage_is_a_data_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(hdf5, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(hdf5, "LIMIT_S", 0.3)
    path = tmp_path / "d.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(80.0).reshape(40, 2), chunks=(10, 2), compression="gzip")
        file["y"] = np.arange(40)
    whole, rng, faults = path.read_bytes(), np.random.default_rng(5), 0
    for _ in range(300):
        content = bytearray(whole)
        for place in rng.integers(0, len(whole), rng.integers(1, 30)):
            content[place] = rng.integers(256)
        path.write_bytes(content[: rng.integers(len(whole) // 2, 2 * len(whole))])
        try:
            with contextlib.closing(HDF5Dataset(path)) as dataset:  # a file that stays open is not read anew
                dataset[:4], dataset[np.array([3, 1])]
        except (DataError, IndexError):  # a damaged length may be shorter
            faults += 1
    assert faults > 100


def test_a_damaged_name_is_one_line(tmp_path):
    path = tmp_path / "set.h5"
    with h5py.File(path, "w") as file:
        file["good"], file[b"y\xff"] = np.ones(3), np.ones(3)
    with raises(DataError, operation="read HDF5", where=path):
        HDF5Dataset(path, "x")
